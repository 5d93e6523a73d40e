"""What the transports tell people, one function per sentence. Nothing reads these back."""

from __future__ import annotations

from pathlib import Path

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


# -- who has which key; each continues from the address --


def has_another_key(version: str, key: Path) -> str:
    return (
        f"is a {_lockstep(version)} task with another key; copy {key} there, or name the key of the job with --key_file"
    )


def has_no_key() -> str:
    return "is a Lockstep task that was started with --insecure; start it without, or this one with --insecure too"


def wants_a_key(version: str) -> str:
    return (
        f"is a {_lockstep(version)} task that wants a key, and this command runs with --insecure; start both with it, "
        "or both without"
    )


def _lockstep(version: str) -> str:
    return f"Lockstep {version}".rstrip()
