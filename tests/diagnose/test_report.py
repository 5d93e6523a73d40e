"""A diagnosis as text and JSON."""

from __future__ import annotations

import dataclasses

import pytest

from diagnose.faulty import FAULTY, Faulty, frozen
from helpers.snapshots import PS0, PS1, healthy
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.text import RULE, notice_line, render
from lockstep.diagnose.verdict import read_diagnosis
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import CANNOT_HEAL, WARNINGS


@pytest.mark.parametrize("faulty", FAULTY, ids=[make.__name__ for _, make, _, _ in FAULTY])
def test_a_report_is_one_screen_and_survives_its_json_form(faulty: Faulty) -> None:
    diagnosis = analyse(faulty[1]().evidence())
    text = render("verdict", diagnosis)
    assert len(text.splitlines()) <= 50
    assert diagnosis.verdict is not None
    for part in (diagnosis.verdict.key, diagnosis.verdict.cause.value, diagnosis.verdict.remedy, "seen:"):
        assert part in text
    assert text.count(diagnosis.verdict.culprit) == 1, "its full name is there once, for tools that look for it"
    assert "/job:" not in text.splitlines()[0]
    assert read_diagnosis(diagnosis.to_json()) == diagnosis


def test_what_has_no_second_home_now_is_a_fact_and_no_verdict() -> None:
    cluster = healthy(servers=2)
    for server in (PS0, PS1):
        cluster.task(server)["machines"]["role"]["whole"] = False
    cluster.task(PS1)["machines"]["coordinator"] = {"phase": "running"}
    diagnosis = analyse(cluster.evidence())
    assert diagnosis.healthy
    assert diagnosis.verdict is None
    (line,) = [line for line in render("why", diagnosis).splitlines() if "not everything has a second home now" in line]
    assert "server 1" in line
    cluster.task(PS1)["machines"]["role"]["whole"] = True
    assert "second home" not in render("why", analyse(cluster.evidence()))


def test_a_notice_names_who_waits_for_whom_for_what_and_since_when() -> None:
    verdict = analyse(frozen().evidence()).verdict
    assert verdict is not None
    line = notice_line(verdict)
    assert line == (
        f"Step 10 is stuck: server 0 is waiting for worker 1's gradient of {verdict.names[0]} "
        f"({verdict.seconds:.1f} s so far). Worker 1 (pid {verdict.pid} on {verdict.host}) has been stopped for "
        f"{verdict.seconds:.1f} s."
    )


def test_a_report_leads_with_what_is_stuck_and_why_and_what_to_do() -> None:
    diagnosis = analyse(frozen().evidence())
    verdict = diagnosis.verdict
    assert verdict is not None
    first, rule, *_ = render("verdict", diagnosis).splitlines()
    assert first == (
        f"Step 10 is stuck: server 0 is waiting for worker 1's gradient of {verdict.names[0]}. "
        f"Worker 1 (pid {verdict.pid} on {verdict.host}) has been stopped for {verdict.seconds:.1f} s. "
        f"Resume it with: kill -CONT {verdict.pid}"
    )
    assert rule == RULE


def test_what_cannot_heal_is_no_warning() -> None:
    assert not CANNOT_HEAL & WARNINGS
    diagnosis = analyse(frozen().evidence())
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.heals
    assert not dataclasses.replace(diagnosis.verdict, cause=Cause.DEAD).heals
