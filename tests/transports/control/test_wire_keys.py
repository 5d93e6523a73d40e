"""Who has not the key of a server learns nothing from it and is not heard; what it is told is a value."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from helpers.keys import another_key, make_key, no_key
from helpers.wire import RecordingOwner, accepting, hello
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.security.chosen import chosen_key
from lockstep.security.key import KEY_VARIABLE
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.channels import open_channel, open_data_channel, open_plain_channel
from lockstep.transports.control.link import dial_link
from lockstep.transports.control.monitor_client import Unreachable, fetch_snapshot, fetch_stack, tell
from lockstep.transports.control.monitor_query import query_monitor, query_monitor_quickly
from lockstep.transports.control.monitor_service import add_monitor_service, inbox_handler, snapshot_handler
from lockstep.transports.control.server import ControlServer, method_path
from lockstep.transports.quiet_grpc import grpc
from lockstep.version import __version__

DESCRIPTION = Description("/job:worker/replica:0/task:0", "a-host", 1, 2, 3, "training", 0.5, "", False, 0, "0.1", 0)


class _Served:
    """A server with the services of monitors and tasks, which notes every call that reaches a handler."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[str] = []
        self._server = ControlServer("127.0.0.1", port, threads=8)
        self._changed = Broadcast()
        add_monitor_service(self._server, self._describe, self._changed, self._snapshot, max_watchers=1)
        self._server.add_handlers("Doctor", {"Tell": inbox_handler(lambda _: self.heard.append("Tell"), 100)})
        stack = snapshot_handler(lambda: self._note("Stack", b"{}"))
        self._server.add_handlers("Task", {"Snapshot": snapshot_handler(self._snapshot), "Stack": stack})
        self._server.start()
        self.address = self._server.address

    def _note(self, method: str, answer: bytes) -> bytes:
        self.heard.append(method)
        return answer

    def _describe(self) -> Description:
        self.heard.append("Describe")
        return DESCRIPTION

    def _snapshot(self) -> bytes:
        return self._note("Snapshot", b"{}")

    def stop(self) -> None:
        self._changed.close()
        self._server.stop(0)


@contextmanager
def served(port: int = 0) -> Iterator[_Served]:
    server = _Served(port)
    try:
        yield server
    finally:
        server.stop()


def test_a_session_that_was_opened_with_the_key_opens_nothing_for_another(tmp_path: Path) -> None:
    """Sessions are resumed without certificates, so each belongs to those it was opened with."""
    with served() as server:
        for _ in range(3):
            assert fetch_snapshot(server.address, "Monitor", 5.0) == b"{}"
        server.heard.clear()
        with another_key(tmp_path), pytest.raises(Unreachable) as refused:
            fetch_snapshot(server.address, "Monitor", 5.0)
        assert refused.value.reach is Reach.OTHER_KEY
        assert server.heard == []


def test_a_session_with_a_task_that_has_gone_does_not_keep_its_successor_away() -> None:
    with served() as first:
        port = int(first.address.rpartition(":")[2])
        assert fetch_snapshot(first.address, "Monitor", 5.0) == b"{}"
    with served(port) as second:
        assert second.address == first.address
        assert fetch_snapshot(second.address, "Monitor", 5.0) == b"{}"


METHODS = [
    ("Monitor", "Describe"),
    ("Monitor", "Watch"),
    ("Monitor", "Snapshot"),
    ("Task", "Snapshot"),
    ("Task", "Stack"),
    ("Doctor", "Tell"),
]


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_no_call_without_the_key_reaches_a_handler(service: str, method: str, tmp_path: Path) -> None:
    with served() as server:
        with open_plain_channel(server.address) as channel, pytest.raises(grpc.RpcError) as anonymous:
            list(channel.unary_stream(method_path(service, method))(b"x", timeout=5))
        with another_key(tmp_path), open_channel(server.address) as channel, pytest.raises(grpc.RpcError) as stranger:
            list(channel.unary_stream(method_path(service, method))(b"x", timeout=5))
        assert anonymous.value.code() is stranger.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.heard == []


def test_a_link_or_a_data_stream_without_the_key_is_not_accepted(tmp_path: Path) -> None:
    with accepting() as acceptor:
        for circumstances in (another_key(tmp_path), no_key()):
            owner = RecordingOwner()
            with circumstances:
                dial_link(acceptor.server.address, hello("/job:worker/replica:0/task:0"), owner, 5.0)
                assert owner.wait_lost()
                with open_data_channel(acceptor.server.address) as channel, pytest.raises(grpc.RpcError):
                    list(channel.stream_stream(method_path("Task", "Link"))(iter([b""]), timeout=5))
        assert acceptor.owners == []


def test_a_dialer_says_nothing_to_a_listener_without_the_key() -> None:
    """C2: the secret of a job was sent to whoever listened first."""
    with socket.create_server(("127.0.0.1", 0)) as listener, open_channel(_address(listener)) as channel:
        call = channel.unary_unary(method_path("Task", "Snapshot")).future(b"a secret request", timeout=5)
        connection = listener.accept()[0]
        with connection:
            said = connection.recv(1 << 16)
        call.cancel()
    assert said[:1] == b"\x16", "a TLS handshake, not HTTP/2"
    assert b"secret" not in said
    assert b"lockstep.Task" not in said


def test_a_dialer_speaks_to_no_server_with_another_key(tmp_path: Path) -> None:
    with another_key(tmp_path):
        server = _Served()
    try:
        with pytest.raises(Unreachable):
            fetch_snapshot(server.address, "Task", 5.0)
        assert not tell(server.address, "Doctor", b"findings", 5.0)
        assert server.heard == []
    finally:
        server.stop()


def test_all_that_an_anonymous_caller_learns_is_lockstep_a_version_and_that_it_wants_a_key() -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    anonymous.set_alpn_protocols(["h2"])
    with served() as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), 5) as line, anonymous.wrap_socket(line) as shaken:
            der = shaken.getpeercert(binary_form=True)
    assert der is not None
    certificate = x509.load_der_x509_certificate(der)
    assert [one.value for one in certificate.subject] == ["Lockstep", __version__, "wants a key"]
    for word in (socket.gethostname(), "worker", "a-host"):
        assert word.encode() not in der


def test_another_key_is_a_value_and_its_sentence_says_which_file_to_copy(tmp_path: Path) -> None:
    with another_key(tmp_path):
        server = _Served()
    key = chosen_key()
    assert key is not None
    try:
        for answer in (query_monitor(server.address), query_monitor_quickly(server.address, 2.0)):
            assert answer.found.reach is Reach.OTHER_KEY
            assert answer.found.phrase.startswith(
                f"is a Lockstep {__version__} task with another key; copy {key.path} "
            )
        with pytest.raises(Unreachable) as refused:
            fetch_stack(server.address, 5.0)
        assert refused.value.reach is Reach.OTHER_KEY
    finally:
        server.stop()


def test_one_side_with_insecure_is_a_value_and_named_on_both_sides() -> None:
    with no_key(), served() as plain:
        assert query_monitor(plain.address).description == DESCRIPTION
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOCKSTEP_INSECURE")
            found = query_monitor(plain.address).found
            assert (found.reach, "started with --insecure" in found.phrase) == (Reach.INSECURE, True)
            assert query_monitor_quickly(plain.address, 2.0).found.reach is Reach.INSECURE
    with served() as locked, no_key():
        found = query_monitor(locked.address).found
        assert (found.reach, "wants a key" in found.phrase) == (Reach.INSECURE, True)
        assert query_monitor_quickly(locked.address, 2.0).found.reach is Reach.INSECURE


def test_a_server_with_a_certificate_of_somebody_else_is_another_program(tmp_path: Path) -> None:
    """TLS alone does not make it Lockstep."""
    foreign = _foreign_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(foreign)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    try:
                        context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=shake_hands)
        thread.start()
        try:
            assert query_monitor(_address(listener)).found.reach is Reach.OTHER_PROGRAM
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_two_files_with_the_same_key_are_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(make_key(tmp_path / "here")))
    server = _Served()
    try:
        monkeypatch.setenv(KEY_VARIABLE, str(make_key(tmp_path / "there")))
        assert query_monitor(server.address).description == DESCRIPTION
    finally:
        server.stop()


def _address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _foreign_certificate(folder: Path) -> Path:
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "A web server")])
    certificate = (
        x509.CertificateBuilder(name, name, private.public_key(), 1, now, now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("lockstep.job")]), critical=False)
        .sign(private, SHA256())
    )
    path = folder / "foreign.pem"
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(key + certificate.public_bytes(Encoding.PEM))
    return path
