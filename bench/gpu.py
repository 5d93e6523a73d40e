"""One GPU: plain PyTorch loops against one Lockstep worker and one server on the same machine.

    python bench/gpu.py --model=resnet50_v1.5 --torchvision=resnet50 --batch_size=256 --rounds=3

All compute in bfloat16 (autocast), channels_last, compiled, on one synthetic batch, with SGD and Nesterov's
momentum. The contestants take turns, and each round begins with another one. Each run compiles and warms up before its
timed steps. ``--only`` names some of them: plain, stages, torchvision, cpu, gpu, turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)
_WAITED = re.compile(r"its GPU waited ([0-9.]+) ms")
_RUN_SECONDS = 300
_WARM_UP = 15


def plain_loop(name: str, batch: int, steps: int, how: str) -> float:
    """Images per second of an ordinary loop in this process, around our model or torchvision's."""
    import torch
    from torch.nn import functional

    from lockstep.benchmark.training.compiling import compile_model

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1234)
    model, side = _build(name)
    model = model.cuda().to(memory_format=torch.channels_last).train()
    if how == "stages":
        compile_model(model)
    elif how == "whole":
        model = torch.compile(model, dynamic=False)
    images = torch.randn(batch, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=4e-5)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            output = model(images)
        functional.cross_entropy(output.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return batch * steps / (time.perf_counter() - began)


def _build(name: str):  # type: ignore[no-untyped-def]  # torch is imported late
    if name.startswith("torchvision:"):
        from torchvision import models

        # Ours has no auxiliary head: the original benchmark leaves it out.
        options = {"aux_logits": False, "init_weights": False} if "inception" in name else {}
        model = models.get_model(name.partition(":")[2], weights=None, num_classes=1001, **options)
        return model, 299 if "inception" in name else 224
    from lockstep.benchmark.models import find_model

    spec = find_model(name, "imagenet")
    return spec.build(1001), spec.image_size


def loop_rate(name: str, asked: argparse.Namespace, how: str = "whole") -> tuple[float, str]:
    """Run such a loop in its own process."""
    command = [sys.executable, __file__, f"--loop={name}", f"--how={how}"]
    output = _run([*command, f"--batch_size={asked.batch_size}", f"--steps={asked.steps}"])
    return float(json.loads(output.splitlines()[-1])), ""


def lockstep_rate(place: str, asked: argparse.Namespace, *more: str) -> tuple[float, str]:
    """One server and one worker; ``place``: where the server has its parameters."""
    output = _run(
        [
            *(sys.executable, "-m", "lockstep", "bench", "--ps=1", "--workers=1", "--device=gpu", "--compile"),
            *("--data_format=NHWC", "--use_bf16", "--optimizer=momentum", f"--num_warmup_batches={_WARM_UP}"),
            *(f"--model={asked.model}", f"--batch_size={asked.batch_size}", f"--num_batches={asked.steps}"),
            *("--init_learning_rate=0.001", f"--local_parameter_device={place}", "--verbose", *more, *asked.more),
        ]
    )
    found, waited = _TOTAL.search(output), _WAITED.search(output)
    if found is None:
        sys.exit(f"a run printed no total:\n{output}")
    return float(found[1]), f"GPU idle {waited[1]} ms per step" if waited else ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def compare(asked: argparse.Namespace) -> None:
    """All contestants, round after round."""
    everybody: dict[str, tuple[str, Callable[[], tuple[float, str]]]] = {
        "plain": (f"plain loop, {asked.model}", lambda: loop_rate(asked.model, asked)),
        "stages": (f"plain loop, {asked.model}, in stages", lambda: loop_rate(asked.model, asked, "stages")),
        "cpu": ("Lockstep, parameters on the CPU", lambda: lockstep_rate("cpu", asked)),
        "gpu": ("Lockstep, parameters on the GPU", lambda: lockstep_rate("gpu", asked)),
        "turns": (
            "Lockstep, parameters on the GPU, in turns (--nomps)",
            lambda: lockstep_rate("gpu", asked, "--nomps"),
        ),
    }
    if asked.torchvision:
        everybody["torchvision"] = (
            f"plain loop, torchvision's {asked.torchvision}",
            lambda: loop_rate(f"torchvision:{asked.torchvision}", asked),
        )
    chosen = asked.only.split(",") if asked.only else list(everybody)
    contestants = dict(everybody[key] for key in ["plain", *(key for key in chosen if key != "plain")])
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    remarks: dict[str, str] = {}
    names = list(contestants)
    for turn in range(asked.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rate, remarks[name] = contestants[name]()
            print(f"round {turn}: {name}: {rate:.0f} {remarks[name]}", flush=True)
            rates[name].append(rate)
    _print_table(rates, remarks, names[0])
    if asked.json:
        Path(asked.json).write_text(json.dumps({"rates": rates, "asked": vars(asked)}))


def _print_table(rates: dict[str, list[float]], remarks: dict[str, str], base: str) -> None:
    print(f"| | images/s, median (lowest to highest) | of '{base}' | |\n|---|---|---|---|")
    for name, known in rates.items():
        ratio = statistics.median(one / other for one, other in zip(known, rates[base], strict=True))
        spread = f"{statistics.median(known):.0f} ({min(known):.0f} to {max(known):.0f})"
        print(f"| {name} | {spread} | {ratio:.3f} | {remarks[name]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50_v1.5")
    parser.add_argument("--torchvision", default="", help="torchvision's model of the same architecture")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contestants by their short names, separated by commas")
    parser.add_argument("--json", default="")
    parser.add_argument("--loop", default="", help="internal: run one plain loop here")
    parser.add_argument("--how", choices=("whole", "stages", "eager"), default="whole")
    parser.add_argument("--more", nargs="*", default=[], help="more flags of lockstep bench, after --more")
    asked, more = parser.parse_known_args()
    asked.more += more
    if asked.loop:
        print(json.dumps(plain_loop(asked.loop, asked.batch_size, asked.steps, asked.how)))
    else:
        try:
            compare(asked)
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
