"""``lockstep why`` on live clusters, on the files of dead ones, and on what is neither."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from diagnose.faulty import frozen
from helpers.ports import free_ports
from helpers.programs import run_lockstep
from helpers.snapshots import PS0, W0
from helpers.waiting import wait_until
from lockstep.diagnose.collect import look_at
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.processes import become_subreaper


def test_an_address_where_nobody_answers_is_bad_input_with_the_reason() -> None:
    (port,) = free_ports(1)
    finished = run_lockstep("why", f"127.0.0.1:{port}", timeout=20)
    assert finished.code == 2
    assert "refuses connections; nothing listens" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "/no/such/folder"), "is neither an address like HOST:PORT nor a folder"),
        (("why", "--wat"), "has no flag '--wat'"),
        (("why", "a:1", "b:2"), "takes one address or one folder"),
    ],
)
def test_bad_words_give_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    finished = run_lockstep(*words, timeout=20)
    assert finished.code == 2
    assert sentence in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_an_empty_folder_is_bad_input(tmp_path: Path) -> None:
    finished = run_lockstep("why", str(tmp_path), timeout=20)
    assert finished.code == 2
    assert "has no readable report or snapshot" in finished.stderr


def test_the_files_of_a_dead_cluster_are_analysed_and_damage_is_named(tmp_path: Path) -> None:
    cluster = frozen()
    (tmp_path / "ps-0.snapshot.json").write_text(json.dumps(cluster.task(PS0)))
    (tmp_path / "worker-0.snapshot.json").write_text(json.dumps(cluster.task(W0))[:200])
    finished = run_lockstep("why", str(tmp_path), "--json", timeout=20)
    assert finished.code == 3
    fields = json.loads(finished.stdout)
    assert fields["verdict"]["culprit"] == "/job:worker/replica:0/task:1"
    assert fields["problems"][0].startswith("worker-0.snapshot.json is ignored: it is not JSON")
    assert "Traceback" not in finished.stderr


@pytest.mark.timeout(120)
@pytest.mark.timed
def test_a_live_cluster_answers_healthy_and_with_half_of_it_gone_within_two_seconds(tmp_path: Path) -> None:
    """Also with one task frozen and one killed together with its monitor: what is left names them."""
    become_subreaper()
    shape = ClusterShape(2, 2)
    with DrillCluster(shape, tmp_path) as cluster:
        places = {task: cluster.start(cluster.plan(task, steps=100_000, on_stall="report")) for task in shape.tasks()}
        address = cluster.address(worker(0))

        def training() -> bool:
            view = look_at(str(worker(0)), address, 2.0).view
            return view is not None and view.step >= 10

        wait_until(training, 60, "the cluster trains")
        finished = run_lockstep("why", address, timeout=30)
        assert finished.code == 0, finished.stdout + finished.stderr
        assert "Healthy: 4 tasks answer" in finished.stdout
        assert "the slowest part is" in finished.stdout
        os.kill(cluster.task_pid(server(0)), signal.SIGSTOP)
        cluster.kill_monitor(places[worker(1)])
        wait_until(lambda: _stands(address), 30, "a report that names who is missing")
        began = time.monotonic()
        finished = run_lockstep("why", address, "--json", timeout=30)
        fields = json.loads(finished.stdout)
        assert finished.code == 3
        assert fields["verdict"]["culprit"] in (str(server(0)), str(worker(1)))
        assert fields["verdict"]["cause"] in ("frozen", "dead")
        # Two seconds are for a machine that is not busy with other tests; the bound on asking holds everywhere.
        assert time.monotonic() - began < 8.0


def _stands(address: str) -> bool:
    # On a quick machine the first answer comes before any wait is longer than usual: silence alone proves nothing.
    finished = run_lockstep("why", address, "--json", timeout=30)
    return finished.code == 3 and json.loads(finished.stdout)["verdict"] is not None
