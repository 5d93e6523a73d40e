"""Whether a command that a document shows is one: its program, its flags, the files that it names."""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from docs.fences import ROOT
from lockstep.cli.flags import BadInput, parse_bench
from lockstep.cli.main import COMMANDS, main
from lockstep.version import __version__

USERS_OWN = {"train.py", "main.py", "multigpu_torchrun.py", "pytorch_mnist.py", "-c"}
"""Programs of the reader, or of others."""
LAUNCHERS = {"srun", "mpirun", "sudo", "env", "nice", "exec"}
HARMLESS = {"ssh", "kill", "run", "curl", "docker", "kubectl", "sbatch", "salloc", "scancel", "scontrol", "systemctl"}
"""Programs of the system, of which a reader knows more than a test; and ``.ci/run``."""

_FLAG = re.compile(r"--(?:\[no\])?([a-z][\w-]*)")
_BEFORE_ANYTHING = {"key_file", "insecure"}
"""Flags that every command takes."""


def problems(words: Sequence[str]) -> Iterator[str]:
    """What is wrong with one command, one sentence each."""
    program, *rest = words
    program = Path(program).name
    if program in HARMLESS:
        return
    if program in LAUNCHERS:
        yield from _behind_a_launcher(rest)
        return
    check = _CHECKS.get(program)
    if check is None:
        yield f"{program!r} is not a command that the documents use; say in tests/docs/commands.py what checks it"
    else:
        yield from check(rest)


def _behind_a_launcher(words: Sequence[str]) -> Iterator[str]:
    known = [place for place, word in enumerate(words) if word in _CHECKS]
    if known:
        yield from problems(words[known[0] :])
    elif not any(word in USERS_OWN for word in words):
        yield f"nothing is started by: {' '.join(words)}"


def _lockstep(words: Sequence[str]) -> Iterator[str]:
    if not words or words[0] in ("--version", "--help"):
        return
    name, *given = words
    if name not in {command.name for command in COMMANDS}:
        yield f"there is no command 'lockstep {name}'"
        return
    own = list(given)
    if "--" in own:
        place = own.index("--")
        own, program = own[:place], own[place + 1 :]
        if name in ("run", "manifest", "watch") and not any(_is_placeholder(word) for word in program):
            yield from problems(program)
    known = flags_of(name) | (flags_of(name, own[0]) if name == "manifest" and own else frozenset())
    for word in own:
        flag = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and flag not in known and flag.removeprefix("no") not in known:
            yield f"'lockstep {name}' has no flag --{flag}"
    if name == "bench" and not any(_is_placeholder(word) for word in own):
        try:
            parse_bench(own, {})
        except BadInput as bad:
            yield from (sentence for sentence in bad.sentences if "does not exist" not in sentence)  # a reader's data


def _is_placeholder(word: str) -> bool:
    """``...``, or a word in capitals, in place of a value."""
    value = word.partition("=")[2] if word.startswith("--") else word
    return word == "..." or value == "..." or bool(re.fullmatch(r"[A-Z][A-Z_.:/0-9]*", value))


@cache
def flags_of(command: str, engine: str = "") -> frozenset[str]:
    """Every flag in the help of a command, or of one of its engines."""
    shown = io.StringIO()
    asked = {"bench": ["--helpfull"], "compare": ["--help"]}.get(command, [engine, "--help"] if engine else ["--help"])
    with redirect_stdout(shown), redirect_stderr(shown):
        main([command, *asked])
        if command == "compare":
            main([command, "--program", "--help"])
    found = set(_FLAG.findall(shown.getvalue())) | _BEFORE_ANYTHING | {"help"}
    takes_flags_of_bench = {"doctor", "compare"}
    return frozenset(found | (flags_of("bench") if command in takes_flags_of_bench else set()))


def _python(words: Sequence[str]) -> Iterator[str]:
    if words[0] == "-m":
        module = words[1]
        if module in ("build", "venv", "pip", "torch.distributed.run"):
            return
        places = [ROOT, ROOT / "tests", ROOT / "src"]
        path = Path(*module.split("."))
        found = [at / path for at in places if (at / path).with_suffix(".py").exists() or (at / path).is_dir()]
        if not found and module not in ("pytest", "fuzz"):
            yield f"there is no module {module}"
        return
    if words[0] in USERS_OWN:
        return
    file = ROOT / words[0]
    if not file.exists():
        yield f"there is no file {words[0]}"
        return
    source = file.read_text()
    for flag in [word.partition("=")[0] for word in words[1:] if word.startswith("--")]:
        if f'"{flag}"' not in source and f"--{flag[2:]}" not in _helpers(file):
            yield f"{words[0]} has no flag {flag}"


def _helpers(file: Path) -> str:
    """The text of a script and of its neighbours, which may share flags."""
    return "\n".join(path.read_text() for path in sorted(file.parent.glob("**/*.py")))


def _torchrun(words: Sequence[str]) -> Iterator[str]:
    from torch.distributed.run import get_args_parser

    wrong = io.StringIO()
    try:
        with redirect_stderr(wrong):
            asked = get_args_parser().parse_args(words)
    except SystemExit:
        yield wrong.getvalue()
        return
    started = [asked.training_script, *asked.training_script_args]
    yield from problems(started if asked.no_python else ["python", *started])


def _make(words: Sequence[str]) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    yield from (f"there is no target {word}" for word in words if "=" not in word and word not in targets)


def _ray(words: Sequence[str]) -> Iterator[str]:
    if list(words[:2]) != ["job", "submit"] or "--" not in words:
        yield f"'ray {' '.join(words)}' is not 'ray job submit ... -- PROGRAM'"
    else:
        yield from problems(words[list(words).index("--") + 1 :])


def _pip(words: Sequence[str]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        extras = re.fullmatch(r"(?P<what>.*?)\[(?P<names>.*)\]", word)
        for extra in extras["names"].split(",") if extras else ():
            if extra not in project["optional-dependencies"]:
                yield f"there is no extra {extra}"
        if ".whl" in word and f"lockstep_torch-{__version__}-py3-none-any.whl" not in word:
            yield f"{word} is not the name of this version's wheel"


_CHECKS: dict[str, Callable[[Sequence[str]], Iterator[str]]] = {
    "lockstep": _lockstep,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "ray": _ray,
    "torchrun": _torchrun,
}
