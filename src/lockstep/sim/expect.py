"""How a run with planted faults must end: with completion, or with a verdict that names one of them.

A fault that ends, or that the protocol heals, must not end the job; any other must be named, with the right task (or
the right two) and a matching cause.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.effects import JobEnded
from lockstep.protocol.core.endings import seconds_allowed
from lockstep.protocol.core.faults import (
    BlockCallback,
    BlockLoop,
    Die,
    DropMessage,
    DropTensor,
    EndEarly,
    FaultPlace,
    Freeze,
    OddModel,
    OddSetting,
    Raise,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.sim.faults import AnyFault, Crash, LoseConnection, Partition, Pause, StartLate
from lockstep.sim.planting import Planted
from lockstep.sim.scenario import Scenario
from lockstep.sim.violation import Rule, Violation
from lockstep.sim.watch import SimulatedWatchdog
from lockstep.sim.world import World

_STUCK_AT = {
    FaultPlace.USER_CODE.value: Cause.USER_CODE,
    FaultPlace.INPUT.value: Cause.INPUT_STARVED,
    FaultPlace.CHECKPOINT.value: Cause.CHECKPOINT_STUCK,
    FaultPlace.LOOP.value: Cause.LOOPING,
    FaultPlace.BUSY.value: Cause.BUSY,
    FaultPlace.COMPILER.value: Cause.COMPILING,
    FaultPlace.NO_DEVICE.value: Cause.USER_CODE,
    FaultPlace.DEVICE.value: Cause.DEVICE_CALL,
    FaultPlace.BEFORE_PRODUCING.value: Cause.DEADLOCK,
}

_WHILE_FORMING = (Cause.COMMUNICATION, Cause.NEVER_STARTED)
"""A task that never becomes a member can only report that the coordinator is missing or does not answer."""


@dataclass(frozen=True, slots=True)
class ExpectedEnding:
    """What a verdict about one fault may name. ``heals``: it ends, or the protocol makes up for it."""

    tasks: frozenset[str]
    causes: frozenset[Cause]
    heals: bool
    seconds: float = 0.0
    """How long it delays the job, if it ends."""


def expected_of(fault: AnyFault, scenario: Scenario) -> ExpectedEnding:
    """What one fault leads to in this scenario."""
    both = frozenset({fault.task, getattr(fault, "peer", fault.task)})
    causes, seconds = _causes(fault)
    if isinstance(fault, EndEarly):
        missed = frozenset({Cause.OTHER_CALL}) if scenario.training.calls else frozenset()
        return ExpectedEnding(both, causes | missed, heals=not (scenario.mode.synchronous or missed))
    if isinstance(fault, DropTensor) and not scenario.mode.synchronous and TaskId.parse(fault.task).role is Role.SERVER:
        # Without synchronisation, a value is sent only once on a link: it may have changed meanwhile.
        return ExpectedEnding(both, causes, heals=False)
    if isinstance(fault, StartLate):
        return ExpectedEnding(both, causes, heals=0 <= fault.seconds < scenario.startup_timeout)
    patience = [seconds_allowed(cause, scenario.stall_after, scenario.user_code_timeout) for cause in causes]
    return ExpectedEnding(both, causes, 0 <= seconds < min(patience, default=scenario.stall_after), max(seconds, 0.0))


def _causes(fault: AnyFault) -> tuple[frozenset[Cause], float]:
    """The causes that match, and how long the fault lasts; -1: for good."""
    match fault:
        case Die() | Crash():
            # A task that restarted before it was missed is refused, because its place is taken.
            return frozenset({Cause.DEAD, Cause.STALE_INCARNATION, Cause.LEFTOVER_SERVER}), -1.0
        case Freeze():
            return frozenset({Cause.FROZEN, *_WHILE_FORMING}), -1.0
        case Pause(seconds=seconds):
            return frozenset({Cause.FROZEN, *_WHILE_FORMING}), seconds
        case StartLate(seconds=seconds):
            return frozenset({Cause.NEVER_STARTED}), seconds
        case Partition(seconds=seconds):
            return frozenset({Cause.LINK_DOWN, Cause.ONE_WAY_LINK, *_WHILE_FORMING}), seconds
        case LoseConnection():
            return frozenset(), 0.0
        case DropMessage(times=times):
            return frozenset({Cause.REQUEST_LOST, Cause.ANSWER_LOST}), 0.0 if times else -1.0
        case DropTensor(times=times):
            return frozenset({Cause.ANSWER_LOST}), 0.0 if times else -1.0
        case EndEarly():
            return frozenset({Cause.OUT_OF_STEP}), -1.0
        case OddSetting() | OddModel():
            return frozenset({Cause.MISMATCH}), -1.0
        case Raise():
            return frozenset({Cause.FAILED}), -1.0
        case Stick(place=place, seconds=seconds):
            return frozenset({_STUCK_AT[place]}), seconds
        case SlowSteps(seconds=seconds):
            return frozenset({Cause.STRAGGLER}), seconds
        case SlowStore(seconds=seconds):
            return frozenset({Cause.OVERLOADED_SERVER, Cause.COMMUNICATION}), seconds
        case BlockLoop(seconds=seconds) | BlockCallback(seconds=seconds):
            return frozenset({Cause.COMMUNICATION}), seconds
        case _:
            raise ValueError(f"{type(fault).__name__} cannot be planted in the simulator")


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a run with planted faults ended."""

    completed: bool
    cause: str = ""
    culprit: str = ""
    reason: str = ""
    still: float = 0.0
    """If the watchdog ended it: how long nothing had moved."""


def judge(world: World, planted: Planted, watch: SimulatedWatchdog) -> RunEnding:
    """The ending of a run that is over; Violation if the faults do not explain it."""
    expected = [expected_of(fault, world.scenario) for fault in planted.struck]
    bad = {name: task.outcome for name, task in world.tasks.items() if task.outcome is not None and not task.outcome.ok}
    if not bad:
        _refuse_false_completion(world, watch)
        return RunEnding(completed=True)
    to_blame = _to_blame(expected, world.scenario)
    # A later incarnation that was never a member of the job does not know why it ended.
    judged = {n: o for n, o in bad.items() if n not in watch.left_behind and not world.tasks[n].lives_before}
    explained = {str(name) for name, outcome in judged.items() if _is_explained(outcome, to_blame)}
    for name, outcome in judged.items():
        if str(name) not in explained and not _follows(outcome, explained):
            raise Violation(Rule.UNEXPLAINED_END, _unexplained(f"{name} was notified", outcome, expected))
    first = next(iter((judged or bad).values()))
    still = watch.finding.still if watch.finding is not None else 0.0
    return RunEnding(False, first.reason.cause.value, first.culprit, first.reason.text, still)


def _to_blame(expected: Sequence[ExpectedEnding], scenario: Scenario) -> list[ExpectedEnding]:
    """The faults that may end the job: those that do not heal, and the rest if together they delay it for too long."""
    together = sum(one.seconds for one in expected if one.heals)
    return [one for one in expected if not one.heals or together >= scenario.stall_after]


def _refuse_false_completion(world: World, watch: SimulatedWatchdog) -> None:
    """Every end that a task received was good: then every step must be complete, and no task may have missed it."""
    for name, task in world.tasks.items():
        if task.outcome is None and task.started and task.died_at < 0 and name not in watch.left_behind:
            raise Violation(Rule.NOT_TOLD, f"{name} never received the end of the job")
    if not any(task.outcome is not None for task in world.tasks.values()):
        raise Violation(Rule.NOT_TOLD, "no task received the end of the job")
    world.check_completion()


def _is_explained(outcome: JobEnded, to_blame: Sequence[ExpectedEnding]) -> bool:
    named = {outcome.culprit, outcome.reason.peer}
    return any(outcome.reason.cause in one.causes and named & one.tasks for one in to_blame)


def _follows(outcome: JobEnded, explained: Set[str]) -> bool:
    """Whether this names, as gone or missing, a task that gave up because of what was planted."""
    return outcome.culprit in explained and outcome.reason.cause in (Cause.DEAD, Cause.NEVER_STARTED)


def _unexplained(who: str, outcome: JobEnded, planted: Sequence[ExpectedEnding]) -> str:
    listed = "; ".join(f"{sorted(c.value for c in one.causes)} of {sorted(one.tasks)}" for one in planted)
    return (
        f"{who} that the job ended for another reason than what was planted: {outcome.reason.cause.value}: "
        f"{outcome.culprit}: {outcome.reason.text} (planted: {listed or 'nothing'})"
    )
