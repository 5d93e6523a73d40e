"""Where a monitor shows metrics: at ``/metrics`` over HTTP, and in a file for node_exporter's textfile collector."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final, Protocol

from lockstep.errors import BadInput
from lockstep.private_files import replace_file
from lockstep.runtime.monitor.exposition import CONTENT_TYPE
from lockstep.runtime.monitor.metrics_keeper import MetricsKeeper, short_name
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.startup.metrics_options import MetricsOptions, is_loopback, metrics_token, number_on_host
from lockstep.runtime.startup.run_name import run_name
from lockstep.security.chosen import chosen_key
from lockstep.security.proof import ProofError, Refusal
from lockstep.security.refusals import REFUSALS, Entrance
from lockstep.security.strangers import Strangers
from lockstep.terminal import say
from lockstep.transports.control.addresses import Address, AddressError, resolve, who_listens

LOOK_SECONDS: Final = 0.5
WRITE_SECONDS: Final = 10.0
REQUEST_SECONDS: Final = 5.0
_JOIN_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1


@contextlib.contextmanager
def exporting(options: MetricsOptions, record: TaskRecord, cluster: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Show the metrics of a task while the block runs, if that was asked for. BadInput if it is not possible."""
    if not options:
        yield
        return
    task = record.describe().task
    keeper = MetricsKeeper(record, run_name(os.environ))
    with contextlib.ExitStack() as until_end:
        if options.port:
            server = MetricsServer(_address(options, number_on_host(task, cluster)), keeper.text)
            until_end.callback(server.close)
        path = options.path(short_name(task)) if options.file else None
        until_end.callback(MetricsWriter(keeper, path).close)
        yield


def _address(options: MetricsOptions, number: int) -> Address:
    try:
        return options.address(number)
    except AddressError as error:
        raise BadInput(f"--metrics_port={options.port}: {error}") from None


class MetricsSource(Protocol):
    """Whatever can be shown. ``look``: whether something has happened that the file should have at once."""

    def look(self) -> bool: ...

    def text(self) -> str: ...


class MetricsWriter:
    """The thread that asks the task when nobody else could in time, and writes the file."""

    def __init__(self, keeper: MetricsSource, path: Path | None) -> None:
        self._keeper = keeper
        self._path = path
        self._problem = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_JOIN_SECONDS)
        self._write()  # the end, and how it came

    def _run(self) -> None:
        write_at = 0.0
        while not self._over.wait(LOOK_SECONDS):
            if self._keeper.look() or time.monotonic() >= write_at:
                self._write()
                write_at = time.monotonic() + WRITE_SECONDS

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, self._keeper.text().encode())
            self._problem = ""
        except OSError as error:
            problem = f"--metrics_file: cannot write {self._path} ({error.strerror or error}); it is tried again"
            if problem != self._problem:
                self._problem = problem
                say(problem)


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers ``GET /metrics``. Where other hosts could connect, a caller must send the token of the job's key."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: Address, page: Callable[[], str]) -> None:
        """BadInput if nothing can listen there."""
        self.page = page
        key = None if is_loopback(address) else chosen_key()
        self.token = "" if key is None else metrics_token(key)
        """Empty: nobody has to send one."""
        self.where = str(address)
        self._strangers = Strangers()
        try:
            found = resolve(address.host)[0]
            self.address_family = socket.AF_INET6 if found.version == 6 else socket.AF_INET
            super().__init__((str(found), address.port), _Handler)
        except OSError as error:
            raise BadInput(_why_not(address, error)) from None
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": _POLL_SECONDS}, name="metrics port", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._strangers.cut_all()
        self._thread.join(_JOIN_SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """A caller that says nothing, or one byte now and then, makes room for the next one."""
        with contextlib.suppress(ProofError), self._strangers.place(lambda: _cut(request)):
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """It hung up, or took too long: no concern of this job's."""


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = REQUEST_SECONDS
    server_version = "Lockstep"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "the metrics of this task are at /metrics\n")
        elif not self._has_token():
            caller = str(self.client_address[0])
            REFUSALS.note(Entrance.METRICS, self.server.where, caller, Refusal.NO_TOKEN)
            self._answer(HTTPStatus.UNAUTHORIZED, "send the token that 'lockstep metrics token' prints\n")
        else:
            self._answer(HTTPStatus.OK, self.server.page())

    def _has_token(self) -> bool:
        sent = self.headers.get("Authorization", "").encode(errors="replace")
        expected = self.server.token
        return not expected or hmac.compare_digest(sent, f"Bearer {expected}".encode())

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _why_not(address: Address, error: OSError) -> str:
    holder = who_listens(address.port)
    by_whom = "" if holder is None else f" by {holder}"
    reason = f"the port is taken{by_whom}" if holder is not None else error.strerror or str(error)
    return f"cannot show metrics at {address}: {reason}; give another --metrics_port."
