"""Lightning over a Lockstep job: ``torchrun --nproc-per-node=2 examples/lightning_module.py``.

Two lines are Lockstep's: ``join`` before anything else, and the strategy. ``--servers=1`` lets the first rank serve the
others; ``--ddp`` trains with Lightning's own strategy instead.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.benchmark.data.digits import BRIGHTEST, load_digits
from lockstep.integrations.lightning import LockstepStrategy


class Digits(lightning.LightningModule):  # type: ignore[misc]  # known only where Lightning is installed
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        if self.trainer.is_global_zero:
            print(f"loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits() -> TensorDataset:
    images, labels = load_digits()
    return TensorDataset(torch.tensor(images[:512], dtype=torch.float32) / BRIGHTEST, torch.tensor(labels[:512]))


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", help="for checkpoints; without it nothing is kept")
    parser.add_argument("--resume", help="a checkpoint")
    return parser.parse_args()


def main() -> None:
    asked = flags()
    job = None if asked.ddp else lockstep.join(servers=asked.servers)
    lightning.seed_everything(1, workers=True, verbose=False)
    trainer = lightning.Trainer(
        strategy="ddp" if job is None else LockstepStrategy(job),
        devices=asked.workers,
        max_epochs=asked.epochs,
        accumulate_grad_batches=asked.accumulate,
        gradient_clip_val=asked.clip,
        default_root_dir=asked.folder,
        enable_checkpointing=bool(asked.folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(digits(), batch_size=32, shuffle=True), ckpt_path=asked.resume)
    if job is not None:
        job.close()


if __name__ == "__main__":
    main()
