"""ResNet-50 (25.6 M parameters) for images of 224 x 224: bottlenecks with batch-norm, the stride in the 3 x 3."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from programs.data import images
from programs.training import Recipe, main, options

SIDE = 224
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width inside the bottleneck, number of them, stride of the first."""
WIDENED = 4


def convolution(wide: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(wide, out, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    def __init__(self, wide: int, inner: int, stride: int) -> None:
        super().__init__()
        out = WIDENED * inner
        self.path = nn.Sequential(
            convolution(wide, inner, 1),
            nn.ReLU(inplace=True),
            convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            convolution(inner, out, 1),
        )
        self.shortcut = nn.Identity() if stride == 1 and wide == out else convolution(wide, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x), inplace=True)


def build() -> nn.Module:
    parts: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    wide = 64
    for inner, count, stride in STAGES:
        for number in range(count):
            parts.append(Bottleneck(wide, inner, stride if number == 0 else 1))
            wide = WIDENED * inner
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 1000))


if __name__ == "__main__":
    asked = options(__doc__, batch_size=4).parse_args()
    main(
        asked,
        Recipe(
            build=build,
            batches=lambda generator: images(SIDE, asked.batch_size, generator),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1]),
            channels_last=True,
        ),
    )
