"""The key of a job: a file that only this user can read. Whoever has its bytes is a member of the job.

Without a word from the user it is the user's own key, made at first use, so that command lines need nothing new. The
bytes never leave the process that has read them: children get the file's name in a variable, the wire carries only what
is derived from a sub-key.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from lockstep.errors import BadInput
from lockstep.private_files import NotOurs, named_folder, write_if_missing

KEY_VARIABLE: Final = "LOCKSTEP_KEY_FILE"
KEY_BYTES: Final = 32

_MAKE_ONE: Final = "make one with (umask 077; openssl rand -hex 32 > FILE) and copy it to every host of the job"


class Purpose(Enum):
    """What a sub-key is for. One that leaks opens nothing else."""

    LINKS = "links"
    """TLS of every RPC: the private key of the authority that signs certificates."""
    DATA = "data"
    RENDEZVOUS = "rendezvous"
    DOOR = "door"
    STORE = "store"
    METRICS = "metrics"
    """The token of scrapers, which travels in clear."""
    WATCH = "watch"
    """Between the watchers of one job."""
    CACHE = "cache"
    """Proves that a stored certificate belongs to this key."""


@dataclass(frozen=True, slots=True)
class Key:
    """Not to be printed, sent or stored: ``sub`` gives what the parts of Lockstep need."""

    _master: bytes = field(repr=False)
    path: Path
    """Where it came from; sentences name it, and children read it again."""

    def sub(self, purpose: Purpose, nbytes: int = 32) -> bytes:
        """HKDF-SHA256 (RFC 5869) of the key for one purpose."""
        extracted = hmac.digest(b"lockstep 1", self._master, hashlib.sha256)
        derived, block = b"", b""
        for number in range(1, -(-nbytes // hashlib.sha256().digest_size) + 1):
            block = hmac.digest(extracted, block + purpose.value.encode() + bytes((number,)), hashlib.sha256)
            derived += block
        return derived[:nbytes]

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled; other processes read the file")


def find_key(named: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Key:
    """The key in the ``named`` file, else in the variable's, else the user's own. ``BadInput`` says what is wrong."""
    named = named or environ.get(KEY_VARIABLE)
    if named:
        return _read_named(Path(named).absolute())
    path = usual_path(environ)
    try:
        _make_if_missing(path)
        return _read(path, os.O_NOFOLLOW, {os.geteuid()})
    except OSError as error:
        raise BadInput(
            f"cannot use the key {path} ({error.strerror or error}); correct that, or name another key file with "
            f"--key_file or {KEY_VARIABLE}"
        ) from None


def usual_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's own key is."""
    folder = environ.get("XDG_CONFIG_HOME", "")
    if folder and os.path.isabs(folder):
        return Path(folder) / "lockstep" / "key"
    try:
        return Path(environ.get("HOME") or Path.home()) / ".config" / "lockstep" / "key"
    except RuntimeError:
        raise BadInput(f"this user has no home folder for a key; name a key file in {KEY_VARIABLE}") from None


def _read_named(path: Path) -> Key:
    """A link is followed, because a mounted secret is one; what counts is the file that it leads to."""
    try:
        return _read(path, 0, {0, os.geteuid()})
    except FileNotFoundError:
        raise BadInput(f"the key file {path} does not exist; {_MAKE_ONE.replace('FILE', str(path))}") from None
    except OSError as error:
        raise BadInput(f"cannot read the key file {path} ({error.strerror or error}); name another key file") from None


def _read(path: Path, flags: int, owners: set[int]) -> Key:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs("it is a link", path) from None
        raise
    with open(descriptor, "rb") as stream:
        _check(path, os.fstat(descriptor), owners)
        text = stream.read(4 * KEY_BYTES)
    try:
        master = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        master = b""
    if len(master) != KEY_BYTES:
        raise BadInput(
            f"{path} is not a key: it must have {2 * KEY_BYTES} hexadecimal digits; remove it and "
            f"{_MAKE_ONE.replace('FILE', str(path))}"
        )
    return Key(master, path)


def _check(path: Path, found: os.stat_result, owners: set[int]) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"the key {path} is not a plain file; remove it, or name another key file")
    if found.st_uid not in owners:
        raise BadInput(
            f"the key {path} belongs to user {found.st_uid}, who could use it; make a copy that is yours and "
            "that only you can read (chmod 600)"
        )
    # A group that root has given its own file to is how a secret reaches a container whose user is not root.
    public = 0o007 if found.st_uid == 0 != os.geteuid() else 0o077
    if found.st_mode & public:
        raise BadInput(f"other users have access to the key {path}; if it is still a secret, run chmod 600 {path}")


def _make_if_missing(path: Path) -> None:
    if os.path.lexists(path):
        return
    with named_folder(path.parent) as folder:
        write_if_missing(folder, path.name, secrets.token_hex(KEY_BYTES).encode() + b"\n")
