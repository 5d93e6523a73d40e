"""Defects that are planted into the machines with second homes, one at a time. The search must find every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.coordinator.running_job import RunningJob
from lockstep.protocol.coordinator.saving import Saving
from lockstep.protocol.coordinator.server_losses import ServerLosses
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Apply, CopyBucket, Effect, GiveBack, Send
from lockstep.protocol.core.events import Event, LinkLost, MeanArrived, PeerGone, Served
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import (
    BucketCopy,
    Holding,
    KeptCall,
    PartialNorm,
    Resolution,
    ResolutionHeld,
    SecondWhole,
    View,
)
from lockstep.protocol.core.placement import Placement
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.handing_on import HandingOn
from lockstep.protocol.server.homed_machine import HomedServerMachine
from lockstep.protocol.server.ledger import Ledger
from lockstep.protocol.server.second_homes import HandedBucket, Places
from lockstep.protocol.server.second_shard import SecondShard
from lockstep.protocol.server.step_norm import StepNorm
from lockstep.protocol.task import TaskMachine
from lockstep.protocol.worker.questions import Questions
from lockstep.protocol.worker.worker_machine import WorkerMachine
from lockstep.sim.replicas.stores import Stores

from .searches import Part


class ReplicaMutant(NamedTuple):
    """``owner``'s ``attribute`` is ``defect`` while the search runs."""

    owner: type
    attribute: str
    defect: Callable[..., Any] | property
    part: Part = Part.KILL
    """The search that finds it soon."""

    @property
    def name(self) -> str:
        defect = self.defect.fget if isinstance(self.defect, property) else self.defect
        return str(getattr(defect, "__name__", defect))


_RIGHT: dict[str, Callable[..., Any]] = {
    "say_resolution": HomedCoordinator._say_resolution,
    "deputy": DeputyMachine.handle,
    "resolution": HomedCoordinator._resolution,
    "made": SecondShard._make_next,
    "link_lost": HandingOn.on_link_lost,
    "holding": HandingOn.on_holding,
    "on_resolution": DeputyMachine._on_resolution,
    "copy": Stores.copy,
    "begin": HandingOn.begin,
    "peer_gone": MemberMachine._on_peer_gone,
    "end": MemberMachine._end,
    "on_copy": SecondShard.on_copy,
}


def does_not_wait_for_the_second_home(self: HandingOn, bucket: int) -> bool:
    return False


def deputy_takes_over_when_a_link_is_lost(self: DeputyMachine, event: Event, now: float) -> list[Effect]:
    if isinstance(event, LinkLost):
        event = PeerGone(event.peer, Reason(Cause.DEAD, event.reason))
    effects: list[Effect] = _RIGHT["deputy"](self, event, now)
    return effects


def decisions_do_not_wait_for_the_deputy(self: HomedCoordinator, effects: list[Effect], now: float) -> list[Effect]:
    freed, decided = self._choose_deputy(), self._resolution()
    if decided == self._decided:
        return freed + effects
    self._decided = decided
    self._resolved += 1
    return freed + self._say_resolution(now) + effects


def decisions_leave_out_states(self: HomedCoordinator) -> Resolution | None:
    made: Resolution | None = _RIGHT["resolution"](self)
    return None if made is None else replace(made, states=())


def decisions_overtake_what_they_belong_to(self: HomedCoordinator, now: float) -> list[Effect]:
    said: list[Send] = _RIGHT["say_resolution"](self, now)
    return [replace(one, overtakes=isinstance(one.message, Resolution) and not one.message.joins) for one in said]


def deputy_keeps_only_the_first_decision(
    self: DeputyMachine, coordinator: TaskId, told: Resolution, now: float
) -> list[Effect]:
    if self.held is not None:
        return [Send(coordinator, ResolutionHeld(told.number))]
    effects: list[Effect] = _RIGHT["on_resolution"](self, coordinator, told, now)
    return effects


def second_home_confirms_what_it_has_not(self: SecondShard, event: MeanArrived, now: float) -> list[Effect]:
    return [GiveBack(event.arrival), Send(event.peer, Holding(event.bucket, event.step + 1))]


def second_home_makes_it_with_other_rates(self: SecondShard, bucket: int, now: float) -> list[Effect]:
    made = _RIGHT["made"](self, bucket, now)
    return [replace(one, rates=()) if isinstance(one, Apply) else one for one in made]


def second_home_makes_it_from_the_start_again(self: HomedServerMachine, bucket: int) -> list[Effect]:
    self._seconds.buckets.pop(bucket, None)
    return _be_home(self, bucket)


_be_home = HomedServerMachine._be_home


def is_called_whole_too_soon(self: HandingOn, coordinator: TaskId, committed: int) -> list[Effect]:
    mine = [(n, homes) for n, homes in enumerate(self._places.placement.shards) if homes.home == self._task.index]
    lacking = [n for n, homes in mine if homes.second_task is not None and not homes.whole]
    return [Send(coordinator, SecondWhole(n, self._places.view)) for n in lacking]


def shards_are_not_saved_anew(self: HomedServerMachine) -> None:
    return None


def checkpoint_waits_for_who_is_lost(self: Saving, savers: Any, view: int, now: float) -> bool:
    return False


def what_was_saved_in_a_former_view_counts(self: HomedServerMachine) -> list[Effect]:
    return [] if self._saved is None else [Send(self.coordinator, replace(self._saved, view=1 << 20))]


def old_views_count(self: Places, view: View) -> bool:
    if not view.shards:
        return False
    self.view, self.placement = view.number, Placement(view.shards, view.decisions[0])
    return True


def nobody_follows_the_deputy(self: MemberMachine, peer: TaskId, life: int, view: View) -> None:
    return None


def strangers_are_not_told(self: TaskMachine, coordinator: HomedCoordinator) -> list[Effect]:
    return []


def workers_send_nothing_again(self: WorkerMachine, *_: Any) -> list[Effect]:
    return []


def means_are_overwritten_on_their_way(self: HandingOn, bucket: int) -> bool:
    return True


def copies_are_of_no_use(self: ServerLosses, task: TaskId) -> None:
    """A server that comes back is the second home of nothing, and yet whole."""
    self._alive.add(task.index)
    after = self.placement.after(frozenset(self._alive))
    assert after is not None
    self.placement = Placement(tuple(replace(h, whole=True) for h in after.shards), after.coordination)


def copies_have_no_optimizer_state(self: Stores, name: TaskId, effect: CopyBucket) -> None:
    memory = self._world.tasks[name].store
    memory.momentum, kept = {}, memory.momentum
    _RIGHT["copy"](self, name, effect)
    memory.momentum = kept


def takes_over_in_the_middle_of_an_update(self: HomedServerMachine, view: View) -> bool:
    """What it holds, and has not made, is forgotten."""
    return False


def means_are_overwritten_after_a_cut(self: HandingOn, second: TaskId) -> None:
    _RIGHT["link_lost"](self, second)
    for handed in self._handed.values():
        handed.lent = False


def second_home_says_too_soon_that_it_reads_no_more(self: HandingOn, ledger: Ledger, said: Holding) -> bool:
    return bool(_RIGHT["holding"](self, ledger, replace(said, reads=False)))


def nobody_compares_homes(self: HandedBucket) -> bool:
    return False


def the_late_end_of_a_former_coordinator_counts(self: MemberMachine, event: PeerGone) -> bool:
    return False


def the_late_end_of_a_former_coordinator_counts_for_members(self: MemberMachine, event: PeerGone) -> bool:
    is_it = event.peer == self.coordinator and event.incarnation not in (0, self._coordinator_life)
    return is_it and self._linked and not self._view


def the_loss_of_both_servers_ends_a_cluster_that_forms(
    self: MemberMachine, event: PeerGone, now: float
) -> list[Effect]:
    """As it does in a job, where nobody is left that holds the decisions."""
    self._view, view = self._view or 1, self._view
    effects: list[Effect] = _RIGHT["peer_gone"](self, event, now)
    self._view = view
    return effects


def nobody_goes_back(self: MemberMachine, *ending: Any, **told: Any) -> list[Effect]:
    effects: list[Effect] = _RIGHT["end"](self, *ending, **(told | {"again": False}))
    return effects


# -- what programs of the library need --


def parameters_without_gradients_are_not_handed_on(self: HandingOn, apply: Apply) -> Apply:
    return _hands_on_other(self, apply, without=())


def that_values_are_published_is_not_handed_on(self: HandingOn, apply: Apply) -> Apply:
    return _hands_on_other(self, apply, values=False)


def _hands_on_other(self: HandingOn, apply: Apply, **other: Any) -> Apply:
    made: Apply = _RIGHT["begin"](self, apply)
    handed = self._handed[apply.bucket]
    assert handed.update is not None
    handed.update = replace(handed.update, **other)
    return made


def answers_to_calls_are_told_before_they_are_held(self: HomedCoordinator) -> Resolution | None:
    made: Resolution | None = _RIGHT["resolution"](self)
    return None if made is None else replace(made, calls=0)


def deputy_forgets_calls(self: DeputyMachine, call: KeptCall) -> None:
    self._calls.complete = call.number


def norms_are_added_up_by_server(self: StepNorm, change: int, shard_of: Any) -> PartialNorm | None:
    return self.partial(change)


def norms_of_former_views_count(self: RunningJob) -> int:
    return 0


def seals_do_not_hold_for_what_was_taken_over(self: HomedServerMachine, now: float) -> list[Effect]:
    return []


def nobody_else_is_asked(self: Questions, home_of: Any, view: int, now: float) -> list[Effect]:
    return []


def second_home_does_not_get_what_was_loaded(self: HomedServerMachine, event: Served) -> list[Effect]:
    return [Send(event.peer, event.answer)]


def loaded_is_said_before_the_second_home_has_it(self: HandingOn, bucket: int) -> bool:
    return False


def copies_of_what_was_loaded_are_refused(self: SecondShard, home: TaskId, part: BucketCopy) -> list[Effect]:
    if self.is_home(home, part.bucket) and part.version == self.buckets[part.bucket].version:
        return [Send(home, Holding(part.bucket, part.version, edition=part.edition))]
    effects: list[Effect] = _RIGHT["on_copy"](self, home, part)
    return effects


def the_end_of_a_former_incarnation_counts(self: RunningJob, worker: TaskId) -> None:
    """Its next one is told of the end before it has the last version."""


MUTANTS = (
    ReplicaMutant(HandingOn, "waits_for_second", does_not_wait_for_the_second_home),
    ReplicaMutant(DeputyMachine, "handle", deputy_takes_over_when_a_link_is_lost, Part.CUT),
    ReplicaMutant(HomedCoordinator, "_held", decisions_do_not_wait_for_the_deputy),
    ReplicaMutant(HomedCoordinator, "_resolution", decisions_leave_out_states, Part.TWO),
    ReplicaMutant(HomedCoordinator, "_say_resolution", decisions_overtake_what_they_belong_to, Part.LIBRARY),
    ReplicaMutant(DeputyMachine, "_on_resolution", deputy_keeps_only_the_first_decision),
    ReplicaMutant(SecondShard, "on_mean", second_home_confirms_what_it_has_not),
    ReplicaMutant(SecondShard, "_make_next", second_home_makes_it_with_other_rates),
    ReplicaMutant(HomedServerMachine, "_be_home", second_home_makes_it_from_the_start_again),
    ReplicaMutant(HandingOn, "say_if_whole", is_called_whole_too_soon),
    ReplicaMutant(HomedServerMachine, "_save_anew", shards_are_not_saved_anew, Part.SAVE),
    ReplicaMutant(Saving, "change_savers", checkpoint_waits_for_who_is_lost, Part.SAVE),
    ReplicaMutant(HomedServerMachine, "_say_saved", what_was_saved_in_a_former_view_counts, Part.SAVE),
    ReplicaMutant(RunningJob, "_await_again", the_end_of_a_former_incarnation_counts, Part.LATE),
    ReplicaMutant(Places, "take", old_views_count),
    ReplicaMutant(MemberMachine, "follow", nobody_follows_the_deputy),
    ReplicaMutant(TaskMachine, "_tell_strangers", strangers_are_not_told, Part.TWO),
    ReplicaMutant(WorkerMachine, "_move", workers_send_nothing_again),
    ReplicaMutant(HandingOn, "may_make_next", means_are_overwritten_on_their_way),
    ReplicaMutant(ServerLosses, "come_back", copies_are_of_no_use),
    ReplicaMutant(Stores, "copy", copies_have_no_optimizer_state, Part.AGAIN),
    ReplicaMutant(HomedServerMachine, "_has_to_make_before", takes_over_in_the_middle_of_an_update),
    ReplicaMutant(HandingOn, "on_link_lost", means_are_overwritten_after_a_cut, Part.CUT),
    ReplicaMutant(HandingOn, "on_holding", second_home_says_too_soon_that_it_reads_no_more, Part.CUT),
    ReplicaMutant(HandedBucket, "differs", property(nobody_compares_homes), Part.DRIFT),
    ReplicaMutant(MemberMachine, "_is_former_coordinator", the_late_end_of_a_former_coordinator_counts, Part.FORMING),
    ReplicaMutant(
        MemberMachine,
        "_is_former_coordinator",
        the_late_end_of_a_former_coordinator_counts_for_members,
        Part.FORMING,
    ),
    ReplicaMutant(MemberMachine, "_on_peer_gone", the_loss_of_both_servers_ends_a_cluster_that_forms, Part.FORMING),
    ReplicaMutant(MemberMachine, "_end", nobody_goes_back, Part.SAVE_TWO),
    ReplicaMutant(HandingOn, "begin", parameters_without_gradients_are_not_handed_on, Part.LIBRARY),
    ReplicaMutant(HandingOn, "begin", that_values_are_published_is_not_handed_on, Part.LIBRARY),
    ReplicaMutant(HomedCoordinator, "_resolution", answers_to_calls_are_told_before_they_are_held, Part.LIBRARY),
    ReplicaMutant(DeputyMachine, "_on_call", deputy_forgets_calls, Part.LIBRARY),
    ReplicaMutant(StepNorm, "partial_by_shard", norms_are_added_up_by_server, Part.LIBRARY),
    ReplicaMutant(RunningJob, "_norm_change", property(norms_of_former_views_count), Part.LIBRARY),
    ReplicaMutant(HomedServerMachine, "_take_in_seals", seals_do_not_hold_for_what_was_taken_over, Part.LIBRARY),
    ReplicaMutant(Questions, "ask_homes", nobody_else_is_asked, Part.LIBRARY),
    ReplicaMutant(HomedServerMachine, "_on_served", second_home_does_not_get_what_was_loaded, Part.LIBRARY),
    ReplicaMutant(HandingOn, "lags", loaded_is_said_before_the_second_home_has_it, Part.LIBRARY),
    ReplicaMutant(SecondShard, "on_copy", copies_of_what_was_loaded_are_refused, Part.LIBRARY),
)
