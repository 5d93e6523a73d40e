"""TCP after a pause: what it holds up, and what that does to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.capacity import CapacityCase, measure
from lockstep.sim.slow_start import FIRST_BYTES, TIMEOUT_SECONDS, SendWindow

RATE, ROUND_TRIP = 1e8, 0.02


def test_little_data_is_not_held_up() -> None:
    begins, ends = SendWindow(RATE, ROUND_TRIP).send(1.0, FIRST_BYTES)
    assert begins == 1.0
    assert ends == pytest.approx(1.0 + FIRST_BYTES / RATE)


def test_every_round_trip_doubles_what_is_on_its_way_until_the_network_is_full() -> None:
    nbytes, rounds, window = 10_000_000, 0.0, float(FIRST_BYTES)
    while window < RATE * ROUND_TRIP:
        rounds += ROUND_TRIP - window / RATE
        window *= 2
    _, ends = SendWindow(RATE, ROUND_TRIP).send(0.0, nbytes)
    assert ends == pytest.approx(nbytes / RATE + rounds)


def test_what_follows_at_once_is_not_held_up_again_and_what_follows_a_pause_is() -> None:
    window = SendWindow(RATE, ROUND_TRIP)
    _, first = window.send(0.0, 10_000_000)
    begins, second = window.send(0.0, 10_000_000)
    assert begins == first  # one connection sends one thing after the other
    assert second - first == pytest.approx(0.1)
    begins, third = window.send(second + 3.5 * (TIMEOUT_SECONDS + ROUND_TRIP), 10_000_000)
    assert 0.1 < third - begins < first  # three timeouts, an eighth of what it had on its way
    begins, fourth = window.send(third + 60.0, 10_000_000)
    assert fourth - begins == pytest.approx(first)  # as in the beginning


@pytest.mark.parametrize(("mebibytes", "at_first", "after"), [(1, 0.151, 0.064), (4, 0.194, 0.067), (16, 0.302, 0.172)])
def test_it_is_what_a_kernel_does(mebibytes: int, at_first: float, after: float) -> None:
    """Measured between two hosts of ``bench/slow_hosts.py``: 1 Gbit/s, 10 ms one way, pauses of 0.6 s, reno."""
    window, nbytes = SendWindow(1e9 / 8 * 1448 / 1538, 0.02), mebibytes << 20
    _, ends = window.send(0.0, nbytes)
    assert ends + 0.02 == pytest.approx(at_first, rel=0.1)
    begins, ends = window.send(ends + 0.02 + 0.6, nbytes)
    assert ends - begins + 0.02 == pytest.approx(after, rel=0.1)


def test_without_delay_it_does_not_matter() -> None:
    assert SendWindow(RATE, 0.0).send(0.0, 10_000_000)[1] == pytest.approx(0.1)


def test_a_step_over_a_long_way_takes_longer_with_it() -> None:
    parameters = tuple(ParameterEntry(f"p{i}", 1 << 20, "float32", 0) for i in range(4))
    near = CapacityCase(workers=2, servers=1, parameters=parameters, bandwidth=1.2e8, latency=1e-4, compute=3.0)
    far = replace(near, latency=1e-2)
    assert measure(near).step == pytest.approx(measure(replace(near, slow_start=False)).step, rel=0.02)
    assert measure(far).step > measure(replace(far, slow_start=False)).step + 0.03
