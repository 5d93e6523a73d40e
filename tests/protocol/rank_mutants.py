"""Defects that are planted into the machines of ranks that come back, one at a time. The search must find every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.rank_coordinator import RankCoordinator, RankSeats
from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.messages import Applied, Layout, Resolution
from lockstep.protocol.server.ledger import WorkerSide
from lockstep.protocol.server.rank_share import RankShareMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.holdings import ServerSide
from lockstep.protocol.worker.rank_machine import RankMachine


class RankMutant(NamedTuple):
    """``owner``'s ``attribute`` is ``defect`` while the search runs."""

    owner: type
    attribute: str
    defect: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.defect.__name__


_RESOLUTION = RankCoordinator._resolution
_ON_WORD = RankMachine._on_word


def does_not_send_again_to_a_next_incarnation(self: RankMachine, peer: ServerSide, now: float) -> None:
    return


def gives_the_word_when_shares_have_made_their_means(self: RankShareMachine) -> list[Any]:
    said = ServerMachine._unheard(self)
    return [replace(one, view=self._number) if isinstance(one, Applied) else one for one in said]


def steps_without_the_word(self: RankMachine, now: float) -> list[Effect]:
    if not self._has_every_mean():
        return []
    return _ON_WORD(self, self.step, now)


def commits_when_one_rank_has_its_means(self: RankCoordinator, now: float) -> list[Effect]:
    step = self.committed + 1
    if max(self._applied.values()) < step or not self._states_are_there(step):
        return self._end_if_possible(now)
    self.committed = step
    self._applied = dict.fromkeys(self._applied, step)
    return self._tell_homes() + self._end_if_possible(now)


def never_replays(self: RankCoordinator, task: TaskId, start: Step) -> bool:
    return False


def decisions_leave_out_the_states(self: RankCoordinator) -> Resolution | None:
    decided = _RESOLUTION(self)
    return None if decided is None else replace(decided, states=())


def deputy_forgets_the_states(self: RankCoordinator, held: Resolution) -> None:
    return


def the_next_incarnation_begins_where_the_chief_did(
    self: RankShareMachine, side: WorkerSide, layout: Layout, now: float
) -> list[Effect]:
    return ServerMachine._on_layout(self, side, layout, now)


def states_are_told_once(self: RankMachine, now: float) -> list[Effect]:
    return []


def decisions_do_not_wait_for_the_deputy(self: RankCoordinator, effects: list[Effect], now: float) -> list[Effect]:
    self._choose_deputy()
    self._decided = self._resolution()
    self._resolved += 1
    return self._say_resolution(now) + effects


def nobody_takes_over(self: DeputyMachine, now: float) -> None:
    return None


def a_lost_deputy_stays_the_deputy(self: RankSeats, task: TaskId, life: int) -> bool:
    return True


MUTANTS = (
    RankMutant(RankMachine, "_offer_again", does_not_send_again_to_a_next_incarnation),
    RankMutant(RankShareMachine, "_unheard", gives_the_word_when_shares_have_made_their_means),
    RankMutant(RankMachine, "_say_if_whole", steps_without_the_word),
    RankMutant(RankCoordinator, "_commit_if_complete", commits_when_one_rank_has_its_means),
    RankMutant(RankCoordinator, "_replays", never_replays),
    RankMutant(RankCoordinator, "_resolution", decisions_leave_out_the_states),
    RankMutant(RankCoordinator, "_take_states", deputy_forgets_the_states),
    RankMutant(RankShareMachine, "_on_layout", the_next_incarnation_begins_where_the_chief_did),
    RankMutant(RankMachine, "_tell_coordinator", states_are_told_once),
    RankMutant(RankCoordinator, "_held", decisions_do_not_wait_for_the_deputy),
    RankMutant(DeputyMachine, "take_over", nobody_takes_over),
    RankMutant(RankSeats, "lose", a_lost_deputy_stays_the_deputy),
)
