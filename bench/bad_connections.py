"""What strangers cost a running job: its speed with bad connections at all of its ports, compared with its speed
beside the same connections to a program that accepts and closes them.

    python bench/bad_connections.py [--rate=100] [--pairs=6] [--seconds=6] [--protocol=grpc] [--at_least=0.9]

One server and two workers train ``trivial``. Another process opens ``rate`` connections per second, spread over the
ports in random order: silent ones, ones that send garbage, TLS with another key, and gRPC without TLS. They go to the
job's own ports (those of all its processes, as the kernel lists them) and to the bare listener in turns, while the job
runs on, so each ratio compares two neighbouring spells of one job. With ``--at_least`` the exit code is 1 if the mean
ratio is lower. ``--tree=FOLDER`` runs the job of another version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.runtime.listening import listening_sockets
from lockstep.security.certificates import certificates_for
from lockstep.security.key import find_key
from two_trees import interval

HERE = Path(__file__).resolve()
START_SECONDS = 120.0
SETTLE_SECONDS = 1.0
"""After a change of targets: connections to the former ones are closed by then, mostly."""
HOLD_SECONDS = 2.0
"""How long a stranger waits for what never comes."""
TLS_AT_ONCE = 4
MOST_WAITING = 64
_STEP = re.compile(r"^(\d+)\timages/sec")


# -- the strangers: a process that reads targets, one JSON list per line, and prints how many connections it made --


def grpc_call() -> bytes:
    """A call of ``Task.Data`` with a first message that makes no sense, as HTTP/2 without TLS."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    # Two fields by their number in HPACK's table (POST, http), three names by number, and one field in full.
    fields = b"\x83\x86" + b"\x04" + text(b"/lockstep.Task/Data") + b"\x01" + text(b"lockstep.job")
    fields += b"\x0f\x10" + text(b"application/grpc") + b"\x00" + text(b"te") + text(b"trailers")
    message = bytes(64)
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, fields) + frame(0, 0, 1, data)


def another_key(folder: Path) -> ssl.SSLContext:
    """A client of TLS whose certificate another key has signed, and that accepts any server."""
    path = folder / "another-key"
    path.touch(0o600)
    path.write_text(random.randbytes(32).hex())
    made = certificates_for(find_key(str(path)), {})
    pair = folder / "pair.pem"
    pair.touch(0o600)
    pair.write_bytes(made.private + made.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(pair)
    return context


class Strangers:
    """Opens connections at a steady rate, and leaves each after a while."""

    def __init__(self, rate: float, context: ssl.SSLContext) -> None:
        self._every = 1.0 / rate
        self._context = context
        self._pool = ThreadPoolExecutor(TLS_AT_ONCE)
        self._in_tls = threading.Semaphore(MOST_WAITING)
        self._held: deque[tuple[float, socket.socket]] = deque()
        self._opening = {"silent": b"", "garbage": random.randbytes(1024), "grpc": grpc_call()}
        self._kinds = [*self._opening, "tls"]
        self._lock = threading.Lock()
        self.targets: list[str] = []
        self.made = 0

    def run(self) -> None:
        due = time.monotonic()
        for number in range(sys.maxsize):
            due = max(due + self._every, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
            while self._held and self._held[0][0] < time.monotonic():
                self._held.popleft()[1].close()
            if self.targets:
                self._open(self._kinds[number % len(self._kinds)], random.choice(self.targets))

    def _open(self, kind: str, target: str) -> None:
        host, _, port = target.rpartition(":")
        if kind == "tls":
            if self._in_tls.acquire(blocking=False):
                self._pool.submit(self._shake_hands, host, int(port))
            return
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, int(port)), timeout=1.0)
            self._count()
            self._held.append((time.monotonic() + HOLD_SECONDS, connection))
            connection.sendall(self._opening[kind])

    def _shake_hands(self, host: str, port: int) -> None:
        try:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=HOLD_SECONDS) as plain:
                self._count()
                with self._context.wrap_socket(plain, server_hostname="lockstep.job") as connection:
                    connection.recv(1)  # a client learns only now that its certificate is refused
        finally:
            self._in_tls.release()

    def _count(self) -> None:
        with self._lock:
            self.made += 1


def be_strangers(rate: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = another_key(Path(folder))
    strangers = Strangers(rate, context)
    threading.Thread(target=strangers.run, daemon=True).start()
    for line in sys.stdin:
        strangers.targets = json.loads(line)
        print(strangers.made, flush=True)
    os._exit(0)


# -- the bare listener --


def be_bare(ports: int) -> None:
    """Accept and close at as many ports, until stdin ends."""
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(ports)]
    for one in listeners:
        threading.Thread(target=accept_and_close, args=(one,), daemon=True).start()
    print(json.dumps([f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]), flush=True)
    sys.stdin.read()
    os._exit(0)


def accept_and_close(listener: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()


# -- the measurement --


class Helper:
    """One of the two processes above; it ends with its stdin."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, str(HERE), *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str = "") -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10.0)


class Job:
    """A cluster on this machine, with the moments of its steps."""

    def __init__(self, tree: Path, protocol: str) -> None:
        command = [sys.executable, "-m", "lockstep", "bench", "--ps=1", "--workers=2", "--device=cpu"]
        command += ["--model=trivial", "--batch_size=32", "--num_threads=1", "--num_batches=100000000"]
        command += ["--display_every=5", f"--server_protocol={protocol}"]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self._moments: list[tuple[float, int]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := _STEP.match(line):
                self._moments.append((time.monotonic(), int(found[1])))

    def wait_until_it_trains(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._moments:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the job did not begin to train")
            time.sleep(0.05)

    def ports(self) -> list[str]:
        return [str(one) for one in listening_sockets([self.process.pid])]

    def speed(self, seconds: float) -> float:
        """Steps per second from now on."""
        began = time.monotonic()
        time.sleep(seconds)
        if self.process.poll() is not None:
            raise SystemExit(f"the job ended with exit code {self.process.returncode}")
        inside = [moment for moment in self._moments if moment[0] >= began]
        if len(inside) < 2:
            return 0.0
        (first, low), (last, high) = inside[0], inside[-1]
        return (high - low) / (last - first)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60.0)
        self._reading.join(10.0)


def ratios(asked: argparse.Namespace) -> Iterator[float]:
    """Speed with strangers at the job's ports / speed with strangers at the bare listener, pair by pair."""
    with contextlib.ExitStack() as stack:
        job = Job(asked.tree.resolve(), asked.protocol)
        stack.callback(job.close)
        job.wait_until_it_trains()
        ports = job.ports()
        bare = Helper("--bare", str(len(ports)))
        stack.callback(bare.close)
        targets = {"job": ports, "bare": json.loads(bare.tell())}
        strangers = Helper("--strangers", str(asked.rate))
        stack.callback(strangers.close)
        print(f"{len(ports)} ports: {' '.join(ports)}", flush=True)
        strangers.tell("[]")
        job.speed(SETTLE_SECONDS)
        for pair in range(asked.pairs):
            speed, rate = {}, {}
            for name in ("bare", "job") if pair % 2 else ("job", "bare"):
                before, began = int(strangers.tell(json.dumps(targets[name]))), time.monotonic()
                job.speed(SETTLE_SECONDS)
                speed[name] = job.speed(asked.seconds)
                made = int(strangers.tell(json.dumps(targets[name]))) - before
                rate[name] = made / (time.monotonic() - began)
                if rate[name] < 0.8 * asked.rate:
                    raise SystemExit(f"only {rate[name]:.0f} connections per second reached the {name} listeners")
            ratio = speed["job"] / speed["bare"]
            words = [f"{name} {speed[name]:.1f} steps/s ({rate[name]:.0f} connections/s)" for name in targets]
            print(f"pair {pair + 1}: {', '.join(words)}, ratio {ratio:.3f}", flush=True)
            yield ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--protocol", default="grpc", help="a name of --server_protocol")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1])
    parser.add_argument("--at_least", type=float, default=0.0)
    parser.add_argument("--strangers", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.strangers is not None:
        be_strangers(asked.strangers)
    if asked.bare is not None:
        be_bare(asked.bare)
    found = list(ratios(asked))
    low, high = interval(found)
    mean = statistics.fmean(found)
    print(f"{asked.rate:g} bad connections per second: {mean:.3f} of the speed ({low:.3f} to {high:.3f})")
    if mean < asked.at_least:
        sys.exit(1)


if __name__ == "__main__":
    main()
