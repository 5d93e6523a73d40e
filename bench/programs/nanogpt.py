"""A small GPT over characters (10 M parameters), of nanoGPT's size for Shakespeare."""

from __future__ import annotations

from programs.data import tokens
from programs.training import Recipe, main, options
from programs.transformer import Gpt

CHARACTERS = 65

if __name__ == "__main__":
    asked = options(__doc__, batch_size=4, length=128).parse_args()
    main(
        asked,
        Recipe(
            build=lambda: Gpt(CHARACTERS, max(256, asked.length), layers=6, heads=6, width=384, dropout=0.2),
            batches=lambda generator: tokens(CHARACTERS, asked.batch_size, asked.length, generator),
            loss=lambda model, batch: model(*batch),
        ),
    )
