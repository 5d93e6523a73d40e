"""What ``lockstep watch`` costs one rank over NCCL, and what it reads of it when it fails.

    python bench/watch_gpu.py --turns=3

GPT-2 under DDP, one rank on this host's GPU, started by torchrun: bare and watched, in turns. Then a short run that
ends with an error, whose report and NCCL's calls ``lockstep why`` shows again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAILS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    model(torch.randn(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
raise ValueError("no such label: 11")
"""


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *words]


def watched(command: list[str], *flags: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "watch", *flags, "--", *command]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "bench"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def milliseconds(command: list[str]) -> float:
    done = run(command)
    found = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if not found:
        raise SystemExit(f"no result: {done.stderr[-2000:]}")
    return float(json.loads(found[-1].removeprefix("result "))["ms_per_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    sizes = ("--batch_size=16", "--length=1024", f"--steps={asked.steps}")
    job = torchrun("-m", "programs.gpt2", "--system=ddp", "--device=cuda", *sizes)
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    for _ in range(asked.turns):
        for name, command in (("bare", job), ("watched", watched(job))):
            times[name].append(milliseconds(command))
            print(f"{name}: {times[name][-1]:.2f} ms a step", flush=True)
    if asked.turns:
        ratio = statistics.median(times["watched"]) / statistics.median(times["bare"])
        print(f"watched / bare: {ratio:.4f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="watch-gpu-") as place:
        program, folder = Path(place, "fails.py"), Path(place, "told")
        program.write_text(FAILS)
        done = run(watched(torchrun(str(program)), f"--folder={folder}"))
        print(f"the run that fails: exit code {done.returncode}")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        print("files:", ", ".join(f"{path.relative_to(folder)} ({path.stat().st_size})" for path in files))
        print(f"calls of NCCL in them: {sum(path.read_text(errors='replace').count('nccl:') for path in files)}")
        print(run([sys.executable, "-m", "lockstep", "why", str(folder)]).stdout)


if __name__ == "__main__":
    main()
