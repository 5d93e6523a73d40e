"""Who may see the page, and what it is sent."""

from __future__ import annotations

import http.client
import json
import re
import socket
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from lockstep.dashboard.board import LiveBoard
from lockstep.dashboard.page_server import COOKIE, PageServer, read_files
from lockstep.dashboard.simulated import SimulatedCluster

WAIT = 20.0


class Shown:
    """A served board, and requests to it as a browser would make them."""

    def __init__(self) -> None:
        self.board = LiveBoard(SimulatedCluster(3, 1))
        self.server = PageServer(self.board)
        self.board.look()
        self.server.start()

    def get(self, path: str, host: str = "", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        with self.ask(path, host, **headers) as response:
            return response, response.read()

    @contextmanager
    def ask(self, path: str, host: str = "", **headers: str) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT)) as connection:
            sent = {"Host": host or f"127.0.0.1:{self.server.port}", **headers}
            connection.request("GET", path, headers=sent)
            with connection.getresponse() as response:
                yield response

    def link(self) -> str:
        return "/" + self.server.new_link().split("/", 3)[3]

    def enter(self) -> str:
        response, _ = self.get(self.link())
        return response.headers["Set-Cookie"].partition(";")[0]

    def close(self) -> None:
        self.board.close()  # which ends the streams
        self.server.close()


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    served = Shown()
    yield served
    served.close()


def test_a_link_works_once_and_leaves_a_cookie_that_no_script_and_no_other_site_can_use(shown: Shown) -> None:
    link = shown.link()
    response, body = shown.get(link)
    assert response.status == 200
    assert b"<title>lockstep</title>" in body
    cookie = response.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    again, words = shown.get(link)
    assert again.status == 403
    assert b"Each works once: press Enter" in words
    assert shown.get("/", Cookie=cookie.partition(";")[0])[0].status == 200


@pytest.mark.parametrize("path", ["/", "/frames", "/app.js", "/open/", "/open/guessed", "/../etc/passwd"])
def test_without_a_link_there_is_nothing(shown: Shown, path: str) -> None:
    for cookie in ("", f"{COOKIE}=", f"{COOKIE}=guessed", "=;;"):
        assert shown.get(path, Cookie=cookie)[0].status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", ""])
def test_a_page_elsewhere_cannot_reach_it_by_a_name_of_its_own(shown: Shown, host: str) -> None:
    cookie = shown.enter()
    response, _ = shown.get("/", host or "other:1", Cookie=cookie)
    assert response.status == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:9", "[::1]:8080"])
def test_through_a_tunnel_the_port_may_differ(shown: Shown, host: str) -> None:
    assert shown.get("/", host, Cookie=shown.enter())[0].status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x00\xa5\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a=b;" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /open/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_nonsense_is_refused_and_the_next_request_is_served(shown: Shown, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shown.server.port), WAIT) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert shown.get("/", Cookie=shown.enter())[0].status == 200


def test_nothing_but_the_files_of_the_page_is_served_and_they_name_no_other_place(shown: Shown) -> None:
    cookie = shown.enter()
    assert shown.get("/board.py", Cookie=cookie)[0].status == 404
    for path, (kind, data) in read_files().items():
        response, body = shown.get(path, Cookie=cookie)
        assert (response.status, response.headers["Content-Type"], body) == (200, kind, data)
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), path


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, packed or not."""
    unpack = zlib.decompressobj(31) if response.headers["Content-Encoding"] == "gzip" else None
    text = b""
    while True:
        data = response.read1(65536)
        assert data
        text += data if unpack is None else unpack.decompress(data)
        *whole, text = text.split(b"\n\n")
        yield from (json.loads(one[6:]) for one in whole if one.startswith(b"data: "))


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_frames_arrive_as_events_first_with_all_curves_then_with_their_newest_point(encoding: str) -> None:
    shown = Shown()
    with closing(shown), shown.ask("/frames", Cookie=shown.enter(), **{"Accept-Encoding": encoding}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        stream = events(response)
        first = next(stream)
        assert first["points"]
        assert len(first["tasks"]) == 4
        shown.board.look()
        second = next(stream)
        assert second["number"] == first["number"] + 1
        assert "points" not in second
        assert second["point"][0] >= first["points"][-1][0]
