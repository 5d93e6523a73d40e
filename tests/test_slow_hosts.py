"""The slow network of the lab: its queues, and real bytes between two hosts."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lockstep.runtime.host_network import why_not
from slow_hosts import BUFFER_SECONDS, SlowHosts, Slowness, SlowQueue, packets_of


def test_what_is_queued_passes_one_after_the_other_at_the_rate() -> None:
    queue = SlowQueue(8e6)
    assert queue.take(10.0, 1000) == pytest.approx(10.001)
    assert queue.take(10.0, 2000) == pytest.approx(10.003)
    assert queue.take(11.0, 1000) == pytest.approx(11.001)


def test_what_finds_too_much_before_it_is_dropped() -> None:
    queue = SlowQueue(8e6)
    assert queue.take(0.0, int(1e6 * BUFFER_SECONDS) + 1000) is not None
    assert queue.take(0.0, 1) is None
    assert queue.take(1.0, 1) is not None


@pytest.mark.parametrize(("nbytes", "each", "count"), [(60, 0, 1), (40, 1448, 1), (1488, 1448, 1), (3000, 1448, 3)])
def test_a_large_packet_counts_as_those_that_it_would_be(nbytes: int, each: int, count: int) -> None:
    assert packets_of(nbytes, each) == count


SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as door:
    print(flush=True)
    caller, _ = door.accept()
    with caller:
        left = int(sys.argv[2])
        while left:
            left -= len(caller.recv(65536))
        caller.sendall(b"!")
"""
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=20) as there:
    there.sendall(bytes(int(sys.argv[2])))
    assert there.recv(1) == b"!"
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_bytes_between_two_hosts_take_as_long_as_the_rate_and_the_delay_say() -> None:
    nbytes, slowness = 500_000, Slowness(rate=20e6, delay=0.05)
    with SlowHosts(2, slowness) as network:
        here, there = network.hosts
        command = [*there.prefix, sys.executable, "-c", SERVE, there.address, str(nbytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            serving.stdout.readline()
            began = time.monotonic()
            calling = [*here.prefix, sys.executable, "-c", CALL, there.address, str(nbytes)]
            subprocess.run(calling, check=True, timeout=30)
            took = time.monotonic() - began
    assert took >= 8 * nbytes / slowness.rate + 4 * slowness.delay  # three ways to connect and one back, at least
    assert network.report["moved_bytes"] > nbytes
