"""From what is seen of all ranks to a verdict or a notice: pure. The order of the rules, first come first served:

1. Calls that differ, a ring of waits, groups in opposite order: the recordings alone prove it.
2. A rank whose process is gone: killed, failed, or left while others still need it.
3. A rank whose process is stopped.
4. A rank that has not entered the collective that others are in: why, its own evidence says.
5. Ranks that have not joined the job at all.
6. All are in the collective and none is done: the link, or the collective itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lockstep.diagnose.verdict import Diagnosis, TaskLine, Verdict
from lockstep.flight import phrases as recorded
from lockstep.flight.account import Account, Explanation, StuckCall
from lockstep.flight.analysis import account_of
from lockstep.flight.diagnosis import diagnosis_of
from lockstep.flight.recording import GLOO, CallState, RecordedCall
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.timing import STALL_AFTER_SECONDS
from lockstep.watch import injected, phrases
from lockstep.watch.naming import names_of
from lockstep.watch.sights import RankSight, Vitality, Work

BUSY_SHARE: Final = 0.4
"""Of one processor: less, and a program waits."""
MUTE_SECONDS: Final = 2.5
"""No thread of a process has had the interpreter for so long: native code keeps it."""
STARVED_SECONDS: Final = 5.0
DEAD_LOADER_SECONDS: Final = 2.0
STACK_SECONDS: Final = 20.0
"""On a busy host a stack or a dump takes several tries; later, what can be said without is said."""
RESENT: Final = 3
"""So often has the kernel sent the same segment in vain: after about one and a half seconds."""
JOIN_SECONDS: Final = 10.0
"""Ranks of one job import their libraries at different speeds."""
START_SECONDS: Final = 30.0
"""Before the first collective, a program may import and load for so long before it is noticed."""
ITSELF_SECONDS: Final = 10.0
"""Where no bytes can be counted, a collective has so long before it is suspected itself."""
_PROVEN: Final = frozenset({Explanation.DIFFERENCE, Explanation.RING, Explanation.ORDER})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSight:
    """All that is known at one moment."""

    account: Account
    sights: Mapping[int, RankSight]
    now: float
    waited: float
    """Seconds since anything moved."""
    still: float = 0.0
    """Seconds since a byte moved on any connection between ranks; 0 where that cannot be told."""
    starving: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which a rank has waited for its input while nobody was at work on it."""
    silent_hosts: tuple[str, ...] = ()
    """Hosts whose watcher does not answer any more."""
    began: bool = True
    """A step or a collective has ended before."""

    def of(self, life: Vitality) -> list[RankSight]:
        return [one for _, one in sorted(self.sights.items()) if one.life is life]

    @property
    def root(self) -> StuckCall | None:
        return self.account.root


def judge(look: JobSight) -> Diagnosis | None:
    """What is wrong, or None while nothing is."""
    look = _with_short_rings(_with_the_aborted(look))
    found = diagnosis_of(look.account, now=look.now, asker="lockstep watch")
    verdict = _verdict(look, found.verdict)
    if verdict is None:
        return None
    return replace(
        found, healthy=False, summary="", verdict=_named(verdict, look), time=look.now, tasks=tuple(_tasks(look, found))
    )


def _verdict(look: JobSight, recorded_verdict: Verdict | None) -> Verdict | None:
    if recorded_verdict is not None and look.account.kind in _PROVEN and _counts(look):
        return recorded_verdict
    base = recorded_verdict if look.root is not None else None
    base = base or Verdict(cause=Cause.UNKNOWN, culprit="", seconds=look.waited)
    return (
        _gone(look, base)
        or _stopped(look, base)
        or _absent(look, base)
        or _not_joined(look, base)
        or _itself(look, base)
        or _outside(look, base)
    )


def _counts(look: JobSight) -> bool:
    """A difference between calls that are over explains only a job that has failed."""
    return look.root is not None or any(_unclean(one) for one in look.of(Vitality.GONE))


def _with_the_aborted(look: JobSight) -> JobSight:
    """Gloo aborts a rank that receives more than it expects. Its own call is lost with it; but where two others differ
    in size, it agreed with the smaller one."""
    difference = look.account.difference
    ways = (None, -signal.SIGABRT)
    aborted = [one for one in look.of(Vitality.GONE) if one.exit_code in ways and one.recording is None]
    if difference is None or not aborted or len(difference.sides) != 2:
        return look
    first, second = difference.sides
    if len(first.ranks) != len(second.ranks) or not first.call.backend == second.call.backend == GLOO:
        return look
    sides = tuple(sorted(difference.sides, key=lambda side: _bytes_of(side.call)))
    return replace(look, account=replace(look.account, difference=replace(difference, sides=sides)))


def _with_short_rings(look: JobSight) -> JobSight:
    """Where a recorder has overwritten its older calls, it cannot tell whether a rank was ever in a group's call. But a
    rank that is in another call right now, like all others of a ring of waits, has not come back from there."""
    if look.account.kind is not Explanation.UNCLEAR:
        return look
    kept = {rank: one.recording for rank, one in look.sights.items() if one.recording is not None}
    if any(all(call.over for call in kept[rank].calls) for rank in look.account.culprits if rank in kept):
        return look
    whole = {
        rank: replace(one, calls=tuple(replace(call, record=place) for place, call in enumerate(one.calls)))
        for rank, one in kept.items()
    }
    account = account_of(whole)
    return replace(look, account=account) if account.kind is Explanation.RING else look


def _bytes_of(call: RecordedCall) -> int:
    return call.inputs.elements * (2 if call.inputs.dtypes[:1] in (("Double",), ("Long",)) else 1)


# -- ranks that are gone --


def _gone(look: JobSight, base: Verdict) -> Verdict | None:
    gone = look.of(Vitality.GONE)
    early = next((one for one in gone if not _unclean(one) and _is_needed(one, look)), None)
    # Those who fail because another has left, or was killed, fail after it, and may have been seen at the same time.
    one = early or min(filter(_unclean, gone), key=_blame, default=None)
    if one is None:
        return None
    who = phrases.whom(one.rank, one.pid, one.host)
    seconds = max(0.0, look.now - one.ended)
    base = replace(base, stuck=base.stuck or phrases.job_lost(one.rank, one.status.step), seconds=seconds)
    if one is early:
        return _about(base, one, Cause.OUT_OF_STEP, phrases.left_early(who), phrases.remedy_left_early())
    remedy = "Read the last lines of its output, then start the job again."
    if one.facts.error:
        return _about(base, one, Cause.FAILED, phrases.failed(who, one.facts.error, one.facts.place), remedy)
    return _about(base, one, Cause.DEAD, phrases.died(who, one.exit_code), remedy)


def _unclean(one: RankSight) -> bool:
    if one.exit_code is not None:
        return one.exit_code != 0
    # Of one that has never let us in, nobody knows.
    return one.entered and one.status.leaving != injected.EXITING


def _blame(one: RankSight) -> tuple[int, float, float]:
    """First who was killed, then who failed first; last whom a launcher ended because of another."""
    ended_by_launcher = one.exit_code in (-signal.SIGTERM, -signal.SIGINT)
    killed = one.exit_code is not None and one.exit_code < 0 and not ended_by_launcher
    # Whoever fails because another is gone ends after it: it has to notice, and to leave.
    return (0 if killed else 2 if ended_by_launcher else 1), one.ended, one.facts.raised


def _is_needed(left: RankSight, look: JobSight) -> bool:
    """Others are in a call that cannot end without it; or have made calls of a group of its that it has not, and
    failed since."""
    if any(left.rank in (*one.missing, *one.silent, *one.unclear) for one in look.account.stuck):
        return True
    failed = any(_unclean(one) or one.facts.error for one in look.sights.values())
    own = _highest(left)
    return failed and any(
        number > own.get(group, 0)
        for one in look.sights.values()
        for group, number in _highest(one).items()
        if left.rank in one.facts.groups.get(group, ())
    )


def _highest(one: RankSight) -> dict[str, int]:
    """The last call of each group."""
    calls = one.recording.calls if one.recording is not None else ()
    return {call.group: call.number for call in calls if not call.p2p}


# -- ranks that are there --


def _stopped(look: JobSight, base: Verdict) -> Verdict | None:
    for one in look.of(Vitality.STOPPED):
        what = phrases.frozen(phrases.whom(one.rank, one.pid, one.host))
        seen = (phrases.kernel_says(one.rank, one.state), *base.evidence)
        found = replace(base, stuck=base.stuck or phrases.nothing_moves(one.rank, one.status.step), evidence=seen)
        return _about(found, one, Cause.FROZEN, what, phrases.remedy_frozen(one.pid))
    return None


def _absent(look: JobSight, base: Verdict) -> Verdict | None:
    """A rank that others wait for, and that is in no call itself."""
    for rank in look.account.culprits:
        one = look.sights.get(rank)
        if one is not None and one.life is Vitality.RUNS and look.root is not None and not _is_in_a_call(one):
            return _why(look, base, one)
    return None


def _is_in_a_call(one: RankSight) -> bool:
    return one.recording is not None and any(not call.over for call in one.recording.calls)


def _why(look: JobSight, base: Verdict, one: RankSight) -> Verdict | None:
    who = phrases.whom(one.rank, one.pid, one.host)
    unseen = one.work is Work.NOT_SEEN or (one.entered and look.began and one.recording is None)
    if look.waited < STACK_SECONDS and (unseen or one.work is Work.COLLECTIVE):
        return None
    if one.work is Work.INPUT:
        return _input(look, base, one, who)
    if one.entered and one.status.beat and look.now - one.status.beat > MUTE_SECONDS:
        cause = Cause.DEVICE_CALL if one.on_device else Cause.USER_CODE
        seen = (phrases.no_sign(one.rank, look.now - one.status.beat), *base.evidence)
        found = replace(base, evidence=seen)
        return _about(found, one, cause, phrases.native_code(who, one.place), phrases.remedy_program(one.pid))
    seen = (phrases.used_processor(one.rank, one.busy), *base.evidence)
    found = replace(base, evidence=seen)
    if one.busy >= BUSY_SHARE or one.runnable:
        return _about(found, one, Cause.LOOPING, phrases.computes(who, one.place), phrases.remedy_program(one.pid))
    return _about(found, one, Cause.USER_CODE, phrases.waits_idle(who, one.place), phrases.remedy_program(one.pid))


def _input(look: JobSight, base: Verdict, one: RankSight, who: str) -> Verdict | None:
    stopped = [helper.pid for helper in one.helpers if helper.stopped]
    dead = [helper.pid for helper in one.helpers if helper.dead]
    starving = look.starving.get(one.rank, 0.0)
    if stopped or starving >= (DEAD_LOADER_SECONDS if dead else STARVED_SECONDS):
        what = phrases.starved(who, stopped, dead)
        return _about(base, one, Cause.INPUT_STARVED, what, phrases.remedy_starved(stopped))
    return _about(base, one, Cause.USER_CODE, phrases.slow_input(who), phrases.remedy_starved(()))


def _about(base: Verdict, one: RankSight, cause: Cause, what: str, remedy: str) -> Verdict:
    stack = tuple(recorded.stack_line(line) for line in one.stack)
    return replace(
        base,
        cause=cause,
        culprit=recorded.rank_name(one.rank),
        host=one.host,
        pid=one.pid,
        what=what,
        stack=stack or base.stack,
        remedy=remedy,
    )


# -- before the first call, and outside of all --


def _not_joined(look: JobSight, base: Verdict) -> Verdict | None:
    """Some wait in ``init_process_group`` for others."""
    waiting = [one.rank for one in look.of(Vitality.RUNS) if one.work is Work.JOINING]
    if not waiting or look.account.stuck:
        return None
    unseen = [one.rank for one in look.of(Vitality.UNSEEN)]
    if unseen:
        return replace(
            base,
            cause=Cause.NEVER_STARTED,
            culprit=recorded.ranks(unseen),
            peer=recorded.ranks(waiting),
            seconds=look.waited,
            stuck=phrases.joining(waiting, unseen),
            what=phrases.never_started(unseen, len(look.sights)),
            remedy=phrases.remedy_never_started(),
        )
    late = [one for one in look.of(Vitality.RUNS) if one.work in (Work.PROGRAM, Work.INPUT)]
    if not late or look.waited < JOIN_SECONDS:
        return None
    found = replace(base, stuck=phrases.joining(waiting, [one.rank for one in late]), seconds=look.waited)
    return _why(look, found, late[0])


def _outside(look: JobSight, base: Verdict) -> Verdict | None:
    """No call is stuck: whoever stands still does so in the program, and so do the others, if there are any."""
    if look.account.kind is not Explanation.NOTHING or (not look.began and look.waited < START_SECONDS):
        return None
    for one in look.of(Vitality.RUNS):
        if one.work in (Work.PROGRAM, Work.INPUT):
            found = replace(base, stuck=phrases.nothing_moves(one.rank, one.status.step), seconds=look.waited)
            return _why(look, found, one)
    return None


# -- all are in it --


def _itself(look: JobSight, base: Verdict) -> Verdict | None:
    blind = not any(one.recording for one in look.sights.values())
    if look.root is None and not blind:
        return None
    ranks = look.sights if look.root is None else look.root.standings
    members = [look.sights[rank] for rank in ranks if rank in look.sights]
    cut = _cut_link(members)
    silent = any(one.life is Vitality.UNKNOWN for one in members)
    if cut is not None and (look.account.kind is Explanation.ITSELF or silent or blind):
        one, address = cut
        counted = one.links[address]
        who = phrases.whom(one.rank, one.pid, one.host)
        what = phrases.link_cut(who, address, counted.stuck, counted.retransmits)
        seen = (*(phrases.watcher_silent(host) for host in look.silent_hosts), *base.evidence)
        found = replace(base, evidence=seen, peer="", link=address)
        return _about(found, one, Cause.LINK_DOWN, what, phrases.remedy_link())
    if look.account.kind is not Explanation.ITSELF:
        return None
    if look.root is not None and not _is_on_tcp(look.root):
        return _on_device(look, base, look.root)
    if look.still >= STARVED_SECONDS or (not look.still and look.waited >= ITSELF_SECONDS):
        what = phrases.no_bytes_moved(look.still) if look.still else base.what
        return replace(base, cause=Cause.COMMUNICATION, what=what)
    return None


def _is_on_tcp(root: StuckCall) -> bool:
    """Other libraries than gloo have ways of their own, so no byte on a connection means nothing."""
    return all(call.backend == GLOO for call in root.calls.values())


def _on_device(look: JobSight, base: Verdict, root: StuckCall) -> Verdict | None:
    """NCCL's calls wait on the GPU for all that was queued there before, which may well take a while; whether they have
    begun is written only where the job's user has asked for it."""
    if look.waited < ITSELF_SECONDS:
        return None
    begun = all(call.state is CallState.STARTED for call in root.calls.values())
    proven = begun or look.waited >= STALL_AFTER_SECONDS
    return replace(base, cause=Cause.COMMUNICATION if proven else Cause.UNKNOWN)


def _cut_link(members: Iterable[RankSight]) -> tuple[RankSight, str] | None:
    """Whose connection the kernel repeats itself on, and to which address."""
    worst = max(
        ((counted.retransmits, one.rank, one, address) for one in members for address, counted in one.links.items()),
        key=lambda found: found[:2],
        default=None,
    )
    if worst is None or worst[0] < RESENT or not worst[2].links[worst[3]].stuck:
        return None
    return worst[2], worst[3]


# -- what a report shows besides --


def _named(verdict: Verdict, look: JobSight) -> Verdict:
    """The step, and the parameters in the tensor that is missing."""
    steps = [one.status.step for one in look.sights.values() if one.entered]
    about_root = look.root is not None and verdict.key == recorded.collective(look.root.collective)
    found = replace(verdict, step=min(steps) if any(steps) else -2, names=_names(look) if about_root else ())
    difference = look.account.difference
    one = look.sights.get(difference.odd[0]) if difference is not None and difference.odd else None
    if verdict.cause is not Cause.OTHER_CALL or one is None:
        return found
    stack = tuple(recorded.stack_line(line) for line in one.stack)
    return replace(found, host=one.host, pid=one.pid, stack=stack or found.stack)


def _names(look: JobSight) -> tuple[str, ...]:
    root = look.root
    if root is None:
        return ()
    for rank in root.waiting:
        one = look.sights.get(rank)
        if one is not None and one.recording is not None:
            found = names_of(root.calls[rank], one.recording, one.facts, one.status)
            if found:
                return found
    return ()


def task_lines(look: JobSight) -> Sequence[TaskLine]:
    """What every rank does."""
    return _tasks(look, diagnosis_of(look.account, now=look.now))


def _tasks(look: JobSight, found: Diagnosis) -> Sequence[TaskLine]:
    known = {line.task: line for line in found.tasks}
    lines = []
    for rank, one in sorted(look.sights.items()):
        name = recorded.rank_name(rank)
        doing = known[name].doing if name in known and one.recording is not None else ""
        if one.life is Vitality.GONE:
            doing = phrases.how_it_ended(one.exit_code)
        elif one.life is not Vitality.RUNS:
            doing = phrases.stands(one.life.value, doing, None)
        else:
            doing = phrases.stands(doing, one.work.value if one.stack else "", one.place)
        lines.append(
            TaskLine(
                task=name,
                host=one.host,
                pid=one.pid,
                step=one.status.step,
                doing=doing,
                answers=one.life is Vitality.RUNS,
            )
        )
    return lines
