"""AlexNet (61 M parameters) for images of 224 x 224."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from programs.data import images
from programs.training import Recipe, main, options

SIDE = 224


def build() -> nn.Module:
    """One column, as people write it today."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 1000),
    )


if __name__ == "__main__":
    asked = options(__doc__, batch_size=8).parse_args()
    main(
        asked,
        Recipe(
            build=build,
            batches=lambda generator: images(SIDE, asked.batch_size, generator),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1]),
            channels_last=True,
        ),
    )
