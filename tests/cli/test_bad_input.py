"""Bad input gets one plain sentence with a remedy. One test a case, with the sentence as a person reads it."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from helpers.ports import free_port, free_ports
from helpers.programs import LOCKSTEP
from lockstep.cli.flags import BadInput, check_machine, parse_bench

HOSTS = "--ps_hosts=127.0.0.1:4001 --worker_hosts=127.0.0.1:4002,127.0.0.1:4003"

SENTENCES: dict[str, str] = {
    "--modle=lenet": "there is no flag --modle; did you mean --model?",
    "--batch-size=4": "there is no flag --batch-size; did you mean --batch_size?",
    "--num_batch 4": "there is no flag --num_batch; did you mean --num_batches?",
    "--epochs=4": "there is no flag --epochs; did you mean --num_epochs?",
    "--zzz": "there is no flag --zzz; 'lockstep bench --help' lists the flags.",
    "lenet": (
        "'lenet' does not belong to a flag; write flags as --name=value, and lists with commas but without spaces."
    ),
    "-model=lenet": "'-model=lenet' has one dash; flags take two: write --model=lenet.",
    "--deterministic False": ("'False' after --deterministic would be ignored; write --deterministic=False."),
    "--job_name=worker": (
        "--job_name=worker needs the addresses of all tasks; add --ps_hosts=HOST:PORT,... and "
        "--worker_hosts=HOST:PORT,..., the same on every task."
    ),
    "--job_name=ps --worker_hosts=a:1": (
        "--job_name=ps needs the addresses of all tasks; add --ps_hosts=HOST:PORT,..., the same on every task."
    ),
    "--job_name=controller": (
        "--job_name=controller is refused: Lockstep has no separate controller task; use ps or worker."
    ),
    HOSTS: (
        "--ps_hosts and --worker_hosts need --job_name, which sets the role of this process; add --job_name=ps or "
        "--job_name=worker, or run a whole cluster here with --ps=1 --workers=2 instead."
    ),
    f"--job_name=worker --task_index=2 {HOSTS}": (
        "--task_index=2 is out of range: --worker_hosts has 2 addresses, so use --task_index=0 to 1."
    ),
    f"--job_name=ps --task_index=-1 {HOSTS}": (
        "--task_index=-1 is out of range: --ps_hosts has 1 address, so only --task_index=0 exists."
    ),
    "--job_name=ps --ps_hosts=a:1 --worker_hosts=b:1,A:1": (
        "A:1 is given for both ps 0 and worker 1; give each task its own port."
    ),
    "--job_name=ps --ps_hosts=a --worker_hosts=b:1": (
        "--ps_hosts, entry 0: 'a' has no port; write HOST:PORT, for example a:2222."
    ),
    "--job_name=ps --ps_hosts=a:1, --worker_hosts=b:1": (
        "--ps_hosts, entry 1: '' has no port; write HOST:PORT, for example 10.0.0.1:2222."
    ),
    "--model=resnet5O": (
        "Invalid model name 'resnet5O' for dataset 'imagenet'; did you mean resnet50 or resnet152 or resnet50_v2?"
    ),
    "--server_protocol=grcp": (
        "--server_protocol=grcp is not known; did you mean grpc? Known: auto, grpc, grpc+tcp, grpc+shm, grpc+ucx, "
        "grpc+verbs."
    ),
    "--ps=1 --workers=1 --server_protocol=grpc --rdma_device=mlx5_0": (
        "--rdma_... has no effect with --server_protocol=grpc; leave it out, or use --server_protocol=grpc+verbs."
    ),
    "--ps=1 --workers=1 --ports=4700": (
        "--ports: '4700' is not a range of ports; write FIRST-LAST, for example 4700-4799."
    ),
    "--ps=1 --workers=1 --require_private --server_protocol=grpc+ucx": (
        "--require_private refuses --server_protocol=grpc+ucx, which cannot encrypt; use auto or grpc."
    ),
    f"--job_name=worker --require_private --server_protocol=grpc+verbs {HOSTS}": (
        "--require_private refuses --server_protocol=grpc+verbs, which cannot encrypt; use auto or grpc."
    ),
    "--optimizer=adamx": (
        "--optimizer=adamx is not known; did you mean adam? Known: sgd, momentum, rmsprop, adam, adamw."
    ),
    "--optimizer=lbfgs": "--optimizer=lbfgs is not known; use one of: sgd, momentum, rmsprop, adam, adamw.",
    "--variable_update=replicated --ps=1 --workers=1": (
        "--variable_update=replicated runs in a single process; "
        "leave out --job_name, --ps and --workers, or use another mode."
    ),
    "--batch_size=-1": ("--batch_size=-1 is negative; give the images per device, or 0 for the model's default."),
    "--num_gpus=8 --device=gpu": (
        "--num_gpus=8 --device=gpu asks for more GPUs than the 0 that this machine shows "
        "(see CUDA_VISIBLE_DEVICES); give --device=cpu."
    ),
    "--num_batches=10 --num_epochs=1": "--num_batches and --num_epochs exclude each other; leave one out.",
    "--save_model_secs=1 --save_model_steps=1 --train_dir=x --ps=1 --workers=2": (
        "--save_model_secs and --save_model_steps exclude each other; leave one out."
    ),
    "--from_scratch --ps=1 --workers=2": (
        "--from_scratch sets aside what --train_dir holds; give --train_dir too, or leave out --from_scratch."
    ),
    "--from_scratch --train_dir=x": (
        "only runs with servers resume, so this one begins from scratch anyway; leave out --from_scratch."
    ),
    "--server_replicas=1": (
        "--server_replicas needs two servers, and a run in one process has none; add --ps=2 --workers=1."
    ),
    "--ps=1": "a cluster needs at least one server and one worker; give both, for example --ps=1 --workers=2.",
    "--ps=1 --workers=2 --job_name=ps": (
        "--job_name starts one task of a cluster, but --ps and --workers start a whole cluster on this machine; "
        "leave one of the two out."
    ),
    "--task_index=1 --ps=1 --workers=2": (
        "--task_index needs --job_name, which sets the role of this process; add --job_name=ps or "
        "--job_name=worker, or run a whole cluster here with --ps=1 --workers=2 instead."
    ),
}


@pytest.mark.parametrize(("argv", "sentence"), SENTENCES.items(), ids=SENTENCES)
def test_bad_input_gets_one_sentence(argv: str, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bench(argv.split(), {"CUDA_VISIBLE_DEVICES": ""})
    assert caught.value.sentences == (sentence,)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        parse_bench(["--batch_size=-1", "--num_batches=0", "--data_dir=/data", "--model=nothing_like_it"], {})
    assert len(caught.value.sentences) == 4


def test_a_peer_that_does_not_resolve_is_no_bad_input() -> None:
    hosts = f"--ps_hosts=127.0.0.1:{free_port()} --worker_hosts=no-such-host.invalid:4002"
    check_machine(parse_bench(["--job_name=ps", *hosts.split()], {}))


def test_an_address_of_another_machine_is_refused_before_anything_starts() -> None:
    argv = ["--job_name=ps", "--ps_hosts=192.0.2.1:4001", "--worker_hosts=192.0.2.2:4002"]
    with pytest.raises(BadInput, match=r"ps 0 has the address 192\.0\.2\.1:4001, which is not this machine's"):
        check_machine(parse_bench(argv, {}))


def test_a_folder_that_cannot_be_written_is_refused_on_the_task_that_writes() -> None:
    first, second = free_ports(2)
    hosts = f"--ps_hosts=127.0.0.1:{first} --worker_hosts=127.0.0.1:{second} --train_dir=/dev/null/x"
    with pytest.raises(BadInput, match="--train_dir=/dev/null/x cannot be used: /dev/null is not a folder"):
        check_machine(parse_bench(["--train_dir=/dev/null/x"], {}))
    with pytest.raises(BadInput, match="not a folder"):
        check_machine(parse_bench(f"--job_name=worker {hosts}".split(), {}))
    check_machine(parse_bench(f"--job_name=ps {hosts}".split(), {}))


def _run_bench(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [*LOCKSTEP, "bench", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_itself_ends_with_exit_code_2_and_nothing_but_the_sentence() -> None:
    ended = _run_bench("--modle=lenet")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "lockstep: there is no flag --modle; did you mean --model?\n"


def test_the_program_names_the_process_that_holds_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ended = _run_bench("--job_name=ps", f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"lockstep: port {port} is already taken on this machine by process {os.getpid()} (")
    assert ended.stderr.count("\n") == 1


def test_the_program_starts_no_cluster_that_could_not_write_its_result() -> None:
    ended = _run_bench("--ps=1", "--workers=2", "--train_dir=/dev/null/x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("lockstep: --train_dir=/dev/null/x cannot be used")
