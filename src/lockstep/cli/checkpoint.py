"""``lockstep checkpoint``: show, verify and export the checkpoints of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import EXIT_FAILED, BadInput, HelpAsked
from lockstep.foreign import plain
from lockstep.runtime.checkpoint.folder import (
    MANIFEST,
    CheckpointError,
    CheckpointFolder,
    Manifest,
    read_manifest,
    verify,
)

_HELP = """\
Inspect the checkpoints that a run left in its --train_dir.

  lockstep checkpoint show FOLDER [--json]   what each of them contains
  lockstep checkpoint verify FOLDER          check every byte; exit code 1 if one is damaged
  lockstep checkpoint export FOLDER OUT      one safetensors file that plain torch can load

FOLDER is a --train_dir (export then takes its newest complete checkpoint), or one
checkpoint in it. To load an export:

  model.load_state_dict(safetensors.torch.load_file(OUT))
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    words = [word for word in argv if word != "--json"]
    if not words or any(word in ("-h", "--help", "help") for word in words):
        raise HelpAsked(_HELP)
    flags = [word for word in words if word.startswith("-")]
    if flags:
        raise BadInput(f"'lockstep checkpoint' has no flag {flags[0]}; 'lockstep checkpoint --help' shows its usage.")
    what, *rest = words
    if what not in ("show", "verify", "export"):
        raise BadInput(f"there is no 'lockstep checkpoint {what}'; use show, verify or export.")
    wanted = 2 if what == "export" else 1
    if len(rest) != wanted:
        raise BadInput(f"write: lockstep checkpoint {what} FOLDER{' OUT' if what == 'export' else ''}.")
    found = _find(Path(rest[0]))
    if what == "show":
        return _show(found, as_json=len(words) != len(argv))
    return _verify(found) if what == "verify" else _export(found, Path(rest[1]))


def _find(folder: Path) -> list[Path]:
    """The checkpoint in this folder, or those below it, newest first."""
    if (folder / MANIFEST).exists():
        return [folder]
    try:
        found = CheckpointFolder(folder).complete()
    except OSError as error:
        raise BadInput(f"{folder} cannot be read ({error.strerror}); give the --train_dir of a run.") from None
    if not found:
        raise BadInput(f"{folder} has no checkpoint; give the --train_dir of a run that has written one.")
    return found


def _show(found: list[Path], *, as_json: bool) -> int:
    code, shown = 0, []
    for path in found:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            print(f"{path} {error}")
            code = EXIT_FAILED
            continue
        shown.append({"path": str(path), **manifest.to_json()})
        if not as_json:
            _print(path, manifest)
    if as_json:
        print(json.dumps(shown, indent=1))
    return code


def _print(path: Path, manifest: Manifest) -> None:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.written))
    size = sum(facts.nbytes for facts in manifest.files())
    elements = sum(entry.elements for entry in manifest.parameters)
    print(path)
    print(plain(f"  step {manifest.version}, written {written} by Lockstep {manifest.program}, job {manifest.job}"))
    print(f"  {len(manifest.parameters)} parameters, {elements} numbers, {size / 1e6:.1f} MB in {_files(manifest)}")
    for name, value in manifest.settings.items():
        print(plain(f"  {name}: {value}"))


def _files(manifest: Manifest) -> str:
    return f"{len(manifest.shards)} shards and the states of {len(manifest.states)} workers"


def _verify(found: list[Path]) -> int:
    code = 0
    for path in found:
        try:
            manifest = verify(path)
            print(f"{path} is intact: step {manifest.version}, {_files(manifest)}")
        except CheckpointError as error:
            print(f"{path} {error}")
            code = EXIT_FAILED
    return code


def _export(found: list[Path], target: Path) -> int:
    from lockstep.training.export import export

    for path in found:
        try:
            count = export(path, target)
        except CheckpointError as error:
            print(f"{path} {error}")
            continue
        except OSError as error:
            raise BadInput(f"{target} cannot be written ({error.strerror}); give another name.") from None
        print(f"Wrote {target}: {count} tensors from {path}")
        return 0
    return EXIT_FAILED
