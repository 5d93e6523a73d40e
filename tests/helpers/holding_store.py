"""A server's store that updates the last layer's bucket only when the test lets it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import Step
from lockstep.runtime.task.store import Done
from lockstep.training.server.shard_store import TorchShardStore


class HoldingStore(TorchShardStore):
    """Keeps bucket 0, which has the last parameters, of steps from ``held_from`` on until ``let_go``."""

    def __init__(self, held_from: Step) -> None:
        super().__init__()
        self._held_from = held_from
        self._lock = threading.RLock()
        self._kept: dict[Step, tuple[Apply, Sequence[memoryview], Done]] = {}
        self._free: set[Step] = set()

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        with self._lock:
            if effect.bucket == 0 and effect.step >= self._held_from and effect.step not in self._free:
                self._kept[effect.step] = (effect, gradients, done)
            else:
                super().begin(effect, gradients, done)

    def let_go(self, step: Step) -> None:
        """The bucket of this step may be updated, if it is not the turn of another one yet."""
        with self._lock:
            self._free.add(step)
            if step in self._kept:
                super().begin(*self._kept.pop(step))
