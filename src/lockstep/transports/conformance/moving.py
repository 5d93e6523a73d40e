"""Cases: bytes arrive, whole and in order, and both ends agree on what moved."""

from __future__ import annotations

import random

from lockstep.transports.base import Counters
from lockstep.transports.conformance.events import Heard
from lockstep.transports.conformance.stage import Pair, Stage, Way, require
from lockstep.transports.memory import MAX_NOTE_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _one_write(way: Way, nbytes: int, target_offset: int = 0) -> Heard:
    before = len(way.target.log.all("arrived"))
    transfer = way.write(0, nbytes, target_offset)
    heard = way.target.log.wait("arrived", before + 1)[before]
    way.check(heard, 0, nbytes)
    settled = way.source.log.wait_settled([transfer], way.source_link)
    require(settled[transfer] == "sent", f"a write of {nbytes} bytes arrived but was reported as failed")
    return heard


def an_empty_write_delivers_its_note(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(64)
    _one_write(way, 0)
    _one_write(way, 0, target_offset=64)


def tiny_and_odd_sizes_arrive_as_they_were(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(3 * MIB)
    for nbytes in (1, 2, 3, 7, 63, 64, 65, 4095, 4097, 65_537, MIB - 1, MIB, MIB + 1, 2 * MIB + 13):
        _one_write(way, nbytes, target_offset=nbytes % 61)


def a_write_touches_no_byte_beside_its_range(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(2 * MIB + 100)
    pair.b.fill(way.target_region, 0, 2 * MIB + 100, 77)
    before = pair.b.digest(way.target_region, 0, 37), pair.b.digest(way.target_region, MIB + 38, MIB + 62)
    _one_write(way, MIB + 1, target_offset=37)
    after = pair.b.digest(way.target_region, 0, 37), pair.b.digest(way.target_region, MIB + 38, MIB + 62)
    require(before == after, "bytes outside the target range have changed")


def sixty_four_mib_arrive_in_both_directions(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    _one_write(pair.way(64 * MIB), 64 * MIB)
    _one_write(pair.way_back(64 * MIB), 64 * MIB)


def more_than_two_gib_arrive(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    nbytes = 2 * GIB + 4 * KIB + 13
    way = pair.way(nbytes)
    transfer = way.write(0, nbytes, 0)
    way.check(way.target.log.wait("arrived", seconds=300.0)[0], 0, nbytes)
    require(pair.a.log.wait_settled([transfer])[transfer] == "sent", "it arrived but was reported as failed")


def a_note_of_any_bytes_arrives_as_it_was(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(64)
    for tail in (b"", bytes(range(256)), b"\0" * 100, bytes(MAX_NOTE_BYTES - 24)):
        before = len(pair.b.log.all("arrived"))
        way.write(0, 8, 0, tail)
        note = pair.b.log.wait("arrived", before + 1)[before].note
        require(note[24:] == tail, f"a note of {len(tail) + 24} bytes arrived changed")


def many_in_flight_in_both_directions_all_arrive(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    slot, slots = 300 * KIB, 64
    ways = [pair.way(slot * slots), pair.way_back(slot * slots)]
    rng = random.Random(7)
    sizes = [rng.choice((0, 1, 999, 65_536, slot)) for _ in range(slots)]
    sent = [[way.write(i * slot, size, i * slot) for i, size in enumerate(sizes)] for way in ways]
    for way, transfers in zip(ways, sent, strict=True):
        arrived = way.target.log.wait("arrived", slots, seconds=60.0)
        require(len(arrived) == slots, f"{slots} writes were sent, {len(arrived)} arrived")
        for i, size in enumerate(sizes):
            way.check(arrived[i], i * slot, size)
        outcome = way.source.log.wait_settled(transfers, way.source_link)
        require(set(outcome.values()) == {"sent"}, f"writes that arrived were reported as {set(outcome.values())}")


def writes_into_the_same_bytes_land_in_the_order_of_the_calls(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(64 * 96 * KIB)
    for i in range(64):
        way.write(i * 96 * KIB, 96 * KIB, 0, bytes([i]))
    arrived = pair.b.log.wait("arrived", 64)
    order = [heard.note[24] for heard in arrived]
    require(order == list(range(64)), f"notes arrived in the order {order}")
    last = pair.a.digest(way.source_region, 63 * 96 * KIB, 96 * KIB)
    require(pair.b.digest(way.target_region, 0, 96 * KIB) == last, "an earlier write landed after a later one")


def a_loan_is_settled_by_its_release_and_not_before(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(2 * MIB)
    loan = way.lend(0, 2 * MIB, 0)
    way.check(pair.b.log.wait("lent")[0], 0, 2 * MIB)
    after = way.write(0, 0, 0)  # a write after the loan shows that the lender has had time to be notified
    pair.a.log.wait_settled([after])
    require(
        not [h for h in pair.a.log.all("sent") if h.transfer == loan], "a loan was reported as sent before its release"
    )
    pair.b.release(0)
    pair.b.release(0)
    require(pair.a.log.wait_settled([loan])[loan] == "sent", "a released loan was reported as failed")
    pair.a.close_link(pair.a_link)
    pair.b.release(0)
    require(len(pair.a.log.all("sent")) == 2, "a second release of a loan was reported again")


def completions_may_come_out_of_order_and_keep_their_numbers(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(8 * 64 * KIB)
    loans = [way.lend(i * 64 * KIB, 64 * KIB, i * 64 * KIB, bytes([i])) for i in range(8)]
    write = way.write(0, 10, 0)
    pair.b.log.wait("lent", 8)
    pair.a.log.wait_settled([write])
    for i in reversed(range(8)):
        pair.b.release(i)
    pair.a.log.wait_settled(loans)
    order = [h.transfer for h in pair.a.log.all("sent") if h.transfer in loans]
    require(order == loans[::-1], f"loans {loans} were released backwards but reported in the order {order}")


def counters_of_both_ends_agree_crosswise(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    there, back = pair.way(4 * MIB), pair.way_back(4 * MIB)
    transfers = [there.write(0, size, 0) for size in (0, 1, 1000, 3 * MIB)]
    transfers.append(there.lend(0, 5000, 0))
    returns = [back.write(0, size, 0) for size in (2 * MIB, 17)]
    pair.b.log.wait("lent")
    pair.b.release(0)
    pair.a.log.wait_settled(transfers)
    pair.b.log.wait_settled(returns)
    pair.b.log.wait("arrived", 4)
    pair.a.log.wait("arrived", 2)
    a, b = pair.a.counters(pair.a_link), pair.b.counters(pair.b_link)
    sent, returned = 3 * MIB + 1001 + 5000, 2 * MIB + 17
    require(a == Counters(sent, 4, returned, 2, 1, 0), f"the dialer counted {a}")
    require(b == Counters(returned, 2, sent, 4, 0, 1), f"the acceptor counted {b}")


def a_source_may_be_overwritten_once_it_was_told_as_sent(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    way = pair.way(8 * MIB)
    expected = pair.a.digest(way.source_region, 0, 8 * MIB)
    transfer = way.write(0, 8 * MIB, 0)
    pair.a.log.wait_settled([transfer])
    pair.a.fill(way.source_region, 0, 8 * MIB, 99)
    require(pair.b.log.wait("arrived")[0].digest == expected, "bytes written after 'sent' reached the peer")


def two_links_do_not_disturb_one_another(stage: Stage) -> None:
    pair = stage.pair()
    third = stage.node("/suite/c")
    a_link, c_link = stage.join(pair.a, third)
    other = Pair(pair.a, a_link, third, c_link)
    way, other_way = pair.way(MIB), other.way(MIB, seed=5)
    _one_write(way, MIB)
    pair.a.close_link(pair.a_link)
    _one_write(other_way, MIB)
    require(pair.a.state(a_link) == "up", "closing one link has ended another one")


def a_link_says_which_path_it_takes(stage: Stage) -> None:
    pair = stage.pair()
    for node, link in ((pair.a, pair.a_link), (pair.b, pair.b_link)):
        require(0 < len(node.path(link)) < 200, "a link does not describe its path in a few words")
