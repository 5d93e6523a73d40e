"""The simulated links and transfers keep the promises that the runtime gives its machines, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from lockstep.protocol.core.events import Event, LinkLost, LinkUp, Received, TensorKind, TransferEnded
from lockstep.protocol.core.ids import ClusterShape, TaskId, server, worker
from lockstep.protocol.core.messages import Done
from lockstep.sim.agenda import Agenda
from lockstep.sim.memory import Cell, GradientTag
from lockstep.sim.network import Link, SimulatedNetwork
from lockstep.sim.rng import SeededRandom
from lockstep.sim.scenario import NetworkProfile, SecondsRange
from lockstep.sim.transfers import Copy, Lanes, Parcel, Route, SimulatedLoan

PS, W = server(0), worker(0)


@dataclass
class Wire:
    """One link between a server and a worker, and what each end was notified of."""

    network: SimulatedNetwork
    agenda: Agenda
    told: dict[TaskId, list[Event]] = field(default_factory=lambda: {PS: [], W: []})

    @property
    def link(self) -> Link:
        return self.network.link(PS, W)

    def run(self) -> None:
        while len(self.agenda):
            self.agenda.run_next()

    def received(self, task: TaskId) -> list[int]:
        return [
            event.message.steps
            for event in self.told[task]
            if isinstance(event, Received) and isinstance(event.message, Done)
        ]

    def route(self) -> Route:
        return Route(self.link, self.link.session, W, PS)


def wire(seed: int = 1, profile: NetworkProfile | None = None) -> Wire:
    agenda = Agenda()

    def deliver(task: TaskId, event: Event) -> None:
        made.told[task].append(event)

    network = SimulatedNetwork(
        ClusterShape(1, 1), profile or NetworkProfile(), SeededRandom(seed), agenda, deliver, {PS: 1, W: 2}
    )
    made = Wire(network, agenda)
    made.link.open()
    return made


def up(seed: int = 1, profile: NetworkProfile | None = None) -> Wire:
    made = wire(seed, profile)
    made.run()
    return made


def test_both_ends_are_told_that_the_link_is_up_with_the_life_of_the_other() -> None:
    made = up()
    assert made.told == {PS: [LinkUp(W, 2)], W: [LinkUp(PS, 1)]}


def test_a_message_to_a_link_that_is_not_up_is_dropped() -> None:
    made = wire()
    made.link.send(W, Done(1))
    made.run()
    assert made.received(PS) == []


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_told_before_the_link_is_up_at_that_end(seed: int) -> None:
    made = wire(seed, NetworkProfile(latency=SecondsRange(0.0, 1.0), in_order=False))
    sent = 0
    while len(made.agenda):
        made.agenda.run_next()
        if made.told[W] and not sent:
            sent = 1
            made.link.send(W, Done(1))
    assert made.told[PS] == [LinkUp(W, 2), Received(W, 2, Done(1))]


@pytest.mark.parametrize("in_order", [True, False])
def test_messages_keep_their_order_only_where_the_link_promises_it(in_order: bool) -> None:
    made = up(profile=NetworkProfile(latency=SecondsRange(0.0, 1.0), in_order=in_order))
    for number in range(20):
        made.link.send(W, Done(number))
    made.run()
    assert sorted(made.received(PS)) == list(range(20))
    assert (made.received(PS) == list(range(20))) is in_order


def test_messages_are_doubled_as_often_as_asked() -> None:
    made = up(profile=NetworkProfile(duplicate_chance=1.0))
    made.link.send(W, Done(1))
    made.run()
    assert made.received(PS) == [1, 1]
    assert made.network.traffic.doubled == 1


@pytest.mark.parametrize("seed", range(20))
def test_after_a_reset_each_end_is_told_once_and_the_link_comes_back(seed: int) -> None:
    made = up(seed, NetworkProfile(latency=SecondsRange(0.0, 1.0)))
    for number in range(20):
        made.link.send(W, Done(number))
    made.link.reset("cut")
    made.link.reset("cut again")
    made.run()
    for task, peer, life in ((PS, W, 2), (W, PS, 1)):
        links = [event for event in made.told[task] if not isinstance(event, Received)]
        assert links == [LinkUp(peer, life), LinkLost(peer, "cut"), LinkUp(peer, life)]
    assert made.network.traffic.lost == 20 - len(made.received(PS)) > 0


def test_nothing_of_a_session_arrives_in_the_next_one() -> None:
    made = up(profile=NetworkProfile(latency=SecondsRange(0.0, 5.0), in_order=False, reopen=SecondsRange(0.0, 0.0)))
    for number in range(50):
        made.link.send(W, Done(number))
    made.link.reset("cut")
    made.run()
    after = made.told[PS].index(LinkLost(W, "cut"))
    assert made.told[PS][after + 1 :] == [LinkUp(W, 2)]


def test_what_a_task_says_before_it_leaves_in_order_arrives_before_its_loss() -> None:
    made = up(profile=NetworkProfile(latency=SecondsRange(0.0, 5.0), in_order=False))
    for number in range(20):
        made.link.send(W, Done(number))
    made.link.close(W, "left", orderly=True)
    made.run()
    assert sorted(made.received(PS)) == list(range(20))
    assert made.told[PS][-1] == LinkLost(W, "left")
    assert made.told[W] == [LinkUp(PS, 1)]


def test_a_network_is_quiet_after_its_time() -> None:
    made = up(profile=NetworkProfile(duplicate_chance=1.0, reset_chance=1.0, late_chance=1.0, quiet_after=0.0))
    made.link.send(W, Done(1))
    made.run()
    assert made.received(PS) == [1]
    assert made.network.traffic.resets == 0
    assert made.agenda.now < 1.0


# -- transfers --


def tag(step: int) -> GradientTag:
    return GradientTag(W, 2, step, 0, 0)


def cell(content: GradientTag | None = None) -> Cell:
    return Cell(("gradient" if content else "inbox", W, 0, 0, None), [content, content])


def copy(made: Wire, step: int, source: Cell, target: Cell, lanes: Lanes, arrived: Callable[[], None]) -> Copy:
    started = Copy(made.network, made.route(), Parcel(TensorKind.GRADIENT, step, 0), source, target, lanes, arrived)
    started.start()
    return started


@pytest.mark.parametrize("torn", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_copies_into_the_same_bytes_land_in_the_order_in_which_they_were_started(seed: int, torn: bool) -> None:
    made = up(seed, NetworkProfile(latency=SecondsRange(0.0, 1.0), transfer_failure_chance=0.3, torn=torn))
    target, lanes = cell(), Lanes()
    delivered: list[int] = []
    for step in range(5):
        copy(made, step, cell(tag(step)), target, lanes, partial(delivered.append, step))
    made.run()
    ended = [event for event in made.told[W] if isinstance(event, TransferEnded)]
    assert sorted(event.number for event in ended) == list(range(5))
    assert sorted(event.number for event in ended if event.ok) == sorted(delivered)
    if delivered:
        assert target.whole() == tag(max(delivered))


def test_a_source_that_changes_on_the_way_arrives_torn() -> None:
    torn = 0
    for seed in range(30):
        made = up(seed, NetworkProfile(latency=SecondsRange(0.0, 1.0)))
        source, target = cell(tag(0)), cell()
        started = copy(made, 0, source, target, Lanes(), lambda: None)
        while started.reads:
            made.agenda.run_next()
            if made.agenda.now > 0.7:
                source.halves = [tag(1), tag(1)]
        made.run()
        torn += target.whole() is None
    assert 0 < torn < 30


def test_a_copy_over_a_link_that_breaks_is_neither_reported_nor_read_any_more() -> None:
    made = up(profile=NetworkProfile(latency=SecondsRange(0.5, 1.0)))
    arrived: list[int] = []
    started = copy(made, 0, cell(tag(0)), cell(), Lanes(), lambda: arrived.append(1))
    made.link.close(W, "killed", orderly=False)
    assert not started.reads
    made.run()
    assert arrived == []
    assert not any(isinstance(event, TransferEnded) for event in made.told[W])


@pytest.mark.parametrize("doubled", [False, True])
def test_a_loan_is_over_for_its_owner_when_all_of_it_is_released(doubled: bool) -> None:
    made = up(profile=NetworkProfile(duplicate_chance=1.0 if doubled else 0.0))
    lent: list[SimulatedLoan] = []
    SimulatedLoan(made.network, made.route(), Parcel(TensorKind.GRADIENT, 3, 0), cell(tag(3)), lent.append).start()
    made.run()
    assert len(lent) == 1 + doubled
    for loan in lent:
        assert not any(isinstance(event, TransferEnded) for event in made.told[W])
        loan.release()
    made.run()
    assert made.told[W][-1] == TransferEnded(PS, 3, 0, TensorKind.GRADIENT, ok=True)


def test_an_agenda_keeps_the_order_of_equal_times_and_never_goes_back() -> None:
    agenda = Agenda()
    seen: list[str] = []
    agenda.at(2.0, lambda: seen.append("second"))
    agenda.at(2.0, lambda: seen.append("third"))
    agenda.after(1.0, lambda: seen.append("first"))
    agenda.run_next()
    agenda.at(0.5, lambda: seen.append("late"))
    while len(agenda):
        agenda.run_next()
    assert seen == ["first", "late", "second", "third"]
    assert agenda.now == 2.0
    assert agenda.done == 4
