"""What differs between tasks that must agree: host lists, versions, settings, data, fabric, clocks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lockstep.doctor.facts import ClusterFacts
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.rules_machine import VERBS
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.setting_names import COUNTS, LOCKSTEP_VERSION, VERSIONS, concerns
from lockstep.runtime.startup.start_facts import StartFacts, list_difference
from lockstep.transports.verbs.devices import RdmaPort

CLOCK_SECONDS = 2.0
_MOST_SETTINGS = 5


def agreement_findings(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """Every such difference."""
    starts = [*case.own, *(report.start for report in case.reports if report.start is not None)]
    yield from _lists(starts)
    yield from _versions_and_settings(starts)
    yield from _data(case)
    yield from _fabric(case)
    yield from _clocks(case)


def _lists(starts: list[StartFacts]) -> Iterator[DoctorFinding]:
    """The lists that most tasks have are taken to be the right ones."""
    if len(starts) < 2:
        return
    common = Counter((start.ps_hosts, start.worker_hosts) for start in starts).most_common(1)[0][0]
    reference = next(start for start in starts if (start.ps_hosts, start.worker_hosts) == common)
    for start in starts:
        difference = list_difference(reference, start)
        if difference is not None:
            yield DoctorFinding(FindingKind.HOST_LISTS, f"{difference}.")


def _versions_and_settings(starts: list[StartFacts]) -> Iterator[DoctorFinding]:
    told: list[tuple[str, dict[str, list[str]]]] = []
    versions = _by_value([(start.short, start.version) for start in starts])
    if len(versions) > 1:
        told.append((LOCKSTEP_VERSION, versions))
    with_settings = [start for start in starts if start.settings]
    names = sorted({setting.name for start in with_settings for setting in start.settings})
    for name in names:
        if name in COUNTS or (name == LOCKSTEP_VERSION and len(versions) > 1):
            continue  # host lists and versions have their own sentences
        concerned = [start for start in with_settings if concerns(name, TaskId.parse(start.task))]
        values = [(start.short, _value(start, name)) for start in concerned]
        by_value = _by_value(values)
        if len(by_value) > 1:
            told.append((name, by_value))
    told.sort(key=lambda one: one[0] not in VERSIONS)
    for name, by_value in told[:_MOST_SETTINGS]:
        is_version = name in VERSIONS
        parts = [f"{_names(tasks)} {name}={value}" for value, tasks in by_value.items()]
        remedy = "install the same version everywhere" if is_version else "start all tasks with the same value"
        yield DoctorFinding(
            FindingKind.VERSION if is_version else FindingKind.SETTING, f"{', '.join(parts)}; {remedy}."
        )


def _value(start: StartFacts, name: str) -> str:
    return next((setting.value for setting in start.settings if setting.name == name), "(none)")


def _by_value(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for task, value in pairs:
        if task not in found.setdefault(value, []):
            found[value].append(task)
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def _names(tasks: list[str]) -> str:
    if len(tasks) == 1:
        return f"{tasks[0]} has"
    return f"{', '.join(tasks[:4])}{' and others' if len(tasks) > 4 else ''} have"


def _data(case: ClusterFacts) -> Iterator[DoctorFinding]:
    folders = [(case.own[0].short, case.shared.data)] if case.own else []
    folders += [(TaskId.parse(r.task).short, r.shared.data) for r in case.reports if r.shared is not None]
    present = [(task, data) for task, data in folders if data is not None and data.digest]
    for task, data in present[1:]:
        first_task, first = present[0]
        assert data is not None
        assert first is not None
        if (data.files, data.digest) != (first.files, first.digest):
            yield DoctorFinding(
                FindingKind.DATA,
                f"the data sets differ: {first.path} on {first_task} has {first.files} entries, {data.path} on {task} "
                f"has {data.files}, and their names or sizes are not the same; give all workers the same data.",
            )


def _fabric(case: ClusterFacts) -> Iterator[DoctorFinding]:
    if case.protocol != VERBS:
        return
    mine = _usable(case.shared.rdma)
    for report in case.reports:
        theirs = _usable(report.shared.rdma) if report.shared is not None else []
        if not mine or not theirs:
            continue
        name = TaskId.parse(report.task).short
        ours, others = {port.link_layer for port in mine}, {port.link_layer for port in theirs}
        if ours.isdisjoint(others):
            yield DoctorFinding(
                FindingKind.RDMA,
                f"no fabric connects this machine to {name}: the RDMA ports here are {' and '.join(sorted(ours))}, "
                f"those of {name} are {' and '.join(sorted(others))}; use one kind of device, or "
                "--server_protocol=grpc.",
            )
        elif ours | others == {"InfiniBand"} and _subnets(mine).isdisjoint(_subnets(theirs)):
            yield DoctorFinding(
                FindingKind.RDMA,
                f"the InfiniBand ports of this machine and of {name} are in different subnets ({_shown(mine)} and "
                f"{_shown(theirs)}); connect them to one fabric, or use --server_protocol=grpc.",
            )


def _usable(ports: tuple[RdmaPort, ...]) -> list[RdmaPort]:
    return [port for port in ports if port.state == "ACTIVE"]


def _subnets(ports: list[RdmaPort]) -> set[str]:
    return {gid[:19] for port in ports for gid in port.gids}


def _shown(ports: list[RdmaPort]) -> str:
    return ", ".join(sorted(_subnets(ports))[:2]) or "none"


def _clocks(case: ClusterFacts) -> Iterator[DoctorFinding]:
    for report in case.reports:
        if abs(report.clock_ahead) > CLOCK_SECONDS + report.clock_doubt:
            way = "ahead of" if report.clock_ahead > 0 else "behind"
            yield DoctorFinding(
                FindingKind.CLOCK,
                f"the clock of {TaskId.parse(report.task).short} ({report.host}) is {abs(report.clock_ahead):.0f} s "
                f"{way} the clock here, so the times in their logs will not match; synchronize both with NTP.",
                False,
            )
