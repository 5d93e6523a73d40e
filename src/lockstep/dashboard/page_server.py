"""Serves the page on this machine's loopback: plain files, and frames as server-sent events.

Who may look: whoever has opened a link that the command printed. A link works once and leaves a cookie behind, so what
stays in a browser's history or in a chat opens nothing. The ``Host`` of a request must be a name of the loopback, so no
web page elsewhere can read from here through a name of its own; the port may differ, as it does through an ssh tunnel.
The key of the job stays in this process: the browser gets frames and nothing else.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final

from lockstep.dashboard.board import LiveBoard

LOOPBACK: Final = "127.0.0.1"
NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
COOKIE: Final = "lockstep_dashboard"
REQUEST_SECONDS: Final = 20.0
"""How long a connection may take to send its request, or to take what it is sent."""
QUIET_SECONDS: Final = 10.0
"""A stream without frames gets a comment this often, so that tunnels keep it open and a closed one is noticed."""
MOST_CONNECTIONS: Final = 48
MOST_LINKS: Final = 16

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_USED: Final = (
    "This link has been used, or was never given. Each works once: press Enter in the terminal where "
    "'lockstep dashboard' runs, and open the one that it prints.\n"
)


def read_files() -> dict[str, tuple[str, bytes]]:
    """Every file of the page by its path, with its type; nothing else is ever served."""
    found = {}
    for entry in files("lockstep.dashboard").joinpath("static").iterdir():
        name = entry.name
        kind = _TYPES.get(name[name.rfind(".") :])
        if kind is not None:
            found[f"/{name}"] = (kind, entry.read_bytes())
    return found


class Doors:
    """Links that have not been used yet, and the cookies of those that have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: deque[str] = deque(maxlen=MOST_LINKS)
        self._cookies: deque[str] = deque(maxlen=MOST_LINKS)

    def new_link(self) -> str:
        """The secret part of a new link."""
        link = secrets.token_urlsafe(24)
        with self._lock:
            self._links.append(link)
        return link

    def enter(self, link: str) -> str | None:
        """The cookie for whoever opens this link; None if it is none, or was used."""
        with self._lock:
            for known in list(self._links):
                if hmac.compare_digest(known.encode(), link.encode()):
                    self._links.remove(known)
                    self._cookies.append(secrets.token_urlsafe(24))
                    return self._cookies[-1]
        return None

    def knows(self, cookie: str) -> bool:
        with self._lock:
            return any(hmac.compare_digest(known.encode(), cookie.encode()) for known in self._cookies)


class PageServer:
    """The server of one board, at a port of the loopback."""

    def __init__(self, board: LiveBoard, port: int = 0) -> None:
        self._doors = Doors()
        self._server = _Server((LOOPBACK, port), board, self._doors)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._serve, name="dashboard page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def new_link(self) -> str:
        """A link to the page that works once."""
        return f"http://{LOOPBACK}:{self.port}/open/{self._doors.new_link()}"

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """The board must be closed first: streams end with it."""
        if self._thread.ident is not None:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], board: LiveBoard, doors: Doors) -> None:
        self.board, self.doors, self.files = board, doors, read_files()
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each connection, of which there are only so many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "lockstep"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._for_this_host():
            self._text(HTTPStatus.MISDIRECTED_REQUEST, "This page answers at 127.0.0.1 and localhost only.\n")
            return
        opened, _, link = path[1:].partition("/")
        if opened == "open":
            cookie = self.server.doors.enter(link)
            if cookie is None:
                self._text(HTTPStatus.FORBIDDEN, _USED)
            else:
                # No redirect: a browser that comes from a link in a chat would not send the cookie along.
                self._file("/index.html", cookie)
        elif not self._has_cookie():
            self._text(HTTPStatus.FORBIDDEN, _USED)
        elif path == "/frames":
            self._frames()
        else:
            self._file("/index.html" if path == "/" else path)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The terminal is for the links."""

    def _for_this_host(self) -> bool:
        name = self.headers.get("Host", "")
        host = name if name.endswith("]") else name.rpartition(":")[0] or name
        return host.lower() in NAMES

    def _has_cookie(self) -> bool:
        for one in self.headers.get("Cookie", "").split(";"):
            name, _, value = one.strip().partition("=")
            if name == COOKIE and self.server.doors.knows(value):
                return True
        return False

    def _file(self, path: str, cookie: str = "") -> None:
        found = self.server.files.get(path)
        if found is None:
            self._text(HTTPStatus.NOT_FOUND, "There is nothing here.\n")
            return
        more = {"Set-Cookie": f"{COOKIE}={cookie}; HttpOnly; SameSite=Strict; Path=/"} if cookie else {}
        self._answer(HTTPStatus.OK, found[0], found[1], more)

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", text.encode(), {"Connection": "close"})

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **more, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _frames(self) -> None:
        """Every new frame until the browser or the board goes. A slow browser misses frames and gets the newest."""
        self.close_connection = True
        packs = "gzip" in self.headers.get("Accept-Encoding", "")
        self.send_response(HTTPStatus.OK)
        for name, value in {**_HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(name, value)
        if packs:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        send = self._packed() if packs else self._plain
        board, number = self.server.board, 0
        send(b"retry: 1000\n\n")
        while not board.closed:
            newer = board.wait_newer(number, QUIET_SECONDS)
            if newer is None:
                send(b":\n\n")
                continue
            frame, seen = newer
            send(board.next_message(frame) if number and seen == number + 1 else board.first_message(frame))
            number = seen

    def _plain(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _packed(self) -> Callable[[bytes], None]:
        """Frames resemble one another: behind a slow tunnel they take a tenth of their size."""
        packer = zlib.compressobj(6, zlib.DEFLATED, 31)

        def send(data: bytes) -> None:
            self._plain(packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))

        return send
