"""The shipped suite of all transports, over a real RDMA device: in one host, and between two."""

from __future__ import annotations

import pytest

from rdma.lab.pair import ENVIRONMENT, Pair
from rdma.training import counters, rdma_bytes

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]

SUITE = ENVIRONMENT + "python3 -m lockstep.transports.conformance grpc+verbs"
INN = "12.12.12.44:6000"


def test_between_two_hosts_the_transport_keeps_every_rule(pair: Pair) -> None:
    pair.second.start(f"{ENVIRONMENT} exec python3 -m lockstep.transports.conformance.inn {INN}")
    address = INN.replace(":", "/")
    pair.first.run(f"for i in $(seq 200); do (exec 3<>/dev/tcp/{address}) && exit 0; sleep 0.2; done; exit 1", 100).ok()
    before = counters(pair.first)
    said = pair.first.run(f"{SUITE} --inn {INN}", 1400).ok()
    assert "FAILED" not in said
    assert rdma_bytes(before, counters(pair.first)) > 64 << 20  # 64 MiB go each way in one of the cases alone


@pytest.mark.slow
def test_in_one_host_the_transport_keeps_every_rule(pair: Pair) -> None:
    before = counters(pair.first)
    said = pair.first.run(SUITE, 1400).ok()
    assert "FAILED" not in said
    assert rdma_bytes(before, counters(pair.first)) > 128 << 20
