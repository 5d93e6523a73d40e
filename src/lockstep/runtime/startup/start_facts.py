"""What a task was started with, for others to compare: its monitor gives it to anyone who asks.

Tasks that cannot find each other compare these to find out why: the host lists differ, or the versions, or a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.foreign import plain
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.messages import Setting
from lockstep.protocol.core.setting_names import COUNTS, LOCKSTEP_VERSION, concerns
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.transports.control.addresses import AddressError, parse_address

_MAX_TEXT = 1000
_MAX_ENTRIES = 5000


@dataclass(frozen=True, slots=True)
class StartFacts:
    """The command line of one task, as far as it must match those of the others."""

    task: str
    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]
    version: str
    settings: tuple[Setting, ...]

    @property
    def short(self) -> str:
        """``worker 1``."""
        return TaskId.parse(self.task).short

    def hosts(self, role: Role) -> tuple[str, ...]:
        return self.ps_hosts if role is Role.SERVER else self.worker_hosts

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "ps_hosts": list(self.ps_hosts),
            "worker_hosts": list(self.worker_hosts),
            "version": self.version,
            "settings": {setting.name: setting.value for setting in self.settings},
        }


def start_facts(spec: ClusterSpec, version: str, settings: tuple[Setting, ...]) -> StartFacts:
    """The facts of the task that ``spec`` describes."""
    assert spec.task is not None
    return StartFacts(str(spec.task), spec.ps_hosts, spec.worker_hosts, version, settings)


def read_start_facts(said: object) -> StartFacts | None:
    """What a peer reported about itself; None for anything else. Bounded, because it came from outside."""
    try:
        assert isinstance(said, Mapping)
        task = str(TaskId.parse(_text(said["task"])))
        servers, workers = (tuple(map(_text, said[name][:_MAX_ENTRIES])) for name in ("ps_hosts", "worker_hosts"))
        pairs = list(said["settings"].items())[:_MAX_ENTRIES]
        settings = tuple(Setting(_exact(name), _exact(value)) for name, value in pairs)
        return StartFacts(task, servers, workers, _text(said["version"]), settings)
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _text(value: object) -> str:
    return plain(_exact(value))


def _exact(value: object) -> str:
    """To be compared with our own."""
    assert isinstance(value, str)
    return value[:_MAX_TEXT]


def list_difference(ours: StartFacts, theirs: StartFacts) -> str | None:
    """The first entry in which two host lists differ, as a phrase; None if they are the same."""
    for role in Role:
        mine, other = ours.hosts(role), theirs.hosts(role)
        flag = f"--{role.value}_hosts"
        if len(mine) != len(other):
            return (
                f"{flag} has {_count(len(mine))} on {ours.short} and {_count(len(other))} on {theirs.short}; "
                "give every task the same list"
            )
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            if not _same(a, b):
                order = " in order" if sorted(mine) == sorted(other) else ""
                return (
                    f"the host lists differ{order}: {role.value} {index} is {a} on {ours.short} and {b} on "
                    f"{theirs.short}; give every task the same {flag}"
                )
    return None


def _count(number: int) -> str:
    return f"{number} address" if number == 1 else f"{number} addresses"


def _same(a: str, b: str) -> bool:
    """Equal addresses or names; a name in one list and an IP address in the other may well be the same host."""
    if a == b:
        return True
    try:
        first, second = parse_address(a), parse_address(b)
    except AddressError:
        return False
    if (first.literal is None) != (second.literal is None):
        return first.port == second.port
    return first.same_place() == second.same_place()


def setting_differences(ours: StartFacts, theirs: StartFacts) -> Iterator[tuple[str, str, str]]:
    """The name and both values of each setting that differs, the version first."""
    if ours.version != theirs.version:
        yield LOCKSTEP_VERSION, ours.version, theirs.version
    mine = {setting.name: setting.value for setting in ours.settings}
    other = {setting.name: setting.value for setting in theirs.settings}
    tasks = TaskId.parse(ours.task), TaskId.parse(theirs.task)
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name) and name not in COUNTS and all(concerns(name, task) for task in tasks):
            if name == LOCKSTEP_VERSION and ours.version != theirs.version:
                continue
            yield name, mine.get(name, "(none)"), other.get(name, "(none)")
