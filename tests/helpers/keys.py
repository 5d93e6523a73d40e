"""Other keys than the one that all tests share, and none at all, for what is started inside of the block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from lockstep.security.chosen import INSECURE_VARIABLE
from lockstep.security.key import KEY_BYTES, KEY_VARIABLE


def make_key(path: Path, byte: int = 7) -> Path:
    """Put there at once: visitors side by side make and read the same one."""
    made = path.with_name(f"{path.name}.{threading.get_ident()}")
    made.write_text(bytes([byte] * KEY_BYTES).hex())
    made.chmod(0o600)
    return made.replace(path)


@contextmanager
def another_key(folder: Path) -> Iterator[Path]:
    path = make_key(folder / "another-key")
    with mock.patch.dict("os.environ", {KEY_VARIABLE: str(path)}):
        yield path


@contextmanager
def no_key() -> Iterator[None]:
    with mock.patch.dict("os.environ", {INSECURE_VARIABLE: "1"}):
        yield
