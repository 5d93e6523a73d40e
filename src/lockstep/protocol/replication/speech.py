"""What a task can say in its view, and to whom: a message for a task that is not linked is not sent.

It is not lost: with the link, and with the next view, everything that is open is said again.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.replication.replica_events import ReplicaEffect, Say
from lockstep.protocol.replication.replica_messages import InView, Stamped


class Speech:
    """One task's messages in one view."""

    def __init__(
        self, task: TaskId, view: int, members: Mapping[TaskId, Incarnation], linked: Mapping[TaskId, int]
    ) -> None:
        """``linked``: the incarnations that can be reached now, by task; the owner keeps it up to date."""
        self.task = task
        self.view = view
        self.members = members
        self._linked = linked

    def reaches(self, peer: TaskId) -> bool:
        return peer == self.task or (peer in self.members and self._linked.get(peer) == self.members[peer])

    def to(self, peer: TaskId, *messages: InView) -> list[ReplicaEffect]:
        return [Say(peer, Stamped(self.view, message)) for message in messages] if self.reaches(peer) else []
