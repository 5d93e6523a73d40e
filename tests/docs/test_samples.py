"""Samples of output are what the code says: sentences that are made here, by the same functions; pages that are made
from the code's tables are up to date."""

from __future__ import annotations

import re
from collections import Counter

from docs.fences import ROOT, fences, sample
from lockstep.diagnose.phrases.units import named
from lockstep.drill.matrix import NOTHING, DrillSum, Times
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.ids import Incarnation, JobId, server, worker
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import Reach
from lockstep.runtime import phrases
from lockstep.runtime.startup.address_finding import AddressFinding
from lockstep.runtime.startup.startup_progress import Board
from lockstep.runtime.trace.traffic import Traffic
from lockstep.security.proof import Refusal
from lockstep.security.refusals import Entrance, RefusalNotice
from lockstep.transports.base import Counters
from tools import cause_page


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_one_that_is_missing() -> None:
    said = phrases.waits_for_missing(worker(0), str(worker(1)), "192.0.2.3:2222", phrases.refuses_since(14), 13)
    assert in_one_line(sample("README.md", "lockstep: worker 0 is waiting")) == f"lockstep: {said}"


def test_who_is_up() -> None:
    tasks = (server(0), server(1), worker(0), worker(1))
    board = Board(tasks)
    for task, phase in ((tasks[0], "connecting"), (tasks[1], "importing torch"), (tasks[2], "connecting")):
        found = Description(str(task), "a", 1, 2, Incarnation(3), phase, 1.0, "", False, 0, "1", JobId(0))
        board.note(task, AddressFinding("", found, reachable=True), 0.0)
    board.note(tasks[3], AddressFinding("", answer=Reach.REFUSED), 0.0)
    assert in_one_line(sample("my-cluster-does-not-start.md", "3 of 4")) == board.line(14.0)


def test_refused_callers() -> None:
    one = RefusalNotice(Entrance.TASK, "192.0.2.1:4700", "192.0.2.9", Refusal.NO_KEY_THERE, 1, 1)
    many = RefusalNotice(Entrance.TENSORS, "192.0.2.1:4701", "192.0.2.9", Refusal.UNPROVEN, 57, 12)
    shown = sample("security.md", "lockstep: refused a caller").splitlines()
    for line, notice in zip(shown, (one, many), strict=True):
        assert f"lockstep: {notice}".startswith(line.removesuffix("..."))


def test_the_path_of_a_link() -> None:
    """The words of each path, as the endpoints have them; who is at the other end differs."""
    sources = "".join(file.read_text() for file in (ROOT / "src" / "lockstep" / "transports").rglob("*.py"))
    shown = in_one_line(sample("transports.md", "lockstep: worker 0 to ps 0: shared memory"))
    assert 'return "shared memory"' in sources
    for words in (
        "TCP to {",
        " connections)",
        "not {name}: {reason}",
        "runs on another host ({theirs.host}, this is {",
    ):
        assert words in sources
    not_shared = r"\(not grpc\+shm: \S+ runs on another host \(b, this is a\)\)"
    assert re.search(rf"TCP to 192\.0\.2\.2:\d+ \(4 connections\) {not_shared}", shown)
    traffic = Traffic()
    traffic.add("grpc+shm", Counters(bytes_sent=269_000_000, bytes_received=269_000_000, lends_sent=186), 558)
    assert shown.endswith(f"lockstep: {worker(0).short} {traffic.lines()[0]}")
    rdma = sample("rdma.md", "lockstep: worker 0 to ps 0: RDMA")
    assert "RDMA (verbs, reliable connection) by {self.port} to {self._peer_host()}" in sources
    assert re.fullmatch(r"lockstep: .*: RDMA \(verbs, reliable connection\) by \w+:1 to 192\.0\.2\.1\n", rdma)


def test_the_matrix_of_drills() -> None:
    """Drawn again from its own numbers."""
    shown = sample("drills.md", "What struck (rows)").splitlines()
    rows = [re.match(r"  (.*)  \w = (.*)", line) for line in shown]
    causes = [row[2] for row in rows if row]
    counts: Counter[tuple[str, str]] = Counter()
    for row in filter(None, rows):
        for column, cell in zip(causes, row[1].split(), strict=True):
            if cell != ".":
                counts["" if row[2] == NOTHING else row[2], "" if column == NOTHING else column] = int(cell)
    assert set(causes) - {NOTHING} <= {cause.value for cause in Cause}
    times = [Times(66, 2.2, 2.7, 4.1), Times(24, 2.4, 3.5, 4.1)]
    drawn = DrillSum(counts, (), (), *times).lines()
    assert shown == drawn[1:]


def test_the_page_of_causes_is_made_from_the_tables_of_the_code() -> None:
    assert (ROOT / "docs" / "causes.md").read_text() == cause_page.page(), (
        "run python -m tools.cause_page > docs/causes.md"
    )


def test_on_call_has_what_to_type_for_every_cause() -> None:
    table = (ROOT / "docs" / "on-call.md").read_text().partition("## From cause to action")[2]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert rows[0] == "cause"
    assert sorted(rows[1:]) == sorted(cause.value for cause in Cause)


def test_a_task_has_one_name_in_samples() -> None:
    assert named(str(worker(1))) == "worker 1"


def test_addresses_in_samples_reach_nobody() -> None:
    """192.0.2.0/24 is for documents; the rest is this machine."""
    harmless = re.compile(r"192\.0\.2\.\d+|127\.0\.[01]\.1|0\.0\.0\.0")
    shown = [
        (page.name, address)
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for address in re.findall(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])", page.read_text())
    ]
    assert shown
    assert [(page, address) for page, address in shown if not harmless.fullmatch(address)] == []


def test_every_page_that_speaks_of_losses_leads_to_the_one_table() -> None:
    link = "recovery.md#who-comes-back"
    for page in ("README.md", "docs/simulator.md", "docs/when-a-job-hangs.md", "docs/library.md", "docs/on-call.md"):
        assert link in (ROOT / page).read_text(), page
    assert "## Who comes back" in (ROOT / "docs" / "recovery.md").read_text()


def test_no_number_stands_for_a_thing_that_only_we_know() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert [page.name for page in pages if re.search(r"\breport [1-9]\b|\bmodes? [1-9]\d?\b", page.read_text())] == []


def test_blocks_are_found_with_their_marks() -> None:
    assert any(fence.mark == "run" for fence in fences())
    assert any(fence.mark.startswith("made by: lockstep ") for fence in fences())
