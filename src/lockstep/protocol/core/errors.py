"""Two kinds of protocol error: who broke the rule is the first question in a hang, so the type answers it."""

from __future__ import annotations

from lockstep.protocol.core.ids import TaskId


class ProtocolError(Exception):
    """Base of both; never raised itself."""

    def __init__(self, text: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError, which say who broke the rule")
        super().__init__(text)


class LocalProtocolError(ProtocolError):
    """This task (its user or our own code) broke the rule."""


class RemoteProtocolError(ProtocolError):
    """``peer`` sent something it must not send."""

    def __init__(self, peer: TaskId, text: str) -> None:
        super().__init__(text)
        self.peer = peer
