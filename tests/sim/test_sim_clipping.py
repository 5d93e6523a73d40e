"""Clipped steps under a virtual clock: one scale for all servers, whatever the network does and whoever is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.coordinator import norms
from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.journal import Happening
from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.server.step_norm import StepNorm
from lockstep.sim.clipping import questions_in
from lockstep.sim.scenario import Kill, Mode, NetworkProfile, Scenario, TrainingProfile
from lockstep.sim.violation import Rule, Violation
from lockstep.sim.world import World

STORM = NetworkProfile(
    late_chance=0.05,
    in_order=False,
    duplicate_chance=0.2,
    reset_chance=0.02,
    transfer_failure_chance=0.03,
    ghost_chance=0.1,
    quiet_after=40.0,
)
BASE = Scenario(
    seed=1,
    servers=2,
    workers=3,
    mode=Mode.SEALED,
    parameters=tuple(ParameterEntry(f"layer{n}", 16, "float32", 0) for n in range(3)),
    training=TrainingProfile(steps=5, clip_chance=0.8, rates_at_seal=True),
    patience=400.0,
)
EDITING = replace(BASE.training, edit_chance=0.3, withdraw_chance=0.1, void_chance=0.1, absent_chance=0.1)


@pytest.mark.parametrize("seed", range(15))
def test_a_storm_changes_no_scale(seed: int) -> None:
    lent = replace(STORM, lent_in_place=seed % 2 == 0)
    scenario = replace(BASE, seed=seed, servers=1 + seed % 3, network=lent, training=EDITING)
    World(scenario).run()
    assert any(questions_in(scenario, step) for step in range(5))


@pytest.mark.parametrize("victim", [worker(1), worker(0)], ids=str)
@pytest.mark.parametrize("tenth", range(6))
def test_a_worker_that_comes_back_gets_the_same_answers(victim: object, tenth: int) -> None:
    rules = RecoveryRules(on_worker_loss=LossPolicy.WAIT, rejoin_seconds=60.0)
    kill = Kill(victim, 1.5 + 0.25 * tenth)  # type: ignore[arg-type]
    scenario = replace(BASE, seed=tenth, rules=rules, kills=(kill,), network=replace(STORM, quiet_after=3.0))
    World(scenario).run()


@pytest.mark.parametrize("tenth", range(6))
def test_a_job_that_continues_without_a_worker_uses_one_scale(tenth: int) -> None:
    rules = RecoveryRules(on_worker_loss=LossPolicy.SHRINK, rejoin_seconds=60.0)
    scenario = replace(BASE, seed=tenth, rules=rules, kills=(Kill(worker(2), 1.5 + 0.25 * tenth),))
    World(scenario).run()


def test_every_server_and_worker_records_what_was_measured() -> None:
    world = World(replace(BASE, training=replace(BASE.training, clip_chance=1.0)))
    world.run()
    for name in (server(0), server(1)):
        measured = [row.step for row in world.tasks[name].machine.journal if row.happening is Happening.MEASURED]
        assert set(measured) == set(range(5))


# -- the simulator notices what is wrong --


def test_a_server_that_uses_its_own_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: StepNorm, *args: object) -> bool:
        known = right(self, *args)  # type: ignore[arg-type]
        if self.total is not None:
            self.total = replace(self.total, scale=self.total.scale / 2)
        return known

    right = StepNorm.decide
    monkeypatch.setattr(StepNorm, "decide", own)
    with pytest.raises(Violation) as caught:
        World(replace(BASE, training=replace(BASE.training, clip_chance=1.0))).run()
    assert caught.value.broken.rule is Rule.WRONG_SCALE


def test_a_coordinator_that_decides_without_a_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = norms.Norms.decide
    monkeypatch.setattr(norms.Norms, "decide", lambda self, servers, change: right(self, servers[:1], change))
    with pytest.raises(Violation) as caught:
        World(replace(BASE, training=replace(BASE.training, clip_chance=1.0))).run()
    assert caught.value.broken.rule in (Rule.WRONG_SCALE, Rule.MACHINE)
