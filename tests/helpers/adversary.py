"""Those who want into a running job: at every socket that the kernel knows of, with everything but the key.

They know more than a stranger could: names, incarnations and the number of the job, which only members are told. What
they hear is kept, and must have none of it.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from helpers import line_visitor, stream_visitor
from helpers.door_visitor import DOOR_ATTACKS, DoorVisitor, with_a_recorded_proof
from helpers.keys import another_key, no_key
from helpers.line_visitor import LINE_ATTACKS, LineVisitor
from helpers.listeners import doors_of
from helpers.other_user import NOBODY
from helpers.stream_visitor import STREAM_ATTACKS, StreamVisitor
from helpers.wire import RecordingOwner
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Description, Envelope, Failed, Hello
from lockstep.runtime.listening import ListeningSocket, listening_sockets
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Key
from lockstep.security.proof import pack_fields
from lockstep.transports.control.channels import PLAIN, open_data_channel
from lockstep.transports.control.codec import encode, join_envelopes
from lockstep.transports.control.generate import DESCRIPTORS
from lockstep.transports.control.link import dial_link
from lockstep.transports.control.monitor_client import Unreachable, describe
from lockstep.transports.control.server import method_path
from lockstep.transports.quiet_grpc import grpc
from lockstep.transports.shm.host import HostPlace
from lockstep.transports.tcp.endpoint import PRIVATE
from lockstep.version import __version__

RPCS = [
    (service.name, method.name)
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    for service in file.service
    for method in service.method
] + [("Task", "Ucx"), ("Doctor", "Tell")]
"""Every call of the contract, and the two that are served under names of their own."""
QUIET_SECONDS = 0.3
"""Who has said nothing for so long has nothing to say."""
CALL_SECONDS = 3.0
NOISE = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    "a rank of before": b'{"rank": 1, "world": 2, "port": 6, "version": "1", "token": ""}\n',
    "nested JSON": b"[" * 200_000 + b"\n",
    "a length without end": struct.pack("<I", 1 << 31) + b"x",
    "half a TLS record": b"\x16\x03\x01\x02\x00\x01",
    "a proof without a key": struct.pack("<I", 43) + pack_fields((b"lockstep proof 1", b"net", b"", b"")),
}


@dataclass(frozen=True)
class Victim:
    """A running job, and what its members know of it."""

    tasks: Mapping[TaskId, Description]
    addresses: Mapping[TaskId, str]
    key: Key

    @classmethod
    def at(cls, addresses: Mapping[TaskId, str]) -> Victim:
        key = chosen_key()
        assert key is not None
        return cls({task: describe(address, 5.0) for task, address in addresses.items()}, addresses, key)

    @classmethod
    def among(cls, places: Iterable[ListeningSocket]) -> Victim:
        """Where nobody has listed the tasks: those of the monitors that listen there."""
        found = {}
        for place in places:
            with suppress(Unreachable):
                found[TaskId.parse(describe(str(place), 5.0).task)] = str(place)
        return cls.at(found)

    def sockets(self) -> tuple[ListeningSocket, ...]:
        """Every one of every process, from the kernel."""
        return listening_sockets(pid for one in self.tasks.values() for pid in (one.monitor_pid, one.pid))

    def owner(self, pid: int) -> Description | None:
        """The task whose process this is; None for a monitor."""
        return next((one for one in self.tasks.values() if one.pid == pid), None)

    def peer_of(self, one: Description) -> Description:
        """Some task that has a link to it: that of another role, or if there is none, another."""
        role = TaskId.parse(one.task).role
        others = [other for other in self.tasks.values() if other.task != one.task]
        return next((other for other in others if TaskId.parse(other.task).role is not role), others[0])

    def secrets(self) -> list[bytes]:
        """What nobody else may hear, in every form in which it could be said."""
        lives = [one.incarnation for one in self.tasks.values()] + [one.job for one in self.tasks.values() if one.job]
        numbers = [form for life in lives for form in (b"%d" % life, b"%x" % life, struct.pack("<Q", life))]
        words = [text.encode() for one in self.tasks.values() for text in (one.task, one.task_address) if text]
        return [*numbers, *words, socket.gethostname().encode(), self.key.path.read_bytes().strip()]

    def check_heard(self, heard: bytes, where: object) -> None:
        """It has nothing that only members know."""
        for secret in self.secrets():
            assert secret not in heard, f"{where} told {secret!r} to somebody without the key"


def forged_link(victim: Victim, one: Description) -> bytes:
    """The first message of a link in the name of a peer, which ends the job if it is believed."""
    posed = victim.peer_of(one)
    hello = Hello(posed.task, posed.incarnation, posed.job, __version__, ())
    failed = Failed(posed.task, 1, Reason(Cause.UNKNOWN, "forged \x1b[2J"))
    messages = (hello, failed)
    return join_envelopes([encode(Envelope(posed.job, posed.task, posed.incarnation, each)) for each in messages])


# --- at a socket of TCP: what each hears ---------------------------------------------------------------------------


def until_quiet(line: socket.socket) -> bytes:
    """Everything that the other end says until it hangs up or falls silent."""
    heard = b""
    line.settimeout(QUIET_SECONDS)
    with suppress(OSError):
        while part := line.recv(65536):
            heard += part
    return heard


def noise(place: ListeningSocket) -> bytes:
    """Everything that is no part of any protocol of ours."""
    heard = b""
    for said in NOISE.values():
        with socket.create_connection((place.address, place.port), CALL_SECONDS) as line:
            with suppress(OSError):  # it may hang up while we still speak
                line.sendall(said)
            heard += until_quiet(line)
    return heard


def without_a_certificate(place: ListeningSocket) -> bytes:
    """TLS by somebody who has no certificate: that of the other end, which may say three things, and what it says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((place.address, place.port), CALL_SECONDS) as line:
        try:
            shaken = context.wrap_socket(line)
        except OSError:  # no TLS is spoken here
            return b""
        with shaken:
            certificate = shaken.getpeercert(binary_form=True) or b""
            with suppress(OSError):
                shaken.sendall(NOISE["HTTP/2"])
            subject = x509.load_der_x509_certificate(certificate).subject
            assert [one.value for one in subject] == ["Lockstep", __version__, "wants a key"]
            return certificate + until_quiet(shaken)


def calls(place: ListeningSocket, link: bytes = b"") -> bytes:
    """Every call that there is, with what this process has for a key; ``link``: what a link begins with."""
    requests = {"Link": link}
    heard = b""
    with open_data_channel(str(place)) as channel:
        for service, method in RPCS:
            call = channel.stream_stream(method_path(service, method))
            with suppress(grpc.RpcError):
                heard += b"".join(call(iter([requests.get(method, b"")]), timeout=CALL_SECONDS))
    return heard


def walk(victim: Victim, places: tuple[ListeningSocket, ...], folder: Path) -> None:
    """Be anonymous, and somebody with another key, at each of these sockets; nobody hears what is not for them."""
    any_task = next(iter(victim.tasks.values()))
    with ThreadPoolExecutor(len(places)) as beside:
        every: list[Callable[[ListeningSocket], bytes]] = [noise, without_a_certificate]
        for attack in every:
            _check_each(victim, places, beside.map(attack, places))
        for circumstances in (no_key(), another_key(folder)):
            with circumstances:
                links = [forged_link(victim, victim.owner(place.pid) or any_task) for place in places]
                _check_each(victim, places, beside.map(calls, places, links))


def _check_each(victim: Victim, places: tuple[ListeningSocket, ...], heard: Iterator[bytes]) -> None:
    for place, said in zip(places, heard, strict=True):
        victim.check_heard(said, place)


def spoil_store(victim: Victim, address: str) -> None:
    """Somebody at torch's store, who can read and write it, finds no key, and leads nobody elsewhere."""
    from lockstep.training.ranks.listening import reach_store

    host, _, port = address.rpartition(":")
    store = reach_store(host, int(port), None, 10.0)
    victim.check_heard(bytes(store.get("nonce/0")), address)
    for name in ("nonce/0", "gloo/0/1", "gloo/1/0"):
        store.set(name, "6.6.6.6:6")


# --- at the streams of tensors, the door, and the links ------------------------------------------------------------


def walk_tensors(
    victim: Victim, places: tuple[ListeningSocket, ...], folder: Path, *, patient: bool = True
) -> dict[str, int]:
    """Another key, proofs sent again or back, and earlier lives, at every port for tensors; returns how many ports
    there were of each kind. ``patient``: also what waits for the other end of a link."""
    streams, lines = [], []
    for place in places:
        one = victim.owner(place.pid)
        if one is None or str(place) == one.task_address:
            continue
        if _speaks_grpc(place):
            streams.append(StreamVisitor(victim.key, victim.peer_of(one), one, f"{PLAIN}{place}", "Data"))
        else:
            private = LineVisitor(victim.key, victim.peer_of(one), one, f"{PRIVATE}{place}")
            lines.append(
                private if _speaks_tls(private) else LineVisitor(victim.key, victim.peer_of(one), one, str(place))
            )
    left_out = () if patient else (stream_visitor.in_an_earlier_life, line_visitor.in_an_earlier_life)
    with ThreadPoolExecutor(len(places)) as beside:
        for visitors, attacks in ((streams, STREAM_ATTACKS), (lines, LINE_ATTACKS)):
            for attack, expected in attacks.items():
                found = [] if attack in left_out else beside.map(attack, visitors, itertools.repeat(folder))
                for refusal in found:
                    assert refusal == expected or expected in refusal, f"{attack.__name__}: {refusal}"
    return {"streams": len(streams), "lines": len(lines)}


def _speaks_grpc(place: ListeningSocket) -> bool:
    """Whether it answers with the settings of HTTP/2."""
    with socket.create_connection((place.address, place.port), CALL_SECONDS) as line:
        line.sendall(NOISE["HTTP/2"])
        return until_quiet(line)[3:4] == b"\x04"


def _speaks_tls(visitor: LineVisitor) -> bool:
    try:
        visitor.open().close()
    except ssl.SSLError:
        return False
    return True


def walk_doors(victim: Victim, folder: Path) -> int:
    """The same at every door of shared memory, whose secret nobody but its peers has; returns how many."""
    doors = doors_of(one.pid for one in victim.tasks.values())
    for name, pid in doors.items():
        one = victim.owner(pid)
        assert one is not None, f"{name!r} is nobody's"
        place = HostPlace("", "", "", 0, name.removeprefix(b"\0lockstep-").decode(), "a guess")
        visitor = DoorVisitor(victim.key, victim.peer_of(one), one, place, folder)
        for attack, expected in DOOR_ATTACKS.items():
            if attack is not with_a_recorded_proof:  # whoever has a guess cannot even make one
                assert attack(visitor) == expected, attack.__name__
    return len(doors)


_AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid({0}); os.setuid({0})
for path in sys.argv[2:]:
    for mode in "rb", "r+b":
        try:
            open(path, mode).close()
            print("opened", path, mode)
        except OSError:
            pass
for name in bytes.fromhex(sys.argv[1]).split(b",") if sys.argv[1] else ():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knocking:
        knocking.settimeout(20)
        knocking.connect(name)
        said = knocking.recv(4096)
        print("refused" if b"another user" in said else said)
"""


def another_user(victim: Victim, *files: Path) -> None:
    """Somebody with another uid on the same host, at the doors, the memory and the files of the job."""
    doors = doors_of(one.pid for one in victim.tasks.values())
    paths = [*files, victim.key.path, victim.key.path.with_name("key.tls")]
    for one in victim.tasks.values():
        for pid in (one.monitor_pid, one.pid):
            paths += [Path(f"/proc/{pid}/{name}") for name in ("mem", "environ")]
            paths += list(Path(f"/proc/{pid}/fd").iterdir())
    code = _AS_NOBODY.format(NOBODY)
    command = [sys.executable, "-I", "-S", "-c", code, b",".join(doors).hex(), "/etc/passwd", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    expected = ["opened /etc/passwd rb", *["refused"] * len(doors)]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


def stale_lives(victim: Victim) -> None:
    """A holder of the key in the name of an earlier life does not get the place of the one that is there."""
    for one in victim.tasks.values():
        posed, owner = victim.peer_of(one), RecordingOwner()
        hello = Hello(posed.task, posed.incarnation - 1, posed.job, __version__, ())
        link = dial_link(one.task_address, hello, owner, CALL_SECONDS)
        reason = owner.wait_lost()
        link.close()
        assert owner.opened == [], f"{one.task} has replaced a live link: {reason}"


@contextmanager
def refusals_only(victim: Victim) -> Iterator[None]:
    """Inside of the block no task changes, ends, or becomes another."""
    before = {task: (one.incarnation, one.pid) for task, one in victim.tasks.items()}
    yield
    after = Victim.at(victim.addresses)
    assert {task: (one.incarnation, one.pid) for task, one in after.tasks.items()} == before
    assert not any(one.exited for one in after.tasks.values())
