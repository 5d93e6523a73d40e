"""Planted defects: each is found within a bounded number of seeds, and the sound machines pass the same seeds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lockstep.sim.explore import play_seed
from lockstep.sim.generate import Size
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.violation import Violation
from lockstep.sim.world import World
from sim import mutants
from sim.mutants import Plant

SEEDS = 150

BAD = NetworkProfile(
    late_chance=0.05, in_order=False, duplicate_chance=0.2, reset_chance=0.03, ghost_chance=0.2, quiet_after=40.0
)
IN_PLACE = NetworkProfile(lent_in_place=True, duplicate_chance=0.1, quiet_after=40.0)
DOUBLING = NetworkProfile(late_chance=0.05, in_order=False, duplicate_chance=0.2, quiet_after=40.0)
BREAKING = NetworkProfile(reset_chance=0.1, max_resets=1000, reopen=SecondsRange(0.01, 0.1), quiet_after=40.0)
PLAIN = TrainingProfile()
EDITING = TrainingProfile(edit_chance=0.5, rates_at_seal=True)
CLIPPING = TrainingProfile(edit_chance=0.5, clip_chance=1.0, rates_at_seal=True)
EARLY = TrainingProfile(edit_chance=0.3, seals_early=True)
SLOW_BACKWARD = TrainingProfile(backward=SecondsRange(0.0, 3.0), rates_at_seal=True)


@dataclass(frozen=True)
class Planted:
    mutant: type
    finding: str
    """Part of the text of the violation: it must be found for the right reason."""
    mode: Mode = Mode.EAGER
    network: NetworkProfile = BAD
    training: TrainingProfile = PLAIN
    servers: int = 2

    def scenario(self, seed: int) -> Scenario:
        return Scenario(
            seed=seed,
            servers=self.servers,
            workers=2,
            mode=self.mode,
            network=self.network,
            training=self.training,
            patience=60.0,
        )


LATE = "the run has not ended within"
PLANTED = [
    Planted(mutants.CountsWithoutSender, "expected GradientTag", network=DOUBLING),
    Planted(mutants.CountsAnyLife, "expected GradientTag"),
    Planted(mutants.CountsAnyStep, "expected GradientTag"),
    Planted(mutants.DoesNotWaitForTheCommit, "an early commit"),
    Planted(mutants.DoesNotWaitForReaders, "is read from it", Mode.ASYNC),
    Planted(mutants.UpdatesInPlace, "in place"),
    Planted(mutants.OverwritesWhatIsRead, "is read from it", Mode.SEALED, DOUBLING),
    Planted(mutants.KeepsNormsOfReplacedGradients, "is multiplied by", Mode.SEALED, training=CLIPPING),
    Planted(mutants.AppliesBeforeTheSeal, "has sealed it", Mode.SEALED, training=EDITING),
    Planted(mutants.KeepsReplacedEditions, LATE, Mode.SEALED, IN_PLACE, EDITING),
    Planted(mutants.SleepsThroughTheCommit, LATE),
    Planted(mutants.SpeaksOnce, LATE),
    Planted(mutants.SpeaksOnce, LATE, servers=5),
    Planted(mutants.AppliesTwice, "counts a worker twice", Mode.ASYNC),
    Planted(mutants.SendsTwice, "parameter bucket", Mode.ASYNC),
    Planted(mutants.CommitsEarly, "committed"),
    Planted(mutants.SaysTheEndOnce, LATE, network=BREAKING, training=TrainingProfile(steps=1)),
    Planted(mutants.ForgetsWhatWasInFlight, LATE),
    Planted(mutants.TakesAnyVersion, "which was never made"),
    Planted(mutants.SaysFormerRates, "the chief sent", Mode.SEALED, training=SLOW_BACKWARD),
    Planted(mutants.AppliesBeforeTheSeal, "has sealed it", Mode.SEALED, training=EARLY),
    Planted(mutants.SealsOnlyWhatHasLeft, "gradients of the wrong workers", Mode.SEALED, training=EARLY),
    # Without servers: every worker is the home of some buckets.
    Planted(mutants.CountsWithoutSender, "expected GradientTag", network=DOUBLING, servers=0),
    Planted(mutants.CountsAnyLife, "expected GradientTag", servers=0),
    Planted(mutants.AnswersForItsPeer, LATE, servers=0),
    Planted(mutants.DoesNotWaitForTheCommit, "an early commit", servers=0),
    Planted(mutants.UpdatesInPlace, "in place", servers=0),
    Planted(mutants.AppliesBeforeTheSeal, "has sealed it", Mode.SEALED, training=EDITING, servers=0),
    Planted(mutants.SleepsThroughTheCommit, LATE, servers=0),
    Planted(mutants.SpeaksOnce, LATE, servers=0),
    Planted(mutants.CommitsEarly, "committed", servers=0),
    Planted(mutants.ForgetsWhatWasInFlight, LATE, servers=0),
    Planted(mutants.TakesAnyVersion, "which was never made", servers=0),
]


@pytest.mark.parametrize(
    "planted",
    PLANTED,
    ids=lambda planted: f"{planted.mutant.__name__}-{planted.servers}-{planted.training.seals_early}",
)
def test_a_planted_defect_is_found(planted: Planted) -> None:
    for seed in range(SEEDS):
        try:
            World(planted.scenario(seed), Plant(planted.mutant)).run()
        except Violation as violation:
            first_line = str(violation).splitlines()[0]
            assert planted.finding in first_line
            assert World(planted.scenario(seed)).run().ok, "the sound machines must pass where the defect shows"
            return
    pytest.fail(f"not found within {SEEDS} seeds")


SEARCHED = [
    (mutants.CountsWithoutSender, ""),
    (mutants.CountsAnyLife, "expected GradientTag"),
    pytest.param(mutants.SleepsThroughTheCommit, "", marks=[pytest.mark.slow, pytest.mark.long]),
    (mutants.CommitsEarly, "committed"),
    (mutants.UpdatesInPlace, "in place"),
]
"""Arrivals counted without sender, no check of the incarnation, a lost wake-up, an early commit, an update in place."""


@pytest.mark.parametrize(("mutant", "finding"), SEARCHED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_defect_is_found_by_drawn_runs_of_8_workers_and_2_servers(mutant: type, finding: str) -> None:
    """What ``lockstep sim --seeds=500`` plays: no run is made for the defect."""
    for seed in range(500):
        played = play_seed(seed, Size(), maker=Plant(mutant))
        if not played.sound:
            assert finding in played.headline
            assert play_seed(seed, Size()).sound, "the sound machines must pass where the defect shows"
            return
    pytest.fail("not found within 500 seeds")
