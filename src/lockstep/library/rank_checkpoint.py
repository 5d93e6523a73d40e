"""Checkpoints of a job without servers: what rank 0 gives to be written, and how every rank starts from it.

The coordinator commits a step once every rank has told its state, which is told when the next iteration begins; only
then is a version saved, and no mean of the next step arrives before it is. So parameters and optimizers are copied
between two updates, whatever the training thread does meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.library.errors import UsageError
from lockstep.library.parameters import OwnOptimizer
from lockstep.library.state_codec import from_text, to_text
from lockstep.runtime.checkpoint.folder import CheckpointError, CheckpointFolder, verify
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.training.ranks.saving import NoSuchState, optimizers_as, optimizers_in, put_values, values_of
from lockstep.training.worker.binding import Trained


class RankCheckpoint:
    """The parameters and optimizers of one rank."""

    def __init__(self, trained: Sequence[Trained], optimizers: Sequence[OwnOptimizer]) -> None:
        self._trained = trained
        self._optimizers = optimizers

    def take(self) -> list[NamedTensor]:
        """Copies of everything; UsageError if the state of an optimizer is no plain data."""
        tensors: dict[str, Tensor] = {}
        text = to_text([one.optimizer.state_dict() for one in self._optimizers], tensors)
        return [*values_of(self._trained), *optimizers_as(text, tensors)]

    def refuse_what_cannot_be_saved(self) -> None:
        """UsageError now, and not when the first checkpoint is written."""
        to_text([one.optimizer.state_dict() for one in self._optimizers], {})

    def put(self, train_dir: str, checkpoint: str) -> None:
        """Start from this checkpoint; UsageError if it cannot be read here, or is of another job."""
        path = CheckpointFolder(train_dir).named(checkpoint)
        try:
            names = [shard.name for shard in verify(path).shards]
            put_values(path, names, self._trained)
            text, tensors = optimizers_in(path, names)
            states = from_text(text, tensors)
        except (CheckpointError, OSError) as error:
            raise UsageError(
                f"the checkpoint {path} cannot be read here: {error}; without servers every rank reads it, so give a "
                "train_dir that all ranks share"
            ) from None
        except (NoSuchState, ValueError) as error:
            raise UsageError(f"this job cannot start from its checkpoint: {error}; give another train_dir") from None
        if len(states) != len(self._optimizers):
            raise UsageError(
                f"the checkpoint {path} has the state of {len(states)} optimizers, and this program has "
                f"{len(self._optimizers)}; give another train_dir"
            )
        for one, state in zip(self._optimizers, states, strict=True):
            one.optimizer.load_state_dict(state)
