"""The fast part of ``lockstep doctor``, run at every start: the limits of this machine, and what is worth knowing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.benchmark.settings.config import BenchConfig, recovery_rules
from lockstep.doctor.finding import DoctorFinding
from lockstep.doctor.host import JobRequirements, look_at_limits
from lockstep.doctor.place import engine_of
from lockstep.protocol.core.ids import CHIEF, ClusterShape, Role
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.ports import parse_ports
from lockstep.transports.verbs.checks import gpudirect_problems
from lockstep.transports.verbs.options import NO_OPTIONS

_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def job_of(config: BenchConfig, environ: Mapping[str, str], data_dir: str | None = None) -> JobRequirements:
    """What a run requires of the machines."""
    local, cluster = config.local, config.cluster
    shape = ClusterShape(0, 1) if cluster is None else cluster.shape
    return JobRequirements(
        shape=shape if local is None else ClusterShape(local.servers, local.workers),
        protocol="" if cluster is None else cluster.protocol,
        device=config.devices.device,
        num_gpus=config.devices.num_gpus,
        model=config.model,
        data_name=config.data_name,
        train_dir=config.output.train_dir,
        data_dir=data_dir,
        rdma=NO_OPTIONS if cluster is None else cluster.rdma,
        visible_gpus=environ.get("CUDA_VISIBLE_DEVICES"),
        engine=engine_of(environ),
    )


def limits_of_machine(config: BenchConfig, environ: Mapping[str, str]) -> list[DoctorFinding]:
    """Limits that are too small for the tasks that are about to start here; takes no time."""
    job = job_of(config, environ)
    tasks = (config.task,) if config.task is not None else job.shape.tasks()
    return look_at_limits(job, tasks)


def gpudirect_limits(config: BenchConfig) -> list[str]:
    """What prevents a worker from using ``--rdma_gpudirect``; a server needs no GPU for it."""
    if config.cluster is None or not config.cluster.rdma.gpudirect:
        return []
    if config.devices.device == "cpu":
        return ["--rdma_gpudirect is for GPU memory; leave it out with --device=cpu."]
    if config.task is not None and config.task.role is Role.SERVER:
        return []
    return list(gpudirect_problems(config.cluster.rdma))


def start_notices(config: BenchConfig, environ: Mapping[str, str]) -> list[str]:
    """Sentences about what does not prevent the start."""
    sentences = [one.sentence for one in limits_of_machine(config, environ) if not one.keeps_from_working]
    names = proxies(environ)
    if names and _leaves_this_machine(config):
        from lockstep.doctor.analysis import proxy_sentence  # here, because most starts do not need the analysis

        sentences.append(proxy_sentence(names))
    if _ports_of_its_own(config):
        sentences.append(
            "gloo and NCCL choose their ports themselves, not from --ports (docs/security.md says what to set instead)"
        )
    if (loss := _what_a_loss_means(config)) is not None:
        sentences.append(loss)
    return sentences


def _ports_of_its_own(config: BenchConfig) -> bool:
    """Printed once: whether the kernel may give gloo and NCCL ports outside the range."""
    told_here = config.local is not None or config.task == CHIEF
    if not told_here or config.cluster is None or config.cluster.ports is None or not config.exchange.is_collective:
        return False
    ports = parse_ports(config.cluster.ports)
    first, last = map(int, _KERNEL_PORTS.read_text().split())
    return not ports.first <= first <= last <= ports.last


def _what_a_loss_means(config: BenchConfig) -> str | None:
    """Printed once, where people look: by the launcher of a local cluster, or by the chief."""
    if config.cluster is None or config.exchange.is_collective or (config.local is None and config.task != CHIEF):
        return None
    output, saves = config.output, bool(config.output.save_model_secs or config.output.save_model_steps)
    if config.local is not None and not config.cluster.restarts:
        return None  # a person at this machine sees it end, and nothing restarts a task
    if not config.exchange.cross_replica_sync:
        return (
            "the loss of any task ends the job: without synchronisation (--cross_replica_sync=False) there is no "
            "common step to go back to (docs/recovery.md)"
        )
    if config.cluster.server_replicas:
        return None  # the loss of one server is survived; what comes after that is said then
    if not recovery_rules(config).returns:
        return "without --train_dir the loss of a server ends the job (docs/recovery.md)"
    if not saves:
        return (
            f"a checkpoint is written to {output.train_dir} only at the end: the loss of a server sends the job back "
            "to its beginning; add --save_model_secs or --save_model_steps"
        )
    return None


def proxies(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The proxy variables that are set."""
    return tuple(name for name in environ if name.lower() in PROXY_VARIABLES and environ[name])


def _leaves_this_machine(config: BenchConfig) -> bool:
    if config.cluster is None:
        return False
    hosts = [parse_address(text) for text in config.cluster.ps_hosts + config.cluster.worker_hosts]
    return not all(host.literal is not None and host.literal.is_loopback for host in hosts)
