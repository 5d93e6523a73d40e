"""Which parameters a collective is about: the buckets of DDP by their size, the modules of FSDP2 by their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep.flight.recording import RecordedCall, Recording
from lockstep.watch.ranks import RankFacts, RankStatus

_GATHERS: Final = frozenset({"_all_gather_base", "all_gather_single", "all_gather_into_tensor", "all_gather"})
_SCATTERS: Final = frozenset(
    {"_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"}
)
_REDUCES: Final = frozenset({"all_reduce", "allreduce", "allreduce_coalesced"})


def names_of(call: RecordedCall, recording: Recording, facts: RankFacts, status: RankStatus) -> tuple[str, ...]:
    """Empty where nothing is known, or where it would be a guess."""
    if call.operation in _GATHERS:
        return _from_the_end(call, recording, _GATHERS, status.gathered)
    if call.operation in _SCATTERS:
        return _from_the_end(call, recording, _SCATTERS, status.reduced)
    if call.operation in _REDUCES:
        fitting = [one.names for one in facts.buckets if one.elements == call.inputs.elements]
        return fitting[0] if len(fitting) == 1 else ()
    return ()


def _from_the_end(
    call: RecordedCall, recording: Recording, kinds: frozenset[str], noted: Sequence[str]
) -> tuple[str, ...]:
    """FSDP makes one such call after each note, so the last call belongs to the last note, and so on."""
    same = [one.record for one in recording.calls if one.group == call.group and one.operation in kinds]
    later = sum(1 for record in same if record > call.record)
    return tuple(noted[-1 - later].split()) if later < len(noted) else ()
