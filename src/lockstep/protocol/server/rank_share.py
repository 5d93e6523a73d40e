"""The share of a rank in a job without servers whose ranks come back: it makes the means of some buckets.

A mean has no state of its own, so the next incarnation of a rank takes its share up again with nothing but the number
of the open step; the others send it what is open. What a lost rank had delivered to the shares of others stays.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.protocol.core.effects import Effect, Prepare
from lockstep.protocol.core.events import Received
from lockstep.protocol.core.ids import CHIEF, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Applied, Layout, Message, View
from lockstep.protocol.server.ledger import WorkerSide
from lockstep.protocol.server.server_machine import ServerMachine


class RankShareMachine(ServerMachine):
    """One rank's share of the means."""

    def __init__(self, task: TaskId, shape: ClusterShape, journal: Journal) -> None:
        super().__init__(task, shape, journal, eager=True, averages=True)
        self._number = 0
        self._start: Step | None = None
        """The step that this incarnation began with, once its view has come."""
        self._late = False

    def _on_received(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.message, View):
            return self._on_view(event.message, now)
        return super()._on_received(event, now)

    def _on_view(self, view: View, now: float) -> list[Effect]:
        if view.number <= self._number:
            return []
        self._number = view.number
        self.coordinator = view.decisions[0].home_task
        self._coordinator = next(m.incarnation for m in view.members if m.task == str(self.coordinator))
        if self._start is None:
            self._start, self._late = view.start, view.number > 1
            chief = self._workers[CHIEF]
            return [] if chief.layout is None else self._on_layout(chief, chief.layout, now)
        if not self._prepared:
            return []
        self.committed = max(self.committed, min(view.start - 1, self.step - 1))
        return self._apply_all_possible(now)

    def _on_layout(self, side: WorkerSide, layout: Layout, now: float) -> list[Effect]:
        side.layout = layout
        if self._start is None:
            return []
        if side.id == CHIEF and self._layout is None:
            start = replace(layout, start=self._start)
            self._layout = replace(start, checkpoint="") if self._late else start
            return [Prepare(self._layout)]
        return self._admit(side, now) if self._prepared else []

    def _unheard(self) -> list[Message]:
        """That a share has made its means tells nobody that all ranks have them: ``RankMachine`` says that."""
        return [one for one in super()._unheard() if not isinstance(one, Applied)]

    def _first_past(self, version: int) -> None:
        """What is saved are the rank's parameters, not its share, which may be a step ahead of them."""
