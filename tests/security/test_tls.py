"""Connections in TLS: whoever lacks a certificate of the job gets no further, and is named."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.keys import make_key
from helpers.waiting import wait_until
from lockstep.security.certificates import Certificates, certificates_for
from lockstep.security.key import find_key
from lockstep.security.listening import ProvenListener
from lockstep.security.proof import Parties, ProofError, Refusal
from lockstep.security.strangers import PLACES
from lockstep.security.tls import SHAKING_BYTES, PrivateConnection, PrivateEnds
from lockstep.security.wire import ProvenSocket, dial

PARTIES = Parties(purpose="test", dialer="/a", acceptor="/b", version="1")
KEY = b"k" * 32
SECONDS = 10.0


@pytest.fixture(name="own")
def _own(tmp_path: Path) -> Certificates:
    return certificates_for(find_key(make_key(tmp_path / "key")))


class Listening:
    def __init__(self, own: Certificates) -> None:
        self.used: list[ProvenSocket] = []
        self.refused: list[Refusal] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()
        ends = PrivateEnds(own)

        def use(proven: ProvenSocket) -> None:
            self.used.append(proven)
            with proven.socket, contextlib.suppress(ProofError):
                proven.send(proven.receive(1000, time.monotonic() + SECONDS), time.monotonic() + SECONDS)

        def refuse(_: str, error: ProofError) -> None:
            self.refused.append(error.refusal)

        self.door = ProvenListener(listener, KEY, lambda _: PARTIES, use, "test", refuse, ends)

    def refusal(self) -> Refusal:
        wait_until(lambda: self.refused, SECONDS, "the refusal")
        return self.refused.pop()


@pytest.fixture(name="listening")
def _listening(own: Certificates) -> Iterator[Listening]:
    listening = Listening(own)
    yield listening
    listening.door.close()


def deadline() -> float:
    return time.monotonic() + SECONDS


def test_two_ends_with_the_key_talk_and_a_long_message_arrives_whole(listening: Listening, own: Certificates) -> None:
    message = bytes(range(250)) * 4
    with socket.create_connection(listening.where) as line:
        proven = dial(PrivateEnds(own).dial(line, deadline()), KEY, PARTIES, deadline())
        assert proven.private is not None
        proven.send(message, deadline())
        assert proven.receive(1000, deadline()) == message
    assert listening.refused == []


def test_whoever_has_a_certificate_of_another_key_is_refused_by_both_ends(listening: Listening, tmp_path: Path) -> None:
    other = certificates_for(find_key(make_key(tmp_path / "other", 8)))
    with socket.create_connection(listening.where) as line:
        with pytest.raises(ProofError) as refused:
            PrivateEnds(other).dial(line, deadline())
        assert refused.value.refusal is Refusal.OTHER_KEY
        assert listening.refusal() is Refusal.OTHER_KEY


def shown_by(certificates: Certificates | None, folder: Path) -> ssl.SSLContext:
    """A client that believes everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificates is not None:
        (folder / "shown.pem").write_bytes(certificates.private + certificates.certificate)
        context.load_cert_chain(folder / "shown.pem")
    return context


@pytest.mark.parametrize(
    ("named", "refusal"), [("other", Refusal.OTHER_KEY), ("", Refusal.UNPROVEN)], ids=["another key", "no certificate"]
)
def test_a_certificate_is_demanded_of_whoever_dials(
    listening: Listening, tmp_path: Path, named: str, refusal: Refusal
) -> None:
    shown = certificates_for(find_key(make_key(tmp_path / named, 8))) if named else None
    with (
        socket.create_connection(listening.where) as line,
        contextlib.suppress(OSError),
        shown_by(shown, tmp_path).wrap_socket(line) as shaken,
    ):
        shaken.recv(1)
    assert listening.refusal() is refusal
    assert listening.used == []


def test_an_older_tls_is_refused(listening: Listening, own: Certificates, tmp_path: Path) -> None:
    old = shown_by(own, tmp_path)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(listening.where) as line, pytest.raises(ssl.SSLError):
        old.wrap_socket(line)
    assert listening.refusal() is Refusal.MALFORMED


def in_plain(line: socket.socket) -> None:
    with pytest.raises(ProofError):
        dial(line, KEY, PARTIES, deadline())


def as_a_browser(line: socket.socket) -> None:
    line.sendall(b"GET / HTTP/1.1\r\n\r\n")


def endlessly(line: socket.socket) -> None:
    """The beginning of a handshake of a megabyte."""
    with contextlib.suppress(OSError):
        line.sendall(b"".join(struct.pack(">BHH", 22, 0x301, 4000) + _part(first) for first in (True, *(99 * [False]))))


def _part(first: bool) -> bytes:
    return (b"\x01" + (1 << 20).to_bytes(3, "big") if first else bytes(4)) + bytes(3996)


@pytest.mark.parametrize("say", [in_plain, as_a_browser, endlessly])
def test_whoever_does_not_speak_tls_is_refused(listening: Listening, say: Callable[[socket.socket], None]) -> None:
    with socket.create_connection(listening.where) as line:
        say(line)
        assert listening.refusal() is Refusal.MALFORMED
    assert listening.used == []


def test_a_dialer_hears_no_more_than_a_handshake_needs(own: Certificates) -> None:
    near, far = socket.socketpair()
    with near, far:
        sent = threading.Thread(target=endlessly, args=(far,))
        sent.start()
        with pytest.raises(ProofError) as refused:
            PrivateEnds(own).dial(near, deadline())
        near.close()
        sent.join(SECONDS)
    assert refused.value.refusal is Refusal.MALFORMED
    assert SHAKING_BYTES < 1 << 20


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
def test_a_handshake_has_a_deadline(own: Certificates, said: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(said)
        began = time.monotonic()
        with pytest.raises(ProofError) as refused:
            PrivateEnds(own).accept(near, began + 0.1, began + 0.3, lambda: None)
        assert refused.value.refusal is Refusal.LATE
        assert time.monotonic() - began < SECONDS / 2


def test_one_who_hangs_up_in_the_middle_is_not_worth_a_line(listening: Listening) -> None:
    with socket.create_connection(listening.where) as line:
        line.sendall(b"\x16\x03\x01")
    assert listening.refusal() is Refusal.CLOSED


def test_silent_strangers_leave_room(listening: Listening, own: Certificates) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(2 * PLACES):
            silent.enter_context(socket.create_connection(listening.where))
        line = silent.enter_context(socket.create_connection(listening.where))
        dial(PrivateEnds(own).dial(line, deadline()), KEY, PARTIES, deadline())


def met(own: Certificates) -> tuple[PrivateConnection, PrivateConnection]:
    near, far = socket.socketpair()
    ends, accepted = PrivateEnds(own), list[PrivateConnection]()
    accepting = threading.Thread(target=lambda: accepted.append(ends.accept(far, deadline(), deadline(), lambda: None)))
    accepting.start()
    dialed = ends.dial(near, deadline())
    accepting.join(SECONDS)
    return dialed, accepted[0]


def test_what_is_encrypted_is_decrypted_as_far_as_it_has_come(own: Certificates) -> None:
    one, other = met(own)
    data = bytes(range(256)) * 1000
    sealed = one.encrypt(memoryview(data[:7]), memoryview(data[7:]))
    assert data[:64] not in sealed
    into = memoryview(bytearray(len(data) + 9))
    other.feed(memoryview(sealed)[:-1])
    came = other.decrypt(into[:100])
    assert came == 100
    came += other.decrypt(into[came:])
    assert len(data) - (16 << 10) <= came < len(data)
    assert other.decrypt(into[came:]) == 0
    other.feed(memoryview(sealed)[-1:])
    came += other.decrypt(into[came:])
    assert bytes(into[:came]) == data
    for end in (one, other):
        end.socket.close()


def test_what_was_changed_on_its_way_is_not_decrypted(own: Certificates) -> None:
    one, other = met(own)
    sealed = bytearray(one.encrypt(memoryview(bytes(1000))))
    sealed[500] ^= 1
    other.feed(memoryview(sealed))
    into = memoryview(bytearray(b"\1" * 1000))
    with pytest.raises(OSError, match=r"(?i)bad.record.mac"):
        other.decrypt(into)
    assert bytes(into) == b"\1" * 1000
    for end in (one, other):
        end.socket.close()
