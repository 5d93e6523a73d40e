"""Adversaries at a running job: at every socket that it listens at, in every mode, nothing is read and nothing changed.

The sockets are those that the kernel knows of. What each adversary lacks is the key, or the right life of a task.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

import library
from cluster.tasks import Tasks, tasks_of
from cluster.test_listeners import MODES
from helpers.adversary import (
    Victim,
    another_user,
    calls,
    noise,
    refusals_only,
    spoil_store,
    stale_lives,
    walk,
    walk_doors,
    walk_tensors,
    without_a_certificate,
)
from helpers.keys import another_key, no_key
from helpers.listeners import listeners_of
from helpers.other_user import needs_root
from helpers.ports import free_port, free_range
from helpers.programs import Program, run_lockstep, start_lockstep
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.private_files import user_folders
from lockstep.protocol.core.ids import CHIEF, ClusterShape
from lockstep.runtime.listening import ListeningSocket
from lockstep.runtime.startup.rendezvous import RendezvousError, RendezvousSpec, meet
from lockstep.security.chosen import chosen_key
from lockstep.transports.control.addresses import Address
from lockstep.transports.net.control import Caller, NetError
from lockstep.version import __version__

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]
SHAPE = ClusterShape(1, 2)
START_SECONDS = 60.0
STEPS = 60
"""So many losses are compared."""
RUN = ("--num_warmup_batches=0", "--display_every=1", "--init_learning_rate=0.001")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PORTS = {
    "grpc": {"streams": 3, "lines": 0},
    **{name: {"streams": 0, "lines": 3} for name in ("auto", "grpc+tcp", "private")},
}
"""How many ports for tensors a job has, of each kind."""
UNPROVEN = ("ucx", "store", "collective")
"""Who connects to UCX, gloo and torch's store cannot be checked: SECURITY.md says so, and `doctor` names them."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillCluster]:
    """Real tasks that compute next to nothing."""
    with DrillCluster(SHAPE, tmp_path_factory.mktemp("job")) as cluster:
        for task in SHAPE.tasks():
            cluster.start(cluster.plan(task, steps=1_000_000, step_seconds=0.005))
        wait_until(lambda: steps_of(cluster) > 1, START_SECONDS, "the job trains")
        yield cluster


def steps_of(cluster: DrillCluster) -> int:
    """How many lines of its steps the last worker has printed."""
    log = cluster.folder / "logs" / "worker-1.log"
    return log.read_text().count("step ") if log.exists() else 0


@contextmanager
def goes_on(cluster: DrillCluster) -> Iterator[Victim]:
    """After the block the tasks are the same as before, and train."""
    victim = Victim.at({task: cluster.address(task) for task in SHAPE.tasks()})
    with refusals_only(victim):
        yield victim
    steps = steps_of(cluster)
    wait_until(lambda: steps_of(cluster) > steps, START_SECONDS, "the job goes on")
    assert set(cluster.exit_codes()) == {None}


def test_a_job_goes_on_beside_every_adversary(job: DrillCluster, tmp_path: Path) -> None:
    """C1: whoever reached a port was a member."""
    with goes_on(job) as victim:
        places = victim.sockets()
        assert len(places) == 3 * len(SHAPE.tasks()), places
        walk(victim, places, tmp_path)
        found = walk_tensors(victim, places, tmp_path, patient=False)
        assert found == {"streams": 0, "lines": len(SHAPE.tasks())}
        assert walk_doors(victim, tmp_path) == len(SHAPE.tasks())
        stale_lives(victim)


@needs_root
def test_another_user_of_the_host_opens_nothing_of_a_job(job: DrillCluster) -> None:
    """C3 and M7: files of a job could be read by everyone, and the door of a job of root let everyone in."""
    with goes_on(job) as victim:
        files = [file for folder in user_folders() for file in (folder, *folder.rglob("*"))]
        assert files
        another_user(victim, *files)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """The losses of runs that nothing happens to, by their flags; transports make no difference."""
    return {}


def _reference(kept: dict[str, list[str]], shape: ClusterShape, flag: str) -> list[str]:
    kind = "" if "server_protocol" in flag else flag
    if kind not in kept:
        with tasks_of(shape, *RUN, *filter(None, [kind]), f"--num_batches={STEPS}") as tasks:
            for task in shape.tasks():
                tasks.start(task, environment=ONE_THREAD)
            assert {done.code for done in tasks.finish(100).values()} == {0}
            kept[kind] = losses(tasks.programs[CHIEF])
    assert len(kept[kind]) == STEPS
    return kept[kind]


def losses(chief: Program) -> list[str]:
    return re.findall(r"^\d+\timages/sec: .*\t([\d.]+)$", chief.stdout(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode_the_losses_are_those_of_a_run_without_adversaries(
    mode: str, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    shape, flag, _ = MODES[mode]
    with tasks_of(shape, *RUN, flag, "--num_batches=1000000") as tasks:
        for task in shape.tasks():
            tasks.start(task, environment=ONE_THREAD)
        chief = tasks.programs[CHIEF]
        wait_until(lambda: len(losses(chief)) > 3, START_SECONDS, "the job trains")
        victim = Victim.at(tasks.addresses)
        found = victim.sockets()
        assert set(found) == set(listeners_of(tasks.programs.values()))
        unproven = _named_by_doctor(tasks) if mode in ("grpc+ucx", "all-reduce") else {}
        places = tuple(place for place in found if str(place) not in unproven)
        assert places
        with refusals_only(victim):
            if mode == "all-reduce":
                spoil_store(victim, next(address for address, purpose in unproven.items() if purpose == "store"))
            walk(victim, places, tmp_path)
            found_ports = walk_tensors(victim, places, tmp_path)
            walk_doors(victim, tmp_path)
            stale_lives(victim)
        wait_until(lambda: len(losses(chief)) >= STEPS, START_SECONDS, "the job goes on")
        found_losses = losses(chief)[:STEPS]
        assert all(program.running() for program in tasks.programs.values())
    assert found_losses == _reference(undisturbed, shape, flag)
    assert found_ports == PORTS.get(mode, found_ports)


def _named_by_doctor(tasks: Tasks) -> dict[str, str]:
    """The sockets of which `doctor` says that they ask for nothing, with what for; all at the address in the lists."""
    told = json.loads(run_lockstep("doctor", *tasks.flags, *tasks.lists(), "--json", timeout=40).stdout)
    open_to_all: Iterable[dict[str, str]] = [one for one in told["listeners"] if one["proof"] == "nothing"]
    assert {one["purpose"] for one in open_to_all} <= set(UNPROVEN)
    assert {one["address"] for one in open_to_all} == {tasks.host}
    return {f"{one['address']}:{one['port']}": one["purpose"] for one in open_to_all}


@pytest.mark.slow
def test_what_a_launcher_starts_meets_and_trains_beside_adversaries(tmp_path: Path) -> None:
    """H4 and H6: a few bytes ended or held rank 0, and whoever came first had a rank's place."""
    quiet, attacked = (launched(tmp_path / name, attacked=name == "attacked") for name in ("quiet", "attacked"))
    assert attacked == quiet


def launched(folder: Path, attacked: bool) -> set[str]:
    """The digests of two workers that a launcher has started with a server."""
    folder.mkdir()
    linger, port = folder / "linger", free_port()
    first, last = free_range(20)
    program = Path(library.__file__).with_name("lasting_program.py")
    flags = ("--servers=1", f"--ports={first}-{last}", "--steps=100", f"--linger={linger}")
    command = (sys.executable, str(program), *flags)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", **ONE_THREAD}
    with ExitStack() as started:
        ranks = [started.enter_context(Program(command, {**master, "RANK": "0"}))]
        if attacked:
            _attack_rendezvous(wait_until(lambda: listeners_of(ranks), START_SECONDS, "rank 0 listens"))
        ranks += [started.enter_context(Program(command, {**master, "RANK": rank})) for rank in ("1", "2")]
        if attacked:
            ranks[1].wait_for("step 5\n", START_SECONDS)
            victim = Victim.among(places := listeners_of(ranks))
            assert (len(victim.tasks), len(places)) == (3, 9), places
            with refusals_only(victim):
                walk(victim, places, folder)
                walk_tensors(victim, places, folder, patient=False)
                walk_doors(victim, folder)
                stale_lives(victim)
        printed = [one.wait_for(" of 2: ", START_SECONDS) for one in ranks[1:]]
        linger.touch()
        assert [one.wait(START_SECONDS).code for one in ranks] == [0, 0, 0]
    digests = set(re.findall(r"worker \d of 2: \w+ ", "".join(printed)))
    assert len(digests) == 2
    return digests


def _attack_rendezvous(places: Sequence[ListeningSocket]) -> None:
    for place in places:
        noise(place)
        for key in (b"o" * 32, None):
            address = Address(place.address, place.port)
            stranger = RendezvousSpec(rank=1, world=3, address=address, timeout=5.0, version=__version__, key=key)
            with pytest.raises(RendezvousError):
                meet(stranger, 4001, lambda _: None)


@pytest.mark.slow
def test_net_goes_on_serving_beside_adversaries(tmp_path: Path) -> None:
    port = free_port()
    with start_lockstep("net", f"--serve=127.0.0.1:{port}") as serving:
        serving.wait_for("Waiting at", START_SECONDS)
        for place in listeners_of([serving]):
            heard = noise(place) + without_a_certificate(place)
            for circumstances in (no_key(), another_key(tmp_path)):
                with circumstances:
                    heard += calls(place)
                    with pytest.raises(NetError):
                        Caller("127.0.0.1", port, chosen_key())
            assert socket.gethostname().encode() not in heard
        with closing(Caller("127.0.0.1", port, chosen_key())) as caller:
            assert caller.call("cpu") > 0
