"""The suite of all transports, in the lab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rdma.lab.machine import Job
from rdma.lab.network import ENVIRONMENT, Lab
from rdma.training import packets_sent

SUITE: Final = ENVIRONMENT + "exec python3 -m conformance_hosts grpc+verbs"
NODE_HOST: Final = ENVIRONMENT + "exec python3 -m conformance_hosts.node_host"
"""Starts the second node of each case, on another host."""
NODE_HOST_SECONDS: Final = 60.0
_PORT: Final = 6000


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """A run under way, in two parts at the same time: from the first host to the second, and from there back."""

    parts: tuple[Job, Job]
    packets_before: list[int]


def start_suite(lab: Lab) -> SuiteRun:
    """Between the first two hosts."""
    ends = ((lab.first, lab.second, "12.12.12.44"), (lab.second, lab.first, "12.12.12.43"))
    hosts = [there.start(f"{NODE_HOST} {address}:{_PORT}", lasting=True) for _, there, address in ends]
    for host in hosts:
        host.wait_for("Waiting", NODE_HOST_SECONDS)
    before = packets_sent(lab)
    one, other = (
        here.start(f"{SUITE} --node_host {address}:{_PORT} --part {number}/2", lasting=True)
        for number, (here, _, address) in enumerate(ends, 1)
    )
    return SuiteRun((one, other), before)
