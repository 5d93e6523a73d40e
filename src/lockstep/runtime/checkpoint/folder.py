"""Checkpoints on disk: one folder each, with one file per shard, the workers' states, and a manifest with checksums.

::

    TRAIN_DIR/checkpoints/step-00000120-1f0c9a7e/        complete: it gets this name when all is written
        shard-0-of-2.safetensors  shard-1-of-2.safetensors
        worker-0.safetensors  worker-1.safetensors
        manifest.json
    TRAIN_DIR/checkpoints/step-00000160-1f0c9a7e.part/   being written, or left by a crash: never read
    TRAIN_DIR/checkpoints/step-00000140-1f0c9a7e.damaged/   found damaged at a start: never read again
    TRAIN_DIR/checkpoints/before-1/checkpoints/...       what was there before a run with --from_scratch

Each file is fsynced before the manifest is written, the manifest before the folder is renamed, so a crash at any byte
leaves earlier checkpoints intact. A reader trusts nothing: the length and SHA-256 of every file must match the
manifest, and the manifest has its own checksum. All servers must see the same folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.foreign import plain, read_json
from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.messages import Layout, OptimizerEntry, ParameterEntry, Saved, Setting
from lockstep.protocol.core.setting_names import SEED, SERVERS, WORKERS
from lockstep.runtime.checkpoint.tensor_file import FileFacts, digest_of, sync_folder, write_bytes

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STEP = "step-"
PART = ".part"
DAMAGED = ".damaged"
BEFORE = "before-"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20

PROGRAM = "program"
"""The setting that only jobs of the library have, not those of the benchmark."""
MUST_FIT = ("model", "data_name", "dtype", "optimizer", "precision")
"""A checkpoint with another value of one of these settings belongs to another run."""


LATEST_TIME = 1 << 36
"""Times of writing beyond this, some two thousand years away, are invalid."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the text continues from its name."""


class DamagedError(CheckpointError):
    """A checkpoint is provably not what was written; a disk that does not respond proves nothing."""


class Fault(StrEnum):
    """Why a checkpoint was passed over."""

    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """It may be intact: the disk did not allow reading it, or another version of Lockstep wrote it."""
    FOREIGN = "of another run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint contains."""

    version: int
    job: str
    program: str
    written: float
    servers: int
    workers: int
    bucket_bytes: int
    plan_hash: str
    parameters: tuple[ParameterEntry, ...]
    optimizers: tuple[OptimizerEntry, ...]
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shards: tuple[FileFacts, ...] = ()
    states: tuple[FileFacts, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "job": self.job,
            "program": self.program,
            "written": self.written,
            "servers": self.servers,
            "workers": self.workers,
            "bucket_bytes": self.bucket_bytes,
            "plan_hash": self.plan_hash,
            "parameters": [[p.name, p.elements, p.dtype, p.group] for p in self.parameters],
            "optimizers": [[o.kind, o.options] for o in self.optimizers],
            "settings": dict(self.settings),
            "shards": [[f.name, f.nbytes, f.digest] for f in self.shards],
            "states": [[f.name, f.nbytes, f.digest] for f in self.states],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """Raises ValueError, or one of ``_NO_MANIFEST``, for anything that Lockstep did not write."""
        manifest = cls._from_json(fields)
        if not (0 <= manifest.version < 1 << 63 and 0 <= manifest.written < LATEST_TIME):
            raise ValueError("a number in it is out of range")
        # Without servers, one of the workers writes what is the same on all.
        if len(manifest.shards) != max(1, manifest.servers):
            raise ValueError(f"it has {len(manifest.shards)} shards for {manifest.servers} servers")
        for facts in manifest.states:
            worker_of(facts)
        return manifest

    @classmethod
    def _from_json(cls, fields: dict[str, Any]) -> Manifest:
        return cls(
            version=int(fields["version"]),
            job=str(fields["job"]),
            program=str(fields["program"]),
            written=float(fields["written"]),
            servers=int(fields["servers"]),
            workers=int(fields["workers"]),
            bucket_bytes=int(fields["bucket_bytes"]),
            plan_hash=str(fields["plan_hash"]),
            parameters=tuple(ParameterEntry(str(n), int(e), str(d), int(g)) for n, e, d, g in fields["parameters"]),
            optimizers=tuple(OptimizerEntry(str(k), str(o)) for k, o in fields["optimizers"]),
            settings={str(name): str(value) for name, value in fields["settings"].items()},
            shards=tuple(_facts(row) for row in fields["shards"]),
            states=tuple(_facts(row) for row in fields["states"]),
        )

    def files(self) -> tuple[FileFacts, ...]:
        return (*self.shards, *self.states)


def _facts(row: Sequence[Any]) -> FileFacts:
    name, nbytes, digest = row
    if "/" in str(name) or str(name).startswith("."):
        raise ValueError(f"{name!r} is not the name of a file beside the manifest")
    return FileFacts(str(name), int(nbytes), str(digest))


def worker_of(facts: FileFacts) -> int:
    """The index of the worker whose state a file holds; ValueError if it holds none."""
    return int(facts.name.removeprefix("worker-").removesuffix(".safetensors"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete folder."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was passed over; ``why`` continues from its name."""

    path: Path
    fault: Fault
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in a folder: the checkpoint to start from, and those that were passed over."""

    checkpoint: Checkpoint | None
    passed: tuple[Passed, ...] = ()

    def with_fault(self, fault: Fault) -> list[Passed]:
        return [one for one in self.passed if one.fault is fault]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder; CheckpointError if there is none that can be trusted."""
    try:
        file = path / MANIFEST
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise DamagedError("has a manifest that is too large to be valid")
        line, _, text = file.read_bytes().partition(b"\n")
        if line.decode("ascii", "replace") != hashlib.sha256(text).hexdigest():
            raise DamagedError("has a damaged manifest: its checksum does not match")
        fields = read_json(text, MAX_MANIFEST_BYTES)
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"has format {fields.get('format')}, but this version reads format {FORMAT}")
        return Manifest.from_json(fields)
    except OSError as error:
        raise _unreadable(error, "has no readable manifest") from error
    except _NO_MANIFEST as error:
        raise DamagedError(f"has a manifest that Lockstep did not write ({error})") from error


_NO_MANIFEST = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""What reading garbage raises."""
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _unreadable(error: OSError, what: str) -> CheckpointError:
    kind = DamagedError if isinstance(error, _NOT_THERE) else CheckpointError
    return kind(f"{what} ({error.strerror})")


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; CheckpointError names the first file that has changed."""
    manifest = read_manifest(path)
    check_files(path, manifest)
    return manifest


def check_files(path: Path, manifest: Manifest, *, deep: bool = True) -> None:
    """CheckpointError if a file of a checkpoint is not as it was written; unless ``deep``, only lengths are checked."""
    for facts in manifest.files():
        check_file(path, facts, deep=deep)


def check_file(path: Path, facts: FileFacts, *, deep: bool = True) -> None:
    """The same for one file."""
    try:
        nbytes, digest = digest_of(path / facts.name) if deep else ((path / facts.name).stat().st_size, facts.digest)
    except OSError as error:
        raise _unreadable(error, f"lacks {facts.name}") from error
    if nbytes != facts.nbytes:
        raise DamagedError(f"is damaged: {facts.name} has {nbytes} bytes instead of {facts.nbytes}")
    if digest != facts.digest:
        raise DamagedError(f"is damaged: the checksum of {facts.name} does not match")


class CheckpointFolder:
    """The checkpoints of one ``--train_dir``."""

    def __init__(self, train_dir: str | Path) -> None:
        self.path = Path(train_dir) / FOLDER

    # -- reading --

    def complete(self) -> list[Path]:
        """The finished folders, the newest version first; OSError if the folder cannot be read."""
        found = [path for path in self._folders() if _version_in(path.name) >= 0]
        return sorted(found, key=lambda path: (_version_in(path.name), _changed_at(path)), reverse=True)

    def named(self, name: str) -> Path:
        """The finished one with this name, which comes from another task: no other place can be named by it."""
        if _version_in(name) < 0 or Path(name).name != name or not name.isprintable():
            raise CheckpointError(f"{plain(name, 100)!r} is not the name of a checkpoint in {self.path}")
        return self.path / name

    def damaged(self) -> list[Path]:
        """Those that an earlier start found damaged and set aside."""
        return [path for path in self._folders() if path.name.endswith(DAMAGED)]

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if path.name.startswith(STEP) and path.is_dir()]
        except FileNotFoundError:
            return []  # nothing has been saved yet; no other problem with the folder may look like that

    def look(self, settings: Iterable[Setting], *, deep: bool = True) -> Found:
        """Find the newest one that is intact and belongs to this run. Changes nothing.

        ``deep``: check every byte; otherwise only manifests and lengths, which takes no time.
        """
        ours = {setting.name: setting.value for setting in settings}
        passed = []
        for path in self.complete():
            try:
                manifest = read_manifest(path)
                difference = first_difference(ours, manifest.settings)
                if difference is not None:
                    passed.append(Passed(path, Fault.FOREIGN, f"belongs to another run: {difference}"))
                    continue
                check_files(path, manifest, deep=deep)
            except DamagedError as error:
                passed.append(Passed(path, Fault.DAMAGED, str(error)))
            except CheckpointError as error:
                passed.append(Passed(path, Fault.UNREADABLE, str(error)))
            else:
                return Found(Checkpoint(path, manifest), tuple(passed))
        return Found(None, tuple(passed))

    # -- writing --

    def part(self, version: int, job: int) -> Path:
        """The folder in which this job writes this version."""
        return self.path / f"{STEP}{version:08d}-{hex64(job)[:8]}{PART}"

    def finish(self, part: Path, manifest: Manifest, states: Sequence[tuple[int, bytes]]) -> Checkpoint:
        """All shards are in ``part``: add the states and the manifest, and give it its final name."""
        for shard in manifest.shards:
            found = (part / shard.name).stat().st_size if (part / shard.name).exists() else -1
            if found != shard.nbytes:
                raise CheckpointError(
                    f"{self.path} ({shard.name}) was written by another server and is not visible here; give "
                    "--train_dir one folder that all servers share"
                )
        kept = [write_bytes(part / f"worker-{index}.safetensors", data) for index, data in states if data]
        whole = Manifest(**{**_fields(manifest), "states": tuple(kept)})
        text = json.dumps(whole.to_json(), indent=1).encode()
        write_bytes(part / MANIFEST, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        sync_folder(part)
        final = part.with_name(part.name.removesuffix(PART))
        part.rename(final)
        sync_folder(self.path)
        return Checkpoint(final, whole)

    def prune(self, keep: int, written: int) -> None:
        """Keep the newest ``keep`` (0: all) up to version ``written``; OSError if another could not be removed.

        One of a higher version belongs to another run, or could not be read: it is neither counted nor removed.
        """
        known = [path for path in self.complete() if _version_in(path.name) <= written]
        first: OSError | None = None
        for path in known[keep:] if keep else []:
            try:
                # Rename it first: a half-deleted folder must not look like a checkpoint.
                doomed = path.with_name(path.name + PART)
                path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                first = first or error
        if first is not None:
            raise first

    def clear_parts(self) -> None:
        """Remove what crashes left half-written."""
        for path in self._folders():
            if path.name.endswith(PART):
                shutil.rmtree(path, ignore_errors=True)

    def mark_damaged(self, path: Path) -> Path:
        """Rename a damaged one so that Lockstep neither reads nor removes it."""
        marked = path.with_name(path.name + DAMAGED)
        path.rename(marked)
        return marked

    def set_aside(self) -> Path | None:
        """Move everything into a separate ``--train_dir`` and return it; None if there is nothing.

        It stays below this folder, and so on the same disk, where renaming is enough.
        """
        there = [*self.complete(), *self.damaged()]
        if not there:
            return None
        number = next(one for one in itertools.count(1) if not (self.path / f"{BEFORE}{one}").exists())
        aside = CheckpointFolder(self.path / f"{BEFORE}{number}")
        aside.path.mkdir(parents=True)
        for path in there:
            path.rename(aside.path / path.name)
        sync_folder(aside.path)
        sync_folder(self.path)
        return aside.path.parent


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__slots__}


def _version_in(name: str) -> int:
    """The version in the name of a finished folder; -1 for other names."""
    number = name.removeprefix(STEP).partition("-")[0]
    finished = name.startswith(STEP) and not name.endswith((PART, DAMAGED))
    return int(number) if finished and number.isdecimal() and number.isascii() else -1


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process has just removed it


def make_manifest(
    layout: Layout, servers: int, workers: int, version: int, job: int, settings: Iterable[Setting], program: str
) -> Manifest:
    """A manifest without files."""
    return Manifest(
        version=version,
        job=hex64(job),
        program=program,
        written=time.time(),
        servers=servers,
        workers=workers,
        bucket_bytes=layout.bucket_bytes,
        plan_hash=layout.plan_hash,
        parameters=layout.parameters,
        optimizers=layout.optimizers,
        settings={setting.name: setting.value for setting in settings},
    )


def with_shards(manifest: Manifest, shards: Sequence[Saved]) -> Manifest:
    facts = tuple(FileFacts(one.file, one.nbytes, one.digest) for one in shards)
    return Manifest(**{**_fields(manifest), "shards": facts})


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Why a checkpoint belongs to another run; None if it belongs to this one."""
    if (PROGRAM in ours) != (PROGRAM in theirs):
        known = "your own program", "lockstep bench"
        return f"{known[PROGRAM not in theirs]} wrote it, but this run is {known[PROGRAM not in ours]}"
    for name in MUST_FIT:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            return f"it has {name}={theirs[name]}, this run has {name}={ours[name]}"
    return None


def differences(settings: Iterable[Setting], manifest: Manifest) -> list[str]:
    """What to report if a job continues with settings other than those it was saved with."""
    ours = {setting.name: setting.value for setting in settings}
    said = []
    for name, value in ours.items():
        before = manifest.settings.get(name, value)
        if before == value:
            continue
        meaning = _MEANINGS.get(name, "")
        said.append(f"resuming with {name}={value}, saved with {before}{meaning}")
    return said


_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        SERVERS: "; the shards are redistributed, the result does not change",
        WORKERS: "; each step now covers a different number of samples, so the run differs from here on; "
        "new workers start with the chief's batch-norm statistics and random numbers",
        SEED: "; samples come in another order from here on, so this epoch has some twice and some not at all",
        "wire_dtype": "; gradients are rounded differently, so the run differs from here on",
        "compile": "; arithmetic is rounded differently, so the run differs from here on",
    }
)
