"""ViT-B/16 (86 M parameters) for images of 224 x 224, from torch's own encoder layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from programs.data import images
from programs.training import Recipe, main, options

SIDE, PATCH = 224, 16


class VisionTransformer(nn.Module):
    """Patches and one token for the class."""

    def __init__(self, layers: int, heads: int, width: int, dropout: float, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, width) * 0.02)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, functional.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1).to(patches.dtype), patches], dim=1)
        guesses: Tensor = self.out(self.encoder(self.dropout(x + self.place))[:, 0])
        return guesses


if __name__ == "__main__":
    asked = options(__doc__, batch_size=2, layers=12, width=768).parse_args()
    main(
        asked,
        Recipe(
            build=lambda: VisionTransformer(asked.layers, asked.width // 64, asked.width, dropout=0.1),
            batches=lambda generator: images(SIDE, asked.batch_size, generator),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]).float(), batch[1]),
        ),
    )
