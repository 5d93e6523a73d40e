"""Rules about one tensor between two tasks that both answer: what did each side see of it?

Users of the original system had to do this by hand: compare the requests that one side sent with those that the
other side saw.
"""

from __future__ import annotations

from lockstep.diagnose import phrases
from lockstep.diagnose.case import HELD_BACK, IN_VAIN, Proof, WaitCase
from lockstep.diagnose.evidence import has_come
from lockstep.diagnose.views import LinkView, MovingView, TaskView
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.events import TensorKind
from lockstep.protocol.core.journal import Happening
from lockstep.protocol.core.timing import (
    HEARTBEAT_SECONDS,
    SENT_SECONDS,
    STUCK_SECONDS,
    UNHEARD_SECONDS,
    WATCHED_SECONDS,
)
from lockstep.protocol.core.waits import WaitKind

_BOOKS_APART = 0.5
"""Seconds by which the ages in the books of two tasks may differ: they are asked one after the other."""


def request_lost(case: WaitCase) -> Proof | None:
    if not (case.link_is_sound() and case.nobody_is_stuck()):
        return None
    view, asker = case.view, case.waiter_view
    if view is None or asker is None or case.is_starting:
        return None
    asked = case.tensor(asker, case.number, -1, case.on)
    counts = {} if asked is None else asked.counts
    times = max(counts.get(Happening.REQUESTED, 0), counts.get(Happening.REPEATED, 0))
    if case.waiting.wait.seconds < case.evidence.patience or times < 2 or _saw_request(case, view):
        return None
    what = phrases.request_never_came(case.waiter, case.on, case.waiting.kind, case.step)
    said = (
        phrases.asked_times(case.waiter, times, case.waiting.wait.seconds),
        _never_saw_it(case, view),
        phrases.heartbeats_pass(),
    )
    return Proof(Cause.REQUEST_LOST, what, said)


def _saw_request(case: WaitCase, view: TaskView) -> bool:
    if case.waiting.kind is WaitKind.GRADIENT:
        side = view.servers.get(case.waiter)
        return side is None or side.open_step >= case.step
    if case.waiting.kind is WaitKind.PARAMETER:
        worker = view.workers.get(case.waiter)
        return worker is None or worker.pulls >= case.number
    return True


def _never_saw_it(case: WaitCase, view: TaskView) -> str:
    if case.waiting.kind is WaitKind.GRADIENT:
        return phrases.never_saw_the_request_for_step(case.on, view.servers[case.waiter].open_step)
    return phrases.never_saw_the_request_for_version(case.on, view.workers[case.waiter].pulls)


def commit_lost(case: WaitCase) -> Proof | None:
    """A home's message to the coordinator, or the answer, was lost between the two."""
    view = case.view
    if case.waiting.kind is not WaitKind.COMMIT or view is None or not case.link_is_sound():
        return None
    if case.waiting.wait.seconds < case.evidence.patience or not case.nobody_is_stuck():
        return None
    homes = [case.evidence.view(name) for name in case.evidence.homes()]
    if any(home is not None and home.served_step <= case.step for home in homes):
        return None
    if any(wait.kind is WaitKind.STATE for wait in view.waits):
        return None  # a worker has not yet sent its state for the next step
    said = (phrases.is_applied_everywhere(case.step), phrases.has_committed(case.on, view.committed))
    if view.committed >= case.step:
        return Proof(Cause.ANSWER_LOST, phrases.commit_is_lost(case.step, case.waiter, case.on), said)
    return Proof(Cause.REQUEST_LOST, phrases.word_of_applying_is_lost(case.step, case.waiter, case.on), said)


def answer_lost(case: WaitCase) -> Proof | None:
    if not (case.link_is_sound() and case.nobody_is_stuck()) or not case.waiting.of_tensor:
        return None
    sender, receiver = case.view, case.waiter_view
    if sender is None or receiver is None or _moving(case) is not None or _held_back(case):
        return None
    sent = case.tensor(sender, case.number, case.bucket, case.waiter)
    sent_ago = -1.0 if sent is None else sent.ages.get(Happening.SENT, -1.0)
    if sent is None or sent_ago < 0 or _has_arrived(case, receiver) or not _later_came(case, sent_ago):
        return None
    # It is sent again after seconds; what has been sent often does not become innocent by being sent once more.
    if sent_ago < SENT_SECONDS and sent.counts.get(Happening.SENT, 0) < IN_VAIN:
        return None
    what = phrases.tensor_never_arrived(case.on, case.waiting.kind, case.bucket, case.step)
    said = (
        phrases.was_sent(case.on, sent.ages.get(Happening.IN_FLIGHT, 0.0), sent_ago),
        phrases.expected_it(case.waiter),
        phrases.heartbeats_pass(),
    )
    return Proof(Cause.ANSWER_LOST, what, said, seconds=sent_ago)


def _later_came(case: WaitCase, sent_ago: float) -> bool:
    """Whether anything that was sent after the tensor has arrived; if not, the link may have been cut meanwhile."""
    mine, _ = case.links()
    return mine is not None and mine.heard < sent_ago - _BOOKS_APART


def _has_arrived(case: WaitCase, receiver: TaskView) -> bool:
    is_gradient = case.waiting.kind is WaitKind.GRADIENT
    bucket = (receiver.served if is_gradient else receiver.buckets).get(case.bucket)
    if bucket is None:
        return True
    if is_gradient:
        return case.on in bucket.arrived or bucket.version > case.step
    return bucket.version >= case.number


def _moving(case: WaitCase) -> MovingView | None:
    """The transfer of the missing tensor, or of another of its kind, where it is still in progress."""
    link = None if case.view is None else case.view.links.get(case.waiter)
    kind = TensorKind.GRADIENT if case.waiting.kind is WaitKind.GRADIENT else TensorKind.VERSION
    of_its_kind = [] if link is None else [one for one in link.moving if one.what in ("", kind.value)]
    for moving in of_its_kind:
        if moving.step == case.number and moving.bucket == case.bucket:
            return moving
    return of_its_kind[0] if of_its_kind else None


def _held_back(case: WaitCase) -> bool:
    """The sender's kernel still holds bytes for the receiver's host: they are in flight, however slowly."""
    _, theirs = case.links()
    return theirs is not None and theirs.waiting >= HELD_BACK


def large_packets_lost(case: WaitCase) -> Proof | None:
    """Small packets pass and large ones vanish, as where a tunnel takes less than both ends assume.

    Heartbeats pass, so the link seems sound; but one end's kernel sends the same full segment again and again.
    """
    mine, theirs = case.links()
    if mine is None or theirs is None or not (mine.up and theirs.up and case.nobody_is_stuck()):
        return None
    for speaker, listener, out, back in ((case.on, case.waiter, theirs, mine), (case.waiter, case.on, mine, theirs)):
        if _goes_out_in_vain(out) and _small_ones_pass(out) and _small_ones_pass(back):
            said = (
                phrases.sent_again(speaker, out.stuck, out.retransmits, out.path_mtu),
                phrases.small_packets_arrive(listener, back.segments_in, back.watched),
            )
            what = phrases.large_packets_vanish(speaker, listener)
            return Proof(Cause.LINK_DOWN, what, said, culprit=speaker, peer=listener)
    return None


def _goes_out_in_vain(end: LinkView) -> bool:
    """Its kernel still tries: after a cut that has healed it waits for seconds before it tries again, and succeeds."""
    return end.retransmits >= IN_VAIN and end.resent > 0 and end.stuck >= HELD_BACK


def _small_ones_pass(end: LinkView) -> bool:
    """All the time: a link that was cut until a moment ago does not look like this."""
    return end.segments_in > 0 and end.watched >= WATCHED_SECONDS and end.quiet < 2 * HEARTBEAT_SECONDS


def slow_link(case: WaitCase) -> Proof | None:
    moving, (mine, theirs) = _moving(case), case.links()
    if any(end is not None and _goes_out_in_vain(end) for end in (mine, theirs)):
        return None
    if theirs is not None and _held_back(case) and case.link_is_sound() and case.nobody_is_stuck():
        what = phrases.link_is_slow_in_the_kernel(case.on, case.waiter, theirs.waiting)
        return Proof(Cause.SLOW_LINK, what, (phrases.kernel_holds(case.on, theirs.waiting, case.waiter),))
    if moving is None or moving.seconds < STUCK_SECONDS or mine is None or theirs is None or not case.nobody_is_stuck():
        return None
    moved = max(mine.moved, theirs.moved)
    if moved <= 0:
        return None
    what = phrases.link_is_slow(case.on, case.waiter, moving.nbytes)
    said = (
        phrases.bucket_left(case.on, moving.bucket, case.step, moving.seconds),
        phrases.rate_of_late(moved / 2 / 1024),
    )
    return Proof(Cause.SLOW_LINK, what, said, seconds=moving.seconds)


def transfer_stands(case: WaitCase) -> Proof | None:
    """A transfer was started, no byte of it moves, and both ends are well: it hangs in the transport."""
    moving = _standing(case)
    if moving is None or _by_rdma(case):
        return None
    what = phrases.transfer_stands_still(case.on, case.waiter, moving.bucket, moving.nbytes)
    said = phrases.transfer_stands_since(case.on, moving.seconds)
    return Proof(Cause.COMMUNICATION, what, (said,), seconds=moving.seconds)


def rdma_down(case: WaitCase) -> Proof | None:
    """The same over RDMA, which moves bytes without the help of either program: there the fabric is stuck.

    The devices retry silently, some of them forever; only the two tasks' heartbeats, which use TCP, show that both of
    them are well.
    """
    moving = _standing(case)
    if moving is None or not _by_rdma(case):
        return None
    what = phrases.nothing_passes_by_rdma(case.on, case.waiter)
    said = (phrases.transfer_stands_since(case.on, moving.seconds), phrases.heartbeats_pass_by_tcp())
    return Proof(Cause.LINK_DOWN, what, said, seconds=moving.seconds)


def _standing(case: WaitCase) -> MovingView | None:
    """The transfer of the missing tensor, where no byte of it moves although both ends are well."""
    moving, (mine, theirs) = _moving(case), case.links()
    if moving is None or mine is None or theirs is None or not (case.link_is_sound() and case.nobody_is_stuck()):
        return None
    still = moving.seconds >= UNHEARD_SECONDS and mine.moved <= 0 and theirs.moved <= 0
    return moving if still and not _held_back(case) else None


def _by_rdma(case: WaitCase) -> bool:
    _, theirs = case.links()
    return theirs is not None and theirs.by_rdma


def sum_stands(case: WaitCase) -> Proof | None:
    """Every worker has handed the bucket over, and torch.distributed does not complete its sum."""
    if case.waiting.kind is not WaitKind.SUM or case.waiting.wait.seconds < case.evidence.patience:
        return None
    if not has_come(case.evidence, case.waiting):
        return None
    what = phrases.sum_does_not_come(case.bucket, case.waiting.wait.names[:4], case.step)
    others = [
        phrases.has_handed_over(seen.task, bucket=seen.view.handed[1], step=seen.view.handed[0])
        for seen in case.evidence.tasks.values()
        if seen.view is not None and seen.view.handed is not None
    ]
    return Proof(Cause.COMMUNICATION, what, tuple(others[:8]), culprit=case.waiter, peer=case.on)
