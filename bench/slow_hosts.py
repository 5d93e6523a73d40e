"""Hosts on one machine with a slow network between them: rate, delay and loss, without help of the kernel's queues.

Each host is a network namespace whose only way out is a TUN device. One process, the forwarder, holds the other ends:
it reads every packet, lets it wait for the sender's adapter, for the delay, and for the receiver's adapter, and writes
it to the host that it is for. An adapter is what it is in the simulator's capacity model (``sim/nic.py``): one queue
out and one in, each with the rate; what finds more than ``BUFFER_SECONDS`` waiting there is dropped, as by a switch.

Large packets pass as the kernel makes them (up to 64 KiB, cut and joined only at the ends), which spares the forwarder
work. They count as the Ethernet packets that they would be; if one of these is lost, those that left with it are too.

Needs root. ``python bench/slow_hosts.py --help`` is the forwarder itself.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from lockstep.benchmark.compare.run_hosts import RunHost
from lockstep.runtime.host_network import ip, run_command, run_prefix

BUFFER_SECONDS: Final = 0.05
"""So much may wait at an adapter, beyond it packets are dropped."""
NETWORK: Final = "10.79.0"
_MTU: Final = 1500
_HEADERS: Final = 40
"""Of IPv4 and TCP, in each packet."""
_ETHERNET: Final = 38
"""Bytes that Ethernet adds to each packet."""
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CSUM, _TSO4 = 1, 2
_OFFLOAD: Final = struct.Struct("<BBHHHH")
"""Before each packet: flags, kind, length of headers, bytes of each packet, and where the checksum goes."""
_MOST_BYTES: Final = 70_000
_STOP: Final = "stop\n"


@dataclass(frozen=True, slots=True)
class Slowness:
    """A network: bits per second of each adapter in each direction, seconds of delay one way, share of packets lost."""

    rate: float = 1e9
    delay: float = 0.0
    loss: float = 0.0


class SlowQueue:
    """One direction of an adapter."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def take(self, now: float, nbytes: int) -> float | None:
        """When so many bytes that come now have passed; None if too much waits before them."""
        begin = max(now, self._free_at)
        if begin - now > BUFFER_SECONDS:
            return None
        self._free_at = begin + 8 * nbytes / self._rate
        return self._free_at


def packets_of(nbytes: int, each: int) -> int:
    """How many packets this is on a wire; ``each``: bytes of data in one, 0 if it was not put together."""
    return max(1, -(-(nbytes - _HEADERS) // each)) if each else 1


class Forwarder:
    """Between the hosts at these descriptors, whose addresses end in 1, 2, 3, ..."""

    def __init__(self, hosts: Sequence[int], slowness: Slowness) -> None:
        self._hosts = hosts
        self._slowness = slowness
        self._out = [SlowQueue(slowness.rate) for _ in hosts]
        self._into = [SlowQueue(slowness.rate) for _ in hosts]
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._dice = random.Random(1)
        self.moved = self.lost = self.dropped = 0

    def run(self, until: int) -> None:
        """Forward until this descriptor can be read."""
        watched = (*self._hosts, until)
        while True:
            pause = None if not self._waiting else max(0.0, self._waiting[0][0] - time.monotonic())
            ready, _, _ = select.select(watched, (), (), pause)  # unlike poll, it counts in microseconds
            if until in ready:
                return
            for host, descriptor in enumerate(self._hosts):
                if descriptor in ready:
                    self._take(host, os.read(descriptor, _MOST_BYTES))
            self._deliver(time.monotonic())

    def _take(self, host: int, frame: bytes) -> None:
        packet = len(frame) - _OFFLOAD.size
        target = frame[_OFFLOAD.size + 19] - 1  # the last byte of the address that it is for
        if frame[_OFFLOAD.size] >> 4 != 4 or not 0 <= target < len(self._hosts):
            return
        count = packets_of(packet, _OFFLOAD.unpack_from(frame)[3])
        wire = packet + (count - 1) * _HEADERS + count * _ETHERNET
        now = time.monotonic()
        left = self._out[host].take(now, wire)
        there = None if left is None else self._into[target].take(left + self._slowness.delay, wire)
        if there is None:
            self.dropped += count
        elif self._slowness.loss and self._dice.random() < 1 - (1 - self._slowness.loss) ** count:
            self.lost += count
        else:
            self._number += 1
            heapq.heappush(self._waiting, (there, self._number, target, frame))

    def _deliver(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            os.write(self._hosts[target], frame)
            self.moved += len(frame)


def _open_device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CSUM | _TSO4)
    return descriptor


class SlowHosts:
    """Hosts while the block lasts; ``hosts`` has them in order. ``share``: of a core that the forwarder took."""

    def __init__(self, count: int, slowness: Slowness, congestion: str = "reno") -> None:
        """``congestion``: how the hosts' TCP finds its speed, one of ``net.ipv4.tcp_allowed_congestion_control``."""
        self._congestion = congestion
        self._names = [f"lq{os.getpid()}n{number}" for number in range(count)]
        self._slowness = slowness
        self._forwarder: subprocess.Popen[str] | None = None
        self.hosts: tuple[RunHost, ...] = ()
        self.share = 0.0
        self.report: dict[str, float] = {}

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                ip("netns", "add", name)
            self._start()
            for name in self._names:
                run_command([*run_prefix(name), "tee", "/proc/sys/net/ipv4/tcp_congestion_control"], self._congestion)
        except BaseException:
            self._stop()
            raise
        self.hosts = tuple(
            RunHost(f"{NETWORK}.{number}", f"q{number}", tuple(run_prefix(name)))
            for number, name in enumerate(self._names, 1)
        )
        return self

    def _start(self) -> None:
        slow = self._slowness
        numbers = [f"--rate={slow.rate}", f"--delay={slow.delay}", f"--loss={slow.loss}"]
        command = [sys.executable, str(Path(__file__).resolve()), *numbers, *self._names]
        self._began = time.monotonic()
        self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._forwarder.stdout is not None
        if not self._forwarder.stdout.readline():
            raise RuntimeError(f"the forwarder ended with exit code {self._forwarder.wait()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told = self._stop()
        self.report = json.loads(told)
        self.share = self.report["processor_seconds"] / (time.monotonic() - self._began)

    def _stop(self) -> str:
        """End the forwarder, then the hosts; what it reports."""
        told = "" if self._forwarder is None else self._forwarder.communicate(_STOP, timeout=10)[0]
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=10)
        return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of each adapter, in each direction")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, one way")
    parser.add_argument("--loss", type=float, default=0.0, help="the share of packets that are lost")
    parser.add_argument("namespaces", nargs="+", help="the hosts: namespaces that exist")
    asked = parser.parse_args()
    descriptors = []
    for number, namespace in enumerate(asked.namespaces, 1):
        device = f"q{number}"
        made = f"lq{os.getpid()}x{number}"
        descriptors.append(_open_device(made))
        ip("link", "set", made, "netns", namespace, "name", device)
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "addr", "add", f"{NETWORK}.{number}/24", "dev", device)
        ip("-n", namespace, "link", "set", device, "up", "mtu", str(_MTU), "txqueuelen", "10000")
    with contextlib.suppress(PermissionError):
        # What the network does must not depend on what else runs here.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    forwarder = Forwarder(descriptors, Slowness(asked.rate, asked.delay, asked.loss))
    print("ready", flush=True)
    forwarder.run(sys.stdin.fileno())
    used = resource.getrusage(resource.RUSAGE_SELF)
    counted = {"moved_bytes": forwarder.moved, "lost": forwarder.lost, "dropped": forwarder.dropped}
    print(json.dumps({**counted, "processor_seconds": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main()
