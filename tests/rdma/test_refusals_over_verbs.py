"""What keeps ``grpc+verbs`` from working is told before anything starts; and what its flags do, the device shows.

All of it happens on the third host: between the other two the suite is under way meanwhile, where it is run at all.
"""

from __future__ import annotations

import re

import pytest

from rdma.lab.machine import Machine
from rdma.lab.network import ENVIRONMENT, LOCKSTEP, Lab
from rdma.suite import NODE_HOST, NODE_HOST_SECONDS
from rdma.training import DROP_RDMA

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300), pytest.mark.usefixtures("suite_meanwhile")]

SERVER = "ps --ps_hosts=12.12.12.41:20000 --worker_hosts=12.12.12.44:20000 --server_protocol=grpc+verbs"
PROVIDER = "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"
AS_NOBODY_SPECIAL = "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock bash -c"


def refusal(machine: Machine, before: str, after: str, flags: str = "", wrap: str = "") -> str:
    """What a server says that is started in between; it must end with exit code 2."""
    command = f"{LOCKSTEP}{SERVER} {flags}"
    if wrap:
        command = f"{wrap} 'ulimit -l 1024; {command}'"
    done = machine.run(f"{before}; ( {command} ); code=$?; {after}; exit $code", 200)
    assert done.code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def test_each_lack_of_a_host_is_told_in_a_sentence(lab: Lab) -> None:
    host = lab.third
    away = refusal(host, "rdma link delete rxe0", "rdma link add rxe0 type rxe netdev eth0")
    assert "needs an RDMA device, but /sys/class/infiniband shows none" in away
    down = refusal(host, "ip link set eth0 down", "ip link set eth0 up")
    assert "no RDMA port is active (rxe0 port 1 is DOWN)" in down
    bare = refusal(host, f"mv {PROVIDER} /tmp/hidden", f"mv /tmp/hidden {PROVIDER}")
    assert "libibverbs has no provider rxe for rxe0" in bare
    assert "ibverbs-providers" in bare
    small = refusal(host, "true", "true", wrap=AS_NOBODY_SPECIAL)
    assert "may lock only 1024 KiB of memory here" in small
    assert "ulimit -l unlimited" in small
    gid = refusal(host, "true", "true", "--rdma_gid_index=9")
    assert "--rdma_gid_index=9 is empty on rxe0 port 1" in gid
    other = refusal(host, "true", "true", "--rdma_device=mlx5_0")
    assert "--rdma_device=mlx5_0 is not on this machine, which has rxe0:1" in other


ADDRESS = "12.12.12.43:6001"
LINK = """
import sys
from conformance_hosts.hosts import There
from lockstep.transports.conformance.stage import Stage, wait_until
with Stage(sys.argv[1], There(sys.argv[2])) as stage:
    a, b = stage.node("/suite/a"), stage.victim("/suite/b")
    a_address, b_address = a.address(), b.address()
    b.connect(a_address, False)
    link = a.connect(b_address, True)
    wait_until("up or lost", lambda: bool(a.log.all("up") or a.log.all("lost")), 60)
    for heard in a.log.all("up"):
        print("up:", a.path(link))
    for heard in a.log.all("lost"):
        print("lost:", heard.text)
"""


@pytest.fixture
def node_host(lab: Lab) -> str:
    """Where the first host, which has less to do than the second, starts nodes."""
    lab.first.start(f"{NODE_HOST} {ADDRESS}").wait_for("Waiting", NODE_HOST_SECONDS)
    return ADDRESS


def linked(lab: Lab, transport: str, node_host: str) -> str:
    """What becomes of a link between the two hosts."""
    return lab.third.run(f"{ENVIRONMENT} exec python3 -c '{LINK}' {transport} {node_host}", 200).output


def test_hosts_that_do_not_reach_each_other_by_rdma_are_not_linked(lab: Lab, node_host: str) -> None:
    """gRPC passes, RDMA does not: nothing falls back, and the reason says what was tried."""
    lab.third.run(DROP_RDMA, 20).ok()
    said = linked(lab, "grpc+verbs", node_host)
    assert "cannot reach each other by RDMA although gRPC can" in said
    assert "UDP port 4791" in said
    assert "up: " not in said


def test_auto_takes_rdma_between_hosts_that_have_it_and_tcp_where_it_does_not_pass(lab: Lab, node_host: str) -> None:
    said = linked(lab, "auto", node_host)
    assert "up: RDMA (verbs, reliable connection) by rxe0:1 to 12.12.12.43 (not grpc+shm" in said
    lab.third.run(DROP_RDMA, 20).ok()
    said = linked(lab, "auto", node_host)
    assert "up: TCP" in said
    assert "not grpc+verbs: rxe0:1 here and /suite/b" in said


PROBE = """
import sys, time
from conformance_hosts.hosts import There
from lockstep.transports.conformance.stage import Stage
from lockstep.transports.conformance import node as module
from lockstep.transports import registry
from lockstep.transports.verbs.options import RdmaOptions
options = RdmaOptions(**eval(sys.argv[1]))
module.make_transport = lambda *words, private: registry.make_transport(*words, options, private=private)
with Stage("grpc+verbs") as stage:
    pair = stage.pair()
    way = pair.way(1 << 20)
    way.write(0, 1 << 20, 0)
    pair.b.log.wait("arrived")
"""


def connected(machine: Machine, options: str) -> str:
    """What UCX says of the connections that it makes with these options."""
    command = f"""{ENVIRONMENT} UCX_LOG_LEVEL=debug python3 -c '{PROBE}' "{options}" 2>&1"""
    said = machine.run(command, 200).ok().output
    lines = [line for line in said.splitlines() if re.search(r"connected (rc )?qp|rc qp", line)]
    assert lines, said[-3000:]
    return lines[0]


def test_timeout_retries_and_service_level_reach_the_connection(lab: Lab) -> None:
    plain = connected(lab.third, "dict()")
    chosen = connected(lab.third, "dict(timeout=0.06, retry_count=5, service_level=3)")
    assert re.search(r"sl 3\b", chosen), (plain, chosen)
    assert re.search(r"timer \d+x5\b", chosen), (plain, chosen)
    assert re.search(r"timer (\d+)x", plain)[1] != re.search(r"timer (\d+)x", chosen)[1]  # type: ignore[index]


def test_the_traffic_class_is_in_the_packets(lab: Lab) -> None:
    """Counted where they leave: 0x68 is DSCP 26. GID 1 is an IPv4 address on both hosts."""
    host = lab.third
    count = "tc filter add dev eth0 egress protocol ip prio 1 flower ip_tos 0x68 ip_proto udp dst_port 4791 action pass"
    host.run(count, 20).ok()
    lab.first.start(f"export UCX_IB_GID_INDEX=1; {NODE_HOST} {ADDRESS}").wait_for("Waiting", NODE_HOST_SECONDS)
    probe = PROBE.replace('Stage("grpc+verbs")', f'Stage("grpc+verbs", There("{ADDRESS}"))')
    for options, seen in (("dict(gid_index=1)", False), ("dict(gid_index=1, traffic_class=0x68)", True)):
        host.run(f"""{ENVIRONMENT} python3 -c '{probe}' "{options}" 2>&1""", 200).ok()
        counted = host.run("tc -s filter show dev eth0 egress", 20).ok().output
        packets = re.search(r"(\d+) pkt", counted)
        assert packets is not None, counted
        assert (int(packets[1]) > 0) is seen, counted
