"""What the next incarnation of a worker would need besides the parameters, as far as the coordinator may lack it."""

from __future__ import annotations

from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.messages import LocalState


class OwnStates:
    """Local states that the coordinator has not confirmed, by the step that begins with each."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._unconfirmed: dict[Step, LocalState] = {}

    def add(self, state: LocalState) -> LocalState:
        """What to say of it; most models have little, and many never change it."""
        same = not state.stuck and state.data == self._newest
        self._newest = None if state.stuck else state.data
        self._unconfirmed[state.step] = said = LocalState(state.step, b"", same=True) if same else state
        return said

    def confirm_before(self, step: Step) -> None:
        for known in [known for known in self._unconfirmed if known < step]:
            del self._unconfirmed[known]

    def unconfirmed(self) -> list[LocalState]:
        return [self._unconfirmed[step] for step in sorted(self._unconfirmed)]
