"""The report's training over a real RDMA device: undisturbed, over a bad wire, with a cut, with a death."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rdma.lab.pair import ENVIRONMENT, Pair
from rdma.training import DROP_RDMA, LARGE, SMALL, Training, counters, digest, rdma_bytes, seconds_until, start

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]

BATCHES = 20

MAKE_PICTURES = """
import os, pickle, numpy
os.makedirs("/data/imagenet_data", exist_ok=True)
generator = numpy.random.default_rng(0)
for name in [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]:
    pixels = generator.integers(0, 256, (40, 3072), dtype=numpy.uint8)
    labels = [int(label) for label in generator.integers(0, 10, 40)]
    with open(f"/data/imagenet_data/{name}", "wb") as file:
        pickle.dump({b"data": pixels, b"labels": labels}, file)
"""
SMALL_BYTES = 4 * 56_000
"""Parameters of the small model."""

MEND = "tc qdisc del dev eth0 clsact"
WORST_SECONDS = 10.0
"""What a verdict may take at worst; nine of ten take less than 5 s (the report of the tests shows how long each took).
These hosts are emulated, on whatever this machine has left."""

BAD_WIRE = "tc qdisc add dev eth0 root netem loss 1% corrupt 1%"
SLOW_WIRE = "tc qdisc add dev eth0 root netem rate 60mbit"


def repeated(counted: list[dict[str, int]]) -> int:
    """How often packets were missing, or came again."""
    names = ("completer_retry_err", "rcvd_seq_err", "out_of_seq_request", "duplicate_request")
    return sum(one[name] for one in counted for name in names)


def begin(pair: Pair, protocol: str, folder: str) -> Training:
    """The report's training, on generated pictures, since the report has real ones."""
    for machine in (pair.first, pair.second):
        machine.run(f"{ENVIRONMENT} python3 -c '{MAKE_PICTURES}'", 120).ok()
    more = "--data_dir=/data/imagenet_data/ --stall_after=300"
    return start(pair, protocol, SMALL, BATCHES, more, folder=folder)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> tuple[list[str], list[int], str]:
    """What the three tasks of an undisturbed run said, how many bytes each host sent by RDMA, and what was learnt."""
    hosts = (pair.first, pair.second)
    before = [counters(machine) for machine in hosts]
    said = begin(pair, "grpc+verbs", "/data/imagenet_train/").wait_well(900)
    moved = [rdma_bytes(earlier, counters(machine)) for machine, earlier in zip(hosts, before, strict=True)]
    return said, moved, digest(pair.second, "/data/imagenet_train")


def test_the_command_lines_of_the_report_train_and_their_tensors_go_by_rdma(
    undisturbed: tuple[list[str], list[int], str], report: Callable[[str], None]
) -> None:
    """The printed path and the device's own counters are the proof."""
    (_, chief, other), moved, _ = undisturbed
    for said in (chief, other):
        assert "to ps 0: RDMA (verbs, reliable connection) by rxe0:1 to 12.12.12.43" in said
    assert f"{BATCHES}\timages/sec" in chief
    report(f"{moved[0] / 1e6:.1f} and {moved[1] / 1e6:.1f} MB left the two hosts by RDMA in {BATCHES} steps")
    # Worker 0 sends every gradient across the wire and gets every parameter, in each step.
    assert min(moved) > BATCHES * SMALL_BYTES


def test_the_same_bits_as_over_grpc(pair: Pair, undisturbed: tuple[list[str], list[int], str]) -> None:
    begin(pair, "grpc", "/tmp/grpc").wait_well(900)
    assert digest(pair.second, "/tmp/grpc") == undisturbed[2]


def test_loss_corruption_and_a_cut_cost_time_and_change_no_bit(
    pair: Pair, undisturbed: tuple[list[str], list[int], str], report: Callable[[str], None]
) -> None:
    """Only RDMA is cut. gRPC still works, so that nothing but our own deadline on what moves can tell."""
    hosts = (pair.first, pair.second)
    before = [counters(machine) for machine in hosts]
    for machine in hosts:
        machine.run(BAD_WIRE, 20).ok()
    run = begin(pair, "grpc+verbs", "/tmp/bad")
    run.wait_for_step(BATCHES // 2, 900)
    cut = time.monotonic()
    pair.first.run(DROP_RDMA, 20).ok()
    named = seconds_until(run.server, r"nothing passes between them by RDMA", cut, 60)
    pair.first.run(MEND, 20).ok()
    run.wait_well(900)
    report(f"a cut of RDMA was named after {named:.1f} s, and the job went on when it was mended")
    again = repeated([counters(machine) for machine in hosts]) - repeated(before)
    assert again > 0, "the bad wire disturbed nothing: the test shows nothing"
    assert digest(pair.second, "/tmp/bad") == undisturbed[2]
    assert named < WORST_SECONDS


def test_a_worker_killed_in_the_middle_of_a_write_is_named(pair: Pair, report: Callable[[str], None]) -> None:
    pair.second.run(SLOW_WIRE, 20).ok()  # 17 MB take seconds now, so that a write is under way at any moment
    run = start(pair, "grpc+verbs", LARGE, 50)
    run.wait_for_step(1, 900)
    killed = time.monotonic()
    pair.second.run("pkill -KILL -f 'lockstep_task=.*job_name=worker'", 20).ok()
    named = seconds_until(run.server, r"killed by SIGKILL", killed, 60)
    ends = run.wait(300)
    assert all(done.code != 0 for done in ends)
    report(f"a worker killed in the middle of a write was named after {named:.1f} s")
    assert named < WORST_SECONDS
