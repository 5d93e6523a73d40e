"""The suite of all transports, over a real RDMA device: between two hosts, and in one."""

from __future__ import annotations

import pytest

from rdma.lab.network import Lab
from rdma.suite import SUITE, SuiteRun
from rdma.training import PACKET_BYTES, packets_sent

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(900)]

LEAST_PACKETS = (64 << 20) // PACKET_BYTES
"""64 MiB go each way in one of the cases alone."""


def test_between_two_hosts_the_transport_keeps_every_rule(lab: Lab, suite_between_hosts: SuiteRun) -> None:
    for part in suite_between_hosts.parts:
        said = part.wait(600).ok().output
        assert "FAILED" not in said
    for after, before in zip(packets_sent(lab)[:2], suite_between_hosts.packets_before[:2], strict=True):
        assert after - before >= LEAST_PACKETS


def test_in_one_host_the_transport_keeps_every_rule(lab: Lab) -> None:
    """Each case has both of its nodes on one host; each host has a third of the cases."""
    before = packets_sent(lab)
    parts = [host.start(f"{SUITE} --part {number}/3") for number, host in enumerate(lab.hosts, 1)]
    for part in parts:
        assert "FAILED" not in part.wait(600).ok().output
    assert sum(packets_sent(lab)) - sum(before) >= 2 * LEAST_PACKETS
