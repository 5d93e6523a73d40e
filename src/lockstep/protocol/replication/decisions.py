"""The coordinator's decisions: each is held by the deputy before anything follows from it.

A deputy that is new holds nothing. Nothing waits for it until it holds the newest decision; from then on everything
does, and the next decision tells it that it may take over. So a deputy that may, has everything that took effect.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.replication.replica_events import ReplicaEffect, Say
from lockstep.protocol.replication.replica_messages import Decided, DecisionRecord


class HeldDecisions:
    """What waits for the deputy."""

    def __init__(self, serial: int = 0) -> None:
        """``serial``: the number of the last decision of whoever coordinated before."""
        self.serial = serial
        self.waits_for_deputy = False
        self._deputy: TaskId | None = None
        self._life: Incarnation = 0
        self._newest: DecisionRecord | None = None
        self._waiting: deque[tuple[int, list[ReplicaEffect]]] = deque()

    @property
    def newest(self) -> DecisionRecord:
        assert self._newest is not None
        return self._newest

    def choose(self, deputy: TaskId | None, life: Incarnation, *, whole: bool) -> list[ReplicaEffect]:
        """The deputy of the view that is being decided. If it is another one than before, or another incarnation, the
        former one has provably ended: what waited for that one takes effect."""
        if (deputy, life) == (self._deputy, self._life):
            return []
        self._deputy, self._life, self.waits_for_deputy = deputy, life, whole
        return [] if whole else self._release(self.serial)

    def decide(self, record: DecisionRecord, effects: list[ReplicaEffect]) -> list[ReplicaEffect]:
        """``effects`` follow from this decision, and from all before it."""
        self.serial += 1
        self._newest = replace(record, serial=self.serial)
        if self.waits_for_deputy:
            self._waiting.append((self.serial, effects))
            return self.say_again()
        return [*self.say_again(), *effects]

    def after_newest(self, effects: list[ReplicaEffect]) -> list[ReplicaEffect]:
        """Effects that tell of decisions which may still wait for the deputy: they wait with them."""
        if not self._waiting:
            return effects
        self._waiting[-1][1].extend(effects)
        return []

    def say_again(self) -> list[ReplicaEffect]:
        if self._deputy is None or self._newest is None:
            return []
        return [Say(self._deputy, Decided(self._newest))]

    def on_held(self, deputy: TaskId, serial: int) -> tuple[list[ReplicaEffect], bool]:
        """What takes effect now; and whether the deputy has only now become whole."""
        if deputy != self._deputy:
            return [], False
        if self.waits_for_deputy:
            return self._release(serial), False
        self.waits_for_deputy = serial == self.serial
        return [], self.waits_for_deputy

    def _release(self, serial: int) -> list[ReplicaEffect]:
        effects: list[ReplicaEffect] = []
        while self._waiting and self._waiting[0][0] <= serial:
            effects += self._waiting.popleft()[1]
        return effects
