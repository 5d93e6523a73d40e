"""The error that ends a link whose peer breaks its rules."""

from __future__ import annotations

from lockstep.security.proof import Refusal


class FrameError(Exception):
    """The peer broke the rules of the link, or sent bytes that are not a frame; the text says how. ``refusal``: why
    it is refused if it has not proven itself yet."""

    def __init__(self, text: str, refusal: Refusal = Refusal.MALFORMED) -> None:
        super().__init__(text)
        self.refusal = refusal
