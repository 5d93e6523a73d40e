"""The sentences of the analysis: each can be replaced in one place, and nothing depends on any of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from diagnose.faulty import FAULTY, Faulty
from helpers.snapshots import W1
from lockstep.diagnose import phrases
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.fields import SnapshotError
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.text import notice_line, render
from lockstep.diagnose.verdict import Diagnosis, ReportError, read_diagnosis
from lockstep.protocol.core.causes import Cause

IDS = [make.__name__ for _, make, _, _ in FAULTY]


def sentences() -> Iterator[tuple[str, object]]:
    """Every function of the modules of sentences; ``units`` only writes numbers."""
    for module in pkgutil.iter_modules(phrases.__path__, f"{phrases.__name__}."):
        if module.name.endswith(".units"):
            continue
        loaded = importlib.import_module(module.name)
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            if function.__module__ == module.name and not name.startswith("_"):
                yield name, function


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sentence is its bare name."""
    for name, _ in sentences():
        monkeypatch.setattr(phrases, name, lambda *_args, _name=name, **_named: _name)


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sentence says anything."""
    for name, _ in sentences():
        monkeypatch.setattr(phrases, name, lambda *_args, **_named: "")


def test_each_sentence_has_one_name_of_its_own() -> None:
    """Two of one name in two modules, and one of them would say what the other should."""
    for name, function in sentences():
        assert getattr(phrases, name) is function, name


@pytest.mark.parametrize("faulty", FAULTY, ids=IDS)
@pytest.mark.parametrize("said", ["bare", "mute"])
def test_no_verdict_depends_on_what_the_sentences_say(
    faulty: Faulty, said: str, request: pytest.FixtureRequest
) -> None:
    spoken = analyse(faulty[1]().evidence())
    request.getfixturevalue(said)
    found = analyse(faulty[1]().evidence())
    assert found.verdict is not None
    assert spoken.verdict is not None
    assert _values(found) == _values(spoken)
    assert len(found.verdict.evidence) == len(spoken.verdict.evidence)


def _values(diagnosis: Diagnosis) -> list[object]:
    """What is decided, without what is said."""
    verdicts = [one for one in (diagnosis.verdict, *diagnosis.also) if one is not None]
    return [
        diagnosis.healthy,
        *((v.cause, v.culprit, v.peer, v.host, v.pid, v.step, v.seconds, v.stack, v.names) for v in verdicts),
        *((e.waiter, e.on, e.step, e.seconds) for e in (*diagnosis.causes, *diagnosis.consequences)),
        *((t.task, t.host, t.pid, t.step, t.answers) for t in diagnosis.tasks),
        *((s.task, s.part, s.begin, s.end) for s in diagnosis.timeline),
    ]


@pytest.mark.usefixtures("bare")
def test_a_report_is_made_of_phrases_and_of_what_the_tasks_said() -> None:
    """A word in the text that is neither is a sentence that was made elsewhere."""
    for _, make, _, _ in FAULTY:
        diagnosis = analyse(make().evidence())
        assert diagnosis.verdict is not None
        known = {name for name, _ in sentences()}
        assert diagnosis.verdict.what in known
        assert set(diagnosis.verdict.evidence) <= known
        assert diagnosis.verdict.link in {"", "end_of_a_link", "end_of_a_link; end_of_a_link"}
        assert diagnosis.verdict.remedy in known
        shown = {line.strip() for line in render("verdict", diagnosis).splitlines()}
        assert diagnosis.verdict.stuck == "stuck"
        stack = set(diagnosis.verdict.stack)
        assert {line for line in shown if line.strip("-")} <= known | stack
        assert notice_line(diagnosis.verdict) == "notice"


@pytest.mark.usefixtures("bare")
def test_what_cannot_be_read_is_told_by_a_phrase() -> None:
    with pytest.raises(SnapshotError, match=r"^no_snapshot_of$"):
        read_task(b"{}")
    with pytest.raises(ReportError, match=r"^report_without_format$"):
        read_diagnosis(b"{}")


def test_every_cause_has_a_remedy() -> None:
    assert all(phrases.remedy(cause) for cause in Cause)


def test_what_shows_a_lack_of_memory_may_say_nothing() -> None:
    """That there is evidence decides, not what it says."""
    cluster = FAULTY[IDS.index("out_of_memory")][1]()
    cluster.monitor(W1)["out_of_memory"] = ""
    verdict = analyse(cluster.evidence()).verdict
    assert verdict is not None
    assert verdict.cause is Cause.OUT_OF_MEMORY
