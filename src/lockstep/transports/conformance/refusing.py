"""Cases: whatever is wrong is refused, with a reason, before it does harm."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import LinkDownError, Move, PeerAddress, TransportError
from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.node import note_for
from lockstep.transports.conformance.stage import Stage, require
from lockstep.transports.memory import MAX_NOTE_BYTES

KIB = 1 << 10


def _refused(what: str, attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except TransportError as error:
        require(len(str(error)) > 20, f"{what} is refused without a clear reason: {error}")
        return str(error)
    raise CaseFailed(f"{what} is not refused")


def memory_that_cannot_be_moved_is_refused(stage: Stage) -> None:
    node = stage.node("/suite/a")
    plain = bytearray(4 * KIB)
    _refused("non-contiguous memory", lambda: node.transport.register(memoryview(plain)[::2]))
    _refused("read-only memory", lambda: node.transport.register(memoryview(bytes(64))))
    _refused("memory of impossible size", lambda: node.transport.allocate(1 << 60, "a test"))
    _refused("memory of negative size", lambda: node.transport.allocate(-1, "a test"))


def registered_memory_of_somebody_else_can_be_moved(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(4 * KIB)
    theirs = bytearray(b"abcd" * KIB)
    region = pair.a.transport.register(memoryview(theirs).cast("I"))
    require(region.nbytes == 4 * KIB, f"4096 registered bytes have become {region.nbytes}")
    note = note_for(way.target_region, 0, 4 * KIB)
    pair.a.endpoint(pair.a_link).start(Move(region, 0, 4 * KIB, way.ticket, 0, note))
    pair.a.fill(way.source_region, 0, 4 * KIB, 3)
    pair.a.region(way.source_region).buffer[:] = theirs
    way.check(pair.b.log.wait("arrived")[0], 0, 4 * KIB)
    pair.a.close_link(pair.a_link)
    region.close()


def fresh_memory_is_zeroed_aligned_and_writable(stage: Stage) -> None:
    node = stage.node("/suite/a")
    for nbytes in (0, 1, 63, 4097, 1 << 20):
        region = node.transport.allocate(nbytes, "a test")
        require(region.nbytes == region.buffer.nbytes == nbytes, f"{nbytes} bytes became {region.buffer.nbytes}")
        require(bytes(region.buffer) == bytes(nbytes), "fresh memory is not zeroed")
        require(nbytes == 0 or region.address % 64 == 0, f"fresh memory begins at {region.address:#x}")
        region.buffer[:] = b"\1" * nbytes
        region.close()
        region.close()


def a_transfer_out_of_bounds_is_refused_at_the_call(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(KIB)
    wrong = ((0, KIB + 1, 0), (1, KIB, 0), (-1, 10, 0), (0, -1, 0), (0, 10, KIB - 9), (0, 10, -1))
    for offset, nbytes, target_offset in wrong:
        place = f"bytes {offset}+{nbytes} to {target_offset}"
        # The notes of the suite cannot hold negative numbers, hence a plain one.
        for loan in (False, True):
            wrong_move = (pair.a_link, way.source_region, offset, nbytes, way.ticket, target_offset, b"n", loan)
            _refused(place, lambda move=wrong_move: pair.a.start(*move))  # type: ignore[misc]
    _refused("a note that is too long", lambda: way.write(0, 1, 0, bytes(MAX_NOTE_BYTES)))


def a_source_that_is_no_region_of_this_transport_is_refused(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(KIB)
    endpoint = pair.a.endpoint(pair.a_link)
    closed = pair.a.transport.allocate(KIB, "a test")
    closed.close()
    _refused("a closed region", lambda: endpoint.start(Move(closed, 0, 0, way.ticket, 0, b"n")))

    class Foreign:
        nbytes = KIB
        buffer = memoryview(bytearray(KIB))
        address = 0

        def close(self) -> None: ...

    _refused("memory that was never registered", lambda: endpoint.start(Move(Foreign(), 0, 1, way.ticket, 0, b"n")))
    _refused("granting memory that was never registered", lambda: pair.a.transport.grant(Foreign(), pair.b.address()))


def a_ticket_of_another_transport_is_refused(stage: Stage) -> None:
    pair = stage.pair()
    way = pair.way(KIB)
    ticket = way.ticket
    way.ticket = Ticket("pigeon", ticket.region, ticket.nbytes, ticket.address, ticket.key)
    require(
        "pigeon" in _refused("a ticket of another transport", lambda: way.write(0, 1, 0)), "the text does not say why"
    )


def a_ticket_of_another_pair_reaches_no_memory(stage: Stage) -> None:
    """Either the call is refused, or the link ends with a reason at both ends. Memory stays unchanged."""
    pair = stage.pair()
    way = pair.way(KIB)
    stranger = PeerAddress("/suite/stranger", 99, pair.a.address().address)
    region = pair.b.allocate(KIB)
    way.ticket = pair.b.grant(region, stranger)
    before = pair.b.digest(region, 0, KIB)
    try:
        way.write(0, KIB, 0)
    except TransportError:
        return
    for node, link in ((pair.a, pair.a_link), (pair.b, pair.b_link)):
        reason = node.log.wait("lost", link=link)[0].text
        require("grant" in reason, f"the link ended without saying that the region was not granted: {reason}")
    require(pair.b.digest(region, 0, KIB) == before, "a peer wrote into a region that was granted to another one")
    require(not pair.b.log.all("arrived"), "a write that was not granted was reported as arrived")


def a_life_that_ended_reaches_no_memory_with_its_ticket(stage: Stage) -> None:
    """Granting a region to the next incarnation of a peer ends the grant of its former one there."""
    pair = stage.pair()
    way = pair.way(KIB)
    a = pair.a.address()
    pair.b.grant(way.target_region, PeerAddress(a.task, a.incarnation + 1, a.address))
    before = pair.b.digest(way.target_region, 0, KIB)
    try:
        way.write(0, KIB, 0)
    except TransportError:
        return
    pair.b.log.wait("lost", link=pair.b_link)
    require(pair.b.digest(way.target_region, 0, KIB) == before, "a former incarnation wrote into reused memory")
    require(not pair.b.log.all("arrived"), "a write of a former incarnation was reported as arrived")


def a_write_after_the_end_of_the_link_is_refused(stage: Stage) -> None:
    pair = stage.pair()
    way, back = pair.way(KIB), pair.way_back(KIB)
    pair.a.close_link(pair.a_link)
    pair.b.log.wait("lost", link=pair.b_link)
    for wrong in (way, back):
        try:
            wrong.write(0, 1, 0)
        except LinkDownError:
            continue
        raise CaseFailed("a write on a link that has ended is not refused with LinkDownError")


def nobody_there_is_told_with_a_reason(stage: Stage) -> None:
    a, gone = stage.node("/suite/a"), stage.node("/suite/gone")
    address = gone.address()
    gone.close()
    link = a.connect(address, True)
    reason = a.log.wait("lost", link=link, seconds=40.0)[0].text
    require(len(reason) > 10, f"the link was lost without a reason: {reason!r}")
    require(a.state(link) == "lost", f"after 'lost' the state is {a.state(link)}")


def another_life_than_the_one_meant_is_refused_with_a_reason(stage: Stage) -> None:
    a, b = stage.node("/suite/a"), stage.node("/suite/b")
    there = b.address()
    former = PeerAddress(there.task, there.incarnation + 1, there.address)
    b.connect(a.address(), False)
    link = a.connect(former, True)
    reason = a.log.wait("lost", link=link, seconds=40.0)[0].text
    require("incarnation" in reason, f"the reason does not say that another incarnation answered: {reason!r}")
    require(not a.log.all("up") and not b.log.all("up"), "a link came up with an incarnation other than the one meant")
