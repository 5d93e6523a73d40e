"""The membership of one task: joining, giving up, leaving."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.reasons import because
from lockstep.protocol.core.causes import NO_REASON, Cause
from lockstep.protocol.core.effects import BecameMember, JobEnded, Send, StillMissing
from lockstep.protocol.core.events import Broken, Finished, LinkLost, LinkUp, PeerGone, Tick
from lockstep.protocol.core.ids import INITIAL_STEP, server, worker
from lockstep.protocol.core.messages import Done, End, Failed, Lost, Member, MissingTask, Refused, Roster, View
from lockstep.protocol.core.placement import Homes
from lockstep.protocol.core.timing import HEADLESS_SECONDS, REPEAT_SECONDS
from lockstep.protocol.member import MEMBER_PHASE_TRANSITIONS, MemberPhase, MemberPhaseTrigger
from lockstep.protocol.phrases import waited_for
from protocol.protocol_rigs import MemberRig, join_of, life, only

PS, ME = server(0), worker(1)
UP = LinkUp(PS, life(PS))
LOST = LinkLost(PS, "reset")
VIEW = View(77, 1, (Member(str(PS), life(PS)),))
END = End(True, "", 20, NO_REASON)
MISSING = MissingTask(str(worker(0)), "10.0.0.1:5000", "connection refused", 9.0, 4)

TRIGGERS: dict[MemberPhaseTrigger, Callable[[MemberRig], object]] = {
    MemberPhaseTrigger.LINK_UP: lambda rig: rig.tell(UP),
    MemberPhaseTrigger.LINK_LOST: lambda rig: rig.tell(LOST),
    MemberPhaseTrigger.VIEW: lambda rig: rig.hear(PS, VIEW),
    MemberPhaseTrigger.END: lambda rig: rig.hear(PS, END),
}
NO_ANSWER = "did not answer a request to join within 300 s"


def in_phase(phase: MemberPhase) -> MemberRig:
    rig = MemberRig()
    if phase is not MemberPhase.OUTSIDE:
        rig.tell(UP)
    if phase is MemberPhase.MEMBER:
        rig.hear(PS, VIEW)
    assert rig.machine.phase is phase
    return rig


@pytest.mark.parametrize(("pair", "after"), MEMBER_PHASE_TRANSITIONS.items(), ids=lambda value: str(value))
def test_every_row_of_the_table_can_be_walked(pair: tuple[MemberPhase, MemberPhaseTrigger], after: MemberPhase) -> None:
    before, trigger = pair
    rig = in_phase(before)
    TRIGGERS[trigger](rig)
    assert rig.machine.phase is after


def test_a_task_joins_when_the_coordinator_can_be_reached_and_repeats_it_until_the_view_comes() -> None:
    rig = MemberRig()
    join = Send(PS, join_of(ME))
    assert rig.tell(UP) == [join]
    rig.now += REPEAT_SECONDS
    assert rig.tell(Tick()) == [join]
    assert rig.hear(PS, VIEW) == [BecameMember(77, VIEW.members)]
    assert rig.hear(PS, VIEW) == []
    assert rig.machine.next_deadline() is None


def test_links_to_others_than_the_coordinator_do_not_matter_here() -> None:
    rig = MemberRig()
    assert rig.tell(LinkUp(server(1), 5)) == []
    assert rig.tell(LinkLost(server(1), "reset")) == []
    assert rig.hear(server(1), END, incarnation=5) == []
    assert rig.machine.phase is MemberPhase.OUTSIDE


def test_who_is_missing_is_passed_on_while_joining() -> None:
    rig = in_phase(MemberPhase.JOINING)
    assert rig.hear(PS, Roster((MISSING,))) == [StillMissing((MISSING,))]
    rig.hear(PS, VIEW)
    assert rig.hear(PS, Roster((MISSING,))) == []


def test_a_task_that_cannot_reach_the_coordinator_in_time_names_it() -> None:
    rig = MemberRig(seconds=300.0)
    assert rig.machine.next_deadline() == 400.0
    rig.now = 400.0
    assert rig.tell(Tick()) == [
        JobEnded(False, str(PS), INITIAL_STEP, because("could not be reached within 300 s", Cause.NEVER_STARTED))
    ]
    assert rig.machine.next_deadline() is None


def test_a_coordinator_that_never_answers_is_named() -> None:
    rig = in_phase(MemberPhase.JOINING)
    rig.now = 400.0
    assert only(rig.tell(Tick()), JobEnded) == [
        JobEnded(
            False, str(PS), INITIAL_STEP, because("did not answer a request to join within 300 s", Cause.COMMUNICATION)
        )
    ]


def test_a_cluster_that_is_not_complete_in_time_ends_with_the_names_of_the_missing_tasks_for_everybody() -> None:
    rig = in_phase(MemberPhase.JOINING)
    rig.now = 399.0
    rig.hear(PS, Roster((MISSING,)))
    rig.now = 400.0
    reason = "the cluster was not complete after 300 s; missing: worker 0 at 10.0.0.1:5000 (connection refused)"
    assert rig.tell(Tick()) == [
        Send(PS, Failed(str(worker(0)), INITIAL_STEP, because(reason, Cause.NEVER_STARTED))),
        JobEnded(False, str(worker(0)), INITIAL_STEP, because(reason, Cause.NEVER_STARTED)),
    ]


def test_a_coordinator_that_has_fallen_silent_is_named_and_not_whom_it_once_missed() -> None:
    rig = in_phase(MemberPhase.JOINING)
    rig.hear(PS, Roster((MISSING,)))
    rig.now = 400.0
    assert only(rig.tell(Tick()), JobEnded) == [
        JobEnded(
            False, str(PS), INITIAL_STEP, because("did not answer a request to join within 300 s", Cause.COMMUNICATION)
        )
    ]


def test_a_member_does_not_give_up_at_the_startup_timeout() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    rig.now = 1000.0
    assert rig.tell(Tick()) == []


def test_a_refused_task_ends_with_the_reason() -> None:
    rig = in_phase(MemberPhase.JOINING)
    assert rig.hear(PS, Refused(because("already taken"))) == [
        JobEnded(False, str(ME), INITIAL_STEP, because("already taken"))
    ]


def test_a_finished_worker_says_so_until_the_job_ends() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    done = Send(PS, Done(20))
    assert rig.tell(Finished(20)) == [done]
    rig.now += REPEAT_SECONDS
    assert rig.tell(Tick()) == [done]
    rig.tell(LOST)
    assert rig.machine.next_deadline() is None
    assert rig.tell(UP) == [done]
    assert [waited_for(wait) for wait in rig.machine.waits()] == ["the end of the job"]
    assert rig.hear(PS, END) == [JobEnded(True, "", 20, NO_REASON)]
    assert rig.machine.waits() == []


def test_a_broken_task_tells_the_coordinator_once_and_repeats_it() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    failed = Send(PS, Failed(str(ME), 4, because("out of memory")))
    assert rig.tell(Broken(ME, 4, because("out of memory"))) == [failed]
    assert rig.tell(Broken(ME, 4, because("and something that follows from it"))) == []
    rig.now += REPEAT_SECONDS
    assert rig.tell(Tick()) == [failed]


def test_a_broken_task_without_a_coordinator_ends_by_itself() -> None:
    rig = MemberRig()
    assert rig.tell(Broken(ME, 0, because("no memory"))) == [
        JobEnded(False, str(ME), INITIAL_STEP, because("no memory"))
    ]


def test_the_death_of_a_peer_is_told_to_the_coordinator() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    gone = PeerGone(worker(0), because("was killed by signal 9"))
    (sent,) = only(rig.tell(gone), Send)
    assert sent.message == Lost(str(worker(0)), 0, because("was killed by signal 9"))
    rig.now += REPEAT_SECONDS
    assert rig.tell(Tick()) == [sent]


def test_without_its_coordinator_nobody_can_decide_and_the_task_ends() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    assert rig.tell(PeerGone(PS, because("gone"))) == [JobEnded(False, str(PS), INITIAL_STEP, because("gone"))]


def test_a_coordinator_that_began_anew_after_the_loss_of_a_server_is_not_blamed_for_it() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    rig.tell(PeerGone(worker(0), because("left")))
    rig.tell(PeerGone(server(1), because("was killed by SIGKILL")))
    ended = JobEnded(False, str(server(1)), INITIAL_STEP, because("was killed by SIGKILL"))
    assert rig.tell(PeerGone(PS, because("was started again"))) == [ended]


# -- with second homes: server 1 is the deputy --

GONE, DEPUTY_GONE = (PeerGone(task, because("was killed by signal 9"), life(task)) for task in (PS, server(1)))


@pytest.mark.parametrize("returns", [False, True], ids=["without checkpoints", "with checkpoints"])
def test_the_late_end_of_a_former_coordinator_does_not_count_once_the_next_is_here(returns: bool) -> None:
    rig = MemberRig(deputy=server(1), returns=returns)
    rig.tell(UP)
    rig.tell(LOST)
    assert rig.tell(LinkUp(PS, 99)) == [Send(PS, join_of(ME))]
    assert rig.tell(GONE) == []
    rig.now += HEADLESS_SECONDS + 1
    assert rig.tell(Tick()) == [Send(PS, join_of(ME))]


def test_the_late_end_of_a_former_server_does_not_count_once_its_next_incarnation_leads_the_job() -> None:
    """It ended while the cluster formed; the next one was the deputy, and took over."""
    rig = MemberRig(deputy=server(1))
    rig.tell(LinkUp(server(1), 99))
    members = (Member(str(server(1)), 99), Member(str(ME), life(ME)))
    leads = Homes(1, 0, whole=False)
    view = View(1, 2, members, INITIAL_STEP, shards=(leads, leads), decisions=(leads,))
    rig.machine.follow(server(1), 99, view)
    assert len(only(rig.hear(server(1), view), BecameMember)) == 1
    assert rig.tell(PeerGone(server(1), because("was killed by signal 9"), life(server(1)))) == []


@pytest.mark.parametrize("order", [(GONE, DEPUTY_GONE), (DEPUTY_GONE, GONE)], ids=["coordinator first", "deputy first"])
def test_while_the_cluster_forms_both_servers_may_be_started_again(order: tuple[PeerGone, PeerGone]) -> None:
    rig = MemberRig(deputy=server(1))
    rig.tell(UP)
    rig.tell(LOST)
    assert [rig.tell(event) for event in order] == [[], []]
    assert Send(PS, join_of(ME)) in rig.tell(LinkUp(PS, 99))
    rig.now += HEADLESS_SECONDS + 1
    assert not any(isinstance(effect, JobEnded) for effect in rig.tell(Tick()))


@pytest.mark.parametrize("seconds", [300.0, 10.0], ids=["in half a minute", "at the end of the start"])
def test_a_coordinator_that_does_not_come_back_is_named_with_its_end(seconds: float) -> None:
    rig = MemberRig(seconds=seconds, deputy=server(1))
    rig.tell(UP)
    rig.tell(LOST)
    rig.tell(GONE)
    rig.tell(DEPUTY_GONE)
    rig.now += min(HEADLESS_SECONDS, seconds)
    assert rig.tell(Tick()) == [JobEnded(False, str(PS), INITIAL_STEP, GONE.reason)]


def test_nothing_happens_after_the_end() -> None:
    rig = in_phase(MemberPhase.MEMBER)
    rig.hear(PS, END)
    for event in (UP, LOST, Tick(), Finished(20), Broken(ME, 0, NO_REASON), PeerGone(PS, NO_REASON)):
        assert rig.tell(event) == []
    assert rig.hear(PS, End(False, str(ME), 0, because("late"))) == []


def test_a_wait_names_the_coordinator() -> None:
    assert [waited_for(wait) for wait in MemberRig().machine.waits()] == ["a connection"]
    assert [waited_for(wait) for wait in in_phase(MemberPhase.JOINING).machine.waits()] == [
        "the cluster to be complete"
    ]
    assert in_phase(MemberPhase.MEMBER).machine.waits() == []
