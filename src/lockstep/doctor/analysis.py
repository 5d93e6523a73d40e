"""Concludes what is wrong from everything that was seen, the most likely cause first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.facts import ClusterFacts
from lockstep.doctor.finding import DoctorFinding, FindingKind, in_order
from lockstep.doctor.rules_agree import agreement_findings
from lockstep.doctor.rules_engine import engine_findings
from lockstep.doctor.rules_reach import reach_findings
from lockstep.protocol.core.ids import TaskId


def analyse(case: ClusterFacts) -> list[DoctorFinding]:
    """All findings, in the order in which to report them."""
    return in_order([*_findings(case)])


def _findings(case: ClusterFacts) -> Iterator[DoctorFinding]:
    for sentence in case.bad_flags:
        yield DoctorFinding(FindingKind.FLAGS, sentence)
    yield from reach_findings(case)
    yield from agreement_findings(case)
    yield from engine_findings(case)
    yield from case.shared.findings
    yield from _of_others(case)
    if case.proxies:
        yield DoctorFinding(
            FindingKind.PROXY,
            proxy_sentence(case.proxies),
            False,
        )


def _of_others(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """What other doctors found wrong with their own machines."""
    for report in case.reports:
        for finding in report.shared.findings if report.shared is not None else ():
            where = f"on {report.host} ({TaskId.parse(report.task).short}): "
            yield DoctorFinding(finding.kind, where + finding.sentence, finding.keeps_from_working)


def proxy_sentence(names: tuple[str, ...]) -> str:
    """About proxy variables, by their names (a value may hold a password)."""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{' and '.join(names)} {verb} set on this machine; Lockstep connects its tasks directly, without a proxy, so "
        "you need not do anything."
    )
