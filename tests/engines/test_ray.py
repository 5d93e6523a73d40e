"""Ray for real: a cluster of three nodes on this machine, a submitted job, a killed actor, a server, a node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engines.trainings import digests
from helpers.programs import Finished, Program
from lockstep.runtime.processes import descendants

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
STEPS = "--steps=60"
SLOWLY = (STEPS, "--pace=0.3")
PATIENCE = 300.0
DRIVER = "trains_on_ray.py"


@dataclass(frozen=True)
class RayCluster:
    """Where it is, and which process is its head's."""

    address: str
    jobs: str
    head: int

    @contextlib.contextmanager
    def driver(self, *words: str) -> Iterator[Program]:
        with Program(
            (sys.executable, str(HERE / DRIVER), *words), {**VARIABLES, "RAY_ADDRESS": self.address}
        ) as program:
            yield program

    @contextlib.contextmanager
    def submitted(self, *words: str) -> Iterator[Program]:
        submit = (sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--working-dir={HERE}", "--")
        variables = {**VARIABLES, "RAY_ADDRESS": f"http://{self.jobs}"}
        with Program((*submit, sys.executable, DRIVER, *words), variables) as program:
            yield program


PATHS = os.pathsep.join(str(folder) for folder in (HERE.parents[1] / "src", HERE.parent))
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with Program((sys.executable, str(HERE / "ray_cluster.py")), VARIABLES) as program:
        program.wait_for("cluster ", PATIENCE)
        found = re.search(r"cluster (\S+) jobs (\S+) raylet (\d+)\n", program.stdout())
        assert found is not None
        yield RayCluster(found[1], found[2], int(found[3]))
        program.signal(signal.SIGTERM)  # or it leaves its address behind, where the next ray.init() looks for a cluster
        program.wait(PATIENCE)


@pytest.fixture(scope="module")
def undisturbed(cluster: RayCluster) -> set[str]:
    """Of a driver that people start themselves."""
    with cluster.driver(STEPS) as program:
        return trained(program)


def test_a_submitted_job_trains(cluster: RayCluster, undisturbed: set[str]) -> None:
    with cluster.submitted(STEPS) as program:
        assert trained(program) == undisturbed


def trained(program: Program) -> set[str]:
    """The bits that a driver's job ended with; its logs and results have reached the driver."""
    done = program.wait(PATIENCE)
    assert done.code == 0, done
    assert "['done', 'done']" in done.stdout, done
    return digests(printed(done))


def printed(done: Finished) -> str:
    return done.stdout + done.stderr


def actor_of(task: str, program: Program) -> int:
    """Ray writes it before every line of that task."""
    return int(re.findall(rf"\({task} pid=(\d+)", program.stdout() + program.stderr())[-1])


def test_a_killed_actor_comes_back_to_the_same_bits(cluster: RayCluster, undisturbed: set[str]) -> None:
    with cluster.driver(*SLOWLY) as program:
        program.wait_for("step 10\n", PATIENCE)
        former = actor_of("worker 1", program)
        os.kill(former, signal.SIGKILL)
        assert trained(program) == undisturbed
        assert actor_of("worker 1", program) != former
        assert "has come back as a new incarnation" in program.stderr(), "the others' words reach the driver"


def test_a_killed_server_takes_the_job_back_to_its_checkpoint(
    cluster: RayCluster, undisturbed: set[str], tmp_path: Path
) -> None:
    with cluster.driver(*SLOWLY, f"--train_dir={tmp_path}", "--save_model_steps=5") as program:
        program.wait_for("step 20\n", PATIENCE)
        os.kill(actor_of("ps 0", program), signal.SIGKILL)
        assert trained(program) == undisturbed


def test_a_killed_node_gives_its_task_to_another_one(cluster: RayCluster, undisturbed: set[str]) -> None:
    """The last test: a node is missing from then on."""
    with cluster.driver(*SLOWLY) as program:
        program.wait_for("step 10\n", PATIENCE)
        nodes = {task: psutil.Process(actor_of(task, program)).ppid() for task in ("worker 0", "worker 1")}
        task, node = next((task, node) for task, node in nodes.items() if node != cluster.head)
        former = actor_of(task, program)
        below = descendants(node)
        os.kill(node, signal.SIGKILL)
        try:
            assert trained(program) == undisturbed
            assert actor_of(task, program) != former
        finally:
            # Ray's own processes end with their node only where process 1 becomes their parent.
            for facts in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(facts.pid, signal.SIGKILL)
