"""A task's own error as a reason: the type of the exception determines the cause, never its text."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lockstep.errors import BadInput
from lockstep.protocol.core.causes import Cause, Reason, own_error
from lockstep.runtime import phrases
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.outcome import JobEndedError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def failure_of(error: BaseException, text: str = "", memory_errors: tuple[type[BaseException], ...] = ()) -> Reason:
    """``memory_errors``: exceptions other than MemoryError that mean that memory ran out (on a device)."""
    return own_error(text or phrases.failed_with(error), _cause_of(error, memory_errors))


def _cause_of(error: BaseException, memory_errors: tuple[type[BaseException], ...]) -> Cause:
    if isinstance(error, (MemoryError, *memory_errors)):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return Cause.DISK_FULL
    return Cause.FAILED


@contextlib.contextmanager
def told_to_monitor(reporter: TaskReporter) -> Iterator[None]:
    """An error that ends this task goes to its monitor first, for tasks that ask why this one does not come.

    Put it around everything, imports too: they fail where torch is broken, or memory is limited.
    """
    try:
        yield
    except BadInput as bad:
        reporter.failed(" ".join(bad.sentences))
        raise
    except JobEndedError:
        raise  # the node has told it
    except Exception as error:
        reporter.failed(phrases.failed_with(error))
        raise
