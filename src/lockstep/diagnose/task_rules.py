"""Rules about a task that is not there, or not the one that was meant: proof comes from its monitor."""

from __future__ import annotations

import signal

from lockstep.diagnose.case import HEARD, UNHEARD, WATCHED, Case, Proof, ago
from lockstep.diagnose.views import LinkView
from lockstep.protocol.causes import Cause
from lockstep.protocol.reach import NOBODY_THERE, Reach
from lockstep.protocol.waits import WaitKind

LAST_WAIT_SECONDS = 10.0
STOPPED = 2.5
"""A process that is stopped for less than this may be under a debugger's hand for a moment."""


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def dead(case: Case) -> Proof | None:
    """Its monitor tells how it ended; or neither it nor its monitor is there any more."""
    monitor, silence = case.monitor, case.seen.monitor_silence
    if case.waiting.kind is WaitKind.END and case.waiting.wait.seconds < LAST_WAIT_SECONDS:
        return None  # tasks leave one after the other; the word that it is over may still be on its way
    if monitor is not None and monitor.exited and not monitor.out_of_memory and _is_meant(case):
        said = f"its monitor on {monitor.host} says that process {monitor.pid} {_how(monitor.exit_code)}"
        why = f": {monitor.reason}" if monitor.reason and monitor.exit_code > 0 else ""
        return Proof(Cause.DEAD, f"{case.on} {_how(monitor.exit_code)}{why}", (said,), seconds=monitor.phase_seconds)
    gone = case.view is None and silence.reach in NOBODY_THERE
    if gone and not case.forming:
        what = f"{case.on} is gone, and its monitor too"
        return Proof(Cause.DEAD, what, (f"at {case.seen.address}: {silence.text}",))
    return None


def _is_meant(case: Case) -> bool:
    return case.monitor is not None and case.monitor.task == case.on


def out_of_memory(case: Case) -> Proof | None:
    monitor = case.monitor
    if monitor is None or not monitor.exited or not monitor.out_of_memory:
        return None
    what = f"{case.on} {_how(monitor.exit_code)} for lack of memory"
    return Proof(Cause.OUT_OF_MEMORY, what, (f"its monitor on {monitor.host}: {monitor.out_of_memory}",))


def frozen(case: Case) -> Proof | None:
    monitor = case.monitor
    if monitor is None or monitor.exited or monitor.stopped < STOPPED:
        return None
    what = f"{case.on} is stopped (process {monitor.pid} on {monitor.host})"
    said = f"its monitor says that the kernel has it {monitor.state or 'stopped'} for {ago(monitor.stopped)}"
    return Proof(Cause.FROZEN, what, (said,), seconds=monitor.stopped, stack=monitor.stack)


def holds_the_interpreter(case: Case) -> Proof | None:
    """The process runs and its monitor answers, but no thread of the task does: native code lets none of them run."""
    monitor, (mine, _) = case.monitor, case.links()
    if case.view is not None or monitor is None or monitor.exited or monitor.stopped >= 0 or not _is_meant(case):
        return None
    unheard = mine.heard if mine is not None else monitor.silent if case.waiting.kind is WaitKind.SUM else -1.0
    if unheard < UNHEARD or case.forming or (mine is not None and monitor.incarnation != mine.incarnation):
        return None
    if case.seen.silence.reach is not Reach.MUTE:
        return None
    what = f"{case.on} runs (process {monitor.pid}), but native code keeps all its Python threads from running"
    said = (
        f"its monitor answers and has it as {monitor.state or 'running'}; the task does not: {case.seen.silence.text}"
    )
    return Proof(Cause.DEVICE_CALL, what, (said,), seconds=unheard, stack=monitor.stack)


def never_started(case: Case) -> Proof | None:
    silence = case.seen.monitor_silence
    if not case.forming or case.monitor is not None or silence.reach not in NOBODY_THERE:
        return None
    return Proof(Cause.NEVER_STARTED, f"{case.on} has not been started", (f"{case.seen.address}: {silence.text}",))


def wiring(case: Case) -> Proof | None:
    monitor = case.monitor
    if monitor is None or not monitor.task or _is_meant(case):
        return None
    what = f"{case.seen.address} should be {case.on} and is {monitor.task} (process {monitor.pid} on {monitor.host})"
    return Proof(Cause.WIRING, what, ("the monitor there says so itself",))


def version_differs(case: Case) -> Proof | None:
    ours = case.waiter_view.version if case.waiter_view is not None else case.evidence.version
    monitor = case.monitor
    if monitor is None or not ours or monitor.version in ("", ours) or not _is_meant(case):
        return None
    what = f"{case.on} runs Lockstep {monitor.version}, {case.waiter} runs {ours}"
    return Proof(Cause.MISMATCH, what, (f"its monitor says that it is of version {monitor.version}",))


def stale_incarnation(case: Case) -> Proof | None:
    monitor, (mine, _) = case.monitor, case.links()
    if monitor is None or mine is None or monitor.exited or not _is_meant(case) or case.forming:
        return None
    known, now = mine.incarnation.strip("0"), monitor.incarnation.strip("0")
    if not known or not now or known == now:
        return None
    what = f"{case.on} was started again: {case.waiter} waits for life {mine.incarnation}, which is over"
    said = f"its monitor has life {monitor.incarnation} now (process {monitor.pid} on {monitor.host})"
    return Proof(Cause.STALE_INCARNATION, what, (said,), seconds=monitor.phase_seconds)


def leftover_server(case: Case) -> Proof | None:
    """What answers at the address belongs to a job that was running before this one began."""
    monitor, job = case.monitor, case.evidence.job()
    if monitor is None or monitor.exited or not case.forming or not _is_meant(case):
        return None
    theirs = monitor.job.strip("0")
    if not theirs or monitor.job == job:
        return None
    what = f"{case.on} at {case.seen.address} belongs to another job ({monitor.job}), which still runs"
    said = f"its monitor: process {monitor.pid} on {monitor.host} is {monitor.phase} since {ago(monitor.phase_seconds)}"
    return Proof(Cause.LEFTOVER_SERVER, what, (said,))


def duplicate_task(case: Case) -> Proof | None:
    view = case.waiter_view
    mine = None if view is None else view.links.get(case.on)
    if mine is None or mine.refusal is not Cause.DUPLICATE_TASK:
        return None
    what = f"{case.waiter} was started twice"
    return Proof(Cause.DUPLICATE_TASK, what, (f"{case.on} said: {mine.finding}",), culprit=case.waiter, peer=case.on)


def out_of_step(case: Case) -> Proof | None:
    view = case.waiter_view
    side = None if view is None else view.workers.get(case.on)
    if case.waiting.kind is not WaitKind.GRADIENT or side is None or side.done < 0 or side.done > case.step:
        return None
    what = f"{case.on} stopped after {side.done} steps; the others go on with step {case.step}"
    return Proof(Cause.OUT_OF_STEP, what, (f"{case.waiter} was told so by {case.on} itself",))


def link_down(case: Case) -> Proof | None:
    """Neither end hears the other, and at least one of the two is known to live; or no packet comes back at all."""
    mine, theirs = case.links()
    if case.waiting.kind is WaitKind.SUM:
        return _no_packets(case)
    if case.forming or mine is None or (mine.up and mine.heard < UNHEARD):
        return None
    if theirs is not None:
        return _both_ways(case, mine, theirs)
    silence = case.seen.monitor_silence
    if case.view is None and case.monitor is None and silence.reach is Reach.SILENT:
        others = _who_hears(case)
        if others:
            heard = f"{', '.join(others)} heard {case.on} less than {HEARD:g} s ago: it lives"
            what = f"no packet comes back from {case.on} to {case.waiter}, though others reach it"
            return Proof(Cause.LINK_DOWN, what, (heard, f"{case.seen.address}: {silence.text}"), seconds=mine.heard)
        what = f"no packet comes back from {case.on}: its host is down, or the network between the two is cut"
        return Proof(Cause.LINK_DOWN, what, (f"{case.seen.address}: {silence.text}",), seconds=mine.heard)
    return None


def _no_packets(case: Case) -> Proof | None:
    """Workers without servers have no link of ours between them; but whether a host answers at all is seen."""
    silence = case.seen.monitor_silence
    if case.view is not None or case.monitor is not None or silence.reach is not Reach.SILENT:
        return None
    what = f"no packet comes back from {case.on}: its host is down, or the network between the two is cut"
    return Proof(Cause.LINK_DOWN, what, (f"{case.seen.address}: {silence.text}",))


def _both_ways(case: Case, mine: LinkView, theirs: LinkView) -> Proof | None:
    if not (mine.up and theirs.up):
        cut = mine.heard >= 2 * UNHEARD and theirs.heard >= 2 * UNHEARD
    elif _kernel_knows(mine, theirs):
        cut = _lost_between(mine, theirs) and _lost_between(theirs, mine)
    else:
        cut = mine.heard >= 2 * UNHEARD and theirs.heard >= 2 * UNHEARD
    if not cut or not case.nobody_is_stuck():
        return None
    what = f"{case.waiter} and {case.on} both live, but neither hears the other"
    return Proof(Cause.LINK_DOWN, what, _packets(case, mine, theirs), seconds=min(mine.heard, theirs.heard))


def _kernel_knows(mine: LinkView, theirs: LinkView) -> bool:
    """Both kernels were watched long enough for their counters to prove something."""
    return min(mine.watched, theirs.watched) >= WATCHED


def _lost_between(sender: LinkView, receiver: LinkView) -> bool:
    """What the sender's kernel has sent is not acknowledged, and the receiver's kernel has got nothing.

    A kernel acknowledges for its process, however little of the processor that one gets: a task that is only slow, or
    stopped, does not look like this.
    """
    return sender.waiting > 0 and receiver.segments_in == 0


def _packets(case: Case, mine: LinkView, theirs: LinkView) -> tuple[str, ...]:
    return tuple(
        f"{task}: last heard {ago(link.heard)} ago; its kernel holds {link.waiting} bytes without an acknowledgement "
        f"and got {link.segments_in} TCP segments in {ago(link.watched)}"
        for task, link in ((case.waiter, mine), (case.on, theirs))
    )


def _who_hears(case: Case) -> list[str]:
    found = []
    for seen in case.evidence.tasks.values():
        link = None if seen.view is None else seen.view.links.get(case.on)
        if link is not None and link.up and 0 <= link.heard < HEARD and seen.task != case.waiter:
            found.append(seen.task)
    return found[:3]


def _is_one_way(mine: LinkView, theirs: LinkView) -> str | None:
    """Which end is deaf, ``here`` or ``there``, while the other one still gets packets.

    Over TCP both ends soon hear nothing new, since answers are missing; but the kernel of the end that is reached still
    counts the segments that the other one sends again and again.
    """
    if max(mine.heard, theirs.heard) < UNHEARD or not (mine.up and theirs.up and _kernel_knows(mine, theirs)):
        return None
    if _lost_between(theirs, mine) and theirs.segments_in > 0:
        return "here"
    if _lost_between(mine, theirs) and mine.segments_in > 0:
        return "there"
    return None


def one_way_link(case: Case) -> Proof | None:
    mine, theirs = case.links()
    if mine is None or theirs is None or case.forming or not case.nobody_is_stuck():
        return None
    deaf = _is_one_way(mine, theirs)
    if deaf is None:
        return None
    speaker, listener = (case.on, case.waiter) if deaf == "here" else (case.waiter, case.on)
    silent_for = mine.heard if deaf == "here" else theirs.heard
    what = f"what {speaker} sends does not reach {listener}; the other direction works"
    said = _packets(case, mine, theirs)
    return Proof(Cause.ONE_WAY_LINK, what, said, culprit=speaker, peer=listener, seconds=silent_for)
