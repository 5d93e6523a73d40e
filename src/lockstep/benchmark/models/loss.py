"""The loss that all classification models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

AUXILIARY_WEIGHT = 0.4
"""The weight of an auxiliary head's loss, as in tf_cnn_benchmarks."""


def classification_loss(output: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
    """Mean softmax cross-entropy, plus 0.4 of that of each auxiliary head.

    Args:
        output: what the model returned: logits, or logits followed by those of its auxiliary heads.
        labels: the class of each image, or of each token.
    """
    if isinstance(output, Tensor):
        return functional.cross_entropy(output.flatten(0, -2).float(), labels.flatten())
    logits, *auxiliary = output
    loss = functional.cross_entropy(logits.float(), labels)
    for head in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(head.float(), labels)
    return loss


def main_logits(output: Tensor | Sequence[Tensor]) -> Tensor:
    """The logits that count for accuracy."""
    return output if isinstance(output, Tensor) else output[0]
