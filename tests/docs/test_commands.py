"""Every command in the documents exists as it is shown.

Bash runs each block with stand-ins for all programs, which write down how they were called, so that variables, arrays
and comments mean what they mean to a reader; then each call is checked. What is cheap enough is run for real by
``make docs-test``.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.commands import HARMLESS, problems
from docs.fences import Fence, fences, inline, of_language

CALLED = {"lockstep", "python", "torchrun", "srun", "mpirun", "make", "pip", "ray", "sudo", *HARMLESS}
STAND_IN = """#!{bash}
printf '%s\\0' "${{0##*/}}" "$@" > "$CALLS/$$"
"""
"""Each has a file of its own: the two ends of a pipe run at the same time."""
BEFORE = 'kill() { "$STAND_INS/kill" "$@"; }\n'
"""``kill`` belongs to bash itself."""


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-ins")
    (folder / "before.sh").write_text(BEFORE)
    for name in CALLED:
        (folder / name).write_text(STAND_IN.format(bash=shutil.which("bash")))
        (folder / name).chmod(0o755)
    return folder


def calls_of(script: str, stand_ins: Path, folder: Path) -> list[list[str]]:
    """How the programs of a block are called, by name; fails if bash cannot run it, or it calls something else."""
    bash = shutil.which("bash")
    assert bash is not None
    home = folder / "home"
    (home / ".config" / "lockstep").mkdir(parents=True)
    (home / ".config" / "lockstep" / "key").write_text("a key")
    calls = folder / "calls"
    calls.mkdir()
    (folder / ".ci").mkdir()
    shutil.copy(stand_ins / "make", folder / ".ci" / "run")
    environment = {"PATH": str(stand_ins), "STAND_INS": str(stand_ins), "CALLS": str(calls), "HOME": str(home)}
    environment["BASH_ENV"] = str(stand_ins / "before.sh")
    command = [bash, "-c", script, "script.sh", "1"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=20, check=False)
    assert done.stderr == ""
    return sorted(file.read_text().split("\0")[:-1] for file in calls.iterdir())


@pytest.mark.parametrize("fence", of_language("sh"), ids=str)
def test_every_command_of_a_block_is_one(fence: Fence, stand_ins: Path, tmp_path: Path) -> None:
    text = "\n".join(line.removeprefix("$ ") for line in fence.text.splitlines())
    calls = calls_of(text, stand_ins, tmp_path)
    assert calls
    assert [problem for call in calls for problem in problems(call)] == []


COMMANDS = [(page, code) for page, code in inline() if code.startswith(("lockstep ", "make ", "torchrun ", "python "))]


def test_there_are_commands_in_sentences() -> None:
    assert len(COMMANDS) > 100


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_in_a_sentence_is_one(page: str) -> None:
    found: list[str] = []
    for code in [code for at, code in COMMANDS if at == page]:
        words = shlex.split(code, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        found += [f"`{code}`: {problem}" for problem in problems(words)]
    assert found == []


@pytest.mark.parametrize(
    "command",
    [
        "lockstep bnech",
        "lockstep bench --modle=lenet",
        "lockstep bench --model=lenett",
        "lockstep why --wtach",
        "lockstep run -- lockstep bench --modle=x",
        "torchrun --nproc=x train.py",
        "torchrun --nproc-per-node=2 examples/gone.py",
        "srun lockstep rnu -- python train.py",
        "python bench/gone.py",
        "python bench/chaos.py --sedes 20",
        "python -m tools.gone",
        "make tset",
        "pip install '.[dtaa]'",
        "ray job submit --working-dir=. -- python examples/gone.py",
        "ls",
    ],
)
def test_what_is_no_command_is_noticed(command: str) -> None:
    assert list(problems(shlex.split(command)))


def test_a_block_is_run_as_bash_would(stand_ins: Path, tmp_path: Path) -> None:
    script = 'JOB="--a --b"\nlockstep bench $JOB \\\n  --c=d   # a comment\nkill -STOP PID\n'
    calls = calls_of(script, stand_ins, tmp_path)
    assert calls == [["kill", "-STOP", "PID"], ["lockstep", "bench", "--a", "--b", "--c=d"]]


def test_every_block_says_what_it_is() -> None:
    known = {"json", "mermaid", "promql", "python", "sh", "text", "yaml"}
    assert [f"{fence}: {fence.language!r}" for fence in fences() if fence.language not in known] == []
