"""``--benchmark_log_dir``: results as JSON, with the two files and the names that tf_cnn_benchmarks uses."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.benchmark.outputs.observers import RunObserver, StepFacts
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.training.evaluation import Evaluated
from lockstep.benchmark.training.job import BenchJob
from lockstep.version import __version__, torch_version

METRICS = "metric.log"
RUN = "benchmark_run.log"
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


class MetricLog(RunObserver):
    """``metric.log`` gets one line per number; ``benchmark_run.log`` says once what ran, and where."""

    def __init__(self, folder: str, test_id: str | None) -> None:
        self._folder = Path(folder)
        self._test_id = test_id

    def started(self, job: BenchJob) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / RUN).write_text(json.dumps(run_facts(job, self._test_id)) + "\n")

    def step(self, facts: StepFacts) -> None:
        self._write("current_examples_per_sec", facts.speed.mean, facts.step + 1)
        if facts.accuracy is not None:
            self._write("top_1_accuracy", facts.accuracy.top_1, facts.step + 1)
            self._write("top_5_accuracy", facts.accuracy.top_5, facts.step + 1)

    def evaluated(self, step: int, result: Evaluated) -> None:
        self._write("eval_top_1_accuracy", result.accuracy.top_1, step)
        self._write("eval_top_5_accuracy", result.accuracy.top_5, step)
        self._write("eval_average_examples_per_sec", result.examples_per_sec, step)

    def finished(self, images_per_sec: float, step: int) -> None:
        self._write("average_examples_per_sec", images_per_sec, step)

    def _write(self, name: str, value: float, step: int) -> None:
        line = {
            "name": name,
            "value": value,
            "unit": None,
            "global_step": step,
            "timestamp": datetime.now(UTC).strftime(_TIME),
            "extras": [],
        }
        with (self._folder / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_facts(job: BenchJob, test_id: str | None) -> dict[str, Any]:
    """What ran, and on which machine."""
    return {
        "model_name": job.config.model,
        "dataset": {"name": job.config.data_name},
        "machine_config": _machine(),
        "run_date": datetime.now(UTC).strftime(_TIME),
        "lockstep_version": __version__,
        "torch_version": torch_version(),
        "run_parameters": _parameters(job.config),
        "test_id": test_id,
    }


def _machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    model = torch.cuda.get_device_name(0) if count else ""
    return {
        "cpu_info": {"num_cores": os.cpu_count(), "cpu_info": _cpu_name()},
        "gpu_info": {"count": count, "model": model},
        "memory_total": memory.total,
        "memory_available": memory.available,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _parameters(config: BenchConfig) -> list[dict[str, Any]]:
    """All settings as a flat list, typed as in tf_cnn_benchmarks."""
    kinds = {bool: "bool_value", int: "long_value", float: "float_value"}
    flat = _flat(dataclasses.asdict(config))
    return [
        {"name": name, kinds.get(type(value), "string_value"): value if type(value) in kinds else str(value)}
        for name, value in sorted(flat.items())
        if value is not None
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found
