"""Plain values from a pickle that anybody may have written: no name in it is looked up, nothing in it is called.

A pickle is a program. torch writes its dumps with the instructions that build dictionaries, lists, texts and numbers;
all instructions are checked against these before the first one runs, and counted: a few of them can demand any amount
of memory, or of the stack.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, Final, NoReturn

MAX_INSTRUCTIONS: Final = 1 << 22
"""20,000 calls with their stacks take about half of it."""
_MOST_TUPLES: Final = 1 << 15
"""Python looks into tuples in tuples without checking its stack; about 150,000 of them crash it."""
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_STORES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_PLAIN: Final = frozenset(
    {
        *("PROTO", "FRAME", "MARK", "STOP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "SETITEM", "SETITEMS", "APPEND", "APPENDS", *_TUPLES),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    }
)
_DAMAGED: Final = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(MemoryError, OverflowError, RecursionError),
)


class PickleRefused(ValueError):  # noqa: N818 - reads as the fact it states
    """These bytes were not read; the text continues "it is not readable: "."""


class _NamelessUnpickler(pickle.Unpickler):
    """The instructions were checked; should one slip through, it still finds nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for an object from elsewhere, {pid!r:.40}")


def read_plain_pickle(data: bytes) -> Any:
    """Dictionaries, lists, tuples, texts, numbers; ``PickleRefused`` for anything else."""
    try:
        _check_instructions(data)
        return _NamelessUnpickler(io.BytesIO(data)).load()
    except PickleRefused:
        raise
    except _DAMAGED as error:
        raise PickleRefused(f"it is damaged or cut off ({type(error).__name__})") from None


def _check_instructions(data: bytes) -> None:
    """Walk through the instructions without carrying them out."""
    tuples = 0
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if instruction.name not in _PLAIN:
            raise PickleRefused(f"it has the instruction {instruction.name}, which plain values do not need")
        tuples += instruction.name in _TUPLES
        place = argument if instruction.name in _STORES else 0
        assert isinstance(place, int)
        if max(count, place) > MAX_INSTRUCTIONS or place > len(data) or tuples > _MOST_TUPLES:
            raise PickleRefused("it has more parts than any dump")
