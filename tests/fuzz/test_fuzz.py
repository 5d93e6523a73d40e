"""A short run of ``make fuzz``, with inputs that are the same every time, and what the long runs have found."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from fuzz.__main__ import every_target
from fuzz.covered import COVERED, LIVE, Fed, modules_that_read
from fuzz.engine import Target, fuzz, input_of
from fuzz.live import attack
from fuzz.members import attack_member
from fuzz.servers import attack_net, attack_rendezvous

SEED = 1
INPUTS = 40
"""Of each target, after the real ones."""
_OPENED = contextlib.ExitStack()
_TARGETS = {target.name: target for target in every_target(_OPENED)}


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with _OPENED:
        yield _TARGETS


@pytest.mark.parametrize("name", _TARGETS)
def test_mutated_inputs_give_documented_errors_only(name: str, targets: dict[str, Target]) -> None:
    inputs = len(targets[name].seeds) + INPUTS
    done = fuzz(targets[name], SEED, inputs=inputs)
    assert not done.defects, "\n".join(map(str, done.defects))
    assert done.inputs == inputs


def test_every_module_that_reads_bytes_of_others_is_in_the_table() -> None:
    assert modules_that_read() == set(COVERED)


def test_the_table_names_targets_that_exist(targets: dict[str, Target]) -> None:
    names = [*targets, *LIVE]
    for module, how in COVERED.items():
        for wanted in how.targets if isinstance(how, Fed) else ():
            assert any(name.startswith(wanted) for name in names), (module, wanted)


DEEP = b"[" * 5000
FOUND = [
    ("monitor: report of its task", DEEP),
    ("monitor: report of its task", b'{"phase":"","task_address":"","incarnation":"1","job":"0","exit_code":Infinity}'),
    ("planted faults", b'{"fault":"Die","task":' + b"[" * 990),
    ("planted faults", b'{"fault":[[]]}'),
    ("shm: address", b'{"": ""}'),
    ("optimizer state: question", bytes(20)),
    ("optimizer: options", b'{"":0,"":[0.9]}'),
    ("state of a worker", b""),
    ("state of a program", b""),
    ("state of kept objects", b'{"":[["",[1,{"tuple":8}]],[{"":""}]]}'),
    ("checkpoint: state, exported", b""),
    ("CIFAR-10: batch", b"\x80\x02}r" + (50_000_000).to_bytes(4, "little") + b"."),
    ("variables of launchers", b"SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NODELIST=n SLURM_JOB_ID=\x80"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_once_is_not_found_again(name: str, data: bytes, targets: dict[str, Target]) -> None:
    with contextlib.suppress(*targets[name].documented):
        targets[name].parse(data)


def _target(parse: object) -> Target:
    assert callable(parse)
    return Target("broken", parse, [b"seed"], (ValueError,))


def _raise(data: bytes) -> None:
    if b"\xff" in data:
        raise KeyError("x")
    raise ValueError("documented")


def _keep(data: bytes, kept: list[mmap.mmap] = []) -> None:  # noqa: B006 - that is the leak
    kept.append(mmap.mmap(-1, 1 << 20))  # never memory that another test has freed
    kept[-1].write(b"x" * (1 << 20))


def _take(data: bytes, calls: list[int] = []) -> None:  # noqa: B006 - it counts
    calls.append(1)
    if len(calls) == 100:
        bytearray(b"x") * (200 << 20)


def test_an_undocumented_exception_is_found_with_a_small_input() -> None:
    (defect,) = fuzz(_target(_raise), SEED, inputs=2000).defects
    assert defect.what.startswith("KeyError at")
    assert defect.data == b"\xff"


@pytest.mark.parametrize(("parse", "what"), [(_keep, "memory that stays"), (_take, "memory at its peak")])
def test_memory_that_grows_is_found(parse: object, what: str) -> None:
    assert fuzz(_target(parse), SEED, inputs=120).defects[0].what.startswith(what)


def test_a_crash_is_found_with_its_input() -> None:
    def crash(data: bytes) -> None:
        if data != b"seed":
            os.kill(os.getpid(), signal.SIGKILL)

    (defect,) = fuzz(_target(crash), SEED, inputs=50).defects
    assert defect.what == "crash: SIGKILL"
    assert defect.data == input_of(_target(crash), SEED, defect.number) != b"seed"


def _sleep(long: bool) -> None:
    time.sleep(60 if long else 0)


def _spin(long: bool) -> None:
    while long:
        pass


@pytest.mark.parametrize(("wait", "what"), [(_sleep, "0.2 s"), (_spin, "0.1 s of processor time")])
def test_a_hang_is_found_with_its_input(
    wait: Callable[[bool], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.engine.STUCK_SECONDS", 0.2 if wait is _sleep else 60.0)
    monkeypatch.setattr("fuzz.engine.INPUT_SECONDS", 0.1)
    monkeypatch.setattr("fuzz.engine._SHRINK_SECONDS", 0.1)
    (defect,) = fuzz(_target(lambda data: wait(data != b"seed")), SEED, inputs=50).defects
    assert defect.what.startswith(f"hang: no end after {what}")
    assert defect.data != b"seed"


@pytest.mark.slow
@pytest.mark.timed
def test_a_job_under_attack_at_all_its_sockets_finishes_its_steps() -> None:
    said: list[str] = []
    assert attack(SEED, 4.0, said.append) == []
    assert "connections to" in said[0]


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("attacks", [attack_member, attack_rendezvous, attack_net])
def test_callers_with_the_key_and_without_do_no_harm(attacks: Callable[..., list[str]]) -> None:
    said: list[str] = []
    assert attacks(SEED, 2.0, said.append) == []
    assert said
