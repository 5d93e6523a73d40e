"""Rules of ``make audit`` that need no network: no data becomes code; every dependency is used and locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.audit import SOURCES, code_findings, dependencies, dependency_findings


def test_nothing_in_the_sources_turns_data_into_code() -> None:
    assert code_findings(SOURCES) == []


def test_every_dependency_is_used_pinned_and_locked() -> None:
    assert dependency_findings() == []
    assert {"grpcio", "pillow", "torch"} <= dependencies()


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("import pickle", "imports pickle"),
        ("from ray import cloudpickle", "imports ray.cloudpickle"),
        ("from yaml import load", "imports yaml.load"),
        ("x = eval(text)", "calls eval"),
        ("import os\nos.system(text)", "calls os.system"),
        ("import torch\ntorch.load(path)", "calls torch.load"),
        ("subprocess.run(text, shell=True)", "calls subprocess.run with shell=True"),
        ("subprocess.run(text, shell=asked)", "calls subprocess.run with shell=asked"),
        ("np.load(path, allow_pickle=True)", "calls np.load with allow_pickle=True"),
    ],
)
def test_each_forbidden_thing_is_found(tmp_path: Path, code: str, finding: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    assert [line.partition(": ")[2] for line in code_findings(tmp_path)] == [finding]


def test_what_is_switched_off_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("np.load(path, allow_pickle=False)\nmodel.eval()\n")
    assert code_findings(tmp_path) == []
