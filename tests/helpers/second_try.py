"""A second try for tests that are marked ``timed``, and for no others.

Real processes that are timed can be late once on a machine that does other work. Such a test gets one more try, and its
first failure is shown at the end, whatever the outcome of the second try. More than ``MOST`` first failures in a run
are not bad luck: the run fails, even if every second try passed. Only what the test itself found is excused. A fixture
that fails, a test that leaves something behind and a process that dies are not.

``FIRST_FAILURES`` names a file to which first failures are added, one per line: several runs of pytest with the same
file count as one. Without it, each run of pytest counts separately.

pytest-rerunfailures is not suitable: under xdist it also retries a test that crashed its process, and its second try
has no timeout, since pytest-timeout has removed its alarm by then. Here the second try is a complete one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

MOST: Final = 3
"""How many first failures one run tolerates."""
FILE: Final = "FIRST_FAILURES"

_OUTCOME: Final[Any] = "failed first"
"""Neither passed nor failed; pytest accepts any string here, its annotation does not."""
_TRIED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # under xdist, the collecting process keeps the list
        config.pluginmanager.register(_FirstFailures(os.environ.get(FILE, "")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("timed") is None or item.stash.get(_TRIED, False):
        return None
    item.stash[_TRIED] = True
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = [report for report in reports if report.failed]
    if failed and all(report.when == "call" for report in failed):
        for report in failed:
            report.outcome = _OUTCOME
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)  # complete, with its own timeout
        return True
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (_OUTCOME, "R", "FIRST FAILURE") if report.outcome == _OUTCOME else None


class _FirstFailures:
    """The first failures of a run."""

    def __init__(self, file: str) -> None:
        self._file = Path(file) if file else None
        self._names = self._file.read_text().splitlines() if self._file is not None and self._file.exists() else []
        self._here: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != _OUTCOME:
            return
        self._here.append(report)
        self._names.append(report.nodeid)
        if self._file is not None:
            # At once, so that it is not lost if this process dies.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._names) > MOST and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._names:
            return
        say = terminalreporter
        say.section("first failures", yellow=True)
        for report in self._here:
            say.write_sep("_", report.nodeid)
            say.write_line(report.longreprtext)
        say.write_line(f"Failed on the first try in this run ({len(self._names)}; more than {MOST} fail it):")
        for name in self._names:
            say.write_line(f"  {name}")
        if len(self._names) > MOST:
            say.write_line(f"Too many: {len(self._names)} tests failed on the first try.", red=True)
