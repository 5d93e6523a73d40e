"""Where a worker's program waits in a call that all workers make."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lockstep.protocol import phrases
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.effects import CallAnswered
from lockstep.protocol.core.events import Calling
from lockstep.protocol.core.messages import CallComplete, CallMade

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node


class CallDesk:
    """One worker's calls, one at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()
        self._answer: CallComplete | None = None

    def call(self, made: CallMade) -> CallComplete:
        """Block until all workers have come to this call; JobEndedError if the job ends first."""
        node = self._node
        node.raise_if_ended()
        with node.main.during(Doing.CALLING, phrases.call_words(made)), node.while_calling():
            node.post(Calling(made))
            with self._changed:
                while self._answer is None:
                    node.raise_if_ended()
                    self._changed.wait(1.0)
                answer, self._answer = self._answer, None
        return answer

    # -- the loop's thread --

    def on_answer(self, effect: CallAnswered) -> None:
        with self._changed:
            self._answer = effect.answer
            self._changed.notify_all()

    def wake(self) -> None:
        """The job is over."""
        with self._changed:
            self._changed.notify_all()
