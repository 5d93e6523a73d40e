"""Reads what the tasks of a dead cluster left in the run folder.

Files may be damaged, incomplete, from another version, or not ours at all, including links and pipes: each file that
cannot be used becomes one sentence, and the others are used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.diagnose import phrases
from lockstep.diagnose.evidence import Evidence, Seen, ended_by
from lockstep.diagnose.fields import MAX_BYTES, SnapshotError
from lockstep.diagnose.task_view import read_task
from lockstep.diagnose.verdict import MAX_BYTES as MAX_REPORT_BYTES
from lockstep.diagnose.verdict import Diagnosis, ReportError, read_diagnosis
from lockstep.diagnose.views import TaskView
from lockstep.private_files import read_plain
from lockstep.protocol.core.reach import NOT_SILENT, Reach, Silence

PATTERN = "*.snapshot.json"
REPORT = "report.json"
MAX_FILES = 4096


@dataclass(slots=True)
class Folder:
    """What was found."""

    views: dict[str, TaskView] = field(default_factory=dict)
    report: Diagnosis | None = None
    problems: list[str] = field(default_factory=list)
    newest: float = 0.0


def read_folder(path: Path) -> Folder:
    """All files of a run folder that can be read."""
    found = Folder()
    try:
        files = sorted(path.glob(PATTERN))[:MAX_FILES]
    except OSError as error:
        found.problems.append(phrases.folder_unreadable(str(path), error.strerror or str(error)))
        return found
    for file in files:
        try:
            # One byte above the limit: readers refuse anything longer.
            data, written = read_plain(file, MAX_BYTES + 1)
            view = read_task(data)
        except SnapshotError as error:
            found.problems.append(phrases.file_left_out(file.name, str(error)))
        except OSError as error:
            found.problems.append(phrases.file_left_out(file.name, error.strerror or str(error)))
        else:
            found.views[view.task] = view
            found.newest = max(found.newest, written)
    report = path / REPORT
    if os.path.lexists(report):
        try:
            found.report = read_diagnosis(read_plain(report, MAX_REPORT_BYTES + 1)[0])
        except ReportError as error:
            found.problems.append(phrases.file_left_out(REPORT, str(error)))
        except OSError as error:
            found.problems.append(phrases.file_left_out(REPORT, error.strerror or str(error)))
    return found


def evidence_of(folder: Folder) -> Evidence:
    """The evidence that the files hold; tasks without a file count as silent."""
    named: dict[str, str] = {}
    for view in folder.views.values():
        named.update(view.cluster)
    for task in folder.views:
        named.setdefault(task, "")
    tasks = {
        task: Seen(
            task=task,
            address=address,
            view=folder.views.get(task),
            silence=NOT_SILENT if task in folder.views else Silence(Reach.BROKEN, phrases.left_no_file()),
            monitor_silence=Silence(Reach.BROKEN, phrases.only_files()),
        )
        for task, address in named.items()
    }
    usual = max((view.usual for view in folder.views.values()), default=0.0)
    return Evidence(tasks=tasks, asker="files", patience=max(3.0, usual), time=folder.newest, end=ended_by(tasks))
