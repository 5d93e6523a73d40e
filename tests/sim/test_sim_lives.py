"""Tasks killed at every transition of a step, and at every event of a run: the last numbers are those of no kill."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest

from lockstep.protocol import coordinator, holdings, job, ledger, member, server, worker
from lockstep.protocol.errors import ProtocolError
from lockstep.protocol.ids import BucketId, TaskId
from lockstep.protocol.ids import server as server_id
from lockstep.protocol.ids import worker as worker_id
from lockstep.protocol.job import RunningJob
from lockstep.protocol.machine import State, Trigger, advance
from lockstep.protocol.recovery import LossPolicy
from lockstep.protocol.server import ServerMachine
from lockstep.sim.lives import LivesWorld
from lockstep.sim.short_lives import KillPoint, LivesScenario
from lockstep.sim.violation import Violation

CHIEF, WORKER, COORDINATOR, SERVER = worker_id(0), worker_id(1), server_id(0), server_id(1)
VICTIMS = (WORKER, CHIEF, SERVER, COORDINATOR)
PLAIN = LivesScenario()
STEP = 3
"""The step at whose transitions tasks are killed: version 2 is saved while it goes on."""
Walked = set[tuple[str, str]]


@functools.cache
def undisturbed(*, eager: bool = True) -> tuple[dict[BucketId, int], LivesWorld]:
    world = LivesWorld(LivesScenario(eager=eager))
    return world.run(), world


def play(*kills: KillPoint, policy: LossPolicy = LossPolicy.WAIT, eager: bool = True) -> LivesWorld:
    world = LivesWorld(LivesScenario(kills=kills, policy=policy, eager=eager))
    assert world.run() == undisturbed(eager=eager)[0], kills
    return world


def moments(task: TaskId, step: int | None = None, *, eager: bool = True) -> Iterator[KillPoint]:
    """Each event at which this task can die, before and after its effects: of one step, or of the whole run."""
    for who, event, committed in undisturbed(eager=eager)[1].story[:-20]:
        if who == task and step in (None, committed + 1):
            yield KillPoint(task, event, False)
            yield KillPoint(task, event, True)


def transitions_of_a_step(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[TaskId, int], Walked]:
    """For each event of the step: the rows of the transition tables that it walked."""
    found: dict[tuple[TaskId, int], Walked] = {}
    world = LivesWorld(PLAIN)

    def watching(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
        who, event, committed = world.story[-1] if world.story else (CHIEF, -1, -9)
        if committed + 1 == STEP:
            found.setdefault((who, event), set()).add((f"{type(state).__module__}: {state.value}", trigger.value))
        return advance(table, state, trigger)

    modules: tuple[ModuleType, ...] = (worker, server, job, coordinator, member)
    for module in modules:
        monkeypatch.setattr(module, "advance", watching)
    world.run()
    monkeypatch.undo()
    return found


def test_an_undisturbed_run_is_the_same_each_time() -> None:
    assert LivesWorld(PLAIN).run() == undisturbed()[0]


def test_killed_at_every_transition_of_a_step_no_gradient_is_lost_doubled_or_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = transitions_of_a_step(monkeypatch)
    walked = {row for rows in found.values() for row in rows}
    plain = {("collecting", "last gradient arrived"), ("complete", "applying began"), ("applying", "next version made")}
    assert {(f"{ledger.__name__}: {state}", trigger) for state, trigger in plain} <= walked
    plain = {("held", "gradient produced"), ("produced", "transfer started"), ("offered", "version arrived")}
    assert {(f"{holdings.__name__}: {state}", trigger) for state, trigger in plain} <= walked
    assert {who for who, _ in found} == set(VICTIMS)
    for who, event in found:
        for effects_done in (False, True):
            assert play(KillPoint(who, event, effects_done)).lost == 1


def test_what_the_library_ends_with_is_what_the_benchmark_ends_with() -> None:
    assert undisturbed(eager=False)[0] == undisturbed()[0]


@pytest.mark.parametrize("task", VICTIMS, ids=lambda t: t.short)
def test_killed_at_every_event_of_a_step_of_the_library_the_job_ends_with_the_same_numbers(task: TaskId) -> None:
    for kill in moments(task, STEP, eager=False):
        play(kill, eager=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", VICTIMS, ids=lambda t: t.short)
def test_killed_at_every_event_of_a_run_the_job_ends_with_the_same_numbers(task: TaskId) -> None:
    for kill in moments(task):
        play(kill)


@pytest.mark.parametrize("seed", range(60))
def test_several_kills_in_one_run_change_no_number(seed: int) -> None:
    dice = random.Random(seed)
    story = undisturbed()[1].story
    kills = []
    for _ in range(dice.randint(2, 5)):
        who, event, _ = dice.choice(story)
        kills.append(KillPoint(who, event, dice.random() < 0.5))
    play(*kills)


@pytest.mark.parametrize("task", [WORKER, CHIEF], ids=lambda t: t.short)
def test_a_job_that_shrinks_ends_well_wherever_a_worker_is_killed(task: TaskId) -> None:
    for kill in moments(task, STEP):
        world = LivesWorld(LivesScenario(kills=(kill,), policy=LossPolicy.SHRINK, workers=3, steps=25))
        world.run()
        assert world.lost == 1


# -- defects that the kills must find --


def finds_a_defect(*victims: TaskId) -> bool:
    for victim in victims:
        for kill in moments(victim, STEP):
            try:
                if LivesWorld(LivesScenario(kills=(kill,))).run() != undisturbed()[0]:
                    return True
            except (Violation, AssertionError, ProtocolError, KeyError):
                return True
    return False


def test_a_commit_that_does_not_wait_for_the_states_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed()
    monkeypatch.setattr(RunningJob, "_states_are_there", lambda *_: True)
    assert finds_a_defect(WORKER)


def test_a_checkpoint_that_is_copied_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is saved after the next update has begun: values of one version, the optimizer's state of another."""
    undisturbed()
    plain = LivesWorld._write_shard

    def late(self: LivesWorld, life: object, version: int, kept: object) -> None:
        assert hasattr(life, "shard")

        def write() -> None:
            now = {b: (s[version % 2], life.shard.momentum[b]) for b, s in life.shard.slots.items()}
            plain(self, life, version, now)  # type: ignore[arg-type]

        self._later(0.03, write)

    monkeypatch.setattr(LivesWorld, "_write_shard", late)
    assert finds_a_defect(SERVER, COORDINATOR)


def test_a_worker_that_begins_with_another_step_than_it_is_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed()
    monkeypatch.setattr(ServerMachine, "_forget_life", lambda *_: [])
    plain = RunningJob._view
    monkeypatch.setattr(
        RunningJob,
        "_view",
        lambda self, task, members: (
            _later_start(plain(self, task, members)) if self._number > 1 else plain(self, task, members)
        ),
    )
    assert finds_a_defect(WORKER)


def _later_start(view: object) -> object:
    import dataclasses

    return dataclasses.replace(view, state=b"another state")  # type: ignore[type-var]


# -- SIGTERM: a whole job is shut down, and goes on from what was saved when it is started again --


def signalled(*signals: tuple[TaskId, int], save_steps: int = 2) -> LivesWorld:
    world = LivesWorld(LivesScenario(signals=signals, save_steps=save_steps))
    assert world.run() == undisturbed()[0], signals
    return world


def events_of(task: TaskId) -> list[int]:
    return [event for who, event, _ in undisturbed()[1].story[:-20] if who == task]


def test_a_job_that_is_shut_down_after_any_event_and_started_again_has_the_same_last_numbers() -> None:
    saved: set[int] = set()
    for event in events_of(COORDINATOR)[::2]:
        signalled((COORDINATOR, event))
        saved |= set(signalled((COORDINATOR, event), save_steps=1000).disk.complete)
    assert saved == set(range(1, PLAIN.steps + 1)), "the step that goes on is finished and saved, whichever it is"


def test_a_signal_that_comes_to_one_task_after_the_other_is_one_shutdown() -> None:
    chance = random.Random(5)
    for _ in range(60):
        signals = [(task, chance.choice(events_of(task))) for task in VICTIMS]
        signalled(*signals)


@pytest.mark.parametrize("task", [WORKER, CHIEF, SERVER])
def test_one_task_that_leaves_after_any_event_changes_no_number(task: TaskId) -> None:
    for event in events_of(task)[::3]:
        signalled((task, event))
