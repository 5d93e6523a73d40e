"""The lab's hosts, switched on once for all tests."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rdma.lab.host import NoLabError, folder, prepare
from rdma.lab.image import Image, build
from rdma.lab.network import Lab, start_lab, stop_lab
from rdma.suite import SuiteRun, start_suite


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
def image(report: Callable[[str], None]) -> Image:
    """What the hosts boot. Where there can be no lab, its tests are skipped with the reason."""
    began = time.monotonic()
    try:
        built = build(folder(), prepare())
    except NoLabError as why:
        pytest.skip(f"no RDMA lab here: {why}")
    report(f"image ready after {time.monotonic() - began:.0f} s")
    return built


@pytest.fixture(scope="session")
def lab(image: Image, report: Callable[[str], None]) -> Iterator[Lab]:
    """Three hosts with a Soft-RoCE device each."""
    began = time.monotonic()
    hosts = start_lab(image, folder())
    repeated = hosts.boots - len(hosts.hosts)
    report(f"all hosts up ({hosts.how}) after {time.monotonic() - began:.0f} s, {repeated} boots repeated")
    try:
        yield hosts
    finally:
        stop_lab(hosts)
        report(f"all hosts off after {time.monotonic() - began:.0f} s")


@pytest.fixture(scope="session")
def suite_between_hosts(lab: Lab) -> SuiteRun:
    """The suite between the first two hosts. It goes on while tests use the third one, and whoever asks waits."""
    return start_suite(lab)


@pytest.fixture(scope="session")
def suite_meanwhile(request: pytest.FixtureRequest) -> None:
    """Let that suite begin early, if there is a test that will ask for it."""
    if any("suite_between_hosts" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("suite_between_hosts")


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the network ends with it, and so does everything that it started."""
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").mend()
