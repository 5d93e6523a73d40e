"""``lockstep net``: how fast tensors can travel here, or between two hosts, and how far that is from the limits."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.errors import BadInput, HelpAsked
from lockstep.security.chosen import chosen_key, settle
from lockstep.terminal import say
from lockstep.transports.control.addresses import Address, AddressError, main_address, parse_address, parse_bind
from lockstep.transports.control.ports import PortRange, parse_ports

if TYPE_CHECKING:
    from lockstep.transports.net.measured import MeasurementReport
    from lockstep.transports.net.measurement import MeasurementPlan

_HELP = """\
lockstep net: measure every transport, next to a memory copy, a bare TCP socket,
a bare stream of grpcio and bare NIXL, in the same run.

  lockstep net                   between two processes of this machine
  lockstep net --serve[=ADDRESS] wait for the other host, at this machine's main address
                                 and port 4600 by default
  lockstep net HOST:PORT         between this machine and the one that serves there

  --json=FILE       write the numbers there ('-': to standard output, instead of the table)
  --plot=FILE.png   draw them (needs matplotlib)
  --min_size=BYTES  smallest transfer (4096)
  --max_size=BYTES  largest transfer (268435456)
  --rounds=N        how often each transport is measured at each size (3)
  --only=TEXT       measure only what has TEXT in its name; several: with commas
  --ports=A-B       listen at these ports besides that of --serve (default: ports that the kernel chooses)
{key_flags}
Exit codes: 0 done, 1 failed, 2 bad input (nothing started).
"""

DEFAULT_PORT = 4600
_FLAGS = ("json", "plot", "min_size", "max_size", "rounds", "only", "ports")


@dataclass(frozen=True, slots=True)
class _Asked:
    target: str = ""
    serve: str | None = None
    json: str = ""
    plot: str = ""
    min_size: int = 4096
    max_size: int = 256 << 20
    rounds: int = 3
    only: str = ""
    ports: PortRange | None = None


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = parse(argv)
    settle(say)
    if asked.serve is not None:
        return _serve(asked.serve, asked.ports)
    return _measure(asked)


def parse(argv: Sequence[str]) -> _Asked:
    """What a command line asks for. BadInput explains what is wrong with it."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(key_flags=KEY_FLAGS_HELP))
    given: dict[str, str] = {}
    target, serve = "", None
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            target = _one(target, word)
        elif name == "serve":
            serve = value or main_address()
        elif name in _FLAGS and value:
            given[name] = value
        else:
            flags = ", ".join(f"--{flag}=..." for flag in _FLAGS)
            raise BadInput(f"{word!r} is not understood; 'lockstep net' has --serve, {flags}.")
    asked = _Asked(
        target,
        serve,
        given.get("json", ""),
        given.get("plot", ""),
        _whole(given, "min_size", 4096),
        _whole(given, "max_size", 256 << 20),
        _whole(given, "rounds", 3),
        given.get("only", ""),
        _ports(given.get("ports")),
    )
    _check(asked)
    return asked


def _one(before: str, word: str) -> str:
    if before:
        raise BadInput(f"'lockstep net' takes one address, not {before!r} and {word!r}.")
    return word


def _whole(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"--{name}={text} must be a whole number above 0.")
    return int(text)


def _ports(text: str | None) -> PortRange | None:
    try:
        return None if text is None else parse_ports(text)
    except AddressError as error:
        raise BadInput(f"--ports: {error}") from error


def _check(asked: _Asked) -> None:
    if asked.serve is not None and asked.target:
        raise BadInput("--serve and an address exclude each other; leave one out.")
    if asked.min_size > asked.max_size or asked.max_size > 1 << 30:
        raise BadInput("--min_size must not be above --max_size, and --max_size not above 1073741824.")
    if asked.plot and importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            "--plot needs matplotlib, which is not installed; install it with: pip install 'lockstep-torch[plot]'."
        )
    for text in filter(None, (asked.target,)):
        try:
            parse_address(text)
        except AddressError as error:
            raise BadInput(str(error)) from error


def _serve(where: str, ports: PortRange | None) -> int:
    from lockstep.transports.net.serving import NetServer

    try:
        address = parse_bind(where, DEFAULT_PORT)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family)
    except AddressError as error:
        raise BadInput(f"--serve: {error}") from error
    except OSError as error:
        raise BadInput(f"--serve={where} is not available ({error.strerror}); use another address.") from error
    key = chosen_key()
    host, port = listener.getsockname()[:2]
    place = Address(host, port)
    other = f"THIS_HOST:{port}" if place.is_wildcard else place
    print(f"Waiting at {place}; run 'lockstep net {other}' on the other host. Ctrl-C ends it.")
    sys.stdout.flush()
    with closing(NetServer(listener, key, ports)):
        threading.Event().wait()
    return 0


def _measure(asked: _Asked) -> int:
    from lockstep.transports.net.contenders import LIMITS
    from lockstep.transports.net.control import Caller, NetError
    from lockstep.transports.net.measured import SIZES
    from lockstep.transports.net.measurement import MeasurementPlan, local_peer

    sizes = [size for size in SIZES if asked.min_size <= size <= asked.max_size] or [asked.max_size]
    plan = MeasurementPlan(sizes, asked.rounds, only=asked.only)
    with ExitStack() as opened:
        try:
            if asked.target:
                address = parse_address(asked.target)
                caller = Caller(address.host, address.port, chosen_key(), asked.ports)
                opened.callback(caller.close)
            else:
                caller = opened.enter_context(local_peer(asked.ports))
            report = _with_bar(caller, plan)
        except NetError as error:
            say(str(error))
            return 1
    text = json.dumps(report.to_json(LIMITS), indent=1)
    if asked.json and asked.json != "-":
        Path(asked.json).write_text(text + "\n")
    print(text if asked.json == "-" else table(report))
    if asked.plot:
        from lockstep.cli.net_plot import draw

        draw(report, asked.plot)
    return 0


def _with_bar(caller: object, plan: MeasurementPlan) -> MeasurementReport:
    from lockstep.transports.net.control import Caller
    from lockstep.transports.net.measurement import measure

    assert isinstance(caller, Caller)
    if not sys.stderr.isatty():
        return measure(caller, plan, lambda *_: None)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening links")
        return measure(
            caller, plan, lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
        )


# -- the table --


def table(report: MeasurementReport) -> str:
    """The report as text."""
    from lockstep.transports.net.contenders import LIMITS

    lines = [f"here:  {report.here}", f"there: {report.there}"]
    lines += _block(report, "GB/s, several transfers in flight", lambda row: f"{row.bytes_per_second / 1e9:.2f}")
    lines += _block(report, "p50, microseconds until the answer", lambda row: f"{row.latency(0.5) * 1e6:.0f}")
    lines += _block(report, "p99, microseconds until the answer", lambda row: f"{row.latency(0.99) * 1e6:.0f}")
    lines += _block(report, "CPU seconds per GB, both ends together", lambda row: f"{row.cpu_per_gigabyte:.2f}")
    lines += ["", "how close to the limits:"]
    for ratio in report.ratios(LIMITS):
        spread = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        lines.append(f"  {ratio.path} / {ratio.limit}, {in_units(ratio.nbytes)}: {spread}")
    lines += [f"not measured: {name}: {reason}" for name, reason in report.left_out.items()]
    return "\n".join(lines)


def _block(report: MeasurementReport, title: str, show: object) -> list[str]:
    assert callable(show)
    sizes = report.sizes()
    lines = ["", f"{title:<36}" + "".join(f"{in_units(size):>10}" for size in sizes)]
    for name in report.contenders():
        rows = [report.find(name, size) for size in sizes]
        lines.append(f"{name:<36}" + "".join(f"{show(row) if row else '-':>10}" for row in rows))
    return lines


def in_units(nbytes: int) -> str:
    """4 KiB, 1 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} GiB"
