"""How a program leaves its job: the words for an exception, and what happens where it forgets to close."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Protocol

import torch

from lockstep.protocol.causes import Reason, own_error
from lockstep.runtime.failures import failure_of
from lockstep.runtime.outcome import JobEndedError
from lockstep.training.library.errors import UsageError


class ClosesAtExit(Protocol):
    """A job."""

    def close_at_exit(self) -> None: ...


def why_it_left(error: BaseException) -> Reason:
    """How an exception of the program is told to everybody."""
    if isinstance(error, UsageError):
        return own_error(f"was used wrongly: {error}")
    text = f": {error}" if str(error) else ""
    return failure_of(error, f"failed with {type(error).__name__}{text}", (torch.OutOfMemoryError,))


def end_by_signal() -> None:
    """A program that does not catch the end of a job by a signal ends with its code: the sentence is said already."""
    otherwise = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEndedError) and error.outcome.departure is not None:
            raise SystemExit(error.outcome.departure.exit_code)
        otherwise(kind, error, trace)

    sys.excepthook = end


def close_before_threads_end(job: ClosesAtExit) -> None:
    """Close the job when the program ends, even if it does not.

    gRPC's threads would keep the interpreter from ending, and atexit comes after waiting for them.
    """
    threading._register_atexit(job.close_at_exit)  # type: ignore[attr-defined]  # what concurrent.futures uses
