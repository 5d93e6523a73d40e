"""The watchdog, the snapshot and the journal's reading, in clusters inside one process and on made-up rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.cluster import InProcessCluster, in_process_cluster
from helpers.waiting import wait_until
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import read_diagnosis
from lockstep.drill.task import PlainStore, TaskPlan, train
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import Cause, Source
from lockstep.protocol.core.faults import DropMessage, FaultPlace, Stick
from lockstep.protocol.core.ids import ClusterShape, Role, server, worker
from lockstep.protocol.core.journal import Happening, Journal, tensor_states
from lockstep.runtime.task.injection import Injector
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.watch.kernel_tcp import count_by_host
from lockstep.runtime.watch.reporting import EVENTS
from lockstep.runtime.watch.snapshot import snapshot_of
from lockstep.runtime.watch.stacks import whose_code
from lockstep.runtime.watch.status import MainThread, Sampler
from lockstep.runtime.watch.watchdog import WatchSettings

SHAPE = ClusterShape(1, 2)
QUICK = WatchSettings(tick=0.05, notice=0.3, first_steps=0.5, patience=0.6, ask=0.5)
"""The real watchdog with its times scaled down."""
PATIENT = dataclasses.replace(QUICK, tick=0.2, notice=1.5, ask=3.0)
"""For what takes seconds to prove: all tasks are in one process, so each look leaves traces that the next must not see,
and an answer may come late."""


def plan_for(node: WorkerNode, steps: int) -> TaskPlan:
    spec = node.config.cluster
    return TaskPlan(
        task=str(node.task),
        ps_hosts=spec.ps_hosts,
        worker_hosts=spec.worker_hosts,
        folder=node.config.run_folder,
        steps=steps,
        step_seconds=0.005,
    )


def test_a_snapshot_shows_links_waits_steps_and_the_training_thread(tmp_path: Path) -> None:
    with in_process_cluster(SHAPE, PlainStore, run_folder=str(tmp_path)) as cluster:
        done = threading.Event()

        def look(node: WorkerNode) -> None:
            train(node, plan_for(node, 20))
            done.set()

        cluster.run(look)
        view = read_task(json.dumps(snapshot_of(cluster.workers[1])).encode())
    assert view.task == str(worker(1))
    assert view.step == 19
    assert view.links[str(server(0))].path.startswith("gRPC stream to ")
    assert view.links[str(server(0))].sent > 0
    assert view.parts["computing"] > 0
    assert view.tensors
    assert dict(view.cluster) == dict(cluster.workers[1].config.cluster.all_addresses())


@pytest.mark.timed
def test_a_stall_ends_the_job_on_every_task_and_leaves_the_report(tmp_path: Path) -> None:
    """A training thread that sleeps may come back, so it is reported; after --stall_after the job ends."""
    faults = (Stick(str(worker(1)), FaultPlace.USER_CODE, 8, 4.0),)
    settings = dataclasses.replace(QUICK, patience=30.0)
    with in_process_cluster(
        SHAPE, PlainStore, run_folder=str(tmp_path), watch=settings, faults=faults, stall_after=1.5
    ) as cluster:
        with pytest.raises(JobEndedError) as ended:
            cluster.run(lambda node: train(node, plan_for(node, 30)))
        said = list(cluster.said)
    assert ended.value.outcome.reason.source is Source.STALL
    assert ended.value.outcome.culprit == str(worker(1))
    assert sum("\nstall: " in text for text in said) == 1, "one task prints the report"
    assert any("Server 0 printed the report" in text for text in said), "the others print one line"
    report = read_diagnosis((tmp_path / "report.json").read_bytes())
    assert report.verdict is not None
    assert report.verdict.culprit == str(worker(1))
    assert {"ps-0.snapshot.json", "report.txt", "report.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.timed
@pytest.mark.parametrize(
    ("place", "cause", "line"),
    [
        (FaultPlace.USER_CODE, Cause.USER_CODE, "at user_code_that_waits (lockstep/drill_stubs.py:"),
        pytest.param(
            *(FaultPlace.LOOP, Cause.LOOPING, "does not leave user_code_that_loops (lockstep/drill_stubs.py:"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_user_code_that_waits_is_noticed_with_its_line_and_the_seconds_left_and_ends_the_job_after_its_own_time(
    tmp_path: Path, place: FaultPlace, cause: Cause, line: str
) -> None:
    faults = (Stick(str(worker(1)), place, 8, 9.0),)
    with in_process_cluster(
        SHAPE,
        PlainStore,
        run_folder=str(tmp_path),
        watch=PATIENT,
        faults=faults,
        stall_after=4.5,
        user_code_timeout=7.0,
    ) as cluster:
        with pytest.raises(JobEndedError) as ended:
            cluster.run(lambda node: train(node, plan_for(node, 30)))
        said = list(cluster.said)
    assert (ended.value.outcome.reason.source, ended.value.outcome.reason.cause) == (Source.STALL, cause)
    events = [json.loads(text) for text in (tmp_path / EVENTS).read_text().splitlines()]
    notice = next(event for event in events if event["kind"] == "notice" and event["cause"] == cause.value)
    assert line in notice["text"]
    assert re.search(r"Without progress the job ends in [1-5] s \(after --user_code_timeout\)", notice["text"])
    assert notice["text"] in said
    end = next(event for event in events if event["kind"] == "stall")
    assert end["time"] - notice["time"] >= 1.0


@pytest.mark.timed
@pytest.mark.parametrize(
    ("place", "cause"),
    [
        pytest.param(FaultPlace.BUSY, Cause.BUSY, id="busy"),
        pytest.param(FaultPlace.COMPILER, Cause.COMPILING, id="compiler", marks=pytest.mark.slow),
    ],
)
def test_what_is_announced_and_a_compiler_get_a_notice_and_never_end_the_job(
    tmp_path: Path, place: FaultPlace, cause: Cause
) -> None:
    faults = (Stick(str(worker(1)), place, 8, 4.0, "evaluation"),)
    with in_process_cluster(
        SHAPE,
        PlainStore,
        run_folder=str(tmp_path),
        watch=dataclasses.replace(PATIENT, notice=0.3),
        faults=faults,
        stall_after=2.0,
        user_code_timeout=2.0,
    ) as cluster:
        cluster.run(lambda node: train(node, plan_for(node, 30)))
    events = [json.loads(text) for text in (tmp_path / EVENTS).read_text().splitlines()]
    assert {event["kind"] for event in events} <= {"notice", "injected"}
    notices = [event for event in events if event["kind"] == "notice" and event["cause"] == cause.value]
    assert "The job does not end because of this." in notices[0]["text"]


def train_through_a_stall(folder: Path, settings: WatchSettings) -> InProcessCluster:
    """Worker 1's program waits for 5 s, which is only reported. Returns the nodes, which have ended."""
    with in_process_cluster(
        SHAPE,
        PlainStore,
        run_folder=str(folder),
        watch=dataclasses.replace(settings, on_stall="report"),
        faults=(Stick(str(worker(1)), FaultPlace.USER_CODE, 8, 5.0),),
        stall_after=1.0,
        user_code_timeout=1.0,
    ) as cluster:
        cluster.run(lambda node: train(node, plan_for(node, 30)))
    assert cluster.workers[0].outcome is not None
    assert cluster.workers[0].outcome.ok
    return cluster


@pytest.mark.timed
def test_with_on_stall_report_the_job_goes_on_when_it_can(tmp_path: Path) -> None:
    cluster = train_through_a_stall(tmp_path, QUICK)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert "stall" in kinds
    (home,) = cluster.servers
    assert home.publisher.last_verdict is not None
    assert (home.publisher.last_verdict["culprit"], home.publisher.last_verdict["holds"]) == (str(worker(1)), False)
    assert home.publisher.verdicts.total() >= 1


@pytest.mark.timed
def test_a_request_that_is_lost_is_noticed_and_heals(tmp_path: Path) -> None:
    faults = (DropMessage(str(worker(1)), str(server(0)), "Pull", 5, times=1),)
    with in_process_cluster(SHAPE, PlainStore, run_folder=str(tmp_path), watch=QUICK, faults=faults) as cluster:
        cluster.run(lambda node: train(node, plan_for(node, 15)))
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    notices = [event for event in events if event["kind"] == "notice"]
    assert notices
    assert {notices[0]["culprit"], notices[0]["peer"]} == {str(server(0)), str(worker(1))}
    assert "parameter/bucket_" in notices[0]["key"]
    assert notices[0]["step"] == 5


# -- pieces --


def test_the_journal_tells_what_became_of_each_tensor() -> None:
    journal = Journal(8)
    for at, happening, step, bucket in (
        (1.0, Happening.OPENED, 4, -1),
        (3.0, Happening.OPENED, 4, -1),
        (4.0, Happening.ARRIVED, 4, 0),
        (5.0, Happening.CONSUMED, 4, 0),
        (6.0, Happening.REQUEST_SEEN, 5, -1),
        (7.0, Happening.SENT, 5, 0),
    ):
        journal.record(at, happening, step, bucket, worker(1))
    states = {(s.kind, s.number, s.bucket): s for s in tensor_states(journal, Role.SERVER, 4, 100)}
    assert states["gradient", 4, -1].counts == {Happening.REQUESTED: 2}
    assert states["gradient", 4, 0].times == {Happening.ARRIVED: 4.0, Happening.CONSUMED: 5.0}
    assert states["parameter", 5, 0].times == {Happening.SENT: 7.0}
    assert tensor_states(journal, Role.SERVER, 5, 100) == []


def test_polling_and_repeated_requests_are_no_progress() -> None:
    journal = Journal()
    journal.record(1.0, Happening.ARRIVED, 3, 0, server(0))
    for at in (2.0, 3.0):
        journal.record(at, Happening.REQUESTED, 4, peer=server(0))
        journal.record(at, Happening.REPEATED, 4, peer=server(0))
        journal.record(at, Happening.REQUEST_SEEN, 4, peer=server(0))
    rows, _ = journal.since(0)
    newest = journal.newest_progress(rows)
    assert newest is not None
    assert newest.at == 1.0


def test_since_gives_each_row_once_also_when_the_ring_has_turned() -> None:
    journal = Journal(3)
    for number in range(5):
        journal.record(float(number), Happening.ARRIVED, number)
    rows, seen = journal.since(0)
    assert [row[2] for row in rows] == [2, 3, 4]
    journal.record(9.0, Happening.ARRIVED, 9)
    rows, seen = journal.since(seen)
    assert ([row[2] for row in rows], seen) == ([9], 6)


def test_since_reads_while_another_thread_writes() -> None:
    """A watchdog that ended of it would leave its task without anybody who notices a stall."""
    journal, stop, rows = Journal(100), threading.Event(), 0

    def write() -> None:
        for number in itertools.count():
            journal.record(float(number), Happening.ARRIVED, number)
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        for _ in range(20_000):
            rows += len(journal.since(0)[0])
    finally:
        sys.setswitchinterval(usual)
        stop.set()
        writer.join(10.0)
    assert rows > 0


class _Sampled:
    """What a sampler looks at, without a node."""

    task = worker(0)
    store_native_id = 0

    def __init__(self) -> None:
        self.journal = Journal()
        self.main = MainThread()
        self.peers: dict[object, object] = {}


def test_what_is_usual_follows_the_slower_ones_of_the_last_steps() -> None:
    node = _Sampled()
    sampler = Sampler(node, 0.0)  # type: ignore[arg-type]  # it has what a sampler reads
    assert sampler.usual(2.0, 4.0) == 4.0, "nothing is known before some steps are done"
    now = 0.0
    for step in range(20):
        now += 10.0 if step % 5 == 4 else 3.0
        node.journal.record(now, Happening.SEALED, step)
    sampler.sample(now)
    assert sampler.usual(2.0, 4.0) == pytest.approx(15.5)
    assert sampler.steps_done() == 20


def test_a_thread_that_computes_is_told_from_one_that_sleeps() -> None:
    node = _Sampled()
    sampler = Sampler(node, time.monotonic())  # type: ignore[arg-type]  # it has what a sampler reads
    node.main.enter(Doing.COMPUTING)
    sampler.sample(100.0)
    deadline = time.thread_time() + 0.3
    while time.thread_time() < deadline:
        sum(range(1000))
    sampler.sample(102.0)
    assert sampler.main_cpu() >= 0.1


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (["wait (/usr/lib/python3.11/threading.py:1)", "read (/home/me/train.py:3)"], "user code"),
        (["synchronize (/x/torch/cuda/__init__.py:9)", "step (/home/me/train.py:3)"], "device call"),
        (["wait (/usr/lib/threading.py:1)", "on_arrived (/x/lockstep/runtime/connection.py:3)"], "communication"),
        ([], ""),
    ],
)
def test_a_stack_tells_whose_code_it_is_in(frames: list[str], where: str) -> None:
    assert whose_code(frames) == where


def test_the_kernel_counts_what_waits_and_what_came() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
        with sender, receiver:
            before = count_by_host().get("127.0.0.1")
            assert before is not None
            sender.setblocking(False)
            try:
                while True:
                    sender.send(bytes(1 << 16))
            except BlockingIOError:
                pass
            after = count_by_host()["127.0.0.1"]
    assert after.waiting > 4096
    assert after.segments_in > before.segments_in


def test_a_fault_strikes_only_its_own_task_and_as_often_as_it_says() -> None:
    told: list[str] = []
    fault = DropMessage(str(worker(1)), str(server(0)), "Open", 0, times=2)
    from lockstep.protocol.core.messages import Open

    mine, others = (Injector(task, (fault,), told.append) for task in (worker(1), worker(0)))
    assert [mine.drops_message(server(0), Open(1, ())) for _ in range(3)] == [True, True, False]
    assert not others.drops_message(server(0), Open(1, ()))
    assert told == ["DropMessage"]


def test_in_a_wait_the_training_thread_says_for_what() -> None:
    main = MainThread()
    main.enter(Doing.COMPUTING, "step 3")
    with main.during(Doing.INPUT, "/data/x"):
        assert main.now()[:2] == ("input", "/data/x")
    assert main.now()[:2] == ("computing", "step 3")
    assert wait_until(lambda: main.ident == threading.get_ident(), 1.0, "its thread")
