"""Losses and checkpoints, machine by machine: who waits, who comes back with what, who returns, what is saved when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.reasons import because
from lockstep.errors import EXIT_BAD_INPUT
from lockstep.protocol.coordinator.recovery import Beginning, LossPolicy, RecoveryRules
from lockstep.protocol.core.causes import NO_REASON, Cause
from lockstep.protocol.core.effects import (
    Apply,
    Effect,
    JobEnded,
    SaveShard,
    Send,
    SendVersion,
    StillMissing,
    WriteCheckpoint,
)
from lockstep.protocol.core.events import (
    CheckpointWritten,
    LinkLost,
    LinkUp,
    PeerGone,
    Prepared,
    Sealed,
    ShardSaved,
    StateTaken,
    StepBegun,
    Tick,
)
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, server, worker
from lockstep.protocol.core.messages import (
    Applied,
    Commit,
    Done,
    End,
    Layout,
    LocalState,
    Lost,
    Open,
    Refused,
    Roster,
    Saved,
    View,
)
from lockstep.protocol.core.timing import SAVE_AGAIN_SECONDS
from lockstep.protocol.phrases import waited_for
from protocol.protocol_rigs import (
    CoordinatorRig,
    MemberRig,
    ServerRig,
    WorkerRig,
    join_of,
    layout_of,
    life,
    messages_to,
    only,
)

PS, W0, W1 = server(0), worker(0), worker(1)
WAIT = RecoveryRules(on_worker_loss=LossPolicy.WAIT, rejoin_seconds=50.0)
SHRINK = RecoveryRules(on_worker_loss=LossPolicy.SHRINK, rejoin_seconds=50.0)
AGAIN = 4242
"""Another life of worker 1."""


def running(rules: RecoveryRules, beginning: Beginning | None = None, workers: int = 2) -> CoordinatorRig:
    rig = CoordinatorRig(rules=rules, beginning=beginning, workers=workers)
    rig.join_all()
    return rig


def make_step(rig: CoordinatorRig, step: int, workers: tuple[int, ...] = (0, 1)) -> list[Effect]:
    """The server applies a step, and workers tell what they take into the next."""
    effects: list[Effect] = []
    if step >= 0:
        for index in workers:
            effects += rig.hear(worker(index), LocalState(step + 1, f"{index} before {step + 1}".encode()))
    return effects + rig.hear(PS, Applied(step))


# -- a step is committed only when every worker could begin after it again --


def test_a_step_waits_for_the_state_of_every_worker() -> None:
    rig = running(WAIT)
    assert messages_to(make_step(rig, INITIAL_STEP), PS, Commit) == [Commit(INITIAL_STEP)]
    assert rig.hear(PS, Applied(0)) == []
    assert rig.hear(W0, LocalState(1, b"a")) == []
    assert rig.hear(W1, LocalState(1, b"b")) == [Send(PS, Commit(0))]


def test_a_state_that_is_the_same_as_before_needs_what_was_before() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    rig.hear(PS, Applied(0))
    rig.hear(W0, LocalState(1, b"a"))
    assert rig.hear(W1, LocalState(1, b"", same=True)) == []
    assert rig.hear(W1, LocalState(1, b"b")) == [Send(PS, Commit(0))]
    rig.hear(W0, LocalState(2, b"", same=True))
    rig.hear(W1, LocalState(2, b"", same=True))
    assert rig.hear(PS, Applied(1)) == [Send(PS, Commit(1))]
    assert rig.machine.states.of(W1, 2) == b"b"


def test_without_recovery_nobody_is_asked_for_a_state() -> None:
    rig = running(RecoveryRules())
    make_step(rig, INITIAL_STEP)
    assert rig.hear(PS, Applied(0)) == [Send(PS, Commit(0))]


# -- wait --


def test_a_lost_worker_is_named_to_everybody_and_waited_for() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    effects = rig.tell(PeerGone(W1, because("was killed by SIGKILL"), life(W1)))
    (roster,) = messages_to(effects, W0, Roster)
    assert [(one.task, one.address, one.attempts) for one in roster.missing] == [(str(W1), "", 1)]
    assert "was killed by SIGKILL; waiting up to 50 s" in roster.missing[0].finding
    assert messages_to(effects, W1, Roster) == []
    assert rig.machine.end is None
    assert [(wait.on, waited_for(wait)) for wait in rig.machine.waits()] == [(W1, "it to come back")]
    assert rig.tell(PeerGone(W1, because("was killed by SIGKILL"), life(W1))) == []


def test_another_life_gets_the_next_view_with_its_step_and_its_state() -> None:
    rig = running(WAIT)
    for step in (INITIAL_STEP, 0, 1):
        make_step(rig, step)
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    effects = rig.hear(W1, join_of(W1, incarnation=AGAIN), AGAIN)
    (view,) = messages_to(effects, W1, View)
    assert (view.number, view.start, view.state) == (2, 2, b"1 before 2")
    assert AGAIN in {member.incarnation for member in view.members}
    (others,) = messages_to(effects, W0, View)
    assert others.members == view.members
    assert messages_to(effects, W0, Roster) == [Roster(())]
    assert rig.machine.waits() == []


def test_a_life_that_is_over_is_not_heard_any_more() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    rig.hear(W1, join_of(W1, incarnation=AGAIN), AGAIN)  # it came before anybody had missed the former one
    assert rig.tell(PeerGone(W1, because("was started again"), life(W1))) == []
    assert rig.hear(W1, LocalState(1, b"late"), life(W1)) == []
    (refused,) = messages_to(rig.hear(W1, join_of(W1)), W1, Refused)
    assert "another worker" in refused.reason.text


def test_a_life_with_other_settings_is_refused_and_the_job_waits_on() -> None:
    rig = running(WAIT)
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    join = join_of(W1, {"optimizer": "adam"}, incarnation=AGAIN)
    (refused,) = messages_to(rig.hear(W1, join, AGAIN), W1, Refused)
    assert "optimizer=adam" in refused.reason.text
    assert rig.machine.losses.is_lost(W1)


def test_who_does_not_come_back_in_time_ends_the_job() -> None:
    rig = running(WAIT)
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    rig.now += 49.0
    assert messages_to(rig.tell(Tick()), W0, End) == []
    rig.now += 1.5
    (end,) = messages_to(rig.tell(Tick()), W0, End)
    assert (end.ok, end.culprit, end.again) == (False, str(W1), False)
    assert "did not come back within 50 s" in end.reason.text


def test_a_task_that_counted_as_lost_by_mistake_is_found_again() -> None:
    rig = running(WAIT)
    rig.hear(W0, Lost(str(W1), life(W1), because("is gone: its link broke")))
    assert rig.machine.losses.is_lost(W1)
    effects = rig.hear(W0, Lost(str(W1), life(W1), NO_REASON, lives=True))
    assert messages_to(effects, W0, Roster) == [Roster(())]
    assert not rig.machine.losses.is_lost(W1)


def test_a_worker_that_had_finished_may_go() -> None:
    rig = running(WAIT)
    rig.hear(W1, Done(5))
    assert rig.tell(PeerGone(W1, because("was killed"), life(W1))) == []


def test_a_worker_lost_before_the_view_just_joins_again() -> None:
    rig = CoordinatorRig(rules=WAIT)
    rig.join(PS)
    rig.join(W1)
    assert rig.tell(PeerGone(W1, because("was killed"), life(W1))) == []
    assert W1 in rig.machine.missing()


# -- shrink --


def test_the_others_go_on_without_a_lost_worker_and_take_it_back_at_a_commit() -> None:
    rig = running(SHRINK, workers=3)
    everybody = (0, 1, 2)
    make_step(rig, INITIAL_STEP)
    make_step(rig, 0, everybody)
    effects = rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    assert messages_to(effects, PS, Commit) == [Commit(0, False, 1, (0, 2))]
    assert "the job goes on without it" in messages_to(effects, W0, Roster)[0].missing[0].finding
    assert messages_to(make_step(rig, 1, (0, 2)), PS, Commit) == [Commit(1, False, 1, (0, 2))]
    assert rig.hear(W1, join_of(W1, incarnation=AGAIN), AGAIN) == []
    effects = make_step(rig, 2, (0, 2))
    assert messages_to(effects, PS, Commit) == [Commit(2, False, 2, ())]
    (view,) = messages_to(effects, W1, View)
    assert (view.start, view.state) == (3, b"1 before 1")


def test_the_last_worker_is_waited_for() -> None:
    rig = running(SHRINK)
    make_step(rig, INITIAL_STEP)
    rig.tell(PeerGone(W0, because("was killed"), life(W0)))
    effects = rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    assert messages_to(effects, PS, Commit) == []
    assert rig.machine.losses.is_waiting


def test_a_server_averages_over_those_that_are_left() -> None:
    rig = ServerRig(workers=3)
    rig.initialise()
    rig.say_rates(0)
    rig.arrive(0, 0)
    rig.arrive(2, 0)
    effects = rig.hear(PS, Commit(INITIAL_STEP, False, 1, (0, 2)))
    (apply,) = only(effects, Apply)
    assert (apply.contributors, apply.replicas) == ((W0, worker(2)), 2)


def test_a_server_asks_a_worker_that_is_taken_back() -> None:
    rig = ServerRig()
    rig.initialise()
    rig.hear(PS, Commit(INITIAL_STEP, False, 1, (0,)))
    rig.say_rates(0)
    rig.arrive(0, 0)
    rig.applied(0)
    effects = rig.hear(PS, Commit(0, False, 2, ()))
    assert messages_to(effects, W1, Open) == [Open(1, ())]
    assert rig.machine.contributing.of(1) == (W0, W1)


# -- a server's side of another life --


def test_what_a_former_life_delivered_whole_stays_and_the_rest_is_fenced() -> None:
    rig = ServerRig(buckets=2)
    rig.initialise()
    rig.arrive(1, 0, bucket=0)
    rig.tell(LinkLost(W1, "gone"))
    rig.tell(LinkUp(W1, AGAIN))
    rig.arrive(1, 0, bucket=1, incarnation=life(W1))
    assert rig.drops()[-1] == "of another incarnation of this worker"
    effects = rig.hear(W1, layout_of(rig.plan), AGAIN)
    assert messages_to(effects, W1, Open) == [Open(0, (0,))]
    rig.arrive(1, 0, bucket=0, incarnation=AGAIN)
    assert rig.drops()[-1] == "a duplicate"


def test_the_version_of_an_uncommitted_step_is_still_served() -> None:
    rig = ServerRig()
    rig.initialise()
    rig.say_rates(0)
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    rig.applied(0)  # version 1 is here; step 0 is not committed
    rig.tell(LinkLost(W1, "gone"))
    rig.tell(LinkUp(W1, AGAIN))
    rig.hear(W1, layout_of(rig.plan), AGAIN)
    from lockstep.protocol.core.messages import Pull
    from protocol.protocol_rigs import TICKET

    effects = rig.hear(W1, Pull(0, (), TICKET), AGAIN)
    assert [(e.version, e.slot) for e in only(effects, SendVersion)] == [(0, 0)]


def test_where_gradients_may_be_edited_another_life_delivers_anew() -> None:
    rig = ServerRig(eager=False)
    rig.initialise()
    rig.arrive(1, 0)
    rig.tell(LinkLost(W1, "gone"))
    effects = rig.tell(LinkUp(W1, AGAIN))
    assert [type(effect).__name__ for effect in effects] == ["GiveBack"]


# -- a worker that begins in the middle --


def test_a_worker_begins_with_the_step_that_it_is_told() -> None:
    rig = WorkerRig(index=1)
    machine = type(rig.machine)(W1, ClusterShape(1, 2), rig.journal, eager=True, tells_state=True)
    machine.handle(LinkUp(PS, life(PS)), 1.0)
    layout = layout_of(rig.plan)
    later = Layout(layout.plan_hash, layout.bucket_bytes, layout.parameters, (), (), 7, "")
    machine.handle(Prepared(rig.plan, later), 1.0)
    from lockstep.protocol.core.events import Received, VersionArrived
    from lockstep.protocol.core.messages import Grant
    from protocol.protocol_rigs import TICKET

    machine.handle(Received(PS, life(PS), Grant(TICKET)), 1.0)
    machine.handle(Received(PS, life(PS), Open(8, ())), 1.0)  # this server has applied step 7 already
    machine.handle(VersionArrived(PS, 7, 0), 1.0)
    machine.handle(StepBegun(7, ()), 1.0)
    effects = machine.handle(Sealed(7, (), (), state=b"s"), 1.0)
    assert messages_to(effects, PS, LocalState) == [LocalState(8, b"s")]
    machine.check()


def test_a_state_is_said_again_on_a_new_link_until_a_later_step_shows_that_it_was_heard() -> None:
    rig = WorkerRig()
    rig.machine._tells_state = True
    rig.begin(0)
    rig.tell(Sealed(0, (), (), state=b"one"))
    rig.tell(LinkLost(PS, "reset"))
    assert messages_to(rig.tell(LinkUp(PS, life(PS))), PS, LocalState) == [LocalState(1, b"one")]
    rig.receive_version(1)
    rig.tell(StepBegun(1, ()))
    rig.tell(Sealed(1, (), (), state=b"one"))
    rig.hear(PS, Open(2, ()))
    rig.tell(LinkLost(PS, "reset"))
    assert messages_to(rig.tell(LinkUp(PS, life(PS))), PS, LocalState) == [LocalState(2, b"", same=True)]


# -- a server is lost: everybody returns --


def test_the_loss_of_a_server_takes_everybody_back_where_there_are_checkpoints() -> None:
    rig = CoordinatorRig(servers=2, rules=RecoveryRules(returns=True))
    rig.join_all()
    (end,) = messages_to(rig.tell(PeerGone(server(1), because("was killed"), life(server(1)))), W0, End)
    assert end.again
    without = CoordinatorRig(servers=2)
    without.join_all()
    (end,) = messages_to(without.tell(PeerGone(server(1), because("was killed"), life(server(1)))), W0, End)
    assert not end.again


@pytest.mark.parametrize("returns", [True, False])
def test_a_task_that_finds_another_incarnation_of_its_coordinator_begins_again_where_jobs_return(returns: bool) -> None:
    """A server may have worked for the former coordinator's job before its own view came: it must not join another."""
    rig = MemberRig()
    rig.machine._returns = returns
    rig.tell(LinkUp(server(0), 1))
    rig.tell(LinkLost(server(0), "reset"))
    effects = rig.tell(LinkUp(server(0), 2))
    ended = only(effects, JobEnded)
    assert [(one.again, one.reason.cause) for one in ended] == [(True, Cause.STALE_INCARNATION)] * returns
    assert bool(only(effects, Send)) is not returns


def test_a_member_that_loses_its_coordinator_returns_too() -> None:
    rig = MemberRig()
    rig.machine._returns = True
    rig.tell(LinkUp(PS, life(PS)))
    (ended,) = only(rig.tell(PeerGone(PS, because("was killed"))), JobEnded)
    assert ended.again


def test_nobody_returns_to_a_server_that_cannot_start_any_more() -> None:
    """Its checkpoints are damaged, for example: it has left with the reason, and nothing restarts it."""
    refused = replace(because("no checkpoint can be used", Cause.DEAD), exit_code=EXIT_BAD_INPUT)
    member = MemberRig()
    member.machine._returns = True
    member.tell(LinkUp(PS, life(PS)))
    (ended,) = only(member.tell(PeerGone(PS, refused)), JobEnded)
    assert (ended.again, ended.reason) == (False, refused)
    rig = CoordinatorRig(servers=2, rules=RecoveryRules(returns=True))
    rig.join_all()
    (end,) = messages_to(rig.tell(PeerGone(server(1), refused, life(server(1)))), W0, End)
    assert (end.again, end.reason) == (False, refused)


def test_a_member_passes_on_who_was_lost() -> None:
    rig = MemberRig()
    rig.tell(LinkUp(PS, life(PS)))
    rig.hear(PS, View(1, 1, ()))
    coordinator = running(WAIT)
    (roster,) = messages_to(coordinator.tell(PeerGone(W0, because("was killed"), life(W0))), W1, Roster)
    assert only(rig.hear(PS, roster), StillMissing) == [StillMissing(roster.missing)]
    assert rig.machine.awaited == {W0}
    rig.hear(PS, Roster(()))
    assert rig.machine.awaited == frozenset()


def test_a_job_begins_with_its_checkpoint() -> None:
    beginning = Beginning(start=40, checkpoint="step-40", states={0: b"zero", 1: b"one"})
    rig = CoordinatorRig(rules=WAIT, beginning=beginning)
    effects = rig.join_all()
    (view,) = messages_to(effects, W1, View)
    assert (view.start, view.state, view.checkpoint) == (40, b"one", "step-40")
    make_step(rig, 40)
    assert rig.machine.committed == 40


def test_a_server_that_begins_with_a_checkpoint_opens_its_step() -> None:
    rig = ServerRig()
    layout = layout_of(rig.plan)
    for w in (W0, W1):
        rig.hear(w, Layout(layout.plan_hash, layout.bucket_bytes, layout.parameters, (), (), 40, "step-40"))
    effects = rig.tell(Prepared(rig.plan))
    assert messages_to(effects, W1, Open) == [Open(40, ())]
    assert (rig.machine.step, rig.machine.committed) == (40, 39)


# -- checkpoints --


SAVING = RecoveryRules(save_steps=2, saves_last=True, returns=True)


def test_a_version_is_saved_with_the_commit_before_it_changes() -> None:
    rig = running(SAVING)
    make_step(rig, INITIAL_STEP)
    assert messages_to(make_step(rig, 0), PS, Commit) == [Commit(0)]
    assert messages_to(make_step(rig, 1), PS, Commit) == [Commit(1, save=True)]
    (write,) = only(rig.hear(PS, Saved(2, "shard", 10, "digest")), WriteCheckpoint)
    assert (write.version, write.states) == (2, ((0, b"0 before 2"), (1, b"1 before 2")))
    rig.tell(CheckpointWritten(2))
    assert rig.machine.saving.last == 2


def test_a_version_is_saved_when_the_time_since_the_last_one_is_over() -> None:
    rig = running(RecoveryRules(save_seconds=30.0, returns=True))
    make_step(rig, INITIAL_STEP)
    rig.now += 29.0
    assert messages_to(make_step(rig, 0), PS, Commit) == [Commit(0)]
    rig.now += 1.0
    assert messages_to(make_step(rig, 1), PS, Commit) == [Commit(1, save=True)]


def test_a_lost_request_to_save_is_repeated() -> None:
    rig = running(SAVING)
    for step in (INITIAL_STEP, 0, 1):
        make_step(rig, step)
    rig.now += 2.5
    assert rig.tell(Tick()) == [Send(PS, Commit(1, save=True))]


def test_what_could_not_be_written_is_tried_again_soon() -> None:
    rig = running(SAVING)
    for step in (INITIAL_STEP, 0, 1):
        make_step(rig, step)
    rig.hear(PS, Saved(2, "shard", 0, "", "no space left"))
    rig.tell(CheckpointWritten(2, "no space left"))
    rig.now += SAVE_AGAIN_SECONDS
    assert messages_to(make_step(rig, 2), PS, Commit) == [Commit(2, save=True)]


def test_the_last_version_is_saved_before_the_end() -> None:
    rig = running(SAVING)
    for step in (INITIAL_STEP, 0):
        make_step(rig, step)
    rig.hear(W0, Done(1))
    effects = rig.hear(W1, Done(1))
    assert messages_to(effects, PS, Commit) == [Commit(0, save=True)]
    assert rig.machine.end is None
    rig.hear(PS, Saved(1, "shard", 1, "digest"))
    assert messages_to(rig.tell(CheckpointWritten(1)), W0, End) == [End(True, "", 1, NO_REASON)]


def test_the_end_waits_for_a_worker_that_comes_back_after_it_had_finished() -> None:
    rig = running(replace(SAVING, on_worker_loss=LossPolicy.WAIT, rejoin_seconds=50.0))
    for step in (INITIAL_STEP, 0):
        make_step(rig, step)
    rig.hear(W0, Done(1))
    rig.hear(W1, Done(1))
    rig.hear(W1, join_of(W1, incarnation=AGAIN), AGAIN)
    rig.hear(PS, Saved(1, "shard", 1, "digest"))
    assert messages_to(rig.tell(CheckpointWritten(1)), W0, End) == []
    assert messages_to(rig.hear(W1, Done(1), AGAIN), W0, End) == [End(True, "", 1, NO_REASON)]


def test_a_server_saves_before_it_applies_anything_to_that_version() -> None:
    rig = ServerRig()
    rig.initialise()
    rig.say_rates(0)
    rig.say_rates(1)
    for step in (0, 1):
        rig.arrive(0, step)
        rig.arrive(1, step)
        if step == 0:
            rig.applied(0)
    effects = rig.hear(PS, Commit(0, save=True))
    assert [type(effect).__name__ for effect in effects] == ["SaveShard", "Apply"]
    assert only(effects, SaveShard) == [SaveShard(1, (0,))]
    assert rig.hear(PS, Commit(0, save=True)) == []
    saved = Saved(1, "shard-0", 10, "digest")
    assert rig.tell(ShardSaved(saved)) == [Send(PS, saved)]
    assert rig.hear(PS, Commit(0, save=True)) == [Send(PS, saved)]


# -- a worker that could not go on where it is --


def test_the_loss_of_a_worker_that_cannot_go_on_where_it_is_ends_the_job_with_its_reason() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    rig.hear(W0, LocalState(1, b"a"))
    rig.hear(W1, LocalState(1, b"", stuck="it plays dice"))
    rig.hear(PS, Applied(0))
    effects = rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    (end,) = messages_to(effects, W0, End)
    assert (end.ok, end.culprit) == (False, str(W1))
    assert end.reason.text == "was killed; it cannot rejoin: it plays dice"


def test_nothing_is_committed_that_would_take_its_last_good_step_from_a_lost_worker() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    rig.hear(W0, LocalState(1, b"a"))
    rig.hear(W1, LocalState(1, b"", stuck="it is between two steps"))
    rig.tell(PeerGone(W1, because("was killed"), life(W1)))
    assert rig.machine.end is None
    assert messages_to(rig.hear(PS, Applied(0)), PS, Commit) == []
    effects = rig.hear(W1, join_of(W1, incarnation=AGAIN), AGAIN)
    (view,) = messages_to(effects, W1, View)
    assert (view.start, view.state) == (0, b"")
    told = rig.hear(W1, LocalState(1, b"", stuck="it is between two steps"), AGAIN)
    assert messages_to(told, PS, Commit) == [Commit(0)]


def test_a_version_that_no_job_could_begin_with_is_not_saved_but_a_later_one() -> None:
    rig = running(RecoveryRules(save_steps=1))
    make_step(rig, INITIAL_STEP)
    rig.hear(W0, LocalState(1, b"", stuck="between"))
    rig.hear(W1, LocalState(1, b"", stuck="between"))
    assert messages_to(rig.hear(PS, Applied(0)), PS, Commit) == [Commit(0)]
    assert messages_to(make_step(rig, 1), PS, Commit) == [Commit(1, save=True)]


def test_the_coordinator_waits_for_a_state_by_name() -> None:
    rig = running(WAIT)
    make_step(rig, INITIAL_STEP)
    rig.hear(W0, LocalState(1, b"a"))
    rig.hear(PS, Applied(0))
    assert [(wait.on, waited_for(wait)) for wait in rig.machine.waits()] == [(W1, "its state before step 1")]
    rig.hear(W1, LocalState(1, b"b"))
    assert rig.machine.waits() == []


def test_a_state_may_be_told_after_the_seal() -> None:
    rig = WorkerRig(eager=False)
    rig.machine._tells_state = True
    rig.grant_and_open(0)
    rig.begin(0)
    effects = rig.tell(Sealed(0, (), (), state=None))
    assert messages_to(effects, PS, LocalState) == []
    assert messages_to(rig.tell(StateTaken(1, b"x")), PS, LocalState) == [LocalState(1, b"x")]
    rig.receive_version(1)
    rig.tell(StepBegun(1, ()))
    rig.tell(Sealed(1, (), (), state=None))
    assert messages_to(rig.tell(StateTaken(2, b"x")), PS, LocalState) == [LocalState(2, b"", same=True)]
    rig.receive_version(2)
    rig.tell(StepBegun(2, ()))
    rig.tell(Sealed(2, (), (), state=None))
    stuck = rig.tell(StateTaken(3, b"", "why"))
    assert messages_to(stuck, PS, LocalState) == [LocalState(3, b"", stuck="why")]


def test_a_worker_that_is_lost_after_it_has_finished_is_counted_as_done() -> None:
    rig = running(RecoveryRules())
    make_step(rig, INITIAL_STEP)
    rig.hear(W1, Done(0))
    assert rig.tell(PeerGone(W1, because("was killed"), life(W1))) == []
    (end,) = messages_to(rig.hear(W0, Done(0)), W0, End)
    assert end.ok
