"""The links of one task: its port, its transport, a keeper for each peer, and what all of these need of the task.

Keepers and connections know a task only as this (``NodeSide``). What one side of a task has for the other goes through
here too, although there is no link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lockstep.diagnose.witness import ask_witnesses
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.events import Received, TensorKind, TransferEnded
from lockstep.protocol.core.ids import BucketId, Incarnation, Role, TaskId, hex64
from lockstep.protocol.core.messages import (
    Envelope,
    Hello,
    Message,
    Note,
    Printed,
    Refused,
    Report,
    Ticket,
    TransportAddress,
)
from lockstep.protocol.core.speakers import may_say
from lockstep.runtime import phrases
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.connection import Faults
from lockstep.runtime.task.loop import TaskLoop
from lockstep.runtime.task.peers import PeerKeeper
from lockstep.runtime.task.side import Side, plan_of
from lockstep.security.chosen import chosen_key
from lockstep.transports.base import Loan, Transport, loan_ticket
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.link import ControlLink, LinkEvents, serve_links
from lockstep.transports.control.server import ControlServer
from lockstep.transports.loan import HeldLoan
from lockstep.transports.registry import make_transport, stays_on_one_host

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node

OnHello = Callable[[Hello], Hello | Refused]
"""Answers a task that has dialed."""


class Links:
    """Made before the sides of a task, and ``connect``ed once the rest of it exists."""

    faults: Faults | None = None

    def __init__(self, node: Node, *, carry_tensors: bool) -> None:
        """``carry_tensors``: else they carry messages only, between the coordinator and everybody else."""
        self.task, self.incarnation, self.traffic = node.task, node.incarnation, node.traffic
        self._node = node
        self._name = str(node.task)
        self.server = _listen(node.cluster, node.task)
        self.transport = self._make_transport(node.cluster, carry_tensors=carry_tensors)
        linked = _linked_tasks(node) if carry_tensors else _linked_with_coordinator(node)
        self.peers = {peer: self._make_keeper(peer) for peer in linked}

    def _make_transport(self, spec: ClusterSpec, *, carry_tensors: bool) -> Transport:
        life = (self._name, self.incarnation)
        if not carry_tensors:  # no tensor needs a port of its own: what there is takes the links'
            return make_transport("grpc", self.server, *life, chosen_key(), private=True)
        return make_transport(spec.protocol, self.server, *life, chosen_key(), spec.rdma, private=spec.require_private)

    def _make_keeper(self, peer: TaskId) -> PeerKeeper:
        spec, task = self._node.cluster, self.task
        # Of two of the same kind, the one with the lower index listens; the coordinator has the lowest of its kind.
        dials = task.index > peer.index if task.role is peer.role else task.role is Role.WORKER
        return PeerKeeper(self, peer, spec.address_of(peer), dials, len(spec.shape.tasks()))

    def connect(self, loop: TaskLoop, sides: Sequence[Side], faults: Faults | None, on_hello: OnHello) -> None:
        """The task exists; the last thing before it starts."""
        self.post, self.do = loop.post, loop.do
        self.faults = faults
        self._loop = loop
        self._sides = sides
        self._takes = {kind: take for side in sides for kind, take in side.takes().items()}
        serve_links(self.server, on_hello, self._on_link)

    def start(self, *, returning: bool) -> None:
        """Look for the peers; ``returning``: they may still be in their earlier incarnation."""
        for keeper in self.peers.values():
            keeper.returning = returning
            keeper.start()

    def up(self) -> list[TaskId]:
        """The tasks with which a link is up."""
        return [task for task, keeper in self.peers.items() if keeper.linked]

    def hang_up(self) -> None:
        """Close all links."""
        for keeper in self.peers.values():
            keeper.begin_closing()
        for keeper in self.peers.values():
            keeper.close()

    # -- what keepers and connections need --

    @property
    def leaving(self) -> bool:
        return self._node.leaving

    @property
    def forming(self) -> bool:
        return self._node.forming

    def hello(self) -> Hello:
        published = TransportAddress(self.transport.name, self.transport.address())
        return Hello(self._name, self.incarnation, self._node.job, self._node.config.version, (published,))

    def envelope(self, message: Message) -> Envelope:
        return Envelope(self._node.job, self._name, self.incarnation, message)

    def refuse(self, peer: TaskId, reason: str) -> None:
        """The requested transport is used, or the run does not start."""
        protocol = self._node.cluster.protocol
        why = phrases.cannot_use_protocol(protocol, peer, reason, one_host=stays_on_one_host(protocol))
        self._node.refuse(Reason(Cause.NO_PATH, why, peer=str(peer)))

    def linked(self, peer: TaskId, path: str) -> None:
        self._node.tell_path(f"{self.task.short} to {peer.short}: {path}")

    def dials_next_life(self, peer: TaskId) -> bool:
        """Whether another incarnation of a task that was lost is linked with again: of a server with second homes, of
        a rank that comes back."""
        rules = self._node.rules
        return rules.ranks_return or (bool(rules.server_replicas) and peer.role is Role.SERVER)

    def tensors_in(self, bucket: BucketId) -> int:
        plan = plan_of(self._sides)
        return len(plan.buckets[bucket].pieces) if plan is not None and 0 <= bucket < len(plan.buckets) else 0

    def words_about(self, peer: TaskId, incarnation: Incarnation) -> list[Word]:
        """What all other tasks know of this incarnation of ``peer``; waits for their answers."""
        here = (self._name, str(peer))
        fronts = {task: address for task, address in self._node.cluster.all_addresses() if task not in here}
        return [said.word(hex64(incarnation)) for said in ask_witnesses(str(peer), fronts).values()]

    def report_received(self, peer: TaskId, report: Report | Printed) -> bool:
        """The coordinator has found something, or printed it; on a link's thread. False: it was not the coordinator."""
        if not may_say(peer, report, self._node.coordinator):
            return False
        self._node.watchdog.heard(report)
        return True

    def lent(self, peer: TaskId, incarnation: Incarnation, note: Note, loan: Loan) -> None:
        """A peer lends memory; on a transport's thread. What no side of this task takes is given back."""
        take = self._takes.get(type(note))
        if take is None:
            loan.release()
        else:
            take(peer, incarnation, note, loan)

    def _on_link(self, hello: Hello, link: ControlLink) -> LinkEvents:
        return self.peers[TaskId.parse(hello.task)].accept(hello, link)

    # -- what one side of this task has for the other: no link, and no copy --

    def own_ticket(self) -> Ticket:
        """For what a task lends itself: it does not name any memory."""
        return loan_ticket(self.transport.name, 0)

    def say_to_itself(self, message: Message) -> None:
        """Only for code that runs on the loop."""
        self._loop.then(Received(self.task, self.incarnation, message))

    def lend_to_itself(self, note: Note, number: int, kind: TensorKind, memory: memoryview) -> None:
        """The other side reads ``memory`` until it gives it back. Only for code that runs on the loop."""
        ended = TransferEnded(self.task, number, note.bucket, kind, ok=True)
        loan = HeldLoan(memory, lambda: self.do(ended))
        self._loop.then(lambda: self._takes[type(note)](self.task, self.incarnation, note, loan))


def _listen(spec: ClusterSpec, task: TaskId) -> ControlServer:
    own = parse_address(spec.address_of(task)).host
    threads, host = 24 + 3 * len(spec.shape.tasks()), spec.listen_address().host
    return ControlServer(host, 0, threads=threads, advertised_host=own, ports=spec.second_ports)


def _linked_tasks(node: Node) -> Sequence[TaskId]:
    """Workers are linked with every task that holds buckets, servers with all workers and with the coordinator,
    and with each other if they have second homes."""
    shape, task = node.cluster.shape, node.task
    if task.role is Role.WORKER:
        return tuple(home for home in shape.homes if home != task)
    if task == shape.coordinator or node.rules.server_replicas:
        return tuple(other for other in shape.tasks() if other != task)
    return (shape.coordinator, *shape.worker_ids())


def _linked_with_coordinator(node: Node) -> Sequence[TaskId]:
    shape = node.cluster.shape
    everybody = shape.worker_ids() if node.task == shape.coordinator else (shape.coordinator,)
    return tuple(task for task in everybody if task != node.task)
