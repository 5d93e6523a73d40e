"""``lockstep ps`` and the public names: what they say, and that nothing heavy is imported before it is used."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

import lockstep
from lockstep.cli.library_flags import LIBRARY_TABLE, PROGRAM_FLAGS, join_arguments, read_library_flags
from lockstep.cli.main import main
from lockstep.cli.ps import _parse
from lockstep.errors import BadInput
from lockstep.library.join import JoinArguments
from lockstep.protocol.core.ids import server

TWO_SERVERS = ("--ps_hosts=127.0.0.1:1,127.0.0.1:2", "--worker_hosts=127.0.0.1:3")


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--help"]) == 0
    printed = capsys.readouterr().out
    for flag in ("--ps_hosts", "--worker_hosts", "--task_index", "--reduction", "--replicas_to_aggregate"):
        assert flag in printed
    assert "--on_nan" not in printed  # the program's own business


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "needs the addresses of all tasks"),
        (["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2", "--task_index=3"], "--task_index=3 is out of range"),
        (["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2", "--reduction=median"], "--reduction"),
        (
            ["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2", "--replicas_to_aggregate=2"],
            "replicas_to_aggregate=2 is not possible with 1 workers",
        ),
        (["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2", "--job_name=worker"], "is always a server"),
        ([*TWO_SERVERS, "--server_replicas=1", "--nocross_replica_sync"], "(the flag --cross_replica_sync=False)"),
        ([*TWO_SERVERS, "--restarts=1"], "add --server_replicas=1 to all tasks"),
        (["--model=trivial"], "model"),
    ],
)
def test_bad_input_gets_a_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_public_names_are_there_and_torch_is_not_imported_for_them() -> None:
    for name in lockstep.__all__:
        assert getattr(lockstep, name) is not None
    code = "import sys, lockstep; lockstep.join, lockstep.JobEndedError; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert printed.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"on_nan": "ignore"}, "on_nan='ignore' is not known; use one of: report, skip, stop"),
        ({"job_name": "worker"}, "belong together"),
        ({"bucket_mb": 0.00001}, "bucket_mb=1e-05 is not a whole number of 64-byte lines"),
        ({"bucket_mb": 1.8e302}, "bucket_mb=1.8e+302 is not a whole number of 64-byte lines"),
        (
            {"job_name": "worker", "ps_hosts": ["127.0.0.1:1"], "worker_hosts": ["127.0.0.1:2"], "reduction": "max"},
            "reduction='max' is not known",
        ),
    ],
)
def test_join_refuses_bad_arguments_with_a_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(lockstep.BadInput) as caught:
        lockstep.join(**arguments)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


def test_join_shows_every_option_with_its_type_and_default() -> None:
    signature = inspect.signature(lockstep.join)
    assert signature.return_annotation == "Job"
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in signature.parameters.values())
    fields = {field.name: (field.type, field.default) for field in dataclasses.fields(JoinArguments)}
    assert {name: (one.annotation, one.default) for name, one in signature.parameters.items()} == fields
    with pytest.raises(TypeError, match=r"join\(\) got an unexpected keyword argument 'workers'"):
        lockstep.join(workers=2)  # type: ignore[call-arg]


def test_a_flag_and_the_argument_of_join_have_the_same_default() -> None:
    arguments = JoinArguments()
    for flag in (*LIBRARY_TABLE, *PROGRAM_FLAGS):
        if flag.name.startswith("rdma_") or flag.name in ("on_worker_loss", "job_token"):
            continue  # one argument for all of them; depends on whether a lost worker can come back; refused
        name = "synchronous" if flag.name == "cross_replica_sync" else flag.name
        assert getattr(arguments, name) == flag.default, flag.name


def test_the_flags_of_ps_become_the_arguments_of_join() -> None:
    words = "--ps_hosts=a:1 --worker_hosts=b:2,c:3 --nocross_replica_sync --save_model_secs=5 --rdma_device=mlx5_0"
    made = JoinArguments(**join_arguments(read_library_flags(words.split())))  # type: ignore[arg-type]
    assert (made.worker_hosts, made.synchronous, made.rdma.device) == (("b:2", "c:3"), False, "mlx5_0")
    assert (made.keeping.save_model_secs, made.keeping.on_worker_loss) == (5.0, "")


def told(kind: str, index: int) -> str:
    cluster = {"ps": ["a:1", "b:1"], "chief": ["c:1"], "worker": ["d:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_server_finds_its_task_in_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", told("ps", 1))
    cluster, arguments = _parse(["--wire_dtype=bfloat16"])
    assert (cluster.task, cluster.ps_hosts, cluster.worker_hosts) == (server(1), ("a:1", "b:1"), ("c:1", "d:1"))
    assert arguments.wire_dtype == "bfloat16"
    by_flags, _ = _parse(["--ps_hosts=x:1", "--worker_hosts=y:1", "--task_index=0"])
    assert (by_flags.task, by_flags.ps_hosts) == (server(0), ("x:1",))


@pytest.mark.parametrize(
    ("kind", "why"), [("chief", "makes this process worker 0"), ("evaluator", "belongs to no job")]
)
def test_what_tf_config_makes_no_server_is_refused(kind: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", told(kind, 0))
    with pytest.raises(BadInput, match=why):
        _parse([])
