"""Rules about a task that answers: what its training thread, its loop or its store is doing."""

from __future__ import annotations

from lockstep.diagnose import phrases
from lockstep.diagnose.case import BUSY, IDLE, Proof, WaitCase
from lockstep.diagnose.evidence import is_worker
from lockstep.diagnose.views import LinkView, MainView, ShardView, TaskView
from lockstep.protocol.core.activity import TRAINING, Code, Doing, TaskPhase
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.timing import LOOP_SECONDS, PATIENCE_SECONDS, STUCK_SECONDS
from lockstep.protocol.core.waits import WaitKind
from lockstep.protocol.worker.holdings import HeldBucketState

FULL = 1 << 20
"""A disk with less free space than this is full."""
SETTLED = 0.6
"""A thread must have waited for this share of the patience before its waiting proves anything."""
LONG = 4.0
"""A step that takes this many times the patience is no longer merely slow."""
QUEUED = 1000
"""A loop with this many queued events is overloaded."""


def _training(case: WaitCase) -> MainView | None:
    """The training thread of the worker that is waited for, unless it is waiting itself."""
    view = case.view
    if view is None or view.main is None or not is_worker(case.on) or view.main.doing is Doing.WAITING:
        return None
    return view.main


def _stands_still(case: WaitCase, main: MainView) -> bool:
    return main.seconds >= case.evidence.patience and 0 <= main.cpu < IDLE


def _in_program(case: WaitCase, main: MainView) -> bool:
    """Calls may be made before a model is wrapped, when a program has not reported anything yet."""
    return main.doing in TRAINING or (main.doing is Doing.STARTING and case.waiting.kind is WaitKind.CALL)


def user_code(case: WaitCase) -> Proof | None:
    main = _training(case)
    if main is None or not _in_program(case, main) or main.where is not Code.USER:
        return None
    if not _stands_still(case, main):
        return None
    what = phrases.stands_still_in_user_code(case.on, case.step, main.place)
    said = phrases.did_no_work(case.on, main.doing, main.seconds)
    return Proof(Cause.USER_CODE, what, (said,), seconds=main.seconds, stack=main.stack)


def _computes(main: MainView) -> bool:
    """Less than ``BUSY`` counts too: a thread that neither waits nor is seen to work would be stuck for no reason."""
    return main.doing in TRAINING and main.cpu >= IDLE


def _loops(case: WaitCase, main: MainView) -> bool:
    """Its stacks seconds apart have a function of the program in common, and either all ended in it, or it takes so
    long that the difference between a loop that calls a library and one long step no longer matters."""
    long = main.seconds >= LONG * case.evidence.patience
    return main.where is Code.USER and bool(main.dwells) and main.dwelt >= LOOP_SECONDS and (main.innermost or long)


def looping(case: WaitCase) -> Proof | None:
    main = _training(case)
    if main is None or not _computes(main) or not _loops(case, main):
        return None
    what = phrases.computes_without_end(case.on, case.step, main.dwells)
    said = phrases.stacks_have_in_common(main.dwells, main.dwelt), phrases.thread_used_the_processor(main.cpu)
    return Proof(Cause.LOOPING, what, said, seconds=main.seconds, stack=main.stack)


def busy(case: WaitCase) -> Proof | None:
    main = _training(case)
    if main is None or main.doing is not Doing.BUSY:
        return None
    what = phrases.announced_that_it_is_busy(case.on, main.detail)
    return Proof(Cause.BUSY, what, (phrases.says_so_itself(case.on),), seconds=main.seconds, stack=main.stack)


def compiling(case: WaitCase) -> Proof | None:
    main = _training(case)
    if main is None or main.doing not in TRAINING or main.where is not Code.COMPILER:
        return None
    what, said = phrases.compiles(case.on, case.step), phrases.stack_is_in_the_compiler(case.on)
    return Proof(Cause.COMPILING, what, (said,), seconds=main.seconds, stack=main.stack)


def device_call(case: WaitCase) -> Proof | None:
    main = _training(case)
    if main is None or main.where is not Code.DEVICE or main.seconds < case.evidence.patience:
        return None
    if main.doing not in TRAINING:
        return None
    what = phrases.stands_in_a_device_call(case.on, case.step)
    said = phrases.stack_is_in_the_device_library(case.on, main.doing, main.seconds)
    return Proof(Cause.DEVICE_CALL, what, (said,), seconds=main.seconds, stack=main.stack)


def disk_full(case: WaitCase) -> Proof | None:
    view, main = case.view, _training(case)
    if view is None or main is None or main.doing is not Doing.CHECKPOINT or not 0 <= view.disk_free < FULL:
        return None
    what = phrases.disk_is_full(case.on, view.disk_folder)
    said = phrases.room_left(view.disk_folder, view.host, view.disk_free)
    return Proof(Cause.DISK_FULL, what, (said,), seconds=main.seconds)


def checkpoint_stuck(case: WaitCase) -> Proof | None:
    view, main = case.view, _training(case)
    if view is None or main is None or main.doing is not Doing.CHECKPOINT or 0 <= view.disk_free < FULL:
        return None
    if not _stands_still(case, main) or view.written_ago < case.evidence.patience:
        return None
    what = phrases.checkpoint_stands_still(case.on, main.detail)
    said = phrases.no_byte_written(case.on, main.seconds, view.written_ago)
    return Proof(Cause.CHECKPOINT_STUCK, what, (said,), seconds=main.seconds, stack=main.stack)


def _shard(case: WaitCase) -> ShardView | None:
    """What the server that is waited for writes of a checkpoint."""
    return case.view.shard if case.view is not None and case.waiting.kind is WaitKind.SHARD else None


def shard_stuck(case: WaitCase) -> Proof | None:
    shard = _shard(case)
    if shard is None or shard.written_ago < case.evidence.patience:
        return None
    what = phrases.checkpoint_stands_still(case.on, shard.file)
    said = phrases.no_byte_written(case.on, shard.seconds, shard.written_ago)
    return Proof(Cause.CHECKPOINT_STUCK, what, (said,), seconds=shard.seconds)


def shard_slow(case: WaitCase) -> Proof | None:
    shard = _shard(case)
    if shard is None or shard.written_ago >= case.evidence.patience:
        return None
    what = phrases.still_writes_its_checkpoint(case.on, shard.file)
    return Proof(Cause.STRAGGLER, what, (phrases.wrote(shard.written_ago),), seconds=shard.seconds)


def _writes(case: WaitCase, view: TaskView) -> bool:
    return 0 <= view.written_ago < case.evidence.patience and not 0 <= view.disk_free < FULL


def straggler(case: WaitCase) -> Proof | None:
    view, main = case.view, _training(case)
    if view is not None and main is not None and main.doing is Doing.CHECKPOINT and _writes(case, view):
        what = phrases.still_writes_its_checkpoint(case.on, main.detail)
        return Proof(Cause.STRAGGLER, what, (phrases.wrote(view.written_ago),), seconds=main.seconds)
    if main is None or main.where in (Code.DEVICE, Code.COMPILER) or not _computes(main) or _loops(case, main):
        return None
    what, said = phrases.still_computes(case.on, case.step), phrases.thread_used_the_processor(main.cpu)
    return Proof(Cause.STRAGGLER, what, (said,), seconds=main.seconds, stack=main.stack)


def overloaded_server(case: WaitCase) -> Proof | None:
    view = case.view
    if view is None or not view.served:
        return None
    store, remedy = view.store, phrases.remedy_of_a_busy_share() if is_worker(case.on) else ""
    if store is not None and store.busy >= STUCK_SECONDS and store.cpu >= BUSY:
        what = phrases.server_is_busy(case.on, store.doing, store.busy)
        said = phrases.update_thread_used_the_processor(store.cpu, store.queued)
        return Proof(Cause.OVERLOADED_SERVER, what, (said,), seconds=store.busy, stack=store.stack, remedy=remedy)
    if view.loop_queued >= QUEUED and view.loop_busy < STUCK_SECONDS:
        what = phrases.loop_is_behind(case.on, view.loop_queued)
        return Proof(Cause.OVERLOADED_SERVER, what, (phrases.says_so_itself(case.on),), remedy=remedy)
    return None


def store_stuck(case: WaitCase) -> Proof | None:
    store = None if case.view is None else case.view.store
    if store is None or store.busy < case.evidence.patience or not 0 <= store.cpu < IDLE:
        return None
    if case.view is not None and case.view.phase == TaskPhase.IMPORTING_TORCH:
        return None  # another of its threads imports torch, and this one waits for that: on a slow machine, for long
    if store.where is Code.DEVICE:
        cause, what = Cause.DEVICE_CALL, phrases.update_stands_in_a_device_call(case.on, store.doing)
    else:
        cause, what = Cause.COMMUNICATION, phrases.update_stands_in_the_communication_layer(case.on, store.doing)
    said = phrases.busy_without_the_processor(store.busy)
    return Proof(cause, what, (said,), seconds=store.busy, stack=store.stack)


def callback_stuck(case: WaitCase) -> Proof | None:
    """A callback of a link blocks: nothing more is received on it. The first of the three reports was of this kind."""
    for view, peer in ((case.view, case.waiter), (case.waiter_view, case.on)):
        if view is None:
            continue
        link = view.links.get(peer)
        if link is not None and link.callback_seconds >= STUCK_SECONDS:
            return _blocked(view, link)
        if view.loop_busy >= STUCK_SECONDS:
            what = phrases.loop_does_not_come_back(view.task, view.loop_what)
            said = phrases.event_takes(view.task, view.loop_busy, view.loop_queued)
            return Proof(Cause.COMMUNICATION, what, (said,), view.task, peer, view.loop_busy, view.loop_stack)
    return None


def _blocked(view: TaskView, link: LinkView) -> Proof:
    what = phrases.callback_blocks_the_link(view.task, link.peer, link.callback)
    said = phrases.callback_has_not_returned(view.task, link.callback, link.callback_seconds)
    return Proof(Cause.COMMUNICATION, what, (said,), view.task, link.peer, link.callback_seconds, link.callback_stack)


def missed_call(case: WaitCase) -> Proof | None:
    """One worker waits in a call for another that waits for something else, which needs the first."""
    if not case.cycle or case.waiting.kind is not WaitKind.CALL or case.view is None or case.view.main is None:
        return None
    if case.waiting.wait.seconds < min(case.evidence.patience, PATIENCE_SECONDS):
        return None
    main = case.view.main
    what = phrases.is_elsewhere(case.waiter, case.waiting.wait.what, case.on, main.detail, main.place)
    said = (phrases.wait_for_one_another(case.cycle), phrases.each_says_so_itself())
    return Proof(Cause.OTHER_CALL, what, said, stack=main.stack, remedy=phrases.remedy_of_a_missed_call())


def _in_a_call(case: WaitCase) -> bool:
    """Whether one of those that wait for one another does so in a call."""
    views = (case.evidence.view(task) for task in case.cycle)
    return any(view is not None and view.call is not None for view in views)


def deadlock(case: WaitCase) -> Proof | None:
    """Tasks wait for each other, or a worker waits for parameters that need its own gradient."""
    view = case.view
    if case.cycle and case.waiting.wait.seconds >= case.evidence.patience and not _in_a_call(case):
        return Proof(Cause.DEADLOCK, phrases.wait_for_one_another(case.cycle), (phrases.each_says_so_itself(),))
    if (
        case.waiting.kind is not WaitKind.GRADIENT
        or view is None
        or view.main is None
        or view.main.doing is not Doing.WAITING
    ):
        return None
    if view.main.seconds < SETTLED * case.evidence.patience or view.loop_queued:
        return None  # it has only just begun to wait; its gradients may be on their way to its own loop
    if view.sealed >= case.step:
        return None  # it has made them, and another thread copies them from a GPU
    bucket = view.buckets.get(case.bucket)
    if bucket is None or bucket.state is not HeldBucketState.HELD or view.wants_version <= case.step:
        return None
    what = phrases.waits_for_what_it_must_make(case.on, view.wants_version, case.step)
    said = (
        phrases.waits_before_its_gradient(case.on, view.main.detail, view.main.seconds, case.bucket),
        phrases.cannot_make_version(case.waiter, case.step + 1),
    )
    return Proof(Cause.DEADLOCK, what, said, seconds=view.main.seconds, stack=view.main.stack)
