"""Each mode gives, after five steps, the values of a formula written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmark.runs import BASE, by_hand, largest_difference, run
from helpers.programs import run_lockstep
from lockstep.benchmark.training.collective import pack
from lockstep.training.worker.replica import Trained

RATE = "--init_learning_rate=0.05"
pytestmark = pytest.mark.timeout(120)
CLOSE = 2e-6


def test_devices_of_one_worker_average_their_gradients() -> None:
    ran = run(RATE, "--num_gpus=3", steps=5)
    # One worker with three devices takes batches of 12, which its devices share.
    assert largest_difference(ran.parameters(), by_hand(5, batch=12)) < CLOSE


def test_replicated_copies_stay_the_same_and_average() -> None:
    ran = run(RATE, "--num_gpus=2", "--variable_update=replicated", steps=5)
    assert largest_difference(ran.parameters(), by_hand(5, batch=8)) < CLOSE
    ran.job.towers.take_values()
    assert largest_difference(ran.parameters(0), ran.parameters(1)) == 0


def test_relaxed_consistency_applies_gradients_one_step_late() -> None:
    ran = run(RATE, "--variable_update=replicated", "--variable_consistency=relaxed", steps=5)
    assert largest_difference(ran.parameters(), by_hand(5, late=True)) < CLOSE
    assert largest_difference(ran.parameters(), by_hand(5)) > 1e-4


def test_independent_devices_share_nothing() -> None:
    ran = run(RATE, "--num_gpus=2", "--variable_update=independent", steps=1)
    assert largest_difference(ran.parameters(0), ran.parameters(1)) > 1e-5


def _final(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "final.safetensors")


SHAPES = {"1x1": (1, 1), "2x2": (2, 2), "3x1": (3, 1), "1x3": (1, 3)}  # workers x servers
CLUSTERS = {
    **{
        f"{mode}, {count} workers": (f"--workers={count}", f"--variable_update={mode}")
        for mode in ("collective_all_reduce", "distributed_all_reduce")
        for count in (1, 2, 3)
    },
    **{
        f"{mode}, {shape}": (f"--workers={workers}", f"--ps={servers}", f"--variable_update={mode}")
        for mode in ("parameter_server", "distributed_replicated")
        for shape, (workers, servers) in SHAPES.items()
    },
    # With one worker nobody can be late, so the formula holds without synchronisation too.
    "parameter_server without synchronisation, 1x3": ("--workers=1", "--ps=3", "--nocross_replica_sync"),
}


FIRST = ("distributed_all_reduce, 3 workers", "parameter_server, 2x2", "distributed_replicated, 3x1")
"""``collective_all_reduce`` is in ``test_a_collective_travels_in_as_many_pieces_as_asked``."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [pytest.param(CLUSTERS[name], marks=[] if name in FIRST else [pytest.mark.long], id=name) for name in CLUSTERS],
)
def test_a_cluster_has_the_values_of_the_formula(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = run_lockstep(
        "bench", *BASE, RATE, *flags, "--num_batches=5", f"--train_dir={tmp_path}", "--num_threads=1", timeout=110
    )
    assert done.code == 0, done.stderr
    lanes = int(flags[0].removeprefix("--workers="))
    assert largest_difference(_final(tmp_path), by_hand(5, lanes=lanes)) < CLOSE


@pytest.mark.slow
def test_a_relaxed_collective_is_one_step_late(tmp_path: Path) -> None:
    flags = ("--workers=2", "--variable_update=collective_all_reduce", "--variable_consistency=relaxed")
    done = run_lockstep(
        "bench", *BASE, RATE, *flags, "--num_batches=5", f"--train_dir={tmp_path}", "--num_threads=1", timeout=110
    )
    assert done.code == 0, done.stderr
    assert largest_difference(_final(tmp_path), by_hand(5, lanes=2, late=True)) < CLOSE


def test_gradients_are_packed_into_as_many_pieces_as_asked() -> None:
    trained = run(steps=1).job.trained

    def sizes(bucket_bytes: int, packs: int) -> list[int]:
        packed = pack(trained, bucket_bytes, packs)
        flat: list[Trained] = [one for bucket in packed for one in bucket]
        assert flat == list(reversed(trained))
        return [len(bucket) for bucket in packed]

    assert len(sizes(1, 0)) == len(trained)
    assert sizes(1 << 30, 0) == [len(trained)]
    assert len(sizes(1 << 30, 2)) == 2


@pytest.mark.slow
def test_a_collective_travels_in_as_many_pieces_as_asked(tmp_path: Path) -> None:
    flags = (
        "--workers=2",
        "--variable_update=collective_all_reduce",
        "--gradient_repacking=2",
        "--all_reduce_spec=gloo",
    )
    files = (f"--train_dir={tmp_path}", f"--graph_file={tmp_path}/plan.json")
    done = run_lockstep("bench", *BASE, RATE, *flags, *files, "--all_reduce_spec=gloo", "--num_batches=5", timeout=110)
    assert done.code == 0, done.stderr
    assert "AllReduce:   gloo" in done.stdout
    assert len(json.loads((tmp_path / "plan.json").read_text())["buckets"]) == 2
    assert largest_difference(_final(tmp_path), by_hand(5, lanes=2)) < CLOSE


@pytest.mark.slow
def test_a_cluster_tells_its_times_and_its_buckets(tmp_path: Path) -> None:
    flags = ("--ps=1", "--workers=2", "--bucket_mb=0.01", "--verbose", f"--timing_dir={tmp_path}/times")
    done = run_lockstep(
        *("bench", *BASE, RATE, *flags, f"--graph_file={tmp_path}/plan.json", "--num_batches=5", "--num_threads=1"),
        timeout=110,
    )
    assert done.code == 0, done.stderr
    assert {path.name for path in (tmp_path / "times").iterdir()} == {"ps-0.json", "worker-0.json", "worker-1.json"}
    assert "a step of worker 0: computing" in done.stdout + done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert max(bucket["bytes"] for bucket in plan["buckets"]) <= 10500  # 0.01 MiB
    assert len(plan["buckets"]) > 100
