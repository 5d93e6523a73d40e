"""Exit codes, the base of our errors, and the two ways in which a command ends before it has started anything."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_FAILED = 1
"""A task of the job failed with its own error; for a monitor: its task was killed."""
EXIT_BAD_INPUT = 2
"""Nothing was started."""
EXIT_VERDICT = 3
"""The job was ended by a finding about it: a death, a mismatch, a verdict, a stall."""


class LockstepError(Exception):
    """Every error that the library raises on purpose: ``except lockstep.LockstepError`` catches all of them."""


class BadInput(LockstepError):  # noqa: N818 - reads as the fact it states
    """What the user asked for cannot be done; each sentence says why and what to do instead. Exit code 2."""

    def __init__(self, sentences: str | Sequence[str]) -> None:
        self.sentences: tuple[str, ...] = (sentences,) if isinstance(sentences, str) else tuple(sentences)
        if not self.sentences:
            raise ValueError("bad input without a sentence tells the user nothing")
        super().__init__("\n".join(self.sentences))


class HelpAsked(Exception):  # noqa: N818 - not an error at all
    """The user asked for help; ``text`` is the answer, for standard output. Exit code 0."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
