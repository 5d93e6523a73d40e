"""How a program leaves its job: the reason it reports for an exception, and what happens if it forgets to close."""

from __future__ import annotations

import builtins
import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Protocol

import torch

from lockstep.errors import EXIT_FAILED
from lockstep.library.errors import UsageError
from lockstep.protocol.core.causes import Reason, own_error
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.watch.stacks import place_of_error


class ClosesAtExit(Protocol):
    """A job."""

    def close_at_exit(self) -> None: ...


def why_it_left(error: BaseException) -> Reason:
    """The reason that all tasks receive for an exception in the program."""
    place = place_of_error(error)
    where = f", at {place}" if place else ""
    if isinstance(error, UsageError):
        return own_error(f"was used wrongly: {error}{where}")
    text = f": {error}" if str(error) else ""
    return failure_of(error, f"failed with {type(error).__name__}{text}{where}", (torch.OutOfMemoryError,))


class ExitWitness:
    """Notes with which code the program leaves, from its last call of ``sys.exit`` or from the exception itself.

    Python discards the code before anything is called at exit, and there a program that gave up with an error looks
    like one that has done its work.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """None: it has not tried to leave."""
        self._where = ""
        self._status: object = None

    def install(self) -> None:
        """Take part in ``sys.exit`` and in the ``exit`` and ``quit`` of scripts, until this process ends."""
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if (otherwise := getattr(module, name, None)) is not None:  # without the site module there are no builtins
                setattr(module, name, self._noting(otherwise))

    def _noting(self, otherwise: Callable[[object], NoReturn]) -> Callable[..., NoReturn]:
        def leave(code: object = None) -> NoReturn:
            self._note(code, sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
            otherwise(code)

        return leave

    def caught(self, error: SystemExit) -> None:
        """This exception leaves the block of the job."""
        # From here on it is no longer the program, but what it called to leave.
        frames = list(itertools.takewhile(_is_elsewhere, traceback.extract_tb(error.__traceback__)))
        self._note(error.code, frames[-1].filename, frames[-1].lineno)

    def forget(self) -> None:
        """The program goes on: it caught the exception."""
        self.code = None

    def reason(self) -> Reason:
        """What all tasks receive."""
        return own_error(f"called sys.exit({self._status!r}) in {self._where}")

    def _note(self, status: object, file: str, line: int | None) -> None:
        number = 0 if status is None else status
        self.code = number & 0xFF if isinstance(number, int) else EXIT_FAILED
        self._status, self._where = status, f"{file}, line {line}"


def _is_elsewhere(frame: traceback.FrameSummary) -> bool:
    return frame.filename != __file__


def end_with_the_report() -> None:
    """Let a program that does not catch its job's end leave with the job's exit code, and without a traceback: why the
    job ended has been said, and where this program happened to wait says nothing about it."""
    otherwise = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEndedError):
            raise SystemExit(error.outcome.exit_code(EXIT_FAILED))
        otherwise(kind, error, trace)

    sys.excepthook = end


def close_before_threads_end(job: ClosesAtExit) -> None:
    """Close the job when the program ends without closing it.

    gRPC's threads would keep the interpreter from exiting, and atexit runs only after waiting for them.
    """
    threading._register_atexit(job.close_at_exit)  # type: ignore[attr-defined]  # what concurrent.futures uses
