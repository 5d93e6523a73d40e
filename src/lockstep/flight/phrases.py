"""What dumps of a flight recorder tell people, one function per sentence. Nothing reads these back.

The words are those of every report: who is waiting for whom, for what, what each side saw, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from lockstep.flight.account import Aspect, CallSide, Collective, Standing
from lockstep.flight.groups import Membership, RankGroup
from lockstep.flight.recording import DEFAULT_DESCRIPTION, RecordedCall, StackLine, Tensors

_UNDESCRIBED = ("", "undefined")
_MOST_SIZES = 4

# -- ranks, groups, calls --


def ranks(numbers: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0-6 and 9``."""
    if not numbers:
        return "no rank"
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in _runs(sorted(numbers))]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {_listed(parts)}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together, but two neighbours read better apart."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return [
        piece for low, high in found for piece in ([(low, low), (high, high)] if high == low + 1 else [(low, high)])
    ]


def _listed(parts: Sequence[str]) -> str:
    shown = list(parts[:12]) + ([f"{len(parts) - 12} more"] if len(parts) > 12 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _are(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _have(numbers: Sequence[int]) -> str:
    return "has" if len(numbers) == 1 else "have"


def _group(name: str, description: str) -> str:
    if description == DEFAULT_DESCRIPTION:
        return "the default group"
    more = "" if description in _UNDESCRIBED else f" ({description})"
    return f"group {name}{more}"


def collective(one: Collective) -> str:
    """``all_reduce 7 of the default group``; a send or receive by its two ends."""
    if one.peers:
        source, target = one.peers
        return f"{one.operation} from rank {source} to rank {target} in {_group(one.group.name, one.group.description)}"
    return f"{one.operation} {one.number} of {_group(one.group.name, one.group.description)}"


def _call(call: RecordedCall) -> str:
    name = f"{call.operation} {call.p2p_number if call.p2p else call.number}"
    return f"{name} of {_group(call.group, call.description)}"


def _tensors(tensors: Tensors) -> str:
    """`` ([4] Float)``, or nothing."""
    if not tensors.sizes:
        return ""
    sizes = [f"[{', '.join(map(str, size))}]" for size in tensors.sizes[:_MOST_SIZES]]
    more = f" and {len(tensors.sizes) - _MOST_SIZES} more" if len(tensors.sizes) > _MOST_SIZES else ""
    return f" ({' '.join([' '.join(sizes) + more, *sorted(set(tensors.dtypes))])})"


def stack_line(line: StackLine) -> str:
    """The file with its folder only, as in every stack of a report."""
    return f"{line.function} ({'/'.join(PurePath(line.file).parts[-2:])}:{line.line})"


def _place(call: RecordedCall) -> str:
    """`` at main (job/train.py:31)``: the innermost line of the program itself, as far as paths tell."""
    found = next((line for line in call.stack if line.of_program), None)
    return "" if found is None else f" at {stack_line(found)}"


def stack_line_of(rank: int, line: StackLine) -> str:
    return f"rank {rank}: {stack_line(line)}"


# -- the lead: what is stuck, why, and what to do --


def stuck(one: Collective, waiting: Sequence[int], on: Sequence[int]) -> str:
    for_whom = f" for {ranks(on)}" if on else ""
    return f"the job is stuck: {ranks(waiting)} {_are(waiting)} waiting{for_whom} in {collective(one)}"


def given_up(one: Collective, waiting: Sequence[int], on: Sequence[int]) -> str:
    return f"the job has failed: {ranks(waiting)} gave up waiting for {ranks(on)} in {collective(one)}"


def not_entered(missing: Sequence[int], last: RecordedCall) -> str:
    said = f"{ranks(missing)} {_have(missing)} not entered it"
    if len(missing) > 1:
        return said
    return f"{said}; its last call was {_call(last)}{_place(last)}, which is {'over' if last.over else 'open'}"


def not_entered_at_all(missing: Sequence[int]) -> str:
    return f"{ranks(missing)} {_have(missing)} not entered it, nor any other call"


def no_dump_from(silent: Sequence[int]) -> str:
    return f"{ranks(silent)} left no dump: dead, frozen, or not able to write one"


def nothing_open_but_no_dump(silent: Sequence[int]) -> str:
    return f"no call is open in the dumps, but {ranks(silent)} left none"


def cannot_be_told(unclear: Sequence[int]) -> str:
    return (
        f"whether {ranks(unclear)} entered it cannot be told: the ring of calls has wrapped, calls were left out of "
        "the dump, or it was taken before"
    )


def may_belong(outsiders: Sequence[int]) -> str:
    return (
        f"whether {ranks(outsiders)} should be in it cannot be told: the dumps do not say who belongs to that group, "
        f"and {ranks(outsiders)} {_are(outsiders)} in no call"
    )


def all_are_in() -> str:
    return "all of them are in it and none is done: it runs, or the collective itself is stuck"


def differ(one: Collective, aspect: Aspect, sides: Sequence[CallSide]) -> str:
    others, odd = sides[0], sides[1:]
    what = {Aspect.OPERATION: "another operation", Aspect.SIZE: "another size", Aspect.DTYPE: "another dtype"}[aspect]
    who = [rank for side in odd for rank in side.ranks]
    said = f"{ranks(who)} {_have(who)} {what} than {ranks(others.ranks)} in {collective(one)}"
    return f"{said}: {_of(aspect, odd[0].call)} instead of {_of(aspect, others.call)}"


def _of(aspect: Aspect, call: RecordedCall) -> str:
    tensors = call.inputs if call.inputs.sizes else call.outputs
    match aspect:
        case Aspect.OPERATION:
            return call.operation
        case Aspect.SIZE:
            return _tensors(Tensors(tensors.sizes)).strip(" ()") or "nothing"
        case Aspect.DTYPE:
            return ", ".join(sorted(set(tensors.dtypes))) or "nothing"


def ran_all_the_same() -> str:
    return "nobody is in it any more: it failed, or ran all the same with wrong numbers"


def ring(members: Sequence[int]) -> str:
    return f"{ranks(members)} are waiting for one another in different groups"


def ring_leg(rank: int, one: Collective, on: int) -> str:
    return f"rank {rank} is in {collective(one)}, which rank {on} has not entered"


def opposite_order(rank: int, other: int, first: Collective, second: Collective) -> str:
    return (
        f"rank {rank} entered {collective(first)} before {collective(second)}, rank {other} the other way round; "
        "all are in both, and neither ends"
    )


# -- what to do --


def remedy_not_entered(missing: Sequence[int]) -> str:
    return f"Look at {ranks(missing)}: the last lines of output, and where it is now (py-spy dump --pid PID)."


def remedy_no_dump(silent: Sequence[int]) -> str:
    return f"Look for the end of {ranks(silent)} in the output of the job, and in the kernel's log of that host."


def remedy_difference() -> str:
    return (
        "Let every rank make the same calls of a group in the same order, with the same sizes and dtypes; one call "
        "that only some ranks make shifts all that follow."
    )


def remedy_order() -> str:
    return "Let every rank call its groups in the same order, and leave none out."


def remedy_itself() -> str:
    return "Look at the network between these ranks (ibstat, dmesg, NCCL_DEBUG=INFO), and at the devices (nvidia-smi)."


def remedy_unclear() -> str:
    return "Keep more calls (TORCH_FR_BUFFER_SIZE=20000), and dump all of them."


# -- what each side saw --


def saw_call(rank: int, standing: Standing, call: RecordedCall) -> str:
    tensors = call.inputs if call.inputs.sizes else call.outputs
    return f"rank {rank}: {_call(call)}{_tensors(tensors)}, {standing.value}{_place(call)}"


def saw_last(rank: int, standing: Standing, call: RecordedCall | None) -> str:
    if call is None:
        return f"rank {rank}: {standing.value}; the dump has no call of it"
    state = "over" if call.over else "open"
    below = "; the stack below is of that call" if call.stack else ""
    return f"rank {rank}: {standing.value}; its last call was {_call(call)} ({state}){_place(call)}{below}"


def over_may_be_failed() -> str:
    return "gloo does not say whether a call that is over has succeeded or failed"


def saw_no_dump(silent: Sequence[int]) -> str:
    return f"{ranks(silent)}: left no dump"


def side(one: CallSide) -> str:
    tensors = one.call.inputs if one.call.inputs.sizes else one.call.outputs
    return f"{ranks(one.ranks)}: {_call(one.call)}{_tensors(tensors)}{_place(one.call)}"


def and_others(count: int) -> str:
    return f"and {count} more ranks"


def membership(group: RankGroup) -> str:
    """How it is known who belongs to the group; nothing where a dump says so."""
    if group.membership is Membership.EVERYBODY and not group.unseen:
        return (
            f"the dumps do not say who belongs to {_group(group.name, group.description)}; "
            f"taken for all ranks up to {max(group.members, default=0)}"
        )
    if group.membership is Membership.SEEN or group.unseen:
        more = f"; by its sizes it has {group.size}, so {group.unseen} left no trace" if group.unseen else ""
        return (
            f"the dumps do not say who belongs to {_group(group.name, group.description)}; "
            f"{ranks(group.members)} called it{more}"
        )
    return ""


def ring_wrapped(rank: int, lost: int) -> str:
    return f"rank {rank}: its ring has wrapped, {lost} earlier calls are gone"


# -- one line per rank --


def rank_name(rank: int) -> str:
    return f"rank {rank}"


def rank_does(call: RecordedCall | None, lost: int) -> str:
    wrapped = f"; {lost} earlier calls are gone" if lost else ""
    if call is None:
        return "has made no call"
    if call.over:
        return f"its last call, {_call(call)}, is over{_place(call)}{wrapped}"
    timed_out = " and timed out" if call.timed_out else ""
    return f"in {_call(call)}{timed_out}{_place(call)}{wrapped}"


def left_no_dump() -> str:
    return "left no dump"


def waits_in(one: Collective, on: Sequence[int]) -> str:
    return f"{ranks(on)} in {collective(one)}"


# -- nothing is stuck --


def nothing_is_stuck(dumps: int, wrapped: int) -> str:
    rings = f"; {wrapped} of their rings have wrapped" if wrapped else ""
    count = f"{dumps} rank{'s' * (dumps != 1)}"
    return f"nothing is stuck: in the dumps of {count} every call has ended, or is about to{rings}"


def no_collective_is_stuck() -> str:
    return "no collective is stuck"


# -- files --


def from_dumps(count: int, folder: str, age: str) -> str:
    of = f"{count} rank{'s' * (count != 1)}"
    return f"From the flight-recorder dumps of {of} in {folder}, {age} old; nothing was asked."


def dump_left_out(name: str, why: str) -> str:
    return f"{name} is ignored: {why}"


def more_files(count: int) -> str:
    return f"only the first {count} files were looked at"


def dump_too_long(most: int) -> str:
    return f"it has more than {most >> 20} MiB"


def dump_is_empty() -> str:
    return "it is empty; its rank may have died while it wrote"


def dump_unreadable(why: str) -> str:
    return f"it is not readable: {why}"


def no_dump() -> str:
    return "it is not a dump of a flight recorder"


def dump_of_another_format(version: str) -> str:
    return f"it has format {version}; this program reads formats 2.3 to 2.10"


def call_without_number() -> str:
    return "it has a call without a number (collective_seq_id); it is damaged, or of an older format"


def too_many_calls(most: int) -> str:
    return f"it has more than {most} calls"


def too_many_parts() -> str:
    return "it has more parts than any dump"


def name_without_rank() -> str:
    return "its name does not end in the number of a rank"


def same_rank(other: str) -> str:
    return f"{other} is of the same rank"
