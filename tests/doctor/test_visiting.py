"""What a doctor learns at the address of a task of a running job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.snapshots import PS0, W0, W1, healthy, wait
from lockstep.doctor.visiting import look_at
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.waits import WaitKind
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_service import add_monitor_service, snapshot_handler
from lockstep.transports.control.server import ControlServer


@contextmanager
def coordinator(waits: object) -> Iterator[str]:
    """The address of the monitor of server 0, whose task shows these waits."""
    changed = Broadcast()
    task, monitor = (ControlServer("127.0.0.1", 0, threads=8) for _ in range(2))
    snapshot = json.dumps(healthy().task(PS0) | {"waits": waits}).encode()
    task.add_handlers("Task", {"Snapshot": snapshot_handler(lambda: snapshot)})
    task.start()
    found = Description(str(PS0), "host", 1, 2, 3, "training", 0.5, task.address, False, 0, "0.1", 7)
    add_monitor_service(monitor, lambda: found, changed, lambda: b"{}", max_watchers=1)
    monitor.start()
    try:
        yield monitor.address
    finally:
        changed.close()
        monitor.stop(0)
        task.stop(0)


@pytest.mark.parametrize(
    ("waits", "lost"),
    [
        ([wait(W0, WaitKind.STATE, 1.0), wait(W1, WaitKind.RETURN, 9.0)], (str(W1),)),
        ([wait(W1, WaitKind.STATE, 9.0)], ()),
        ({"kind": "return"}, ()),
        (["return", None], ()),
    ],
)
def test_the_coordinator_of_a_running_job_names_the_lost_tasks_that_it_waits_for(
    waits: object, lost: tuple[str, ...]
) -> None:
    with coordinator(waits) as address:
        assert look_at(W1, PS0, address).visit.waits_for == lost
