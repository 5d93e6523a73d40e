"""``make lock``: writes ``locks/`` from pyproject.toml and constraints.txt, with the hashes of every file that the
package index offers for each version.

Three files, because which build of torch is installed differs from machine to machine, and with it what torch needs:

- ``packages.txt``: everything that ``make`` installs besides torch.
- ``torch.txt``: torch, with the hashes of the index and of the CPU build. That one is not on the index; its hash is
  taken from a wheel in one of pip's ``find-links`` folders, or kept from the file as it was.
- ``torch-cuda.txt``: what the build with CUDA needs besides.

  python -m tools.lock
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from tools.throwaway import installed

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
UV = "uv==0.13.7"
CUDA = ("cuda-", "nvidia-", "triton")
"""How the names of the packages begin that only torch's build with CUDA needs."""

_HEADS = {
    "packages": "Everything that `make` installs, except torch.",
    "torch": "torch: the builds on the package index, and the CPU build.",
    "torch-cuda": "What torch's build with CUDA needs besides; `make` installs it unless torch is a CPU build.",
}


def main() -> None:
    pins = constraints()
    blocks = _compiled()
    unknown = [name for name in blocks if name not in pins and not name.startswith(CUDA)]
    if unknown:
        sys.exit(f"constraints.txt pins no version of: {', '.join(unknown)}. Add a line for each and run it again.")
    cuda = {name for name in blocks if name.startswith(CUDA) and name not in pins}
    _write("torch-cuda", [blocks[name] for name in sorted(cuda)])
    _write("packages", [text for name, text in sorted(blocks.items()) if name not in cuda and name != "torch"])
    _write("torch", [_with_local_builds(blocks["torch"], pins["torch"])])


def constraints() -> dict[str, str]:
    """Version by normalised name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", _normal((ROOT / "constraints.txt").read_text()), re.MULTILINE))


def locked(name: str) -> dict[str, str]:
    """What one of the files says: version by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE))


def _normal(text: str) -> str:
    return re.sub(r"^[\w.-]+", lambda name: re.sub(r"[-_.]+", "-", name[0]).lower(), text, flags=re.MULTILINE)


def _compiled() -> dict[str, str]:
    """For each package its line and the lines with its hashes."""
    with installed(UV) as programs:
        done = subprocess.run(
            [
                *(programs / "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
                *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
                *("--constraint", "constraints.txt", "--extra", "dev", "--extra", "ucx", "pyproject.toml", "-"),
            ],
            cwd=ROOT,
            input="pip\n",
            text=True,
            stdout=subprocess.PIPE,
            check=False,
            timeout=600,
        )
    if done.returncode:
        sys.exit("The versions in constraints.txt do not fit together; uv has said above which.")
    blocks = re.split(r"\n(?=\S)", done.stdout.strip())
    return {block.split("==")[0]: block for block in blocks}


def _with_local_builds(block: str, version: str) -> str:
    """The block of torch with the hashes of builds that are not on the index."""
    own = {_digest(wheel) for folder in _find_links() for wheel in folder.glob(f"torch-{version}+*.whl")}
    before = LOCKS / "torch.txt"
    if before.exists() and locked("torch").get("torch") == version:
        own.update(re.findall(r"sha256:(\w+)", before.read_text()))
    new = sorted(own - set(re.findall(r"sha256:(\w+)", block)))
    return "".join([block, *(f" \\\n    --hash=sha256:{digest}" for digest in new)])


def _find_links() -> list[Path]:
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60).stdout
    return [Path(word) for word in said.split() if Path(word).is_dir()]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(name: str, blocks: list[str]) -> None:
    LOCKS.mkdir(exist_ok=True)
    text = "\n".join([f"# {_HEADS[name]}", "# Written by `make lock` from constraints.txt; do not edit.", *blocks])
    (LOCKS / f"{name}.txt").write_text(text + "\n")
    print(f"locks/{name}.txt: {len(blocks)} package(s)")


if __name__ == "__main__":
    main()
