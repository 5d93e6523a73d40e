"""Where a task's monitor shows its metrics, and what can be wrong with that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.security.key import Key, Purpose
from lockstep.transports.control.addresses import Address, AddressError, parse_address

LOOPBACK: Final = "127.0.0.1"
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """``port``: PORT on the loopback address, or HOST:PORT; of several tasks on a host each has the next one.
    ``file``: written again and again, with the task's name in its own."""

    port: str = ""
    file: str = ""

    def __bool__(self) -> bool:
        return bool(self.port or self.file)

    def address(self, number: int = 0) -> Address:
        """Of the task with this number among those on its host. AddressError if there is none."""
        first = parse_address(self.port if not self.port.isdecimal() else f"{LOOPBACK}:{self.port}")
        if not 1 <= first.port + number <= _MAX_PORT:
            raise AddressError(f"{first.port + number} is not a port from 1 to {_MAX_PORT}; give a smaller one.")
        return Address(first.host, first.port + number)

    def path(self, task: str) -> Path:
        """The task's own file: ``lockstep.prom`` becomes ``lockstep-worker-0.prom``."""
        path = Path(self.file)
        return path.with_name(f"{path.stem}-{task}{path.suffix}")


NO_METRICS: Final = MetricsOptions()


def is_loopback(address: Address) -> bool:
    """Whether only this host can connect there."""
    literal = address.literal
    return literal.is_loopback if literal is not None else address.host.lower() == "localhost"


def number_on_host(task: str, cluster: Sequence[tuple[str, str]]) -> int:
    """How many tasks before this one, in the order of the lists, have an address on the same host."""
    hosts = [(name, address.rpartition(":")[0].lower()) for name, address in cluster]
    own = next((index for index, (name, _) in enumerate(hosts) if name == task), 0)
    return sum(host == hosts[own][1] for _, host in hosts[:own])


def metrics_token(key: Key) -> str:
    """What a scraper on another host must send. It opens nothing but the metrics of the jobs with this key."""
    return key.sub(Purpose.METRICS).hex()


def metrics_problems(options: MetricsOptions) -> Iterator[str]:
    """What is wrong with these, one sentence each."""
    if options.port:
        try:
            options.address()
        except AddressError:
            yield (
                f"--metrics_port={options.port} is not a port from 1 to {_MAX_PORT}; give PORT, or HOST:PORT to be "
                "reached from other hosts."
            )
    if options.file:
        path = Path(options.file)
        if path.is_dir() or not path.suffix:
            yield f"--metrics_file={options.file} is not the name of a file; give one like FOLDER/lockstep.prom."
        elif not path.absolute().parent.is_dir():
            yield f"--metrics_file={options.file}: there is no folder {path.absolute().parent}; make it first."
