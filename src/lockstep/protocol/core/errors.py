"""Two kinds of protocol error: the first question in a hang is who broke the rule, so the type answers it."""

from __future__ import annotations

from lockstep.protocol.core.ids import TaskId


class ProtocolError(Exception):
    """Base of both; never raised itself."""

    def __init__(self, text: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError, which name the side that broke the rule")
        super().__init__(text)


class LocalProtocolError(ProtocolError):
    """This task (its user or our own code) broke the rule."""


class RemoteProtocolError(ProtocolError):
    """``peer`` sent something it must not send."""

    def __init__(self, peer: TaskId, text: str) -> None:
        super().__init__(text)
        self.peer = peer
