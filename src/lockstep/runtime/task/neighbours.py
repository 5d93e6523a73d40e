"""Workers without servers have no links: the monitors notify them of a signal that another worker received.

Worker 0 follows the monitors of all others, and all others follow that of worker 0, which passes on what it learns. So
each is notified at once, without one stream per pair of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from lockstep.protocol.core.ids import CHIEF, TaskId
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import Description
from lockstep.transports.control.monitor_client import Watch, watch

AGAIN_SECONDS = 0.5
"""How soon to try a missing or lost monitor again."""

_JOIN_SECONDS = 6.0


class Neighbours:
    """Follows the monitors on its own thread, from ``start`` to ``close``."""

    def __init__(
        self, task: TaskId, addresses: Mapping[str, str], on_leaving: Callable[[TaskId, Departure], None]
    ) -> None:
        """``addresses``: of all other workers. ``on_leaving`` runs on a watch's thread and must not block."""
        self._addresses = [a for name, a in addresses.items() if CHIEF in (task, TaskId.parse(name))]
        self._on_leaving = on_leaving
        self._watches: dict[str, Watch] = {}
        self._lost: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"neighbours {task.short}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        for one in self._watches.values():
            one.close()
        self._watches.clear()

    def _run(self) -> None:
        self._lost.update(self._addresses)
        while not self._closing.is_set():
            for address in list(self._lost):
                self._lost.discard(address)
                if (former := self._watches.pop(address, None)) is not None:
                    former.close()
                self._watches[address] = watch(address, self._on_description, partial(self._on_lost, address))
            self._closing.wait(AGAIN_SECONDS)

    def _on_lost(self, address: str, _reason: str) -> None:
        self._lost.add(address)

    def _on_description(self, found: Description) -> None:
        departure = Departure.of(found.leaving)
        if departure is not None:
            self._on_leaving(TaskId.parse(found.leaver), departure)
