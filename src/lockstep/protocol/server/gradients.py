"""The gradients that a server collects for the next versions: what replaces another one, or no longer counts."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.protocol.core.effects import Effect, GiveBack
from lockstep.protocol.core.events import GradientArrived
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.server.ledger import NO_GRADIENT, Arrival, Ledger, WorkerSide, sealed_edition
from lockstep.protocol.server.step_norm import StepNorm


class CollectedGradients:
    """What the ledgers count. Whatever is taken out of them goes back, and what was measured with it is forgotten."""

    def __init__(self, norm: StepNorm, open_step: Callable[[], Step]) -> None:
        self._norm = norm
        self._open_step = open_step

    def add(self, ledger: Ledger, event: GradientArrived) -> list[Effect]:
        effects = self._give_back(ledger, event.peer)
        ledger.arrived[event.peer] = Arrival(event.edition, event.arrival)
        return effects

    def remove(self, ledger: Ledger, sender: TaskId) -> list[Effect]:
        effects = self._give_back(ledger, sender)
        del ledger.arrived[sender]
        ledger.reopen()
        return effects

    def take_out(self, ledger: Ledger, sender: TaskId) -> list[Effect]:
        """What this sender delivered, if anything, no longer counts."""
        return [] if ledger.is_closed or sender not in ledger.arrived else self.remove(ledger, sender)

    def keep_only_sealed(self, ledger: Ledger, side: WorkerSide) -> list[Effect]:
        """A replaced edition goes back at once: its sender may need that memory to send the final one."""
        final = sealed_edition(side.seal, ledger.version, ledger.bucket)
        known = ledger.arrived.get(side.id)
        if final == NO_GRADIENT.edition:
            if known is NO_GRADIENT:
                return []
            effects = self._give_back(ledger, side.id)
            ledger.arrived[side.id] = NO_GRADIENT
            return effects
        return [] if known is None or known.edition == final else self.remove(ledger, side.id)

    def _give_back(self, ledger: Ledger, sender: TaskId) -> list[Effect]:
        """What this sender delivered before is replaced."""
        if sender in ledger.arrived and ledger.version == self._open_step():
            self._norm.forget()
        former = ledger.arrived.get(sender, NO_GRADIENT)
        return [] if former is NO_GRADIENT else [GiveBack(former.number)]
