"""What the kernel counts on a path that loses large packets only; with real sockets between two network namespaces."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from helpers.waiting import wait_until
from lockstep.diagnose.case import HELD_BACK, IN_VAIN
from lockstep.diagnose.collect import is_absent
from lockstep.drill.hosts import PACKETS, set_firewall, why_not
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.host_network import HostNetwork
from lockstep.runtime.watch.kernel_tcp import Counted, count_by_host
from lockstep.runtime.watch.status import longest_quiet
from lockstep.transports.control.tcp_probe import probe

ONE, TWO = "10.78.0.1", "10.78.0.2"
CLONE_NEWNET = 0x40000000
Value = TypeVar("Value")


def on_host(namespace: str, work: Callable[[], Value]) -> Value:
    """Run ``work`` in a thread that has entered the namespace; sockets made there stay there."""

    def enter() -> None:
        with open(f"/run/netns/{namespace}") as entrance:
            if ctypes.CDLL(None, use_errno=True).setns(entrance.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with ThreadPoolExecutor(1, initializer=enter) as pool:
        return pool.submit(work).result(10)


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    if missing := why_not():
        pytest.skip(missing)
    with HostNetwork({"one": [f"{ONE}/24"], "two": [f"{TWO}/24"]}) as made:
        yield made


def connection(network: HostNetwork) -> tuple[socket.socket, socket.socket]:
    """From host one to host two."""
    one, two = network.namespaces["one"], network.namespaces["two"]
    with on_host(two, lambda: socket.create_server((TWO, 0))) as listening:
        port = listening.getsockname()[1]
        here = on_host(one, lambda: socket.create_connection((TWO, port), timeout=5))
        return here, listening.accept()[0]


def counted(network: HostNetwork, host: str, peer: str) -> Counted:
    return on_host(network.namespaces[host], count_by_host).get(peer, Counted())


@pytest.mark.slow
def test_large_packets_that_vanish_are_sent_again_in_vain_while_small_ones_pass(network: HostNetwork) -> None:
    tensors, beats = connection(network), connection(network)
    with tensors[0], tensors[1], beats[0], beats[1]:
        set_firewall(network.namespaces["two"], f"ip saddr {ONE} {PACKETS['large']}")
        before = counted(network, "two", ONE)
        tensors[0].setblocking(False)
        tensors[0].send(bytes(100_000))
        wait_until(lambda: counted(network, "one", TWO).retransmits >= IN_VAIN, 20, "the kernel tries again")
        beats[0].send(b"beat")
        assert beats[1].recv(4) == b"beat"
        sender = counted(network, "one", TWO)
        assert sender.stuck >= HELD_BACK
        assert sender.path_mtu == 1500
        assert counted(network, "two", ONE).segments_in > before.segments_in, "small packets pass"
        set_firewall(network.namespaces["two"])
        wait_until(lambda: counted(network, "one", TWO).retransmits == 0, 20, "what was stuck passes")


def test_a_slow_path_makes_progress_with_each_try(network: HostNetwork) -> None:
    here, there = connection(network)
    with here, there:
        set_firewall(network.namespaces["two"], f"ip saddr {ONE} {PACKETS['slow']}")
        here.setblocking(False)
        sent, received, worst = here.send(bytes(400_000)), 0, 0
        there.setblocking(False)

        def arrived() -> bool:
            nonlocal received, worst
            worst = max(worst, counted(network, "one", TWO).retransmits)
            try:
                received += len(there.recv(1 << 20))
            except BlockingIOError:
                return False
            return received >= min(sent, 150_000)

        wait_until(arrived, 30, "it arrives, slowly")
        assert worst < IN_VAIN


def test_a_firewall_that_resets_connections_looks_like_a_refusal(network: HostNetwork) -> None:
    one, two = network.namespaces["one"], network.namespaces["two"]
    here, there = connection(network)
    with on_host(two, lambda: socket.create_server((TWO, 0))) as listening, here, there:
        address = f"{TWO}:{listening.getsockname()[1]}"
        assert on_host(one, lambda: probe(address)).reach is Reach.OPEN
        set_firewall(two, f"ip saddr {ONE} {PACKETS['reset']}")
        assert on_host(one, lambda: probe(address)).reach is Reach.REFUSED
        assert not on_host(one, lambda: is_absent(address, Reach.REFUSED)), "only its own host could tell"
        here.send(b"beat")
        with pytest.raises(ConnectionResetError):
            here.recv(1)


def test_the_longest_time_without_a_segment_is_counted_also_at_the_ends() -> None:
    assert longest_quiet([(0.0, 5)]) == 0.0
    assert longest_quiet([(0.0, 5), (0.4, 6), (0.8, 7)]) == 0.4
    assert longest_quiet([(0.0, 5), (2.4, 5), (2.8, 6)]) == 2.8
    assert longest_quiet([(0.0, 5), (0.4, 6), (1.4, 6), (3.0, 6)]) == 2.6
