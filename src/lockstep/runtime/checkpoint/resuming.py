"""What a job starts from: the newest intact checkpoint of its folder, or nothing if nothing has been saved yet.

If there are checkpoints but none can be used, the job never starts from scratch: it is refused. Only the coordinator's
task calls this, so that nothing else renames anything in the folder meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from lockstep.errors import BadInput
from lockstep.protocol.coordinator.recovery import Beginning
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    Fault,
    Found,
    Passed,
    differences,
    worker_of,
)

Say = Callable[[str], None]
_REMEDY = "give another --train_dir, or start at step 0 with --from_scratch"


def beginning_in(train_dir: str, settings: Iterable[Setting], say: Say, *, from_scratch: bool = False) -> Beginning:
    """Where a job with these settings starts; damaged checkpoints, or all with ``from_scratch``, are set aside.

    BadInput if the folder belongs to another run, has checkpoints but no intact one, or cannot be read.
    """
    folder = CheckpointFolder(train_dir)
    with _in_sentences(train_dir):
        if from_scratch and (aside := folder.set_aside()) is not None:
            say(f"starting from scratch: the checkpoints that were in {folder.path} are now in {aside}")
        beginning = resume(folder, tuple(settings), say)
        folder.clear_parts()
    if beginning.checkpoint:
        say(f"the job starts from the checkpoint {folder.path / beginning.checkpoint}, at step {beginning.start}")
    return beginning


def refuse_early(train_dir: str, settings: Iterable[Setting]) -> None:
    """BadInput if ``beginning_in`` would raise it, as far as that is visible without reading every byte."""
    folder = CheckpointFolder(train_dir)
    with _in_sentences(train_dir):
        found = folder.look(settings, deep=False)
        if found.checkpoint is None:
            _refuse_a_lost_past(folder, found)


@contextlib.contextmanager
def _in_sentences(train_dir: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise BadInput(f"{error}.") from error
    except OSError as error:
        raise BadInput(
            f"--train_dir={train_dir} cannot be read ({error.filename}: {error.strerror}); make it readable, or give "
            "another folder."
        ) from error


def resume(folder: CheckpointFolder, settings: tuple[Setting, ...], say: Say) -> Beginning:
    """The newest checkpoint with its states; CheckpointError if there are checkpoints but none can be used."""
    found = newest(folder, settings, say)
    if found is None:
        return Beginning()
    for sentence in differences(settings, found.manifest):
        say(sentence)
    states = {worker_of(facts): (found.path / facts.name).read_bytes() for facts in found.manifest.states}
    return Beginning(start=found.manifest.version, checkpoint=found.name, states=states)


def newest(folder: CheckpointFolder, settings: tuple[Setting, ...], say: Say) -> Checkpoint | None:
    """The newest one that is intact and of this run; those passed over are named, and set aside if damaged."""
    found = folder.look(settings)
    if found.checkpoint is None:
        _refuse_a_lost_past(folder, found)
        return None
    for one in found.passed:
        kept = _put_aside(folder, one) if one.fault is Fault.DAMAGED else "it stays as it is"
        say(f"checkpoint {one.path} {one.why}; {kept}, and an older one is used")
    return found.checkpoint


def _put_aside(folder: CheckpointFolder, one: Passed) -> str:
    try:
        return f"it is kept as {folder.mark_damaged(one.path).name}"
    except OSError as error:
        return f"it cannot be renamed ({error.strerror})"  # the job can start without that


def _refuse_a_lost_past(folder: CheckpointFolder, found: Found) -> None:
    if foreign := found.with_fault(Fault.FOREIGN):
        raise CheckpointError(_foreign_sentence(foreign[0]))
    if found.passed:
        first = found.passed[0]
        raise CheckpointError(
            f"none of the {len(found.passed)} checkpoints in {folder.path} can be used: the newest, {first.path.name}, "
            f"{first.why}; restore an intact one, {_REMEDY}"
        )
    if damaged := folder.damaged():
        raise CheckpointError(
            f"{folder.path} has only damaged checkpoints ({damaged[0].name}); restore an intact one, {_REMEDY}"
        )


def _foreign_sentence(one: Passed) -> str:
    return f"the checkpoint {one.path} {one.why}; use the settings of that run, {_REMEDY}"
