"""What keeps ``grpc+verbs`` from working is told before anything starts; and what its flags do, the device shows."""

from __future__ import annotations

import re

import pytest

from rdma.lab.machine import Machine
from rdma.lab.pair import ENVIRONMENT, LOCKSTEP, Pair
from rdma.training import DROP_RDMA, SMALL, start

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

SERVER = "ps --ps_hosts=12.12.12.43:20000 --worker_hosts=12.12.12.44:20000 --server_protocol=grpc+verbs"
PROVIDER = "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"
AS_NOBODY_SPECIAL = "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock bash -c"


def refusal(machine: Machine, before: str, after: str, flags: str = "", wrap: str = "") -> str:
    """What a server says that is started in between; it must end with exit code 2."""
    command = f"{LOCKSTEP}{SERVER} {flags}"
    if wrap:
        command = f"{wrap} 'ulimit -l 1024; {command}'"
    done = machine.run(f"{before}; ( {command} ); code=$?; {after}; exit $code", 90)
    assert done.code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def test_each_lack_of_a_host_is_told_in_a_sentence(pair: Pair) -> None:
    host = pair.first
    away = refusal(host, "rdma link delete rxe0", "rdma link add rxe0 type rxe netdev eth0")
    assert "needs an RDMA device, and /sys/class/infiniband shows none" in away
    down = refusal(host, "ip link set eth0 down", "ip link set eth0 up")
    assert "no RDMA port is active (rxe0 port 1 is DOWN)" in down
    bare = refusal(host, f"mv {PROVIDER} /tmp/hidden", f"mv /tmp/hidden {PROVIDER}")
    assert "libibverbs has no provider rxe for rxe0" in bare
    assert "ibverbs-providers" in bare
    small = refusal(host, "true", "true", wrap=AS_NOBODY_SPECIAL)
    assert "may lock 1024 KiB of memory here" in small
    assert "ulimit -l unlimited" in small
    gid = refusal(host, "true", "true", "--rdma_gid_index=9")
    assert "--rdma_gid_index=9 is empty on rxe0 port 1" in gid
    other = refusal(host, "true", "true", "--rdma_device=mlx5_0")
    assert "--rdma_device=mlx5_0 is not on this machine, which has rxe0:1" in other


def test_hosts_that_do_not_reach_each_other_by_rdma_refuse_to_start(pair: Pair) -> None:
    """gRPC passes, RDMA does not: nothing falls back, and the sentence says what was tried."""
    pair.second.run(DROP_RDMA, 20).ok()
    run = start(pair, "grpc+verbs", SMALL, 5)
    chief = run.workers[0].wait(300)
    assert chief.code == 2, chief.output
    assert "do not reach each other by RDMA although gRPC does" in chief.output
    assert "UDP port 4791" in chief.output


def test_auto_takes_rdma_between_hosts_and_shared_memory_within_one(pair: Pair) -> None:
    _, chief, other = start(pair, "auto", SMALL, 3).wait_well(300)
    assert "worker 0 to ps 0: RDMA (verbs, reliable connection) by rxe0:1" in chief
    assert "not grpc+shm: " in chief
    assert "worker 1 to ps 0: shared memory" in other


PROBE = """
import sys, time
from lockstep.transports.conformance.stage import Stage
from lockstep.transports.conformance import node as module
from lockstep.transports import registry
from lockstep.transports.verbs.options import RdmaOptions
options = RdmaOptions(**eval(sys.argv[1]))
module.make_transport = lambda *words: registry.make_transport(*words, options)
with Stage("grpc+verbs") as stage:
    pair = stage.pair()
    way = pair.way(1 << 20)
    way.write(0, 1 << 20, 0)
    pair.b.log.wait("arrived")
"""


def connected(machine: Machine, options: str) -> str:
    """What UCX says of the connections that it makes with these options."""
    command = f"""{ENVIRONMENT} UCX_LOG_LEVEL=debug python3 -c '{PROBE}' "{options}" 2>&1"""
    said = machine.run(command, 90).ok()
    lines = [line for line in said.splitlines() if re.search(r"connected (rc )?qp|rc qp", line)]
    assert lines, said[-3000:]
    return lines[0]


def test_timeout_retries_and_service_level_reach_the_connection(pair: Pair) -> None:
    plain = connected(pair.first, "dict()")
    chosen = connected(pair.first, "dict(timeout=0.06, retry_count=5, service_level=3)")
    assert re.search(r"sl 3\b", chosen), (plain, chosen)
    assert re.search(r"timer \d+x5\b", chosen), (plain, chosen)
    assert re.search(r"timer (\d+)x", plain)[1] != re.search(r"timer (\d+)x", chosen)[1]  # type: ignore[index]


def test_the_traffic_class_is_in_the_packets(pair: Pair) -> None:
    """Counted where they leave: 0x68 is DSCP 26."""
    host = pair.first
    host.run("tc qdisc add dev eth0 clsact; tc filter add dev eth0 egress protocol ip prio 1 flower ip_tos 0x68 "
             "ip_proto udp dst_port 4791 action pass", 20).ok()  # fmt: skip
    started = pair.second.start(f"{ENVIRONMENT} exec python3 -m lockstep.transports.conformance.inn 12.12.12.44:6001")
    host.run("for i in $(seq 100); do ss -tn; ping -c 1 -w 1 12.12.12.44 >/dev/null && break; done", 60)
    probe = PROBE.replace('Stage("grpc+verbs")', 'Stage("grpc+verbs", "12.12.12.44:6001")')
    for options, seen in (("dict(gid_index=1)", False), ("dict(gid_index=1, traffic_class=0x68)", True)):
        command = f"""{ENVIRONMENT} for i in 1 2 3 4 5 6 7 8; do python3 -c '{probe}' "{options}" && exit 0; """
        host.run(command + "sleep 1; done; exit 1", 120).ok()
        counted = host.run("tc -s filter show dev eth0 egress", 20).ok()
        packets = int(re.search(r"(\d+) pkt", counted)[1])  # type: ignore[index]
        assert (packets > 0) is seen, counted
    started.end()
