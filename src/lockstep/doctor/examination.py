"""The whole examination: listen, visit every task, exchange what was seen, check this machine, and conclude."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from lockstep.doctor.analysis import analyse
from lockstep.doctor.facts import ClusterFacts, NameFact, OwnPort, PeerReport, Shared, Visit
from lockstep.doctor.finding import DoctorFinding, FindingKind, in_order
from lockstep.doctor.listening import Inbox, Notes, Stand
from lockstep.doctor.posture import ListeningPlace, Openings, found_listeners, planned_listeners
from lockstep.doctor.rules_own_address import judge_own_address
from lockstep.doctor.rules_time import Story, without_early_refusals
from lockstep.doctor.visiting import VisitResult, heard_from, leave_word, look_at, told_at
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.listening import listening_sockets
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.preflight import address_problems, port_problems
from lockstep.runtime.startup.start_facts import start_facts
from lockstep.transports.control.addresses import AddressError, is_local_address, parse_address, resolve
from lockstep.transports.control.server import ListenError

AGAIN_SECONDS: Final = 0.2
MACHINE_SECONDS: Final = 4.0
NAME_SECONDS: Final = 1.5
_AT_ONCE: Final = 24
_NOT_OF_THE_CLUSTER: Final = DoctorFinding(
    FindingKind.REMARK,
    "none of the addresses in the host lists belongs to this machine, so the tasks were only checked from outside; run "
    "'lockstep doctor' on the hosts of the cluster to see how they reach each other.",
    False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to examine. If ``spec.task`` is None: every listed task whose address belongs to this machine."""

    spec: ClusterSpec
    settings: tuple[Setting, ...] = ()
    version: str = ""
    bad_flags: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    openings: Openings = field(default_factory=Openings)
    wait_seconds: float = 2.0
    """How long to wait for tasks that do not answer yet."""
    look_at_machine: Callable[[tuple[TaskId, ...]], Shared] = field(default=lambda _: Shared())
    """Checks this machine, for the tasks that run on it."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, and what was checked."""

    findings: tuple[DoctorFinding, ...]
    tasks: tuple[str, ...]
    """The tasks in whose place this doctor listened."""
    visits: tuple[Visit, ...]
    reports: tuple[PeerReport, ...]
    seconds: float
    listeners: tuple[ListeningPlace, ...] = ()
    """Where the tasks of this machine listen, or will."""

    @property
    def healthy(self) -> bool:
        return not any(finding.keeps_from_working for finding in self.findings)


def examine(order: Order) -> Examination:
    """Examine a cluster from this machine; takes ``wait_seconds`` plus two if some task does not answer."""
    began = time.monotonic()
    own = own_tasks(order.spec)
    work = _Work(order, own)
    try:
        case = work.run(began + order.wait_seconds)
    finally:
        work.close()
    if not own:
        work.remarks.append(_NOT_OF_THE_CLUSTER)
    shown = tuple(in_order([*analyse(case), *work.remarks]))
    seconds = time.monotonic() - began
    return Examination(shown, tuple(map(str, own)), case.visits, case.reports, seconds, tuple(work.listeners()))


def own_tasks(spec: ClusterSpec) -> tuple[TaskId, ...]:
    """The task that was named, or all tasks whose address belongs to this machine."""
    if spec.task is not None:
        return (spec.task,)
    return tuple(task for task in spec.shape.tasks() if _is_local(parse_address(spec.address_of(task)).host))


def _is_local(host: str) -> bool:
    try:
        return is_local_address(host)
    except AddressError:
        return False


class _Work:
    """One examination in progress."""

    def __init__(self, order: Order, own: tuple[TaskId, ...]) -> None:
        self._order = order
        self._spec = order.spec
        self._own = own
        self._starts = {task: start_facts(order.spec.for_task(task), order.version, order.settings) for task in own}
        self._notes = Notes()
        self._inbox = Inbox()
        self._stands: dict[TaskId, Stand] = {}
        self._ports: list[OwnPort] = []
        self._seen: dict[TaskId, VisitResult] = {}
        self._gone: set[TaskId] = set()
        self._began = time.monotonic()
        self._first_reached: dict[str, float] = {}
        self._machine: list[Shared] = []
        self.remarks: list[DoctorFinding] = []

    def run(self, deadline: float) -> ClusterFacts:
        machine = threading.Thread(target=self._look_at_machine, name="machine", daemon=True)
        machine.start()
        for task in self._own:
            self._take_stand(task)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="visit") as pool:
            named = [task for task in self._spec.shape.tasks() if _has_name(self._spec, task)]
            names = pool.map(self._look_up, named)
            self._visit_all(pool, deadline, machine)
            facts = tuple(names)
        machine.join(max(0.0, deadline + MACHINE_SECONDS - time.monotonic()))
        self._judge_own_addresses()
        return self._case(facts)

    def close(self) -> None:
        for stand in self._stands.values():
            stand.close()

    def _look_at_machine(self) -> None:
        self._machine.append(self._order.look_at_machine(self._own))

    # -- own addresses --

    def _take_stand(self, task: TaskId) -> None:
        spec = self._spec.for_task(task)
        address = spec.address_of(task)
        wrong = address_problems(spec)
        if wrong:
            self._ports += [OwnPort(str(task), address, sentence, FindingKind.WRONG_MACHINE) for sentence in wrong]
            return
        taken = port_problems(spec)
        if not taken:
            try:
                self._stands[task] = Stand(spec, self._starts[task], self._notes, self._inbox)
            except ListenError as error:
                taken = [f"{error}; choose another address or port."]
        self._ports.append(OwnPort(str(task), address, " ".join(taken)))

    def _judge_own_addresses(self) -> None:
        """What answers at our own address is us, our job that already runs, or a process that should not be there."""
        for position, port in enumerate(self._ports):
            task = TaskId.parse(port.task)
            seen, stand = self._seen.get(task), self._stands.get(task)
            if seen is None or (stand is not None and stand.nonce == seen.nonce):
                continue
            told = seen.report.start if seen.report is not None else None
            judged = judge_own_address(port, seen.visit, stand is not None, self._starts[task], told)
            self._ports[position] = judged.port
            self._starts[task] = judged.start
            self.remarks += judged.remarks

    def listeners(self) -> Iterator[ListeningPlace]:
        """Of the tasks that run here, what the kernel says; of the others, what they will have."""
        running = {port.task for port in self._ports if port.running}
        for task in self._own:
            found = self._seen[task].running if str(task) in running else None
            if found is None:
                yield from planned_listeners(self._spec, task, self._order.openings)
            else:
                sockets = listening_sockets(found.pids)
                yield from found_listeners(self._spec, task, self._order.openings, found, sockets)

    # -- others --

    def _visitor(self) -> TaskId:
        return self._own[0] if self._own else self._spec.shape.tasks()[0]

    def _visit_all(self, pool: ThreadPoolExecutor, deadline: float, machine: threading.Thread) -> None:
        tasks = self._spec.shape.tasks()
        pause = threading.Event()
        while True:
            for task, seen in zip(tasks, pool.map(self._visit, tasks), strict=True):
                self._note(task, seen)
            late = time.monotonic() >= deadline
            reached_all = all(seen.visit.reached for seen in self._seen.values())
            done = late or (reached_all and not machine.is_alive())
            self._notes.write(self._own_visits(), self._shared(), done)
            if late or (done and all(self._settled(task) for task in tasks)):
                list(pool.map(self._say_goodbye, tasks))
                return
            pause.wait(AGAIN_SECONDS)

    def _say_goodbye(self, task: TaskId) -> None:
        """Doctors that are still working must not conclude anything from what this one saw earlier."""
        seen, stand = self._seen[task], self._stands.get(self._visitor())
        is_doctor = seen.report is not None and seen.report.by_doctor
        if stand is not None and is_doctor and task not in self._own and task not in self._gone:
            leave_word(self._spec.address_of(task), stand.snapshot())

    def _visit(self, task: TaskId) -> VisitResult | None:
        known = self._seen.get(task)
        if known is not None and self._settled(task) and (known.visit.reached or task not in self._own):
            return None  # a second doctor of the same task may still start to listen at our own address
        stand = self._stands.get(self._visitor())
        word = b"" if stand is None or task in self._own else stand.snapshot()
        return look_at(self._visitor(), task, self._spec.address_of(task), word)

    def _settled(self, task: TaskId) -> bool:
        """This task has nothing more to report."""
        if task in self._own or task in self._gone:
            return True
        told = self._inbox.told().get(str(task))
        report = self._seen[task].report
        return (report is not None and report.done) or (told is not None and told.get("done") is True)

    def _note(self, task: TaskId, seen: VisitResult | None) -> None:
        if seen is None:
            return
        if seen.visit.reached:
            self._first_reached.setdefault(str(task), seen.seen_at)
        known = self._seen.get(task)
        told_nothing = not seen.visit.reached or (seen.report is not None and seen.report.start is None)
        if known is not None and known.visit.reached and told_nothing:
            self._gone.add(task)  # it answered earlier: its doctor has finished, or its task has ended
            return
        self._seen[task] = seen

    def _own_visits(self) -> tuple[Visit, ...]:
        visits = (self._seen[task].visit for task in self._spec.shape.tasks() if task in self._seen)
        own = set(map(str, self._own))
        return tuple(visit for visit in visits if visit.host not in own)

    def _shared(self) -> Shared | None:
        return self._machine[0] if self._machine else None

    # -- names --

    def _look_up(self, task: TaskId) -> NameFact:
        name = parse_address(self._spec.address_of(task)).host
        try:
            numbers = resolve(name, NAME_SECONDS)
        except AddressError as error:
            return NameFact(str(task), name, problem=str(error).partition("(")[2].removesuffix(").") or "no answer")
        return NameFact(
            str(task),
            name,
            tuple(map(str, numbers)),
            loopback=all(number.is_loopback for number in numbers),
            only_ipv6=all(number.version == 6 for number in numbers),
        )

    # -- the case --

    def _newest(self) -> dict[str, tuple[PeerReport, tuple[Visit, ...]]]:
        """The latest report of every other task: what it answered, or what its doctor sent after that."""
        words = {
            str(task): (seen.told_at, seen.report, seen.its_visits)
            for task, seen in self._seen.items()
            if seen.report is not None and task not in self._own
        }
        for task, told in self._inbox.told().items():
            if TaskId.parse(task) not in self._own and told_at(told) > words.get(task, (0.0,))[0]:
                report, its_visits = heard_from(told, task)
                known = self._seen.get(TaskId.parse(task))
                if known is not None and known.report is not None:
                    clock = known.report
                    report = replace(report, clock_ahead=clock.clock_ahead, clock_doubt=clock.clock_doubt)
                words[task] = (told_at(told), report, its_visits)
        return {task: (report, its_visits) for task, (_, report, its_visits) in words.items()}

    def _heard_at(self, task: TaskId) -> float:
        seen = self._seen.get(task)
        return max(self._inbox.heard_at(str(task)), 0.0 if seen is None else seen.seen_at)

    def _case(self, names: tuple[NameFact, ...]) -> ClusterFacts:
        own = set(map(str, self._own))
        words = self._newest()
        stories = [
            Story(self._seen[TaskId.parse(visit.host)].seen_at, (visit,), age=0.0) for visit in self._own_visits()
        ]
        for task, (_, its_visits) in words.items():
            told = tuple(visit for visit in its_visits if visit.visitor not in own)
            stories.append(Story(self._heard_at(TaskId.parse(task)), told))
        first_heard = {**self._first_reached, **self._inbox.first_heard_at(), **dict.fromkeys(own, self._began)}
        visits = without_early_refusals(stories, first_heard)
        running = {TaskId.parse(port.task) for port in self._ports if port.running}
        visits += [self._seen[task].visit for task in running]
        return ClusterFacts(
            own=tuple(self._starts.values()),
            protocol=self._spec.protocol,
            host=socket.gethostname(),
            bad_flags=self._order.bad_flags,
            ports=tuple(self._ports),
            names=names,
            visits=tuple(visits),
            reports=tuple(report for report, _ in words.values()),
            shared=self._shared() or Shared(),
            proxies=self._order.proxies,
        )


def _has_name(spec: ClusterSpec, task: TaskId) -> bool:
    address = parse_address(spec.address_of(task))
    return address.literal is None and address.host.lower() != "localhost"
