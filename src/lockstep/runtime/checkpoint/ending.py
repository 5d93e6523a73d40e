"""That a job is over, beside its checkpoints: for a server that comes back when nobody is left to ask.

The end is the name of an empty file, with the job's number. Whoever looks for it knows that number from its own former
incarnation; so nothing is read, and the end of another job in the same folder is never taken for it.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.private_files import replace_file
from lockstep.protocol.core.ids import JobId, hex64
from lockstep.runtime.checkpoint.folder import FOLDER

WELL, BADLY = "ended-", "failed-"


def note_end(train_dir: Path, job: JobId, *, ok: bool) -> None:
    """Leave behind that this job is over. OSError if the folder cannot be written to."""
    folder = train_dir / FOLDER
    for former in (*folder.glob(f"{WELL}*"), *folder.glob(f"{BADLY}*")):
        former.unlink(missing_ok=True)
    replace_file(folder / f"{WELL if ok else BADLY}{hex64(job)}", b"")


def noted_end(train_dir: Path, job: JobId) -> bool | None:
    """Whether this job ended well; None: nothing says that it is over."""
    for start, ok in ((WELL, True), (BADLY, False)):
        if (train_dir / FOLDER / f"{start}{hex64(job)}").exists():
            return ok
    return None
