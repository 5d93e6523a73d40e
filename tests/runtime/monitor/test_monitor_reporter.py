"""The pipe between a task and its monitor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lockstep.protocol.core.activity import TaskPhase
from lockstep.runtime.monitor.reporter import (
    MAX_LINE_BYTES,
    LineBuffer,
    TaskReport,
    TaskReporter,
    decode_report,
    encode_report,
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read_reports(reader: int) -> list[TaskReport | None]:
    return [decode_report(line) for line in LineBuffer(MAX_LINE_BYTES).feed(os.read(reader, 1 << 20))]


def test_every_line_carries_the_whole_state(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    reporter = TaskReporter(writer)
    reporter.phase(TaskPhase.IMPORTING_TORCH)
    reporter.ready("127.0.0.1:4000", incarnation=2**64 - 1)
    reporter.phase(TaskPhase.TRAINING)
    reporter.joined(job=7)
    assert read_reports(reader) == [
        TaskReport("importing torch"),
        TaskReport("importing torch", "127.0.0.1:4000", 2**64 - 1),
        TaskReport("training", "127.0.0.1:4000", 2**64 - 1),
        TaskReport("training", "127.0.0.1:4000", 2**64 - 1, job=7),
    ]


def test_a_task_never_waits_for_a_frozen_monitor_and_catches_up_later(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    reporter = TaskReporter(writer)
    for number in range(5000):  # far more than a pipe holds, and nobody reads
        reporter.phase(f"phase {number}")
    assert os.read(reader, 1 << 20)
    reporter.ready("127.0.0.1:4000", incarnation=5)
    assert read_reports(reader)[-1] == TaskReport("phase 4999", "127.0.0.1:4000", 5)


def test_a_monitor_that_is_gone_is_no_error_for_the_task() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    reporter = TaskReporter(writer)
    reporter.phase(TaskPhase.TRAINING)
    assert reporter.report.phase == "training"
    reporter.close()
    reporter.close()
    reporter.phase(TaskPhase.FINISHING)


def test_without_a_monitor_the_reporter_only_remembers() -> None:
    reporter = TaskReporter.none()
    reporter.ready("here:1", incarnation=3, job=4)
    assert reporter.report == TaskReport("starting", "here:1", 3, 4)


def test_the_descriptor_is_not_passed_on_to_programs_that_the_task_starts(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    os.set_inheritable(writer, True)
    TaskReporter(writer)
    assert not os.get_inheritable(writer)


@pytest.mark.parametrize("character", ["a", "\0", "ü", "\N{WATER BUFFALO}", "\ud800"])
def test_the_longest_texts_still_fit_in_one_line(character: str) -> None:
    report = TaskReport(character * 10_000, character * 10_000, 2**64 - 1, 2**64 - 1, -9)
    line = encode_report(report)
    assert len(line) <= MAX_LINE_BYTES
    decoded = decode_report(line)
    assert decoded is not None
    assert decoded.exit_code == -9
    assert report.phase.startswith(decoded.phase) or character == "\ud800"


@pytest.mark.parametrize(
    "line",
    [b"", b"hello", b"[1]", b"{}", b'{"phase": "x"}', b"\xff\xfe", b'{"phase":1,"task_address":"","incarnation":5}'],
)
def test_what_is_not_a_report_is_dropped(line: bytes) -> None:
    assert decode_report(line) is None


def test_lines_are_put_together_from_pieces() -> None:
    buffer = LineBuffer(100)
    assert buffer.feed(b"one\ntw") == [b"one"]
    assert buffer.feed(b"o") == []
    assert buffer.feed(b"\nthree\n") == [b"two", b"three"]


def test_an_overlong_line_is_dropped_and_the_next_one_is_read() -> None:
    buffer = LineBuffer(10)
    assert buffer.feed(b"x" * 11) == []
    assert buffer.feed(b"y" * 100) == []
    assert buffer.feed(b"z\nshort\n") == [b"short"]
    assert buffer.feed(b"x" * 30 + b"\nagain\n") == [b"again"]


def test_who_imports_torch_is_not_said_to_be_further_because_the_cluster_is() -> None:
    reporter = TaskReporter.none()
    reporter.phase(TaskPhase.IMPORTING_TORCH)
    reporter.phase_unless_importing(TaskPhase.COMPARING_SETTINGS)
    assert reporter.report.phase == "importing torch"
    reporter.phase(TaskPhase.CONNECTING)
    reporter.phase_unless_importing(TaskPhase.COMPARING_SETTINGS)
    assert reporter.report.phase == "comparing settings"
