"""Names that no name server knows: an engine writes them into a file, and changes it when a task comes back elsewhere.

The file has lines as /etc/hosts has them, ``ADDRESS NAME``, and is read at every look-up: it is replaced whole.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Final

from lockstep.private_files import read_plain

VARIABLE: Final = "LOCKSTEP_HOSTS_FILE"
_MOST_BYTES: Final = 1 << 20


def listed_address(name: str) -> str | None:
    """The IP address that the file has for a name; None if it has none, or if there is no such file."""
    where = os.environ.get(VARIABLE, "")
    if not where:
        return None
    try:
        text = read_plain(Path(where), _MOST_BYTES)[0].decode(errors="replace")
    except OSError:
        return None
    wanted = name.lower().rstrip(".")
    for line in text.splitlines():
        address, _, listed = line.partition(" ")
        if listed.strip().lower() == wanted and _is_ip(address):
            return address
    return None


def as_hosts_file(addresses: dict[str, str]) -> bytes:
    """The content of such a file; ``addresses`` by name."""
    return "".join(f"{address} {name}\n" for name, address in sorted(addresses.items())).encode()


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
