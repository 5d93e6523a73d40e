"""With what a job begins: the newest whole checkpoint of its folder, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lockstep.errors import BadInput
from lockstep.protocol.messages import Setting
from lockstep.protocol.recovery import Beginning
from lockstep.runtime.checkpoints import CheckpointError, CheckpointFolder


def beginning_in(train_dir: str, settings: Iterable[Setting], say: Callable[[str], None]) -> Beginning:
    """For the coordinator's task. BadInput where the folder belongs to another run, or cannot be read."""
    folder = CheckpointFolder(train_dir)
    try:
        beginning = folder.beginning(settings, say)
    except CheckpointError as error:
        raise BadInput(f"the checkpoint {error}.") from error
    except OSError as error:
        raise BadInput(f"--train_dir={train_dir} cannot be read: {error.strerror}.") from error
    folder.clear_parts()
    if beginning.checkpoint:
        say(f"the job begins with the checkpoint {folder.path / beginning.checkpoint}, at step {beginning.start}")
    return beginning
