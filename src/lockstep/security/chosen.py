"""Which key this process and its children use; a command chooses once, before anything listens or connects.

The choice is in the environment, not in argv: children inherit it, and no process list or stack shows more of it than
a file's name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockstep.errors import BadInput
from lockstep.security.certificates import certificates_for
from lockstep.security.key import KEY_VARIABLE, Key, find_key

INSECURE_VARIABLE: Final = "LOCKSTEP_INSECURE"
_SAID: Final = "said"
"""The variable's value for children: the process that the user started has said what it means."""

TOKEN_VARIABLE: Final = "LOCKSTEP_JOB_TOKEN"
TOKEN_REFUSAL: Final = (
    "a job has a key instead, in a file that only its user can read: ~/.config/lockstep/key, or that of --key_file."
)
GIVEN_UP: Final = (
    "--insecure: no key and no encryption; whoever reaches a port of this job can read it, change it and end it"
)


def choose(key_file: Path | str | None = None, insecure: bool = False) -> None:
    """What the command line says. What it does not say is left to the variables."""
    if key_file:
        os.environ[KEY_VARIABLE] = os.path.abspath(key_file)
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"


def settle(say: Callable[[str], None]) -> None:
    """Before anything listens or connects: ``BadInput`` if the key cannot be used, a line if there is none.

    Afterwards children find the key and its certificates made.
    """
    if os.environ.get(TOKEN_VARIABLE):
        raise BadInput(f"the variable {TOKEN_VARIABLE} is refused: {TOKEN_REFUSAL}")
    key = chosen_key()
    if key is not None:
        certificates_for(key)
    elif os.environ[INSECURE_VARIABLE] != _SAID:
        os.environ[INSECURE_VARIABLE] = _SAID
        say(GIVEN_UP)


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
