"""``--key_file``, ``--insecure`` and the refused ``--job_token``: the same for every command, and never in an argv."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.keys import make_key
from lockstep.cli import main as cli
from lockstep.cli.key_flags import take_key_flags
from lockstep.cli.library_flags import cluster_flags
from lockstep.errors import EXIT_BAD_INPUT, BadInput
from lockstep.library.join import JoinArguments, join_with
from lockstep.security.chosen import INSECURE_VARIABLE, TOKEN_VARIABLE, chosen_key, settle
from lockstep.security.key import KEY_VARIABLE


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_VARIABLE, INSECURE_VARIABLE, TOKEN_VARIABLE):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("written", [["--key_file=FILE"], ["--key_file", "FILE"]])
@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_takes_the_key_flags_wherever_they_stand(
    command: str, written: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_key(tmp_path / "key")
    words = [word.replace("FILE", str(path)) for word in written]
    assert cli.main([command, *words, "--help"]) == 0
    assert cli.main([command, "--help", *words]) == 0
    assert capsys.readouterr().err == ""
    assert os.environ[KEY_VARIABLE] == str(path), "children read it there, and not in their command line"
    assert take_key_flags(["--model=trivial", *words, "x"]) == ["--model=trivial", "x"]


@pytest.mark.parametrize("command", ["why", "net", "drill", "ps", "bench"])
def test_the_help_of_commands_that_connect_has_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help=cluster" if command == "bench" else "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--key_file" in shown
    assert "insecure" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--ps=1", "--workers=1"],
        ["bench", "--job_name=ps", "--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2"],
        ["ps", "--ps_hosts=127.0.0.1:59991", "--worker_hosts=127.0.0.1:59992"],
        ["why", "127.0.0.1:59993"],
        ["net", "127.0.0.1:59994"],
        ["doctor", "--ps_hosts=127.0.0.1:59995", "--worker_hosts=127.0.0.1:59996"],
        ["drill", "host-paused"],
    ],
    ids=lambda words: f"{words[0]}-{len(words)}",
)
def test_a_key_that_cannot_be_used_is_refused_before_anything_starts(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, f"--key_file={tmp_path / 'none'}"]) == EXIT_BAD_INPUT
    assert "none does not exist; make one with" in capsys.readouterr().err


def test_a_job_token_is_refused_with_the_key_file_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "ps", "why"):
        assert cli.main([command, "--job_token=hidden"]) == EXIT_BAD_INPUT
        shown = capsys.readouterr().err
        assert "--key_file" in shown
        assert "hidden" not in shown


def test_the_variable_of_a_job_token_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "hidden")
    with pytest.raises(BadInput, match=r"LOCKSTEP_JOB_TOKEN is refused: .*--key_file") as refused:
        settle(lambda _: None)
    assert "hidden" not in str(refused.value)


def test_insecure_is_said_once_and_passed_on() -> None:
    assert take_key_flags(["--insecure", "--model=trivial"]) == ["--model=trivial"]
    said: list[str] = []
    settle(said.append)
    settle(said.append)
    assert len(said) == 1
    assert said[0].startswith("--insecure: no key and no encryption; whoever reaches a port")
    assert chosen_key() is None
    assert os.environ[INSECURE_VARIABLE] not in ("", "0"), "children are insecure too"


def test_the_library_takes_them_as_arguments_and_from_the_command_line_of_a_script(tmp_path: Path) -> None:
    path = make_key(tmp_path / "key")
    arguments, rest = cluster_flags([f"--key_file={path}", "--insecure", "--mine=1"])
    assert (arguments, rest) == ({"key_file": str(path), "insecure": True}, ["--mine=1"])
    with pytest.raises(BadInput, match="does not exist"):
        join_with(JoinArguments(key_file=str(tmp_path / "none")), {})


def test_a_key_is_in_no_environment_only_its_name(tmp_path: Path) -> None:
    path = make_key(tmp_path / "key")
    take_key_flags([f"--key_file={path}"])
    settle(lambda _: None)
    assert path.read_text().strip() not in " ".join(os.environ.values())
