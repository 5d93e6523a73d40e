"""What ``lockstep watch`` costs one rank over NCCL, and what it says and reads of it when something goes wrong.

    PYTHONPATH=src python bench/watch_gpu.py [--turns=5] [--steps=40] [--faults=raise,sleep,call]

Needs one GPU, torch with CUDA, and what Lockstep needs; Lockstep itself need not be installed. First GPT-2 under DDP,
one rank started by torchrun, bare and watched: a pair in each turn, every second turn the other way round; the ratio in
each pair counts, and its spread says how much of it is noise. Then a short run for each fault
(``programs/nccl_fault.py``): what was said after how many seconds, and which calls of NCCL are in the dumps that were
kept. ``call`` takes more than a minute: until then, a call of NCCL may just wait for a GPU that is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.drill.systems import events_in, watched
from lockstep.flight.dump_folder import read_dump_folder
from lockstep.protocol.core.causes import Cause, ReportKind

ROOT: Final = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS: Final = 150.0
"""For the start of torch on a GPU, and for the word that comes last."""
FAULTS: Final[Mapping[str, tuple[ReportKind, Cause]]] = {
    "raise": (ReportKind.VERDICT, Cause.FAILED),
    "sleep": (ReportKind.NOTICE, Cause.USER_CODE),
    "call": (ReportKind.VERDICT, Cause.COMMUNICATION),
}
"""What is to be said."""


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *words]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- speed --


def milliseconds(command: list[str]) -> float:
    done = run(command)
    found = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if not found:
        raise SystemExit(f"no result (exit code {done.returncode}) of {' '.join(command)}\n{done.stderr[-4000:]}")
    return float(json.loads(found[-1].removeprefix("result "))["ms_per_step"])


def compare(turns: int, steps: int) -> None:
    sizes = ("--batch_size=16", "--length=1024", f"--steps={steps}")
    job = torchrun("-m", "programs.gpt2", "--system=ddp", "--device=cuda", *sizes)
    commands = {"bare": job, "watched": [sys.executable, "-m", "lockstep", "watch", "--", *job]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(turns):
        for name in list(commands) if turn % 2 == 0 else reversed(list(commands)):
            times[name].append(milliseconds(commands[name]))
            print(f"turn {turn + 1}, {name}: {times[name][-1]:.3f} ms a step", flush=True)
    if turns:
        ratios = [one / other - 1 for one, other in zip(times["watched"], times["bare"], strict=True)]
        middle = {name: statistics.median(one) for name, one in times.items()}
        print(f"a step: {middle['bare']:.3f} ms bare, {middle['watched']:.3f} ms watched (medians)")
        print(f"ratio in {turns} turns: {statistics.median(ratios):+.2%}, {min(ratios):+.2%} to {max(ratios):+.2%}")


# -- faults --


def waited_for(what: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """What it gives, once it gives anything; what it gives at the end where the job ends before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        found = what()
        if found or ended:
            return found
        time.sleep(0.05)
    return what()


def strike(fault: str, place: Path) -> bool:
    """Whether the right word was said."""
    place.mkdir()
    mark = place / "mark"
    wanted = FAULTS[fault]
    with watched(torchrun("-m", "programs.nccl_fault", fault, str(mark)), place) as process:
        waited_for(mark.exists, process)
        struck = float(mark.read_text()) if mark.exists() else 0.0
        waited_for(lambda: any(_said(event) == wanted for event in events_in(place)), process)
        events = events_in(place)
    right = any(_said(event) == wanted for event in events)
    print(f"\n{fault}: {'right' if right else 'WRONG'}")
    for event in events:
        said = " ".join(str(event[name]) for name in ("cause", "culprit", "key"))
        print(f"  {event['kind']} after {event['time'] - struck:.1f} s: {said}")
    if not right or not struck:
        print((place / "output.txt").read_text(errors="replace")[-4000:])
    if wanted[0] is ReportKind.VERDICT and right:
        right = _show_calls(place / "run")
        print(run([sys.executable, "-m", "lockstep", "why", str(place / "run")]).stdout)
    return right


def _said(event: Mapping[str, Any]) -> tuple[str, str]:
    return event["kind"], event["cause"]


def _show_calls(folder: Path) -> bool:
    """Whether the dumps that were kept have calls of NCCL."""
    calls = [call for one in read_dump_folder(folder).recordings.values() for call in one.calls]
    of_nccl = [call for call in calls if call.backend == "nccl"]
    still = [f"{call.operation} {call.number} ({call.state})" for call in of_nccl if not call.over]
    print(f"  in the dumps: {len(calls)} calls, {len(of_nccl)} of NCCL, not over: {', '.join(still) or 'none'}")
    return bool(of_nccl)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--faults", default=",".join(FAULTS), help="some of these; empty: none")
    asked = parser.parse_args()
    path = os.pathsep.join([str(ROOT / "bench"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ.update(PYTHONPATH=path, OMP_NUM_THREADS="1")
    compare(asked.turns, asked.steps)
    with tempfile.TemporaryDirectory(prefix="watch-gpu-") as place:
        right = [strike(fault, Path(place, fault)) for fault in asked.faults.split(",") if fault]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
