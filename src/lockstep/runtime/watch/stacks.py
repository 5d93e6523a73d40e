"""Python stacks of this process: whose code a thread is in, and where it has been all the time."""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from lockstep.protocol.core.activity import Code

MAX_FRAMES = 16
"""So many lines of a stack are shown; a compiler's stack is several times as deep."""


def frames_of(ident: int | None, limit: int | None = MAX_FRAMES) -> list[str]:
    """The Python stack of a thread of this process, the innermost line first: ``function (file:line)``."""
    return [_line(code, line, line) for code, line in _walk(ident)[:limit]]


_ONE_AT_A_TIME = threading.Lock()


def frame_of(ident: int | None) -> FrameType | None:
    """Where a thread of this process is; None if there is no such thread.

    No garbage is collected meanwhile: up to Python 3.11 that can lock up the whole process, because the interpreter
    holds a lock here that the end of an object may need (python/cpython issue 106883).
    """
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(ident or 0)
        finally:
            if collects:
                gc.enable()


def _walk(ident: int | None) -> list[tuple[CodeType, int]]:
    """Code and line of each frame, the innermost first. No frame is kept: it would keep its tensors alive."""
    frame = frame_of(ident)
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return found


def _line(code: CodeType, first: int, last: int) -> str:
    lines = f"{first}" if first == last else f"{first}-{last}"
    return f"{code.co_name} ({short_path(code.co_filename)}:{lines})"


@functools.lru_cache(maxsize=4096)
def short_path(path: str) -> str:
    """A file as an import names it: ``torch/nn/modules/conv.py``; unchanged where it is on no search path."""
    roots = sorted((root for root in sys.path if root and path.startswith(f"{root}/")), key=len, reverse=True)
    return path[len(roots[0]) + 1 :] if roots else path


_DEVICE = ("torch/cuda/", "torch/_C", "synchronize (", "torch/autograd/graph.py")
_OURS = ("lockstep/transports/", "lockstep/runtime/")
_PLAIN = ("threading.py:", "queue.py:", "selectors.py:", "socket.py:")
_COMPILER = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/async_compile.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/",
)
"""Frames that are there only while something is compiled; what was compiled runs under others of these packages."""


def whose_code(frames: Sequence[str], *, on_device: bool = True) -> Code:
    """Whose code a whole stack is in, judged by its innermost line outside the waits of the standard library.

    A compiler counts wherever it is in the stack: it calls into everything. ``on_device``: the process uses one; else
    no line can be a device call, though some are named like one.
    """
    if any(part in line for line in frames for part in _COMPILER):
        return Code.COMPILER
    for line in frames:
        if on_device and any(part in line for part in _DEVICE):
            return Code.DEVICE
        if any(part in line for part in _PLAIN):
            continue
        return Code.COMMUNICATION if any(part in line for part in _OURS) else Code.USER
    return Code.UNKNOWN


_LOCKSTEP = f"{Path(__file__).parents[2]}/"
_PROGRAMS = (f"{_LOCKSTEP}benchmark/", f"{_LOCKSTEP}drill_stubs.py")
"""Training programs that come with Lockstep."""
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = (*{f"{sysconfig.get_path(name)}/" for name in _PATHS}, _LOCKSTEP, "<frozen")


def _is_library(code: CodeType) -> bool:
    """Installed, and not written for this job."""
    file = code.co_filename
    if file.startswith(_PROGRAMS):
        return False
    return file.startswith(_LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file


def _of_the_program(stack: Sequence[CodeType]) -> int:
    """Which frame of a stack, outermost first, is the innermost one of the program; the last where none is."""
    own = [place for place, code in enumerate(stack) if not _is_library(code)]
    return own[-1] if own else len(stack) - 1


def place_in_program(ident: int | None) -> str:
    """The innermost line of the program's own code: ``function (file:line)``."""
    return _place_in(_walk(ident)[::-1])


def place_of_error(error: BaseException) -> str:
    """The innermost line of the program's own code that this exception left; empty if it was never raised."""
    return _place_in([(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)])


def _place_in(stack: Sequence[tuple[CodeType, int]]) -> str:
    """``stack``: the outermost first."""
    if not stack:
        return ""
    code, line = stack[_of_the_program([code for code, _ in stack])]
    return _line(code, line, line)


@dataclass(slots=True)
class _Frame:
    code: CodeType
    first: int
    last: int


class Dwelling:
    """Where a thread has been all the time, from its stacks seconds apart: what they have in common.

    A function that loops is in all of them, with some of its lines; what it calls is not.
    """

    def __init__(self) -> None:
        self._common: list[_Frame] = []
        """Outermost first. Only the last one has more than one line."""
        self._since = -1.0
        self._began = self._last = 0.0
        self._innermost = True

    def look(self, ident: int, since: float, now: float) -> None:
        """Take one stack. ``since``: when the thread began what it is doing; something new begins with it."""
        stack = _walk(ident)[::-1]
        if since != self._since:
            self._since, self._began, self._innermost = since, now, True
            self._common = [_Frame(code, line, line) for code, line in stack]
        self._last = now
        kept = 0
        for frame, (code, line) in zip(self._common, stack, strict=False):
            if frame.code is not code:
                break
            kept += 1
            if line != frame.first or line != frame.last:
                frame.first, frame.last = min(frame.first, line), max(frame.last, line)
                break
        del self._common[kept:]
        self._innermost = self._innermost and bool(stack) and not _is_library(stack[-1][0])

    @property
    def place(self) -> str:
        """The innermost function of the program in all stacks, with the lines between which it was seen."""
        if not self._common:
            return ""
        frame = self._common[_of_the_program([frame.code for frame in self._common])]
        return _line(frame.code, frame.first, frame.last)

    @property
    def seconds(self) -> float:
        """Between the first of these stacks and the last."""
        return self._last - self._began

    @property
    def innermost(self) -> bool:
        """Whether each of these stacks ended in the program's own code, and not in a library that computes for it."""
        return self._innermost
