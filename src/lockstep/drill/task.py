"""The tasks of a drill: real nodes, real sockets, a training loop that computes next to nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lockstep.drill.reading import DrillInput
from lockstep.errors import EXIT_FAILED, EXIT_VERDICT
from lockstep.foreign import read_json
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.effects import Apply, Measure
from lockstep.protocol.core.faults import (
    EndEarly,
    FailAtStart,
    Fault,
    OddModel,
    OddSetting,
    OddVersion,
    SlowReads,
    parse_fault,
    to_text,
)
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Role, TaskId
from lockstep.protocol.core.messages import GroupRates, Layout, ParameterEntry, Setting
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.startup.cluster import DEFAULT_PROTOCOL, ClusterSpec
from lockstep.runtime.task.failures import failure_of, told_to_monitor
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.outcome import JobEndedError, Outcome
from lockstep.runtime.task.server_node import ServerNode
from lockstep.runtime.task.store import Done, Found, StoreTimes
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.watch.dump import on_signal
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.terminal import say
from lockstep.version import __version__

_COUNTED = 64
"""Only this many numbers of a bucket are computed; the rest is copied. All bytes travel anyway."""


_SHOWN_EVERY = 10
"""A worker prints every 10 steps, as the benchmark does: its log may be what fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """One task of a drill, as plain data that travels on its command line."""

    task: str
    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]
    folder: str
    faults: tuple[str, ...] = ()
    steps: int = 2000
    step_seconds: float = 0.02
    readers: int = 0
    metrics_port: str = ""
    elements: int = 256
    bucket_bytes: int = 1024
    delay: float = 0.0
    """Seconds that this task sleeps before it announces itself."""
    startup_timeout: float = 60.0
    stall_after: float = 60.0
    user_code_timeout: float = 600.0
    on_stall: str = "abort"
    rough: bool = False
    """Random slow steps and checkpoints: what a healthy run may do."""
    seed: int = 0
    protocol: str = DEFAULT_PROTOCOL

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> TaskPlan:
        fields = read_json(text)
        lists = {name: tuple(fields[name]) for name in ("ps_hosts", "worker_hosts", "faults")}
        return cls(**{**fields, **lists})

    @property
    def id(self) -> TaskId:
        return TaskId.parse(self.task)

    def planted(self) -> tuple[Fault, ...]:
        return tuple(parse_fault(text) for text in self.faults)

    def mine(self) -> list[Fault]:
        return [fault for fault in self.planted() if getattr(fault, "task", "") == self.task]

    def failure_at_start(self) -> FailAtStart | None:
        return next((fault for fault in self.mine() if isinstance(fault, FailAtStart)), None)

    def version(self) -> str:
        """The version that this task claims to have."""
        return next((fault.version for fault in self.mine() if isinstance(fault, OddVersion)), __version__)


def with_faults(plan: TaskPlan, faults: Sequence[Fault]) -> TaskPlan:
    """The same task with these faults planted."""
    return dataclasses.replace(plan, faults=tuple(to_text(fault) for fault in faults))


class PlainStore:
    """A server's shard without torch: new = old + the mean of the gradients, on the first few numbers.

    ``averages``: new = the mean, as without servers.
    """

    def __init__(self, *, averages: bool = False) -> None:
        self._averages = averages
        self._plan: Plan | None = None
        self._slots: Sequence[memoryview] = ()
        self.times = StoreTimes()

    def spare_bytes(self, plan: Plan) -> int:  # noqa: ARG002
        return 0

    def prepare(self, layout: Layout, plan: Plan, server: int, slots: Sequence[memoryview]) -> None:  # noqa: ARG002
        self._plan, self._slots = plan, slots

    def begin(self, effect: Apply, gradients: Sequence[memoryview], done: Done) -> None:
        self._apply(effect, gradients)
        done(None)

    def measure(self, effect: Measure, gradients: Sequence[memoryview], found: Found) -> None:  # noqa: ARG002
        raise ValueError(f"a server of a drill does not measure bucket {effect.bucket}")

    def links_changed(self) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}

    def _apply(self, effect: Apply, gradients: Sequence[memoryview]) -> None:
        assert self._plan is not None
        bucket = self._plan.buckets[effect.bucket]
        end = bucket.shard_offset + bucket.nbytes
        target = self._slots[effect.to_slot][bucket.shard_offset : end]
        if effect.step == INITIAL_STEP:
            target[:] = gradients[0][: bucket.nbytes]
            return
        target[:] = bytes(len(target)) if self._averages else self._slots[effect.from_slot][bucket.shard_offset : end]
        counted = min(bucket.nbytes // 4, _COUNTED)
        numbers = array("f", target[: 4 * counted].tobytes())
        for gradient in gradients:
            for index, value in enumerate(array("f", gradient[: 4 * counted].tobytes())):
                numbers[index] += value / effect.replicas
        target[: 4 * counted] = numbers.tobytes()

    def snapshot(self, version: int, buckets: Set[BucketId] | None = None) -> list[NamedTensor]:  # noqa: ARG002
        raise ValueError(f"a server of a drill does not save version {version}")

    def restore(self, folder: Path, shards: Sequence[str], slot: int) -> None:  # noqa: ARG002
        raise ValueError(f"a server of a drill does not read {folder}")

    def answer(self, what: str, data: bytes) -> bytes:  # noqa: ARG002
        raise ValueError(f"a server of a drill does not answer {what!r}")

    def close(self) -> None: ...


def _config(plan: TaskPlan) -> NodeConfig:
    cluster = ClusterSpec(
        ps_hosts=plan.ps_hosts,
        worker_hosts=plan.worker_hosts,
        task=plan.id,
        protocol=plan.protocol,
        startup_timeout=plan.startup_timeout,
        stall_after=plan.stall_after,
        user_code_timeout=plan.user_code_timeout,
    )
    settings = [Setting("optimizer", "sgd"), Setting("program", "drill")]
    for fault in plan.mine():
        if isinstance(fault, OddSetting):
            settings = [Setting(s.name, fault.value if s.name == fault.name else s.value) for s in settings]
    return NodeConfig(
        cluster=cluster,
        settings=tuple(settings),
        watch=WatchSettings(on_stall=plan.on_stall),
        run_folder=plan.folder,
        faults=plan.planted(),
        version=plan.version(),
        give_up=lambda outcome: os._exit(_code(outcome)),
    )


def run_drill_task(plan: TaskPlan, report_fd: int) -> int:
    """Run one task to its end; the exit code is that of ``lockstep bench``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dumps: list[Callable[[str], None]] = []
    on_signal(signal.SIGUSR1, lambda: dumps[0]("SIGUSR1") if dumps else None)
    reporter = TaskReporter(report_fd)
    with told_to_monitor(reporter):
        return _run(plan, reporter, dumps)


def _run(plan: TaskPlan, reporter: TaskReporter, dumps: list[Callable[[str], None]]) -> int:
    if (failure := plan.failure_at_start()) is not None:
        raise RuntimeError(failure.text)
    if plan.delay:
        time.sleep(plan.delay)
    if plan.id.role is Role.SERVER:
        server = ServerNode(_config(plan), PlainStore, say, reporter)
        dumps.append(server.watchdog.dump)
        return _run_server(server)
    worker = _make_worker(plan, reporter)
    dumps.append(worker.watchdog.dump)
    return _run_worker(worker, plan)


def _make_worker(plan: TaskPlan, reporter: TaskReporter) -> WorkerNode:
    if plan.ps_hosts:
        return WorkerNode(_config(plan), say, reporter)
    return WorkerNode(_config(plan), say, reporter, lambda: PlainStore(averages=True))


def _run_server(node: ServerNode) -> int:
    try:
        node.start()
        node.wait_until_member()
        outcome = node.wait_until_ended()
        node.see_others_off()  # else one of them may miss the end, and take this server for dead
    except JobEndedError as ended:
        outcome = ended.outcome
    finally:
        node.close()
    return _code(outcome)


def _run_worker(node: WorkerNode, plan: TaskPlan) -> int:
    try:
        node.start()
        train(node, plan)
        return 0
    except JobEndedError as ended:
        return _code(ended.outcome)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and ends the job
        node.fail(failure_of(error))
        return EXIT_FAILED
    finally:
        node.close()


def _code(outcome: Outcome) -> int:
    if outcome.ok:
        return 0
    return EXIT_FAILED if outcome.reason.own_error else EXIT_VERDICT


def parameters(plan: TaskPlan) -> tuple[ParameterEntry, ...]:
    """A model of three layers; one of them is larger if a fault asks for it."""
    odd = any(isinstance(fault, OddModel) for fault in plan.mine())
    sizes = (("first.weight", plan.elements + odd), ("first.bias", 16), ("second.weight", plan.elements))
    return tuple(ParameterEntry(name, size, "float32", 0) for name, size in sizes)


def train(node: WorkerNode, plan: TaskPlan) -> None:
    """The training loop of a worker."""
    node.wait_until_member()
    entries = parameters(plan)
    layout_plan = make_plan(entries, len(plan.ps_hosts or plan.worker_hosts), plan.bucket_bytes)
    layout = Layout(layout_plan.hash, plan.bucket_bytes, entries, ())
    if node.means is not None:
        node.means.prepare(layout_plan, layout)
    else:
        node.allocate(layout_plan)
        node.announce(layout)
    if node.task == CHIEF:
        node.offer_initial()
    node.wait_version(0)
    node.phase(TaskPhase.TRAINING)
    if node.task == CHIEF:
        Path(plan.folder, "training").touch()  # for readers that cannot ask over the network
    rates = (GroupRates(("lr",), (0.1,)),) if node.task == CHIEF and plan.ps_hosts else ()
    chance = random.Random(f"{plan.seed} {plan.task}")
    steps = next((fault.steps for fault in plan.mine() if isinstance(fault, EndEarly)), plan.steps)
    with contextlib.closing(_input(node, plan)) as data:
        for step in range(steps):
            data.next()
            if node.means is not None:
                node.means.release()
            node.begin_step(step, rates)
            _compute(node, plan, step, chance)
            for bucket in layout_plan.buckets:
                node.produced(step, bucket.id)
            node.seal(step)
            node.wait_version(step + 1)
            if step % _SHOWN_EVERY == 0:
                sys.stdout.write(f"step {step}\n")
                sys.stdout.flush()
        node.finish(steps)


def _input(node: WorkerNode, plan: TaskPlan) -> DrillInput:
    slow = next((fault for fault in plan.mine() if isinstance(fault, SlowReads)), None)
    folder = Path(plan.folder, f"data-{node.task.index}")
    return DrillInput(folder, plan.readers, slow, node.main.wait_for_input)


def _compute(node: WorkerNode, plan: TaskPlan, step: int, chance: random.Random) -> None:
    time.sleep(plan.step_seconds)
    if not plan.rough:
        return
    if chance.random() < 0.01:
        time.sleep(chance.uniform(0.2, 1.5))
    if step % 400 == 399:
        target = Path(plan.folder, f"checkpoint-{node.task.index}")
        with node.main.during(Doing.CHECKPOINT, str(target)):
            target.write_bytes(bytes(1 << 20))
            time.sleep(chance.uniform(0.2, 1.5))
