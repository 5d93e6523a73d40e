"""``lockstep manifest kubernetes``: what it writes, as values, and what it refuses. Schemas: tests/engines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.cli.manifest import kubernetes
from lockstep.cli.manifest.yaml_text import yaml_text

BENCH = ("lockstep", "bench", "--model=lenet")


def written(*words: str, program: tuple[str, ...] = BENCH) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    kubernetes.add_flags(parser)
    args = parser.parse_args(["--image=i", "--workers=2", *words])
    args.program = program
    return kubernetes.documents(args)


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    job = objects[-1]
    if job["kind"] == "TFJob":
        return {role.lower(): one["template"]["spec"] for role, one in job["spec"]["tfReplicaSpecs"].items()}
    found = {one["name"]: one["template"]["spec"]["template"]["spec"] for one in job["spec"]["replicatedJobs"]}
    return dict(found)


@pytest.mark.parametrize("kind", ["jobset", "tfjob"])
def test_a_job_with_its_secret_and_its_policy(kind: str) -> None:
    objects = written(f"--kind={kind}")
    assert [one["kind"] for one in objects] == ["Secret", "NetworkPolicy", {"jobset": "JobSet", "tfjob": "TFJob"}[kind]]
    assert len(bytes.fromhex(objects[0]["stringData"]["key"])) == 32
    for pod in pods(objects).values():
        (container,) = pod["containers"]
        assert {"name": "LOCKSTEP_KEY_FILE", "value": "/run/lockstep/key"} in container["env"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"] == ["lockstep", "why", "--alive"]


def test_the_key_may_be_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    key.chmod(0o600)
    monkeypatch.setenv("LOCKSTEP_KEY_FILE", str(key))
    assert written()[0]["stringData"] == {"key": "ab" * 32}


def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_INSECURE", "1")
    objects = written()
    assert [one["kind"] for one in objects] == ["NetworkPolicy", "JobSet"]
    for pod in pods(objects).values():
        assert {"name": "LOCKSTEP_INSECURE", "value": "1"} in pod["containers"][0]["env"]
        assert "key" not in [volume["name"] for volume in pod["volumes"]]


def test_a_lost_pod_comes_back_and_a_wrong_flag_does_not() -> None:
    (job, _) = (one["template"]["spec"] for one in written("--restarts=5")[-1]["spec"]["replicatedJobs"])
    ignored, final = job["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [1, 2, 3])
    assert job["backoffLimit"] == 5
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    replicas = written("--kind=tfjob")[-1]["spec"]["tfReplicaSpecs"]
    assert {one["restartPolicy"] for one in replicas.values()} == {"ExitCode"}


@pytest.mark.parametrize(
    ("flags", "program", "command"),
    [
        (
            ["--claim=c"],
            BENCH,
            [
                *(*BENCH, "--startup_timeout=900", "--rejoin_timeout=900", "--restarts=3", "--grace=25"),
                *("--train_dir=/mnt/lockstep/lockstep", "--save_model_secs=300"),
            ],
        ),
        (
            ["--claim=c", "--name=j", "--restarts=1"],
            (*BENCH, "--train_dir=/x", "--save_model_steps=9", "--grace=60", "--startup_timeout=5"),
            [
                *(*BENCH, "--train_dir=/x", "--save_model_steps=9", "--grace=60", "--startup_timeout=5"),
                *("--rejoin_timeout=900", "--restarts=1"),
            ],
        ),
        ([], ("python", "train.py"), ["lockstep", "run", "--restarts=3", "--", "python", "train.py"]),
        ([], ("lockstep", "run", "--", "sh"), ["lockstep", "run", "--", "sh"]),
        ([], ("sh", "-c", "$(date)"), ["lockstep", "run", "--restarts=3", "--", "sh", "-c", "$$(date)"]),
    ],
)
def test_every_pod_runs_the_same_command(flags: list[str], program: tuple[str, ...], command: list[str]) -> None:
    found = pods(written(*flags, program=program))
    assert [pod["containers"][0]["command"] for pod in found.values()] == [command, command]


def test_servers_are_not_given_the_workers_share() -> None:
    found = pods(written("--gpus_per_worker=2", "--memory_per_worker=8Gi", "--cpus_per_server=500m"))
    (server,), (worker,) = (found[role]["containers"] for role in ("ps", "worker"))
    assert server["resources"] == {"requests": {"cpu": "500m"}}
    assert worker["resources"] == {
        "requests": {"cpu": "1", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
    }


def test_without_servers() -> None:
    assert list(pods(written("--servers=0"))) == ["worker"]
    assert list(pods(written("--servers=0", "--kind=tfjob"))) == ["worker"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--name=Job"], "--name=Job is no name"),
        ([f"--name={'a' * 41}"], "is no name"),
        (["--namespace=A B"], "--namespace=A B is no name in Kubernetes"),
        (["--workers=0"], "leaves none to train"),
        (["--servers=-1"], "--servers=-1 is negative"),
        (["--port=80"], "--port=80 is not a port from 1024"),
        (["--memory_per_worker=much"], "--memory_per_worker=much is no quantity"),
        (["--mount=data"], "must begin with '/'"),
        (["--kind=pod"], "invalid choice"),
        (["--", "lockstep", "bench", "--modle=lenet"], "did you mean --model"),
        (["--", "lockstep", "bench", "--ps=1", "--workers=2"], "--ps and --workers of the benchmark must be left out"),
    ],
)
def test_what_would_not_run_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = [] if "--" in words else ["--", *BENCH]
    assert main(["manifest", "kubernetes", "--image=i", "--workers=2", *words, *program]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "kubernetes", "--image=i", "--workers=2", "--", *BENCH]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Made by Lockstep ")
    assert out.count("\n---\n") == 3
    assert main(["manifest", "kubernetes", "--help"]) == 0
    assert "--gpus_per_worker" in capsys.readouterr().out
    assert main(["manifest", "kubernetes", "--workers=2", "--", *BENCH]) == 2
    assert "--image" in capsys.readouterr().err


def test_yaml() -> None:
    value = {"a": [{"b": "c", "d": ["e", "-f"]}, [1, "2"]], "true": True, "no": "no", "e": {}, "l": [], "t": 'x: "y"'}
    assert yaml_text([value]) == (
        '---\na:\n  - b: c\n    d:\n      - e\n      - "-f"\n  - - 1\n    - "2"\n'
        '"true": true\n"no": "no"\ne: {}\nl: []\nt: "x: \\"y\\""\n'
    )


def test_the_image_has_the_user_of_the_pods_and_finds_its_files() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "Dockerfile").read_text().splitlines()
    assert f"USER {kubernetes.USER}:{kubernetes.USER}" in lines
    assert f"RUN useradd --uid {kubernetes.USER} --create-home lockstep" in lines
    shown = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        name for line in lines if line.startswith("COPY ") and "--from" not in line for name in line.split()[1:-1]
    ]
    assert sorted(copied) == sorted(shown)
    assert all((root / name).exists() for name in copied)
