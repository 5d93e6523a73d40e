"""The lab's hosts, switched on once for all tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from rdma.lab.host import NoLabError, folder, prepare
from rdma.lab.image import build
from rdma.lab.pair import Pair, start_pair, stop_pair


@pytest.fixture(scope="session")
def pair(pytestconfig: pytest.Config) -> Iterator[Pair]:
    """Two hosts with a Soft-RoCE device each. Where there can be no lab, its tests are skipped with the reason."""
    began = time.monotonic()
    try:
        image = build(folder(), prepare())
    except NoLabError as why:
        pytest.skip(f"no RDMA lab here: {why}")
    built = time.monotonic()
    hosts = start_pair(image, folder() / f"run-{os.getpid()}")
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(
            f"\nRDMA lab: image ready after {built - began:.0f} s, both hosts up ({hosts.how}) after "
            f"{time.monotonic() - built:.0f} s more, {hosts.boots - 2} boots repeated"
        )
    try:
        yield hosts
    finally:
        stop_pair(hosts)
        hosts.forget()


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a figure into the report of the tests."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    return (lambda text: None) if reporter is None else (lambda text: reporter.write_line(f"\nRDMA lab: {text}"))


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the network ends with it, and so does everything that it started."""
    yield
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair").mend()
