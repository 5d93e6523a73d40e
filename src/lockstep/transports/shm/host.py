"""What a task publishes so that others on its host find it, and why two tasks cannot share memory."""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from lockstep.foreign import read_json
from lockstep.transports.base import NoPathError


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where a task runs: its host and boot, its network namespace, its user, its door and the key to it."""

    host: str
    boot: str
    network: str
    user: int
    door: str
    secret: str

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()


_TYPES: Final = {"str": str, "int": int}


def unpack_place(address: bytes) -> HostPlace:
    """What ``pack`` packed; ValueError for anything else."""
    content = read_json(address)
    try:
        place = HostPlace(**content) if isinstance(content, dict) else None
    except TypeError:
        place = None  # other names, or not all of them
    if place is None or any(type(getattr(place, each.name)) is not _TYPES[str(each.type)] for each in fields(place)):
        raise ValueError("this is not the address of a task on this host")
    return place


def make_place() -> HostPlace:
    """The place of a task of this process, with a new door."""
    boot = network = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return HostPlace(socket.gethostname(), boot, network, os.getuid(), secrets.token_hex(16), secrets.token_hex(16))


def check_same_host(task: str, ours: HostPlace, theirs: HostPlace) -> None:
    """``NoPathError`` says why the two cannot share memory. Only mapping proves that they can."""
    if (theirs.boot or theirs.host) != (ours.boot or ours.host):
        raise NoPathError(f"{task} runs on another host ({theirs.host}, this is {ours.host})")
    if theirs.network != ours.network:
        raise NoPathError(f"{task} runs in another network namespace of this host")
    if theirs.user != ours.user:
        raise NoPathError(f"{task} runs as another user ({theirs.user}, this one as {ours.user})")


def door_address(place: HostPlace) -> bytes:
    """The name of the door's socket; abstract, so that no file is left behind."""
    return b"\0lockstep-" + place.door.encode()
