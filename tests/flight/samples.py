"""The dumps under ``data``, with the time at which they were taken: a checkout does not keep it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep.flight.account import Account
from lockstep.flight.analysis import account_of
from lockstep.flight.dump_folder import DumpFolder, read_dump_folder

DATA = Path(__file__).parent / "data"
TAKEN = 1_800_000_000
"""After every call in any of them."""


def copied(name: str, folder: Path) -> Path:
    """A copy of these dumps, all taken at one moment."""
    target = folder / name
    shutil.copytree(DATA / name, target)
    for file in target.iterdir():
        os.utime(file, (TAKEN, TAKEN))
    return target


def found(name: str, folder: Path) -> DumpFolder:
    return read_dump_folder(copied(name, folder))


def account(name: str, folder: Path) -> Account:
    return account_of(found(name, folder).recordings)
