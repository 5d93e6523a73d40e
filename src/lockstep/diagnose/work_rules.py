"""Rules about a task that answers: where its training thread, its loop or its store stands."""

from __future__ import annotations

from lockstep.diagnose.case import BUSY, IDLE, STUCK, Case, Proof, ago
from lockstep.diagnose.evidence import is_worker
from lockstep.diagnose.views import LinkView, MainView, TaskView
from lockstep.protocol.activity import TRAINING, Code, Doing, TaskPhase
from lockstep.protocol.causes import Cause
from lockstep.protocol.waits import WaitKind

FULL = 1 << 20
"""A disk with less room than this is full."""
SETTLED = 0.6
"""A thread must have waited for this part of the patience before its waiting proves anything."""
QUEUED = 1000
"""A loop with this many events before it is behind."""


def _training(case: Case) -> MainView | None:
    """The training thread of the worker that is waited for, if it is what everybody waits for."""
    view = case.view
    if view is None or view.main is None or not is_worker(case.on) or view.main.doing is Doing.WAITING:
        return None
    return view.main


def _stands_still(case: Case, main: MainView) -> bool:
    return main.seconds >= case.evidence.patience and 0 <= main.cpu < IDLE


def _in_step(case: Case) -> str:
    return f"in step {case.step}" if case.step >= 0 else "before the first step"


def user_code(case: Case) -> Proof | None:
    main = _training(case)
    if main is None or main.doing not in TRAINING or main.where is not Code.USER:
        return None
    if not _stands_still(case, main):
        return None
    what = f"the training thread of {case.on} stands still in user code {_in_step(case)}"
    said = f"{case.on} says: {main.doing} for {ago(main.seconds)}; the kernel says: no work in the last two seconds"
    return Proof(Cause.USER_CODE, what, (said,), seconds=main.seconds, stack=main.stack)


def device_call(case: Case) -> Proof | None:
    main = _training(case)
    if main is None or main.where is not Code.DEVICE or main.seconds < case.evidence.patience:
        return None
    if main.doing not in TRAINING:
        return None
    what = f"the training thread of {case.on} does not come back from a device call {_in_step(case)}"
    said = f"{case.on} says: {main.doing} for {ago(main.seconds)}; its stack is inside the device library"
    return Proof(Cause.DEVICE_CALL, what, (said,), seconds=main.seconds, stack=main.stack)


def input_starved(case: Case) -> Proof | None:
    main = _training(case)
    if main is None or main.doing is not Doing.INPUT or main.seconds < case.evidence.patience:
        return None
    where = main.detail or "its input"
    what = f"{case.on} has no data for step {case.step}: it waits for {where}"
    return Proof(
        Cause.INPUT_STARVED,
        what,
        (f"{case.on} reads {where} since {ago(main.seconds)}",),
        "",
        "",
        main.seconds,
        main.stack,
    )


def disk_full(case: Case) -> Proof | None:
    view, main = case.view, _training(case)
    if view is None or main is None or main.doing is not Doing.CHECKPOINT or not 0 <= view.disk_free < FULL:
        return None
    what = f"{case.on} cannot write its checkpoint: the disk of {view.disk_folder} is full"
    said = f"{view.disk_folder} on {view.host} has {view.disk_free} bytes left"
    return Proof(Cause.DISK_FULL, what, (said,), seconds=main.seconds)


def checkpoint_stuck(case: Case) -> Proof | None:
    view, main = case.view, _training(case)
    if view is None or main is None or main.doing is not Doing.CHECKPOINT or 0 <= view.disk_free < FULL:
        return None
    if not _stands_still(case, main) or view.written_ago < case.evidence.patience:
        return None
    what = f"the checkpoint of {case.on} stands still at {main.detail or 'its file'}"
    said = f"{case.on} writes since {ago(main.seconds)}; no byte was written in the last {ago(view.written_ago)}"
    return Proof(Cause.CHECKPOINT_STUCK, what, (said,), seconds=main.seconds, stack=main.stack)


def _writes(case: Case, view: TaskView) -> bool:
    return 0 <= view.written_ago < case.evidence.patience and not 0 <= view.disk_free < FULL


def straggler(case: Case) -> Proof | None:
    view, main = case.view, _training(case)
    if view is not None and main is not None and main.doing is Doing.CHECKPOINT and _writes(case, view):
        what = f"{case.on} still writes its checkpoint {main.detail}"
        return Proof(Cause.STRAGGLER, what, (f"it wrote {ago(view.written_ago)} ago",), seconds=main.seconds)
    if main is None or main.doing not in TRAINING or main.where is Code.DEVICE:
        return None
    if main.cpu < BUSY:
        return None
    what = f"{case.on} still computes step {case.step}, while the others have finished it"
    said = f"its training thread used {main.cpu:.0%} of a processor in the last two seconds"
    return Proof(Cause.STRAGGLER, what, (said,), seconds=main.seconds, stack=main.stack)


def overloaded_server(case: Case) -> Proof | None:
    view = case.view
    if view is None or is_worker(case.on):
        return None
    store = view.store
    if store is not None and store.busy >= STUCK and store.cpu >= BUSY:
        what = f"{case.on} is busy: it does {store.doing} since {ago(store.busy)}"
        said = f"its update thread used {store.cpu:.0%} of a processor; {store.queued} updates wait behind it"
        return Proof(Cause.OVERLOADED_SERVER, what, (said,), seconds=store.busy, stack=store.stack)
    if view.loop_queued >= QUEUED and view.loop_busy < STUCK:
        what = f"{case.on} is behind: {view.loop_queued} events wait for its loop"
        return Proof(Cause.OVERLOADED_SERVER, what, (f"{case.on} says so itself",))
    return None


def store_stuck(case: Case) -> Proof | None:
    store = None if case.view is None else case.view.store
    if store is None or store.busy < case.evidence.patience or not 0 <= store.cpu < IDLE:
        return None
    if case.view is not None and case.view.phase == TaskPhase.IMPORTING_TORCH:
        return None  # another thread of it imports, and this one waits for that: on a slow machine for long
    in_device = store.where is Code.DEVICE
    where = "a device call" if in_device else "the communication layer"
    what = f"the update thread of {case.on} stands still in {where}: {store.doing}"
    cause = Cause.DEVICE_CALL if in_device else Cause.COMMUNICATION
    return Proof(
        cause, what, (f"busy for {ago(store.busy)} without using the processor",), "", "", store.busy, store.stack
    )


def callback_stuck(case: Case) -> Proof | None:
    """A callback of a link blocks: nothing more comes in on it. The first of the three reports was of this kind."""
    for view, peer in ((case.view, case.waiter), (case.waiter_view, case.on)):
        if view is None:
            continue
        link = view.links.get(peer)
        if link is not None and link.callback_seconds >= STUCK:
            return _blocked(view, link)
        if view.loop_busy >= STUCK:
            what = f"the loop of {view.task} does not come back from: {view.loop_what or 'an event'}"
            said = f"{view.task}: this event takes {ago(view.loop_busy)} so far, {view.loop_queued} wait behind it"
            return Proof(Cause.COMMUNICATION, what, (said,), view.task, peer, view.loop_busy, view.loop_stack)
    return None


def _blocked(view: TaskView, link: LinkView) -> Proof:
    what = f"a callback in {view.task} blocks the link to {link.peer}: {link.callback}"
    said = f"{view.task} says that {link.callback} has not returned for {ago(link.callback_seconds)}"
    return Proof(Cause.COMMUNICATION, what, (said,), view.task, link.peer, link.callback_seconds, link.callback_stack)


def deadlock(case: Case) -> Proof | None:
    """Two or more tasks wait for one another, or a worker waits for what can only be made of its own gradient."""
    view = case.view
    if case.cycle and case.waiting.wait.seconds >= case.evidence.patience:
        ring = " -> ".join(case.cycle)
        return Proof(Cause.DEADLOCK, f"these tasks wait for one another: {ring}", ("each of them says so itself",))
    if (
        case.waiting.kind is not WaitKind.GRADIENT
        or view is None
        or view.main is None
        or view.main.doing is not Doing.WAITING
    ):
        return None
    if view.main.seconds < SETTLED * case.evidence.patience or view.loop_queued:
        return None  # it has just come to the wait; its gradients may be on their way to its own loop
    bucket = view.buckets.get(case.bucket)
    if bucket is None or bucket.state != "held" or view.wants_version <= case.step:
        return None
    what = f"{case.on} waits for version {view.wants_version}, which needs its own gradient of step {case.step}"
    said = (
        f"{case.on}: waits for {view.main.detail or 'parameters'} for {ago(view.main.seconds)}; bucket {case.bucket} "
        "has no gradient yet",
        f"{case.waiter}: cannot make version {case.step + 1} without it",
    )
    return Proof(Cause.DEADLOCK, what, said, seconds=view.main.seconds, stack=view.main.stack)
