"""The description of a cluster, one test per rule."""

from __future__ import annotations

import dataclasses

import pytest

from lockstep.protocol.core.ids import ClusterShape, Role, TaskId, server, worker
from lockstep.runtime.startup.cluster import CLUSTER_RULES, DEFAULT_PROTOCOL, PROTOCOLS, ClusterSpec, cluster_problems
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


def test_the_token_is_not_printed() -> None:
    assert "secret" not in repr(SPEC)


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
    "startup_timeout": (dataclasses.replace(SPEC, startup_timeout=0.0), "--startup_timeout=0 leaves no time"),
    "stall_after": (dataclasses.replace(SPEC, stall_after=-1.0), "--stall_after=-1 leaves no time"),
    "user_code_timeout": (dataclasses.replace(SPEC, user_code_timeout=0.0), "--user_code_timeout=0 leaves no time"),
    "grace": (dataclasses.replace(SPEC, grace=0.0), "--grace=0 leaves no time"),
    "rejoin_timeout": (dataclasses.replace(SPEC, rejoin_timeout=0.0), "--rejoin_timeout=0 leaves no time"),
    "restarts": (dataclasses.replace(SPEC, restarts=-1), "--restarts=-1 is out of range"),
    "on_worker_loss": (dataclasses.replace(SPEC, on_worker_loss="cry"), "--on_worker_loss=cry is not known"),
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
