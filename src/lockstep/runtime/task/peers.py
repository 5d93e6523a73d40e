"""One peer of a task: finds it, keeps the link to it, and reports what happened to it.

A link is up when its control stream and its data endpoint are both up (``connection.py``). When it breaks, the keeper
asks the peer's monitor: either there is proof that this incarnation of the peer has ended (``PeerGone``), or the
dialing end connects again.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from typing import Any

from lockstep.diagnose.collect import is_absent
from lockstep.diagnose.witness import Statement
from lockstep.errors import EXIT_BAD_INPUT
from lockstep.protocol.core.causes import FINAL_REFUSALS, Cause, Reason, link_down
from lockstep.protocol.core.death import PROOFS, Ruling, Word, rule_on
from lockstep.protocol.core.events import Broken, PeerGone
from lockstep.protocol.core.ids import INITIAL_STEP, Incarnation, TaskId
from lockstep.protocol.core.messages import Heartbeat, Hello, Message
from lockstep.protocol.core.reach import UNREACHABLE
from lockstep.protocol.core.timing import (
    DIAL_SECONDS,
    GONE_SECONDS,
    HEARD_SECONDS,
    HEARTBEAT_SECONDS,
    LEFT_SECONDS,
    LONGEST_DIAL_SECONDS,
    UNHEARD_SECONDS,
    WITNESS_ASK_SECONDS,
)
from lockstep.runtime import phrases
from lockstep.runtime.startup.address_finding import (
    AddressFinding,
    EndMemory,
    ask_seconds,
    left_early,
    look,
    proof_of_end,
    proof_of_restart,
    with_lack_of_memory,
)
from lockstep.runtime.startup.cluster import DEFAULT_PROTOCOL
from lockstep.runtime.task.connection import Connection, LinkUse, NodeSide
from lockstep.transports.control.link import ControlLink, dial_link
from lockstep.transports.control.monitor_query import query_monitor_quickly
from lockstep.transports.control.tcp_probe import probe
from lockstep.transports.guard import Guard

RETRY_SECONDS = 0.3
LONGEST_PAUSE = 0.9
"""Between two queries of a peer that is not ready."""
PAUSE_PER_TASK = 0.05
DIAL_PER_TASK = 0.5
HURRIED_PAUSE = 0.1
HURRIED_LOOKS = 100
TIMES_WITHOUT_PATH = 2


class PeerKeeper:
    """Keeps the link to one peer, on its own thread."""

    def __init__(self, node: NodeSide, peer: TaskId, front: str, dials: bool, tasks: int = 1) -> None:
        """``tasks``: how many the whole cluster has. In a large one all start at once, so everything takes longer."""
        self.peer = peer
        self.front = front
        self.finding = AddressFinding(phrases.not_looked_at())
        self.found_since = time.monotonic()
        self.last_end = EndMemory()
        self.attempts = 0
        self.since = time.monotonic()
        self._node = node
        self.dials = dials
        self._connection: Connection | None = None
        self._known: Incarnation = 0
        self._linked_life: Incarnation = 0
        """The last incarnation with which a link was up."""
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._broken: list[tuple[Connection, Reason]] = []
        self._burying = False
        self._accepted: tuple[Connection, ControlLink, Hello] | None = None
        self._closing = False
        self._longest_pause = max(LONGEST_PAUSE, PAUSE_PER_TASK * tasks)
        self._tasks = tasks
        self._ask_at = 0.0
        """When the other tasks may be asked about this one again."""
        self._dial_seconds = max(DIAL_SECONDS, DIAL_PER_TASK * tasks)
        self._ask_seconds = ask_seconds(tasks)
        self._looks = 0
        self.returning = False
        """The job restarts: the peer is on its way, so it is queried more often, or it refuses to return."""
        self._told_gone = False
        self._known_refusal = False
        self._told_linked = False
        self._without_path = 0
        self._host_address = ""
        self._thread = threading.Thread(target=self._run, name=f"peer {peer.short} of {node.task.short}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def linked(self) -> bool:
        connection = self._connection
        return connection is not None and connection.up

    @property
    def known_life(self) -> Incarnation:
        """The incarnation with which it is, or was last, linked; 0: none."""
        return self._linked_life

    @property
    def connection(self) -> Connection | None:
        """The current connection, if it is up."""
        connection = self._connection
        return connection if connection is not None and connection.up else None

    def facts(self, now: float) -> dict[str, Any]:
        """The state of the link, for a snapshot."""
        connection = self._connection
        if connection is None:
            facts: dict[str, Any] = {"state": "none", "heard": now - self.since, "moving": [], "callback": None}
        else:
            facts = connection.facts(now)
        finding = self.finding
        found = {
            "finding": f"{finding.text}{finding.note}",
            "answer": finding.answer.value,
            "front": self.front,
            "refusal": "" if finding.refusal is None else finding.refusal.value,
            "found_up": finding.is_up,
            "last_end": self.last_end.how,
        }
        return {**facts, **found, "attempts": self.attempts}

    def use(self) -> LinkUse:
        """The state of the link, for metrics."""
        connection = self._connection
        return LinkUse("", "none", None) if connection is None else connection.use()

    def bytes_moved(self) -> int:
        """Bytes that have gone over the current connection."""
        connection = self._connection
        return 0 if connection is None else connection.bytes_moved()

    def host_address(self) -> str:
        """The numeric address of the peer's host; empty if its name does not resolve."""
        if not self._host_address:
            try:
                self._host_address = socket.gethostbyname(self.front.rpartition(":")[0].strip("[]"))
            except OSError:
                return ""
        return self._host_address

    def seconds_unheard(self, now: float) -> float:
        """How long ago anything last arrived from this peer."""
        connection = self._connection
        return now - (self.since if connection is None else connection.heard_at)

    def send(self, message: Message, *, overtakes: bool = False) -> None:
        """Queue a message; without a link it is dropped, since every request is repeated until it is satisfied.
        ``overtakes``: it may arrive before others that were sent earlier."""
        if (connection := self._connection) is not None:
            connection.send(message, overtakes=overtakes)

    def give_up_silent(self, reason: Reason) -> None:
        """That incarnation is over for everybody. Where its host vanished with it, nothing else breaks the link."""
        connection = self.connection
        if connection is not None and self.silent:
            self._linked_life = connection.incarnation
            connection.end(reason)

    @property
    def silent(self) -> bool:
        """A link is up, and heartbeats have been missing on it."""
        return self.linked and self.seconds_unheard(time.monotonic()) >= UNHEARD_SECONDS

    # -- accepting --

    def has_other_life(self, incarnation: Incarnation) -> bool:
        """Whether a link with another incarnation of this peer is up."""
        connection = self._connection
        return connection is not None and connection.up and connection.incarnation != incarnation

    def accept(self, hello: Hello, link: ControlLink) -> Connection:
        """The peer has dialed: this is its new connection, whatever happened to the previous one."""
        connection = Connection(self._node, self.peer, self._on_end)
        self._replace(connection, hello.incarnation, phrases.connected_again())
        with self._wake:
            later = self._burying or bool(self._broken)
            if later:
                # The previous connection must be closed first: its bytes must not land in the new one's memory.
                self._accepted = (connection, link, hello)
                self._wake.notify_all()
        if not later:
            connection.accept(link, hello)
        return connection

    def _replace(self, connection: Connection, incarnation: Incarnation, reason: str) -> None:
        with self._lock:
            former, self._connection = self._connection, connection
            if former is not None and former.was_up:
                self._linked_life = former.incarnation
            if incarnation != self._known:
                self._told_gone = False
            self._known = incarnation
            self._host_address = ""  # it may have come back elsewhere, under the same name
        if former is not None:
            former.end(link_down(reason))

    # -- the keeper's thread --

    def _on_end(self, connection: Connection, reason: Reason) -> None:
        with self._wake:
            self._broken.append((connection, reason))
            self._wake.notify_all()

    def _on_open(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _run(self) -> None:
        guard = Guard(f"the keeper of {self.peer}")
        while not self._closing:
            if not guard.passes(self._keep):
                self._pause(HEARTBEAT_SECONDS)

    def _keep(self) -> None:
        if self.linked:
            self._looks = 0
            self.send(Heartbeat(time.time()))
            unheard = self.seconds_unheard(time.monotonic()) >= HEARD_SECONDS
            if unheard and not self._node.forming and self._node.dials_next_life(self.peer):
                self._give_up_if_its_host_is_gone()
            self._pause(RETRY_SECONDS if unheard else HEARTBEAT_SECONDS)
        elif self._node.leaving or (self._connection is None and not self.dials):
            self._pause(HEARTBEAT_SECONDS)
        else:
            self._find()
        self._bury()

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._closing and not self._broken and self._accepted is None:
                self._wake.wait(seconds)

    def _bury(self) -> None:
        """Close connections that ended, on this thread, because their callbacks must not block."""
        with self._lock:
            ended, self._broken = self._broken, []
            self._burying = bool(ended)
        for connection, reason in ended:
            connection.bury(reason)
        with self._lock:
            self._burying = False
            accepted, self._accepted = self._accepted, None
        if accepted is not None:
            connection, link, hello = accepted
            connection.accept(link, hello)

    def _find(self) -> None:
        """Not linked: query the peer, conclude whether it is gone, and dial it if it is ready."""
        self._bury()
        finding = self.last_end.with_end(look(self.peer, self.front, self._ask_seconds), time.monotonic())
        self.attempts += 1
        self._note(finding)
        self._give_up_if_it_refuses_to_return(finding)
        if self._known and self._judge(finding):
            self._pause(HEARTBEAT_SECONDS)
            return
        if self.dials and finding.task_address and not self.linked:
            self._dial(finding)
        else:
            self._pause(self._next_pause())

    def _note(self, finding: AddressFinding) -> None:
        """Remember what was found, and how long it has been the same."""
        known = self.finding
        if (known.answer, known.reachable) != (finding.answer, finding.reachable):
            self.found_since = time.monotonic()
        if known.no_link and finding.task_address:
            # Why the last dial failed is more informative than that the peer is up.
            finding = replace(known, description=finding.description)
        self.finding = finding

    def _judge(self, finding: AddressFinding) -> bool:
        """Whether the peer that was linked is gone; reports it once."""
        lost_for = time.monotonic() - self._last_heard()
        if self._was_up():
            self._linked_life = self._known
        found = finding.description
        if not self._linked_life and found is not None and found.incarnation not in (0, self._known):
            # It was dialed and never reached; the task that is there now has received nothing from this one.
            self._known = 0
            return False
        known = self._linked_life or self._known
        proof = proof_of_end(finding, known)
        if proof is None and self._node.dials_next_life(self.peer):
            proof = proof_of_restart(finding, known)
        if proof is not None and not self._told_gone:
            proof = with_lack_of_memory(proof, self.front)
        # While a large cluster starts, its machines are so busy that links break and monitors are silent: tasks that
        # are missing then are reported, and have until the startup deadline.
        silent = finding.description is None and self._was_up() and not self._node.forming
        if proof is None and silent and lost_for > GONE_SECONDS:
            proof = self._word_of_all(finding, known)
        if proof is None and lost_for > LEFT_SECONDS:
            proof = left_early(finding)
        if proof is None or self.linked:
            return False
        if not self._told_gone:
            self._told_gone = True
            self._node.post(PeerGone(self.peer, proof, known))
        if found is not None and found.incarnation not in (0, known) and self._node.dials_next_life(self.peer):
            self._known = self._linked_life = 0
            self._told_gone = False
            return False
        return True

    def _word_of_all(self, finding: AddressFinding, known: Incarnation) -> Reason | None:
        """That it cannot be reached from here does not prove its end; the word of all tasks does."""
        if time.monotonic() < self._ask_at:
            return None
        own = Statement(reach=finding.answer, absent=is_absent(self.front, finding.answer)).word()
        if own is Word.NONE:
            return None
        words = [own] if own in PROOFS else [own, *self._node.words_about(self.peer, known)]
        self._ask_at = time.monotonic() + GONE_SECONDS
        return Reason(Cause.DEAD, phrases.is_gone(finding.text)) if rule_on(words, self._tasks) is Ruling.DEAD else None

    def _give_up_if_its_host_is_gone(self) -> None:
        """A host that vanishes breaks no connection. Where another task takes the place of this one, nobody waits until
        one breaks by itself: the others are asked, as about one whose link broke."""
        connection = self.connection
        if connection is None:
            return
        reach = query_monitor_quickly(self.front, WITNESS_ASK_SECONDS).found
        if reach.reach not in UNREACHABLE:
            return
        finding = AddressFinding(reach.phrase, answer=reach.reach, note=reach.note)
        proof = self._word_of_all(finding, connection.incarnation)
        self._ask_at = 0.0  # others may have heard of it a moment later than this task, and be of another mind soon
        if proof is None or self._told_gone or connection is not self.connection:
            return
        self._linked_life, self._told_gone = connection.incarnation, True
        self._note(finding)
        self._node.post(PeerGone(self.peer, proof, connection.incarnation))
        connection.end(proof)

    def _was_up(self) -> bool:
        """A link that never came up, for example on a busy machine, does not prove that the peer is gone."""
        connection = self._connection
        return connection is not None and connection.was_up

    def _last_heard(self) -> float:
        connection = self._connection
        return connection.heard_at if connection is not None else self.since

    def _dial(self, finding: AddressFinding) -> None:
        """Dial and wait, up to a deadline, until the link is up or has failed."""
        assert finding.description is not None
        connection = Connection(self._node, self.peer, self._on_end, self._on_open)
        self._replace(connection, finding.description.incarnation, phrases.dialed_again())
        connection.attach(dial_link(finding.task_address, self._node.hello(), connection, self._dial_seconds))
        deadline = time.monotonic() + self._dial_seconds + 1.0
        reason: Reason | None = None
        # The endpoint's first callback may run before the call that made it has returned.
        while not self._closing and not (connection.up and connection.endpoint) and not reason:
            with self._wake:
                reason = next((why for ended, why in self._broken if ended is connection), None)
                if not reason and time.monotonic() >= deadline:
                    reason = link_down(phrases.link_not_open_in_time())
                    self._dial_seconds = min(2 * self._dial_seconds, max(LONGEST_DIAL_SECONDS, self._dial_seconds))
                elif not (reason or self._closing or (connection.up and connection.endpoint)):
                    self._wake.wait(deadline - time.monotonic())
        if connection.was_up and connection.endpoint is not None:
            # Also reported for links that already closed: a short job may be over before this thread runs.
            self._told_linked = True
            self._node.linked(self.peer, connection.endpoint.path())
        if connection.up:
            return
        if reason:
            text = self._why_no_link(finding, reason.text)
            self.finding = AddressFinding(text, finding.description, True, refusal=reason.cause, no_link=True)
            self._give_up_if_refused_for_good(reason)
            self._give_up_if_there_is_no_path(reason)
        connection.end(link_down(phrases.link_not_open_in_time()))
        self._bury()  # a broken connection would cut the pause short
        self._pause(self._next_pause())

    def _next_pause(self) -> float:
        """Grows from query to query: all tasks query the servers, and each query costs both sides a little."""
        self._looks += 1
        if self.returning and self._looks < HURRIED_LOOKS:
            return HURRIED_PAUSE
        return min(RETRY_SECONDS * (1 + self._looks / 4), self._longest_pause)

    def _why_no_link(self, finding: AddressFinding, reason: str) -> str:
        """The monitor answers; does the task's own port, which is different, answer too?"""
        probed = probe(finding.task_address)
        if probed.no_packet_returns:
            return phrases.port_of_task_closed(finding.task_address, probed.phrase)
        return phrases.cannot_open_link(reason)

    def _give_up_if_it_refuses_to_return(self, finding: AddressFinding) -> None:
        """It was in this job before and now reports that the job cannot start (no intact checkpoint, for example).
        Unlike after a signal, nothing restarts it. At a first start the watchdog decides: it knows who is waited for.
        """
        found = finding.description
        refuses = found is not None and found.exited and found.exit_code == EXIT_BAD_INPUT
        if self.returning and refuses and not self._known_refusal:
            self._known_refusal = True
            self._node.post(Broken(self.peer, INITIAL_STEP, Reason(Cause.FAILED, finding.text)))

    def _give_up_if_refused_for_good(self, reason: Reason) -> None:
        if not self._known_refusal and reason.cause in FINAL_REFUSALS:
            self._known_refusal = True
            refusal = replace(reason, text=phrases.refuses_this_task(reason.text), peer=str(self._node.task))
            self._node.post(Broken(self.peer, INITIAL_STEP, refusal))

    def _give_up_if_there_is_no_path(self, reason: Reason) -> None:
        """Before the first link: this transport does not work between these two. Later: it did, so it may again."""
        if reason.cause is not Cause.NO_PATH or self._told_linked or self._node.transport.name == DEFAULT_PROTOCOL:
            return
        self._without_path += 1
        if self._without_path >= TIMES_WITHOUT_PATH:
            self._node.refuse(self.peer, reason.text)

    def begin_closing(self) -> None:
        """Ask the thread to end; ``close`` waits for it."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def close(self) -> None:
        """End the link, once everything queued has been sent, and then the thread."""
        self.begin_closing()
        if self._thread.ident is not None:
            self._thread.join(self._dial_seconds + 2.0)
        self._bury()
        if self._connection is not None:
            self._connection.close()
