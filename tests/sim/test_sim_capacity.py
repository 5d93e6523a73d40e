"""The time of a step: it agrees with what can be computed by hand, and grows the way it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.capacity import PARTS, CapacityCase, enough, growth_cases, measure, server_cases
from lockstep.sim.nic import Queue, adapters

MIB = 1 << 20
EIGHT = tuple(ParameterEntry(f"p{i}", MIB // 4, "float32", 0) for i in range(8))
PLAIN = CapacityCase(
    workers=4,
    servers=2,
    parameters=EIGHT,
    steps=3,
    bucket_bytes=MIB,
    bandwidth=100 * MIB,
    latency=0.0,
    compute=0.03,
    jitter=0.0,
    store_bandwidth=1e15,
    loop_seconds=0.0,
)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    measured = measure(replace(PLAIN, jitter=0.3, store_bandwidth=1e9, loop_seconds=1e-4, latency=1e-3))
    assert sum(measured.parts.values()) == pytest.approx(measured.step)
    assert all(measured.parts[name] >= 0 for name in PARTS)


def test_a_step_that_is_all_network_takes_the_bytes_of_the_busiest_adapter() -> None:
    """One server takes four gradients of 8 MiB and gives four copies back, at 100 MiB/s: 0.32 s each way."""
    measured = measure(replace(PLAIN, servers=1, compute=1e-6))
    # The first buckets go back while the last ones come in, so both ways overlap in part.
    assert 0.32 <= measured.step <= 0.64 + 0.02
    assert measured.busy["server adapter in"].most * measured.step == pytest.approx(0.32, rel=0.15)
    assert measured.busy["server adapter out"].most * measured.step == pytest.approx(0.32, rel=0.15)


def test_one_bucket_of_each_worker_goes_out_one_after_the_other() -> None:
    """Four copies of 1 MiB leave in 40 ms; the gradients of the first three workers come in meanwhile, one after."""
    one = PLAIN.parameters[:1]
    measured = measure(replace(PLAIN, servers=1, parameters=one, compute=1e-6))
    assert measured.parts["parameters"] == pytest.approx(0.04, rel=0.01)
    assert measured.parts["gradients"] == pytest.approx(0.01, rel=0.01)
    assert measured.step == pytest.approx(0.05, rel=0.01)


def test_where_computation_is_long_the_network_hides_behind_it() -> None:
    measured = measure(replace(PLAIN, compute=3.0))
    assert measured.efficiency > 0.95
    assert measured.parts["gradients"] < 0.1


def test_the_slowest_worker_holds_everybody_up() -> None:
    measured = measure(replace(PLAIN, workers=16, compute=1.0, jitter=0.5, bandwidth=1e12))
    assert 0.1 < measured.parts["stragglers"] < 0.5


def test_the_store_and_the_loop_of_a_server_take_time_too() -> None:
    slow = measure(replace(PLAIN, store_bandwidth=50 * MIB))
    assert slow.bottleneck == "server update"
    assert slow.parts["update"] > measure(PLAIN).parts["update"]
    busy = measure(replace(PLAIN, loop_seconds=0.01))
    assert busy.bottleneck == "server loop"


def test_a_step_grows_with_workers_and_shrinks_with_servers_and_bandwidth() -> None:
    grown = {name: [measure(case).step for case in cases] for name, cases in growth_cases(PLAIN).items()}
    assert grown["workers"] == sorted(grown["workers"])
    assert grown["workers"][-1] > grown["workers"][0]
    assert grown["servers"] == sorted(grown["servers"], reverse=True)
    assert grown["bandwidth"] == sorted(grown["bandwidth"], reverse=True)
    assert grown["bandwidth"][0] > 1.5 * grown["bandwidth"][-1]


def test_the_fewest_servers_that_are_enough_are_found() -> None:
    rows = [measure(case) for case in server_cases(PLAIN, 8)]
    assert [row.case.servers for row in rows] == [1, 2, 3, 4, 6, 8]
    chosen = enough(rows, 0.9)
    assert chosen is not None
    best = min(row.step for row in rows)
    assert best / chosen.step >= 0.9
    fewer = [row for row in rows if row.case.servers < chosen.case.servers]
    assert all(best / row.step < 0.9 for row in fewer)
    assert enough([], 0.9) is None


def test_a_shared_host_shares_its_adapter_and_needs_none_within() -> None:
    shared = adapters(ClusterShape(2, 3), shared=True)
    assert shared[server(1)] is shared[worker(1)]
    assert shared[worker(2)] is not shared[worker(1)]
    alone = replace(PLAIN, workers=1, servers=1, compute=1e-6)
    assert measure(replace(alone, shared_hosts=True)).step < measure(alone).step / 10


def test_an_adapter_takes_one_thing_after_the_other() -> None:
    queue = Queue()
    assert queue.take(1.0, 2.0) == 1.0
    assert queue.take(1.5, 1.0) == 3.0
    assert queue.take(9.0, 1.0) == 9.0
    assert queue.busy == 4.0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_thousand_workers_and_32_servers_end_well() -> None:
    parameters = tuple(ParameterEntry(f"p{i}", MIB // 4, "float32", 0) for i in range(64))
    measured = measure(replace(PLAIN, workers=1000, servers=32, parameters=parameters, steps=5, bandwidth=3e9))
    assert measured.step > 0
