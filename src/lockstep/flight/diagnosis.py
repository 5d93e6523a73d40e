"""An ``Account`` as a ``Diagnosis``: what every report of ours shows, prints and stores. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from lockstep.diagnose.verdict import Diagnosis, Edge, TaskLine, Verdict
from lockstep.flight import phrases
from lockstep.flight.account import Account, Collective, Difference, Explanation, Standing, StuckCall
from lockstep.flight.recording import GLOO, RecordedCall
from lockstep.protocol.core.causes import Cause

MOST_SEEN: Final = 8
"""Ranks of which one report shows what they saw."""
MOST_EDGES: Final = 64
MOST_TASKS: Final = 4096
NOT_KNOWN: Final = -1.0


def diagnosis_of(account: Account, *, now: float | None = None, asker: str = "") -> Diagnosis:
    """``now``: where it is known when the dumps were taken, so that a report can say how long a wait has lasted."""
    verdict = _verdict(account, now)
    time = max((call.created for call in account.last.values()), default=0.0) if now is None else now
    summary = phrases.nothing_is_stuck(len(account.world) - len(account.no_dump), len(account.wrapped))
    return Diagnosis(
        time=time,
        asker=asker,
        healthy=verdict is None,
        summary=summary if verdict is None else "",
        verdict=verdict,
        also=tuple(_difference(one, None, account) for one in account.also),
        causes=tuple(_edge(leg.stuck, leg.rank, (leg.on,), now) for leg in account.ring),
        consequences=_consequences(account, now),
        tasks=tuple(_task(account, rank) for rank in account.world[:MOST_TASKS]),
    )


def _verdict(account: Account, now: float | None) -> Verdict | None:
    root = account.root
    match account.kind:
        case Explanation.DIFFERENCE if account.difference is not None:
            return _difference(account.difference, root, account, now)
        case Explanation.RING if root is not None:
            return _deadlock_ring(account, root, now)
        case Explanation.ORDER if root is not None:
            return _deadlock_order(account, root, now)
        case Explanation.NO_DUMP if root is None:
            return Verdict(
                cause=Cause.UNKNOWN,
                culprit=phrases.ranks(account.no_dump),
                seconds=NOT_KNOWN,
                stuck=phrases.nothing_open_but_no_dump(account.no_dump),
                what=phrases.no_dump_from(account.no_dump),
                evidence=(phrases.over_may_be_failed(),) if _by_gloo(account) else (),
                remedy=phrases.remedy_no_dump(account.no_dump),
            )
        case Explanation.NOTHING:
            return None
        case _:
            assert root is not None, "every other finding is about a call"
            return _waiting(account, root, now)


def _waiting(account: Account, root: StuckCall, now: float | None) -> Verdict:
    """Somebody is missing, or nobody is."""
    on = account.culprits
    last = account.last.get(on[0]) if on else root.calls[root.waiting[0]]
    match account.kind:
        case Explanation.NOT_ENTERED:
            cause, remedy = Cause.NOT_ENTERED, phrases.remedy_not_entered(on)
            what = phrases.not_entered_at_all(on) if last is None else phrases.not_entered(on, last)
        case Explanation.NO_DUMP:
            cause, remedy, what = Cause.UNKNOWN, phrases.remedy_no_dump(on), phrases.no_dump_from(on)
        case Explanation.OUTSIDERS:
            cause, remedy, what = Cause.UNKNOWN, phrases.remedy_not_entered(on), phrases.may_belong(on)
        case Explanation.UNCLEAR:
            cause, remedy, what = Cause.UNKNOWN, phrases.remedy_unclear(), phrases.cannot_be_told(on)
        case _:
            cause, remedy, what = Cause.COMMUNICATION, phrases.remedy_itself(), phrases.all_are_in()
    gave_up = not root.ranks(Standing.OPEN)
    stuck = phrases.given_up if gave_up and on else phrases.stuck
    return Verdict(
        cause=cause,
        culprit=phrases.ranks(on or root.waiting),
        peer=phrases.ranks(root.waiting) if on else "",
        key=phrases.collective(root.collective),
        seconds=_seconds(root, now),
        stuck=stuck(root.collective, root.waiting, on),
        what=what,
        evidence=_seen(account, root),
        stack=_stacks(_last_of(account, on or root.waiting)),
        remedy=remedy,
    )


def _difference(one: Difference, root: StuckCall | None, account: Account, now: float | None = None) -> Verdict:
    waiting = [rank for rank in root.waiting if rank not in one.odd] if root is not None else []
    notes = [phrases.ran_all_the_same()] if one.over else []
    return Verdict(
        cause=Cause.OTHER_CALL,
        culprit=phrases.ranks(one.odd),
        peer=phrases.ranks(waiting) if waiting else "",
        key=phrases.collective(one.collective),
        seconds=NOT_KNOWN if root is None else _seconds(root, now),
        stuck="" if root is None else phrases.stuck(root.collective, root.waiting, root.missing),
        what=phrases.differ(one.collective, one.aspect, one.sides),
        evidence=(*(phrases.side(side) for side in one.sides[:MOST_SEEN]), *notes, *_known(account, one.collective)),
        stack=_stacks({side.ranks[0]: side.call for side in one.sides[1:]}),
        remedy=phrases.remedy_difference(),
    )


def _deadlock_ring(account: Account, root: StuckCall, now: float | None) -> Verdict:
    members = [leg.rank for leg in account.ring]
    legs = [phrases.ring_leg(leg.rank, leg.stuck.collective, leg.on) for leg in account.ring]
    seen = [phrases.saw_call(leg.rank, Standing.OPEN, leg.stuck.calls[leg.rank]) for leg in account.ring]
    return Verdict(
        cause=Cause.DEADLOCK,
        culprit=phrases.ranks(members),
        key=phrases.collective(root.collective),
        seconds=_seconds(root, now),
        stuck=phrases.ring(members),
        what="; ".join(legs[:MOST_SEEN]),
        evidence=(*seen[:MOST_SEEN], *_known(account, *(leg.stuck.collective for leg in account.ring[:MOST_SEEN]))),
        stack=_stacks({leg.rank: leg.stuck.calls[leg.rank] for leg in account.ring}),
        remedy=phrases.remedy_order(),
    )


def _deadlock_order(account: Account, root: StuckCall, now: float | None) -> Verdict:
    order = account.order
    assert order is not None
    first, second = order.first, order.second
    pair = ((first, order.rank), (second, order.rank), (second, order.other), (first, order.other))
    return Verdict(
        cause=Cause.DEADLOCK,
        culprit=phrases.ranks((order.rank, order.other)),
        key=phrases.collective(root.collective),
        seconds=_seconds(root, now),
        stuck=phrases.stuck(root.collective, root.waiting, ()),
        what=phrases.opposite_order(order.rank, order.other, order.first.collective, order.second.collective),
        evidence=tuple(phrases.saw_call(rank, Standing.OPEN, one.calls[rank]) for one, rank in pair),
        stack=_stacks({order.rank: first.calls[order.rank], order.other: second.calls[order.other]}),
        remedy=phrases.remedy_order(),
    )


def _seen(account: Account, one: StuckCall) -> tuple[str, ...]:
    """First those who are missing, then those who wait."""
    without = (Standing.ABSENT, Standing.UNCLEAR)
    absent = one.ranks(*without)
    lines = [phrases.saw_last(rank, one.standings[rank], account.last.get(rank)) for rank in absent[:MOST_SEEN]]
    if one.silent:
        lines.append(phrases.saw_no_dump(one.silent))
    inside = [rank for rank in sorted(one.calls) if one.standings[rank] not in without]
    lines += [phrases.saw_call(rank, one.standings[rank], one.calls[rank]) for rank in inside[:MOST_SEEN]]
    left_out = len(absent[MOST_SEEN:]) + len(inside[MOST_SEEN:])
    if left_out:
        lines.append(phrases.and_others(left_out))
    return (*lines, *_known(account, one.collective))


def _known(account: Account, *calls: Collective) -> tuple[str, ...]:
    """What limits the evidence: who belongs to a group is a guess, a ring of calls has wrapped."""
    guesses = dict.fromkeys(phrases.membership(one.group) for one in calls)
    concerned = {*account.culprits, *(rank for one in calls for rank in one.group.members)}
    rings = [phrases.ring_wrapped(rank, account.wrapped[rank]) for rank in sorted(concerned & account.wrapped.keys())]
    return (*(guess for guess in guesses if guess), *rings[:MOST_SEEN])


def _consequences(account: Account, now: float | None) -> tuple[Edge, ...]:
    explained: list[StuckCall | None] = [leg.stuck for leg in account.ring] or [account.root]
    others = [one for one in account.stuck if not any(one is known for known in explained)]
    edges = (
        _edge(one, rank, (*one.missing, *one.silent) or one.waiting, now) for one in others for rank in one.waiting
    )
    return tuple(islice(edges, MOST_EDGES))


def _edge(one: StuckCall, rank: int, on: Sequence[int], now: float | None) -> Edge:
    return Edge(
        waiter=phrases.rank_name(rank),
        on=phrases.rank_name(on[0]),
        what=phrases.waits_in(one.collective, on),
        step=-2,
        seconds=_seconds(one, now),
        state="",
    )


def _task(account: Account, rank: int) -> TaskLine:
    answers = rank not in account.no_dump
    doing = phrases.left_no_dump()
    if answers:
        doing = phrases.rank_does(account.last.get(rank), account.wrapped.get(rank, 0))
    return TaskLine(task=phrases.rank_name(rank), host="", pid=0, step=-1, doing=doing, answers=answers)


def _by_gloo(account: Account) -> bool:
    return any(call.backend == GLOO for call in account.last.values())


def _seconds(one: StuckCall, now: float | None) -> float:
    return NOT_KNOWN if now is None or not one.began else max(0.0, now - one.began)


def _stacks(calls: Mapping[int, RecordedCall]) -> tuple[str, ...]:
    """The whole stack of one rank; of several, the lines of the program, each with its rank."""
    if len(calls) == 1:
        return tuple(phrases.stack_line(line) for call in calls.values() for line in call.stack)
    return tuple(
        phrases.stack_line_of(rank, line) for rank, call in calls.items() for line in call.stack if line.of_program
    )


def _last_of(account: Account, ranks: Sequence[int]) -> dict[int, RecordedCall]:
    return {rank: account.last[rank] for rank in ranks[:MOST_SEEN] if rank in account.last}
