"""Which tasks are in the cluster, and what can be wrong with such a description.

A ``ClusterSpec`` is plain data: the host lists, which of the tasks this one is, and how long it waits for others. It is
torch-free, so that the monitor can read it before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.protocol.coordinator.recovery import LossPolicy
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId
from lockstep.protocol.core.timing import (
    GRACE_SECONDS,
    REJOIN_SECONDS,
    STALL_AFTER_SECONDS,
    STARTUP_SECONDS,
    USER_CODE_SECONDS,
)
from lockstep.runtime.startup.metrics_options import NO_METRICS, MetricsOptions, metrics_problems
from lockstep.runtime.startup.pages import NO_PAGES, Pages, page_problems
from lockstep.security.chosen import is_insecure
from lockstep.transports.control.addresses import Address, AddressError, parse_address, parse_bind
from lockstep.transports.control.ports import PortRange, parse_ports
from lockstep.transports.registry import in_the_clear
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions, option_problems

PROTOCOLS: tuple[str, ...] = ("auto", "grpc", "grpc+tcp", "grpc+shm", "grpc+ucx", "grpc+verbs")
"""The values of ``--server_protocol``. A new transport adds its name here and nowhere else."""

RDMA_PROTOCOLS: tuple[str, ...] = ("auto", "grpc+verbs")

DEFAULT_PROTOCOL = "auto"

ON_STALL = ("report", "abort")
ON_WORKER_LOSS = tuple(policy.value for policy in LossPolicy)
MAX_RESTARTS = 1000
MAX_SPARES = 64

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """The whole cluster as one task sees it.

    ``task`` is None and the host lists are empty until a local cluster has its ports.
    """

    ps_hosts: tuple[str, ...] = ()
    worker_hosts: tuple[str, ...] = ()
    task: TaskId | None = None
    protocol: str = DEFAULT_PROTOCOL
    bind: str | None = None
    """Host, or host:port, to listen on instead of the task's own address in the list."""
    ports: str | None = None
    """``FIRST-LAST``: where tasks listen besides their listed ports; None: at ports that the kernel chooses."""
    require_private: bool = False
    """Encrypt tensors between hosts too, and refuse whatever others on the network could read."""
    startup_timeout: float = STARTUP_SECONDS
    stall_after: float = STALL_AFTER_SECONDS
    user_code_timeout: float = USER_CODE_SECONDS
    """How long the training program of a worker may wait, or loop, in one step."""
    rejoin_timeout: float = REJOIN_SECONDS
    grace: float = GRACE_SECONDS
    """How long a job may take, after SIGTERM, to finish its step and to save it."""
    on_stall: str = "abort"
    """What happens after a stall, or a verdict from which the job cannot recover: ``report`` or ``abort``."""
    pages: Pages = NO_PAGES
    """Who is called when a verdict is printed."""
    metrics: MetricsOptions = NO_METRICS
    """Where the monitor of this task shows its metrics."""
    on_worker_loss: str = LossPolicy.WAIT.value
    """What the job does when a worker is lost: wait for it, continue without it, or end."""
    server_replicas: int = 0
    """How many second homes each server's shard has on other servers: 0 or 1."""
    restarts: int = 0
    """How often a monitor starts its task again after a signal killed it."""
    spares: int = 0
    """How many processes wait to take the place of a lost task: for a cluster on this machine, or for one task."""
    has_servers: bool = True
    """False: the workers reduce among themselves, and the list of servers stays empty."""
    carried_by_torch: bool = False
    """Gradients travel inside torch.distributed and not over our transports."""
    rdma: RdmaOptions = NO_OPTIONS

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(servers=len(self.ps_hosts), workers=len(self.worker_hosts))

    def hosts_of(self, role: Role) -> tuple[str, ...]:
        return self.ps_hosts if role is Role.SERVER else self.worker_hosts

    def address_of(self, task: TaskId) -> str:
        """``host:port`` at which this task can be reached; KeyError if the lists have no such task."""
        hosts = self.hosts_of(task.role)
        if not 0 <= task.index < len(hosts):
            raise KeyError(f"{task} is not in a cluster of {self.shape}")
        return hosts[task.index]

    def listen_address(self) -> Address:
        """Where this task listens: ``bind`` if given, else its own address. KeyError if no task is given."""
        if self.task is None:
            raise KeyError("this description does not name a task, so there is no address to listen on")
        own = parse_address(self.address_of(self.task))
        return own if self.bind is None else parse_bind(self.bind, own.port)

    @property
    def second_ports(self) -> PortRange | None:
        """The ports of ``ports`` that no task of the lists has; None: the kernel chooses."""
        if self.ports is None:
            return None
        listed = (parse_address(text).port for text in self.ps_hosts + self.worker_hosts)
        return parse_ports(self.ports).without(frozenset(listed))

    def all_addresses(self) -> tuple[tuple[str, str], ...]:
        """The full name of every task, with the address at which it can be reached."""
        return tuple((str(task), self.address_of(task)) for task in self.shape.tasks())

    @property
    def on_one_host(self) -> bool:
        """Whether all tasks are on one host, judging by their addresses."""
        hosts = {address.rpartition(":")[0] for _, address in self.all_addresses()}
        return len(hosts) == 1 or hosts <= _LOOPBACK

    @property
    def shares_memory(self) -> bool:
        """Whether all tasks may share the memory of one host."""
        return self.protocol in ("auto", "grpc+shm") and self.on_one_host

    def beside_own_task(self, role: Role) -> int:
        """How many tasks of a role are on this task's host, judging by their addresses; 1 if no task is given."""
        if self.task is None or self.task.index >= len(self.hosts_of(self.task.role)):
            return 1
        own = self.address_of(self.task).rpartition(":")[0]
        return sum(address.rpartition(":")[0] == own for address in self.hosts_of(role))

    def for_task(self, task: TaskId) -> ClusterSpec:
        """The same cluster as another of its tasks sees it."""
        return dataclasses.replace(self, task=task)

    def with_hosts(self, ps_hosts: tuple[str, ...], worker_hosts: tuple[str, ...]) -> ClusterSpec:
        """The same settings with other addresses."""
        return dataclasses.replace(self, ps_hosts=ps_hosts, worker_hosts=worker_hosts)


def cluster_problems(spec: ClusterSpec) -> list[str]:
    """Everything that is wrong with the description of one task's cluster, one sentence each. Asks no other machine."""
    return [sentence for rule in CLUSTER_RULES for sentence in rule(spec)]


def _hosts_are_given(spec: ClusterSpec) -> Iterator[str]:
    if spec.task is None:
        return
    needed = Role if spec.has_servers else (Role.WORKER,)
    missing = [_list_flag(role) for role in needed if not spec.hosts_of(role)]
    if missing:
        lists = " and ".join(f"{flag}=HOST:PORT,..." for flag in missing)
        yield f"--job_name={spec.task.role} needs the addresses of all tasks; add {lists}, the same on every task."


def _index_is_in_range(spec: ClusterSpec) -> Iterator[str]:
    if spec.task is None:
        return
    count = len(spec.hosts_of(spec.task.role))
    if count and not 0 <= spec.task.index < count:
        flag = _list_flag(spec.task.role)
        known = "only --task_index=0 exists" if count == 1 else f"use --task_index=0 to {count - 1}"
        plural = "address" if count == 1 else "addresses"
        yield f"--task_index={spec.task.index} is out of range: {flag} has {count} {plural}, so {known}."


def _addresses_are_well_formed(spec: ClusterSpec) -> Iterator[str]:
    for role in Role:
        for position, text in enumerate(spec.hosts_of(role)):
            try:
                address = parse_address(text)
            except AddressError as error:
                yield f"{_list_flag(role)}, entry {position}: {error}"
                continue
            if address.is_wildcard:
                yield (
                    f"{_list_flag(role)}, entry {position}: other tasks cannot connect to {text}; "
                    f"give the address of that host there, and add --bind={address.host} on that task."
                )


def _addresses_differ(spec: ClusterSpec) -> Iterator[str]:
    seen: dict[tuple[str, int], TaskId] = {}
    for role in Role:
        for index, text in enumerate(spec.hosts_of(role)):
            try:
                place = parse_address(text).same_place()
            except AddressError:
                continue
            task = TaskId(role, index)
            if place in seen:
                first = seen[place].short
                yield f"{text} is given for both {first} and {task.short}; give each task its own port."
            seen.setdefault(place, task)


def _protocol_is_known(spec: ClusterSpec) -> Iterator[str]:
    if spec.protocol not in PROTOCOLS:
        yield f"--server_protocol={spec.protocol} is not known; use one of: {', '.join(PROTOCOLS)}."


def _rdma_options_make_sense(spec: ClusterSpec) -> Iterator[str]:
    yield from option_problems(spec.rdma)
    if spec.rdma != NO_OPTIONS and spec.protocol not in RDMA_PROTOCOLS:
        yield (
            f"--rdma_... has no effect with --server_protocol={spec.protocol}; leave it out, or use "
            "--server_protocol=grpc+verbs."
        )


def _bind_is_well_formed(spec: ClusterSpec) -> Iterator[str]:
    if spec.bind is None:
        return
    try:
        parse_bind(spec.bind, default_port=1)
    except AddressError as error:
        yield f"--bind: {error}"


def _ports_are_well_formed(spec: ClusterSpec) -> Iterator[str]:
    if spec.ports is None:
        return
    try:
        parse_ports(spec.ports)
    except AddressError as error:
        yield f"--ports: {error}"
        return
    with contextlib.suppress(AddressError):  # of a list, which another rule reports
        if not any(spec.second_ports or ()):
            yield f"--ports={spec.ports} has no port besides those in the host lists; give a larger range."


def _bytes_are_private(spec: ClusterSpec) -> Iterator[str]:
    if not spec.require_private or (spec.on_one_host and not in_the_clear(spec.protocol)):
        return
    if spec.carried_by_torch:
        yield (
            "--require_private refuses all-reduce by torch.distributed across hosts: gloo and NCCL cannot encrypt; use "
            "--variable_update=parameter_server, or backend='own' in your own program."
        )
    elif in_the_clear(spec.protocol):
        yield f"--require_private refuses --server_protocol={spec.protocol}, which cannot encrypt; use auto or grpc."
    elif is_insecure():
        yield "--require_private and --insecure exclude each other; leave one of them out."


def _patience_is_positive(spec: ClusterSpec) -> Iterator[str]:
    for name in ("startup_timeout", "stall_after", "user_code_timeout", "rejoin_timeout", "grace"):
        seconds = getattr(spec, name)
        if seconds <= 0:
            yield f"--{name}={seconds:g} leaves no time; give more than 0 seconds."


def _restarts_are_few(spec: ClusterSpec) -> Iterator[str]:
    if not 0 <= spec.restarts <= MAX_RESTARTS:
        yield f"--restarts={spec.restarts} is out of range; give a number from 0 to {MAX_RESTARTS}."


def _spares_have_a_use(spec: ClusterSpec) -> Iterator[str]:
    yield from spare_problems(spec.spares, spec.restarts)


def spare_problems(spares: int, restarts: int) -> Iterator[str]:
    """What is wrong with ``--spares`` beside ``--restarts``."""
    if not 0 <= spares <= MAX_SPARES:
        yield f"--spares={spares} is out of range; give a number from 0 to {MAX_SPARES}."
    elif spares and not restarts:
        yield f"--spares={spares} has no use without restarts: no lost task is replaced; give --restarts=N too."


def _loss_policy_is_known(spec: ClusterSpec) -> Iterator[str]:
    if spec.on_worker_loss not in ON_WORKER_LOSS:
        yield f"--on_worker_loss={spec.on_worker_loss} is not known; use one of: {', '.join(ON_WORKER_LOSS)}."


def _replicas_have_a_place(spec: ClusterSpec) -> Iterator[str]:
    if spec.server_replicas not in (0, 1):
        yield f"--server_replicas={spec.server_replicas} is out of range; give 0 or 1."
    elif spec.server_replicas and not spec.has_servers:
        yield "--server_replicas=1 needs servers, and this mode has none; leave it out."
    elif spec.server_replicas and len(spec.ps_hosts) == 1:
        yield "--server_replicas=1 needs a second server to hold what the first one holds; give two, or leave it out."


def _list_flag(role: Role) -> str:
    return f"--{role.value}_hosts"


def _pages_can_be_sent(spec: ClusterSpec) -> Iterator[str]:
    yield from page_problems(spec.pages)


def _metrics_can_be_shown(spec: ClusterSpec) -> Iterator[str]:
    yield from metrics_problems(spec.metrics)


CLUSTER_RULES: tuple[Callable[[ClusterSpec], Iterator[str]], ...] = (
    _hosts_are_given,
    _index_is_in_range,
    _addresses_are_well_formed,
    _addresses_differ,
    _protocol_is_known,
    _rdma_options_make_sense,
    _bind_is_well_formed,
    _ports_are_well_formed,
    _bytes_are_private,
    _patience_is_positive,
    _restarts_are_few,
    _spares_have_a_use,
    _loss_policy_is_known,
    _replicas_have_a_place,
    _pages_can_be_sent,
    _metrics_can_be_shown,
)
