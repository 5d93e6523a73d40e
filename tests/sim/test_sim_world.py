"""The simulator itself: it repeats runs exactly, reaches every row of the tables, and grows to larger clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lockstep.protocol import member
from lockstep.protocol.coordinator import coordinator_machine, running_job
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.ids import server as server_id
from lockstep.protocol.core.ids import worker as worker_id
from lockstep.protocol.core.machine import State, Trigger, advance
from lockstep.protocol.core.messages import ParameterEntry, Setting
from lockstep.protocol.server import ledger
from lockstep.protocol.server.ledger import ServedBucketTrigger
from lockstep.protocol.worker import holdings
from lockstep.protocol.worker.holdings import HeldBucketTrigger
from lockstep.sim.network import linked_pairs
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.violation import Violation
from lockstep.sim.world import RunResult, World

BAD = NetworkProfile(
    late_chance=0.05,
    in_order=False,
    duplicate_chance=0.2,
    reset_chance=0.02,
    transfer_failure_chance=0.03,
    quiet_after=60.0,
)
RICH = TrainingProfile(absent_chance=0.1, edit_chance=0.4, withdraw_chance=0.2, rates_at_seal=True)
SLOW = replace(RICH, backward=SecondsRange(0.0, 3.0))

TOLD_TWICE = {
    ("lockstep.protocol.member", "joining", "the coordinator can be reached"),
    ("lockstep.protocol.member", "outside", "the coordinator cannot be reached"),
}
"""Rows for a link of which a task is told twice; the runtime does not do that, and neither does the simulator."""


def run(seed: int, **changes: object) -> RunResult:
    scenario = Scenario(seed=seed, servers=2, workers=2, network=BAD, training=RICH)
    return World(replace(scenario, **changes)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", Mode)
def test_a_seed_repeats_a_run_exactly_and_another_seed_does_not(mode: Mode) -> None:
    first, again, other = run(1, mode=mode), run(1, mode=mode), run(2, mode=mode)
    assert first == again
    assert first.events != other.events


@pytest.mark.parametrize("network", [BAD, replace(BAD, lent_in_place=True)], ids=["copied", "lent in place"])
def test_buckets_may_follow_the_seal_of_their_step(network: NetworkProfile) -> None:
    early = replace(RICH, seals_early=True, void_chance=0.1, backward=SecondsRange(0.0, 1.0))
    for seed in range(20):
        assert run(seed, mode=Mode.SEALED, training=early, network=network, workers=3).ok


def test_every_row_of_every_table_is_walked_by_some_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no run ever needs is a rule without a reason; a state that is missing shows as a violation."""
    walked: set[tuple[str, str, str]] = set()

    def watching(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
        walked.add((type(state).__module__, state.value, trigger.value))
        return advance(table, state, trigger)

    for module in (holdings, ledger, coordinator_machine, running_job, member):
        monkeypatch.setattr(module, "advance", watching)
    for seed in range(20):
        run(seed, mode=Mode.SEALED if seed % 2 else Mode.EAGER, training=SLOW if seed < 10 else RICH)
        run(seed, mode=Mode.SEALED, workers=3, aggregate=1 + seed % 2, training=SLOW)
    odd = ((worker_id(1), Setting("optimizer", "adam")),)
    run(0, odd_settings=odd)
    absent = run(0, absentees=(server_id(0),), startup_timeout=5.0)
    assert not absent.ok
    rows = {
        (table_of.__name__, state.value, trigger.value)
        for table_of, table in (
            (holdings, holdings.HELD_BUCKET_TRANSITIONS),
            (ledger, ledger.SERVED_BUCKET_TRANSITIONS),
            (running_job, running_job.JOB_PHASE_TRANSITIONS),
            (member, member.MEMBER_PHASE_TRANSITIONS),
        )
        for state, trigger in table
    }
    second = (
        HeldBucketTrigger.REHOME,
        HeldBucketTrigger.NEXT_LIFE,
        ServedBucketTrigger.HAND_ON,
        ServedBucketTrigger.HELD,
    )
    with_second_homes = {row for row in rows if row[2] in {trigger.value for trigger in second}}
    assert rows - walked - with_second_homes == TOLD_TWICE  # those: tests/protocol/test_homed.py and test_rank_world.py


def test_a_violation_tells_the_scenario_the_last_events_and_who_waits() -> None:
    scenario = Scenario(seed=1, servers=1, workers=1, network=NetworkProfile(quiet_after=0.0), patience=0.9)
    with pytest.raises(Violation) as found:
        World(scenario).run()
    text = str(found.value)
    assert text.startswith("the run has not ended within 1 s")
    assert "Scenario(seed=1" in text
    assert "LinkUp" in text
    assert "waits: worker 0 has been waiting" in text


def test_workers_are_linked_with_servers_and_servers_with_the_coordinator() -> None:
    pairs = linked_pairs(ClusterShape(3, 2))
    expected = {(server_id(0), server_id(1)), (server_id(0), server_id(2))}
    expected |= {(server_id(s), worker_id(w)) for s in range(3) for w in range(2)}
    assert set(pairs) == expected


@pytest.mark.parametrize("torn", [True, False])
def test_a_larger_cluster_ends_well(torn: bool) -> None:
    parameters = tuple(ParameterEntry(f"p{i}", 16, "float32", 0) for i in range(8))
    scenario = Scenario(
        seed=4,
        servers=4,
        workers=16,
        parameters=parameters,
        network=NetworkProfile(torn=torn, reset_chance=0.001, duplicate_chance=0.01, quiet_after=30.0),
    )
    assert World(scenario).run().ok
