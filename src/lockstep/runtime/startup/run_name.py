"""What the engine that started this job calls it: the name under which its own tools know it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "LOCKSTEP_RUN_NAME"
"""For engines that leave no name in the environment, such as Kubernetes; a manifest sets it."""

_MAX: Final = 128
_SAFE: Final = re.compile(r"[^A-Za-z0-9_.:/-]")


def run_name(environ: Mapping[str, str]) -> str:
    """Such as ``slurm-4711``; empty if no engine says. torchrun under Slurm is a Slurm job."""
    slurm, array = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    if array:
        slurm = f"{environ.get('SLURM_ARRAY_JOB_ID', slurm)}_{array}"
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "")
    names = (
        ("slurm", slurm),
        ("ray", environ.get("RAY_JOB_ID", "")),
        ("torchrun", "" if torchrun == "none" else torchrun),  # what it is without --rdzv-id
    )
    found = environ.get(VARIABLE, "") or next((f"{engine}-{name}" for engine, name in names if name), "")
    return _SAFE.sub("_", found)[:_MAX]
