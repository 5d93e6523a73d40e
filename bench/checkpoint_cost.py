"""What checkpoints cost a run that continues meanwhile: images per second with and without them, in turn.

``python bench/checkpoint_cost.py`` (one server, two workers, alexnet with momentum: a shard of 244 MB and as much
optimizer state, saved every 20 steps).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from rates import Case, cluster_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    case = Case(asked.model, asked.batch, asked.steps)
    plain, saving = [], []
    for _ in range(asked.repeats):
        plain.append(cluster_rate(case, "--optimizer=momentum"))
        with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as folder:
            flags = (f"--train_dir={folder}", f"--save_model_steps={asked.every}", "--max_ckpts_to_keep=1")
            saving.append(cluster_rate(case, "--optimizer=momentum", *flags))
    without, with_them = statistics.median(plain), statistics.median(saving)
    print(
        f"{asked.model}, batch {asked.batch}, a checkpoint every {asked.every} steps, median of {asked.repeats} runs:"
    )
    print(f"  without {without:.2f} images/sec, with {with_them:.2f}: steps delayed by {without / with_them - 1:.1%}")


if __name__ == "__main__":
    main()
