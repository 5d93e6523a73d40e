"""One measurement: all contenders in turn, several rounds at each size, so that all see the same machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lockstep.security.chosen import chosen_key
from lockstep.transports.base import TransportError
from lockstep.transports.control.ports import PortRange, PortsUsedUp
from lockstep.transports.net.contenders import (
    ENCRYPTED,
    GRPC,
    LINKED_TCP,
    SHM,
    SHM_LEND,
    UCX,
    VERBS,
    BareGrpc,
    BareNixl,
    Contender,
    Linked,
    MemoryCopy,
    TcpSocket,
)
from lockstep.transports.net.control import Caller, NetError
from lockstep.transports.net.measured import Measured, MeasurementReport, describe_machine
from lockstep.transports.registry import missing_library
from lockstep.transports.ucx.agent import AgentError

IN_FLIGHT = 4
SERVING = ("-m", "lockstep.transports.net.serving")
"""What Python runs as the peer on this machine."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What to measure."""

    sizes: Sequence[int]
    rounds: int = 3
    burst_seconds: float = 0.1
    only: str = ""
    """Only contenders whose name contains this, or one of these with commas between them."""


@contextmanager
def local_peer(ports: PortRange | None = None, program: Sequence[str] = SERVING) -> Iterator[Caller]:
    """A peer in a separate process on this machine. It ends with the connection, whatever happens here."""
    command = [sys.executable, *program, *([] if ports is None else [str(ports)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        caller = Caller("127.0.0.1", int(process.stdout.readline()), chosen_key(), ports)
        try:
            yield caller
        finally:
            caller.close()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(caller: Caller, plan: MeasurementPlan, progress: Callable[[int, int, str], None]) -> MeasurementReport:
    """Run the plan with this peer; ``progress`` is called with the number done, the total, and what is next."""
    report = MeasurementReport(describe_machine(), caller.call("describe"))
    with ExitStack() as opened:
        contenders = _open_all(caller, plan, report, opened)
        if not contenders:
            raise NetError("nothing that was requested can be measured here")
        total = len(plan.sizes) * plan.rounds * len(contenders)
        done = 0
        for nbytes in plan.sizes:
            rows = [Measured(contender.name, nbytes) for contender in contenders]
            for _ in range(plan.rounds):
                for contender, row in zip(contenders, rows, strict=True):
                    progress(done, total, f"{contender.name}, {nbytes} bytes")
                    _one_round(caller, contender, row, plan.burst_seconds)
                    done += 1
            report.rows += rows
    return report


def _open_all(caller: Caller, plan: MeasurementPlan, report: MeasurementReport, opened: ExitStack) -> list[Contender]:
    nbytes = max(plan.sizes)
    contenders: list[Contender] = []

    def attempt(name: str, make: Callable[[], Contender]) -> None:
        if not any(part in name for part in plan.only.split(",")):
            return
        try:
            contender = make()
        except (NetError, TransportError, AgentError, PortsUsedUp) as error:
            report.left_out[name] = str(error)
            return
        opened.callback(contender.close)
        contenders.append(contender)

    attempt(MemoryCopy.name, lambda: MemoryCopy(nbytes))
    attempt(TcpSocket.name, lambda: TcpSocket(caller, nbytes))
    attempt(BareGrpc.name, lambda: BareGrpc(caller, nbytes))
    # Before any other use of NIXL: a process loads it once, with the libibverbs that the device needs.
    attempt(VERBS, lambda: Linked(caller, VERBS, nbytes))
    missing = missing_library(UCX)
    if missing is None:
        attempt(BareNixl.name, lambda: BareNixl(caller, nbytes))
    else:
        report.left_out[BareNixl.name] = missing
    if caller.key is None:
        report.left_out |= dict.fromkeys(ENCRYPTED, "--insecure does not encrypt")
    for transport in (*(() if caller.key is None else ENCRYPTED), LINKED_TCP, GRPC, SHM, UCX):
        attempt(transport, lambda transport=transport: Linked(caller, transport, nbytes))  # type: ignore[misc]
    shared = next((one for one in contenders if one.name == SHM), None)
    if isinstance(shared, Linked):
        contenders.append(shared.lender(SHM_LEND))
    return contenders


def _one_round(caller: Caller, contender: Contender, row: Measured, seconds: float) -> None:
    """Transfers one by one for their latency, then several in flight for the rate."""
    contender.begin()
    try:
        alone = _burst(contender, row.nbytes, seconds, 1)
        row.latencies += alone.latencies
        busy = time.process_time(), caller.call("cpu")
        flood = _burst(contender, row.nbytes, seconds, IN_FLIGHT)
        row.cpu_seconds += time.process_time() - busy[0] + caller.call("cpu") - busy[1]
        row.moved += flood.count * row.nbytes
        row.rates.append(flood.count * row.nbytes / flood.seconds)
    finally:
        contender.end()


@dataclass(slots=True)
class _Burst:
    count: int
    seconds: float
    latencies: list[float]


def _burst(contender: Contender, nbytes: int, seconds: float, in_flight: int) -> _Burst:
    starts: deque[float] = deque()
    latencies: list[float] = []
    began = ended = time.perf_counter()
    count = 0
    while ended - began < seconds or count < in_flight:
        starts.append(time.perf_counter())
        contender.start(nbytes)
        count += 1
        if len(starts) == in_flight:
            ended = contender.finish()
            latencies.append(ended - starts.popleft())
    while starts:
        ended = contender.finish()
        latencies.append(ended - starts.popleft())
    return _Burst(count, ended - began, latencies)
