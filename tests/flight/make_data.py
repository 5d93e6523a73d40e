"""Writes the dumps under ``data``: those of real jobs by the torch that is installed, those of other versions by hand.

PYTHONPATH=tests python tests/flight/make_data.py [FAULT...]      (ten seconds each; all of them without an argument)

Real dumps name the files of the program and of torch, so the job is run from a folder with a short name. What another
torch than ``USUAL`` writes gets its version in the name.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Final

from flight.handmade import VERSIONS, as_json, as_pickle
from flight.jobs import STOP, PaperJob, Planned, steps

HERE: Final = Path(__file__).parent
DATA: Final = HERE / "data"
USUAL: Final = "2.13"
RANKS: Final = 3
RING: Final = {"wrapped": "8", "wrapped-group": "8"}
AS_JSON: Final = ("slept",)
"""Kept as JSON, too."""
FAULTS: Final = (
    *("healthy", "slept", "gave-up", "wrapped", "wrapped-group", "skipped", "shape", "dtype", "order", "died"),
)


def run_job(fault: str, folder: Path) -> None:
    """Dumps of all ranks that live, as pickle and as JSON."""
    program = Path(tempfile.gettempdir(), "job", "train.py")
    program.parent.mkdir(exist_ok=True)
    shutil.copy(HERE / "train.py", program)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ring = {"TORCH_FR_BUFFER_SIZE": RING[fault]} if fault in RING else {}
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(program), fault, str(folder)], env={**os.environ, **shared, **ring, "RANK": str(rank)}
        )
        for rank in range(RANKS)
    ]
    for process in started:
        process.wait(120)


def write_by_hand() -> None:
    """Two ranks over NCCL, in every format: one of them has not entered the last call."""
    plan = [*steps(2), Planned("0", "all_gather", 3), *steps(2)]
    late = PaperJob({"0": (0, 1)}, {0: plan, 1: [*plan[:4], STOP]}).run().recordings()
    for version in VERSIONS:
        for write, ending in ((as_pickle, ""), (as_json, ".json")):
            target = DATA / f"by-hand-nccl-{version}{ending.replace('.', '-')}"
            target.mkdir(parents=True, exist_ok=True)
            for rank, recording in late.items():
                (target / f"nccl_trace_rank_{rank}{ending}").write_bytes(write(recording, version))


def beginning() -> str:
    version = ".".join(installed("torch").split(".")[:2])
    return "gloo" if version == USUAL else f"gloo-{version}"


def main() -> int:
    write_by_hand()
    for fault in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            run_job(fault, Path(folder))
            target = DATA / f"{beginning()}-{fault}"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for file in sorted(Path(folder).iterdir()):
                if not file.suffix:
                    shutil.copy(file, target / file.name)
            if fault in AS_JSON:
                beside = DATA / f"{beginning()}-{fault}-json"
                beside.mkdir(exist_ok=True)
                for file in sorted(Path(folder).glob("*.json")):
                    shutil.copy(file, beside / file.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
