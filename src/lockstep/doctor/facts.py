"""What was seen, as plain data. Parts of it travel between doctors as JSON, and are bounded when read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.place import Place
from lockstep.foreign import plain
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.transports.verbs.devices import RdmaPort

MAX_TEXT = 1000
MAX_ENTRIES = 2000
DOCTOR_PHASE = "doctor"
"""The phase that a doctor reports where a monitor reports the phase of its task."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What one task saw at the address of another. ``task`` is the task that answered there, if any did."""

    visitor: str
    host: str
    address: str
    answer: Reach
    words: str = ""
    task: str = ""
    phase: str = ""
    phase_seconds: float = 0.0
    process: str = ""
    version: str = ""
    job: int = 0
    waits_for: tuple[str, ...] = ()
    """Lost tasks whose place the job keeps until they are started again; known on its coordinator only."""
    other_port: str = ""
    """Why a second, unlisted port of the same host was not reached; empty if it was reached or not tried."""

    @property
    def reached(self) -> bool:
        """The task that belongs at this address answered."""
        return self.answer is Reach.LOCKSTEP and self.task == self.host


@dataclass(frozen=True, slots=True)
class OwnPort:
    """The address of a task that this doctor examines. ``problem`` is a sentence; ``running``: its job is up."""

    task: str
    address: str
    problem: str = ""
    kind: FindingKind = FindingKind.PORT_TAKEN
    running: bool = False


@dataclass(frozen=True, slots=True)
class NameFact:
    """A host name of the lists, as this machine resolves it."""

    task: str
    name: str
    addresses: tuple[str, ...] = ()
    problem: str = ""
    loopback: bool = False
    only_ipv6: bool = False


@dataclass(frozen=True, slots=True)
class DataFolder:
    """What is in the data folder of a worker; ``digest`` covers the names and sizes of its files."""

    path: str
    files: int = 0
    digest: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """What one host reports to the others about itself, besides its command line."""

    rdma: tuple[RdmaPort, ...] = ()
    data: DataFolder | None = None
    findings: tuple[DoctorFinding, ...] = ()
    """What its own doctor found wrong with that machine."""
    place: Place = field(default_factory=Place)
    """Of another machine only the MTU is known."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What another task reported when it was asked. ``by_doctor``: its doctor answered; the job is not up there."""

    task: str
    host: str
    by_doctor: bool
    start: StartFacts | None = None
    shared: Shared | None = None
    clock_ahead: float = 0.0
    clock_doubt: float = 0.0
    done: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Everything that is known about the cluster, for the rules."""

    own: tuple[StartFacts, ...]
    protocol: str
    host: str = ""
    bad_flags: tuple[str, ...] = ()
    ports: tuple[OwnPort, ...] = ()
    names: tuple[NameFact, ...] = ()
    visits: tuple[Visit, ...] = ()
    reports: tuple[PeerReport, ...] = ()
    shared: Shared = field(default_factory=Shared)
    proxies: tuple[str, ...] = ()


def shared_to_json(shared: Shared) -> dict[str, Any]:
    found = [
        {"cause": finding.kind.code, "sentence": finding.sentence, "keeps_from_working": finding.keeps_from_working}
        for finding in shared.findings
    ]
    data = None if shared.data is None else asdict(shared.data)
    return {"rdma": [asdict(port) for port in shared.rdma], "data": data, "findings": found, "mtu": shared.place.mtu}


def read_shared(said: object) -> Shared | None:
    """What a peer reported; None for anything else."""
    try:
        assert isinstance(said, Mapping)
        ports = tuple(_rdma_port(one) for one in said["rdma"][:MAX_ENTRIES])
        data = said["data"]
        folder = None if data is None else DataFolder(_text(data["path"]), int(data["files"]), _text(data["digest"]))
        findings = tuple(_finding(one) for one in said["findings"][:MAX_ENTRIES])
        return Shared(ports, folder, findings, Place(mtu=int(said["mtu"])))
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _rdma_port(one: Any) -> RdmaPort:
    names = ("device", "state", "link_layer", "provider")
    device, state, layer, provider = (_text(one[name]) for name in names)
    return RdmaPort(device, int(one["port"]), state, layer, provider, tuple(map(_text, one["gids"][:MAX_ENTRIES])))


def _finding(one: Any) -> DoctorFinding:
    kinds = {kind.code: kind for kind in FindingKind}
    return DoctorFinding(kinds[one["cause"]], _text(one["sentence"]), bool(one["keeps_from_working"]))


def visits_to_json(visits: tuple[Visit, ...]) -> list[dict[str, Any]]:
    return [asdict(visit) for visit in visits]


def read_visits(said: object) -> tuple[Visit, ...]:
    """The visits that a peer reported; what cannot be read is left out."""
    if not isinstance(said, list):
        return ()
    read = (_visit(one) for one in said[:MAX_ENTRIES])
    return tuple(visit for visit in read if visit is not None)


def _visit(one: Any) -> Visit | None:
    try:
        texts = {name: _text(one[name]) for name in ("visitor", "host", "address", "words", "task", "phase")}
        more = {name: _text(one[name]) for name in ("process", "version", "other_port")}
        numbers = {"phase_seconds": float(one["phase_seconds"]), "job": int(one["job"])}
        return Visit(answer=Reach(one["answer"]), **texts, **more, **numbers)  # type: ignore[arg-type]
    except (AssertionError, KeyError, TypeError, ValueError):
        return None


def _text(value: object) -> str:
    assert isinstance(value, str)
    return plain(value, MAX_TEXT)
