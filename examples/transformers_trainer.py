"""transformers' Trainer over a Lockstep job: ``torchrun --nproc-per-node=2 examples/transformers_trainer.py``.

Two lines are Lockstep's: ``join`` before anything else, and ``attach``. ``--servers=1`` lets the first rank serve the
others; ``--ddp`` leaves both lines out, and the Trainer uses DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lockstep
from lockstep.integrations.accelerate import attach

LENGTH, VOCABULARY = 16, 64


def sequences() -> list[dict[str, Any]]:
    """Each counts on from its first number, in strides of 1 to 4."""
    rows = [(torch.arange(LENGTH) * (1 + n % 4) + n) % VOCABULARY for n in range(192)]
    return [{"input_ids": row, "labels": row} for row in rows]


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--folder", help="for checkpoints; without it nothing is kept")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in the folder")
    return parser.parse_args()


def arguments(asked: argparse.Namespace, folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=asked.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=asked.accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=asked.clip,
        logging_steps=1,
        save_strategy="steps" if asked.folder else "no",
        save_steps=6,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    asked = flags()
    job = None if asked.ddp else lockstep.join(servers=asked.servers)
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as unkept:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments(asked, asked.folder or unkept),
            train_dataset=sequences(),
        )
        if job is not None:
            attach(job, trainer.accelerator)
        trainer.train(resume_from_checkpoint=asked.resume)
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"loss {entry['loss']!r}", flush=True)
    if job is not None:
        job.close()


if __name__ == "__main__":
    main()
