"""Feeds one parser with mutated inputs in a process of its own, and watches it from outside.

The process writes each input into memory that both share before it parses it. So whatever happens (an exception that is
not documented, a hang, a crash, memory that grows) there is the input that did it.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fuzz.mutation import MAX_BYTES, mutated

INPUT_SECONDS: Final = 5.0
"""No parser takes more processor time for one input."""
STUCK_SECONDS: Final = 60.0
"""Nor more time by the clock, if it waits for something; far more, since the machine may be busy."""
GROWTH_BYTES: Final = 64 << 20
LEAST_INPUTS: Final = 50
"""Besides the real ones."""
_COLLECT_EVERY: Final = 20
_LOOK_EVERY: Final = 500
_LOOK_SECONDS: Final = 0.02
_SHRINK_SECONDS: Final = 3.0
_HEAD: Final = struct.Struct("<QQQ")
"""How many inputs have begun, the length of the present one, and how many defects have been written."""
_DEFECTS_AT: Final = _HEAD.size + MAX_BYTES
_DEFECTS_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One parser: how to call it, real inputs, and the exceptions that its documentation names."""

    name: str
    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    documented: tuple[type[BaseException], ...] = ()
    limit: int = MAX_BYTES
    """Longer inputs are cut."""


@dataclass(frozen=True, slots=True)
class Defect:
    """Something that must not happen, with the smallest input found for it."""

    target: str
    what: str
    number: int
    """Which input of this seed it was."""
    data: bytes

    def __str__(self) -> str:
        shown = repr(self.data) if len(self.data) <= 400 else f"{self.data[:200]!r}... ({len(self.data)} bytes)"
        return f"{self.target}: {self.what}\n    input {self.number}: {shown}"


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What became of one target."""

    inputs: int
    defects: tuple[Defect, ...]
    grown: int = 0
    """Bytes by which the process grew."""
    slowest: float = 0.0
    """Seconds of processor time that the slowest input took."""


def input_of(target: Target, seed: int, number: int) -> bytes:
    """Input ``number`` of a seed: the first ones are the real inputs themselves."""
    if number < len(target.seeds):
        return target.seeds[number]
    return mutated(random.Random(f"{seed} {target.name} {number}"), target.seeds)[: target.limit]


def fuzz(target: Target, seed: int, *, seconds: float = float("inf"), inputs: int = sys.maxsize) -> Fuzzed:
    """Feed the target until the time or the inputs are used up, but with ``LEAST_INPUTS``, however busy the machine.

    A hang or a crash ends it sooner."""
    shared = mmap.mmap(-1, _DEFECTS_AT + _DEFECTS_BYTES)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            _feed(target, seed, shared, time.monotonic() + seconds, inputs)
            code = 0
        os._exit(code)
    ended = _watch(child, shared)
    begun, length, written = _HEAD.unpack_from(shared)
    defects = _read_defects(target, bytes(shared[_DEFECTS_AT : _DEFECTS_AT + written]))
    if ended:
        data = bytes(shared[_HEAD.size : _HEAD.size + length])
        defects.append(Defect(target.name, ended, begun - 1, data))
    found = tuple(defect for defect in defects if defect.number >= 0)
    if defects and defects[-1].number < 0:
        grown, slowest = defects[-1].what.split()
        return Fuzzed(begun, found, int(grown), float(slowest))
    return Fuzzed(begun, found)


def _watch(child: int, shared: mmap.mmap) -> str:
    """Wait for the process; what went wrong, if it did not end by itself."""
    try:
        return _ended(child, shared)
    except BaseException:
        _kill(child, "")
        raise


def _ended(child: int, shared: mmap.mmap) -> str:
    ends = os.pidfd_open(child)
    try:
        return _ended_or_stuck(child, ends, shared)
    finally:
        os.close(ends)


def _ended_or_stuck(child: int, ends: int, shared: mmap.mmap) -> str:
    before, since, used = -1, 0.0, 0.0
    while True:
        select.select([ends], [], [], _LOOK_SECONDS)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if os.WIFSIGNALED(status):
                return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
            return "" if os.WEXITSTATUS(status) == 0 else "the process ended"
        begun = _HEAD.unpack_from(shared)[0]
        if begun != before:
            before, since, used = begun, time.monotonic(), _processor_time(child)
        elif _processor_time(child) - used > INPUT_SECONDS + _SHRINK_SECONDS:
            return _kill(child, f"hang: no end after {INPUT_SECONDS:g} s of processor time")
        elif time.monotonic() - since > STUCK_SECONDS + _SHRINK_SECONDS:
            return _kill(child, f"hang: no end after {STUCK_SECONDS:g} s")


def _kill(child: int, why: str) -> str:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return why


def _processor_time(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _feed(target: Target, seed: int, shared: mmap.mmap, deadline: float, inputs: int) -> None:
    """The child: parse, and note what happened. Ends by itself."""
    known: set[str] = set()
    notes = bytearray()
    memory = _Memory(len(target.seeds))
    number = 0
    slowest = 0.0
    gc.freeze()  # so that collecting looks only at what parsers leave behind
    least = len(target.seeds) + LEAST_INPUTS
    while number < inputs and (number < least or time.monotonic() < deadline):
        data = input_of(target, seed, number)
        shared[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(shared, 0, number + 1, len(data), len(notes))
        began = time.process_time()
        what = _outcome(target, data)
        spent = time.process_time() - began
        slowest = max(slowest, spent)
        what = what or memory.finding(number) or (f"slow (took {spent:.1f} s)" if spent > INPUT_SECONDS else "")
        if what and _kind(what) not in known:
            known.add(_kind(what))
            notes += _note(number, what, _shrunk(target, data, what)[: 1 << 16])
            shared[_DEFECTS_AT : _DEFECTS_AT + len(notes)] = bytes(notes)
        number += 1
    grown = memory.grown()
    if grown > GROWTH_BYTES and _STAYS not in known:
        notes += _note(number, f"{_STAYS} (grew by {grown >> 20} MiB)", b"")
    notes += _note(-1, f"{grown} {slowest}", b"")
    shared[_DEFECTS_AT : _DEFECTS_AT + len(notes)] = bytes(notes)
    _HEAD.pack_into(shared, 0, number, 0, len(notes))


class _Memory:
    """What this process uses: at its peak during one input, and what stays."""

    def __init__(self, warm_up: int) -> None:
        """``warm_up``: the first inputs, the real ones, load what the parser needs."""
        self._warm_up = warm_up
        self._peak = _peak()
        self._base = 0

    def finding(self, number: int) -> str:
        """After each input: whether it took, or all together have kept, more than is allowed."""
        peak, before = _peak(), self._peak
        self._peak = peak
        if number % _COLLECT_EVERY == 0:
            gc.collect()
        if number == self._warm_up:
            self._base = _resident()
        if number > self._warm_up and peak - before > GROWTH_BYTES:
            return f"memory at its peak (one input took {(peak - before) >> 20} MiB)"
        if self._base and number % _LOOK_EVERY == 0 and self.grown() > GROWTH_BYTES:
            return f"{_STAYS} (grew by {self.grown() >> 20} MiB)"
        return ""

    def grown(self) -> int:
        gc.collect()
        return max(0, _resident() - self._base) if self._base else 0


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _outcome(target: Target, data: bytes) -> str:
    """The undocumented exception and where it came from, or nothing."""
    try:
        target.parse(data)
    except target.documented:
        return ""
    except BaseException as error:  # noqa: BLE001 - every kind is what we look for
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/lockstep/" in frame.filename] or frames
        at = own[-1]
        return f"{type(error).__name__} at {at.filename.rpartition('/lockstep/')[2]}:{at.lineno} ({str(error)[:80]!r})"
    return ""


_NOT_SHRUNK: Final = ("memory", "slow")


def _kind(what: str) -> str:
    return what.partition(" (")[0]


def _shrunk(target: Target, data: bytes, what: str) -> bytes:
    """A shorter input with the same exception at the same place, by leaving out ever smaller parts."""
    deadline = time.monotonic() + _SHRINK_SECONDS
    size = len(data) // 2
    while size and time.monotonic() < deadline and not what.startswith(_NOT_SHRUNK):
        at = 0
        while at < len(data) and time.monotonic() < deadline:
            shorter = data[:at] + data[at + size :]
            if _kind(_outcome(target, shorter)) == _kind(what):
                data = shorter
            else:
                at += size
        size //= 2
    return data


_STAYS: Final = "memory that stays"
_NOTE: Final = struct.Struct("<qII")


def _note(number: int, what: str, data: bytes) -> bytes:
    text = what.encode(errors="replace")
    return _NOTE.pack(number, len(text), len(data)) + text + data


def _read_defects(target: Target, notes: bytes) -> list[Defect]:
    found = []
    at = 0
    while at < len(notes):
        number, text, length = _NOTE.unpack_from(notes, at)
        at += _NOTE.size
        what = notes[at : at + text].decode()
        found.append(Defect(target.name, what, number, notes[at + text : at + text + length]))
        at += text + length
    return found
