"""The documents hold what a reader relies on: lines that fit a screen, links that lead somewhere, files that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md")])
COLUMNS = 120
PACKAGE = ROOT / "src" / "lockstep"
NOT_OURS = {
    *("cifar-10-batches-py/", "job/train.py", "train.py"),
    *("distributed/distributed_c10d.py", "distributed/c10d_logger.py"),
}
"""Folders of data sets that documents name; files of a user's job and of torch in a stack."""

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(
    r"(?<![\w./~*:;=-])(?:(?:src|tests|docs|bench|examples)/[\w./-]+|[a-z][\w./-]*(?:/|\.py|\.md))(?![\w./*{-])"
)
"""Ours begins with a folder of the repository, or ends in a slash, ``.py`` or ``.md``. What begins with a slash or in
capitals (``/etc/hosts``, ``FOLDER/checkpoints/``) is somebody else's."""
MODULE = re.compile(r"(?<![\w./~*:;=-])[a-z]\w*(?:/\w+)+\.py\b")
"""In a block of code only these: the rest of it may be a user's."""
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


def test_there_are_documents() -> None:
    assert {"README.md", "ARCHITECTURE.md", "library.md"} <= {document.name for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_line_is_longer_than_a_screen(document: Path) -> None:
    lines = enumerate(document.read_text().splitlines(), 1)
    assert [f"{document.name}:{number}: {len(line)}" for number, line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_within_the_project_leads_to_a_file(document: Path) -> None:
    links = [link for link in LINK.findall(without_fences(document)) if "://" not in link and link[0] != "#"]
    assert [link for link in links if not (document.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    modules = [path for fence in FENCE.findall(document.read_text()) for path in MODULE.findall(fence)]
    named = [*paths_in(without_fences(document)), *(path for path in modules if path not in NOT_OURS)]
    assert [path for path in named if not found(path, document)] == []


def test_every_test_that_a_finding_names_exists() -> None:
    written = {name for file in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(file.read_text())}
    named = re.findall(r"\| `(test_\w+)` \|", (ROOT / "docs" / "security.md").read_text())
    assert named
    assert [name for name in named if name not in written] == []


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("`protocol/server/server_machine.py` `_admit`", ["protocol/server/server_machine.py"]),
        ("`python bench/gpu.py --steps=1`, `a > docs/machines.md`", ["bench/gpu.py", "docs/machines.md"]),
        ("`transports/shm/`, `gone/loop.py`, `world.py`", ["transports/shm/", "gone/loop.py", "world.py"]),
        (
            "`src/lockstep/sim` and\n`lockstep/protocol/core/timing.py`",
            ["src/lockstep/sim", "lockstep/protocol/core/timing.py"],
        ),
        ("`python train.py`: a user's own file", []),
        (
            "`/etc/hosts`, `NAME.damaged`, `lockstep-UID/JOBID`, `~/notes/x.py`, `image/bbox/{x,y}`",
            [],
        ),
        ("`--train_dir=/data/run1/`, `FOLDER/checkpoints/` and protocol/server/server_machine.py outside of code", []),
    ],
)
def test_paths_are_recognised(text: str, paths: list[str]) -> None:
    assert list(paths_in(text)) == paths


@pytest.mark.parametrize(
    "path",
    [
        "protocol/server/server_machine.py",
        "lockstep/protocol/server/server_machine.py",
        "server.py",
        "shm/",
        "docs/gpu.md",
    ],
)
def test_a_file_is_found_by_the_names_that_documents_use(path: str) -> None:
    assert found(path, ROOT / "README.md")


@pytest.mark.parametrize("path", ["protocol/moved.py", "moved/server.py", "moved.py", "transports/moved/", "gpu.md"])
def test_a_file_that_has_moved_is_noticed(path: str) -> None:
    assert not found(path, ROOT / "README.md")


def without_fences(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def paths_in(text: str) -> Iterator[str]:
    """Paths of this project in code. In a command a file without its folder is a user's own."""
    for code in CODE.findall(text):
        for path in PATH.findall(code):
            if path not in NOT_OURS and ("/" in path or path == code):
                yield path


def found(path: str, document: Path) -> bool:
    """Whether a file is where this path may lead; a module or package without its folder may be anywhere in ours."""
    if any((place / path).exists() for place in (ROOT, PACKAGE, PACKAGE.parent, document.parent)):
        return True
    return "/" not in path.rstrip("/") and not path.endswith(".md") and any(PACKAGE.rglob(path.rstrip("/")))
