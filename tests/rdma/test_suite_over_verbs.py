"""The shipped suite of all transports, over a real RDMA device: in one host, and between two."""

from __future__ import annotations

import pytest

from rdma.lab.network import ENVIRONMENT, Lab
from rdma.training import PACKET_BYTES, packets_sent

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

SUITE = ENVIRONMENT + "exec python3 -m lockstep.transports.conformance grpc+verbs"
INN = "12.12.12.44:6000"


def test_between_two_hosts_the_transport_keeps_every_rule(lab: Lab) -> None:
    inn = lab.second.start(f"{ENVIRONMENT} exec python3 -m lockstep.transports.conformance.inn {INN}")
    inn.wait_for("Waiting", 60)
    before = packets_sent(lab)[0]
    said = lab.first.run(f"{SUITE} --inn {INN}", 600).ok().output
    assert "FAILED" not in said
    assert packets_sent(lab)[0] - before >= (64 << 20) // PACKET_BYTES  # 64 MiB go each way in one of the cases alone


@pytest.mark.slow
def test_in_one_host_the_transport_keeps_every_rule(lab: Lab) -> None:
    before = packets_sent(lab)[0]
    said = lab.first.run(SUITE, 600).ok().output
    assert "FAILED" not in said
    assert packets_sent(lab)[0] - before >= (128 << 20) // PACKET_BYTES
