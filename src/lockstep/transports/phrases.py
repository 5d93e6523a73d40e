"""What the transports tell people, one function per sentence. Nothing reads these back."""

from __future__ import annotations

# -- why a peer could not be reached --


def unresolved(address: str, why: str) -> str:
    return f"name does not resolve: {address} ({why})"


def silent(address: str, seconds: float) -> str:
    return f"no answer from {address} within {seconds:g} s: the host is down, or a firewall drops the packets"


def refused(address: str) -> str:
    return f"connection refused: nothing listens at {address}"


def cannot_connect(address: str, why: str) -> str:
    return f"cannot connect to {address}: {why}"


def mute(address: str, seconds: float | None) -> str:
    within = "" if seconds is None else f" within {seconds:g} s"
    return f"no answer{within}: {address} accepts connections but sends nothing"
