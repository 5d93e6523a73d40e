"""``lockstep.join``: how your script becomes a task of a cluster.

Besides ``cli`` this is the only place that passes the environment on: torchrun, srun or mpirun starts the script, not a
command of ours. Reading what they left there is a pure function in ``library/launcher.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, BadInput
from lockstep.library.below_run import introduced, life_of
from lockstep.library.carrier import carrier_of, make_node
from lockstep.library.comparing import join_compared
from lockstep.library.engine_cluster import as_tf_config_says
from lockstep.library.launcher import Launch, launched_by, worker_variables
from lockstep.library.meeting import find_store, gather
from lockstep.library.node_config import node_config
from lockstep.library.serving import SERVER_DEVICES, StoreChoice, refuse_missing_gpu, serve
from lockstep.library.settings import (
    BACKENDS,
    ON_NAN,
    OWN,
    TORCH,
    Exchange,
    Keeping,
    exchange_problems,
    keeping_problems,
    replica_problems,
    shape_problems,
    who_trains,
)
from lockstep.protocol.core.endings import ON_NAN_PARAMETERS
from lockstep.protocol.core.ids import CHIEF, Role, TaskId
from lockstep.protocol.core.timing import (
    GRACE_SECONDS,
    REJOIN_SECONDS,
    STALL_AFTER_SECONDS,
    STARTUP_SECONDS,
    USER_CODE_SECONDS,
)
from lockstep.runtime.compared import compared_run
from lockstep.runtime.monitor.door import ALL_VARIABLE, RunLink, run_link
from lockstep.runtime.monitor.sidecar import SidecarError, start_sidecar
from lockstep.runtime.phrases import ask_with
from lockstep.runtime.startup.cluster import DEFAULT_PROTOCOL, ON_STALL, ClusterSpec, cluster_problems
from lockstep.runtime.startup.metrics_options import MetricsOptions
from lockstep.runtime.startup.own_name import with_own_address
from lockstep.runtime.startup.pages import Pages
from lockstep.runtime.startup.preflight import protocol_problems
from lockstep.runtime.task.failures import told_to_monitor
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import Outcome
from lockstep.runtime.task.signals import TaskSignals
from lockstep.security.chosen import choose, settle
from lockstep.terminal import say
from lockstep.transports.control.addresses import Address
from lockstep.transports.control.ports import ReservedPort
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.library.job import Job
    from lockstep.library.training_way import JobOptions
    from lockstep.runtime.monitor.sidecar import Sidecar

P = ParamSpec("P")
Given = TypeVar("Given")
Result = TypeVar("Result")

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinArguments:
    """The keyword arguments of ``lockstep.join``, which ``lockstep ps`` has as flags; docs/library.md explains each."""

    ps_hosts: Sequence[str] = ()
    worker_hosts: Sequence[str] = ()
    job_name: str = ""
    task_index: int = 0
    servers: int | None = None
    address: str | None = None
    server_protocol: str = DEFAULT_PROTOCOL
    synchronous: bool = True
    reduction: str = "mean"
    replicas_to_aggregate: int | None = None
    backend: str | None = None
    on_nan: str = "report"
    on_nan_parameters: str = "stop"
    bucket_mb: float | None = None
    wire_dtype: str = "float32"
    device: str = "cpu"
    startup_timeout: float = STARTUP_SECONDS
    stall_after: float = STALL_AFTER_SECONDS
    user_code_timeout: float = USER_CODE_SECONDS
    on_stall: str = "abort"
    on_verdict: str | None = None
    verdict_webhook: str | None = None
    metrics_port: int | str | None = None
    metrics_file: str | None = None
    bind: str | None = None
    ports: str | None = None
    require_private: bool = False
    key_file: str | None = None
    insecure: bool = False
    rdma: RdmaOptions = NO_OPTIONS
    train_dir: str | None = None
    save_model_secs: float = 0
    save_model_steps: int | None = None
    max_ckpts_to_keep: int = 5
    from_scratch: bool = False
    on_worker_loss: str | None = None
    server_replicas: int = 0
    rejoin_timeout: float = REJOIN_SECONDS
    grace: float = GRACE_SECONDS

    @property
    def launched(self) -> bool:
        """Whether a launcher assigns the roles."""
        return not self.job_name

    @property
    def keeping(self) -> Keeping:
        return Keeping(
            train_dir=self.train_dir or "",
            save_model_secs=float(self.save_model_secs),
            save_model_steps=self.save_model_steps or 0,
            max_ckpts_to_keep=self.max_ckpts_to_keep,
            from_scratch=self.from_scratch,
            on_worker_loss=self.on_worker_loss or "",
        )

    @property
    def exchange(self) -> Exchange:
        return Exchange(
            synchronous=self.synchronous,
            reduction=self.reduction,
            replicas_to_aggregate=self.replicas_to_aggregate,
            wire_dtype=self.wire_dtype,
        )

    @property
    def serving(self) -> StoreChoice:
        return StoreChoice(device=self.device, wire_dtype=self.wire_dtype)

    def spec(self) -> ClusterSpec:
        """The cluster, without the task that this process is."""
        return ClusterSpec(
            ps_hosts=tuple(self.ps_hosts),
            worker_hosts=tuple(self.worker_hosts),
            protocol=self.server_protocol,
            bind=self.bind,
            ports=self.ports,
            require_private=self.require_private,
            startup_timeout=self.startup_timeout,
            stall_after=self.stall_after,
            user_code_timeout=self.user_code_timeout,
            on_stall=self.on_stall,
            pages=Pages(self.on_verdict or "", self.verdict_webhook or ""),
            metrics=MetricsOptions(str(self.metrics_port or ""), self.metrics_file or ""),
            rejoin_timeout=self.rejoin_timeout,
            grace=self.grace,
            server_replicas=self.server_replicas,
            rdma=self.rdma,
            has_servers=self.has_servers,
        )

    @property
    def has_servers(self) -> bool:
        """Whether servers hold the parameters; otherwise every rank trains."""
        if self.job_name:
            return bool(self.ps_hosts) or self.job_name == Role.SERVER
        return bool(self.servers)


def _takes(given: Callable[P, Given]) -> Callable[[Callable[[Given], Result]], Callable[P, Result]]:
    """Let a function take, one by one, what its only parameter is made of: each option is written once."""

    def decorate(function: Callable[[Given], Result]) -> Callable[P, Result]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(given).replace(return_annotation=returns)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(given(*args, **kwargs))

        call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        call.__annotations__["return"] = returns
        call.__signature__ = signature  # type: ignore[attr-defined]
        del call.__wrapped__
        return call

    return decorate


@_takes(JoinArguments)
def join(arguments: JoinArguments) -> Job:
    """Become one task of a cluster. Blocks until all tasks have joined, ``startup_timeout`` seconds at most.

    ``ps_hosts``, ``worker_hosts``, ``job_name`` and ``task_index`` describe the cluster, as the flags of that name do;
    without them it is the one in TF_CONFIG, or what torchrun, srun or mpirun started, where every rank trains; with
    ``servers`` the first ones serve. A process that nobody started this way is a job of one rank. In a process that
    serves, this call does not return: it serves until the job has ended and then exits.

    Returns the job, to be used in a ``with`` block or closed. Raises BadInput if the request cannot be met (a script
    that does not catch it ends with the explanation and exit code 2), and JobEndedError if the cluster did not form.
    """
    try:
        if (run := compared_run(os.environ)) is not None:
            return join_compared(run, arguments, join_with)
        return join_with(arguments, os.environ)
    except BadInput:
        _end_with_the_sentence()
        raise


def _end_with_the_sentence() -> None:
    """Make a script that does not catch ``BadInput`` end as a command does: with its sentences and exit code 2."""
    otherwise = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, BadInput):
            otherwise(kind, error, trace)
            return
        for sentence in error.sentences:
            say(sentence)
        raise SystemExit(EXIT_BAD_INPUT)

    sys.excepthook = end


def join_with(arguments: JoinArguments, environ: Mapping[str, str]) -> Job:
    """``join`` with a given environment."""
    arguments = as_tf_config_says(arguments, environ)
    _refuse_bad_choices(arguments)
    choose(arguments.key_file, arguments.insecure)
    settle(say)
    with contextlib.ExitStack() as until_listening:
        link = run_link(environ)
        launch = _launch(arguments, environ)
        if launch is not None and launch.again and arguments.from_scratch:
            arguments = dataclasses.replace(arguments, from_scratch=False)  # it was so when the job began
        cluster = with_own_address(_cluster(arguments, launch, link, until_listening), environ, say)
        carrier = "" if cluster.shape.servers else carrier_of(arguments.backend)
        cluster = dataclasses.replace(cluster, carried_by_torch=carrier == TORCH)
        bare = arguments.launched and link is None
        refuse_bad_cluster(cluster, arguments, launched=bare)
        _refuse(protocol_problems(cluster))
        if cluster.task == CHIEF:
            say(who_trains(cluster.shape))
        config = node_config(
            cluster,
            arguments.exchange,
            arguments.keeping,
            launched=bare,
            carrier=carrier,
            life=life_of(link, can_be_told=arguments.launched or not cluster.shape.servers or ALL_VARIABLE in environ),
            server_device=arguments.device,
        )
        assert cluster.task is not None
        serves = cluster.task.role is Role.SERVER
        if serves:
            refuse_missing_gpu(arguments.serving)
        signals = TaskSignals(cluster.task, say, cluster.grace, interrupts_others=serves)
        signals.install(only_defaults=True)
        sidecar = _start_sidecar(cluster, signals) if link is None else introduced(link, config, signals)
    if cluster.task == CHIEF:  # on one task only: where people look
        say(ask_with(cluster.address_of(CHIEF)))
    signals.on_forced = sidecar.reporter.ended
    if serves:
        _serve_and_leave(config, arguments.serving, sidecar, signals)
    if launch is not None and cluster.shape.servers:
        os.environ.update(worker_variables(os.environ, launch.launcher, cluster.worker_hosts, cluster.task.index))
    from lockstep.library.training_way import JobOptions

    asked = arguments.bucket_mb
    options = JobOptions(
        on_nan=arguments.on_nan,
        on_nan_parameters=arguments.on_nan_parameters,
        bucket_bytes=None if asked is None else round(asked * MEBIBYTE),
        wire_dtype=arguments.wire_dtype,
        backend=None if carrier == OWN else arguments.backend,
        find_store=None if launch is None else lambda job, port: find_store(cluster, launch, job, port),
    )
    return _join_as_worker(config, sidecar, options, signals, carrier)


def _start_sidecar(cluster: ClusterSpec, signals: TaskSignals) -> Sidecar:
    assert cluster.task is not None
    listen = cluster.listen_address()
    try:
        return start_sidecar(
            cluster.task,
            listen.host,
            listen.port,
            __version__,
            cluster=cluster.all_addresses(),
            metrics=cluster.metrics,
        )
    except SidecarError as error:
        signals.close()
        raise BadInput(str(error)) from None


def refuse_bad_cluster(cluster: ClusterSpec, arguments: JoinArguments, *, launched: bool = False) -> None:
    """BadInput has one sentence per choice that this cluster cannot have.

    ``launched``: by a launcher, without ``lockstep run``.
    """
    workers, servers = cluster.shape.workers, cluster.shape.servers
    problems = list(exchange_problems(arguments.exchange, workers, servers, by_torch=cluster.carried_by_torch))
    problems += shape_problems(arguments.device, arguments.backend, servers)
    problems += keeping_problems(arguments.keeping, arguments.exchange, workers, launched=launched, servers=servers)
    if arguments.server_replicas and servers:
        problems += replica_problems(arguments.exchange, workers)
    _refuse(cluster_problems(cluster) + problems)


def _refuse_bad_choices(arguments: JoinArguments) -> None:
    sentences = []
    if arguments.on_nan not in ON_NAN:
        sentences.append(f"on_nan={arguments.on_nan!r} is not known; use one of: {', '.join(ON_NAN)}.")
    if (chosen := arguments.on_nan_parameters) not in ON_NAN_PARAMETERS:
        sentences.append(f"on_nan_parameters={chosen!r} is not known; use one of: {', '.join(ON_NAN_PARAMETERS)}.")
    sentences += _bucket_problems(arguments.bucket_mb)
    if arguments.device not in SERVER_DEVICES:
        sentences.append(f"device={arguments.device!r} is not known; use one of: {', '.join(SERVER_DEVICES)}.")
    if arguments.on_stall not in ON_STALL:
        sentences.append(f"on_stall={arguments.on_stall!r} is not known; use one of: {', '.join(ON_STALL)}.")
    if arguments.backend not in (None, *BACKENDS):
        sentences.append(f"backend={arguments.backend!r} is not known; use one of: {', '.join(BACKENDS)}.")
    if arguments.servers is not None and arguments.servers < 0:
        sentences.append(f"servers={arguments.servers} is negative; give the number of ranks that serve.")
    if arguments.job_name not in ("", "ps", "worker"):
        sentences.append(f"job_name={arguments.job_name!r} is not known; use 'ps' or 'worker'.")
    if bool(arguments.job_name) != bool(arguments.ps_hosts or arguments.worker_hosts):
        sentences.append("job_name, ps_hosts and worker_hosts belong together; give all of them, or none.")
    _refuse(sentences)


def _bucket_problems(bucket_mb: float | None) -> Iterator[str]:
    nbytes = MEBIBYTE if bucket_mb is None else bucket_mb * MEBIBYTE
    if not math.isfinite(nbytes) or nbytes < 64 or round(nbytes) % 64:
        yield f"bucket_mb={bucket_mb:g} is not a whole number of 64-byte lines; give, for example, 4, or omit it."


def _refuse(sentences: Sequence[str]) -> None:
    if sentences:
        raise BadInput(sentences)


# -- where the cluster is --


def _launch(arguments: JoinArguments, environ: Mapping[str, str]) -> Launch | None:
    """What a launcher started; None: the cluster is given, or this process is alone."""
    if arguments.job_name:
        return None
    spec = arguments.spec()
    _refuse(cluster_problems(spec))
    return launched_by(environ, arguments.address, None if spec.second_ports is None else spec.second_ports.agreed)


def _cluster(
    arguments: JoinArguments, launch: Launch | None, link: RunLink | None, until_listening: contextlib.ExitStack
) -> ClusterSpec:
    """``until_listening`` keeps the port that this process announces to the others; under ``lockstep run``, that does
    so, over all lives."""
    spec = arguments.spec()
    if arguments.job_name:
        return spec.for_task(TaskId(Role(arguments.job_name), arguments.task_index))
    if launch is None and arguments.servers:
        raise BadInput(
            f"servers={arguments.servers} was given, but nobody started more processes than this one; start it with "
            "torchrun, srun or mpirun, give lockstep.join() ps_hosts, worker_hosts, job_name and task_index, or omit "
            "servers to train in this process alone."
        )
    if link is None:
        port = until_listening.enter_context(ReservedPort("", spec.second_ports)).port
    else:
        port = link.reserve(spec.second_ports)
    if launch is None:
        return spec.with_hosts((), (str(Address("127.0.0.1", port)),)).for_task(CHIEF)
    return gather(spec, launch, link, arguments.servers or 0, port)


# -- the two roles --


def _serve_and_leave(
    config: NodeConfig, serving: StoreChoice, sidecar: Sidecar | RunLink, signals: TaskSignals
) -> None:
    """Serve until the job has ended, then exit: the lines after the call are for workers."""
    outcome = Outcome(False)
    try:
        outcome = serve(config, serving, sidecar.reporter, signals)
    finally:
        sidecar.close(outcome.exit_code(EXIT_FAILED))
    # 0 even if the last version is in no checkpoint, which was reported: the workers have the model, and a launcher
    # that sees one process fail ends them all before they have saved it.
    raise SystemExit(outcome.exit_code(EXIT_FAILED))


def _join_as_worker(
    config: NodeConfig, sidecar: Sidecar | RunLink, options: JobOptions, signals: TaskSignals, carrier: str
) -> Job:
    from lockstep.library.atexit import ExitWitness, close_before_threads_end, end_with_the_report
    from lockstep.library.job import Job

    config = dataclasses.replace(config, give_up=lambda outcome: os._exit(outcome.exit_code(EXIT_FAILED)))
    node = make_node(config, sidecar.reporter, carrier, options)
    signals.attach(node)
    end_with_the_report()
    exits = ExitWitness()
    exits.install()

    def leave() -> None:
        failed = exits.code or EXIT_FAILED
        sidecar.close(failed if node.outcome is None else node.outcome.exit_code(failed))
        signals.close()

    try:
        with told_to_monitor(sidecar.reporter):
            node.start()
            node.wait_until_member()
    except BaseException:
        node.close()
        leave()
        raise
    job = Job(node, options, say, leave, exits)
    close_before_threads_end(job)
    return job
