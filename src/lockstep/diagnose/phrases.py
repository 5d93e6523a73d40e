"""What an analysis says to people, one function a sentence. Nothing reads these back."""

from __future__ import annotations

# -- why somebody gave no answer --


def late() -> str:
    return "no answer in time"


def does_not_listen() -> str:
    return "it does not listen"


def unreadable(address: str, why: str) -> str:
    return f"{address} gave an answer that cannot be read: {why}"


def mute(address: str, seconds: float) -> str:
    return f"{address} accepts connections but says nothing ({seconds:g} s)"


def call_failed(address: str, why: str) -> str:
    return f"{address}: {why}"


def left_no_file() -> str:
    return "it left no file"


def only_files() -> str:
    return "this is a reading of files"


# -- how a job ended --


def about(culprit: str, text: str) -> str:
    """One sentence of a text that may begin with the task's name already."""
    return f"{culprit} {text}" if culprit and not text.startswith(culprit) else text
