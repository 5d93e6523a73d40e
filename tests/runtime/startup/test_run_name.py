from __future__ import annotations

import pytest

from lockstep.runtime.startup.run_name import run_name


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "slurm-7_3"),
        ({"RAY_JOB_ID": "02000000"}, "ray-02000000"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "night"}, "torchrun-night"),
        ({"TORCHELASTIC_RUN_ID": "night", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"LOCKSTEP_RUN_NAME": "mnist", "SLURM_JOB_ID": "4711"}, "mnist"),
        ({"LOCKSTEP_RUN_NAME": "a\n\x1b[31mb"}, "a___31mb"),
    ],
)
def test_a_run_is_called_what_its_engine_calls_it(environ: dict[str, str], name: str) -> None:
    assert run_name(environ) == name
