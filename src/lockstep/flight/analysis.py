"""The rule: per group, the lowest number that a member is in and not all have left; who is missing there, and why.

Pure: recordings in, an ``Account`` out. What explains the rest, in this order:

1. Calls of the same number that are not the same call, in a group that is stuck there or later (or in any, where
   nothing is stuck).
2. A ring: each rank is in a call that the next one has not entered, because it is in another. (Where gloo does not
   say who belongs to a group, and those who called it wait in vain, everybody else may belong to it.)
3. Two ranks that entered the same two calls in opposite order; each call then waits for the other on some device.
4. A member that has not entered the call and is in no other: whatever keeps it is outside of the communication.
5. A member that left no dump.
6. A member of which the dumps cannot tell.
7. Where gloo does not say who belongs to a group, ranks that have never called it, and are in no other call.
8. All are in it and none is done: the collective itself.

Where all are in a call and some are done, it is about to end, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

from lockstep.flight.account import (
    Account,
    Collective,
    Difference,
    Explanation,
    OppositeOrder,
    RingLeg,
    Standing,
    StuckCall,
)
from lockstep.flight.groups import OLDER_SECONDS, GroupCalls, Membership, RankCalls, gather, world_of
from lockstep.flight.recording import GLOO, RecordedCall, Recording
from lockstep.flight.signature import NEEDS_ALL, first_difference

_ORDERED_CALLS: Final = 8
"""Of one rank's open calls, so many are compared with the order of others."""


def account_of(recordings: Mapping[int, Recording]) -> Account:
    """What these recordings, by rank, prove together."""
    groups = gather(recordings)
    world = world_of(recordings)
    stuck = [found for group in groups if (found := _stuck_in(group, recordings)) is not None]
    stuck += _stuck_between_two(recordings)
    stuck.sort(key=lambda one: (one.began, one.collective.group.name, one.collective.number))
    differences = [one for group in groups if (one := _difference_in(group, recordings)) is not None]
    return _explained(
        Account(
            kind=Explanation.NOTHING,
            world=world,
            no_dump=tuple(rank for rank in world if rank not in recordings),
            wrapped={rank: one.lost for rank, one in recordings.items() if one.lost},
            last={rank: _last_of(one) for rank, one in recordings.items() if one.calls},
            stuck=tuple(stuck),
        ),
        differences,
    )


def _last_of(recording: Recording) -> RecordedCall:
    return next((call for call in recording.calls if not call.over), recording.calls[-1])


# -- where one group stands --


def _stuck_in(group: GroupCalls, recordings: Mapping[int, Recording]) -> StuckCall | None:
    """The first call of this group that is stuck."""
    for number in group.unfinished():
        calls = group.at(number)
        standings = _standings(group, number, calls, recordings)
        found = set(standings.values())
        if Standing.OPEN not in found and Standing.GIVEN_UP not in found:
            continue
        timed_out = any(call.timed_out for own in calls.values() for call in own)
        if found <= {Standing.OPEN, Standing.DONE} and Standing.DONE in found and not timed_out:
            continue  # it is about to end
        return _stuck_call(group, number, calls, standings)
    return None


def _stuck_call(
    group: GroupCalls,
    number: int,
    calls: Mapping[int, Sequence[RecordedCall]],
    standings: Mapping[int, Standing],
) -> StuckCall:
    own = {rank: found[-1] for rank, found in calls.items()}
    return StuckCall(_collective(group, number, own), standings, own, _began(own.values()))


def _collective(group: GroupCalls, number: int, calls: Mapping[int, RecordedCall]) -> Collective:
    call = calls[min(calls)]
    return Collective(group.group, number, call.operation)


def _began(calls: Iterable[RecordedCall]) -> float:
    return min((call.created for call in calls if call.created), default=0.0)


def _standings(
    group: GroupCalls,
    number: int,
    calls: Mapping[int, Sequence[RecordedCall]],
    recordings: Mapping[int, Recording],
) -> dict[int, Standing]:
    began = _began(call for own in calls.values() for call in own)
    found = dict.fromkeys(group.group.members, Standing.NO_DUMP)
    for rank, progress in group.ranks.items():
        found[rank] = _standing(progress, number, recordings[rank], began)
    absent = [rank for rank, one in found.items() if one is Standing.ABSENT]
    for rank in [rank for rank, one in found.items() if one is Standing.DONE and rank in calls]:
        if any(_must_have_failed(calls[rank][-1], recordings[rank], recordings[other]) for other in absent):
            found[rank] = Standing.GIVEN_UP
    return found


def _standing(progress: RankCalls, number: int, recording: Recording, began: float) -> Standing:
    own = progress.calls.get(number)
    if own is not None:
        # Of a call that was put together from several, one record stands for the whole.
        return Standing.DONE if any(call.over for call in own) else Standing.OPEN
    if progress.highest is not None and progress.highest >= number:
        return Standing.DONE  # the ring has overwritten it, or the dump left it out
    older = recording.taken and began and recording.taken < began - OLDER_SECONDS
    return Standing.UNCLEAR if older or not progress.certain else Standing.ABSENT


def _must_have_failed(call: RecordedCall, by: Recording, absent: Recording) -> bool:
    """Gloo does not say whether a call that is over has succeeded; without ``absent`` it cannot have.

    Dumps of a job that runs are not of one moment: where ``absent``'s was taken clearly before the call, or clearly
    before the other's, it may have entered since, unless the call has had its whole time.
    """
    if call.backend != GLOO or call.operation not in NEEDS_ALL:
        return False
    if not (by.taken and absent.taken and call.created):
        return True
    had_its_time = by.taken - call.created >= call.timeout > 0
    together = by.taken - absent.taken < OLDER_SECONDS
    return absent.taken - call.created >= OLDER_SECONDS and (together or had_its_time)


# -- sends and receives: a call of two ranks, without a number that they share --


def _stuck_between_two(recordings: Mapping[int, Recording]) -> list[StuckCall]:
    found = []
    for group in gather(recordings, p2p=True):
        open_calls = {
            (rank, call.source, call.target): call
            for rank, progress in group.ranks.items()
            for own in progress.calls.values()
            if not any(call.over for call in own)
            for call in reversed(own)  # the first of several stays
            if call.source >= 0
        }
        found += [_between_two(group, *key, call, open_calls, recordings) for key, call in open_calls.items()]
    return [one for one in found if one is not None]


def _between_two(
    group: GroupCalls,
    rank: int,
    source: int,
    target: int,
    call: RecordedCall,
    open_calls: Mapping[tuple[int, int, int], RecordedCall],
    recordings: Mapping[int, Recording],
) -> StuckCall | None:
    """``source`` and ``target`` count within the group."""
    members = group.group.members
    if max(source, target) >= len(members):
        return None
    ends = (members[source], members[target])
    if rank not in ends or ends[0] == ends[1]:
        return None
    other = ends[0] if rank == ends[1] else ends[1]
    collective = Collective(group.group, call.p2p_number, call.operation, ends)
    counterpart = open_calls.get((other, source, target))
    if counterpart is not None:
        if rank == ends[1]:
            return None  # the sender's covers both
        both = {rank: call, other: counterpart}
        return StuckCall(collective, dict.fromkeys(both, Standing.OPEN), both, _began(both.values()))
    standing = Standing.ABSENT if other in recordings else Standing.NO_DUMP
    return StuckCall(collective, {rank: Standing.OPEN, other: standing}, {rank: call}, call.created)


# -- calls that are not the same --


def _difference_in(group: GroupCalls, recordings: Mapping[int, Recording]) -> Difference | None:
    """The first number at which members have made different calls."""
    # A ring may have overwritten a part of the oldest call that it still has.
    edges = {rank: min(one.calls) for rank, one in group.ranks.items() if one.calls and recordings[rank].lost}
    for number in group.numbers():
        calls = {rank: own for rank, own in group.at(number).items() if edges.get(rank) != number}
        found = first_difference(calls) if len(calls) > 1 else None
        if found is not None:
            first = {rank: own[-1] for rank, own in calls.items() if rank in found[1][0].ranks}
            over = all(call.over for own in calls.values() for call in own)
            return Difference(_collective(group, number, first), *found, over)
    return None


# -- what explains the rest --


def _explained(account: Account, differences: Sequence[Difference]) -> Account:
    explaining = [one for one in differences if _explains(one, account.stuck)]
    if explaining:
        first = explaining[0]
        root = next((one for one in account.stuck if one.collective.group == first.collective.group), None)
        also = tuple(one for one in differences if one is not first)
        return replace(account, kind=Explanation.DIFFERENCE, difference=first, root=root, also=also)
    account = replace(account, also=tuple(differences))
    ring = _ring(account.stuck, {}) or _ring(account.stuck, _possibly_missing(account))
    if ring:
        return replace(account, kind=Explanation.RING, ring=ring, root=ring[0].stuck)
    order = _opposite_order(account.stuck)
    if order is not None:
        return replace(account, kind=Explanation.ORDER, order=order, root=order.first)
    kind, root, culprits = _root(account)
    return replace(account, kind=kind, root=root, culprits=culprits)


def _explains(difference: Difference, stuck: Sequence[StuckCall]) -> bool:
    same = [one for one in stuck if one.collective.group == difference.collective.group]
    return not stuck or any(one.collective.number >= difference.collective.number for one in same)


def _root(account: Account) -> tuple[Explanation, StuckCall | None, tuple[int, ...]]:
    """Without differences, rings and opposite orders every chain of waits ends in one of these."""
    busy = _busy(account.stuck)
    for one in account.stuck:
        idle = tuple(rank for rank in one.missing if rank not in busy)
        if idle:
            return Explanation.NOT_ENTERED, one, idle
    for one in account.stuck:
        if one.silent:
            return Explanation.NO_DUMP, one, one.silent
    for one in account.stuck:
        idle = tuple(rank for rank in one.unclear if rank not in busy)
        if idle:
            return Explanation.UNCLEAR, one, idle
    for one in account.stuck:
        if one.complete:
            outsiders = _outsiders(one, account, busy)
            return (Explanation.OUTSIDERS if outsiders else Explanation.ITSELF), one, outsiders
    for one in account.stuck:
        if one.unclear:
            return Explanation.UNCLEAR, one, one.unclear
    if account.stuck:  # nothing but certain waits for ranks that wait, and no ring: not possible, and no reason to fail
        return Explanation.NOT_ENTERED, account.stuck[0], account.stuck[0].missing
    return (Explanation.NO_DUMP if account.no_dump else Explanation.NOTHING), None, account.no_dump


def _outsiders(one: StuckCall, account: Account, busy: Set[int]) -> tuple[int, ...]:
    """Ranks that may belong to the group of this call without having called it, and are in no call."""
    if one.collective.group.membership is not Membership.SEEN:
        return ()
    return tuple(rank for rank in account.world if rank not in one.standings and rank not in busy)


def _possibly_missing(account: Account) -> dict[int, tuple[int, ...]]:
    """Where gloo does not say who belongs to a group, and all who called it wait in vain: everybody else may belong.

    Not where one of these is in no call: that one is to be looked at first.
    """
    busy = _busy(account.stuck)
    idle = [rank for rank in account.world if rank not in busy]
    return {
        id(one): tuple(rank for rank in account.world if rank not in one.standings)
        for one in account.stuck
        if one.complete
        and one.collective.group.membership is Membership.SEEN
        and not any(rank not in one.standings for rank in idle)
    }


def _busy(stuck: Sequence[StuckCall]) -> set[int]:
    """Ranks that are in a call that is stuck."""
    return {rank for one in stuck for rank in one.ranks(Standing.OPEN)}


def _ring(stuck: Sequence[StuckCall], possible: Mapping[int, Sequence[int]]) -> tuple[RingLeg, ...]:
    """The first ring of waits: from a rank to the call that it is in, and on to a rank that has not entered that.

    ``possible``: more ranks that are missing from a call, by its identity.
    """
    waits: dict[int, StuckCall] = {}
    for one in stuck:
        for rank in one.ranks(Standing.OPEN):
            # Of several calls that a rank is in, it waits for the one that it entered first.
            if rank not in waits or one.calls[rank].record < waits[rank].calls[rank].record:
                waits[rank] = one
    missing = {id(one): [rank for rank in (*one.missing, *possible.get(id(one), ())) if rank in waits] for one in stuck}
    edges = {rank: missing[id(one)] for rank, one in waits.items()}
    done: set[int] = set()
    for begin in sorted(waits):
        path = _walk(begin, edges, done)
        if path:
            return tuple(RingLeg(rank, waits[rank], on) for rank, on in zip(path, (*path[1:], path[0]), strict=True))
    return ()


def _walk(begin: int, edges: Mapping[int, Sequence[int]], done: set[int]) -> list[int]:
    """The ring that a search in depth from ``begin`` meets, or nothing. ``done``: ranks that lead to none."""
    path = [begin] if begin not in done else []
    choices = [iter(edges[begin])]
    while path:
        rank = next(choices[-1], None)
        if rank is None:
            done.add(path.pop())
            choices.pop()
        elif rank in path:
            return path[path.index(rank) :]
        elif rank not in done:
            path.append(rank)
            choices.append(iter(edges[rank]))
    return []


def _opposite_order(stuck: Sequence[StuckCall]) -> OppositeOrder | None:
    own: dict[int, list[tuple[int, int]]] = {}
    for place, one in enumerate(stuck):
        for rank in one.ranks(Standing.OPEN):
            own.setdefault(rank, []).append((one.calls[rank].record, place))
    first_seen: dict[tuple[int, int], int] = {}
    for rank in sorted(own):
        places = [place for _, place in sorted(own[rank])[:_ORDERED_CALLS]]
        for index, before in enumerate(places):
            for after in places[index + 1 :]:
                other = first_seen.get((after, before))
                if other is not None:
                    return OppositeOrder(stuck[after], stuck[before], other, rank)
                first_seen.setdefault((before, after), rank)
    return None
