"""What is known of a cluster at one moment, and how a wait leads from task to task to where it began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lockstep.diagnose.views import LinkView, MonitorView, TaskView, WaitView
from lockstep.protocol.keys import TensorKey
from lockstep.protocol.waits import STATE_WAIT

JOINING = ("its joining", "a connection", "the cluster to be complete")
"""What is waited for while a cluster forms."""

COMMIT = "the commit of step"
LAST_WAIT = "the end of the job"
TENSORS = ("gradient", "parameter", "allreduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One task as far as anybody can tell: its own word, its monitor's, or why there is none."""

    task: str
    address: str = ""
    view: TaskView | None = None
    silence: str = ""
    """Why the task itself gave no snapshot."""
    monitor: MonitorView | None = None
    monitor_silence: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the job ended, where it has: the coordinator's word."""

    culprit: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that an analysis looks at."""

    tasks: Mapping[str, Seen]
    asker: str = ""
    version: str = ""
    floor: float = 1.5
    """Waits shorter than this are part of every step."""
    patience: float = 3.0
    """How long something must stand still before it can prove anything; longer where steps are."""
    time: float = 0.0
    end: Ended | None = None

    def view(self, task: str) -> TaskView | None:
        seen = self.tasks.get(task)
        return None if seen is None else seen.view

    def job(self) -> str:
        """The job id that most tasks name."""
        jobs = [seen.view.job for seen in self.tasks.values() if seen.view is not None and seen.view.job.strip("0")]
        return max(set(jobs), key=jobs.count) if jobs else ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait with who waits."""

    waiter: str
    wait: WaitView

    @property
    def on(self) -> str:
        return self.wait.on

    @property
    def key(self) -> TensorKey | None:
        try:
            return TensorKey.parse(self.wait.what)
        except ValueError:
            return None

    @property
    def kind(self) -> str:
        """``gradient``, ``parameter``, ``allreduce`` (no servers), or ``control`` for what is no tensor."""
        what = self.wait.what
        return next((kind for kind in TENSORS if f";{kind}/" in what), "control")


def is_worker(task: str) -> bool:
    return task.startswith("/job:worker/")


def waits_of(view: TaskView) -> Iterator[Waiting]:
    """The waits that hold this task up. A worker asks for parameters early; it waits for them only when it says so."""
    training = view.main is not None and view.main.doing not in ("waiting", "starting", "finishing", "")
    for wait in view.waits:
        waiting = Waiting(view.task, wait)
        if is_worker(view.task) and waiting.kind == "parameter" and training:
            continue
        yield waiting


def has_come(evidence: Evidence, waiting: Waiting) -> bool:
    """Whether the one that is waited for has done its part, though the waiter cannot know it.

    Workers without servers wait for all others at once: only the books of these tell who is behind.
    """
    seen = evidence.tasks.get(waiting.on)
    if seen is None or not is_worker(waiting.on):
        return False
    if waiting.kind == "allreduce":
        return seen.view is not None and (seen.view.handed or (-1, -1)) >= (waiting.wait.step, waiting.wait.bucket)
    if waiting.wait.what == LAST_WAIT:
        left = seen.monitor is not None and seen.monitor.exited and seen.monitor.exit_code == 0
        return left or (seen.view is not None and seen.view.phase in ("finishing", "ended"))
    return False


def held_up_by(evidence: Evidence, view: TaskView) -> list[Waiting]:
    """The waits of a task less those that the other has done its part for; if all have, a sum itself stands still."""
    waits = list(waits_of(view))
    late = [waiting for waiting in waits if not has_come(evidence, waiting)]
    return late or [waiting for waiting in waits if waiting.kind == "allreduce"]


def leads_to(evidence: Evidence, waiting: Waiting) -> list[Waiting]:
    """The waits of the one that is waited for, where they explain this wait; none where it ends there."""
    view = evidence.view(waiting.on)
    if view is None or has_come(evidence, waiting):
        return []
    if waiting.kind == "allreduce":
        return held_up_by(evidence, view)
    if waiting.kind == "gradient":
        return _why_no_gradient(view, waiting)
    if waiting.kind == "parameter":
        return _why_no_parameter(view, waiting)
    if waiting.wait.what.startswith(COMMIT):
        return _why_no_commit(evidence, waiting)
    others = [other for other in waits_of(view) if other.on != waiting.waiter or other.kind != "control"]
    if waiting.wait.what in JOINING:
        # Whoever is not a member yet waits for those who are missing, and not for what the members wait for.
        return [other for other in others if other.wait.what in JOINING]
    return others


def _why_no_gradient(view: TaskView, waiting: Waiting) -> list[Waiting]:
    """A worker that lacks the parameters of this step cannot make its gradient."""
    if view.main is not None and view.main.doing not in ("waiting", "starting"):
        return []
    if view.wants_version > waiting.wait.step:
        return []
    return [other for other in waits_of(view) if other.kind in ("parameter", "control")]


def _why_no_parameter(view: TaskView, waiting: Waiting) -> list[Waiting]:
    """A server that has not made this version waits for gradients of the step before it, or for a commit."""
    bucket = view.buckets.get(waiting.wait.bucket)
    made = bucket is not None and bucket.version > waiting.wait.step
    if made or (view.store is not None and view.store.busy >= 1.0):
        return []
    waits = list(waits_of(view))
    own = [w for w in waits if w.kind == "gradient" and w.on == waiting.waiter]
    # Without synchronisation a bucket has no version of its own. But whoever already asks this worker for the gradient
    # of that version has made it: it is on its way, and the two do not wait for one another.
    if any(w.wait.step > waiting.wait.step for w in own):
        return []
    # Nor does it depend there on what other workers owe: their steps are not the server's.
    return own or [w for w in waits if w.kind != "gradient" or w.wait.step == view.step]


def _why_no_commit(evidence: Evidence, waiting: Waiting) -> list[Waiting]:
    """A step is complete once every server has applied it, and every worker has told its state: whoever has not
    explains the wait."""
    found: list[Waiting] = []
    step = waiting.wait.step
    coordinator = evidence.view(waiting.on)
    if coordinator is not None:
        found += [other for other in waits_of(coordinator) if other.wait.what.startswith(STATE_WAIT)]
    for name, seen in evidence.tasks.items():
        if is_worker(name) or name == waiting.waiter:
            continue
        if seen.view is None:
            what = f"its word that step {step} is applied"
            found.append(Waiting(waiting.on, replace(waiting.wait, on=name, what=what)))
        elif seen.view.step <= step:
            found += waits_of(seen.view)
    return found


@dataclass(slots=True)
class Ending:
    """Where chains of waits end: between ``waiting.waiter`` and ``waiting.on``, or at the latter."""

    waiting: Waiting
    followers: int = 0
    """How many waits lead here."""
    chain: tuple[Waiting, ...] = ()
    cycle: tuple[str, ...] = ()


@dataclass(slots=True)
class Chains:
    """All endings of the waits that are longer than usual."""

    endings: dict[tuple[str, str], Ending] = field(default_factory=dict)
    long_waits: list[Waiting] = field(default_factory=list)


def find_chains(evidence: Evidence) -> Chains:
    """Follow each wait that is longer than usual to its end."""
    chains = Chains()
    for seen in evidence.tasks.values():
        if seen.view is not None:
            chains.long_waits += [w for w in held_up_by(evidence, seen.view) if w.wait.seconds >= evidence.floor]
    ends: dict[tuple[str, str], list[Ending]] = {}
    for waiting in chains.long_waits:
        for ending in _ends_of(evidence, waiting, (), ends):
            known = chains.endings.setdefault((ending.waiting.waiter, ending.waiting.on), ending)
            known.followers += 1
    return chains


def _ends_of(
    evidence: Evidence, waiting: Waiting, path: tuple[Waiting, ...], known: dict[tuple[str, str], list[Ending]]
) -> list[Ending]:
    here = (waiting.waiter, waiting.on)
    if here in known:
        return known[here]
    before = [one.waiter for one in path]
    if waiting.waiter in before:
        cycle = (*before[before.index(waiting.waiter) :], waiting.waiter)
        return [Ending(waiting, 0, (*path, waiting), cycle)]
    further = leads_to(evidence, waiting)
    found: list[Ending] = []
    for other in further:
        found += [e for e in _ends_of(evidence, other, (*path, waiting), known) if e not in found]
    found = found or [Ending(waiting, 0, (*path, waiting))]
    # An ending inside a cycle depends on where one came in, so only complete ones are remembered.
    if not any(ending.cycle for ending in found):
        known[here] = found
    return found


def link_between(evidence: Evidence, one: str, other: str) -> tuple[LinkView | None, LinkView | None]:
    """Both ends of a link, each as its own task sees it."""
    first, second = evidence.view(one), evidence.view(other)
    return (
        None if first is None else first.links.get(other),
        None if second is None else second.links.get(one),
    )
