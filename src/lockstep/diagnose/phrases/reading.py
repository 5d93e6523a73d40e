"""Why a task did not answer, and why a file cannot be used."""

from __future__ import annotations

# -- why a task did not answer --


def late() -> str:
    return "no answer in time"


def does_not_listen() -> str:
    return "it does not listen"


def unreadable(address: str, why: str) -> str:
    return f"{address} sent an answer that cannot be read: {why}"


def left_no_file() -> str:
    return "it left no file"


def only_files() -> str:
    return "only files were read"


# -- files --


def folder_unreadable(path: str, why: str) -> str:
    return f"{path} cannot be read: {why}"


def file_left_out(name: str, why: str) -> str:
    return f"{name} is ignored: {why}"


# -- snapshots --


def snapshot_too_long(most: int, found: int) -> str:
    return f"a snapshot has at most {most} bytes; this one has {found}"


def snapshot_not_json() -> str:
    return "it is not JSON; the file is damaged or incomplete"


def no_snapshot_of(kind: str) -> str:
    return f"it is not the snapshot of a {kind}"


def snapshot_of_another_version(found: object, ours: int) -> str:
    return f"it has format {found!r} and comes from another version; this program reads format {ours}"


# -- reports --


def report_too_long(most: int, found: int) -> str:
    return f"a report has at most {most} bytes; this one has {found}"


def report_not_json(error: Exception) -> str:
    return f"this is not a report: it is not JSON ({type(error).__name__})"


def report_without_format() -> str:
    return "this is not a report: it has no format number"


def report_of_another_version(ours: int) -> str:
    return f"this report comes from another version of the program; this one reads format {ours}"


def report_damaged(error: Exception) -> str:
    return f"this report is damaged: {type(error).__name__}: {str(error)[:200]}"
