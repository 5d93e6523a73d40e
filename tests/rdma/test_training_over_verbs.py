"""The report's training over a real RDMA device: undisturbed, over a bad wire, with a cut, with a death."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rdma.lab.pair import ENVIRONMENT, Pair
from rdma.training import DROP_RDMA, LARGE, SMALL, counters, digest, rdma_bytes, seconds_until, start

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

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


def test_the_command_lines_of_the_report_train_and_their_tensors_go_by_rdma(pair: Pair) -> None:
    """Generated pictures, as the report has real ones; the printed path and the device's own counters are the proof."""
    for machine in (pair.first, pair.second):
        machine.run(f"{ENVIRONMENT} python3 -c '{MAKE_PICTURES}'", 60).ok()
    before = counters(pair.first), counters(pair.second)
    run = start(pair, "grpc+verbs", SMALL, 10, "--data_dir=/data/imagenet_data/", folder="/data/imagenet_train/")
    server, chief, other = run.wait_well(400)
    for said in (chief, other):
        assert "to ps 0: RDMA (verbs, reliable connection) by rxe0:1 to 12.12.12.43" in said
    assert "10\timages/sec" in chief
    # Each worker sends every gradient and gets every parameter in each step; worker 0's cross the wire.
    for machine, earlier in zip((pair.first, pair.second), before, strict=True):
        assert rdma_bytes(earlier, counters(machine)) > 10 * SMALL_BYTES
    assert server


def test_the_same_bits_as_over_grpc(pair: Pair) -> None:
    digests = {}
    for protocol in ("grpc+verbs", "grpc"):
        start(pair, protocol, SMALL, 6, folder=f"/tmp/{protocol}").wait_well(300)
        digests[protocol] = digest(pair.second, f"/tmp/{protocol}")
    assert digests["grpc+verbs"] == digests["grpc"]


def test_loss_and_corruption_cost_time_and_change_no_bit(pair: Pair) -> None:
    start(pair, "grpc+verbs", SMALL, 12, folder="/tmp/clean").wait_well(300)
    before = counters(pair.first), counters(pair.second)
    for machine in (pair.first, pair.second):
        machine.run(BAD_WIRE, 20).ok()
    start(pair, "grpc+verbs", SMALL, 12, folder="/tmp/bad").wait_well(400)
    again = sum(
        counters(machine)[name] - earlier[name]
        for machine, earlier in zip((pair.first, pair.second), before, strict=True)
        for name in ("completer_retry_err", "rcvd_seq_err", "out_of_seq_request", "duplicate_request")
    )
    assert again > 0, "the bad wire disturbed nothing: the test shows nothing"
    assert digest(pair.second, "/tmp/bad") == digest(pair.second, "/tmp/clean")


def test_a_cut_is_named_and_the_job_goes_on_when_it_is_mended(pair: Pair, report: Callable[[str], None]) -> None:
    """Only RDMA is cut. gRPC still works, so that nothing but our own deadline on what moves can tell."""
    run = start(pair, "grpc+verbs", LARGE, 12, "--stall_after=120", folder="/tmp/cut")
    run.wait_for_step(3)
    cut = time.monotonic()
    pair.first.run(DROP_RDMA, 20).ok()
    named = seconds_until(run.server, r"nothing passes between them by RDMA", cut, 30)
    pair.first.run(MEND, 20).ok()
    run.wait_well(400)
    start(pair, "grpc+verbs", LARGE, 12, folder="/tmp/whole").wait_well(400)
    assert digest(pair.second, "/tmp/cut") == digest(pair.second, "/tmp/whole")
    report(f"the cut was named after {named:.1f} s")
    assert named < WORST_SECONDS


def test_a_worker_killed_in_the_middle_of_a_write_is_named(pair: Pair, report: Callable[[str], None]) -> None:
    pair.second.run(SLOW_WIRE, 20).ok()  # 17 MB take seconds now, so that a write is under way at any moment
    run = start(pair, "grpc+verbs", LARGE, 50)
    run.wait_for_step(1, 300)
    killed = time.monotonic()
    pair.second.run("pkill -KILL -f 'lockstep_task=.*job_name=worker'", 20).ok()
    named = seconds_until(run.server, r"killed by SIGKILL", killed, 60)
    ends = run.wait(120)
    assert all(done.code != 0 for done in ends)
    report(f"the killed worker was named after {named:.1f} s")
    assert named < WORST_SECONDS
