"""Files and folders that only this user can have created: the only code that opens any by a guessable name.

Everyone can write to the temporary directory. Anyone who knows a name in it can be there first, with their own folder,
with a link that leads elsewhere (``events.jsonl -> ~/.bashrc``: the next shell would run our line), or with a pipe that
makes us wait forever. A job's number is random, but every task gives it to anyone who asks. So a name protects nothing
here; what counts is the owner, checked on a descriptor, with everything below opened relative to it:

- ``user_folder`` is ``lockstep-UID`` under the temporary directory, made with mode 0700, a real folder, and ours. All
  tasks of a user on a host find it by its name, and in it each job has a folder with its number. Nobody else can put
  anything into a folder that only we can enter.
- If somebody else has taken that name, ``lockstep-UID-RANDOM`` is used instead, found by looking for one of ours.
- A folder that a user has named may have any mode and lie anywhere. It must not be another user's; nobody but root
  would meet one for good reasons (in a container, folders belong to the users of the host), so root may use it.
- No file is opened through a link, none that is not a plain file, none for writing that has a second name elsewhere.
  New ones have mode 0600. Nothing waits: a pipe is opened without blocking and then refused.
- Results in a folder that a user has named (checkpoints, traces, metrics) are meant to be shared: their mode is the
  umask's affair. They too are never written through a link, nor into a file that was there before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
RESULT_MODE: Final = 0o666
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotOurs(OSError):  # noqa: N818 - reads as the fact it states
    """Somebody else may have created it. ``strerror`` says what is wrong with it."""

    def __init__(self, what: str, path: Path | str) -> None:
        super().__init__(errno.EPERM, what, str(path))


# -- folders --


@contextlib.contextmanager
def user_folder(make: bool = True) -> Iterator[tuple[Path, int]]:
    """This user's folder under the temporary directory, with an open descriptor of it.

    FileNotFoundError if it does not exist and ``make`` is False.
    """
    path = _find(make)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(_usual()))
    with own_folder(path) as descriptor:
        yield path, descriptor


def user_folders() -> list[Path]:
    """All that belong to this user: the usual one, and those created while somebody else had its name."""
    usual = _usual()
    with contextlib.suppress(OSError):
        return [path for path in (usual, *sorted(usual.parent.glob(f"{usual.name}-*"))) if _is_ours(path)]
    return []


@contextlib.contextmanager
def own_folder(name: Path | str, parent: int | None = None) -> Iterator[int]:
    """Open a real folder that is this user's, and that others cannot enter from now on."""
    descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise NotOurs(f"it belongs to user {found.st_uid}", name)
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, FOLDER_MODE)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named_folder(path: Path, make: bool = True) -> Iterator[int]:
    """Open a folder that the user has named; it is created if it does not exist."""
    if make:
        os.makedirs(path, FOLDER_MODE, exist_ok=True)
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise NotOurs(f"it is a link of user {link.st_uid}", path)
    descriptor = os.open(path, _FOLDER if stat.S_ISLNK(link.st_mode) else _FOLDER | os.O_NOFOLLOW)
    try:
        if not _is_trusted(owner := os.fstat(descriptor).st_uid):
            raise NotOurs(f"it belongs to user {owner}", path)
        yield descriptor
    finally:
        os.close(descriptor)


def _usual() -> Path:
    return Path(tempfile.gettempdir()) / f"lockstep-{os.geteuid()}"


def _is_ours(path: Path) -> bool:
    """A real folder of this user into which nobody else could put anything."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _find(make: bool) -> Path | None:
    usual = _usual()
    if make:
        with contextlib.suppress(FileExistsError):
            usual.mkdir(FOLDER_MODE)
    elif not os.path.lexists(usual):
        return None
    if _is_ours(usual):
        return usual
    if make and not user_folders():
        _make_another(usual)
    # If another task has created one at the same moment, all take the first.
    return next(iter(user_folders()), None)


def _make_another(usual: Path) -> None:
    other = usual.with_name(f"{usual.name}-{secrets.token_hex(4)}")
    other.mkdir(FOLDER_MODE)
    if not _is_ours(other):  # a file system of another host, which gives our files to somebody else
        other.rmdir()
        raise NotOurs("files created there do not belong to the user who created them", usual.parent)


def _is_trusted(owner: int) -> bool:
    return owner in (0, os.geteuid()) or os.geteuid() == 0


# -- files in an open folder --


def write_whole(folder: int, name: str, data: bytes) -> None:
    """Write a file beside its place and move it there: nobody reads half of one, and a link is replaced itself."""
    with _written_beside(folder, name, data) as beside:
        os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)


def write_if_missing(folder: int, name: str, data: bytes) -> None:
    """Of several processes that do so at once, all find the first one's file afterwards, and never half of it."""
    with _written_beside(folder, name, data, sync=True) as beside, contextlib.suppress(FileExistsError):
        os.link(beside, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


@contextlib.contextmanager
def _written_beside(folder: int, name: str, data: bytes, *, sync: bool = False) -> Iterator[str]:
    """A file with another name, which is removed afterwards where it still has it. ``sync``: it is on the disk."""
    beside = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, FILE_MODE, dir_fd=folder)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            if sync:
                stream.flush()
                os.fsync(descriptor)
        yield beside
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)


def write_held(folder: int, name: str, data: bytes) -> int:
    """Write a file whole and lock it for as long as the returned descriptor is open. It appears locked."""
    beside = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, FILE_MODE, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, data)
        os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise
    return descriptor


def read_held(folder: int, name: str, limit: int) -> bytes | None:
    """The content of a file of ``write_held``, ``limit`` bytes at most; None if nobody holds it any more."""
    descriptor = _open_plain(name, os.O_RDONLY, f"{name} is not a plain file of this user; remove it", folder)
    with open(descriptor, "rb") as stream:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return stream.read(limit)
    return None


def append(folder: int, name: str, data: bytes) -> None:
    """Append in one piece, because several tasks do so at once."""
    refusal = f"{name} is not a plain file of this user; remove it"
    with open(_open_to_append(name, refusal, FILE_MODE, folder), "ab", buffering=0) as stream:
        stream.write(data)


def read_plain(path: Path, limit: int) -> tuple[bytes, float]:
    """The content of a plain file, ``limit`` bytes at most, and when it was written."""
    with open(_open_plain(path, os.O_RDONLY, "it is not a plain file"), "rb") as stream:
        return stream.read(limit), os.fstat(stream.fileno()).st_mtime


# -- results, by their path --


def fresh_file(path: Path) -> BinaryIO:
    """Open a file that did not exist before; what has its name is removed, never written to."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, RESULT_MODE), "wb")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there, as ``write_whole`` does; its folder is created if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with fresh_file(beside) as stream:
            stream.write(data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def open_to_append(path: Path, mode: int = FILE_MODE) -> BinaryIO:
    """Open a plain file of this user for appending; it is created with this mode."""
    return open(_open_to_append(path, "it is not a plain file of this user; remove it", mode), "ab")


def _open_to_append(name: Path | str, refusal: str, mode: int, folder: int | None = None) -> int:
    descriptor = _open_plain(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, refusal, folder, mode)
    found = os.fstat(descriptor)
    if found.st_nlink != 1 or not _is_trusted(found.st_uid):
        os.close(descriptor)
        raise NotOurs(refusal, name)
    return descriptor


def check_real_folder(path: Path) -> None:
    """``NotOurs`` if it is a link, which would lead what is written elsewhere."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotOurs("it is not a real folder", path)


def _open_plain(name: Path | str, flags: int, refusal: str, folder: int | None = None, mode: int = FILE_MODE) -> int:
    try:
        descriptor = os.open(name, flags | _PLAIN, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise NotOurs(refusal, name) from None
        raise
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(name))
    raise NotOurs(refusal, name)
