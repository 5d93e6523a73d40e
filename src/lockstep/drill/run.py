"""Runs one drill: starts the cluster, lets the fault strike, reads what was reported, and has it judged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Set
from pathlib import Path

from lockstep.drill.cluster import DrillCluster
from lockstep.drill.hosts import Hosts, why_not
from lockstep.drill.judgement import Event, cause_said, false_alarms, hear, problems_of
from lockstep.drill.model import START_SECONDS_PER_TASK, STEP, Drill
from lockstep.drill.result import DrillResult, DrillStatus
from lockstep.drill.task import TaskPlan, with_faults
from lockstep.errors import EXIT_VERDICT
from lockstep.foreign import read_json
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.faults import FailAtStart, Freeze, OddModel, OddSetting, Stick
from lockstep.protocol.core.ids import ClusterShape, TaskId
from lockstep.protocol.core.timing import PROMISE_SECONDS, TASKS_LEAVE_SECONDS, VERDICT_SECONDS
from lockstep.runtime.host_network import HostsError
from lockstep.runtime.startup.cluster import DEFAULT_PROTOCOL
from lockstep.runtime.watch.reporting import EVENTS

START_SECONDS = 60.0
_POLL = 0.02


def run_drill(drill: Drill, keep: str = "") -> DrillResult:
    """Run it, and leave nothing behind except its files, if ``keep`` names a folder."""
    result = DrillResult(name=drill.name, fooled=drill.fooled)
    if drill.needs_hosts and (missing := why_not()):
        result.skip(missing)
        return result
    with contextlib.ExitStack() as stack:
        if keep:
            folder = Path(keep, drill.name)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(0o700, parents=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-drill-")))
        shape = ClusterShape(drill.servers, drill.workers)
        try:
            hosts = stack.enter_context(Hosts(shape.tasks())) if drill.needs_hosts else None
        except HostsError as error:
            result.skip(str(error))
            return result
        places = None if hosts is None else {t: [hosts.addresses[t], *hosts.run_prefix(t)] for t in shape.tasks()}
        with DrillCluster(shape, folder, places) as cluster:
            _Run(drill, cluster, hosts, result).run()
        report = folder / "report.txt"
        result.report = report.read_text() if report.exists() else ""
    return result


class _Run:
    def __init__(self, drill: Drill, cluster: DrillCluster, hosts: Hosts | None, result: DrillResult) -> None:
        self._drill = drill
        self._cluster = cluster
        self._hosts = hosts
        self._result = result
        self._events = cluster.folder / EVENTS
        self._struck: float | None = None
        self._places: dict[TaskId, int] = {}
        """Where each task is in the cluster's list of processes."""
        self._start_seconds = START_SECONDS + START_SECONDS_PER_TASK * len(cluster.shape.tasks())

    def run(self) -> None:
        self._start()
        if self._drill.kind is None:
            if self._drill.around.heals_after:
                self._wait_for_strike()
                time.sleep(self._drill.around.heals_after)
                self._heal()
            self._expect_a_healthy_end()
            self._result.kind, self._result.cause = "healthy", "none"
            self._result.said = cause_said(self._drill, self._read(), 0.0)
            return
        self._struck = self._struck or self._wait_for_strike()
        if self._struck is None:
            self._result.reason = f"the fault did not strike within {self._start_seconds:g} s"
            return
        self._read_until_judged(self._struck)
        if self._result.status is DrillStatus.PASSED and self._drill.ends_after is not None:
            self._expect_the_end(self._struck, self._drill.ends_after)
        elif self._result.status is DrillStatus.PASSED and self._drill.goes_on:
            self._heal()
            self._expect_a_healthy_end()
        said = self._result.said = cause_said(self._drill, self._read(), self._struck)
        self._result.struck = said if self._drill.is_right(said) else self._drill.cause.value

    # -- starting --

    def _start(self) -> None:
        drill, around = self._drill, self._drill.around
        first = [TaskId.parse(name) for name in around.order]
        failing = {fault.task for fault in drill.faults if isinstance(fault, FailAtStart)}
        tasks = [*first, *(task for task in self._cluster.shape.tasks() if task not in first)]
        tasks.sort(key=lambda task: str(task) in failing)
        swapped = {a: b for one, other in around.swapped for a, b in ((one, other), (other, one))}
        if around.leftover:
            self._start_older_job()
            self._struck = time.time()
        for place, task in enumerate(tasks):
            if str(task) in around.missing or (around.leftover and task.role.value == "ps"):
                continue
            if 0 < place < len(first):
                time.sleep(1.0)
            if str(task) in failing:
                self._when_all_listen(failing)  # it answers for a moment only, and somebody must be there to ask
            self._start_one(task, swapped.get(str(task), ""))
        if around.twice:
            self._start_twice(TaskId.parse(around.twice))
        odd = any(isinstance(fault, (OddModel, OddSetting, FailAtStart)) for fault in drill.faults)
        if odd or around.missing or around.swapped or around.late:
            self._struck = self._when_all_listen()

    def _plan(self, task: TaskId) -> TaskPlan:
        drill = self._drill
        delay = dict(drill.around.late).get(str(task), 0.0)
        plan = self._cluster.plan(
            task,
            steps=drill.steps,
            step_seconds=drill.step_seconds,
            readers=drill.readers,
            startup_timeout=drill.startup_timeout,
            stall_after=drill.stall_after,
            user_code_timeout=drill.user_code_timeout,
            delay=delay,
            elements=drill.elements,
            bucket_bytes=drill.bucket_bytes,
            # Hosts made of namespaces share this machine's memory, and real ones do not.
            protocol="grpc" if drill.needs_hosts else DEFAULT_PROTOCOL,
        )
        return with_faults(plan, drill.faults)

    def _start_one(self, task: TaskId, index_of: str = "") -> int:
        plan = self._plan(task)
        if index_of:
            # The process listens where the first task should be, and claims to be the other one.
            other = TaskId.parse(index_of)
            lists = [list(plan.ps_hosts), list(plan.worker_hosts)]
            mine = lists[0] if task.role.value == "ps" else lists[1]
            mine[task.index], mine[other.index] = mine[other.index], mine[task.index]
            plan = dataclasses.replace(plan, task=index_of, ps_hosts=tuple(lists[0]), worker_hosts=tuple(lists[1]))
        around = self._drill.around
        log = "/dev/full" if str(task) in around.full_log else ""
        self._places[task] = self._cluster.start(plan, log, dict(around.environment))
        return self._places[task]

    def _start_older_job(self) -> None:
        """A whole cluster whose workers then vanish; its server does not know yet."""
        places = {task: self._start_one(task) for task in self._cluster.shape.tasks()}
        self._wait_for_step(STEP)
        server_pid = self._cluster.task_pid(self._cluster.shape.coordinator)
        # While the server is stopped it cannot notice that its workers are gone, as after a cut network.
        os.kill(server_pid, signal.SIGSTOP)
        for task, place in places.items():
            if task.role.value == "worker":
                self._cluster.kill_monitor(place)
        self._events.unlink(missing_ok=True)
        os.kill(server_pid, signal.SIGCONT)

    def _start_twice(self, task: TaskId) -> None:
        second = self._plan(task)
        hosts = list(second.worker_hosts)
        with _free_port() as port:
            hosts[task.index] = f"127.0.0.1:{port}"
        self._cluster.start(dataclasses.replace(second, worker_hosts=tuple(hosts)), log="second.log")
        self._cluster.wait_until_it_listens(task, self._start_seconds, hosts[task.index])
        self._struck = time.time()

    def _when_all_listen(self, but: Set[str] = frozenset()) -> float:
        """The time when all started tasks look for the others: from then on one of them waits."""
        absent = {*self._drill.around.missing, *dict(self._drill.around.late), *but}
        for task in self._cluster.shape.tasks():
            if str(task) not in absent:
                self._cluster.wait_until_it_listens(task, self._start_seconds)
        return time.time()

    # -- striking --

    def _wait_for_strike(self) -> float | None:
        around = self._drill.around
        if around.cut is not None:
            self._wait_for_step(STEP)
            return self._cut(*around.cut)
        if around.paused:
            self._wait_for_step(STEP)
            return self._signal_hosts(around.paused, signal.SIGSTOP)
        if around.restarted:
            self._wait_for_step(STEP)
            return self._restart(TaskId.parse(around.restarted))
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            struck = [event for event in self._read() if event["kind"] == "injected"]
            if struck:
                return float(struck[0]["time"])
            if self._first_end() is not None and self._drill.faults:
                return self._first_end()
            time.sleep(_POLL)
        return time.time() if self._read() else None

    def _first_end(self) -> float | None:
        """Some faults strike at a step that the task does not announce; the end of the job is reported anyway."""
        found = [event for event in self._read() if event["kind"] == ReportKind.VERDICT]
        return float(found[0]["time"]) if found else None

    def _cut(self, one: str, other: str, how: str) -> float:
        assert self._hosts is not None
        first, second = TaskId.parse(one), TaskId.parse(other)
        struck = time.time()
        self._hosts.drop(second, first, how)
        if how in ("both", "reset"):
            self._hosts.drop(first, second, how)
        return struck

    def _signal_hosts(self, names: tuple[str, ...], number: int) -> float:
        """Stop or resume all that belongs to these tasks; monitors first, or they would notice that a task stopped."""
        struck = time.time()
        for name in names:
            self._cluster.signal_all(self._places[TaskId.parse(name)], number)
        return struck

    def _heal(self) -> None:
        around = self._drill.around
        if around.paused:
            self._signal_hosts(around.paused, signal.SIGCONT)
        if around.cut is not None and self._hosts is not None:
            for name in around.cut[:2]:
                self._hosts.restore(TaskId.parse(name))

    def _restart(self, task: TaskId) -> float:
        struck = time.time()
        self._cluster.kill_monitor(self._places[task])
        self._start_one(task)
        return struck

    def _wait_for_step(self, step: int) -> None:
        """Wait until the cluster trains, according to the snapshot of the chief's task."""
        from lockstep.diagnose.collect import look_at

        deadline = time.monotonic() + self._start_seconds
        chief = self._cluster.shape.worker_ids()[0]
        while time.monotonic() < deadline:
            if self._hosts is not None:
                # Its address is not reachable from here; three quarters of a second of training is enough.
                if self._cluster_is_training():
                    return
            else:
                seen = look_at(str(chief), self._cluster.address(chief), 1.0)
                if seen.view is not None and seen.view.step >= step:
                    return
            time.sleep(0.1)

    def _cluster_is_training(self) -> bool:
        marker = self._cluster.folder / "training"
        return marker.exists() and time.time() - marker.stat().st_mtime > 1.0

    # -- reading and judging --

    def _read(self) -> list[Event]:
        try:
            lines = self._events.read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(read_json(line))
        return found

    def _read_until_judged(self, struck: float) -> None:
        drill, result = self._drill, self._result
        deadline = time.monotonic() + VERDICT_SECONDS + drill.proof_takes + 2.0
        while time.monotonic() < deadline and not hear(drill, result, self._read(), struck):
            time.sleep(_POLL)
        problems = problems_of(drill, result, self._read())
        if not problems and drill.ends_with is not None and drill.ends_after is None:
            problems = self._wrong_exit_codes(drill.ends_with)
        result.conclude(problems)

    def _expect_the_end(self, struck: float, seconds: float) -> None:
        """The job is ended by a stall, after this time and not before."""
        deadline = time.monotonic() + seconds + VERDICT_SECONDS
        stalls: list[float] = []
        while not stalls and time.monotonic() < deadline:
            stalls = [event["time"] - struck for event in self._read() if event["kind"] == ReportKind.STALL]
            time.sleep(_POLL)
        in_time = bool(stalls) and seconds - 1.0 <= stalls[0] <= seconds + PROMISE_SECONDS
        problems = [] if in_time else [f"the job should have ended after {seconds:g} s; stalls: {stalls}"]
        self._result.conclude(problems or self._wrong_exit_codes(EXIT_VERDICT))

    def _wrong_exit_codes(self, expected: int) -> list[str]:
        """Every task that was not struck, or only hangs, leaves soon, with the exit code that the docs state."""
        struck = {fault.task for fault in self._drill.faults if not isinstance(fault, Stick | Freeze)}
        others = [place for task, place in sorted(self._places.items()) if str(task) not in struck]
        deadline = time.monotonic() + TASKS_LEAVE_SECONDS
        while True:
            codes = self._cluster.exit_codes()
            self._result.exit_codes = tuple(codes[place] for place in others)
            if None not in self._result.exit_codes or time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        wrong = any(code != expected for code in self._result.exit_codes)
        return [f"the others exited with {self._result.exit_codes}, not {expected}"] if wrong else []

    def _expect_a_healthy_end(self) -> None:
        deadline = time.monotonic() + self._start_seconds + 10.0
        while time.monotonic() < deadline and None in self._cluster.exit_codes():
            time.sleep(_POLL)
        codes = self._cluster.exit_codes()
        said = false_alarms(self._drill, self._read())
        healthy = codes == [0] * len(codes) and not said
        self._result.conclude([] if healthy else [f"exit codes {codes}, reported {said}"])


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    from lockstep.runtime.local_cluster.cluster import ReservedPort

    port = ReservedPort()
    try:
        yield int(port.address.rpartition(":")[2])
    finally:
        port.close()
