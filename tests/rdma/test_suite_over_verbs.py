"""The shipped suite of all transports, over a real RDMA device: in one host, and between two."""

from __future__ import annotations

import pytest

from rdma.lab.network import Lab
from rdma.suite import SUITE, SuiteRun
from rdma.training import PACKET_BYTES, packets_sent

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(900)]


def test_in_one_host_the_transport_keeps_every_rule(lab: Lab, suite_between_hosts: SuiteRun) -> None:
    del suite_between_hosts  # the two go on at the same time
    before = packets_sent(lab)[2]
    said = lab.third.run(SUITE, 600).ok().output
    assert "FAILED" not in said
    assert packets_sent(lab)[2] - before >= (128 << 20) // PACKET_BYTES


def test_between_two_hosts_the_transport_keeps_every_rule(lab: Lab, suite_between_hosts: SuiteRun) -> None:
    for part in suite_between_hosts.parts:
        said = part.wait(600).ok().output
        assert "FAILED" not in said
    # 64 MiB go each way in one of the cases alone.
    least = (64 << 20) // PACKET_BYTES
    for after, before in zip(packets_sent(lab)[:2], suite_between_hosts.packets_before[:2], strict=True):
        assert after - before >= least
