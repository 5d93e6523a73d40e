"""The list of all cases, and running them one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from lockstep.transports.base import TransportError
from lockstep.transports.conformance import ending, moving, refusing
from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.stage import NodeHosts, Stage


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """One rule that a transport must keep. A ``large`` one takes gigabytes of memory and runs only on request."""

    run: Callable[[Stage], None]
    large: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The outcome of one case; ``failure`` is empty if the transport kept the rule."""

    case: SuiteCase
    seconds: float
    failure: str


CASES: Final = (
    SuiteCase(moving.an_empty_write_delivers_its_note),
    SuiteCase(moving.tiny_and_odd_sizes_arrive_as_they_were),
    SuiteCase(moving.a_write_touches_no_byte_beside_its_range),
    SuiteCase(moving.sixty_four_mib_arrive_in_both_directions),
    SuiteCase(moving.more_than_two_gib_arrive, large=True),
    SuiteCase(moving.a_note_of_any_bytes_arrives_as_it_was),
    SuiteCase(moving.many_in_flight_in_both_directions_all_arrive),
    SuiteCase(moving.writes_into_the_same_bytes_land_in_the_order_of_the_calls),
    SuiteCase(moving.a_loan_is_settled_by_its_release_and_not_before),
    SuiteCase(moving.completions_may_come_out_of_order_and_keep_their_numbers),
    SuiteCase(moving.counters_of_both_ends_agree_crosswise),
    SuiteCase(moving.a_source_may_be_overwritten_once_it_was_told_as_sent),
    SuiteCase(moving.two_links_do_not_disturb_one_another),
    SuiteCase(moving.a_link_says_which_path_it_takes),
    SuiteCase(refusing.memory_that_cannot_be_moved_is_refused),
    SuiteCase(refusing.registered_memory_of_somebody_else_can_be_moved),
    SuiteCase(refusing.fresh_memory_is_zeroed_aligned_and_writable),
    SuiteCase(refusing.a_transfer_out_of_bounds_is_refused_at_the_call),
    SuiteCase(refusing.a_source_that_is_no_region_of_this_transport_is_refused),
    SuiteCase(refusing.a_ticket_of_another_transport_is_refused),
    SuiteCase(refusing.a_ticket_of_another_pair_reaches_no_memory),
    SuiteCase(refusing.a_life_that_ended_reaches_no_memory_with_its_ticket),
    SuiteCase(refusing.a_write_after_the_end_of_the_link_is_refused),
    SuiteCase(refusing.nobody_there_is_told_with_a_reason),
    SuiteCase(refusing.another_life_than_the_one_meant_is_refused_with_a_reason),
    SuiteCase(ending.closing_twice_and_from_a_callback_is_harmless),
    SuiteCase(ending.closing_settles_every_transfer_once),
    SuiteCase(ending.what_was_told_as_sent_still_arrives_after_close),
    SuiteCase(ending.nothing_lands_once_close_has_returned),
    SuiteCase(ending.nothing_lands_once_close_has_returned_to_a_callback),
    SuiteCase(ending.a_cancelled_transfer_is_told_once_and_delivered_only_if_it_was_told_as_sent),
    SuiteCase(ending.transfers_cancelled_in_the_middle_leave_the_link_intact),
    SuiteCase(ending.a_killed_peer_is_told_before_anything_is_written),
    SuiteCase(ending.a_peer_killed_in_the_middle_of_a_write_settles_it),
    SuiteCase(ending.a_writer_killed_in_the_middle_is_told_and_its_part_is_no_arrival),
    SuiteCase(ending.what_arrived_before_the_peer_was_killed_stays),
    SuiteCase(ending.a_frozen_peer_goes_on_when_it_is_resumed),
    SuiteCase(ending.a_clogged_receiver_blocks_no_call_and_fills_no_memory),
    SuiteCase(ending.links_that_come_and_go_leave_nothing_behind),
    SuiteCase(ending.a_peer_in_its_next_life_is_linked_anew),
    SuiteCase(ending.a_late_write_of_a_former_life_never_lands),
)


def run_case(case: SuiteCase, transport: str, hosts: NodeHosts) -> None:
    """Run one case; ``CaseFailed`` (or the transport's own error) says what went wrong."""
    with Stage(transport, hosts) as stage:
        case.run(stage)


def run_suite(
    transport: str, hosts: NodeHosts, *, large: bool, only: str = "", part: tuple[int, int] = (1, 1)
) -> Iterator[CaseOutcome]:
    """Run all cases whose names contain ``only``, and yield each outcome as it is known.

    ``part``: which part, of how many; several parts may run at the same time.
    """
    which, parts = part
    for case in CASES[which - 1 :: parts]:
        if only not in case.name or (case.large and not large):
            continue
        began = time.monotonic()
        failure = ""
        try:
            run_case(case, transport, hosts)
        except (CaseFailed, TransportError) as error:
            failure = f"{type(error).__name__}: {error}"
        yield CaseOutcome(case, time.monotonic() - began, failure)
