"""The kernel's counters of the TCP connections of a process, read over netlink without any privilege.

A transport knows what it handed to the kernel and what it received. What happens in between shows whether a link is
slow, cut, cut in one direction only, or closed to large packets: bytes that wait to be acknowledged, segments that are
sent again and again, and segments that arrived although they carried nothing new.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_ESTABLISHED: Final = 1 << 1
_INFO: Final = 2
_DONE, _ERROR = 3, 2
_HEADER: Final = struct.Struct("=IHHII")
_MESSAGE_BYTES: Final = 72
_INODE: Final = struct.Struct("=I")
_MAX_REPLIES: Final = 4096


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of all connections with one host, added up."""

    segments_in: int = 0
    acknowledged: int = 0
    received: int = 0
    waiting: int = 0
    """Bytes that were handed to the kernel but not acknowledged by the peer's kernel."""
    retransmits: int = 0
    """How often the kernel has sent the same segment again without any progress; of the worst connection."""
    stuck: int = 0
    """The bytes that wait on that connection."""
    path_mtu: int = 0
    """The largest packet that its path takes, as far as its kernel knows."""

    def plus(self, other: Counted) -> Counted:
        worst = max(self, other, key=lambda one: (one.retransmits, one.stuck))
        return Counted(
            self.segments_in + other.segments_in,
            self.acknowledged + other.acknowledged,
            self.received + other.received,
            self.waiting + other.waiting,
            worst.retransmits,
            worst.stuck,
            worst.path_mtu,
        )


def count_by_host(pid: int | None = None) -> dict[str, Counted]:
    """The connections of this process, by the peer's address; empty if the kernel does not report them.

    ``pid``: of another process of this user, in the same network namespace.
    """
    mine = _sockets_of("self" if pid is None else str(pid))
    found: dict[str, Counted] = {}
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            for host, counted in _dump(family, mine):
                found[host] = found.get(host, Counted()).plus(counted)
    except OSError:
        return {}
    return found


def _sockets_of(process: str) -> set[int]:
    found: set[int] = set()
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # it has just been closed
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _dump(family: int, mine: set[int]) -> list[tuple[str, Counted]]:
    """The machine's connections whose sockets are in ``mine``."""
    request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    found: list[tuple[str, Counted]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(0.5)
        asking.sendto(header + request, (0, 0))
        for _ in range(_MAX_REPLIES):
            if not _read_reply(asking.recv(1 << 16), family, mine, found):
                break
    return found


def _read_reply(data: bytes, family: int, mine: set[int], found: list[tuple[str, Counted]]) -> bool:
    """Take in one datagram; False after the last one."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
        if kind in (_DONE, _ERROR) or length < _HEADER.size:
            return False
        body = offset + _HEADER.size
        # Most connections belong to other processes: they cost no more than this check.
        if offset + length >= body + _MESSAGE_BYTES and _INODE.unpack_from(data, body + 68)[0] in mine:
            entry = _read_entry(data[body : offset + length], family)
            if entry is not None:
                found.append(entry)
        offset += (length + 3) & ~3
    return True


def _read_entry(body: bytes, family: int) -> tuple[str, Counted] | None:
    size = 4 if family == socket.AF_INET else 16
    host = socket.inet_ntop(family, body[24 : 24 + size]).removeprefix("::ffff:")
    offset = _MESSAGE_BYTES
    while offset + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, offset)
        if kind == _INFO and length >= 4 + 148:
            return host, _read_info(body[offset + 4 : offset + length], struct.unpack_from("=I", body, 60)[0])
        offset += (max(length, 4) + 3) & ~3
    return None


def _read_info(info: bytes, write_queue: int) -> Counted:
    """The fields of the kernel's ``struct tcp_info`` that matter here; their offsets never change."""
    acknowledged, received = struct.unpack_from("=QQ", info, 120)
    (segments_in,) = struct.unpack_from("=I", info, 140)
    retransmits, (path_mtu,) = info[2], struct.unpack_from("=I", info, 60)
    return Counted(segments_in, acknowledged, received, write_queue, retransmits, write_queue, path_mtu)
