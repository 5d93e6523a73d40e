"""Rules about a task that is missing, or is not the expected one: the proof comes from its monitor."""

from __future__ import annotations

from lockstep.diagnose import phrases
from lockstep.diagnose.case import Proof, WaitCase
from lockstep.diagnose.views import LinkView
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.death import Ruling, Word, rule_on
from lockstep.protocol.core.reach import NOBODY_THERE, UNREACHABLE, Reach
from lockstep.protocol.core.timing import (
    HEARD_SECONDS,
    LAST_WAIT_SECONDS,
    STOPPED_SECONDS,
    UNHEARD_SECONDS,
    WATCHED_SECONDS,
)
from lockstep.protocol.core.waits import UNLINKED, WaitKind


def dead(case: WaitCase) -> Proof | None:
    """Its monitor reports how it ended; or both are gone, according to its host or to a majority of all tasks."""
    monitor, silence = case.monitor, case.seen.monitor_silence
    if case.waiting.kind is WaitKind.END and case.waiting.wait.seconds < LAST_WAIT_SECONDS:
        return None  # tasks leave one after another; the message that the job is over may still be in flight
    if monitor is not None and monitor.exited and monitor.out_of_memory is None and _is_meant(case):
        how = phrases.how_it_ended(monitor.exit_code)
        what = phrases.ended(case.on, how, monitor.reason if monitor.exit_code > 0 else "")
        said = phrases.monitor_saw_it_end(monitor.host, monitor.pid, how)
        return Proof(Cause.DEAD, what, (said,), seconds=monitor.phase_seconds)
    if _refuses(case) and _ruling(case) is Ruling.DEAD:
        found = (phrases.looked_at(case.seen.address, silence.text), phrases.what_others_know(case.seen.words))
        return Proof(Cause.DEAD, phrases.gone_with_its_monitor(case.on), found)
    return _ended_before_it_joined(case)


def _ended_before_it_joined(case: WaitCase) -> Proof | None:
    """Its monitor has left too, but the waiter had asked it before."""
    mine, _ = case.links()
    if not case.forming or case.monitor is not None or mine is None or not mine.last_end:
        return None
    if case.seen.monitor_silence.reach not in NOBODY_THERE:
        return None
    what, remedy = phrases.ended_before_it_joined(case.on, mine.last_end), phrases.remedy_of_a_failed_start()
    return Proof(Cause.DEAD, what, (_found_there(case),), remedy=remedy)


def _refuses(case: WaitCase) -> bool:
    """Nothing seems to listen at its address; but a firewall can refuse connections in its name."""
    silent = case.view is None and case.monitor is None and not case.forming
    return silent and case.seen.monitor_silence.reach in NOBODY_THERE


def _ruling(case: WaitCase) -> Ruling:
    words = {**case.seen.words, **dict.fromkeys(_who_hears(case), Word.HEARS)}
    return rule_on(words.values(), len(case.evidence.tasks))


def _is_meant(case: WaitCase) -> bool:
    return case.monitor is not None and case.monitor.task == case.on


def out_of_memory(case: WaitCase) -> Proof | None:
    monitor = case.monitor
    if monitor is None or not monitor.exited or monitor.out_of_memory is None:
        return None
    what = phrases.ended_for_lack_of_memory(case.on, phrases.how_it_ended(monitor.exit_code))
    return Proof(Cause.OUT_OF_MEMORY, what, (phrases.monitor_on(monitor.host, monitor.out_of_memory),))


def frozen(case: WaitCase) -> Proof | None:
    if case.monitor is None:
        return _host_paused(case)
    monitor = case.monitor
    if monitor.exited or monitor.stopped < STOPPED_SECONDS:
        return None
    what = phrases.is_stopped(case.on, monitor.pid, monitor.host, monitor.stopped)
    said = phrases.kernel_has_it_stopped(monitor.state, monitor.stopped)
    return Proof(Cause.FROZEN, what, (said,), seconds=monitor.stopped, stack=monitor.stack)


def _host_paused(case: WaitCase) -> Proof | None:
    """The task and its monitor are separate processes: only if their whole host is paused are both silent while its
    kernel accepts connections for them."""
    mine, _ = case.links()
    if case.view is not None or case.forming or case.seen.monitor_silence.reach is not Reach.MUTE or _who_hears(case):
        return None
    unheard = mine.heard if mine is not None else case.waiting.wait.seconds if case.waiting.kind in UNLINKED else -1
    if unheard < max(UNHEARD_SECONDS, case.evidence.patience):
        return None
    said = (phrases.nothing_from_the_task(case.waiter, case.on, unheard), _found_there(case))
    return Proof(Cause.FROZEN, phrases.host_is_paused(case.on), said, seconds=unheard)


def cut_off(case: WaitCase) -> Proof | None:
    """Its monitor sees it run, but no longer has a connection to it: the task has closed all its descriptors."""
    monitor = case.monitor
    if monitor is None or monitor.exited or monitor.phase != TaskPhase.CUT_OFF or not _is_meant(case):
        return None
    what = phrases.has_closed_its_descriptors(case.on, monitor.pid, monitor.host)
    said = phrases.runs_without_connections(monitor.pid, monitor.state, monitor.phase_seconds)
    remedy = phrases.keep_descriptors_open()
    return Proof(Cause.COMMUNICATION, what, (said,), seconds=monitor.phase_seconds, stack=monitor.stack, remedy=remedy)


def holds_the_interpreter(case: WaitCase) -> Proof | None:
    """The process runs and its monitor answers, but no thread of the task does: native code blocks them all."""
    monitor, (mine, _) = case.monitor, case.links()
    if case.view is not None or monitor is None or monitor.exited or monitor.stopped >= 0 or not _is_meant(case):
        return None
    unheard = mine.heard if mine is not None else monitor.silent if case.waiting.kind in UNLINKED else -1.0
    if unheard < UNHEARD_SECONDS or case.forming or (mine is not None and monitor.incarnation != mine.incarnation):
        return None
    if case.seen.silence.reach is not Reach.MUTE:
        return None
    place = monitor.stack[0] if monitor.stack else ""
    what = phrases.native_code_holds_all_threads(case.on, monitor.pid, monitor.host, place)
    said = phrases.only_its_monitor_answers(monitor.state, case.seen.silence.text)
    cause = Cause.DEVICE_CALL if monitor.on_device else Cause.USER_CODE
    return Proof(cause, what, (said,), seconds=unheard, stack=monitor.stack)


def never_started(case: WaitCase) -> Proof | None:
    silence = case.seen.monitor_silence
    if not case.forming or case.monitor is not None or silence.reach not in NOBODY_THERE:
        return None
    said = phrases.found_at(case.seen.address, silence.text)
    return Proof(Cause.NEVER_STARTED, phrases.not_started(case.on), (said,))


def wiring(case: WaitCase) -> Proof | None:
    monitor = case.monitor
    if monitor is None or not monitor.task or _is_meant(case):
        return None
    what = phrases.another_task_there(case.seen.address, case.on, monitor.task, monitor.pid, monitor.host)
    return Proof(Cause.WIRING, what, (phrases.that_monitor_says_so(),))


def version_differs(case: WaitCase) -> Proof | None:
    ours = case.waiter_view.version if case.waiter_view is not None else case.evidence.version
    monitor = case.monitor
    if monitor is None or not ours or monitor.version in ("", ours) or not _is_meant(case):
        return None
    what = phrases.versions_differ(case.on, monitor.version, case.waiter, ours)
    return Proof(Cause.MISMATCH, what, (phrases.monitor_is_of_version(monitor.version),))


def stale_incarnation(case: WaitCase) -> Proof | None:
    monitor, (mine, _) = case.monitor, case.links()
    if monitor is None or mine is None or monitor.exited or not _is_meant(case) or case.forming:
        return None
    known, now = mine.incarnation.strip("0"), monitor.incarnation.strip("0")
    if not known or not now or known == now:
        return None
    what = phrases.waits_for_a_former_life(case.on, case.waiter, mine.incarnation)
    said = phrases.has_another_life_now(monitor.incarnation, monitor.pid, monitor.host)
    return Proof(Cause.STALE_INCARNATION, what, (said,), seconds=monitor.phase_seconds)


def leftover_server(case: WaitCase) -> Proof | None:
    """The task at that address belongs to a job that was running before this one began."""
    monitor, job = case.monitor, case.evidence.job()
    if monitor is None or monitor.exited or not case.forming or not _is_meant(case):
        return None
    theirs = monitor.job.strip("0")
    if not theirs or monitor.job == job:
        return None
    what = phrases.belongs_to_another_job(case.on, case.seen.address, monitor.job)
    said = phrases.process_of_the_other_job(monitor.pid, monitor.host, monitor.phase, monitor.phase_seconds)
    return Proof(Cause.LEFTOVER_SERVER, what, (said,))


def duplicate_task(case: WaitCase) -> Proof | None:
    view = case.waiter_view
    mine = None if view is None else view.links.get(case.on)
    if mine is None or mine.refusal is not Cause.DUPLICATE_TASK:
        return None
    what, said = phrases.started_twice(case.waiter), phrases.was_refused_by(case.on, mine.finding)
    return Proof(Cause.DUPLICATE_TASK, what, (said,), culprit=case.waiter, peer=case.on)


def out_of_step(case: WaitCase) -> Proof | None:
    view = case.waiter_view
    if case.waiting.kind is WaitKind.SUM:
        return _finished_before(case)
    side = None if view is None else view.workers.get(case.on)
    if case.waiting.kind is not WaitKind.GRADIENT or side is None or side.done < 0 or side.done > case.step:
        return None
    what = phrases.stopped_early(case.on, side.done, case.step)
    return Proof(Cause.OUT_OF_STEP, what, (phrases.was_told_so(case.waiter, case.on),))


def _finished_before(case: WaitCase) -> Proof | None:
    """Where torch.distributed carries gradients no rank is told how many steps another has made: it says so itself."""
    view = case.view
    if view is None or view.main is None or view.main.doing is not Doing.FINISHING or view.step >= case.step:
        return None
    what = phrases.stopped_early(case.on, view.step + 1, case.step)
    return Proof(Cause.OUT_OF_STEP, what, (phrases.says_so_itself(case.on),))


def link_down(case: WaitCase) -> Proof | None:
    """Neither end hears the other, and at least one of them is known to be alive; or no packet comes back at all."""
    mine, theirs = case.links()
    if case.waiting.kind is WaitKind.SUM or (case.waiting.kind is WaitKind.CALL and mine is None):
        return _no_packets(case)
    if case.forming or mine is None or (mine.up and mine.heard < UNHEARD_SECONDS):
        return None
    if theirs is not None:
        return _both_ways(case, mine, theirs)
    others = _who_hears(case)
    if others and (_gives_no_packets(case) or _refuses(case)):
        what = phrases.no_packet_though_others_reach_it(case.on, case.waiter)
        said = (phrases.others_hear_it(others[:3], case.on, HEARD_SECONDS), _found_there(case))
        return Proof(Cause.LINK_DOWN, what, said, seconds=mine.heard)
    return _refused(case, mine.heard) or _no_packets(case, mine.heard)


def _refused(case: WaitCase, seconds: float) -> Proof | None:
    if not _refuses(case) or case.waiting.kind is WaitKind.END or _ruling(case) is Ruling.DEAD:
        return None
    said = (_found_there(case), phrases.what_others_know(case.seen.words))
    return Proof(Cause.LINK_DOWN, phrases.refused_without_proof(case.on), said, seconds=seconds)


def _no_packets(case: WaitCase, seconds: float = -1.0) -> Proof | None:
    """Workers without servers have no link of ours between them, but whether a host answers at all can be seen."""
    if not _gives_no_packets(case):
        return None
    return Proof(Cause.LINK_DOWN, phrases.no_packet_comes_back(case.on), (_found_there(case),), seconds=seconds)


def _gives_no_packets(case: WaitCase) -> bool:
    return case.view is None and case.monitor is None and case.seen.monitor_silence.reach is Reach.SILENT


def _found_there(case: WaitCase) -> str:
    return phrases.found_at(case.seen.address, case.seen.monitor_silence.text)


def _both_ways(case: WaitCase, mine: LinkView, theirs: LinkView) -> Proof | None:
    if not (mine.up and theirs.up):
        # Where one end finds that it cannot reach the other, this explains it; else opening may just take long.
        enough = UNHEARD_SECONDS if {mine.answer, theirs.answer} & UNREACHABLE else 2 * UNHEARD_SECONDS
        cut = mine.heard >= enough and theirs.heard >= enough
    elif _kernel_knows(mine, theirs):
        cut = _lost_between(mine, theirs) and _lost_between(theirs, mine)
    else:
        cut = mine.heard >= 2 * UNHEARD_SECONDS and theirs.heard >= 2 * UNHEARD_SECONDS
    if not cut or not case.nobody_is_stuck():
        return None
    what = phrases.neither_hears_the_other(case.waiter, case.on)
    return Proof(Cause.LINK_DOWN, what, _packets(case, mine, theirs), seconds=min(mine.heard, theirs.heard))


def _kernel_knows(mine: LinkView, theirs: LinkView) -> bool:
    """Both kernels were watched long enough for their counters to be proof."""
    return min(mine.watched, theirs.watched) >= WATCHED_SECONDS


def _lost_between(sender: LinkView, receiver: LinkView) -> bool:
    """What the sender's kernel sent is not acknowledged, and the receiver's kernel received nothing.

    A kernel acknowledges on behalf of its process, however little CPU time that gets: a task that is merely slow, or
    stopped, does not look like this.
    """
    return sender.waiting > 0 and receiver.segments_in == 0


def _packets(case: WaitCase, mine: LinkView, theirs: LinkView) -> tuple[str, ...]:
    return tuple(
        phrases.kernel_counters(task, link.heard, link.waiting, link.segments_in, link.watched)
        for task, link in ((case.waiter, mine), (case.on, theirs))
    )


def _who_hears(case: WaitCase) -> list[str]:
    found = [task for task, word in case.seen.words.items() if word is Word.HEARS]
    for seen in case.evidence.tasks.values():
        link = None if seen.view is None else seen.view.links.get(case.on)
        if link is not None and link.up and 0 <= link.heard < HEARD_SECONDS and seen.task != case.waiter:
            found.append(seen.task)
    return list(dict.fromkeys(found))


def _deaf_end(mine: LinkView, theirs: LinkView) -> LinkView | None:
    """The end that receives nothing while the other still receives packets.

    Over TCP both ends soon receive nothing new, since acknowledgements are missing; but the kernel of the end that can
    be reached still counts the segments that the other end retransmits.
    """
    if max(mine.heard, theirs.heard) < UNHEARD_SECONDS or not (mine.up and theirs.up and _kernel_knows(mine, theirs)):
        return None
    if _lost_between(theirs, mine) and theirs.segments_in > 0:
        return mine
    if _lost_between(mine, theirs) and mine.segments_in > 0:
        return theirs
    return None


def one_way_link(case: WaitCase) -> Proof | None:
    mine, theirs = case.links()
    if mine is None or theirs is None or case.forming or not case.nobody_is_stuck():
        return None
    deaf = _deaf_end(mine, theirs)
    if deaf is None:
        return None
    speaker, listener = (case.on, case.waiter) if deaf is mine else (case.waiter, case.on)
    what, said = phrases.one_direction_is_cut(speaker, listener), _packets(case, mine, theirs)
    return Proof(Cause.ONE_WAY_LINK, what, said, culprit=speaker, peer=listener, seconds=deaf.heard)
