"""Programs that nobody here wrote, under DDP and over Lockstep: takes your own copies, applies our edits to copies of
these, runs both on CPUs with small settings, and prints their losses side by side.

  python -m tools.your_programs --nanogpt=~/nanoGPT --examples=~/pytorch-examples --horovod=~/horovod --frameworks

Clipping is on, and what can resume is run twice: the second run goes on from the first one's checkpoint. Your copies
are only read. The data is made here, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.known_programs import EXAMPLES, PROGRAMS, KnownExample, KnownProgram
from tools.program_data import write_data
from tools.program_edits import Edit, EditDoesNotFit, edited

ROOT = Path(__file__).parents[1]
SECONDS = 600.0
REPORT = """import os


def report(loss):
    if os.environ["RANK"] == "0":
        print(f"loss {float(loss)!r}", flush=True)
"""


class ProgramFailed(Exception):  # noqa: N818 - reads as the fact it states
    """A run did not end well; the text has its command and its last lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """The losses of rank 0, in every step."""

    name: str
    workers: int
    servers: int
    ddp: list[float]
    ours: list[float]

    def line(self) -> str:
        same = len(self.ddp) == len(self.ours)
        apart = max((abs(a - b) for a, b in zip(self.ddp, self.ours, strict=False)), default=float("nan"))
        told = "none" if apart == 0.0 else f"{apart:.1e}"
        if not same or not self.ddp:
            return f"| {self.name} | {self.workers} | {len(self.ddp)} and {len(self.ours)} losses were printed | | | |"
        ends = f"{self.ddp[0]:.6f} to {self.ddp[-1]:.6f} | {self.ours[0]:.6f} to {self.ours[-1]:.6f}"
        return f"| {self.name} | {self.workers} | {len(self.ddp)} | {ends} | {told} |"


def main() -> int:
    asked = flags()
    print(f"servers: {asked.servers}\n")
    print("| program | workers | steps | loss with DDP | loss with Lockstep | largest difference |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = 0
    for workers in asked.workers:
        for name, make in jobs(asked, workers):
            try:
                print(make().line(), flush=True)
            except (ProgramFailed, EditDoesNotFit) as error:
                failed += 1
                print(f"| {name} | {workers} | failed | | | |", flush=True)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="your copy of karpathy/nanoGPT")
    parser.add_argument("--examples", type=Path, help="your copy of pytorch/examples")
    parser.add_argument("--horovod", type=Path, help="your copy of horovod/horovod")
    parser.add_argument("--frameworks", action="store_true", help="also transformers, accelerate and Lightning")
    parser.add_argument("--workers", type=_numbers, default=[2, 3], help="2,3")
    parser.add_argument("--servers", type=int, default=0, help="how many servers Lockstep has besides the workers")
    asked = parser.parse_args()
    for name in ("nanogpt", "examples", "horovod"):
        folder = getattr(asked, name)
        if folder is not None and not folder.expanduser().is_dir():
            parser.error(f"--{name}={folder} is not a folder; give the path of your copy")
    if not (asked.nanogpt or asked.examples or asked.horovod or asked.frameworks):
        parser.error("nothing to run; give at least one of --nanogpt, --examples, --horovod, --frameworks")
    return asked


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def jobs(asked: argparse.Namespace, workers: int) -> Iterator[tuple[str, Comparison]]:
    for program in PROGRAMS:
        if (copy := getattr(asked, program.repository)) is not None:
            yield program.name, Comparison(program, copy.expanduser(), workers, asked.servers)
    for example in EXAMPLES if asked.frameworks else ():
        yield example.script, Comparison(example, ROOT / "examples", workers, asked.servers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One program with one number of workers; called, it is run."""

    program: KnownProgram | KnownExample
    copy: Path
    workers: int
    servers: int

    def __call__(self) -> Row:
        program = self.program
        if isinstance(program, KnownExample):
            ddp = self._run_example(program, "--ddp", self.workers)
            ours = self._run_example(program, f"--servers={self.servers}", self.workers + self.servers)
            return Row(program.script, self.workers, self.servers, ddp, ours)
        ddp = self._run(program, (*program.both, *program.ddp), self.workers)
        served = program.served if self.servers else ()
        edits = (*program.both, *program.ours, *served)
        ours = self._run(program, edits, self.workers + self.servers)
        return Row(program.name, self.workers, self.servers, ddp, ours)

    def _run_example(self, example: KnownExample, system: str, processes: int) -> list[float]:
        losses: list[float] = []
        with tempfile.TemporaryDirectory(prefix="your-program-") as folder:
            for flags in (example.flags, example.resumed) if example.resumed else (example.flags,):
                filled = [flag.format(folder=folder, workers=self.workers) for flag in flags]
                losses += run(self.copy / example.script, (system, *filled), processes)
        return losses

    def _run(self, program: KnownProgram, edits: Sequence[Edit], processes: int) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="your-program-") as made:
            folder = Path(made) / "copy"
            ignored = shutil.ignore_patterns("data", ".git", "*.pt", "*.bin")
            shutil.copytree(self.copy / program.folder, folder, ignore=ignored)
            script = folder / program.script
            text = edited(script.read_text(), edits)
            if self.servers:
                text = text.replace("lockstep.join()", f"lockstep.join(servers={self.servers})")
            script.write_text(text)
            (folder / "loss_report.py").write_text(REPORT)
            write_data(folder)
            losses = run(script, program.flags, processes)
            if program.resumed:
                losses += run(script, (*program.flags, *program.resumed)[-_kept(program) :], processes)
            return losses


def _kept(program: KnownProgram) -> int:
    """Flags that are positions are replaced by the second run's; others are added to."""
    return len(program.resumed) + (len(program.flags) if program.flags[0].startswith("-") else 0)


def run(script: Path, arguments: Sequence[str], processes: int) -> list[float]:
    """The losses that rank 0 printed."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={_free_port()}")
    command = [sys.executable, *launcher, str(script), *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"{' '.join(command)} did not end within {SECONDS:g} s") from None
    if done.returncode:
        raise ProgramFailed(f"{' '.join(command)} ended with {done.returncode}:\n{_end_of(done.stdout, done.stderr)}")
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]


def _end_of(*outputs: str) -> str:
    return "\n".join(line for output in outputs for line in output.splitlines()[-25:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
