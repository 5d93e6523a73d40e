"""What is found when a run breaks a rule: the rule as a value, and the text and the story for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.protocol.core.errors import ProtocolError


class Rule(StrEnum):
    """What must not occur in a run; the text of a violation names the task, bucket and step."""

    WRONG_BYTES = "bytes that are not those that were meant"
    OVERWRITTEN = "a buffer that is overwritten while it is read"
    IN_PLACE = "an update in place"
    APPLIED_TWICE = "a step that is applied twice"
    WRONG_RATES = "rates that are not the chief's"
    WRONG_GRADIENTS = "an update of other gradients than it must be made of"
    WRONG_SCALE = "an update that is clipped by another scale than the step's"
    DECISION_CHANGED = "a decision that is taken back"
    EARLY_COMMIT = "an early commit"
    COMMIT_TAKEN_BACK = "a commit that is taken back"
    NOT_SEALED = "a step that is applied before it is sealed"
    VOID_APPLIED = "a gradient with infinity that is applied"
    UNKNOWN_VERSION = "a version that nobody has made"
    OLDER_VALUE = "a value that goes back"
    OWN_GRADIENT_MISSING = "a value without the worker's own gradient"
    GRADIENT_LOST = "a gradient that is lost"
    NOT_REPEATED = "a step that is computed again and differs"
    WRONG_ANSWER = "a call that is answered wrongly"
    NOT_HELD = "a version that only one server has"
    NOT_GIVEN_BACK = "a gradient that is never given back"
    INCOMPLETE = "a good end without all steps"
    STALE_TICKET = "a ticket of another session"
    VAGUE_WAIT = "a wait that nobody can act on"
    DEADLINE_IN_THE_PAST = "a deadline in the past"
    NO_DEADLINE = "nobody with a deadline"
    NO_END = "no end"
    TOLD_TWICE = "an end that is told twice"
    NOT_TOLD = "an end that is not told"
    BAD_END = "a bad end without a fault"
    UNEXPLAINED_END = "an end that no fault explains"
    MACHINE = "a machine that breaks a rule of its own"


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """What two runs that fail in the same way have in common. ``place``: where a machine found its own rule broken."""

    rule: Rule
    place: str = ""


class Violation(AssertionError):  # noqa: N818 - it is a finding about a run, not an error of the caller
    """A run broke a rule of the protocol; the text says which, where and when; the story is what came before."""

    def __init__(self, rule: Rule, text: str, place: str = "", story: str | None = None) -> None:
        super().__init__(rule, text, place, story)
        self.broken = BrokenRule(rule, place)
        self.text = text
        self.story = story

    def __str__(self) -> str:
        return self.text if self.story is None else f"{self.text}\n{self.story}"


def with_story(found: AssertionError | KeyError | ProtocolError, story: str) -> Violation:
    """What was found, whatever found it, with what happened before."""
    if isinstance(found, Violation):
        return Violation(
            found.broken.rule, found.text, found.broken.place, story if found.story is None else found.story
        )
    return Violation(Rule.MACHINE, str(found), _place(found), story)


def _place(found: BaseException) -> str:
    """The line of code that found it: the machines' own checks have no other name."""
    at = found.__traceback__
    if at is None:
        return ""
    while at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_qualname}:{at.tb_lineno}"
