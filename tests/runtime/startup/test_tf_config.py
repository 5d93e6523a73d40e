"""TF_CONFIG: what it says, and what commands and the library make of it."""

from __future__ import annotations

import json

import pytest

from lockstep.cli.flags import parse_bench, parse_doctor, task_meant
from lockstep.errors import BadInput
from lockstep.library.engine_cluster import as_tf_config_says
from lockstep.library.join import JoinArguments
from lockstep.protocol.core.ids import server
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.own_name import POD_VARIABLE, machine_address, with_own_address
from lockstep.runtime.startup.tf_config import TfConfig, TfRole, read_tf_config

PS = ["j-ps-0.team.svc:2222"]
WORKERS = ["j-worker-0.team.svc:2222", "j-worker-1.team.svc:2222"]


def variable(cluster: object, kind: str = "worker", index: object = 0) -> dict[str, str]:
    said = {"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"}
    return {"TF_CONFIG": json.dumps(said)}


def test_servers_and_workers() -> None:
    for kind, index in (("ps", 0), ("worker", 1)):
        found = read_tf_config(variable({"ps": PS, "worker": WORKERS}, kind, index))
        assert found == TfConfig(TfRole(kind), index, tuple(PS), tuple(WORKERS))


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_the_chief_is_worker_0_and_the_workers_follow(chief: str) -> None:
    cluster = {chief: ["j-chief-0:2222"], "ps": PS, "worker": WORKERS, "evaluator": ["j-evaluator-0:2222"]}
    everyone = ("j-chief-0:2222", *WORKERS)
    assert read_tf_config(variable(cluster, chief)) == TfConfig(TfRole.WORKER, 0, tuple(PS), everyone)
    assert read_tf_config(variable(cluster, "worker", 1)) == TfConfig(TfRole.WORKER, 2, tuple(PS), everyone)
    assert read_tf_config(variable(cluster, "evaluator")) == TfConfig(TfRole.EVALUATOR, 0, tuple(PS), everyone)


def test_a_chief_without_workers() -> None:
    found = read_tf_config(variable({"chief": ["c:1"], "ps": PS}, "chief"))
    assert found == TfConfig(TfRole.WORKER, 0, tuple(PS), ("c:1",))


def test_a_map_of_all_workers_is_a_list() -> None:
    found = read_tf_config(variable({"ps": PS, "worker": {"1": WORKERS[1], "0": WORKERS[0]}}, "worker", 1))
    assert found == TfConfig(TfRole.WORKER, 1, tuple(PS), tuple(WORKERS))


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "lacks"),
    [
        ({"ps": PS, "worker": {"1": WORKERS[1]}}, "worker", 1, "give --worker_hosts=HOST:PORT,..."),
        ({"ps": PS, "worker": {"0": WORKERS[0]}}, "worker", 0, "give --worker_hosts=HOST:PORT,..."),
        ({"ps": ["j-ps-1:2222"], "worker": {}}, "ps", 1, "give --ps_hosts=HOST:PORT,... and --worker_hosts=HOST:PORT"),
    ],
)
def test_a_map_that_names_only_the_task_itself_needs_the_lists(
    cluster: dict[str, object], kind: str, index: int, lacks: str
) -> None:
    found = read_tf_config(variable(cluster, kind, index))
    assert found is not None
    with pytest.raises(BadInput) as refused:
        found.lists()
    assert lacks in str(refused.value)
    assert "enableDynamicWorker" in str(refused.value)
    servers = ["j-ps-0:2222", "j-ps-1:2222"]
    assert found.lists(servers, WORKERS) == (tuple(servers), tuple(WORKERS))


def test_no_cluster_is_no_cluster() -> None:
    for environ in ({}, {"TF_CONFIG": " "}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"cluster": {}}'}):
        assert read_tf_config(environ) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not readable"),
        ("[]", "has no cluster"),
        ('{"cluster": []}', "has no cluster"),
        ('{"cluster": {"worker": ["a:1"]}}', "does not say which task"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "boss"}}', "calls this process 'boss'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "worker 1, but lists 1"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "ps 0, but lists 0"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}', "has -1 where the index"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": true}}', "has True where the index"),
        ('{"cluster": {"worker": [1]}, "task": {"type": "worker"}}', "something else than addresses"),
        ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker"}}', "no list of addresses"),
        ('{"cluster": {"worker": {"x": "a:1"}}, "task": {"type": "worker"}}', "has 'x' where the index"),
    ],
)
def test_nonsense_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadInput, match="TF_CONFIG") as refused:
        read_tf_config({"TF_CONFIG": text})
    assert why in str(refused.value)


# -- the benchmark --


def test_bench_takes_the_task_from_it() -> None:
    config = parse_bench(["--model=lenet", "--device=cpu"], variable({"ps": PS, "worker": WORKERS}, "worker", 1))
    assert config.cluster is not None
    assert str(config.task) == "/job:worker/replica:0/task:1"
    assert (list(config.cluster.ps_hosts), list(config.cluster.worker_hosts)) == (PS, WORKERS)


def test_flags_of_bench_go_first() -> None:
    environ = variable({"ps": PS, "worker": WORKERS}, "worker", 1)
    local = parse_bench(["--ps=1", "--workers=2", "--device=cpu"], environ)
    assert local.local is not None
    named = parse_bench(["--job_name=ps", "--ps_hosts=a:1", "--worker_hosts=b:1", "--device=cpu"], environ)
    assert named.cluster is not None
    assert named.cluster.ps_hosts == ("a:1",)
    sparse = variable({"ps": PS, "worker": {"1": "b:2"}}, "worker", 1)
    filled = parse_bench(["--worker_hosts=b:1,b:2", "--device=cpu"], sparse)
    assert filled.cluster is not None
    assert (filled.cluster.ps_hosts, filled.cluster.worker_hosts) == (tuple(PS), ("b:1", "b:2"))


def test_an_evaluator_of_bench_evaluates_by_itself() -> None:
    environ = variable({"ps": PS, "worker": WORKERS}, "evaluator")
    flags = ["--model=lenet", "--data_name=digits", "--device=cpu", "--train_dir=/tmp/x"]
    config = parse_bench(flags, environ)
    assert config.cluster is None
    assert config.evaluation.only
    assert config.evaluation.interval_secs == 60
    assert parse_bench([*flags, "--eval_interval_secs=5"], environ).evaluation.interval_secs == 5


def test_a_refused_task_is_known_from_it() -> None:
    """So that it can answer, at its own address, why it does not come."""
    found = task_meant(["--nonsense"], variable({"ps": PS, "worker": WORKERS}, "ps"))
    assert found is not None
    assert str(found.task) == "/job:ps/replica:0/task:0"
    assert task_meant(["--nonsense"], {"TF_CONFIG": "{"}) is None


def test_the_doctor_takes_the_tasks_from_it_and_nothing_else() -> None:
    """In a pod nobody repeats the flags of the job: they must not be compared with those of its tasks."""
    environ = variable({"ps": PS, "worker": WORKERS}, "worker", 1)
    bare = parse_doctor([], environ)
    assert (str(bare.config.task), bare.describes_job) == ("/job:worker/replica:0/task:1", False)
    assert parse_doctor(["--model=lenet"], environ).describes_job
    outside = parse_doctor(["--ps_hosts=a:1", "--worker_hosts=b:1"], environ)
    assert outside.config.task is None


# -- the library --


def test_join_takes_the_task_from_it() -> None:
    environ = variable({"ps": PS, "worker": WORKERS}, "worker", 1)
    found = as_tf_config_says(JoinArguments(), environ)
    assert (found.job_name, found.task_index) == ("worker", 1)
    assert (list(found.ps_hosts), list(found.worker_hosts)) == (PS, WORKERS)
    given = JoinArguments(job_name="ps", ps_hosts=("a:1",), worker_hosts=("b:1",))
    assert as_tf_config_says(given, environ) is given
    beside_torchrun = {**environ, "RANK": "0", "WORLD_SIZE": "1"}
    assert as_tf_config_says(JoinArguments(), beside_torchrun) == JoinArguments()


def test_join_without_servers() -> None:
    found = as_tf_config_says(JoinArguments(), variable({"worker": WORKERS}, "worker", 0))
    assert not found.has_servers
    assert found.job_name == "worker"


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        (JoinArguments(), "evaluator", "belongs to no job"),
        (JoinArguments(servers=2), "worker", "servers=2 was given, but TF_CONFIG has 1"),
    ],
)
def test_what_join_refuses(arguments: JoinArguments, kind: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        as_tf_config_says(arguments, variable({"ps": PS, "worker": WORKERS}, kind))


# -- names that come later --


def test_a_name_that_does_not_lead_here_yet_is_not_waited_for() -> None:
    spec = ClusterSpec(ps_hosts=("no-such-name.invalid:2222",), worker_hosts=("10.9.9.9:1",))
    own = spec.for_task(server(0))
    said: list[str] = []
    assert with_own_address(own, {}) is own
    for environ in ({POD_VARIABLE: "10.0.0.1"}, {"TF_CONFIG": "{}"}):
        bound = with_own_address(own, environ, said.append)
        assert bound.bind == machine_address()
        assert bound.listen_address().port == 2222
    assert "does not lead here yet" in said[0]


@pytest.mark.parametrize("address", ["10.9.9.9:1", "localhost:1", "nonsense"])
def test_other_addresses_are_left_to_the_rules(address: str) -> None:
    spec = ClusterSpec(ps_hosts=(address,), worker_hosts=("b:1",)).for_task(server(0))
    assert with_own_address(spec, {POD_VARIABLE: "10.0.0.1"}) is spec
