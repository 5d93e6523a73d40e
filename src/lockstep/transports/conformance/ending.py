"""Cases: closing, cancelling, and peers that die, freeze or come back in another incarnation."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import psutil

from lockstep.protocol.core.timing import PROMISE_SECONDS
from lockstep.transports.base import LinkDownError
from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.stage import Pair, RemoteVictim, Stage, Way, require, wait_until

KIB, MIB = 1 << 10, 1 << 20


def closing_twice_and_from_a_callback_is_harmless(stage: Stage) -> None:
    pair = stage.pair()
    pair.b.close_link_when("arrived")
    way = pair.way(KIB)
    way.write(0, KIB, 0)
    pair.a.log.wait("lost", link=pair.a_link)
    pair.b.close_link(pair.b_link)
    pair.b.close_link(pair.b_link)
    require(not pair.b.log.all("lost"), "an end that closed the link itself was notified that it is lost")
    require(pair.b.state(pair.b_link) == "closed", f"after close the state is {pair.b.state(pair.b_link)}")
    pair.a.close_link(pair.a_link)
    require(len(pair.a.log.all("lost")) == 1, "the end of the link was reported more than once")


def closing_settles_every_transfer_once(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(32 * MIB)
    victim.freeze()
    transfers = [way.write(0, 32 * MIB, 0) for _ in range(4)] + [way.lend(0, 100, 0)]
    began = time.monotonic()
    pair.a.close_link(pair.a_link)
    require(time.monotonic() - began < 5.0, "closing a link with a frozen peer takes longer than 5 s")
    outcome = pair.a.log.wait_settled(transfers, seconds=0.1)
    require(outcome[transfers[-1]] == "failed", "a loan that was never released was reported as sent")


def what_was_told_as_sent_still_arrives_after_close(stage: Stage) -> None:
    """The peer has not read it yet when this end closes: it is frozen, and continues while close gives it time."""
    pair, victim = stage.pair_with_victim()
    way = pair.way(100 * KIB)
    victim.freeze()
    transfers = [way.write(0, 100 * KIB, 0) for _ in range(5)]
    with suppress(CaseFailed):
        pair.a.log.wait("sent", len(transfers), seconds=0.3)  # the transport decides how many are reported as sent
    closing = threading.Thread(target=pair.a.close_link, args=(pair.a_link,))
    closing.start()
    wait_until("the link is closing", lambda: pair.a.state(pair.a_link) == "closed")
    victim.resume()
    closing.join()
    told = list(pair.a.log.wait_settled(transfers).values()).count("sent")
    pair.b.log.wait("lost", link=pair.b_link)
    arrived = pair.b.log.all("arrived")
    require(len(arrived) == told, f"{told} writes were reported as sent, {len(arrived)} of them arrived")
    for heard in arrived:
        way.check(heard, 0, 100 * KIB)


def nothing_lands_once_close_has_returned(stage: Stage) -> None:
    pair, _ = stage.pair_with_victim()
    back = pair.way_back(64 * MIB)
    region = pair.a.region(back.target_region)
    for _ in range(8):
        back.write(0, 64 * MIB, 0)
    wait_until("the first bytes land", lambda: any(region.buffer[: 4 * KIB]))
    pair.a.close_link(pair.a_link)
    _stays_empty(pair, back)


def nothing_lands_once_close_has_returned_to_a_callback(stage: Stage) -> None:
    """In a callback, close cannot wait for the receiving thread: it runs on that thread."""
    pair, _ = stage.pair_with_victim()
    back = pair.way_back(16 * MIB)
    pair.a.close_link_when("arrived")
    with suppress(LinkDownError):  # the first may have arrived, and closed the link, before all are written
        for _ in range(16):
            back.write(0, 16 * MIB, 0)
    pair.a.log.wait("arrived")
    _stays_empty(pair, back)
    require(len(pair.a.log.all("arrived")) == 1, "an arrival was reported after close")


def _stays_empty(pair: Pair, back: Way) -> None:
    region = pair.a.region(back.target_region)
    region.buffer[:] = bytes(region.nbytes)
    pair.b.log.wait("lost", link=pair.b_link)
    pair.a.close_link(pair.a_link)
    require(not bytes(region.buffer).strip(b"\0"), "bytes of a closed link landed in memory")


def a_cancelled_transfer_is_told_once_and_delivered_only_if_it_was_told_as_sent(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(32 * MIB)
    victim.freeze()
    kept = [way.write(0, 32 * MIB, 0, b"kept") for _ in range(3)]
    cancelled = [way.write(0, 1000, 0, b"cancelled") for _ in range(3)]
    for transfer in (*cancelled, *cancelled):
        pair.a.cancel(pair.a_link, transfer)
    outcome = pair.a.log.wait_settled(cancelled)
    victim.resume()
    last = way.write(0, 10, 0, b"kept")
    settled = pair.a.log.wait_settled([*kept, last], seconds=60.0)
    require(set(settled.values()) == {"sent"}, f"transfers other than the cancelled ones: {settled}")
    expected = [b"kept"] * 3 + [b"cancelled"] * list(outcome.values()).count("sent") + [b"kept"]
    tails = [heard.note[24:] for heard in pair.b.log.wait("arrived", len(expected), seconds=60.0)]
    require(tails == expected, f"notes that arrived: {tails} instead of {expected}")
    pair.a.cancel(pair.a_link, last)
    pair.a.cancel(pair.a_link, 123_456)


def transfers_cancelled_in_the_middle_leave_the_link_intact(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(64 * MIB)
    victim.freeze()  # so that the first write begins and cannot finish
    cancelled = [way.write(0, 64 * MIB, 0) for _ in range(3)]
    for transfer in cancelled:
        pair.a.cancel(pair.a_link, transfer)
    outcome = pair.a.log.wait_settled(cancelled)
    victim.resume()
    follower = way.write(5, 2 * MIB, 9)
    require(pair.a.log.wait_settled([follower])[follower] == "sent", "the write after cancelled ones failed")
    count = 1 + list(outcome.values()).count("sent")
    arrived = pair.b.log.wait("arrived", count)
    require(len(arrived) == count, f"{len(arrived)} transfers arrived, {count} were reported as sent")
    way.check(arrived[-1], 5, 2 * MIB)
    require(pair.a.state(pair.a_link) == "up", "cancelling has ended the link")


def a_killed_peer_is_told_before_anything_is_written(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(KIB)
    victim.kill()
    _lost_in_time(pair)
    try:
        way.write(0, KIB, 0)
    except LinkDownError:
        return
    raise CaseFailed("a write on a lost link is not refused with LinkDownError")


def a_peer_killed_in_the_middle_of_a_write_settles_it(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(64 * MIB)
    victim.freeze()  # so that writes are certainly in progress when the peer dies
    transfers = [way.write(0, 64 * MIB, 0) for _ in range(3)] + [way.lend(0, 64 * MIB, 0)]
    victim.kill()
    _lost_in_time(pair)
    outcome = pair.a.log.wait_settled(transfers, seconds=PROMISE_SECONDS)
    require(outcome[transfers[-1]] == "failed", "a loan to a killed peer was reported as sent")
    require(pair.a.state(pair.a_link) == "lost", f"the state is {pair.a.state(pair.a_link)}")
    pair.a.close_link(pair.a_link)
    require(len(pair.a.log.all("lost")) == 1, "the loss of the link was reported more than once")


def a_writer_killed_in_the_middle_is_told_and_its_part_is_no_arrival(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    back = pair.way_back(64 * MIB)
    expected = pair.b.digest(back.source_region, 0, 64 * MIB)
    for _ in range(20):
        back.write(0, 64 * MIB, 0)
    region = pair.a.region(back.target_region)
    wait_until("the first bytes land", lambda: any(region.buffer[: 4 * KIB]))
    victim.kill()
    _lost_in_time(pair)
    arrived = pair.a.log.all("arrived")
    require(len(arrived) < 20, "the writer was killed too late for this case")
    for heard in arrived:
        require(heard.digest == expected, "a write of a killed peer was reported as arrived with wrong bytes")


def what_arrived_before_the_peer_was_killed_stays(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    back = pair.way_back(MIB)
    expected = pair.b.digest(back.source_region, 0, MIB)
    back.write(0, MIB, 0)
    back.lend(0, MIB, 0)
    pair.a.log.wait("arrived")
    pair.a.log.wait("lent")
    victim.kill()
    _lost_in_time(pair)
    require(pair.a.digest(back.target_region, 0, MIB) == expected, "bytes that had arrived changed when the peer died")
    pair.a.release(0)


def _lost_in_time(pair: Pair) -> None:
    reason = pair.a.log.wait("lost", link=pair.a_link, seconds=PROMISE_SECONDS)[0].text
    require(len(reason) > 10, f"the link was lost without a reason: {reason!r}")


def a_frozen_peer_goes_on_when_it_is_resumed(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(8 * MIB)
    victim.freeze()
    transfers = [way.write(0, 8 * MIB, 0) for _ in range(6)]
    require(pair.a.state(pair.a_link) == "up", f"freezing a peer made the link {pair.a.state(pair.a_link)}")
    victim.resume()
    for heard in pair.b.log.wait("arrived", 6, seconds=60.0):
        way.check(heard, 0, 8 * MIB)
    require(set(pair.a.log.wait_settled(transfers).values()) == {"sent"}, "writes that arrived were reported as failed")
    require(not pair.a.log.all("lost"), "freezing and resuming a peer has ended the link")


def a_clogged_receiver_blocks_no_call_and_fills_no_memory(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    way = pair.way(64 * MIB)
    victim.freeze()
    before = psutil.Process().memory_info().rss
    slowest = 0.0
    transfers = []
    for _ in range(50):
        began = time.monotonic()
        transfers.append(way.write(0, 64 * MIB, 0))
        slowest = max(slowest, time.monotonic() - began)
    require(slowest < 1.0, f"a write call took {slowest:.1f} s while the receiver was clogged")
    grown = psutil.Process().memory_info().rss - before
    require(
        grown < 256 * MIB,
        f"3200 MiB wait for a clogged receiver, which took {grown // MIB} MiB of memory",
    )
    for transfer in transfers[3:]:
        pair.a.cancel(pair.a_link, transfer)
    victim.resume()
    for heard in pair.b.log.wait("arrived", 3, seconds=60.0)[:3]:
        way.check(heard, 0, 64 * MIB)
    pair.a.log.wait_settled(transfers, seconds=60.0)


def links_that_come_and_go_leave_nothing_behind(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.victim("/suite/b")
    this_process = psutil.Process()

    def open_and_close(times: int) -> tuple[int, int]:
        for _ in range(times):
            a_link, b_link = stage.join(a, b)
            a.close_link(a_link)
            b.log.wait("lost", link=b_link)
        return this_process.num_threads(), this_process.num_fds()

    threads, descriptors = open_and_close(3)  # what is made once and kept exists now

    def nothing_more() -> bool:
        return this_process.num_threads() <= threads + 2 and this_process.num_fds() <= descriptors + 2

    open_and_close(12)
    wait_until("threads and descriptors of 12 closed links are gone", nothing_more)


def a_peer_in_its_next_life_is_linked_anew(stage: Stage) -> None:
    pair, victim = stage.pair_with_victim()
    victim.kill()
    _lost_in_time(pair)
    pair.a.close_link(pair.a_link)
    reborn = stage.victim(victim.task)
    a_link, b_link = stage.join(pair.a, reborn)
    fresh = Pair(pair.a, a_link, reborn, b_link)
    for way in (fresh.way(MIB), fresh.way_back(MIB)):
        way.write(0, MIB, 0)
        way.check(way.target.log.wait("arrived")[0], 0, MIB)


def a_late_write_of_a_former_life_never_lands(stage: Stage) -> None:
    """The old incarnation is frozen during its writes; its memory is granted to the next one; the old one wakes up."""
    pair, old = stage.pair_with_victim()
    back = pair.way_back(32 * MIB)
    for _ in range(8):
        back.write(0, 32 * MIB, 0)
    region = pair.a.region(back.target_region)
    wait_until("the first bytes land", lambda: any(region.buffer[: 4 * KIB]))
    old.freeze()
    pair.a.close_link(pair.a_link)
    new = stage.victim(old.task)
    digest = _fill_in_next_life(stage, pair, new, back.target_region)
    old.resume()
    old.log.wait("lost", link=pair.b_link)
    require(
        pair.a.digest(back.target_region, 0, 32 * MIB) == digest,
        "a write of a former incarnation landed in reused memory",
    )


def _fill_in_next_life(stage: Stage, pair: Pair, new: RemoteVictim, target_region: int) -> int:
    """The new incarnation writes into the same memory; returns the digest of what is there then."""
    a_link, b_link = stage.join(pair.a, new)
    source = new.allocate(32 * MIB)
    new.fill(source, 0, 32 * MIB, 555)
    ticket = pair.a.grant(target_region, new.address())
    before = len(pair.a.log.all("arrived", a_link))
    way = Way(new, b_link, source, pair.a, a_link, target_region, ticket)
    way.write(0, 32 * MIB, 0)
    way.check(pair.a.log.wait("arrived", before + 1, link=a_link)[-1], 0, 32 * MIB)
    return pair.a.digest(target_region, 0, 32 * MIB)
