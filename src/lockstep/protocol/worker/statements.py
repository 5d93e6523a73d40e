"""What a worker states in a step: the rates, the seal, and that it has finished. Servers hear it again on new links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import Sealed
from lockstep.protocol.core.ids import BucketId, Step, TaskId
from lockstep.protocol.core.messages import Done, Edition, GroupRates, Rates, Seal
from lockstep.protocol.worker.holdings import HeldBucket, ServerSide


class Statements:
    """What every server must know of the step that this worker is in. All of it is idempotent."""

    def __init__(self, servers: Mapping[TaskId, ServerSide]) -> None:
        self.rates: Rates | None = None
        self.seals: dict[TaskId, Seal] = {}
        self._done: Done | None = None
        self._servers = servers

    def begin_step(self) -> None:
        """The rates may come only with the seal; until then there are none, not those of the step before."""
        self.rates = None
        self.seals.clear()

    def state_rates(self, step: Step, rates: tuple[GroupRates, ...]) -> list[Effect]:
        if not rates:
            return []
        self.rates = Rates(step, rates)
        return [Send(peer.id, self.rates) for peer in self._servers.values() if peer.linked]

    def seal(
        self, event: Sealed, absent: set[BucketId], number: int, everything: Iterable[HeldBucket] | None
    ) -> list[Effect]:
        """``number``: of the question for a norm. ``everything``: all buckets, where any server must know of all."""
        for peer in self._servers.values():
            concerned = peer.buckets if everything is None else everything
            self.seals[peer.id] = Seal(
                event.step,
                tuple(b.id for b in concerned if b.id in absent),
                # A bucket that was taken back may be on its way, and may be produced anew after a question.
                tuple(Edition(b.id, b.edition) for b in concerned if b.edition > (-1 if b.id in absent else 0)),
                event.without,
                event.void,
                event.values,
                event.occasion,
                event.clip,
                event.asks,
                number,
                event.loops,
            )
        return [Send(peer.id, self.seals[peer.id]) for peer in self._servers.values() if peer.linked]

    def finish(self, steps: Step) -> list[Effect]:
        self._done = done = Done(steps)
        return [Send(peer.id, done) for peer in self._servers.values() if peer.linked]

    def again(self, server: TaskId) -> list[Effect]:
        stated = (self.rates, self.seals.get(server), self._done)
        return [Send(server, one) for one in stated if one is not None]
