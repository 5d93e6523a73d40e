"""The calls that all workers make, as the coordinator has them: one is open at a time, since every worker waits in it.

A call is complete when all workers that take part in the job have come. Its values go to all of them as they are, in
the order of the workers' indices, so all make the same of them. A worker that comes back makes calls again that are
complete, and gets what was answered then: so the coordinator keeps those that a program may make again. Calls in an
iteration are forgotten once no worker can come back to it; calls outside of loops are kept, up to a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lockstep.protocol import phrases
from lockstep.protocol.core.calls import KEPT_CALL_BYTES, MOST_CALL_BYTES, MOST_NAMED, OUTSIDE_LOOPS
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.ids import Incarnation, Step, TaskId
from lockstep.protocol.core.messages import CallComplete, CallMade, CallOpen, CallPlace, KeptCall
from lockstep.protocol.core.timing import CALL_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind

STEPS_BEHIND = 2
"""A worker that comes back begins with the step after the last committed one. When a call in an iteration is complete,
all workers are in that iteration, so its step is at most the second after the last committed one."""


@dataclass(frozen=True, slots=True)
class CallConflict:
    """Two workers do not make the same calls."""

    culprit: TaskId
    reason: Reason


@dataclass(slots=True)
class _OpenCall:
    """``first``: who came first."""

    first: TaskId
    since: float
    made: dict[TaskId, CallMade]

    @property
    def sample(self) -> CallMade:
        return self.made[self.first]


class KeptCalls:
    """The complete calls that a worker may make again. What is kept is a function of the calls alone, so a coordinator
    and its deputy keep the same."""

    def __init__(self, *, keeps: bool) -> None:
        """``keeps``: a lost worker may come back."""
        self.complete = 0
        """How many calls were complete so far."""
        self.forgotten: CallPlace | None = None
        """The newest one of those that were dropped for lack of room."""
        self._keeps = keeps
        self._calls: dict[CallPlace, KeptCall] = {}
        """In the order in which they were complete, so in the order of their places."""
        self._nbytes = 0

    @property
    def newest(self) -> KeptCall | None:
        return next(reversed(self._calls.values()), None)

    def at(self, place: CallPlace) -> KeptCall | None:
        return self._calls.get(place)

    def after(self, number: int) -> list[KeptCall]:
        """Those that were complete after so many others."""
        return [call for call in self._calls.values() if call.number > number]

    def add(self, call: KeptCall) -> None:
        """The newest is always kept: its answer may be lost with a link."""
        for place, one in list(self._calls.items()):
            inside = place.iteration != OUTSIDE_LOOPS
            if not self._keeps or (inside and call.committed >= one.committed + STEPS_BEHIND):
                self._drop(place)
        self.complete = call.number
        self._calls[call.answer.place] = call
        self._nbytes += _nbytes(call)
        while self._nbytes > KEPT_CALL_BYTES and len(self._calls) > 1:
            self.forgotten = next(iter(self._calls))
            self._drop(self.forgotten)

    def _drop(self, place: CallPlace) -> None:
        self._nbytes -= _nbytes(self._calls.pop(place))

    def check(self) -> None:
        assert list(self._calls) == sorted(self._calls), "calls are complete in another order than they were made"
        assert self._nbytes == sum(map(_nbytes, self._calls.values())), "kept calls are counted wrongly"


def _nbytes(call: KeptCall) -> int:
    return sum(map(len, call.answer.values))


class Calls:
    """The coordinator's record of calls."""

    def __init__(self, *, keeps: bool) -> None:
        """``keeps``: a lost worker may come back."""
        self.kept = KeptCalls(keeps=keeps)
        self._open: _OpenCall | None = None
        self._reached: dict[tuple[TaskId, Incarnation], CallPlace] = {}
        """The newest call that each incarnation of a worker has made."""

    # -- a worker comes --

    def on_made(
        self,
        sender: tuple[TaskId, Incarnation],
        made: CallMade,
        workers: Sequence[TaskId],
        committed: Step,
        now: float,
    ) -> list[Effect] | CallConflict:
        """``workers``: those that take part in the job."""
        peer, life = sender
        if made.place < self._reached.get((peer, life), made.place):
            return []  # late: this incarnation has gone on since, so it has the answer
        self._reached[peer, life] = made.place
        known = self.kept.at(made.place)
        if known is not None:
            if _differs(made, known.made):
                return _conflict(peer, made, TaskId.parse(known.first), known.made)
            return [Send(peer, known.answer)]
        newest = self.kept.newest
        if newest is not None and made.place < newest.made.place:
            return self._not_kept(peer, made, newest)
        if len(made.data) > MOST_CALL_BYTES:
            return []  # the library refuses it before it is sent
        if self._open is None:
            if made.held:
                return []
            self._open = _OpenCall(peer, now, {})
        elif _differs(made, self._open.sample):
            return _conflict(peer, made, self._open.first, self._open.sample)
        again = peer in self._open.made
        if not made.held:
            self._open.made[peer] = made
        answers = self.complete_if_all(workers, committed)
        return answers or (self._tell_missing(peer, workers) if again else [])

    def _not_kept(self, peer: TaskId, made: CallMade, newest: KeptCall) -> CallConflict:
        """It is before what is complete, and was never made by the others, or is forgotten."""
        forgotten = self.kept.forgotten
        if forgotten is not None and made.place <= forgotten:
            text = phrases.call_is_forgotten(peer, made, KEPT_CALL_BYTES)
            return CallConflict(peer, Reason(Cause.OTHER_CALL, text))
        return _conflict(peer, made, TaskId.parse(newest.first), newest.made)

    def _tell_missing(self, peer: TaskId, workers: Sequence[TaskId]) -> list[Effect]:
        assert self._open is not None
        missing = tuple(task.index for task in self._missing(workers))[:MOST_NAMED]
        return [Send(peer, CallOpen(self._open.sample.place, missing))]

    def _missing(self, workers: Sequence[TaskId]) -> list[TaskId]:
        return [] if self._open is None else [task for task in workers if task not in self._open.made]

    # -- and all have come --

    def complete_if_all(self, workers: Sequence[TaskId], committed: Step) -> list[Effect]:
        """Also called when the workers that take part become fewer."""
        call = self._open
        if call is None or self._missing(workers):
            return []
        indices = tuple(task.index for task in workers)
        answer = CallComplete(call.sample.place, indices, tuple(call.made[task].data for task in workers))
        self._open = None
        made = replace(call.sample, data=b"")
        self.kept.add(KeptCall(self.kept.complete + 1, str(call.first), made, answer, committed))
        return [Send(task, answer) for task in workers]

    # -- what others may ask --

    def missed_by(self, finished: Collection[TaskId], workers: Sequence[TaskId]) -> CallConflict | None:
        """A worker that has finished will not come to the open call."""
        late = next((task for task in self._missing(workers) if task in finished), None)
        if late is None:
            return None
        assert self._open is not None
        text = phrases.finished_without_call(late, self._open.first, self._open.sample)
        return CallConflict(late, Reason(Cause.OTHER_CALL, text, peer=str(self._open.first)))

    def waits(self, here: TaskId, workers: Sequence[TaskId], step: Step) -> list[Wait]:
        call = self._open
        if call is None:
            return []
        words, state = phrases.call_words(call.sample), phrases.has_not_come()
        due = call.since + CALL_SECONDS
        return [
            Wait(here, task, WaitKind.CALLER, step, call.since, due, state, detail=words)
            for task in self._missing(workers)[:MOST_NAMED]
        ]

    def check(self) -> None:
        self.kept.check()


def _differs(one: CallMade, other: CallMade) -> bool:
    """Whether these are not the same call; ``where`` differs where it was given the same name in two places."""
    return (one.place, one.operation, one.form, one.name) != (other.place, other.operation, other.form, other.name)


def _conflict(peer: TaskId, made: CallMade, other: TaskId, theirs: CallMade) -> CallConflict:
    text = phrases.calls_differ(peer, made, other, theirs)
    return CallConflict(peer, Reason(Cause.OTHER_CALL, text, peer=str(other)))
