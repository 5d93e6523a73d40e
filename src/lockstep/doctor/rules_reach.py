"""Which tasks reach each other, in which direction they do not, and what answered instead. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.facts import DOCTOR_PHASE, ClusterFacts, NameFact, Visit
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.place import ClusterEngine
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.reach import UNPROVEN, Reach

_LOST = (Reach.SILENT, Reach.NO_ROUTE, Reach.BROKEN, Reach.REFUSED)


def reach_findings(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """Own addresses, names, then every pair of tasks."""
    yield from _own_addresses(case)
    yield from _names(case)
    yield from _old_jobs(case)
    yield from _wrong_answers(case)
    yield from _lost_pairs(case)
    yield from _other_ports(case)


def _short(task: str) -> str:
    return TaskId.parse(task).short


def _own_addresses(case: ClusterFacts) -> Iterator[DoctorFinding]:
    for port in case.ports:
        if port.problem:
            yield DoctorFinding(port.kind, port.problem)


def _names(case: ClusterFacts) -> Iterator[DoctorFinding]:
    own = {start.task for start in case.own}
    reached = {visit.host for visit in case.visits if visit.reached}
    in_pod = case.shared.place.engine is ClusterEngine.POD
    for fact in case.names:
        if (fact.task in own and not fact.problem) or (fact.problem and in_pod):
            continue  # where this machine listens is checked with its own address, and names of pods come and go
        sentence = _about_name(fact, fact.task in reached)
        if sentence:
            yield DoctorFinding(FindingKind.NAME, sentence)


def _about_name(fact: NameFact, reached: bool) -> str:
    who = _short(fact.task)
    if fact.problem:
        return (
            f"the host name {fact.name!r} of {who} does not resolve on this machine ({fact.problem}); correct the host "
            "list, the name server, or /etc/hosts."
        )
    if fact.loopback and not reached:
        return (
            f"the host name {fact.name!r} of {who} resolves to {fact.addresses[0]} here, which is this machine itself; "
            "correct /etc/hosts here, or put the network address of that host in the host lists."
        )
    if fact.only_ipv6 and not reached:
        return (
            f"the host name {fact.name!r} of {who} resolves only to the IPv6 address {fact.addresses[0]}, where "
            f"nothing listens; start {who} with --bind=::, or put its IPv4 address in the host lists."
        )
    return ""


def _old_jobs(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """A task that is already in a job while others are only starting was left behind by an earlier job."""
    lives = {visit.host: visit for visit in case.visits if visit.reached and visit.phase != DOCTOR_PHASE}
    jobs = {visit.job for visit in lives.values() if visit.job}
    starting = [visit for visit in lives.values() if not visit.job]
    foreign = {visit.host: visit for visit in lives.values() if visit.job}
    if not foreign:
        return
    if len(jobs) == 1 and not starting:
        yield from _runs_without_us(case, next(iter(foreign.values())))
        return
    newest = min((visit for visit in foreign.values()), key=lambda visit: visit.phase_seconds).job
    for visit in foreign.values():
        if starting or visit.job != newest:
            others = f"{_short(starting[0].host)} is only starting" if starting else "others belong to another job"
            yield DoctorFinding(
                FindingKind.OLD_JOB,
                f"{_short(visit.host)} at {visit.address} already belongs to job {visit.job:016x} ({visit.phase} for "
                f"{visit.phase_seconds:.0f} s, {visit.process}), while {others}; end the older job.",
            )


def _runs_without_us(case: ClusterFacts, visit: Visit) -> Iterator[DoctorFinding]:
    """A complete job is running, and a task of this machine is not part of it."""
    awaited = {task for one in case.visits for task in one.waits_for}
    for port in case.ports:
        if port.running or port.problem:
            continue
        if port.task in awaited:
            yield DoctorFinding(
                FindingKind.LOST_TASK,
                f"job {visit.job:016x} has lost {_short(port.task)} and waits for it to come back; start the same "
                f"command again for {_short(port.task)}, and the job goes on.",
                keeps_from_working=False,
            )
        else:
            yield DoctorFinding(
                FindingKind.OLD_JOB,
                f"{_short(visit.host)} at {visit.address} already belongs to job {visit.job:016x} ({visit.phase} for "
                f"{visit.phase_seconds:.0f} s, {visit.process}), but {_short(port.task)} is not up; if that is an "
                "earlier job, end it.",
            )


def _wrong_answers(case: ClusterFacts) -> Iterator[DoctorFinding]:
    told: set[tuple[str, str]] = set()
    for visit in case.visits:
        who, key = _short(visit.host), (visit.host, visit.words)
        if visit.answer is Reach.LOCKSTEP and visit.task != visit.host and key not in told:
            there = f"{_short(visit.task)} ({visit.process})" if visit.task else "another task"
            yield DoctorFinding(
                FindingKind.WRONG_TASK,
                f"{visit.address} should be {who} but is {there}: the host lists or the task indices do not match; "
                "give every task the same host lists, and each its own index.",
            )
        elif visit.answer in UNPROVEN and key not in told:
            yield DoctorFinding(FindingKind.OTHER_KEY, f"{visit.address}, the address of {who}, {visit.words}.")
        elif visit.answer in (Reach.OTHER_PROGRAM, Reach.MUTE) and key not in told:
            yield DoctorFinding(
                FindingKind.OTHER_PROGRAM,
                f"{visit.address}, the address of {who}, {visit.words}; end that program, or give {who} another port "
                "in the host lists of all tasks.",
            )
        told.add(key)


def _lost_pairs(case: ClusterFacts) -> Iterator[DoctorFinding]:
    reached_by: dict[str, list[str]] = {}
    for visit in case.visits:
        if visit.reached:
            reached_by.setdefault(visit.host, []).append(visit.visitor)
    named = {fact.task for fact in case.names if fact.problem or fact.loopback or fact.only_ipv6}
    own = {start.task for start in case.own}
    forming = any(visit.reached and visit.host not in own for visit in case.visits)
    lost = [visit for visit in case.visits if visit.answer in _LOST and visit.host not in named]
    there = {*reached_by, *(visit.visitor for visit in case.visits)}
    missing = list(dict.fromkeys(visit.host for visit in lost if visit.host not in there))
    yield from _missing(lost, missing, forming)
    for visit in lost:
        if visit.host in there:
            yield _one_way(visit, reached_by)


def _missing(lost: list[Visit], missing: list[str], forming: bool) -> Iterator[DoctorFinding]:
    """No task reaches these."""
    for task in missing:
        visit = next(visit for visit in lost if visit.host == task)
        who = _short(task)
        if visit.answer is Reach.REFUSED and not forming:
            yield DoctorFinding(
                FindingKind.REMARK,
                f"nothing listens at {visit.address} ({who}) yet, although its host answers; start {who}, or run "
                "'lockstep doctor' there at the same time.",
                False,
            )
        elif visit.answer is Reach.REFUSED:
            yield DoctorFinding(
                FindingKind.NOTHING_LISTENS,
                f"{who} is missing: {visit.address} refuses connections, so nothing listens there; start {who}, or, if "
                "you did, look at its own output.",
            )
        else:
            yield DoctorFinding(
                FindingKind.NO_ANSWER,
                f"{who} cannot be reached from {_short(visit.visitor)}: {visit.address} {visit.words}; make sure that "
                "the host is up, and open its port for TCP.",
            )


def _one_way(visit: Visit, reached_by: dict[str, list[str]]) -> DoctorFinding:
    who, visitor = _short(visit.host), _short(visit.visitor)
    back = visit.host in reached_by.get(visit.visitor, ())
    others = [_short(task) for task in reached_by.get(visit.host, ()) if task != visit.visitor]
    proof = f"{who} reaches {visitor}" if back else f"{others[0]} reaches {who}" if others else f"{who} is up"
    verb = "rejects" if visit.answer is Reach.REFUSED else "drops"
    return DoctorFinding(
        FindingKind.NO_ANSWER,
        f"{visitor} does not reach {who} at {visit.address}, although {proof}: a firewall {verb} connections from "
        f"{visitor} to {who}; allow TCP in that direction.",
    )


def _other_ports(case: ClusterFacts) -> Iterator[DoctorFinding]:
    for visit in case.visits:
        if visit.reached and visit.other_port:
            yield DoctorFinding(
                FindingKind.OTHER_PORTS,
                f"{_short(visit.visitor)} reaches {_short(visit.host)} at {visit.address}, but not at other ports "
                f"({visit.other_port}); tasks also listen at ports besides the listed one; allow all TCP ports "
                "between the hosts, or name some with --ports=FIRST-LAST and allow those.",
            )
