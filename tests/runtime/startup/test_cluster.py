"""The description of a cluster, one test per rule."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.keys import no_key
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId, server, worker
from lockstep.runtime.startup.cluster import CLUSTER_RULES, DEFAULT_PROTOCOL, PROTOCOLS, ClusterSpec, cluster_problems
from lockstep.runtime.startup.metrics_options import MetricsOptions
from lockstep.runtime.startup.pages import Pages
from lockstep.transports.control.addresses import Address
from lockstep.transports.verbs.options import RdmaOptions

SPEC = ClusterSpec(ps_hosts=("10.0.0.1:2222",), worker_hosts=("10.0.0.2:2222", "10.0.0.3:2222"), task=worker(1))


def test_a_right_description_has_no_problems() -> None:
    assert cluster_problems(SPEC) == []
    assert SPEC.shape == ClusterShape(servers=1, workers=2)
    assert SPEC.address_of(server(0)) == "10.0.0.1:2222"
    assert SPEC.listen_address() == Address("10.0.0.3", 2222)


def test_a_cluster_without_hosts_yet_has_no_problems() -> None:
    assert cluster_problems(ClusterSpec()) == []


def test_the_default_protocol_is_one_of_those_known() -> None:
    assert DEFAULT_PROTOCOL in PROTOCOLS


def test_a_task_that_is_not_in_the_lists_has_no_address() -> None:
    for task in (worker(2), server(-1)):
        with pytest.raises(KeyError):
            SPEC.address_of(task)


def test_bind_decides_where_to_listen_and_not_where_to_be_found() -> None:
    spec = dataclasses.replace(SPEC, bind="0.0.0.0")
    assert spec.listen_address() == Address("0.0.0.0", 2222)
    assert spec.address_of(worker(1)) == "10.0.0.3:2222"
    assert dataclasses.replace(SPEC, bind="0.0.0.0:99").listen_address() == Address("0.0.0.0", 99)


def test_another_task_sees_the_same_cluster() -> None:
    assert SPEC.for_task(server(0)).listen_address() == Address("10.0.0.1", 2222)
    assert SPEC.with_hosts(("a:1",), ("b:1",)).shape == ClusterShape(1, 1)


def test_second_ports_are_those_of_the_range_that_no_task_is_listed_with() -> None:
    assert SPEC.second_ports is None
    ports = dataclasses.replace(SPEC, ports="2221-2223").second_ports
    assert list(ports or ()) == [2221, 2223]


def test_on_one_host_and_with_encryption_bytes_are_private() -> None:
    one_host = SPEC.with_hosts(("127.0.0.1:1",), ("127.0.0.1:2", "127.0.0.1:3"))
    assert cluster_problems(dataclasses.replace(one_host, require_private=True)) == []
    assert cluster_problems(dataclasses.replace(SPEC, require_private=True)) == []
    with no_key():
        (found,) = cluster_problems(dataclasses.replace(SPEC, require_private=True))
    assert found == "--require_private and --insecure exclude each other; leave one of them out."
    (found,) = cluster_problems(dataclasses.replace(one_host, require_private=True, protocol="grpc+ucx"))
    assert "which cannot encrypt; use auto or grpc." in found


BROKEN: dict[str, tuple[ClusterSpec, str]] = {
    "no servers": (dataclasses.replace(SPEC, ps_hosts=()), "--job_name=worker needs the addresses of all tasks"),
    "no workers": (
        dataclasses.replace(SPEC, worker_hosts=(), task=server(0)),
        "--job_name=ps needs the addresses of all tasks",
    ),
    "index too large": (dataclasses.replace(SPEC, task=worker(2)), "--task_index=2 is out of range"),
    "index negative": (dataclasses.replace(SPEC, task=TaskId(Role.WORKER, -1)), "--task_index=-1 is out of range"),
    "malformed": (dataclasses.replace(SPEC, ps_hosts=("10.0.0.1",)), "--ps_hosts, entry 0: '10.0.0.1' has no port"),
    "wildcard": (
        dataclasses.replace(SPEC, ps_hosts=("0.0.0.0:1",)),
        "other tasks cannot connect to 0.0.0.0:1",
    ),
    "twice": (
        dataclasses.replace(SPEC, ps_hosts=("10.0.0.3:2222",)),
        "10.0.0.3:2222 is given for both ps 0 and worker 1",
    ),
    "protocol": (dataclasses.replace(SPEC, protocol="pigeon"), "--server_protocol=pigeon is not known"),
    "bind": (dataclasses.replace(SPEC, bind="a b"), "--bind: 'a b' in 'a b' is not a host name"),
    "ports": (dataclasses.replace(SPEC, ports="4700"), "--ports: '4700' is not a range of ports"),
    "ports of the lists": (
        dataclasses.replace(SPEC, ports="2222-2222"),
        "--ports=2222-2222 has no port besides those in the host lists; give a larger range",
    ),
    "private over UCX": (
        dataclasses.replace(SPEC, require_private=True, protocol="grpc+ucx"),
        "--require_private refuses --server_protocol=grpc+ucx, which cannot encrypt",
    ),
    "private over RDMA": (
        dataclasses.replace(SPEC, require_private=True, protocol="grpc+verbs"),
        "--require_private refuses --server_protocol=grpc+verbs, which cannot encrypt",
    ),
    "private all-reduce": (
        dataclasses.replace(SPEC, require_private=True, has_servers=False, carried_by_torch=True, ps_hosts=()),
        "--require_private refuses all-reduce by torch.distributed across hosts: gloo and NCCL cannot encrypt",
    ),
    "startup_timeout": (dataclasses.replace(SPEC, startup_timeout=0.0), "--startup_timeout=0 leaves no time"),
    "stall_after": (dataclasses.replace(SPEC, stall_after=-1.0), "--stall_after=-1 leaves no time"),
    "user_code_timeout": (dataclasses.replace(SPEC, user_code_timeout=0.0), "--user_code_timeout=0 leaves no time"),
    "grace": (dataclasses.replace(SPEC, grace=0.0), "--grace=0 leaves no time"),
    "rejoin_timeout": (dataclasses.replace(SPEC, rejoin_timeout=0.0), "--rejoin_timeout=0 leaves no time"),
    "restarts": (dataclasses.replace(SPEC, restarts=-1), "--restarts=-1 is out of range"),
    "spares": (dataclasses.replace(SPEC, restarts=1, spares=-1), "--spares=-1 is out of range"),
    "spares alone": (dataclasses.replace(SPEC, spares=1), "--spares=1 has no use without restarts"),
    "on_verdict": (
        dataclasses.replace(SPEC, pages=Pages(command="no-such-program now")),
        "--on_verdict: there is no program 'no-such-program' here; give its path",
    ),
    "metrics_port": (
        dataclasses.replace(SPEC, metrics=MetricsOptions("nine")),
        "--metrics_port=nine is not a port from 1 to 65535; give PORT, or HOST:PORT to be reached from other hosts.",
    ),
    "quotation": (dataclasses.replace(SPEC, pages=Pages(command="echo 'a")), "has an open quotation mark; close it"),
    "webhook": (
        dataclasses.replace(SPEC, pages=Pages(webhook="ftp://pager")),
        "--verdict_webhook=ftp://pager is not an address; give one like https://HOST/PATH",
    ),
    "on_worker_loss": (dataclasses.replace(SPEC, on_worker_loss="cry"), "--on_worker_loss=cry is not known"),
    "replicas without servers": (
        dataclasses.replace(SPEC, server_replicas=1, has_servers=False, ps_hosts=()),
        "--server_replicas=1 needs servers, and this mode has none; leave it out.",
    ),
    "replicas on one server": (
        dataclasses.replace(SPEC, server_replicas=1),
        "--server_replicas=1 needs a second server to hold what the first one holds; give two, or leave it out.",
    ),
    "server_replicas": (
        dataclasses.replace(SPEC, server_replicas=2),
        "--server_replicas=2 is out of range; give 0 or 1.",
    ),
    "rdma without RDMA": (
        dataclasses.replace(SPEC, protocol="grpc", rdma=RdmaOptions(gid_index=1)),
        "has no effect with --server_protocol=grpc",
    ),
}


@pytest.mark.parametrize(("spec", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_gives_one_sentence_with_a_remedy(spec: ClusterSpec, sentence: str) -> None:
    (found,) = cluster_problems(spec)
    assert sentence in found
    assert found.endswith(".")


def test_every_rule_is_broken_by_one_of_the_cases() -> None:
    broken = {rule for rule in CLUSTER_RULES for spec, _sentence in BROKEN.values() if list(rule(spec))}
    assert broken == set(CLUSTER_RULES)
