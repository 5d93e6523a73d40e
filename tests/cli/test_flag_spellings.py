"""All the ways in which people write flags."""

from __future__ import annotations

import pytest

from lockstep.benchmark.settings.config import BenchConfig, resolved
from lockstep.cli.flags import BadInput, parse_bench, task_arguments
from lockstep.protocol.core.ids import server, worker


def _words(text: str) -> list[str]:
    return text.split()


def _refusal(*argv: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_bench(argv, {})
    (sentence,) = caught.value.sentences
    return sentence


def test_no_flags_mean_the_defaults() -> None:
    assert parse_bench([], {}) == resolved(BenchConfig())


@pytest.mark.parametrize(
    "argv",
    [
        ["--model=lenet"],
        ["--model", "lenet"],
        ["--model='lenet'"],
        ['--model="lenet"'],
        ["--model", " lenet "],
        ["--model=lenet", "--model", "lenet"],
    ],
)
def test_a_value_is_read_in_every_spelling(argv: list[str]) -> None:
    assert parse_bench(argv, {}).model == "lenet"


@pytest.mark.parametrize("word", ["False", "false", "FALSE", "0", "no", "f", "n", "off", "'False'"])
def test_a_switch_is_turned_off_with_any_word_for_it(word: str) -> None:
    assert not parse_bench([f"--cross_replica_sync={word}"], {}).exchange.cross_replica_sync


@pytest.mark.parametrize("word", ["True", "true", "1", "yes", "t", "y", "on"])
def test_a_switch_is_turned_on_with_any_word_for_it(word: str) -> None:
    assert parse_bench([f"--deterministic={word}"], {}).devices.deterministic


def test_a_switch_needs_no_value() -> None:
    assert parse_bench(["--deterministic"], {}).devices.deterministic
    assert not parse_bench(["--nodeterministic"], {}).devices.deterministic
    assert not parse_bench(["--nocross_replica_sync"], {}).exchange.cross_replica_sync


def test_a_word_after_a_switch_is_refused_with_the_right_spelling() -> None:
    sentence = _refusal("--cross_replica_sync", "False")
    assert sentence == ("'False' after --cross_replica_sync would be ignored; write --cross_replica_sync=False.")


def test_a_negated_switch_takes_no_value() -> None:
    assert "has both 'no' and a value" in _refusal("--nodeterministic=True")


def test_a_negative_number_can_stand_apart_from_its_flag() -> None:
    assert _refusal("--batch_size", "-4").startswith("--batch_size=-4 is negative")


def test_a_flag_is_not_taken_for_the_value_of_the_one_before() -> None:
    assert _refusal("--model", "--deterministic") == "--model needs a value; write --model=TEXT."


def test_the_last_flag_without_its_value_is_refused() -> None:
    assert _refusal("--num_batches") == "--num_batches needs a value; write --num_batches=N."


def test_a_repeated_flag_with_another_value_is_refused() -> None:
    sentence = _refusal("--num_batches=5", "--num_batches", "6")
    assert sentence == "--num_batches=5 and --num_batches=6 contradict each other; leave one of them out."


def test_two_names_of_one_setting_are_one_setting() -> None:
    assert parse_bench(["--tf_random_seed=7"], {}).seed == 7
    assert parse_bench(["--num_intra_threads=3"], {}).devices.num_threads == 3
    assert parse_bench(["--seed=7", "--tf_random_seed=7"], {}).seed == 7
    assert "--seed=7 and --tf_random_seed=8 contradict" in _refusal("--seed=7", "--tf_random_seed=8")


def test_a_contradiction_between_secrets_does_not_print_them() -> None:
    assert "hidden" not in _refusal("--job_token=hidden1", "--job_token=hidden2")


@pytest.mark.parametrize("value", ["", "x", "1.5", "1_000", "１２", "1" * 30, "None", "0x10"])
def test_what_is_no_whole_number_is_refused(value: str) -> None:
    assert _refusal(f"--num_batches={value}").startswith(f"--num_batches={value} is not a whole number;")


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "1e400", "1_0.0", "1,5", "1e9999999999"])
def test_what_is_no_number_is_refused(value: str) -> None:
    assert _refusal(f"--weight_decay={value}").startswith(f"--weight_decay={value} is not a number;")


@pytest.mark.parametrize("value", ["1e-3", ".001", "+0.001", "0.001", "1E-3"])
def test_a_number_is_read_in_every_spelling(value: str) -> None:
    assert parse_bench([f"--weight_decay={value}"], {}).optimizer.weight_decay == 0.001


def test_choices_are_read_in_any_letter_case() -> None:
    assert parse_bench(["--device=CPU", "--data_format=nhwc"], {}).devices.device == "cpu"
    assert parse_bench(["--data_format=nhwc"], {}).devices.data_format == "NHWC"


def test_a_word_that_is_neither_true_nor_false_is_refused() -> None:
    assert _refusal("--deterministic=maybe").endswith("write --deterministic or --nodeterministic.")


def test_spaces_in_a_quoted_host_list_do_not_matter() -> None:
    argv = ["--job_name=ps", "--ps_hosts", "h1:1, h2:2", "--worker_hosts=h3:3"]
    cluster = parse_bench(argv, {}).cluster
    assert cluster is not None
    assert cluster.ps_hosts == ("h1:1", "h2:2")


def test_an_empty_folder_name_is_none() -> None:
    assert parse_bench(["--train_dir="], {}).output.train_dir is None


REPORT_1 = _words(
    "--ps_hosts 127.0.0.1:20000 --worker_hosts 127.0.0.1:20001,127.0.0.1:20002 --batch_size=4 --model=inception3 "
    "--variable_update=parameter_server --local_parameter_device=cpu --num_batches=2 --server_protocol grpc "
    "--device=cpu --num_gpus=1"
)
REPORT_3 = _words(
    "--model inception3 --batch_size 4 --ps_hosts 127.0.0.1:10001,127.0.0.1:10002 "
    "--worker_hosts 127.0.0.1:20001,127.0.0.1:20002 --num_gpus 1 --variable_update=distributed_replicated "
    "--cross_replica_sync=True --device=cpu --num_batches=2"
)


def test_the_command_lines_of_report_1_are_understood() -> None:
    config = parse_bench([*REPORT_1, "--job_name=ps", "--task_index=0"], {})
    assert config.task == server(0)
    config = parse_bench([*REPORT_1, "--job_name=worker", "--task_index=1", "--train_dir=/data/imagenet_train/"], {})
    assert config.task == worker(1)
    assert config.model == "inception3"
    assert config.run.batch_size == 4
    assert config.exchange.local_parameter_device == "cpu"
    assert config.num_workers == 2
    assert config.output.notices == ()


def test_the_command_lines_of_report_3_are_understood() -> None:
    for job_name, task in (("ps", server(1)), ("worker", worker(1))):
        config = parse_bench([*REPORT_3, "--task_index", "1", "--job_name", job_name], {})
        assert config.task == task
        assert config.exchange.variable_update == "distributed_replicated"


def test_a_server_may_name_more_gpus_than_it_has() -> None:
    argv = _words("--job_name=ps --ps_hosts=a:1 --worker_hosts=b:1 --num_gpus=8 --device=gpu")
    assert parse_bench(argv, {"CUDA_VISIBLE_DEVICES": ""}).devices.num_gpus == 8


def test_a_flag_that_another_one_makes_useless_gets_a_notice() -> None:
    notices = parse_bench(["--momentum=0.5", "--adam_beta1=0.8"], {}).output.notices
    assert notices == (
        "--momentum=0.5 has no effect here: it only applies with --optimizer=momentum.",
        "--adam_beta1=0.8 has no effect here: it only applies with --optimizer=adam or adamw.",
    )
    for argv in (["--momentum=0.5", "--optimizer=momentum"], ["--adam_beta1=0.8", "--optimizer=adamw"]):
        assert parse_bench(argv, {}).output.notices == ()


def test_the_tasks_of_a_local_cluster_do_not_repeat_its_notices() -> None:
    argv = ["--ps=1", "--workers=1", "--xla", "--momentum=0.5", "--eval=False", "--job_name=", "--task_index=0"]
    assert len(parse_bench(argv, {}).output.notices) == 2
    assert parse_bench(task_arguments(argv, server(0), ["h:1"], ["h:2"]), {}).output.notices == ()


def test_the_tasks_of_a_local_cluster_get_their_command_lines_from_its_own() -> None:
    argv = [
        "--ps=1",
        "--workers",
        "2",
        "--nocross_replica_sync",
        "--weight_decay=0.25",
        "--train_dir='/a b'",
        "--seed=5",
    ]
    arguments = task_arguments(argv, worker(1), ["127.0.0.1:1"], ["127.0.0.1:2", "127.0.0.1:3"])
    config, whole = parse_bench(arguments, {}), parse_bench(argv, {})
    assert config.local is None
    assert config.task == worker(1)
    assert config.cluster is not None
    assert config.cluster.address_of(worker(1)) == "127.0.0.1:3"
    assert config.output.train_dir == "/a b"
    for part in ("model", "seed", "run", "exchange", "devices", "optimizer", "output"):
        assert getattr(config, part) == getattr(whole, part)
