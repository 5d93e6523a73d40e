"""Transfers while the peer is killed and frozen: the long run is for ``make test-soak``."""

from __future__ import annotations

import pytest

from conformance_hosts.soak import soak
from helpers.transports import RUN_HERE


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", RUN_HERE)
def test_ten_thousand_transfers_survive_a_peer_that_is_killed_and_frozen(transport: str) -> None:
    soaked = soak(transport, 10_000)
    assert soaked.transfers >= 10_000
    assert soaked.kills
    assert soaked.freezes
    assert soaked.arrived + soaked.failed <= soaked.transfers


def test_a_short_run_delivers_what_was_sent() -> None:
    soaked = soak("grpc+shm", 64, seed=3)
    assert soaked.arrived > 0
