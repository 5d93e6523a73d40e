"""The lab's hosts, switched on once for all tests."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rdma.lab.host import NoLabError, folder, prepare
from rdma.lab.image import build
from rdma.lab.network import Lab, start_lab, stop_lab


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a figure into the report of the tests, at once: they take minutes."""
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")

    def write(text: str) -> None:
        with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
            sys.stdout.write(f"\nRDMA lab: {text}\n")
            sys.stdout.flush()

    return write


@pytest.fixture(scope="session")
def lab(report: Callable[[str], None]) -> Iterator[Lab]:
    """Three hosts with a Soft-RoCE device each. Where there can be no lab, its tests are skipped with the reason."""
    began = time.monotonic()
    try:
        image = build(folder(), prepare())
    except NoLabError as why:
        pytest.skip(f"no RDMA lab here: {why}")
    built = time.monotonic()
    hosts = start_lab(image, folder())
    up = time.monotonic() - built
    report(
        f"image ready after {built - began:.0f} s, all hosts up ({hosts.how}) after {up:.0f} s more, "
        f"{hosts.boots - len(hosts.hosts)} boots repeated"
    )
    try:
        yield hosts
    finally:
        stop_lab(hosts)
        report(f"off after {time.monotonic() - began:.0f} s in all")


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the network ends with it, and so does everything that it started."""
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").mend()
