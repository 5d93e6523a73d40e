"""Engines for real: what a test needs of them is installed, or the test fails. Other targets skip these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.parts import install
from engines.slurm_host import PACKAGES, Slurm

ASKED = bool(os.environ.get("LOCKSTEP_ENGINES"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs engines of its own: make test-engines installs and runs them")
    for item in items:
        if not ASKED and item.get_closest_marker("engine") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm with two nodes on this host, for all tests."""
    install(("slurmctld", "slurmd", "sbatch", "munged"), PACKAGES)
    folder: Path = tmp_path_factory.mktemp("slurm")
    host = Slurm(folder)
    try:
        host.wait_until_idle()
        yield host
    finally:
        host.close()
