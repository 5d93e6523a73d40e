"""Where the tasks of a job listen, what for, and what a caller must prove there."""

from __future__ import annotations

import dataclasses

from helpers.keys import no_key
from lockstep.doctor.posture import (
    CallerProof,
    ListenerPurpose,
    ListeningPlace,
    Openings,
    RunningTask,
    found_listeners,
    planned_listeners,
    posture_lines,
)
from lockstep.protocol.core.ids import CHIEF, server, worker
from lockstep.runtime.listening import ListeningSocket
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.metrics_options import MetricsOptions

SPEC = ClusterSpec(ps_hosts=("10.0.0.1:2222",), worker_hosts=("10.0.0.2:2222", "10.0.0.3:2222"))
NONE, STORE = Openings(), Openings(store_port=2223)
WITHOUT_SERVERS = dataclasses.replace(SPEC, ps_hosts=(), has_servers=False, carried_by_torch=True)


def shown(listeners: list[ListeningPlace]) -> list[str]:
    return [str(one) for one in listeners]


def test_before_the_start_the_ports_are_those_that_were_named() -> None:
    named = dataclasses.replace(SPEC, ports="4700-4799", protocol="grpc+ucx")
    assert shown(planned_listeners(dataclasses.replace(SPEC, require_private=True), server(0), NONE)) == [
        "10.0.0.1:2222 (monitor)",
        "10.0.0.1:* (task)",
        "10.0.0.1:* (tensors)",
    ]
    encrypted = dataclasses.replace(SPEC, require_private=True, protocol="grpc")
    assert shown(planned_listeners(encrypted, server(0), NONE))[1:] == ["10.0.0.1:* (task)"]
    assert shown(planned_listeners(SPEC, server(0), NONE))[2:] == ["10.0.0.1:* (tensors)"]
    assert shown(planned_listeners(named, CHIEF, NONE))[1:] == ["10.0.0.2:4700-4799 (task)", "10.0.0.2:4700-4799 (UCX)"]


def test_metrics_have_a_port_of_their_own() -> None:
    open_spec = dataclasses.replace(SPEC, metrics=MetricsOptions("0.0.0.0:9400"))
    (_, _, _, metrics) = planned_listeners(open_spec, server(0), NONE)
    assert (str(metrics), metrics.proof) == ("0.0.0.0:9400 (metrics)", CallerProof.KEY)
    (_, _, _, metrics) = planned_listeners(dataclasses.replace(SPEC, metrics=MetricsOptions("9400")), CHIEF, NONE)
    assert (str(metrics), metrics.proof) == ("127.0.0.1:9400 (metrics)", CallerProof.THIS_HOST)
    sockets = [ListeningSocket("10.0.0.2", port, 8) for port in (9400, 50000)]
    found = found_listeners(open_spec, CHIEF, NONE, RunningTask((8,), ""), sockets)
    assert [one.purpose for one in found] == [ListenerPurpose.METRICS, ListenerPurpose.TENSORS]


def test_only_worker_0_has_the_store() -> None:
    first, second = (planned_listeners(WITHOUT_SERVERS, worker(index), STORE) for index in (0, 1))
    assert shown(first)[2:] == ["10.0.0.2:2223 (torch's store)", "10.0.0.2:* (gloo or NCCL)"]
    assert shown(second)[2:] == ["10.0.0.3:* (gloo or NCCL)"]


def test_of_a_running_task_the_sockets_of_its_processes_count() -> None:
    running = RunningTask((7, 8), "10.0.0.2:41000")
    sockets = [ListeningSocket("10.0.0.2", port, 8) for port in (2222, 41000, 2223, 50000)]
    found = found_listeners(WITHOUT_SERVERS, CHIEF, STORE, running, sockets)
    assert [one.purpose for one in found] == [
        ListenerPurpose.MONITOR,
        ListenerPurpose.TASK,
        ListenerPurpose.STORE,
        ListenerPurpose.COLLECTIVE,
    ]
    assert [one.proof for one in found] == [CallerProof.KEY, CallerProof.KEY, CallerProof.NOTHING, CallerProof.NOTHING]
    (tensors,) = found_listeners(SPEC, CHIEF, NONE, running, sockets[3:])
    assert (tensors.purpose, tensors.proof) == (ListenerPurpose.TENSORS, CallerProof.KEY)
    strays = found_listeners(SPEC, CHIEF, NONE, running, sockets[2:])
    assert {(one.purpose, one.proof) for one in strays} == {(ListenerPurpose.UNKNOWN, CallerProof.NOTHING)}


def test_with_insecure_nobody_must_prove_anything() -> None:
    with no_key():
        listeners = planned_listeners(SPEC, CHIEF, NONE)
        assert {one.proof for one in listeners} == {CallerProof.NOTHING}
        assert len(listeners) == 3
        assert len(planned_listeners(dataclasses.replace(SPEC, protocol="grpc"), CHIEF, NONE)) == 2


def test_the_posture_is_a_line_per_task_and_names_what_serves_anybody() -> None:
    assert posture_lines(planned_listeners(SPEC, CHIEF, NONE)) == [
        "worker 0 listens at 10.0.0.2:2222 (monitor), 10.0.0.2:* (task), 10.0.0.2:* (tensors)"
    ]
    *_, note = posture_lines(planned_listeners(WITHOUT_SERVERS, CHIEF, STORE))
    assert note.startswith("note: torch's store and gloo or NCCL cannot check who connects")


def test_a_task_that_listens_everywhere_is_noted() -> None:
    *_, note = posture_lines(planned_listeners(dataclasses.replace(SPEC, bind="0.0.0.0"), CHIEF, NONE))
    assert note.startswith("note: --bind makes a task listen on every interface")


def test_of_many_tasks_the_first_are_shown() -> None:
    many = dataclasses.replace(SPEC, worker_hosts=tuple(f"10.0.0.2:{port}" for port in range(3000, 3040)))
    lines = posture_lines(one for index in range(40) for one in planned_listeners(many, worker(index), NONE))
    assert len(lines) == 5
    assert lines[-1] == "36 more tasks listen on this machine; --json lists them"


def test_rdma_has_no_port_and_is_named_all_the_same() -> None:
    line, note = posture_lines(planned_listeners(SPEC, CHIEF, Openings(rdma=True)))
    assert line.endswith("10.0.0.2:* (tensors), 10.0.0.2 (RDMA)")
    assert note.startswith("note: RDMA cannot check who connects")
