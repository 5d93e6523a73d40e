"""Workers whose gradients others sum: the job around the sums is as with servers. No sum is made here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.cluster import JOIN_SECONDS, Front
from helpers.ports import free_ports
from lockstep.protocol.coordinator.recovery import Beginning, RecoveryRules
from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import CHIEF, ClusterShape, worker
from lockstep.protocol.core.messages import CallMade, CallPlace, ParameterEntry, Setting
from lockstep.protocol.core.plan import make_plan
from lockstep.runtime.checkpoint.folder import CheckpointFolder, verify
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError

ENTRIES = (ParameterEntry("first", 16, "float32", 0), ParameterEntry("second", 16, "float32", 0))
PLAN = make_plan(ENTRIES, 1, 64)
SETTINGS = (Setting("optimizer", "sgd"),)


@contextmanager
def nodes(count: int, train_dir: str = "", save_steps: int = 0) -> Iterator[list[CollectiveNode]]:
    hosts = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    rules = RecoveryRules(save_steps=save_steps, saves_last=bool(train_dir))
    made: list[CollectiveNode] = []
    fronts: list[Front] = []
    try:
        for task in ClusterShape(0, count).worker_ids():
            reporter = TaskReporter.none()
            fronts.append(Front(task, hosts[task.index], reporter))
            resumes = bool(train_dir) and task == CHIEF
            beginning = beginning_in(train_dir, SETTINGS, lambda _: None) if resumes else Beginning()
            config = NodeConfig(
                cluster=ClusterSpec(worker_hosts=hosts, task=task),
                settings=SETTINGS,
                recovery=rules,
                train_dir=train_dir,
                beginning=beginning,
            )
            made.append(CollectiveNode(config, lambda _: None, reporter))
        for node in made:
            node.start()
        yield made
    finally:
        for node in reversed(made):
            node.close()
        for front in fronts:
            front.close()


def run(made: list[CollectiveNode], train: Callable[[CollectiveNode], None]) -> dict[int, JobEndedError]:
    """Train on a thread each; returns how the job ended for those for whom it ended badly."""
    endings: dict[int, JobEndedError] = {}

    def guarded(node: CollectiveNode) -> None:
        try:
            train(node)
        except JobEndedError as ended:
            endings[node.task.index] = ended

    threads = [threading.Thread(target=guarded, args=(node,)) for node in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), f"{thread.name} did not end"
    return endings


class Together:
    """Stands in for torch.distributed: a sum is there once every worker has handed its part over."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def step(self, node: CollectiveNode, step: int, state: bytes | None = None) -> None:
        if state is not None:
            node.tell_state(step, state)
        node.begin_step(step)
        for bucket in PLAN.buckets:
            node.handed_over(step, bucket.id)
        node.backward_ended(step)
        self._barrier.wait(JOIN_SECONDS)
        for bucket in PLAN.buckets:
            node.summed(step, bucket.id)
        node.between_steps()


def test_workers_talk_through_their_only_link() -> None:
    answers: dict[int, tuple[bytes, ...]] = {}

    def train(node: CollectiveNode) -> None:
        node.wait_until_member()
        own = b"from %d" % node.task.index
        made = CallMade(CallPlace(0, OUTSIDE_LOOPS, 0), "gather", "", "who", "train.py:1", own)
        answers[node.task.index] = node.calls.call(made).values
        node.prepare(PLAN)
        node.finish(0)

    with nodes(3) as made:
        assert run(made, train) == {}
    assert answers == dict.fromkeys(range(3), (b"from 0", b"from 1", b"from 2"))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_step_is_committed_and_the_job_ends_for_all(count: int) -> None:
    sums = Together(count)

    def train(node: CollectiveNode) -> None:
        node.wait_until_member()
        node.prepare(PLAN)
        for step in range(5):
            sums.step(node, step)
        node.finish(5)

    with nodes(count) as made:
        assert run(made, train) == {}
        assert all(node.outcome is not None and node.outcome.ok for node in made)
        coordinator = made[0].machine.coordinator
        assert coordinator is not None
        assert coordinator.committed == 4
        assert all(set(node.peers) <= {CHIEF} for node in made[1:]), "no tensor needs any other link"


def test_the_failure_of_one_ends_the_job_on_all_and_names_it() -> None:
    sums = Together(3)

    def train(node: CollectiveNode) -> None:
        node.wait_until_member()
        node.prepare(PLAN)
        for step in range(3):
            sums.step(node, step)
        if node.task == worker(2):
            raise JobEndedError(node.fail(Reason(Cause.FAILED, "out of luck")))
        raise node.lost("connection closed by peer")

    with nodes(3) as made:
        endings = run(made, train)
    assert endings.keys() == {0, 1, 2}
    assert {ended.outcome.culprit for ended in endings.values()} == {str(worker(2))}


def test_what_is_saved_are_the_values_before_a_step_and_the_last(tmp_path: Path) -> None:
    """The chief's training thread gives them, between two updates, and a later job begins with them."""
    sums = Together(2)
    values = {0: 0.0, 1: 0.0}
    begun: list[tuple[int, bytes]] = []

    def taken(version: int) -> list[NamedTensor]:
        assert values[0] == version, "the values are of another version"
        return [NamedTensor("value", "F32", (1,), memoryview(bytes(4)))]

    def train(node: CollectiveNode) -> None:
        node.save_with(taken)
        node.wait_until_member()
        begun.append((node.start_step, node.local_state))
        node.prepare(PLAN)
        first = max(0, node.start_step)
        values[node.task.index] = float(first)
        for step in range(first, first + 6):
            sums.step(node, step, f"{node.task.index} before {step}".encode())
            values[node.task.index] += 1
        node.tell_state(first + 6, f"{node.task.index} before {first + 6}".encode())
        node.finish(first + 6)

    for _ in range(2):
        with nodes(2, str(tmp_path), save_steps=4) as made:
            assert run(made, train) == {}
    found = [verify(path).version for path in CheckpointFolder(str(tmp_path)).complete()]
    assert sorted(found) == [4, 6, 8, 12]
    assert sorted(begun) == [(-1, b""), (-1, b""), (6, b"0 before 6"), (6, b"1 before 6")]
