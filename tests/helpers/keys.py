"""Other keys than the one that all tests share, and none at all, for what is started inside of the block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from lockstep.security.chosen import INSECURE_VARIABLE
from lockstep.security.key import KEY_BYTES, KEY_VARIABLE


def make_key(path: Path, byte: int = 7) -> Path:
    path.write_text(bytes([byte] * KEY_BYTES).hex())
    path.chmod(0o600)
    return path


@contextmanager
def another_key(folder: Path) -> Iterator[Path]:
    path = make_key(folder / "another-key")
    with mock.patch.dict("os.environ", {KEY_VARIABLE: str(path)}):
        yield path


@contextmanager
def no_key() -> Iterator[None]:
    with mock.patch.dict("os.environ", {INSECURE_VARIABLE: "1"}):
        yield
