"""``lockstep manifest slurm``: a script that bash can read, and one sentence for what would not run."""

from __future__ import annotations

import subprocess

import pytest

from lockstep.cli.manifest import run
from lockstep.errors import BadInput, HelpAsked
from lockstep.security.key import KEY_VARIABLE

BENCH = ("--", "lockstep", "bench", "--model=lenet", "--train_dir=run 1")


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["slurm", *words]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(("bash", "-n"), input=script, text=True, capture_output=True).stderr == ""
    return script


def test_servers_are_a_part_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--servers=1", "--workers=4", "--partition=gpu", "--server_partition=cpu", "--gpus_per_worker=1")
    more = ("--cpus_per_server=8", "--time=1:00:00", "--grace=60", "--sbatch=--account=physics")
    script = written(capsys, *flags, *more, *BENCH)
    head, _, body = script.partition("#SBATCH hetjob\n")
    for part, expected in (
        (head, "--ntasks=1 --cpus-per-task=8\n#SBATCH --partition=cpu\n"),
        (body, "--ntasks=4 --cpus-per-task=1\n#SBATCH --gpus-per-task=1\n#SBATCH --partition=gpu\n"),
    ):
        # Slurm looks at the clock every half minute; the grace, and leaving after it, come on top.
        tail = "#SBATCH --time=1:00:00\n#SBATCH --requeue\n#SBATCH --signal=TERM@100\n#SBATCH --account=physics\n"
        assert f"#SBATCH {expected}{tail}" in part
    bench = "lockstep bench --model=lenet '--train_dir=run 1' --ps=1 --workers=4 --grace=60"
    assert f"run=(lockstep run --restarts=3 -- {bench})" in body
    assert '--het-group=0 --ntasks=1 --cpus-per-task=8 "${run[@]}" : --het-group=1 --ntasks=4' in body
    assert '[ "$code" = 143 ]' in body


def test_without_servers_there_is_one_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "/keys/my key")
    script = written(capsys, "--workers=2", "--", "python", "train.py", "--name=it's")
    assert "het" not in script
    assert "export LOCKSTEP_KEY_FILE='/keys/my key'\n" in script
    assert """-- python train.py '--name=it'"'"'s')""" in script
    assert "# The program calls lockstep.join(grace=25, train_dir=...)." in script


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "name the engine"),
        (("slurn",), "there is no engine 'slurn'; use "),
        (("slurm", *BENCH), "required: --workers; 'lockstep manifest slurm --help'"),
        (("slurm", "--workers=2"), "the program is missing; write it after two dashes"),
        (("slurm", "--workers=two", *BENCH), "invalid int value: 'two'"),
        (("slurm", "--workers=2", "--servers=-1", *BENCH), "--servers=-1 is negative"),
        (("slurm", "--workers=0", *BENCH), "leaves none to train"),
        (("slurm", "--workers=2", "--server_partition=cpu", *BENCH), "has no effect without servers"),
        (("slurm", "--workers=2", "--name=a b", *BENCH), "letters, digits"),
        (("slurm", "--workers=2", "--sbatch=account", *BENCH), "is not an option"),
        (("slurm", "--workers=2", *BENCH[:-1]), "add --train_dir=FOLDER"),
        (("slurm", "--workers=2", *BENCH, "--job_name=ps"), "--job_name is found out when the job runs"),
        (("slurm", "--workers=2", *BENCH, "--modl=lenet"), "no flag --modl"),
        (("slurm", "--workers=2", "--", "python", "a\nb"), "line break"),
    ],
)
def test_what_would_not_run_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        run(list(words))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("words", [("--help",), ("slurm", "--help")])
def test_help_shows_an_example(words: tuple[str, ...]) -> None:
    with pytest.raises(HelpAsked) as asked:
        run(list(words))
    text = " ".join(asked.value.text.split())
    assert "lockstep manifest slurm --servers=1 --workers=2 -- lockstep bench" in text
