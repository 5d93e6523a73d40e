"""Inception v3 for ImageNet.

Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: Rethinking the Inception architecture for computer vision
(arXiv:1512.00567). Sizes in comments are those of an image of 299 x 299.
"""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.benchmark.models.layers import Branches, Size, SpatialMean, batch_norm, conv, linear


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: Size,
    *,
    stride: int = 1,
    padding: Size | None = None,
    deviation: float | None = None,
) -> nn.Sequential:
    """Convolution, normalisation without a learnt scale, ReLU: the unit of all Inception networks."""
    return nn.Sequential(
        conv(inputs, outputs, kernel, stride=stride, padding=padding, deviation=deviation),
        batch_norm(outputs, epsilon=1e-3, decay=0.999, scale=False),
        nn.ReLU(inplace=True),
    )


def halving_conv(inputs: int, outputs: int) -> nn.Sequential:
    """3 x 3 at stride 2, without padding."""
    return conv_norm(inputs, outputs, 3, stride=2, padding=0)


def average_pool() -> nn.AvgPool2d:
    """3 x 3 at stride 1; padding does not count."""
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


def _block_a(inputs: int, pool_outputs: int) -> Branches:
    return Branches(
        [
            conv_norm(inputs, 64, 1),
            nn.Sequential(conv_norm(inputs, 48, 1), conv_norm(48, 64, 5)),
            nn.Sequential(conv_norm(inputs, 64, 1), conv_norm(64, 96, 3), conv_norm(96, 96, 3)),
            nn.Sequential(average_pool(), conv_norm(inputs, pool_outputs, 1)),
        ]
    )


def _block_b(inputs: int) -> Branches:
    return Branches(
        [
            halving_conv(inputs, 384),
            nn.Sequential(conv_norm(inputs, 64, 1), conv_norm(64, 96, 3), halving_conv(96, 96)),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _block_c(middle: int) -> Branches:
    return Branches(
        [
            conv_norm(768, 192, 1),
            nn.Sequential(conv_norm(768, middle, 1), conv_norm(middle, middle, (1, 7)), conv_norm(middle, 192, (7, 1))),
            nn.Sequential(
                conv_norm(768, middle, 1),
                conv_norm(middle, middle, (7, 1)),
                conv_norm(middle, middle, (1, 7)),
                conv_norm(middle, middle, (7, 1)),
                conv_norm(middle, 192, (1, 7)),
            ),
            nn.Sequential(average_pool(), conv_norm(768, 192, 1)),
        ]
    )


def _block_d() -> Branches:
    return Branches(
        [
            nn.Sequential(conv_norm(768, 192, 1), halving_conv(192, 320)),
            nn.Sequential(
                conv_norm(768, 192, 1),
                conv_norm(192, 192, (1, 7)),
                conv_norm(192, 192, (7, 1)),
                halving_conv(192, 192),
            ),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _block_e(inputs: int, pool: nn.Module) -> Branches:
    return Branches(
        [
            conv_norm(inputs, 320, 1),
            nn.Sequential(conv_norm(inputs, 384, 1), _row_and_column(384, 384)),
            nn.Sequential(conv_norm(inputs, 448, 1), conv_norm(448, 384, 3), _row_and_column(384, 384)),
            nn.Sequential(pool, conv_norm(inputs, 192, 1)),
        ]
    )


def _row_and_column(inputs: int, outputs: int) -> Branches:
    return Branches([conv_norm(inputs, outputs, (1, 3)), conv_norm(inputs, outputs, (3, 1))])


class Inception3(nn.Module):
    """The network, with the auxiliary head only if requested: tf_cnn_benchmarks leaves it out."""

    def __init__(self, num_classes: int, auxiliary: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            halving_conv(3, 32),  # 149 x 149
            conv_norm(32, 32, 3, padding=0),  # 147 x 147
            conv_norm(32, 64, 3),
            nn.MaxPool2d(3, stride=2),  # 73 x 73
            conv_norm(64, 80, 1),
            conv_norm(80, 192, 3, padding=0),  # 71 x 71
            nn.MaxPool2d(3, stride=2),  # 35 x 35
            _block_a(192, 32),
            _block_a(256, 64),
            _block_a(288, 64),
            _block_b(288),  # 17 x 17
            *(_block_c(middle) for middle in (128, 160, 160, 192)),
        )
        self.auxiliary_head = (
            nn.Sequential(
                nn.AvgPool2d(5, stride=3),
                conv_norm(768, 128, 1),
                conv_norm(128, 768, 5, padding=0, deviation=0.01),
                nn.Flatten(),
                linear(768, num_classes, deviation=0.001),
            )
            if auxiliary
            else None
        )
        self.head = nn.Sequential(
            _block_d(),  # 8 x 8
            _block_e(1280, average_pool()),
            _block_e(2048, nn.MaxPool2d(3, stride=1, padding=1)),
            SpatialMean(),
            linear(2048, num_classes),
        )

    def forward(self, pictures: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits; in training with an auxiliary head, (logits, its logits)."""
        features = self.trunk(pictures)
        logits: Tensor = self.head(features)
        if self.auxiliary_head is None or not self.training:
            return logits
        return logits, self.auxiliary_head(features)


def inception3(num_classes: int, auxiliary: bool = False) -> Inception3:
    """For images of 299 x 299."""
    return Inception3(num_classes, auxiliary)
