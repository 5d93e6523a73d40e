"""Workers without servers: a collective that stands still names the worker, the tensor and the step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.runs import BASE, run
from helpers.ports import free_ports
from helpers.programs import Program, run_lockstep, start_lockstep
from helpers.waiting import wait_until
from lockstep.benchmark.training.collective import pack
from lockstep.diagnose.collect import look_at
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.keys import TensorKey, all_reduce_name
from lockstep.runtime.processes import become_subreaper
from lockstep.training.bucket_size import BUCKET_BYTES

pytestmark = [pytest.mark.timed, pytest.mark.timeout(180)]
MODE = "--variable_update=collective_all_reduce"
SECONDS = 60


class Workers:
    """Workers that train for ever, each a real command."""

    def __init__(self, count: int, *flags: str, environment: dict[str, str] | None = None) -> None:
        *ports, meeting = free_ports(count + 1)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        common = (
            *BASE,
            MODE,
            "--job_name=worker",
            f"--worker_hosts={','.join(self.addresses)}",
            f"--collective_port={meeting}",
            "--num_batches=1000000",
            "--num_threads=1",
            *flags,
        )
        self.programs: list[Program] = [
            start_lockstep("bench", *common, f"--task_index={index}", environment=environment) for index in range(count)
        ]

    def step(self, index: int) -> int:
        view = look_at(str(worker(index)), self.addresses[index], 2.0).view
        return -1 if view is None else view.step

    def reach(self, step: int, index: int = 0) -> None:
        wait_until(lambda: self.step(index) >= step, SECONDS, f"worker {index} reaches step {step}")

    def signal(self, index: int, signum: int) -> None:
        monitor = look_at(str(worker(index)), self.addresses[index], 2.0).monitor
        assert monitor is not None
        os.kill(monitor.pid, signum)

    def why(self, index: int) -> dict[str, Any]:
        done = run_lockstep("why", self.addresses[index], "--json", timeout=30)
        fields: dict[str, Any] = json.loads(done.stdout)
        return fields

    def verdict(self, index: int, cause: str) -> dict[str, Any]:
        """What ``why`` says, once it has proof of this cause."""

        def found() -> dict[str, Any] | None:
            verdict: dict[str, Any] | None = self.why(index)["verdict"]
            return verdict if verdict is not None and verdict["cause"] == cause else None

        verdict = wait_until(found, SECONDS, f"why says {cause}")
        assert verdict is not None
        return verdict


def parameters_in(tensor: str) -> list[str]:
    """The parameters that travel as ``allreduce/bucket_N``."""
    for number, bucket in enumerate(pack(run(steps=1).job.trained, BUCKET_BYTES, 0)):
        if tensor == all_reduce_name(number):
            return [one.name for one in bucket]
    return []


@contextlib.contextmanager
def workers(count: int, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Workers]:
    become_subreaper()
    with contextlib.ExitStack() as closing:
        started = Workers(count, *flags, environment=environment)
        for program in started.programs:
            closing.enter_context(program)
        yield started


@pytest.mark.slow
def test_a_frozen_worker_is_named_with_the_tensor_and_goes_on_and_a_killed_one_ends_the_job(tmp_path: Path) -> None:
    with workers(3, f"--train_dir={tmp_path}") as cluster:
        cluster.reach(20)
        assert cluster.why(1)["healthy"] is True
        cluster.signal(2, signal.SIGSTOP)
        told = cluster.programs[0].wait_for("is waiting for worker 2's part of the sum of", SECONDS)
        assert "s so far)" in told
        verdict = cluster.verdict(1, "frozen")
        assert verdict["culprit"] == str(worker(2))
        key = TensorKey.parse(verdict["key"])
        assert key.source == worker(2)
        # It may stop in the middle of a step: the first buckets of that one are summed, and one of the rest is missing.
        assert verdict["names"]
        assert set(verdict["names"]) <= set(parameters_in(key.name))
        stood = cluster.step(0)
        cluster.signal(2, signal.SIGCONT)
        cluster.reach(stood + 5)
        # The death of worker 1 closes its sockets: torch.distributed fails at once, and the monitor knows why.
        cluster.signal(1, signal.SIGKILL)
        ends = [cluster.programs[index].wait(SECONDS) for index in (0, 2)]
        for end in ends:
            assert end.code == 3, end.stderr
            assert "orker 1 was killed by SIGKILL" in end.stderr
            assert "Traceback" not in end.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["verdict"]["culprit"] == str(worker(1))


@pytest.mark.slow
@pytest.mark.long
def test_a_frozen_chief_which_keeps_the_store_is_named_too_and_the_stall_ends_the_others() -> None:
    with workers(2, "--stall_after=8") as cluster:
        cluster.reach(20)
        cluster.signal(0, signal.SIGSTOP)
        end = cluster.programs[1].wait(SECONDS)
        assert end.code == 3
        assert "Worker 0 (pid " in end.stderr
        assert "allreduce/bucket_" in end.stderr


STUCK = """\
import os, threading, torch

class Sticks(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, classes)
        self.calls = 0
    def forward(self, images):
        self.calls += 1
        if self.calls == 25 and os.environ.get("STICKS_AT") == os.environ["WHO"]:
            threading.Event().wait()
        return self.layer(images.flatten(1))

def make(num_classes):
    return Sticks(num_classes)
make.image_size = 8
make.input_channels = 3
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_sticks_in_its_own_code_is_named_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "sticking.py").write_text(STUCK)
    become_subreaper()
    *ports, meeting = free_ports(3)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    common = ["--device=cpu", "--model=sticking:make", "--batch_size=4", "--num_batches=100000", "--job_name=worker"]
    common += (MODE, f"--worker_hosts={','.join(hosts)}", f"--collective_port={meeting}", "--user_code_timeout=8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with contextlib.ExitStack() as closing:
        programs = []
        for index in range(2):
            environment = {"PYTHONPATH": path, "STICKS_AT": "1", "WHO": str(index)}
            program = start_lockstep("bench", *common, f"--task_index={index}", environment=environment)
            programs.append(closing.enter_context(program))
        end = programs[0].wait(SECONDS)
        assert end.code == 3, end.stderr
        assert "he training thread of worker 1 is stuck in user code" in end.stderr
        assert "allreduce/bucket_0" in end.stderr
        assert "layer.weight" in end.stderr
        assert "forward (sticking.py" in end.stderr


@pytest.mark.slow
def test_workers_with_different_settings_do_not_start(tmp_path: Path) -> None:
    become_subreaper()
    *ports, meeting = free_ports(3)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    common = (*BASE, MODE, f"--worker_hosts={','.join(hosts)}", f"--collective_port={meeting}", "--job_name=worker")
    with (
        start_lockstep("bench", *common, "--task_index=0", "--startup_timeout=20") as first,
        start_lockstep("bench", *common, "--task_index=1", "--optimizer=adam") as second,
    ):
        end = second.wait(SECONDS)
        assert end.code == 3  # as with servers
        assert "Worker 1 has optimizer=adam" in end.stderr
        assert first.wait(SECONDS).code == 3


@pytest.mark.slow
def test_a_worker_that_never_comes_is_named_every_few_seconds_and_at_the_end() -> None:
    become_subreaper()
    ports = free_ports(3)
    hosts = [f"127.0.0.1:{port}" for port in ports[:2]]
    common = (*BASE, MODE, f"--worker_hosts={','.join(hosts)}", "--job_name=worker", "--startup_timeout=12")
    end = run_lockstep("bench", *common, "--task_index=0", f"--collective_port={ports[2]}", timeout=SECONDS)
    assert end.code == 3  # as with servers: it was found out about another task
    assert f"worker 0 is waiting for worker 1: {hosts[1]} " in end.stderr
    assert "The cluster was not complete after 12 s; missing: worker 1 at" in end.stderr
    assert "nothing listens" in end.stderr


@pytest.mark.slow
def test_a_process_alone_that_sticks_in_a_replica_says_so_and_leaves_files_for_why(tmp_path: Path) -> None:
    (tmp_path / "sticking.py").write_text(STUCK)
    become_subreaper()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = ("--device=cpu", "--model=sticking:make", "--batch_size=4", "--num_batches=100000", "--num_gpus=2")
    run = tmp_path / "run"
    environment = {"PYTHONPATH": path, "STICKS_AT": "0", "WHO": "0"}
    command = ("bench", *flags, "--variable_update=replicated", f"--train_dir={run}")
    with start_lockstep(*command, environment=environment) as program:
        said = program.wait_for("is stuck in user code", SECONDS)
        assert "step 24, at forward (sticking.py:11)" in said
        program.signal(signal.SIGUSR1)
        wait_until(lambda: (run / "worker-0.snapshot.json").exists(), SECONDS, "the dump")
        done = run_lockstep("why", str(run), "--json", timeout=30)
        verdict = json.loads(done.stdout)["verdict"]
        assert verdict["cause"] == "stuck in user code"
        assert any("sticking.py" in line for line in verdict["stack"])
        assert "replica 1" in done.stdout  # the others' backward runs before that of replica 0
