"""What is wrong with this machine, from facts alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.machine import UNLIMITED, MachineFacts
from lockstep.doctor.needs import Needs, size
from lockstep.doctor.place import ClusterEngine
from lockstep.doctor.rules_engine import GRANTS, GrantRemedies
from lockstep.transports.verbs.checks import LEAST_LOCKED_BYTES, device_problems
from lockstep.transports.verbs.devices import RdmaFacts
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions

SHM_PROTOCOLS = ("grpc+shm", "auto")
NIXL_PROTOCOLS = ("grpc+ucx", "grpc+verbs")
VERBS = "grpc+verbs"
_THREADS_OF_A_TASK = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequirements:
    """What the job requires of this machine."""

    protocol: str = "grpc"
    device: str = "auto"
    num_gpus: int = 1
    trains: bool = True
    """Whether a worker runs here; servers do not use a GPU."""
    tasks: int = 1
    train_dir: str | None = None
    engine: ClusterEngine = ClusterEngine.NONE

    @property
    def grants(self) -> GrantRemedies:
        return GRANTS[self.engine]


Rule = Callable[[MachineFacts, MachineRequirements, Needs], Iterator[DoctorFinding]]


def machine_findings(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> list[DoctorFinding]:
    """What is wrong with its limits, GPUs, torch and disk."""
    return [finding for rule in _RULES for finding in rule(facts, asked, needs)]


def limit_findings(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> list[DoctorFinding]:
    """The same as far as it takes no time to find out; checked at every start of a task."""
    quick: tuple[Rule, ...] = (_open_files, _more_locked_memory, _shared_memory, _memory, _disk)
    return [finding for rule in quick for finding in rule(facts, asked, needs)]


def _below(granted: int, needed: int) -> bool:
    return granted != UNLIMITED and granted < needed


def _open_files(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:  # noqa: ARG001
    if _below(facts.open_files, needs.open_files):
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"a process may open only {facts.open_files} files here, but a task of this cluster needs about "
            f"{needs.open_files}; raise the limit, for example with 'ulimit -n 4096'.",
        )


def _locked_memory(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:
    if asked.protocol in NIXL_PROTOCOLS and _below(facts.locked_memory, max(needs.locked_memory, LEAST_LOCKED_BYTES)):
        needed = size(max(needs.locked_memory, LEAST_LOCKED_BYTES))
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"a process may lock only {size(facts.locked_memory)} of memory here, but {asked.protocol} registers about "
            f"{needed} with the network device; {asked.grants.locked_memory}.",
            asked.protocol == VERBS,
        )


def _more_locked_memory(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:
    """Where it is too little for any model, ``grpc+verbs`` itself reports that when a task starts."""
    if asked.protocol != VERBS or facts.locked_memory >= LEAST_LOCKED_BYTES:
        yield from _locked_memory(facts, asked, needs)


def _shared_memory(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:
    if asked.protocol in SHM_PROTOCOLS and facts.shm_free is not None and facts.shm_free < needs.shared_memory:
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"/dev/shm has only {size(facts.shm_free)} free, but the tasks of this machine share about "
            f"{size(needs.shared_memory)} in it; {asked.grants.shared_memory}, or use --server_protocol=grpc.",
            asked.protocol != "auto",
        )


def _memory(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:
    tasks = "the task on this machine needs" if asked.tasks == 1 else f"the {asked.tasks} tasks on this machine need"
    if _below(facts.memory_limit, needs.memory):
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"the control group (cgroup) of this process may use only {size(facts.memory_limit)} of memory, but "
            f"{tasks} at least {size(needs.memory)}; {asked.grants.memory}.",
        )
    elif facts.memory_available is not None and facts.memory_available < needs.memory:
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"only {size(facts.memory_available)} of memory is available, but {tasks} at least {size(needs.memory)}; "
            "end other programs, or use a smaller model.",
            False,
        )


def _processors(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:  # noqa: ARG001
    if facts.cpus < 1:
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"the control group (cgroup) of this process may use only {facts.cpus:g} of a CPU, which makes everything "
            "slow; raise its limit.",
            False,
        )
    if _below(facts.tasks_left, _THREADS_OF_A_TASK * asked.tasks):
        yield DoctorFinding(
            FindingKind.LIMIT,
            f"the control group (cgroup) of this process may start only {max(facts.tasks_left, 0)} more processes and "
            f"threads, but its tasks need about {_THREADS_OF_A_TASK * asked.tasks}; {asked.grants.processes}.",
        )


def _gpus(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:  # noqa: ARG001
    if not asked.trains or asked.device == "cpu":
        return
    must = asked.device == "gpu"
    if must and facts.gpus_visible < asked.num_gpus:
        hidden = facts.gpus_present - facts.gpus_visible
        why = f" (CUDA_VISIBLE_DEVICES hides {hidden})" if hidden else ""
        shown = "correct CUDA_VISIBLE_DEVICES, or " if hidden else ""
        remedy = f"{asked.grants.gpus}, or give --device=cpu" if asked.grants.gpus else f"{shown}give --device=cpu"
        yield DoctorFinding(
            FindingKind.GPU,
            f"--device=gpu --num_gpus={asked.num_gpus} asks for more GPUs than the {facts.gpus_visible} that this "
            f"machine shows{why}; {remedy}.",
        )
    if facts.gpus_visible and facts.torch and not facts.torch_cuda:
        yield DoctorFinding(
            FindingKind.GPU,
            f"torch {facts.torch} is a build without CUDA, although this machine shows {facts.gpus_visible} GPUs; "
            "install a build with CUDA, or give --device=cpu.",
            must,
        )
    if facts.torch_cuda and facts.driver_cuda and _major(facts.torch_cuda) > _major(facts.driver_cuda):
        yield DoctorFinding(
            FindingKind.GPU,
            f"torch {facts.torch} is built for CUDA {facts.torch_cuda}, but the driver here supports CUDA only up to "
            f"{facts.driver_cuda}; update the driver, or install a torch build for CUDA {_major(facts.driver_cuda)}.",
            must,
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _torch(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:  # noqa: ARG001
    if not facts.torch:
        yield DoctorFinding(
            FindingKind.VERSION, "torch is not installed for this Python; install it with 'pip install torch'."
        )


def _disk(facts: MachineFacts, asked: MachineRequirements, needs: Needs) -> Iterator[DoctorFinding]:
    if asked.train_dir is not None and facts.disk_free is not None and facts.disk_free < needs.disk:
        yield DoctorFinding(
            FindingKind.FOLDER,
            f"--train_dir={asked.train_dir} is on a disk with only {size(facts.disk_free)} free, but the run writes at "
            f"least {size(needs.disk)}; free some space, or give another folder.",
        )


_RULES: tuple[Rule, ...] = (_open_files, _locked_memory, _shared_memory, _memory, _processors, _gpus, _torch, _disk)


def rdma_findings(rdma: RdmaFacts, protocol: str, options: RdmaOptions = NO_OPTIONS) -> list[DoctorFinding]:
    """Why ``grpc+verbs`` would not work on this machine; nothing for other protocols."""
    return (
        [DoctorFinding(FindingKind.RDMA, sentence) for sentence in device_problems(rdma, options)]
        if protocol == VERBS
        else []
    )
