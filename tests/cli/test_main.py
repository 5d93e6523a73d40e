"""The ``lockstep`` command itself."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from lockstep.cli import main as cli
from lockstep.errors import BadInput, HelpAsked
from lockstep.version import __version__

KNOWN = ", ".join(command.name for command in cli.COMMANDS)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Puts a command ``probe`` in place of the real ones."""

    def install(run: Callable[[list[str]], int]) -> None:
        module = ModuleType("probe_command")
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("probe", "probe_command", "probes"),))

    return install


def test_help_shows_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(f"  {command.name} " in text and command.summary in text for command in cli.COMMANDS)


def test_version_says_with_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Lockstep {__version__} with torch {importlib.metadata.version('torch')}, gRPC ")
    assert f"gRPC {importlib.metadata.version('grpcio')}, " in text
    assert "NIXL" in text
    assert text.endswith(f", Python {platform.python_version()}\n")


def test_what_is_not_installed_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cli.main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text == f"Lockstep {__version__} with no torch, no gRPC, no NIXL, Python {platform.python_version()}\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "lockstep: a command is missing; write, for example, 'lockstep bench', or 'lockstep --help'.\n"),
        (["bnech"], "lockstep: there is no command 'bnech'; did you mean bench?\n"),
        (["xyz"], f"lockstep: there is no command 'xyz'; 'lockstep --help' lists the commands: {KNOWN}.\n"),
        (
            ["--model=x"],
            "lockstep: '--model=x' stands where the command belongs; write 'lockstep bench --model=x ...'.\n",
        ),
    ],
)
def test_what_is_no_command_is_bad_input(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", sentence)


def test_a_command_gets_its_words_and_gives_the_exit_code(
    command: Callable[[Callable[[list[str]], int]], None],
) -> None:
    seen: list[str] = []

    def run(argv: list[str]) -> int:
        seen.extend(argv)
        return 3

    command(run)
    assert cli.main(["probe", "--a", "b"]) == 3
    assert seen == ["--a", "b"]


def test_bad_input_of_a_command_is_one_line_a_sentence_and_exit_code_2(
    command: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_argv: list[str]) -> int:
        raise BadInput(["first.", "second."])

    command(run)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr() == ("", "lockstep: first.\nlockstep: second.\n")


def test_help_of_a_command_goes_to_standard_output(
    command: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_argv: list[str]) -> int:
        raise HelpAsked("teach\n")

    command(run)
    assert cli.main(["probe"]) == 0
    assert capsys.readouterr() == ("teach\n", "")


def test_ctrl_c_gives_exit_code_130(
    command: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("run", "exit_code"),
    [
        ("main(['--help'])", cli.EXIT_NO_READER),
        ("main(['sim', '--help'])", cli.EXIT_NO_READER),
        ("main(['nothing'])", cli.EXIT_NO_READER),
        ("probed(lambda _: print('one line') or 0)", cli.EXIT_NO_READER),
        ("probed(lambda _: print('one line', flush=True) or 0)", cli.EXIT_NO_READER),
        ("probed(lambda _: say('one line') or 7)", 7),  # a line beside the result: the command goes on to its own end
    ],
)
def test_a_reader_that_goes_away_gets_no_traceback(run: str, exit_code: int) -> None:
    script = f"""
import os, sys, types
from lockstep.cli import main as cli
from lockstep.cli.main import main
from lockstep.terminal import say

def probed(run):
    sys.modules["probe_command"] = types.SimpleNamespace(run=run)
    cli.COMMANDS = (cli.Command("probe", "probe_command", "probes"),)
    return main(["probe"])

errors = os.dup(2)  # where Python itself would complain
if {"say(" in run or "nothing" in run}:
    os.dup2(1, 2)
code = {run}
os.dup2(errors, 2)
sys.exit(code)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(30) == exit_code


def test_a_connection_that_breaks_is_no_reader_that_went_away(
    command: Callable[[Callable[[list[str]], int]], None],
) -> None:
    def run(_: list[str]) -> int:
        raise BrokenPipeError("a peer has hung up")

    command(run)
    with pytest.raises(BrokenPipeError, match="a peer has hung up"):
        cli.main(["probe"])


def test_reading_flags_imports_nothing_heavy() -> None:
    """The process that a person starts must listen within a moment; torch alone takes seconds."""
    script = (
        "import sys; from lockstep.cli.main import main; from lockstep.cli.flags import parse_bench;"
        "parse_bench(['--model=resnet50', '--job_name=ps', '--ps_hosts=a:1', '--worker_hosts=b:1'], {});"
        "print(*sorted({'torch', 'numpy', 'grpc', 'google', 'psutil', 'rich', 'safetensors'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("\n", "", 0)
