"""What workers tell each other besides gradients: metrics, decisions, small data. Every worker makes the same calls.

Each call has a place in the program, counted the same on all workers, and a name: the program's, or file and line. The
values travel in control messages through the coordinator (``protocol/coordinator/calls.py``), which compares the calls.
Each worker makes the same of the values of all, in the order of their indices.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch import Tensor

import lockstep
from lockstep.library.call_values import form_of, packed, reduced, unpacked
from lockstep.library.errors import UsageError
from lockstep.protocol.core.calls import OUTSIDE_LOOPS, most_bytes
from lockstep.protocol.core.messages import CallComplete, CallMade, CallPlace

Carry = Callable[[CallMade], CallComplete]
"""Brings a value to the call, and returns what all brought; JobEndedError if the job ends first."""

_OWN_CODE: Final = Path(lockstep.__file__).parent
MOST_NAME = 200


class Talk:
    """One worker's side of what all workers say to each other."""

    def __init__(
        self,
        worker: int,
        workers: int,
        carry: Carry,
        place: Callable[[], tuple[int, int]],
        refuse_in_child: Callable[[str], None],
        *,
        may_lag: bool = False,
    ) -> None:
        """``place``: the loop and iteration that the program is in. ``may_lag``: iterations may be skipped."""
        self._worker = worker
        self._workers = workers
        self._carry = carry
        self._place_in_loops = place
        self._refuse_in_child = refuse_in_child
        self._may_lag = may_lag
        self._at: tuple[int, int] | None = None
        self._number = 0
        self._one_at_a_time = threading.Lock()
        self.closed = False

    def all_reduce(self, value: Any, op: str, name: str | None) -> Any:
        form = form_of(value, op)
        answer = self._call("all_reduce", form, packed(value), name)
        return _where_it_was(reduced([unpacked(data) for data in answer.values], op), value)

    def broadcast(self, value: Any, source: int, name: str | None) -> Any:
        if not 0 <= source < self._workers:
            raise UsageError(f"job.broadcast(source={source}): the workers are numbered from 0 to {self._workers - 1}")
        own = packed(value) if source == self._worker else b""
        answer = self._call("broadcast", f"from worker {source}", own, name)
        if source not in answer.workers:
            raise UsageError(f"job.broadcast(source={source}): the job goes on without that worker")
        found = unpacked(answer.values[answer.workers.index(source)])
        return value if source == self._worker else _where_it_was(found, value)

    def gather(self, value: Any, name: str | None) -> list[Any]:
        answer = self._call("gather", "", packed(value), name)
        return [_where_it_was(unpacked(data), value) for data in answer.values]

    def barrier(self, name: str | None) -> None:
        self._call("barrier", "", b"", name)

    def _call(self, operation: str, form: str, data: bytes, name: str | None) -> CallComplete:
        what = f"job.{operation}()"
        self._refuse_in_child(what)
        if self.closed:
            raise UsageError(f"{what} was called after job.close(); call it before")
        self._refuse_large(what, len(data))
        if not self._one_at_a_time.acquire(blocking=False):
            raise UsageError(f"{what} was called while another thread is in a call; make calls from one thread")
        try:
            where = _line_of_program()
            made = CallMade(self._place(what), operation, form, (name or where)[:MOST_NAME], where, data)
            return self._carry(made)
        finally:
            self._one_at_a_time.release()

    def _refuse_large(self, what: str, nbytes: int) -> None:
        most = most_bytes(self._workers)
        if nbytes > most:
            raise UsageError(
                f"{what} was given {nbytes} bytes, and in a job of {self._workers} workers each may bring {most}; for "
                "large tensors use torch.distributed with job.process_group()"
            )

    def _place(self, what: str) -> CallPlace:
        here = self._place_in_loops()
        if self._may_lag and here[1] != OUTSIDE_LOOPS:
            raise UsageError(
                f"{what} was called in the loop over job.steps(), but with replicas_to_aggregate a step may be made "
                "without a worker, which then does not come; call it outside of the loop"
            )
        self._number = self._number + 1 if here == self._at else 0
        self._at = here
        return CallPlace(*here, self._number)


def _where_it_was(found: Any, value: Any) -> Any:
    """A tensor goes to the device of the one that this worker brought."""
    return found.to(value.device) if isinstance(found, Tensor) and isinstance(value, Tensor) else found


def _line_of_program() -> str:
    """``train.py:31``: the innermost line that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_OWN_CODE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
