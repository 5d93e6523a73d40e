"""What all tasks of a library job must agree on, servers included. Torch-free: a server starts without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.ids import ClusterShape, JobId
from lockstep.protocol.core.messages import Setting
from lockstep.protocol.core.setting_names import LOCKSTEP_VERSION, SERVER_DEVICE, SERVERS, TORCH_VERSION, WORKERS
from lockstep.protocol.core.timing import GRACE_SECONDS
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.version import __version__, torch_version

REDUCTIONS = ("mean", "sum")
WIRE_DTYPES = ("float32", "bfloat16")
"""How gradients are sent: as they are, or in 16 bits. Not float16: what is too large for it would become
infinite on its way, behind the check for infinity."""
OWN, TORCH = "own", "torch.distributed"
BACKENDS = (OWN, "nccl", "gloo")
"""What may carry the gradients of ranks: our own transports, or torch.distributed."""
ON_NAN = ("report", "skip", "stop")
"""What to do with a step in which a gradient contains NaN or infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How the gradients of all workers are combined into one step."""

    synchronous: bool = True
    reduction: str = "mean"
    replicas_to_aggregate: int | None = None
    wire_dtype: str = "float32"

    def aggregate(self, workers: int) -> int | None:
        """None if every worker contributes to every step."""
        return None if self.replicas_to_aggregate in (None, workers) else self.replicas_to_aggregate


def exchange_problems(exchange: Exchange, workers: int, servers: int = 1, *, by_torch: bool = False) -> Iterator[str]:
    """What is wrong with this choice, one sentence per problem. ``by_torch``: torch.distributed carries gradients."""
    if not servers:
        yield from _needing_servers(exchange)
    count = exchange.replicas_to_aggregate
    if exchange.reduction not in REDUCTIONS:
        yield f"reduction={exchange.reduction!r} is not known; use one of: {', '.join(REDUCTIONS)}."
    if exchange.wire_dtype not in WIRE_DTYPES:
        yield f"wire_dtype={exchange.wire_dtype!r} is not known here; use one of: {', '.join(WIRE_DTYPES)}."
    elif by_torch and exchange.wire_dtype != WIRE_DTYPES[0]:
        yield (
            f"wire_dtype={exchange.wire_dtype!r} is not possible where gloo or NCCL carries the gradients: they add up "
            "in the type that they send; omit it, give servers=1 (with a launcher) or ps_hosts, or train on CPUs with "
            "backend='own'."
        )
    if count is not None and not 1 <= count <= workers:
        yield (
            f"replicas_to_aggregate={count} is not possible with {workers} workers; give a number from 1 to {workers}."
        )
    if count is not None and not exchange.synchronous:
        yield "replicas_to_aggregate only applies to synchronous training; omit it when training asynchronously."
    if exchange.reduction == "sum" and not exchange.synchronous:
        yield "asynchronous training applies each gradient on its own; omit reduction='sum'."


def _needing_servers(exchange: Exchange) -> Iterator[str]:
    """What only servers can do: where every rank trains, each step is the mean of all."""
    if not exchange.synchronous:
        yield _needs_servers("synchronous=False")
    if exchange.replicas_to_aggregate is not None:
        yield _needs_servers("replicas_to_aggregate")
    if exchange.reduction == "sum":
        yield _needs_servers("reduction='sum'")


def _needs_servers(what: str) -> str:
    remedy = "give servers=1 (with a launcher) or ps_hosts, or omit it"
    return f"{what} needs servers, and every rank trains in this job; {remedy}."


def shape_problems(device: str, backend: str | None, servers: int) -> Iterator[str]:
    """Options that the other shape of a job has, one sentence per problem. ``device``: where servers update."""
    if device != "cpu" and not servers:
        yield _needs_servers(f"device={device!r}")
    if backend is not None and servers:
        yield (
            f"backend={backend!r} chooses what carries gradients where every rank trains, and this job has servers; "
            "omit it, or omit servers and ps_hosts."
        )


ON_WORKER_LOSS = (LossPolicy.WAIT.value, LossPolicy.ABORT.value)
"""What your own program may ask for; only the benchmark can continue without a worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """What a job writes to disk, and what it does when it loses a worker."""

    train_dir: str = ""
    save_model_secs: float = 0.0
    save_model_steps: int = 0
    max_ckpts_to_keep: int = 5
    from_scratch: bool = False
    """Begin at step 0; whatever ``train_dir`` holds is set aside."""
    on_worker_loss: str = ""
    """Empty: wait for the worker if it can come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """What starts this process again after a loss, and what was before it."""

    can_be_told: bool = False
    """All tasks of this job are programs: ``lockstep run`` is above all of them or above none."""
    restarted: bool = False
    """``lockstep run`` is above this one."""
    later: bool = False
    """There was a former life, which may have begun the job from scratch."""
    finished: bool = False
    """It had made all its steps."""
    former_job: JobId = 0
    """The job that it was in; 0: none."""

    @property
    def everybody_restarts(self) -> bool:
        return self.can_be_told and self.restarted


FIRST_LIFE = Life()


def _why_no_recovery(exchange: Exchange, workers: int, *, launched: bool, servers: int = 1, carrier: str = "") -> str:
    """Why a lost worker cannot rejoin such a job; empty if it can."""
    if carrier == TORCH and not launched:
        return "gloo or NCCL carries the gradients, and neither takes a lost rank back into its group"
    if not servers and not launched:
        return "without servers, a lost rank comes back only below 'lockstep run', which starts it again"
    if not exchange.synchronous:
        return "asynchronous training has no common step to go back to"
    if exchange.aggregate(workers) is not None:
        return "with backup workers (replicas_to_aggregate), steps may have completed without this worker"
    if launched:
        return "a launcher ends every rank when one dies, unless it starts 'lockstep run -- python' instead of python"
    return ""


def keeping_problems(
    keeping: Keeping, exchange: Exchange, workers: int, *, launched: bool, servers: int = 1
) -> Iterator[str]:
    """What is wrong with this choice, one sentence per problem."""
    lost = keeping.on_worker_loss
    why = _why_no_recovery(exchange, workers, launched=launched, servers=servers)
    if lost not in ("", *ON_WORKER_LOSS):
        yield f"on_worker_loss={lost!r} is not known here; use one of: {', '.join(ON_WORKER_LOSS)}."
    elif lost == LossPolicy.WAIT and why:
        yield f"on_worker_loss='wait' is not possible: {why}; omit it, and the loss of a worker ends the job."
    if keeping.train_dir and (why := _why_no_recovery(exchange, workers, launched=False)):
        yield f"train_dir={keeping.train_dir!r} cannot be used: {why}; omit it and save the model yourself."
    if (keeping.save_model_secs or keeping.save_model_steps) and not keeping.train_dir:
        yield "save_model_secs and save_model_steps set how often to save, but not where; add train_dir."
    if keeping.from_scratch and not keeping.train_dir:
        yield "from_scratch sets aside what train_dir holds; add train_dir, or omit from_scratch."
    if keeping.save_model_secs and keeping.save_model_steps:
        yield "save_model_secs and save_model_steps cannot both be given; choose one."
    if min(keeping.save_model_secs, keeping.save_model_steps, keeping.max_ckpts_to_keep) < 0:
        yield "save_model_secs, save_model_steps and max_ckpts_to_keep must not be negative; give 0 or more."


def replica_problems(exchange: Exchange, workers: int) -> Iterator[str]:
    """What servers with second homes need and this job does not have, one sentence per problem."""
    if not exchange.synchronous:
        yield (
            "server_replicas=1 needs steps that all workers make together; omit synchronous=False (the flag "
            "--cross_replica_sync=False)."
        )
    if exchange.aggregate(workers) is not None:
        yield "server_replicas=1 needs all workers in every step; omit replicas_to_aggregate."


def recovery_rules(
    keeping: Keeping,
    exchange: Exchange,
    workers: int,
    rejoin_seconds: float,
    *,
    launched: bool,
    servers: int = 1,
    grace_seconds: float = GRACE_SECONDS,
    goes_back: bool = False,
    server_replicas: int = 0,
    ranks_return: bool = False,
) -> RecoveryRules:
    """What a library job does about lost workers and checkpoints. The loss of a server, or of a rank without servers,
    ends it, unless ``goes_back`` (all tasks are started again) and there is a ``train_dir``, another server holds what
    it held (``server_replicas``), or ``ranks_return``."""
    why = _why_no_recovery(exchange, workers, launched=launched, servers=servers)
    policy = LossPolicy(keeping.on_worker_loss or (LossPolicy.ABORT if why else LossPolicy.WAIT))
    return RecoveryRules(
        on_worker_loss=policy,
        rejoin_seconds=rejoin_seconds,
        grace_seconds=grace_seconds,
        save_steps=keeping.save_model_steps,
        save_seconds=keeping.save_model_secs,
        saves_last=bool(keeping.train_dir),
        ranks_return=ranks_return and not servers and workers > 1 and keeping.on_worker_loss != LossPolicy.ABORT,
        returns=goes_back and bool(keeping.train_dir) and keeping.on_worker_loss != LossPolicy.ABORT,
        server_replicas=server_replicas,
    )


def loss_notice(
    rules: RecoveryRules, exchange: Exchange, workers: int, *, launched: bool, servers: int = 1, carrier: str = ""
) -> str:
    """What the chief prints at the start about losing a worker; empty if the job goes on after that."""
    if rules.takes_back or rules.ranks_return or (rules.returns and not servers):
        return ""
    why = _why_no_recovery(exchange, workers, launched=launched, servers=servers, carrier=carrier)
    hint = _hint(rules, launched=launched)
    return f"the loss of a worker ends this job: {why or 'on_worker_loss is abort'}{hint} (docs/recovery.md)"


def _hint(rules: RecoveryRules, *, launched: bool) -> str:
    """What a job that a loss has ended does when it is started again."""
    again = "; started again (by torchrun with --max-restarts, for example)" if launched else "; started again"
    if rules.saves_last:
        return f"{again}, it resumes from the newest checkpoint"
    return f"{again}, it begins at step 0: there is no train_dir" if launched else ""


def who_trains(shape: ClusterShape) -> str:
    """The first thing that the chief prints: how many ranks do what."""
    trains = "1 rank trains" if shape.workers == 1 else f"{shape.workers} ranks train"
    return f"{trains}, {shape.servers} {'serves' if shape.servers == 1 else 'serve'}"


def library_settings(
    cluster: ClusterSpec,
    exchange: Exchange,
    rules: RecoveryRules,
    carrier: str = "",
    life: Life = FIRST_LIFE,
    server_device: str = "cpu",
) -> tuple[Setting, ...]:
    """These are compared when a task joins; the first that differs is named."""
    shape = cluster.shape
    values: dict[str, object] = {
        LOCKSTEP_VERSION: __version__,
        TORCH_VERSION: torch_version(),
        "program": "your own program (lockstep.join, lockstep ps)",
        SERVERS: shape.servers,
        WORKERS: shape.workers,
        "server_protocol": cluster.protocol,
        "cross_replica_sync": exchange.synchronous,
        "reduction": exchange.reduction,
        "replicas_to_aggregate": exchange.replicas_to_aggregate or shape.workers,
        "wire_dtype": exchange.wire_dtype,
        "on_worker_loss": rules.on_worker_loss.value,
        "server_replicas": rules.server_replicas,
        "train_dir": "given" if rules.saves_last else "not given",
    }
    if rules.server_replicas and cluster.task in shape.server_ids():
        values[SERVER_DEVICE] = server_device
    if carrier:
        values["backend"] = carrier
    if life.can_be_told:
        values["started by lockstep run"] = "yes" if life.restarted else "no"
    return tuple(Setting(name, str(value)) for name, value in values.items())
