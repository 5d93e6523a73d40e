"""What is known of a cluster at one moment, and how a wait leads from task to task to its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lockstep.diagnose.views import Ended as Ended
from lockstep.diagnose.views import LinkView, MonitorView, TaskView, WaitView
from lockstep.protocol import phrases
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.ids import CHIEF, server
from lockstep.protocol.core.plan import NO_PARAMETERS
from lockstep.protocol.core.reach import NOT_SILENT, Silence
from lockstep.protocol.core.timing import HEARD_SECONDS
from lockstep.protocol.core.waits import FORMING, TENSORS, WaitKind

AT_THE_WAIT = frozenset({Doing.WAITING, Doing.STARTING})
"""A worker that reports one of these needs parameters to go on."""
OF_HOMES = frozenset({WaitKind.GRADIENT, WaitKind.COMMIT})
"""What the home of some buckets waits for to make their next version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one task: its own snapshot, its monitor's, or why there is none."""

    task: str
    address: str = ""
    view: TaskView | None = None
    silence: Silence = NOT_SILENT
    """Why the task itself gave no snapshot."""
    monitor: MonitorView | None = None
    monitor_silence: Silence = NOT_SILENT
    words: Mapping[str, Word] = field(default_factory=lambda: MappingProxyType({}))
    """What other tasks know of it, where they were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that an analysis looks at."""

    tasks: Mapping[str, Seen]
    asker: str = ""
    version: str = ""
    floor: float = 1.5
    """Waits shorter than this are part of every step."""
    patience: float = 3.0
    """How long something must be stuck before it proves anything; longer where steps take longer."""
    time: float = 0.0
    end: Ended | None = None

    def view(self, task: str) -> TaskView | None:
        seen = self.tasks.get(task)
        return None if seen is None else seen.view

    def homes(self) -> list[str]:
        """The tasks that hold buckets: the servers, or, without any, all workers."""
        return [name for name in self.tasks if not is_worker(name)] or list(self.tasks)

    def job(self) -> str:
        """The job id that most tasks report; of two reported equally often, the first."""
        jobs = [seen.view.job for seen in self.tasks.values() if seen.view is not None and seen.view.job.strip("0")]
        return max(dict.fromkeys(jobs), key=jobs.count) if jobs else ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait, and who is waiting."""

    waiter: str
    wait: WaitView

    @property
    def on(self) -> str:
        return self.wait.on

    @property
    def kind(self) -> WaitKind:
        return self.wait.kind

    @property
    def of_tensor(self) -> bool:
        return self.wait.kind in TENSORS

    @property
    def forming(self) -> bool:
        """Whether the cluster is not complete yet."""
        return self.wait.kind in FORMING


def ended_by(tasks: Mapping[str, Seen]) -> Ended | None:
    """How the job failed, according to the first task that knows; None while it runs, and where it ended well."""
    return next((seen.view.ended for seen in tasks.values() if seen.view is not None and seen.view.ended), None)


def is_waited_for(evidence: Evidence, task: str) -> bool:
    """Whether the job keeps the place of this task, which it has lost, until it is started again."""
    views = (seen.view for seen in evidence.tasks.values() if seen.view is not None)
    return any(wait.kind is WaitKind.RETURN and wait.on == task for view in views for wait in view.waits)


def is_worker(task: str) -> bool:
    return task.startswith("/job:worker/")


def waits_of(view: TaskView) -> Iterator[Waiting]:
    """The waits that block this task. A worker asks for parameters and norms early, and waits for them only when it
    reports so. Of several waits for one task the first is shown: what has a name comes before a bucket that holds no
    parameter."""
    idle = (*AT_THE_WAIT, Doing.FINISHING, Doing.NOTHING)
    training = view.main is not None and view.main.doing not in idle
    for wait in sorted(view.waits, key=has_no_parameter):
        waiting = Waiting(view.task, wait)
        if waiting.kind is WaitKind.CALLER:
            continue  # those who wait in that call say so themselves
        if is_worker(view.task) and waiting.kind in (WaitKind.PARAMETER, WaitKind.NORM) and training:
            continue
        yield waiting


def has_no_parameter(wait: WaitView) -> bool:
    """Whether the tensor that is missing holds nothing that a person knows by name."""
    return bool(wait.names) and NO_PARAMETERS.issuperset(wait.names)


def has_come(evidence: Evidence, waiting: Waiting) -> bool:
    """Whether the task that is waited for has done its part, although the waiter cannot know it.

    Workers without servers wait for all others at once: only the others' books show who is behind.
    """
    seen = evidence.tasks.get(waiting.on)
    if seen is None or not is_worker(waiting.on):
        return False
    if waiting.kind is WaitKind.SUM:
        return seen.view is not None and (seen.view.handed or (-1, -1)) >= (waiting.wait.step, waiting.wait.bucket)
    if waiting.kind is WaitKind.CALL:
        waiter = evidence.view(waiting.waiter)
        if seen.view is None or waiter is None or waiter.call is None:
            return False
        return seen.view.called is not None and seen.view.called >= waiter.call
    if waiting.kind is WaitKind.END:
        left = seen.monitor is not None and seen.monitor.exited and seen.monitor.exit_code == 0
        return left or (seen.view is not None and seen.view.phase in (TaskPhase.FINISHING, TaskPhase.ENDED))
    return False


def held_up_by(evidence: Evidence, view: TaskView) -> list[Waiting]:
    """The waits of a task, except those for which the other has done its part; if all have, the sum itself is stuck, or
    the coordinator's answer to a call."""
    waits = list(waits_of(view))
    late = [waiting for waiting in waits if not has_come(evidence, waiting)]
    late += _answers_missing(evidence, view, waits, late)
    return late or [waiting for waiting in waits if waiting.kind is WaitKind.SUM]


def _answers_missing(evidence: Evidence, view: TaskView, waits: list[Waiting], late: list[Waiting]) -> list[Waiting]:
    """All have come to the call that this task is in, which only the coordinator can tell it."""
    call = next((one for one in waits if one.kind is WaitKind.CALL), None)
    coordinator = next((name for name in (str(server(0)), str(CHIEF)) if name in evidence.tasks), view.task)
    if call is None or coordinator == view.task or any(one.kind is WaitKind.CALL for one in late):
        return []
    return [Waiting(view.task, replace(call.wait, on=coordinator, kind=WaitKind.ANSWER))]


def leads_to(evidence: Evidence, waiting: Waiting) -> list[Waiting]:
    """The waits of the task that is waited for, where they explain this wait; none where the chain ends there."""
    view = evidence.view(waiting.on)
    if view is None or has_come(evidence, waiting):
        return []
    match waiting.kind:
        case WaitKind.SUM:
            return held_up_by(evidence, view)
        case WaitKind.GRADIENT:
            return _why_no_gradient(evidence, view, waiting)
        case WaitKind.PARAMETER:
            return _why_no_parameter(evidence, view, waiting)
        case WaitKind.COMMIT:
            return _why_no_commit(evidence, waiting)
        case WaitKind.CALL:
            return _why_not_come(evidence, view)
        case WaitKind.ANSWER | WaitKind.HOLDING:
            return []  # whatever else that task waits for: its loop and its store answer by themselves
        case WaitKind.NORM:
            return _why_no_norm(view, waiting)
    others = [other for other in waits_of(view) if other.on != waiting.waiter or other.of_tensor]
    if waiting.forming:
        # A task that is not a member yet waits for the missing ones, not for what the members wait for.
        return [other for other in others if other.forming]
    return others


def _why_no_gradient(evidence: Evidence, view: TaskView, waiting: Waiting) -> list[Waiting]:
    """A worker that lacks the parameters of this step cannot make its gradient."""
    if view.main is not None and view.main.doing is Doing.CALLING:
        return _why_not_come(evidence, view)
    if view.main is not None and view.main.doing not in AT_THE_WAIT:
        return []
    if view.wants_version > waiting.wait.step:
        return []
    return [other for other in waits_of(view) if other.kind not in OF_HOMES]


def _why_not_come(evidence: Evidence, view: TaskView) -> list[Waiting]:
    """A worker comes to a call when its program does; what its share of the buckets waits for does not matter."""
    if view.main is None or view.main.doing not in (*AT_THE_WAIT, Doing.CALLING):
        return []
    return [other for other in held_up_by(evidence, view) if other.kind not in OF_HOMES]


def _why_no_parameter(evidence: Evidence, view: TaskView, waiting: Waiting) -> list[Waiting]:
    """A home without this version waits for gradients of the step before it, or for a commit."""
    bucket = view.served.get(waiting.wait.bucket)
    made = bucket is not None and bucket.version > waiting.wait.step
    if made or (view.store is not None and view.store.busy >= 1.0):
        return []
    waits = [one for one in waits_of(view) if one.kind is not WaitKind.PARAMETER]
    own = [w for w in waits if w.kind is WaitKind.GRADIENT and w.on == waiting.waiter]
    # Without synchronisation a bucket has no version of its own. But a server that already asks this worker for the
    # gradient of that version has made it: it is in flight, and the two do not wait for each other.
    if any(w.wait.step > waiting.wait.step for w in own):
        return []
    # Nor does it depend on other workers' gradients there: their steps are not the server's.
    found = own or [w for w in waits if w.kind is not WaitKind.GRADIENT or w.wait.step == view.served_step]
    if bucket is None or view.task in bucket.arrived or not is_worker(view.task):
        return found
    # A rank that lacks its own gradient does not say that it waits for itself.
    return found + _why_no_gradient(evidence, view, waiting)


def _why_no_norm(view: TaskView, waiting: Waiting) -> list[Waiting]:
    """A norm lacks the gradients, the questions or the parts of others; a worker that has not asked has not come to it
    and does not wait for any task's word either."""
    kinds = (WaitKind.PARAMETER,) if is_worker(view.task) else (WaitKind.NORM, WaitKind.GRADIENT)
    others = [one for one in waits_of(view) if one.kind in kinds and one.on != view.task]
    return [one for one in others if one.kind is not WaitKind.NORM or one.on != waiting.waiter]


def _why_no_commit(evidence: Evidence, waiting: Waiting) -> list[Waiting]:
    """A step is complete once every home has applied it and every worker has sent its state: those that have not
    explain the wait."""
    found: list[Waiting] = []
    step = waiting.wait.step
    coordinator = evidence.view(waiting.on)
    if coordinator is not None:
        found += [other for other in waits_of(coordinator) if other.kind is WaitKind.STATE]
    for name in evidence.homes():
        if name == waiting.waiter:
            continue
        view = evidence.view(name)
        if view is None or _lacks_its_own(view, step):
            word = replace(waiting.wait, on=name, kind=WaitKind.APPLIED, what=phrases.applied_word(step))
            found.append(Waiting(waiting.on, word))
        elif view.served_step <= step:
            found += [one for one in waits_of(view) if one.kind is not WaitKind.PARAMETER]
        elif not _hear_each_other(evidence, name, waiting.on):
            # It has applied the step, and what it said of that may be what the coordinator lacks.
            found += [one for one in waits_of(view) if one.kind is WaitKind.COMMIT and one.wait.step == step]
    return found


def _hear_each_other(evidence: Evidence, one: str, other: str) -> bool:
    ends = link_between(evidence, one, other)
    return one == other or all(end is not None and end.up and 0 <= end.heard < HEARD_SECONDS for end in ends)


def _lacks_its_own(view: TaskView, step: int) -> bool:
    """Whether a rank has not made its own gradient of a bucket of its share: it waits for nobody else then."""
    return is_worker(view.task) and any(b.version <= step and view.task not in b.arrived for b in view.served.values())


@dataclass(slots=True)
class ChainEnd:
    """Where chains of waits end: between ``waiting.waiter`` and ``waiting.on``, or at the latter."""

    waiting: Waiting
    followers: int = 0
    """How many waits lead here."""
    chain: tuple[Waiting, ...] = ()
    cycle: tuple[str, ...] = ()


@dataclass(slots=True)
class Chains:
    """All ends of the waits that are longer than usual."""

    endings: dict[tuple[str, str], ChainEnd] = field(default_factory=dict)
    long_waits: list[Waiting] = field(default_factory=list)


def find_chains(evidence: Evidence) -> Chains:
    """Follow each wait that is longer than usual to its end."""
    chains = Chains()
    for seen in evidence.tasks.values():
        if seen.view is not None:
            chains.long_waits += [w for w in held_up_by(evidence, seen.view) if w.wait.seconds >= evidence.floor]
    ends: dict[tuple[str, str], list[ChainEnd]] = {}
    for waiting in chains.long_waits:
        for ending in _ends_of(evidence, waiting, (), ends):
            known = chains.endings.setdefault((ending.waiting.waiter, ending.waiting.on), ending)
            known.followers += 1
    return chains


def _ends_of(
    evidence: Evidence, waiting: Waiting, path: tuple[Waiting, ...], known: dict[tuple[str, str], list[ChainEnd]]
) -> list[ChainEnd]:
    here = (waiting.waiter, waiting.on)
    if here in known:
        return known[here]
    # A coordinator's wait for its own commit leads to what it waits for itself: that is no cycle.
    before = [one.waiter for one in path if one.on != one.waiter]
    if waiting.on == waiting.waiter and waiting in path:
        return [ChainEnd(waiting, 0, path)]
    if waiting.waiter in before:
        cycle = (*before[before.index(waiting.waiter) :], waiting.waiter)
        return [ChainEnd(waiting, 0, (*path, waiting), cycle)]
    further = leads_to(evidence, waiting)
    found: list[ChainEnd] = []
    for other in further:
        found += [e for e in _ends_of(evidence, other, (*path, waiting), known) if e not in found]
    found = found or [ChainEnd(waiting, 0, (*path, waiting))]
    # An end inside a cycle depends on where the chain entered it, so only complete ones are remembered.
    if not any(ending.cycle for ending in found):
        known[here] = found
    return found


def link_between(evidence: Evidence, one: str, other: str) -> tuple[LinkView | None, LinkView | None]:
    """Both ends of a link, each as seen by its own task."""
    first, second = evidence.view(one), evidence.view(other)
    return (
        None if first is None else first.links.get(other),
        None if second is None else second.links.get(one),
    )
