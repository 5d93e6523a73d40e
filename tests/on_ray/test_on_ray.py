"""Jobs on Ray without Ray: what is asked of it, who is where, whose end is told. (tests/engines has the real one.)"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import lockstep.ray
from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT, BadInput
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.ray.directory import Directory
from lockstep.ray.ends import LOST, RayRunError, TaskEnd
from lockstep.ray.plan import RayPlan, actor_options, plan_problems
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.own_name import with_own_address
from lockstep.runtime.startup.tf_config import read_tf_config
from lockstep.transports.control import host_names
from lockstep.transports.control.addresses import AddressError, resolve, where_now

NAME = "worker-0.lockstep-1.ray"


def plan(**changed: Any) -> RayPlan:
    usual: dict[str, Any] = {
        **{"job": "lockstep-1", "servers": 1, "workers": 2, "restarts": 3, "strategy": "PACK"},
        **{"server_resources": {"CPU": 2.0}, "worker_resources": {"GPU": 1.0, "fast": 1.0}},
    }
    return RayPlan(**{**usual, **changed})


def test_every_task_has_its_bundle_and_learns_which_one_it_is() -> None:
    tasks = plan().tasks()
    assert [plan().resources(task) for task in tasks] == [{"CPU": 2}, *[{"GPU": 1, "fast": 1}] * 2]
    found = read_tf_config(
        {"TF_CONFIG": plan().tf_config(tasks[2], dict(zip(tasks, (20000, 20001, 20002), strict=True)))}
    )
    assert found is not None
    assert found.task == TaskId(Role.WORKER, 1)
    assert found.lists()[1] == (f"{NAME}:20001", "worker-1.lockstep-1.ray:20002")


def test_an_actor_uses_its_whole_bundle() -> None:
    assert actor_options({"GPU": 1, "fast": 1}) == {"num_cpus": 0, "num_gpus": 1, "resources": {"fast": 1}}
    assert actor_options({"CPU": 2, "memory": 10}) == {"num_cpus": 2, "memory": 10, "resources": {}}


@pytest.mark.parametrize(
    "changed",
    [
        {"workers": 0},
        {"servers": -1},
        {"restarts": -1},
        {"strategy": "pack"},
        {"worker_resources": {}},
        {"server_resources": {"CPU": -1}},
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(changed: dict[str, Any]) -> None:
    assert list(plan_problems(plan())) == []
    assert len(list(plan_problems(plan(**changed)))) == 1


def test_a_former_life_does_not_take_a_name_back() -> None:
    directory = Directory()
    first, second = directory.next_life("a"), directory.next_life("a")
    directory.exchange("a", second, "192.0.2.2")
    assert directory.exchange("a", first, "192.0.2.1") == {"a": "192.0.2.2"}
    assert Directory().exchange("a", second, "192.0.2.2") == {"a": "192.0.2.2"}, "one that was lost is filled again"


def test_a_name_is_looked_up_again_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    monkeypatch.setenv(host_names.VARIABLE, str(file))
    with pytest.raises(AddressError):
        resolve(f"{NAME}.invalid")
    for address in ("127.0.0.1", "127.0.0.2"):
        file.write_bytes(host_names.as_hosts_file({NAME: address, "other": "192.0.2.9"}))
        assert [str(number) for number in resolve(NAME.upper())] == [address]
        assert where_now(f"{NAME}:20000") == f"{address}:20000"
        spec = ClusterSpec(worker_hosts=(f"{NAME}:20000",), task=TaskId(Role.WORKER, 0))
        assert str(with_own_address(spec, {"TF_CONFIG": "{}"}).listen_address()) == f"{address}:20000"
    file.write_bytes(b"nonsense " + NAME.encode() + b"\n\xff\n")
    assert where_now(f"{NAME}:20000") == f"{NAME}:20000"
    assert where_now("[::1]:20000") == "[::1]:20000"


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ((EXIT_VERDICT, EXIT_FAILED, 0), "b ended with exit code 1 (ValueError: no)"),
        ((LOST, EXIT_VERDICT, EXIT_VERDICT), "a is lost for good"),
        ((143, EXIT_BAD_INPUT, EXIT_VERDICT), "b ended with exit code 2"),
    ],
)
def test_the_error_names_whose_own_fault_it_was(codes: tuple[int, ...], named: str) -> None:
    ends = {name: TaskEnd(code, error="ValueError: no") for name, code in zip("abc", codes, strict=True)}
    error = RayRunError(ends)
    assert str(error).startswith(named)
    assert error.exit_codes == dict(zip("abc", codes, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(BadInput, match=r"lockstep-torch\[ray\]"):
        lockstep.ray.run(print)
    with pytest.raises(BadInput, match="workers=0"):
        lockstep.ray.run(print, workers=0)
