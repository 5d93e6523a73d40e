"""Every test is checked for what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from helpers.leaks import end_leaked_processes, leaks_since, take_stock
from lockstep.runtime.processes import become_subreaper

pytest_plugins = ["helpers.second_try"]


def pytest_configure() -> None:
    # Programs under test would inherit what the shell ignores: Ctrl-C of its background jobs, a hang-up below nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Processes that a test's own child left behind come back to us and are seen, instead of going to init.
    become_subreaper()
    # Tests and the programs that they start have a key of their own and never touch the user's.
    _forget_keys()
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="lockstep-test-config-")


def _forget_keys() -> None:
    """Commands set these for their children, also where a test calls them in its own process."""
    for variable in ("LOCKSTEP_KEY_FILE", "LOCKSTEP_INSECURE"):
        os.environ.pop(variable, None)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop("XDG_CONFIG_HOME"), ignore_errors=True)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = take_stock()
    yield
    _forget_keys()
    leaks = leaks_since(before)
    if leaks:
        end_leaked_processes(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(sorted(leaks)), pytrace=False)
