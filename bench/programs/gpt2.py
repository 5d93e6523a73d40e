"""GPT-2 (124 M parameters). On a GPU: ``--device=cuda --batch_size=16 --length=1024``."""

from __future__ import annotations

from programs.data import tokens
from programs.training import Recipe, main, options
from programs.transformer import Gpt

VOCABULARY = 50304
"""GPT-2's 50,257, rounded up to a multiple of 64."""

if __name__ == "__main__":
    asked = options(__doc__, batch_size=1, length=64).parse_args()
    main(
        asked,
        Recipe(
            build=lambda: Gpt(VOCABULARY, max(1024, asked.length), layers=12, heads=12, width=768, dropout=0.1),
            batches=lambda generator: tokens(VOCABULARY, asked.batch_size, asked.length, generator),
            loss=lambda model, batch: model(*batch),
        ),
    )
