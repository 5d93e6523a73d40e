"""Which key this process and its children use; a command chooses once, before anything listens or connects.

The choice is in the environment, not in argv: children inherit it, and no process list or stack shows more of it than
a file's name.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from lockstep.security.key import KEY_VARIABLE, Key, find_key

INSECURE_VARIABLE: Final = "LOCKSTEP_INSECURE"


def choose(key_file: Path | str | None = None, insecure: bool = False) -> None:
    """What the command line says. What it does not say is left to the variables."""
    if key_file:
        os.environ[KEY_VARIABLE] = os.path.abspath(key_file)
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"


def is_insecure() -> bool:
    """Whether everything travels in plain text and nobody proves anything."""
    return os.environ.get(INSECURE_VARIABLE, "") not in ("", "0")


def chosen_key() -> Key | None:
    """The key of this process, read once; None for ``--insecure``. ``BadInput`` if it cannot be used."""
    if is_insecure():
        return None
    return _read_once(os.environ.get(KEY_VARIABLE), os.environ.get("XDG_CONFIG_HOME"), os.environ.get("HOME"))


@functools.cache
def _read_once(named: str | None, _config: str | None, _home: str | None) -> Key:
    return find_key(named)
