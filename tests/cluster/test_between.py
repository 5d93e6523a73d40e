"""Somebody between all tasks of a job, who reads, changes, repeats and answers: the bits are those without them."""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import library
from helpers.adversary import Victim, refusals_only
from helpers.between import HIDDEN, SHOWN, Between, Treatment
from helpers.keys import make_key
from helpers.marks import others_long
from helpers.ports import free_ports, free_range
from helpers.programs import LOCKSTEP, Program, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.ids import ClusterShape
from lockstep.security.certificates import certificates_for
from lockstep.security.chosen import chosen_key
from lockstep.security.key import find_key
from lockstep.security.proof import Refusal
from lockstep.transports.net.control import Caller

pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(150)]
SHAPE = ClusterShape(1, 2)
SECONDS = 90.0
STEPS = 120
PROGRAM = (sys.executable, str(Path(library.__file__).with_name("lasting_program.py")))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FIRST = (Treatment.IMPOSTOR, Treatment.ALTER_DIALER, Treatment.ALTER_ACCEPTOR)


@dataclass
class Trained:
    """A server and two workers of a program that prints the digest of its model at its end."""

    programs: list[Program]
    linger: Path

    def digests(self) -> set[str]:
        """Of both workers; the chief stays until ``linger`` exists, and with it the job."""
        printed = [worker.wait_for(" of 2: ", SECONDS) for worker in self.programs[1:]]
        return set(re.findall(r"worker \d of 2: \w+ ", "".join(printed)))

    def finish(self) -> list[int]:
        self.linger.touch()
        return [program.wait(SECONDS).code for program in self.programs]


@contextmanager
def training(lists: tuple[str, ...], folder: Path) -> Iterator[Trained]:
    linger = folder / "linger"
    worker = (*PROGRAM, *lists, "--job_name=worker", f"--steps={STEPS}", f"--linger={linger}")
    commands = [(*LOCKSTEP, "ps", *lists, "--task_index=0"), *((*worker, f"--task_index={i}") for i in range(2))]
    with ExitStack() as started:
        yield Trained([started.enter_context(Program(command, ONE_THREAD)) for command in commands], linger)


def listed(host: str, ports: list[int], *more: str) -> tuple[str, ...]:
    server, *workers = (f"{host}:{port}" for port in ports)
    first, last = free_range(8)
    return (f"--ps_hosts={server}", f"--worker_hosts={','.join(workers)}", f"--ports={first}-{last}", *more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with training(listed(HIDDEN, free_ports(3)), tmp_path_factory.mktemp("undisturbed")) as trained:
        found = trained.digests()
        assert len(found) == 2
        assert trained.finish() == [0, 0, 0]
    return found


def impostor(folder: Path) -> ssl.SSLContext:
    """TLS with the certificates of another key."""
    key = find_key(make_key(folder / "another-key"))
    assert key is not None
    own = certificates_for(key)
    (folder / "impostor.pem").write_bytes(own.private + own.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "impostor.pem")
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("protocol", others_long(["grpc", "grpc+tcp", "auto"], ["auto"]))
def test_whoever_is_between_all_tasks_changes_nothing(protocol: str, undisturbed: set[str], tmp_path: Path) -> None:
    """C1 and C2: the secret crossed the wire in clear, and whoever said the right names was let in."""
    ports = free_ports(3)
    lists = listed(SHOWN, ports, f"--bind={HIDDEN}", f"--server_protocol={protocol}")
    first, last = map(int, re.findall(r"--ports=(\d+)-(\d+)", lists[2])[0])
    treat = dict(enumerate(FIRST))
    watched = [*ports, *range(first, last + 1)]
    with (
        closing(Between(watched, lambda number: treat.get(number, Treatment.RELAY), impostor(tmp_path))) as between,
        training(lists, tmp_path) as trained,
    ):
        trained.programs[1].wait_for("step 20\n", SECONDS)
        victim = Victim.at({task: f"{HIDDEN}:{port}" for task, port in zip(SHAPE.tasks(), ports, strict=True)})
        altered = [one for one in between.passages if one.treatment is not Treatment.RELAY]
        relayed = [one for one in between.passages if one.treatment is Treatment.RELAY and one.said]
        assert {one.treatment for one in altered} == set(FIRST)
        assert any(one.is_plain for one in relayed) == (protocol != "auto")
        wait_until(lambda: all(one.over.is_set() for one in altered), 15, "who was lied to has hung up")
        assert [one for one in altered if one.posed]
        assert all(one.said == b"" for one in altered if one.posed)
        with refusals_only(victim):
            for passage in relayed:
                heard = passage.replay()
                victim.check_heard(heard, passage.port)
                assert not passage.is_plain or Refusal.OTHER_KEY.value.encode() in heard
        assert trained.digests() == undisturbed
        assert trained.finish() == [0, 0, 0]


def test_what_a_caller_said_to_net_is_worth_nothing_the_second_time(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with (
        start_lockstep("net", f"--serve={HIDDEN}:{port}") as serving,
        closing(Between([port], lambda _: Treatment.RELAY, impostor(tmp_path))) as between,
    ):
        serving.wait_for(f"Waiting at {HIDDEN}:{port}", SECONDS)
        with closing(Caller(SHOWN, port, chosen_key())) as caller:
            assert caller.call("cpu") > 0
        (passage,) = between.passages
        assert passage.replay().endswith(Refusal.OTHER_KEY.value.encode())
        with closing(Caller(HIDDEN, port, chosen_key())) as caller:
            assert caller.call("cpu") > 0
        assert serving.running()
