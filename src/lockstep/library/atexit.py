"""How a program leaves its job: the reason it reports for an exception, and what happens if it forgets to close."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Protocol

import torch

from lockstep.library.errors import UsageError
from lockstep.protocol.core.causes import Reason, own_error
from lockstep.runtime.task.failures import failure_of
from lockstep.runtime.task.outcome import JobEndedError


class ClosesAtExit(Protocol):
    """A job."""

    def close_at_exit(self) -> None: ...


def why_it_left(error: BaseException) -> Reason:
    """The reason that all tasks receive for an exception in the program."""
    if isinstance(error, UsageError):
        return own_error(f"was used wrongly: {error}")
    text = f": {error}" if str(error) else ""
    return failure_of(error, f"failed with {type(error).__name__}{text}", (torch.OutOfMemoryError,))


def end_by_signal() -> None:
    """End with the signal's exit code if the program does not catch a job's end by a signal: it is reported already."""
    otherwise = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEndedError) and error.outcome.departure is not None:
            raise SystemExit(error.outcome.departure.exit_code)
        otherwise(kind, error, trace)

    sys.excepthook = end


def close_before_threads_end(job: ClosesAtExit) -> None:
    """Close the job when the program ends without closing it.

    gRPC's threads would keep the interpreter from exiting, and atexit runs only after waiting for them.
    """
    threading._register_atexit(job.close_at_exit)  # type: ignore[attr-defined]  # what concurrent.futures uses
