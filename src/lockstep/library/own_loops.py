"""Where a program is in loops of its own: for comparing workers whose loop is not over ``job.steps()``.

Two things tell it without the program's help: the counters of the ``for`` loops around the call that makes a step
(``for i, batch in enumerate(...)``), and how many batches a DataLoader, or ``job.shard()``, has given (``for x, y in
loader``). ``protocol/core/loop_watch.py`` says what is concluded from them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch.utils.data import dataloader

from lockstep.protocol.core.messages import LoopCount
from lockstep.runtime.watch.stacks import frame_of, short_path

MAX_FRAMES = 100
MAX_KNOWN = 4096
_MAX_COUNT = 1 << 53
_NOT_LOOKED_INTO = ("torch", "lockstep")
"""Packages whose loops are nobody's training loop."""
_STORES = frozenset(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_STORE_FAST"))
_READERS = frozenset(("locals", "vars", "eval", "exec"))


@dataclass(frozen=True, slots=True)
class _Loop:
    """One ``for`` in a function's code: from its first to its last instruction, and what it assigns."""

    first: int
    last: int
    line: int
    names: tuple[str, ...]


def loops_around(frame: FrameType | None) -> list[LoopCount]:
    """The counters of all ``for`` loops that this call is in, the outermost first."""
    found: list[LoopCount] = []
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if loops := _loops_of(frame):
            found = [*_counters(frame, loops), *found]
        frame = frame.f_back
    return found


def _counters(frame: FrameType, loops: tuple[_Loop, ...]) -> Iterator[LoopCount]:
    code = frame.f_code
    around = [loop for loop in loops if loop.first < frame.f_lasti < loop.last]
    if not around:
        return
    values = _values(frame, {name for loop in around for name in loop.names})
    for loop in around:
        for name in loop.names:
            # Only numbers that count: an element of the data may have such a name too.
            if type(values.get(name)) is int and 0 <= values[name] <= _MAX_COUNT:
                yield LoopCount(f"{name} of the loop at {short_path(code.co_filename)}:{loop.line}", values[name])


def _values(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """These variables of a frame, without a trace of having been read.

    Before Python 3.13 reading a function's variables from outside leaves a copy of all of them with its frame, which
    would keep tensors alive, and be what the function's own ``locals()`` returns.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return {name: frame.f_locals.get(name) for name in names}
    if _READERS.intersection(code.co_names) or sys.gettrace() is not None:
        return {}
    copied = frame.f_locals
    values = {name: copied.get(name) for name in names}
    if sys.version_info < (3, 13):
        copied.clear()
    return values


_known: dict[int, tuple[CodeType, tuple[_Loop, ...]]] = {}
"""By the identity of a function's code, which is kept so that no other gets it; to compare code takes longer."""


def _loops_of(frame: FrameType) -> tuple[_Loop, ...]:
    code = frame.f_code
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()  # a program that keeps making new code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        found = _known[id(code)] = (code, () if package in _NOT_LOOKED_INTO else _loops_in(code))
    return found[1]


def _loops_in(code: CodeType) -> tuple[_Loop, ...]:
    instructions = list(dis.get_instructions(code))
    found = []
    for place, one in enumerate(instructions):
        if one.opname == "FOR_ITER" and (names := tuple(_assigned(instructions[place + 1 :]))):
            line = None if one.positions is None else one.positions.lineno
            found.append(_Loop(one.offset, int(one.argval), line or code.co_firstlineno, names))
    return tuple(found)


def _assigned(instructions: list[dis.Instruction]) -> Iterator[str]:
    """What a loop assigns in each iteration, by the instructions with which its body begins."""
    left = 1
    for one in instructions:
        if one.opname == "UNPACK_SEQUENCE":
            left += int(one.argval) - 1
        elif one.opname in _STORES:
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            yield from map(str, names)
            left -= len(names)
        else:
            return
        if not left:
            return


# -- batches --

_taken: dict[int, LoopCount] = {}
"""By thread: the batch that it took last."""


def took_batch(source: str, number: int) -> None:
    """This thread has just taken so many batches from this source."""
    _taken[threading.get_ident()] = LoopCount(f"batches taken from {source}", number)


@functools.cache
def count_batches() -> None:
    """Let every DataLoader of this process tell how many batches it has given, from now on."""
    given: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if given is None:
        return
    otherwise: Callable[[Any], Any] = given.__next__

    @functools.wraps(otherwise)
    def give(iterator: Any) -> Any:
        batch = otherwise(iterator)
        took_batch("its DataLoader", int(getattr(iterator, "_num_yielded", 0)))
        return batch

    given.__next__ = give


def own_loops(thread: int) -> tuple[LoopCount, ...]:
    """Where the program is in all of its loops; ``thread`` is in the call that makes a step."""
    frame = sys._getframe(1) if threading.get_ident() == thread else frame_of(thread)
    taken = _taken.get(thread)
    return (*loops_around(frame), *([] if taken is None else [taken]))
