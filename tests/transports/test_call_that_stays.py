"""A call that does not come back keeps no process from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, threading
from lockstep.transports.control.monitor_client import fetch_snapshot
from lockstep.transports.control.monitor_service import snapshot_handler
from lockstep.transports.control.server import ControlServer

begun = threading.Event()

def stays():
    begun.set()
    threading.Event().wait()

def ask():
    with contextlib.suppress(Exception):
        fetch_snapshot(server.address, "Task", 60.0)

server = ControlServer("127.0.0.1", 0, threads=4)
server.add_handlers("Task", {"Snapshot": snapshot_handler(stays)})
server.start()
threading.Thread(target=ask, daemon=True).start()
assert begun.wait(20)
server.stop(0.0)
"""


@pytest.mark.slow
def test_a_process_ends_though_a_call_of_its_server_does_not_come_back() -> None:
    """As one does whose answer waits for a host that is cut off."""
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=30, check=True)
