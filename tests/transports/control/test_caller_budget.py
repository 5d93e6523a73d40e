"""How often one caller may ask."""

from __future__ import annotations

import pytest

from lockstep.transports.control.caller_budget import AT_ONCE, CallerBudget, host_of
from lockstep.transports.control.monitor_client import Unreachable, fetch_snapshot
from lockstep.transports.control.monitor_service import snapshot_handler
from lockstep.transports.control.server import ControlServer


def test_a_caller_may_ask_often_at_once_and_then_at_a_bounded_rate() -> None:
    now = 0.0
    budget = CallerBudget(at_once=3, per_second=2.0, clock=lambda: now)
    assert [budget.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert budget.take("b"), "another caller has a budget of its own"
    now = 1.0
    assert [budget.take("a") for _ in range(3)] == [True, True, False]
    now = 1000.0
    assert [budget.take("a") for _ in range(4)] == [True, True, True, False]


def test_callers_that_come_and_go_cost_a_bounded_memory() -> None:
    budget = CallerBudget()
    for number in range(5000):
        budget.take(f"ipv4:10.0.{number // 256}.{number % 256}")
    assert len(budget._left) <= 1024


def test_the_port_of_a_caller_does_not_make_it_another() -> None:
    assert host_of("ipv4:10.0.0.1:40000") == host_of("ipv4:10.0.0.1:40001") == "ipv4:10.0.0.1"
    assert host_of("ipv6:%5B::1%5D:40000") == "ipv6:%5B::1%5D"


def test_snapshots_are_refused_to_a_host_that_asks_all_the_time() -> None:
    """H4: eight such callers took more than half of a job's speed."""
    made = 0

    def snapshot() -> bytes:
        nonlocal made
        made += 1
        return b"{}"

    server = ControlServer("127.0.0.1", 0, threads=4)
    server.add_handlers("Task", {"Snapshot": snapshot_handler(snapshot)})
    server.start()
    try:
        with pytest.raises(Unreachable, match="asked too often"):
            _ask_often(server.address)
        assert made < 10 * AT_ONCE
    finally:
        server.stop(0)


def _ask_often(address: str) -> None:
    for _ in range(20 * AT_ONCE):
        fetch_snapshot(address, "Task", 5.0)
