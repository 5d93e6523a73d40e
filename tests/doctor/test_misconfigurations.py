"""Each misconfiguration yields its own correct sentence, from ``lockstep doctor`` and from the starting job itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from doctor.scenarios import OTHER_TORCH, SCENARIOS, Act, Scenario
from helpers.namespaces import Network, why_not
from helpers.programs import Program
from helpers.waiting import wait_until

PLAIN = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "plain_lockstep.py"))
SOURCES = Path(__file__).parents[2] / "src"
FAST = ("report 3: indices and hosts swapped", "firewall in one direction")
NO_NAMESPACES = why_not()

pytestmark = [
    pytest.mark.timed,
    pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "namespaces can be made"),
]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    hosts = {
        "a": ("11.11.11.47/24", "12.12.12.43/24", "fd11::47/64"),
        "b": ("11.11.11.48/24", "12.12.12.44/24", "fd11::48/64"),
    }
    with Network(hosts) as made:
        yield made


@pytest.fixture
def clean(network: Network) -> Iterator[Network]:
    yield network
    for host in network.hosts.values():
        host.reset()


def environment_of(act: Act, folder: Path) -> Mapping[str, str]:
    """The environment of one task; another torch is another package that Python finds first."""
    path = str(SOURCES)
    if version := act.environment.get(OTHER_TORCH):
        notes = folder / f"torch-{version}.dist-info"
        notes.mkdir(exist_ok=True)
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        path = f"{folder}:{path}"
    return {**act.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(network: Network, scenario: Scenario, command: str, folder: Path) -> Iterator[dict[str, Program]]:
    """All tasks of a scenario under ``lockstep COMMAND``, by the task's name."""
    with contextlib.ExitStack() as stack:
        for host, words in scenario.others:
            stack.enter_context(network.hosts[host].start(words)).wait_for("listening", 10)
        programs = {}
        for act in scenario.acts:
            words = (*PLAIN, command, *act.flags())
            program = network.hosts[act.host].start(words, environment_of(act, folder), act.before)
            programs[act.name or act.task] = stack.enter_context(program)
        yield programs


def slow_but(names: tuple[str, ...]) -> list[object]:
    marks = {name: () if name in names else (pytest.mark.soak,) for name in SCENARIOS}
    return [pytest.param(name, marks=marks[name], id=name.replace(" ", "-")) for name in SCENARIOS]


@pytest.mark.parametrize("name", slow_but(FAST))
def test_doctor_says_what_is_wrong(name: str, clean: Network, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    scenario.prepare(clean)
    with started(clean, scenario, "doctor", tmp_path) as programs:
        done = {task: program.wait(30) for task, program in programs.items()}
    for task, text in scenario.doctor:
        assert text in done[task].stdout, f"{task}: {done[task]}"
        assert done[task].code == scenario.doctor_code, done[task]
        assert "Traceback" not in done[task].stderr
    if scenario.first:
        assert scenario.first in done[scenario.doctor[0][0]].stdout.splitlines()[1]


@pytest.mark.parametrize("name", slow_but(FAST))
def test_the_starting_job_says_what_is_wrong(name: str, clean: Network, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    scenario.prepare(clean)
    with started(clean, scenario, "bench", tmp_path) as programs:
        for task, text in scenario.job:
            either = [programs[name] for name in task.split("|")]
            try:
                said = wait_until(lambda: said_by(either, text), 25, f"{text!r} from {task}")  # noqa: B023
            except AssertionError as error:
                raise AssertionError(f"{error}; only {texts(either)}") from None
            assert "Traceback" not in said


def said_by(programs: list[Program], text: str) -> str:
    """What the first of these programs that printed ``text`` printed; fails if all have ended without it."""
    over = not any(program.running() for program in programs)
    for program in programs:
        if text in (said := program.stdout() + program.stderr()):
            return said
    assert not over, f"ended without {text!r}: {texts(programs)}"
    return ""


def texts(programs: list[Program]) -> str:
    return "\n".join(program.stdout() + program.stderr() for program in programs)
