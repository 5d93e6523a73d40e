"""Decides whom this task links with: a task that dials says who it is, and is taken or told why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.events import PeerGone
from lockstep.protocol.core.ids import Incarnation, Role, TaskId
from lockstep.protocol.core.messages import Hello, Member, Refused
from lockstep.runtime import phrases

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node


class Admission:
    """The incarnations of all members, and what is asked of one that dials."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lives: dict[TaskId, Incarnation] = {}
        self._former: set[tuple[TaskId, Incarnation]] = set()

    @property
    def rejoins(self) -> int:
        """How many tasks have come back as another incarnation, as far as this one has seen."""
        return len(self._former)

    # -- the loop's thread --

    def begin(self, members: Sequence[Member]) -> None:
        """The job has formed, of these."""
        self._lives = {TaskId.parse(member.task): member.incarnation for member in members}

    def change(self, members: Sequence[Member]) -> list[TaskId]:
        """The job goes on with these; returns those that have come back as another incarnation."""
        here = {TaskId.parse(member.task) for member in members}
        for task in [task for task in self._lives if task not in here]:
            self._former.add((task, self._lives.pop(task)))
        returned = []
        for member in members:
            task = TaskId.parse(member.task)
            known = self._lives.get(task, member.incarnation)
            if known != member.incarnation:
                self._former.add((task, known))
                self._lives[task] = member.incarnation
                returned.append(task)
        return returned

    # -- a link's thread --

    def on_hello(self, hello: Hello) -> Hello | Refused:
        """Answers a task that has dialed."""
        refusal = self._why_refused(hello)
        return self._node.links.hello() if refusal is None else Refused(refusal)

    def _why_refused(self, hello: Hello) -> Reason | None:
        """``Cause.UNKNOWN``: for now; asking again later may help."""
        node = self._node
        if node.leaving:
            return Reason(Cause.UNKNOWN, phrases.has_left(node.task))
        if hello.version != node.config.version:
            text = phrases.versions_differ(node.task, node.config.version, hello.task, hello.version)
            return Reason(Cause.MISMATCH, text)
        try:
            keeper = node.peers.get(TaskId.parse(hello.task))
        except ValueError as error:
            return Reason(Cause.WIRING, str(error))
        if keeper is None:
            return Reason(Cause.WIRING, phrases.link_not_expected(node.task, hello.task))
        if node.job and hello.job and hello.job != node.job:
            return Reason(Cause.UNKNOWN, phrases.jobs_differ(hello.task, hello.job, node.task, node.job))
        if keeper.has_other_life(hello.incarnation) and keeper.silent:
            return Reason(Cause.UNKNOWN, phrases.former_life_silent(keeper.peer))
        if keeper.has_other_life(hello.incarnation):
            return Reason(Cause.DUPLICATE_TASK, phrases.taken_by_another(hello.task))
        return self._of_another_life(keeper.peer, hello.incarnation)

    def _of_another_life(self, peer: TaskId, incarnation: Incarnation) -> Reason | None:
        """A member that comes back as another process has lost its state; a worker may get it back."""
        known = self._lives.get(peer, incarnation)
        if known == incarnation:
            return None
        node, rules = self._node, self._node.rules
        if rules.takes_back and peer.role is Role.WORKER:
            if (peer, incarnation) in self._former:
                return Reason(Cause.LEFTOVER_SERVER, phrases.place_taken(peer))
            # The coordinator decides; the others wait for its message.
            knows = node.machine.coordinator is not None
            return None if knows else Reason(Cause.UNKNOWN, phrases.not_told_of_life(node.task, peer))
        node.post(PeerGone(peer, Reason(Cause.STALE_INCARNATION, phrases.former_life_gone(known)), known))
        if rules.server_replicas and (peer, incarnation) not in self._former:
            # The loss of the former one is a matter of a moment, and then this one is welcome.
            return Reason(Cause.UNKNOWN, phrases.not_told_of_life(node.task, peer))
        if rules.returns:
            return Reason(Cause.UNKNOWN, phrases.yet_to_leave(node.task))
        return Reason(Cause.LEFTOVER_SERVER, phrases.runs_with_another_life(peer))
