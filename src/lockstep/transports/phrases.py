"""What the transports tell people, one function per sentence. Nothing reads these back."""

from __future__ import annotations

# -- why a peer could not be reached --


def cannot_connect(address: str, why: str) -> str:
    return f"cannot connect to {address}: {why}"


def mute(address: str, seconds: float | None) -> str:
    within = "" if seconds is None else f" within {seconds:g} s"
    return f"no answer{within}: {address} accepts connections but sends nothing"


def accepts_without_answer(seconds: float) -> str:
    return f"accepts connections but did not answer within {seconds:g} s"


def accepts_but(why: str) -> str:
    return f"accepts connections, but {why}"


def thread_goes_on(thread: str, what: str, where: str, unsaid: int) -> str:
    more = f"; {unsaid} more since the last such line" if unsaid else ""
    return f"{thread} caught {what} ({where}), and continues{more}"
