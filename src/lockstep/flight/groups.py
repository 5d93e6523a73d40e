"""Which groups there were, who belongs to each, and how far each rank has come in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from lockstep.flight.recording import DEFAULT_DESCRIPTION, RecordedCall, Recording

OLDER_SECONDS: Final = 1.0
"""Clocks of two hosts, and of the server of a file, may differ by so much."""

_GATHERING: Final = frozenset({"all_gather", "_all_gather_base", "all_gather_single", "all_gather_into_tensor"})


class Membership(StrEnum):
    """How it is known who belongs to a group."""

    WRITTEN = "written in a dump"
    EVERYBODY = "the group of all ranks"
    SEEN = "the ranks that have called it"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One process group; two backends of one group count their calls apart."""

    name: str
    backend: str
    description: str
    members: tuple[int, ...]
    membership: Membership
    size: int = 0
    """How many ranks its calls say that it has; 0: they do not."""

    @property
    def unseen(self) -> int:
        """How many members nobody can name."""
        return max(0, self.size - len(self.members))


@dataclass(frozen=True, slots=True)
class RankCalls:
    """One rank's calls of one group, by their number."""

    calls: Mapping[int, tuple[RecordedCall, ...]]
    highest: int | None
    """None: there is none in the dump."""
    certain: bool
    """It has called nothing higher. Not known where the ring has overwritten all of the group, or where calls that are
    over were left out."""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """All that is known of one group."""

    group: RankGroup
    ranks: Mapping[int, RankCalls]
    """Of those members that left a recording."""

    def numbers(self) -> list[int]:
        return sorted({number for one in self.ranks.values() for number in one.calls})

    def unfinished(self) -> list[int]:
        """Numbers that somebody has not left, or that somebody may not have entered: few, where rings are long."""
        reached = min((one.highest or 0 for one in self.ranks.values()), default=0)
        return sorted(
            {
                number
                for one in self.ranks.values()
                for number, own in one.calls.items()
                if number > reached or not all(call.over for call in own)
            }
        )

    def at(self, number: int) -> dict[int, tuple[RecordedCall, ...]]:
        """The calls with this number, by rank."""
        return {rank: one.calls[number] for rank, one in self.ranks.items() if number in one.calls}


@dataclass(slots=True)
class _Gathered:
    """Calls of one group while they are collected."""

    name: str
    backend: str
    written: tuple[int, ...]
    by_rank: dict[int, list[RecordedCall]] = field(default_factory=dict)


def world_of(recordings: Mapping[int, Recording]) -> tuple[int, ...]:
    """All ranks of the job: those that left a recording, those that one names, and all below the highest."""
    highest = max(recordings, default=-1)
    for one in recordings.values():
        highest = max([highest, *(max(ranks) for ranks in one.members.values())])
        whole = [call for call in one.calls if call.description == DEFAULT_DESCRIPTION]
        highest = max([highest, *(size - 1 for size in map(_size_of, whole))])
    return tuple(range(highest + 1))


def gather(recordings: Mapping[int, Recording], *, p2p: bool = False) -> list[GroupCalls]:
    """The groups in which anybody has called anything, in the order of their names."""
    agreed = _agreed_members(recordings.values())
    found: dict[tuple[str, str, tuple[int, ...]], _Gathered] = {}
    for rank, recording in recordings.items():
        for call in recording.calls:
            if call.p2p is p2p:
                written = agreed.get(call.group) or recording.members.get(call.group, ())
                key = (call.group, call.backend, written)
                found.setdefault(key, _Gathered(*key)).by_rank.setdefault(rank, []).append(call)
    world = world_of(recordings)
    default = _default_group(recordings.values())
    return [_group_calls(found[key], recordings, world if key[0] == default else (), p2p) for key in sorted(found)]


def _default_group(recordings: Iterable[Recording]) -> str | None:
    """The name of the group of all ranks: there is one."""
    names = {call.group for one in recordings for call in one.calls if call.description == DEFAULT_DESCRIPTION}
    return min(names, default=None)


def _agreed_members(recordings: Iterable[Recording]) -> dict[str, tuple[int, ...]]:
    """Where all dumps that say who belongs to a group of this name agree; else each speaks of a group of its own."""
    said: dict[str, set[tuple[int, ...]]] = {}
    for one in recordings:
        for name, ranks in one.members.items():
            said.setdefault(name, set()).add(ranks)
    return {name: next(iter(ranks)) for name, ranks in said.items() if len(ranks) == 1}


def _group_calls(
    gathered: _Gathered, recordings: Mapping[int, Recording], world: Sequence[int], p2p: bool
) -> GroupCalls:
    """``world``: all ranks, for the group that has them all."""
    every = [call for calls in gathered.by_rank.values() for call in calls]
    description = every[-1].description
    if gathered.written:
        members, known = gathered.written, Membership.WRITTEN
    elif world:
        members, known = tuple(world), Membership.EVERYBODY
    else:
        members, known = tuple(sorted(gathered.by_rank)), Membership.SEEN
    size = max(map(_size_of, every), default=0)
    group = RankGroup(gathered.name, gathered.backend, description, members, known, size)
    progress = {
        rank: _progress(gathered.by_rank.get(rank, ()), recordings[rank], p2p) for rank in members if rank in recordings
    }
    return GroupCalls(group, progress)


def _progress(calls: Sequence[RecordedCall], recording: Recording, p2p: bool) -> RankCalls:
    by_number: dict[int, list[RecordedCall]] = {}
    for call in calls:
        by_number.setdefault(call.p2p_number if p2p else call.number, []).append(call)
    highest = max(by_number, default=None)
    if highest is None:
        certain = not recording.lost and not recording.gaps
    else:
        # One that is open has no successor that is over: calls of a group end in their order.
        certain = not recording.gaps or not any(call.over for call in by_number[highest])
    return RankCalls({number: tuple(found) for number, found in by_number.items()}, highest, certain)


def _size_of(call: RecordedCall) -> int:
    """How many ranks a call was for, where its sizes tell: everybody's input comes out."""
    if call.operation not in _GATHERING or not call.inputs.elements:
        return 0
    ranks, rest = divmod(call.outputs.elements, call.inputs.elements)
    return 0 if rest or ranks > _MOST_RANKS else ranks


_MOST_RANKS: Final = 1 << 17
"""A damaged size must not make a world that does not fit into memory."""
