"""Programs of one's own whose servers have second homes: any one is killed, and nobody notices it in the result."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.marks import others_long
from helpers.once import lines_once
from helpers.programs import LOCKSTEP, Finished, Program
from helpers.waiting import wait_until
from library.test_join import ONE_THREAD, hosts
from lockstep.transports.control.monitor_client import Unreachable, describe, fetch_metrics, snapshot_fields

PROGRAM = (sys.executable, str(Path(__file__).with_name("lasting_program.py")))
WORK = ("--steps=14", "--clip", "--state")
BUCKETS = "--bucket_mb=0.0009765625"
SECONDS = 110.0
pytestmark = [pytest.mark.timed, pytest.mark.timeout(240), pytest.mark.slow]


class Cluster:
    """Two servers and two workers as processes."""

    def __init__(self, started: ExitStack, *program: str, shared: tuple[str, ...] = (), replicas: bool = True) -> None:
        self._started = started
        self._lists = (*hosts(2, 2), *shared, *(("--server_replicas=1",) if replicas else ()))
        restarts = ("--restarts=3",) if replicas else ()
        self._program = (BUCKETS, *WORK, *program)
        self.addresses = self._lists[0].partition("=")[2].split(",")
        self.servers = [
            self._start((*LOCKSTEP, "ps", *self._lists, f"--task_index={index}", *restarts)) for index in range(2)
        ]
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_worker(self, index: int) -> Program:
        place = ("--job_name=worker", f"--task_index={index}")
        return self._start((*PROGRAM, *self._lists, *place, *self._program))

    def _start(self, command: tuple[str, ...]) -> Program:
        return self._started.enter_context(Program(command, ONE_THREAD))

    def pid(self, index: int) -> int:
        try:
            found = describe(self.addresses[index], 5.0)
        except Unreachable:
            return 0
        return 0 if found.exited else found.pid

    def role(self, index: int) -> dict[str, Any]:
        """What a server says of itself; empty while it does not answer."""
        try:
            machines: Any = snapshot_fields(describe(self.addresses[index], 5.0).task_address, "Task")["machines"]
        except (Unreachable, ValueError, KeyError):
            return {}
        return dict(machines["role"])

    def is_whole(self) -> bool:
        return all(self.role(index).get("whole") for index in range(2))

    def tells_whole(self, index: int) -> Any:
        """What a server tells for the metric of second homes."""
        return json.loads(fetch_metrics(describe(self.addresses[index], 5.0).task_address, 5.0))["replica"]

    def kill(self, index: int) -> None:
        before = self.pid(index)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.pid(index) not in (0, before), 60, f"the next life of server {index}")

    def finish(self) -> list[Finished]:
        return [one.wait(SECONDS) for one in (*self.servers, *self.workers)]


def results(finished: list[Finished]) -> list[str]:
    found = [re.search(r"worker \d of \d: (.*)", one.stdout) for one in finished[2:]]
    return [match[1] if match is not None else "" for match in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    def make() -> list[str]:
        with ExitStack() as started:
            finished = Cluster(started, replicas=False).finish()
        assert [one.code for one in finished] == [0, 0, 0, 0], finished
        assert len(set(results(finished))) == 2
        return results(finished)

    return lines_once(tmp_path_factory, "second-homes", make)


@pytest.mark.parametrize("lost", others_long([0, 1], [0]), ids=["coordinator", "server"])
@pytest.mark.parametrize("protocol", others_long(["auto", "grpc", "grpc+tcp"], ["auto"]))
def test_a_killed_server_costs_no_step_and_comes_back_as_second_home(
    lost: int, protocol: str, undisturbed: list[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with ExitStack() as started:
        cluster = Cluster(started, f"--hold={go}", shared=(f"--server_protocol={protocol}",))
        cluster.workers[0].wait_for("step 3\n", SECONDS)
        assert cluster.tells_whole(1 - lost) is True
        cluster.kill(lost)
        next_life, other = cluster.pid(lost), cluster.servers[1 - lost]
        os.kill(next_life, signal.SIGSTOP)
        other.wait_for("there is no replica", 20)
        assert cluster.tells_whole(1 - lost) is False
        os.kill(next_life, signal.SIGCONT)
        other.wait_for("has a second home again", 60)
        wait_until(lambda: cluster.tells_whole(1 - lost), 10, "the metric")
        wait_until(cluster.is_whole, 30, "a replica of everything")
        assert [cluster.role(index)["made_twice"] for index in range(2)] == [0, 0]
        go.touch()
        finished = cluster.finish()
    assert [one.code for one in finished] == [0, 0, 0, 0], finished
    assert results(finished) == undisturbed
    assert [len(re.findall(r"step \d+\n", one.stdout)) for one in finished[2:]] == [14, 14]


def test_a_worker_and_a_server_are_killed_together(undisturbed: list[str], tmp_path: Path) -> None:
    """The worker comes back to calls, norms and states that the lost coordinator had answered."""
    go, once = tmp_path / "go", tmp_path / "once"
    with ExitStack() as started:
        cluster = Cluster(started, f"--hold={go}", "--die=1:4:late", f"--once={once}")
        assert cluster.workers[1].wait(SECONDS).code == -9
        cluster.kill(0)
        cluster.workers[1] = cluster.start_worker(1)
        wait_until(cluster.is_whole, 90, "a replica of everything")
        go.touch()
        finished = cluster.finish()
    assert [one.code for one in finished] == [0, 0, 0, 0], finished
    assert [re.sub(r", norms.*", "", one) for one in results(finished)] == [
        re.sub(r", norms.*", "", one) for one in undisturbed
    ]
    assert results(finished)[0] == undisturbed[0]


@pytest.mark.parametrize("lost", others_long([0, 1], [0]), ids=["coordinator", "server"])
def test_below_lockstep_run_a_lost_serving_rank_comes_back_as_second_home(
    lost: int, undisturbed: list[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=4")
    program = (*PROGRAM, "--servers=2", "--server_replicas=1", BUCKETS, *WORK, f"--hold={go}")
    with Program((*torchrun, *LOCKSTEP, "run", "--", *program), ONE_THREAD) as launcher:
        said = launcher.wait_for("lockstep why ", SECONDS)
        cluster = snapshot_fields(said.partition("lockstep why ")[2].split()[0], "Monitor")["cluster"]
        assert isinstance(cluster, dict)
        launcher.wait_for("step 3\n", SECONDS)
        os.kill(describe(cluster[f"/job:ps/replica:0/task:{lost}"], 5.0).pid, signal.SIGKILL)
        launcher.wait_for("there is no replica", 30)
        launcher.wait_for("has a second home again", 90)
        go.touch()
        done = launcher.wait(SECONDS)
    assert done.code == 0, done
    assert sorted(re.findall(r"worker \d of \d: (.*)", done.stdout)) == sorted(undisturbed)
    assert f"restarting /job:ps/replica:0/task:{lost} (1 of 3 restarts)" in done.stderr
