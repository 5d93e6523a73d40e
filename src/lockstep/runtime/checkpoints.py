"""Checkpoints on disk: a folder for each, one file a shard, the workers' states, and a manifest with checksums.

::

    TRAIN_DIR/checkpoints/step-00000120-1f0c9a7e/        complete: it got this name as the last act of writing it
        shard-0-of-2.safetensors  shard-1-of-2.safetensors
        worker-0.safetensors  worker-1.safetensors
        manifest.json
    TRAIN_DIR/checkpoints/step-00000160-1f0c9a7e.part/   being written, or left by a crash: never read

Each file is fsynced before the manifest is written, the manifest before the folder is renamed, so a crash at any byte
leaves the checkpoints before it as they are. A reader trusts nothing: lengths and SHA-256 of every file must be those
of the manifest, and the manifest has one of its own. All servers must see one and the same folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.protocol.ids import hex64
from lockstep.protocol.messages import Layout, OptimizerEntry, ParameterEntry, Saved, Setting
from lockstep.protocol.recovery import Beginning
from lockstep.runtime.tensor_file import FileFacts, digest_of, sync_folder, write_bytes

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
PART = ".part"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20

PROGRAM = "program"
"""The setting that jobs of the library have, and those of the benchmark do not."""
MUST_FIT = ("model", "data_name", "dtype", "optimizer", "precision")
"""A checkpoint with another value of one of these settings belongs to another run."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the text goes on from its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete folder."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.path.name


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder; CheckpointError where there is none that can be trusted."""
    try:
        file = path / MANIFEST
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError("has a manifest that is too large to be one")
        line, _, text = file.read_bytes().partition(b"\n")
        if line.decode("ascii", "replace") != hashlib.sha256(text).hexdigest():
            raise CheckpointError("has a damaged manifest: its checksum does not fit")
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"has format {fields.get('format')}, and this version reads {FORMAT}")
        return Manifest.from_json(fields)
    except OSError as error:
        raise CheckpointError(f"has no manifest that can be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"has a manifest that is none of ours ({error})") from error


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; CheckpointError names the first file that is not what it was."""
    manifest = read_manifest(path)
    for facts in manifest.files():
        check_file(path, facts)
    return manifest


def check_file(path: Path, facts: FileFacts) -> None:
    """CheckpointError where this file of a checkpoint is not as it was written."""
    try:
        nbytes, digest = digest_of(path / facts.name)
    except OSError as error:
        raise CheckpointError(f"lacks {facts.name} ({error.strerror})") from error
    if nbytes != facts.nbytes:
        raise CheckpointError(f"is damaged: {facts.name} has {nbytes} bytes instead of {facts.nbytes}")
    if digest != facts.digest:
        raise CheckpointError(f"is damaged: the checksum of {facts.name} does not fit")


class CheckpointFolder:
    """The checkpoints of one ``--train_dir``."""

    def __init__(self, train_dir: str | Path) -> None:
        self.path = Path(train_dir) / FOLDER

    # -- reading --

    def complete(self) -> list[Path]:
        """The folders that were finished, the newest version first."""
        try:
            found = [path for path in self.path.iterdir() if path.is_dir() and _version_in(path.name) >= 0]
        except OSError:
            return []
        return sorted(found, key=lambda path: (_version_in(path.name), path.stat().st_mtime), reverse=True)

    def refuse_foreign(self, settings: Iterable[Setting]) -> None:
        """CheckpointError where all checkpoints are of another run. Reads manifests only, so it can be asked early."""
        ours = {setting.name: setting.value for setting in settings}
        found = []
        for path in self.complete():
            try:
                difference = first_difference(ours, read_manifest(path).settings)
            except CheckpointError:
                continue
            if difference is None:
                return
            found.append(f"{path} is of another run: {difference}")
        if found:
            raise CheckpointError(f"{found[0]}; give another --train_dir, or the settings of that run")

    def newest(self, settings: Iterable[Setting], say: Callable[[str], None]) -> Checkpoint | None:
        """The newest one that is whole and of this run; whatever is passed over is named.

        CheckpointError where there are checkpoints, none damaged, and all of another run: they would get mixed up.
        """
        ours = {setting.name: setting.value for setting in settings}
        foreign = ""
        for path in self.complete():
            try:
                manifest = verify(path)
                difference = first_difference(ours, manifest.settings)
            except CheckpointError as error:
                say(f"checkpoint {path} {error}; using the one before")
                continue
            if difference is None:
                return Checkpoint(path, manifest)
            foreign = foreign or f"{path} is of another run: {difference}"
            say(f"checkpoint {path} is of another run ({difference}); using the one before")
        if foreign:
            raise CheckpointError(f"{foreign}; give another --train_dir, or the settings of that run")
        return None

    def beginning(self, settings: Iterable[Setting], say: Callable[[str], None]) -> Beginning:
        """Where a job with these settings begins."""
        settings = tuple(settings)
        found = self.newest(settings, say)
        if found is None:
            return Beginning()
        for sentence in differences(settings, found.manifest):
            say(sentence)
        states = {}
        for facts in found.manifest.states:
            index = int(facts.name.removeprefix("worker-").partition(".")[0])
            states[index] = (found.path / facts.name).read_bytes()
        return Beginning(start=found.manifest.version, checkpoint=found.name, states=states)

    # -- writing --

    def part(self, version: int, job: int) -> Path:
        """The folder in which this job writes this version."""
        return self.path / f"step-{version:08d}-{hex64(job)[:8]}{PART}"

    def finish(self, part: Path, manifest: Manifest, states: Sequence[tuple[int, bytes]]) -> Checkpoint:
        """All shards are in ``part``: add states and manifest, and give it its name."""
        for shard in manifest.shards:
            found = (part / shard.name).stat().st_size if (part / shard.name).exists() else -1
            if found != shard.nbytes:
                raise CheckpointError(
                    f"{self.path} ({shard.name}) was written by another server and is not seen here; --train_dir must "
                    "be one folder that all servers share"
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

    def prune(self, keep: int) -> None:
        """Leave the newest ``keep`` (0: all); OSError where one of the others could not be removed."""
        first: OSError | None = None
        for path in self.complete()[keep:] if keep else []:
            try:
                # Out of sight first: a folder that is half deleted must not look like a checkpoint.
                doomed = path.with_name(path.name + PART)
                path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                first = first or error
        if first is not None:
            raise first

    def clear_parts(self, but: Path | None = None) -> None:
        """Remove what crashes have left half written."""
        if not self.path.is_dir():
            return
        for path in self.path.glob(f"*{PART}"):
            if path != but:
                shutil.rmtree(path, ignore_errors=True)


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__slots__}


def _version_in(name: str) -> int:
    """The version that a folder's name tells; -1 for other names."""
    kind, _, rest = name.partition("-")
    number = rest.partition("-")[0]
    return int(number) if kind == "step" and number.isdecimal() and not name.endswith(PART) else -1


def make_manifest(
    layout: Layout, servers: int, workers: int, version: int, job: int, settings: Iterable[Setting], program: str
) -> Manifest:
    """A manifest without its files."""
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
    """Why a checkpoint is of another run; None where it fits."""
    if (PROGRAM in ours) != (PROGRAM in theirs):
        known = "a program of one's own", "lockstep bench"
        return f"it is of {known[PROGRAM not in theirs]}, this run is of {known[PROGRAM not in ours]}"
    for name in MUST_FIT:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            return f"it has {name}={theirs[name]}, this run has {name}={ours[name]}"
    return None


def differences(settings: Iterable[Setting], manifest: Manifest) -> list[str]:
    """What is said where a job goes on with other settings than it was saved with."""
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
        "number of servers": "; the shards are distributed anew, the result does not change",
        "number of workers": "; each step now covers another number of samples, so the run differs from here on; "
        "a worker that is new begins with the chief's batch-norm statistics and random numbers",
        "wire_dtype": "; gradients are rounded in another way, so the run differs from here on",
        "compile": "; arithmetic is rounded in another way, so the run differs from here on",
    }
)
