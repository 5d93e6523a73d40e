"""Each rule yields its own sentence for its defect, and nothing for a healthy cluster."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lockstep.doctor.analysis import analyse
from lockstep.doctor.facts import (
    ClusterFacts,
    DataFolder,
    NameFact,
    OwnPort,
    PeerReport,
    Shared,
    Visit,
    read_shared,
    read_visits,
    shared_to_json,
    visits_to_json,
)
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.machine import MachineFacts, Roots, cuda_of_torch, look_at_data, look_at_machine, read_nvidia_smi
from lockstep.doctor.needs import PARAMETERS, needs_of
from lockstep.doctor.rules_machine import MachineRequirements, machine_findings, rdma_findings
from lockstep.doctor.rules_time import Story, without_early_refusals
from lockstep.protocol.core.ids import Role, server, worker
from lockstep.protocol.core.messages import Setting
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.startup.start_facts import StartFacts, list_difference, read_start_facts
from lockstep.transports.verbs.devices import RdmaFacts, RdmaPort, RdmaRoots, look_for_rdma

GIB = 1 << 30
PLENTY = MachineFacts(
    open_files=65536, locked_memory=-1, shm_free=64 * GIB, memory_available=64 * GIB, cpus=8, torch="2.13.0+cpu"
)
NEEDS = needs_of((Role.SERVER, Role.WORKER), 1, 2, "resnet50", "imagenet")


def start(task: str, settings: dict[str, str] | None = None, **changes: object) -> StartFacts:
    facts = StartFacts(
        task,
        ("10.0.0.1:1000",),
        ("10.0.0.1:2000", "10.0.0.2:2000"),
        "1.0",
        tuple(Setting(name, value) for name, value in (settings or {"model": "a"}).items()),
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def visit(visitor: object, host: object, answer: Reach, **more: object) -> Visit:
    seen = Visit(str(visitor), str(host), "10.0.0.2:2000", answer, task=str(host) if answer is Reach.LOCKSTEP else "")
    return dataclasses.replace(seen, **more)  # type: ignore[arg-type]


def sentences(case: ClusterFacts) -> list[str]:
    return [finding.sentence for finding in analyse(case)]


PS0, W0, W1 = server(0), worker(0), worker(1)
OWN = (start(str(PS0)),)


@pytest.mark.parametrize(
    ("facts", "asked", "text"),
    [
        ({"open_files": 40}, {}, "may open only 40 files here"),
        ({"locked_memory": 65536}, {"protocol": "grpc+verbs"}, "may lock only 64 KiB of memory here"),
        ({"shm_free": 1 << 20}, {"protocol": "grpc+shm"}, "/dev/shm has only 1 MiB free"),
        ({"memory_limit": 64 << 20}, {}, "may use only 64 MiB of memory"),
        ({"memory_available": 64 << 20}, {}, "only 64 MiB of memory is available"),
        ({"cpus": 0.5}, {}, "may use only 0.5 of a CPU"),
        ({"tasks_left": 3}, {}, "may start only 3 more processes and threads"),
        ({}, {"device": "gpu"}, "asks for more GPUs than the 0 that this machine shows; give --device=cpu"),
        ({"gpus_present": 2}, {"device": "gpu"}, "CUDA_VISIBLE_DEVICES hides 2"),
        ({"gpus_present": 2, "gpus_visible": 2}, {}, "is a build without CUDA"),
        ({"torch": "2.13.0+cu130", "torch_cuda": "13.0", "driver_cuda": "12.4"}, {}, "is built for CUDA 13.0"),
        ({"torch": ""}, {}, "torch is not installed"),
        ({"disk_free": 1024}, {"train_dir": "/x"}, "--train_dir=/x is on a disk with only 1 KiB free"),
    ],
)
def test_each_lack_of_a_machine_has_its_sentence(facts: dict[str, object], asked: dict[str, object], text: str) -> None:
    lacking = dataclasses.replace(PLENTY, **facts)  # type: ignore[arg-type]
    found = machine_findings(lacking, MachineRequirements(**asked), NEEDS)  # type: ignore[arg-type]
    assert [finding for finding in found if text in finding.sentence], found
    assert len(found) == 1


@pytest.mark.parametrize("protocol", ["grpc", "auto", "grpc+shm", "grpc+ucx"])
def test_a_good_machine_has_no_finding(protocol: str) -> None:
    assert machine_findings(PLENTY, MachineRequirements(protocol=protocol), NEEDS) == []
    assert rdma_findings(RdmaFacts(), protocol) == []


def test_too_little_locked_memory_matters_for_rdma_only() -> None:
    tight = dataclasses.replace(PLENTY, locked_memory=65536)
    assert machine_findings(tight, MachineRequirements(protocol="grpc"), NEEDS) == []


GOOD_PORT = RdmaPort("mlx5_0", 1, "ACTIVE", "InfiniBand", "mlx5", ("fe80:0000:0000:0000:0000:0000:0000:0001",))
GOOD_RDMA = RdmaFacts((GOOD_PORT,), 1, ("mlx5", "rxe"), ("mlx5",), "/usr/lib64/libibverbs.so.1")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ports": ()}, "/sys/class/infiniband shows none"),
        ({"ports": (dataclasses.replace(GOOD_PORT, state="DOWN"),)}, "mlx5_0 port 1 is DOWN"),
        ({"device_files": 0}, "no /dev/infiniband/uverbs file"),
        ({"ports": (dataclasses.replace(GOOD_PORT, gids=()),)}, "has no GID"),
        ({"bundled_providers": ("mlx4",), "providers": ("rxe",)}, "libibverbs has no provider mlx5"),
        ({"bundled_providers": None}, "needs NIXL, which is not installed"),
        ({"bundled_providers": ("mlx4",), "system_verbs": ""}, "there is no libibverbs.so.1 on this machine"),
    ],
)
def test_each_lack_of_rdma_has_its_sentence(change: dict[str, object], text: str) -> None:
    found = rdma_findings(dataclasses.replace(GOOD_RDMA, **change), "grpc+verbs")  # type: ignore[arg-type]
    assert [finding for finding in found if text in finding.sentence], found
    assert len(found) == 1
    assert rdma_findings(GOOD_RDMA, "grpc+verbs") == []


def test_rdma_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    port = tmp_path / "sys" / "rxe0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:5054:00ff:fe12:3456\n")
    (port / "gids" / "1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    (tmp_path / "providers").mkdir()
    (tmp_path / "providers" / "librxe-rdmav34.so").touch()
    (tmp_path / "packages" / "nixl_cu12.libs").mkdir(parents=True)
    (tmp_path / "packages" / "nixl_cu12.libs" / "libmlx5-79ef.so.1").touch()
    roots = RdmaRoots(tmp_path / "sys", tmp_path / "dev", (tmp_path / "providers",), tmp_path / "packages")
    found = look_for_rdma(roots)
    assert found.ports == (
        RdmaPort("rxe0", 1, "ACTIVE", "Ethernet", "rxe", ("fe80:0000:0000:0000:5054:00ff:fe12:3456",), (0,)),
    )
    assert (found.device_files, found.providers, found.bundled_providers) == (1, ("rxe",), ("mlx5",))
    assert "no libibverbs.so.1 on this machine" in rdma_findings(found, "grpc+verbs")[0].sentence
    (tmp_path / "libibverbs.so.1").touch()
    assert rdma_findings(look_for_rdma(roots), "grpc+verbs") == []


def test_limits_of_control_groups_are_read(tmp_path: Path) -> None:
    own = tmp_path / "cgroup" / "pod" / "job"
    own.mkdir(parents=True)
    (tmp_path / "cgroup" / "pod" / "memory.max").write_text("104857600\n")
    (own / "memory.max").write_text("max\n")
    (own / "cpu.max").write_text("50000 100000\n")
    (own / "pids.max").write_text("100\n")
    (own / "pids.current").write_text("90\n")
    (tmp_path / "self").write_text("0::/pod/job\n")
    facts = look_at_machine(None, None, Roots(tmp_path / "cgroup", tmp_path / "self"), quick=True)
    assert (facts.memory_limit, facts.cpus, facts.tasks_left) == (104857600, 0.5, 10)


def test_cuda_versions_are_read() -> None:
    assert cuda_of_torch("2.13.0+cu126", []) == "12.6"
    assert cuda_of_torch("2.13.0+cpu", ["nvidia-cuda-runtime-cu12==12.6.77"]) == ""
    assert cuda_of_torch("2.13.0", ["nvidia-cuda-runtime-cu12==12.6.77; platform_system == 'Linux'"]) == "12.6"
    assert cuda_of_torch("2.13.0", ["cuda-toolkit[cublas]==13.0.2"]) == "13.0"
    assert read_nvidia_smi("CUDA Version   : 12.4\n\nAttached GPUs    : 8\nGPU 0...") == (8, "12.4")


def test_the_parameters_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    imagenet = text.partition("## ImageNet")[2].partition("## CIFAR")[0]
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\|[^|]*\|[^|]*\| ([\d,]+) \|", imagenet, re.MULTILINE)
    assert {("imagenet", name): int(number.replace(",", "")) for name, number in rows} == dict(PARAMETERS)


def test_a_healthy_cluster_has_no_finding() -> None:
    visits = tuple(visit(a, b, Reach.LOCKSTEP, phase="doctor") for a in (PS0, W0, W1) for b in (PS0, W0, W1) if a != b)
    reports = tuple(PeerReport(str(task), "h", True, start(str(task)), Shared()) for task in (W0, W1))
    assert analyse(ClusterFacts(own=OWN, protocol="grpc", visits=visits, reports=reports)) == []


def test_a_missing_task_is_a_defect_only_once_others_are_up() -> None:
    refused = visit(PS0, W1, Reach.REFUSED)
    alone = analyse(ClusterFacts(own=OWN, protocol="grpc", visits=(refused,)))
    assert [finding.keeps_from_working for finding in alone] == [False]
    assert "nothing listens at 10.0.0.2:2000 (worker 1) yet" in alone[0].sentence
    there = visit(PS0, W0, Reach.LOCKSTEP)
    assert "worker 1 is missing" in sentences(ClusterFacts(own=OWN, protocol="grpc", visits=(refused, there)))[0]


def test_the_direction_in_which_packets_are_lost_is_named() -> None:
    visits = (visit(PS0, W1, Reach.LOCKSTEP), visit(W1, PS0, Reach.SILENT))
    found = sentences(ClusterFacts(own=OWN, protocol="grpc", visits=visits))
    assert found == [
        "worker 1 does not reach ps 0 at 10.0.0.2:2000, although ps 0 reaches worker 1: a firewall drops "
        "connections from worker 1 to ps 0; allow TCP in that direction."
    ]


@pytest.mark.parametrize(
    ("seen", "cause", "text"),
    [
        (
            visit(PS0, W1, Reach.LOCKSTEP, task=str(W0), process="process 7 on b"),
            FindingKind.WRONG_TASK,
            "but is worker 0",
        ),
        (visit(PS0, W1, Reach.OTHER_PROGRAM, words="is X"), FindingKind.OTHER_PROGRAM, "the address of worker 1, is X"),
        (
            visit(PS0, W1, Reach.OTHER_KEY, words="has a key"),
            FindingKind.OTHER_KEY,
            "the address of worker 1, has a key.",
        ),
        (visit(PS0, W1, Reach.INSECURE, words="is open"), FindingKind.OTHER_KEY, "is open."),
        (visit(PS0, W1, Reach.MUTE, words="is mute"), FindingKind.OTHER_PROGRAM, "is mute"),
        (visit(PS0, W1, Reach.NO_ROUTE, words="is away"), FindingKind.NO_ANSWER, "cannot be reached from ps 0"),
        (visit(PS0, W1, Reach.LOCKSTEP, other_port="x: silence"), FindingKind.OTHER_PORTS, "but not at other ports"),
    ],
)
def test_what_answers_instead_is_named(seen: Visit, cause: FindingKind, text: str) -> None:
    (found,) = analyse(ClusterFacts(own=OWN, protocol="grpc", visits=(seen,)))
    assert found.kind is cause
    assert text in found.sentence


def test_a_task_of_an_earlier_job_is_named() -> None:
    old = visit(W0, PS0, Reach.LOCKSTEP, job=7, phase="training", phase_seconds=86400.0, process="process 9 on a")
    new = visit(W0, W1, Reach.LOCKSTEP, phase="connecting")
    (found,) = analyse(ClusterFacts(own=(start(str(W0)),), protocol="grpc", visits=(old, new)))
    assert found.kind is FindingKind.OLD_JOB
    assert "ps 0 at 10.0.0.2:2000 already belongs to job 0000000000000007" in found.sentence


def test_a_lost_task_that_a_running_job_waits_for_is_to_be_started_again() -> None:
    """Nobody is told to end that job."""
    job = {"job": 7, "phase": "training", "phase_seconds": 60.0, "process": "process 9 on a"}
    chief = visit(W1, W0, Reach.LOCKSTEP, **job)
    ports = (OwnPort(str(W1), "10.0.0.2:2000"),)
    for lost, kind, remedy in (
        ((), FindingKind.OLD_JOB, "if that is an earlier job, end it."),
        ((str(W1),), FindingKind.LOST_TASK, "start the same command again for worker 1, and the job goes on."),
    ):
        seen = (visit(W1, PS0, Reach.LOCKSTEP, waits_for=lost, **job), chief)
        (found,) = analyse(ClusterFacts(own=(start(str(W1)),), protocol="grpc", visits=seen, ports=ports))
        assert found.kind is kind
        assert found.sentence.endswith(remedy)
        assert found.keeps_from_working is (kind is FindingKind.OLD_JOB)


def test_the_odd_one_out_is_named_for_each_setting() -> None:
    reports = (
        PeerReport(str(W0), "h", True, start(str(W0))),
        PeerReport(str(W1), "h", True, start(str(W1), {"model": "b"}, version="2.0")),
    )
    assert sentences(ClusterFacts(own=OWN, protocol="grpc", reports=reports)) == [
        "worker 1 has lockstep version=2.0, ps 0, worker 0 have lockstep version=1.0; install the same version "
        "everywhere.",
        "worker 1 has model=b, ps 0, worker 0 have model=a; start all tasks with the same value.",
    ]


@pytest.mark.parametrize(("seed", "found"), [("7", 0), ("8", 1)])
def test_a_seed_is_compared_between_workers_only(seed: str, found: int) -> None:
    own = (start(str(PS0), {"seed": "1234"}),)
    reports = (
        PeerReport(str(W0), "h", True, start(str(W0), {"seed": "7"})),
        PeerReport(str(W1), "h", True, start(str(W1), {"seed": seed})),
    )
    said = ["worker 0 has seed=7, worker 1 has seed=8; start all tasks with the same value."]
    assert sentences(ClusterFacts(own=own, protocol="grpc", reports=reports)) == said[:found]


def test_a_clock_that_is_wrong_is_a_note() -> None:
    report = PeerReport(str(W1), "b", True, start(str(W1)), clock_ahead=-300.0, clock_doubt=0.1)
    (found,) = analyse(ClusterFacts(own=OWN, protocol="grpc", reports=(report,)))
    assert "the clock of worker 1 (b) is 300 s behind the clock here" in found.sentence
    assert not found.keeps_from_working
    unsure = dataclasses.replace(report, clock_ahead=3.0, clock_doubt=1.5)
    assert analyse(ClusterFacts(own=OWN, protocol="grpc", reports=(unsure,))) == []


def test_different_data_and_fabrics_are_named(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    here = look_at_data(str(tmp_path))
    (tmp_path / "two").write_text("2")
    there = look_at_data(str(tmp_path))
    assert look_at_data(str(tmp_path / "none")).problem == "No such file or directory"
    ethernet = dataclasses.replace(GOOD_PORT, link_layer="Ethernet")
    report = PeerReport(str(W1), "b", True, shared=Shared((ethernet,), there))
    found = sentences(
        ClusterFacts(own=(start(str(W0)),), protocol="grpc+verbs", shared=Shared((GOOD_PORT,), here), reports=(report,))
    )
    assert "no fabric connects this machine to worker 1" in found[0]
    assert "on worker 0 has 1 entries" in found[1]
    other_subnet = dataclasses.replace(GOOD_PORT, gids=("fec0:0000:0000:0001:0000:0000:0000:0001",))
    report = PeerReport(str(W1), "b", True, shared=Shared((other_subnet,)))
    case = ClusterFacts(own=OWN, protocol="grpc+verbs", shared=Shared((GOOD_PORT,)), reports=(report,))
    assert "are in different subnets" in sentences(case)[0]


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (NameFact(str(W1), "nodeb", problem="Name or service not known"), "does not resolve on this machine"),
        (NameFact(str(W1), "nodeb", ("127.0.1.1",), loopback=True), "resolves to 127.0.1.1 here"),
        (NameFact(str(W1), "nodeb", ("fd00::1",), only_ipv6=True), "only to the IPv6 address fd00::1"),
    ],
)
def test_names_that_lead_nowhere_are_named(fact: NameFact, text: str) -> None:
    (found,) = sentences(ClusterFacts(own=OWN, protocol="grpc", names=(fact,)))
    assert text in found


def test_lists_are_compared_by_what_they_mean() -> None:
    one = start(str(PS0))
    assert list_difference(one, start(str(W0), ps_hosts=("10.0.0.1:1000",))) is None
    assert list_difference(one, start(str(W0), ps_hosts=("nodea:1000",))) is None
    assert list_difference(one, start(str(W0), ps_hosts=("nodea:1001",))) is not None


def test_what_others_report_is_read_back_and_anything_else_refused() -> None:
    shared = Shared((GOOD_PORT,), DataFolder("/d", 3, "abc"), (DoctorFinding(FindingKind.LIMIT, "too small", False),))
    assert read_shared(shared_to_json(shared)) == shared
    visits = (visit(PS0, W1, Reach.REFUSED, words="w"),)
    assert read_visits(visits_to_json(visits)) == visits
    assert read_start_facts(start(str(W1)).to_json()) == start(str(W1))
    for nonsense in (None, 3, "x", [], {}, {"rdma": 3}, [{"visitor": 1}], {"task": "no task"}):
        assert read_shared(nonsense) is None
        assert read_visits(nonsense) == ()
        assert read_start_facts(nonsense) is None


def test_a_refusal_from_before_a_task_was_up_does_not_count() -> None:
    reached, refused = visit(PS0, W1, Reach.LOCKSTEP), visit(W0, W1, Reach.REFUSED)
    up, since = Story(10.0, (reached,)), {str(W1): 8.0}
    assert without_early_refusals([up, Story(9.0, (refused,))], {}) == [reached]
    assert without_early_refusals([up, Story(10.5, (refused,))], {}) == [reached]
    assert without_early_refusals([up, Story(10.5, (refused,), age=0.0)], {}) == [reached, refused]
    assert without_early_refusals([up, Story(11.5, (refused,))], {}) == [reached, refused]
    assert without_early_refusals([up, Story(10.5, (refused,))], since) == [reached, refused]
    assert without_early_refusals([Story(9.0, (refused,))], {}) == [refused]
