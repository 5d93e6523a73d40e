"""Reads the dumps that the ranks of a job left in a folder.

torch names a dump after its rank (``nccl_trace_rank_3``, or any prefix and the number). Other files may lie beside
them, and any of them may be damaged, a link, or a pipe: what may be a dump and cannot be used becomes one sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lockstep.flight import phrases
from lockstep.flight.reading import MAX_BYTES, MAX_RANK, DumpError, could_be_dump, read_dump
from lockstep.flight.recording import Recording
from lockstep.private_files import read_plain

MAX_FILES: Final = 8192
_HEAD: Final = 64
_NAMED_RANK: Final = re.compile(r"rank[_.-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(?<!\d)(\d{1,6})\D*$")


@dataclass(slots=True)
class DumpFolder:
    """What was found."""

    recordings: dict[int, Recording] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    newest: float = 0.0


def rank_in(name: str) -> int | None:
    """The rank that a file is named after: ``rank_3``, or else the last number of the name."""
    found = _NAMED_RANK.search(name) or _LAST_NUMBER.search(name)
    rank = int(found[1]) if found else -1
    return rank if 0 <= rank < MAX_RANK else None


def read_dump_folder(path: Path) -> DumpFolder:
    """All dumps in this folder that can be read."""
    found = DumpFolder()
    names: dict[int, str] = {}
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        found.problems.append(phrases.dump_left_out(str(path), error.strerror or str(error)))
        return found
    for file in files[:MAX_FILES]:
        try:
            _take(file, found, names)
        except DumpError as error:
            found.problems.append(phrases.dump_left_out(file.name, str(error)))
        except IsADirectoryError:
            continue
        except OSError as error:
            found.problems.append(phrases.dump_left_out(file.name, error.strerror or str(error)))
    if len(files) > MAX_FILES:
        found.problems.append(phrases.more_files(MAX_FILES))
    return found


def _take(file: Path, found: DumpFolder, names: dict[int, str]) -> None:
    head, written = read_plain(file, _HEAD)
    rank = rank_in(file.name)
    if head and not could_be_dump(head):
        return  # a log, a script: nobody has taken it for a dump
    if rank is None:
        raise DumpError(phrases.name_without_rank())
    if not head:
        raise DumpError(phrases.dump_is_empty())
    # One byte above the limit: the reader refuses anything longer.
    recording = read_dump(read_plain(file, MAX_BYTES + 1)[0], rank, written)
    if rank in names and not _says_more(recording, found.recordings[rank]):
        raise DumpError(phrases.same_rank(names[rank]))
    if rank in names:
        found.problems.append(phrases.dump_left_out(names[rank], phrases.same_rank(file.name)))
    found.recordings[rank], names[rank] = recording, file.name
    found.newest = max(found.newest, written)


def _says_more(one: Recording, other: Recording) -> bool:
    """Of two dumps of one rank: the newer, or of the same moment the one with stacks."""
    newer = one.calls[-1].created - other.calls[-1].created if one.calls and other.calls else 0.0
    return newer > 0 or (newer == 0 and _frames(one) > _frames(other))


def _frames(recording: Recording) -> int:
    return sum(len(call.stack) for call in recording.calls)
