"""Misconfigurations of a cluster: what is started where, and the sentence that must result.

The hosts are those of the public reports: a is 11.11.11.47 and 12.12.12.43, b is 11.11.11.48 and 12.12.12.44.
``doctor`` and ``job`` are texts that the task of that name must print, from ``lockstep doctor`` and from the start;
"worker 0|worker 1" is either of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from helpers.namespaces import Network

PS = "11.11.11.47:10001"
WORKERS = "11.11.11.47:20001,11.11.11.48:20002"


@dataclass(frozen=True)
class Act:
    """One task, as a user starts it."""

    host: str
    task: str
    ps_hosts: str = PS
    worker_hosts: str = WORKERS
    more: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    name: str = ""
    """Its name in the scenario, where two have the same task."""

    def flags(self) -> list[str]:
        job, index = self.task.split()
        lists = [f"--ps_hosts={self.ps_hosts}", f"--worker_hosts={self.worker_hosts}"]
        device = [] if any(flag.startswith("--device") for flag in self.more) else ["--device=cpu"]
        return [*lists, f"--job_name={job}", f"--task_index={index}", *device, *self.more]


def nothing(network: Network) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Scenario:
    """``doctor`` and ``job``: which task prints what. ``others``: programs that run on a host meanwhile."""

    acts: tuple[Act, ...]
    doctor: tuple[tuple[str, str], ...]
    job: tuple[tuple[str, str], ...]
    prepare: Callable[[Network], None] = nothing
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    doctor_code: int = 1
    first: str = ""
    """A text that must be in the first finding: the most likely cause."""


PS0, W0, W1 = Act("a", "ps 0"), Act("a", "worker 0"), Act("b", "worker 1")
ALL = (PS0, W0, W1)


def listening(address: str, port: int, says: str) -> tuple[str, ...]:
    """A program that holds a port and greets with ``says``, or sends nothing."""
    script = (
        "import socket,sys\n"
        f"s=socket.create_server(('{address}',{port}))\n"
        "print('listening',flush=True)\n"
        "kept=[]\n"
        f"while True:\n c=s.accept()[0]; kept.append(c)\n if {says!r}: c.sendall({says!r}.encode()); c.close()\n"
    )
    return (sys.executable, "-c", script)


def _with(act: Act, *more: str) -> Act:
    return Act(act.host, act.task, act.ps_hosts, act.worker_hosts, (*act.more, *more), act.environment, act.before)


def _drop_from_b(network: Network) -> None:
    network.hosts["a"].firewall("ip saddr 11.11.11.48 ct state new drop")


def _drop_both(network: Network) -> None:
    network.hosts["a"].firewall("ip saddr 11.11.11.48 drop")


def _reject_from_b(network: Network) -> None:
    network.hosts["a"].firewall("ip saddr 11.11.11.48 ct state new meta l4proto tcp reject with tcp reset")


def _only_listed_ports(network: Network) -> None:
    network.hosts["a"].firewall("ip saddr 11.11.11.48 ct state new tcp dport != { 10001, 20001 } drop")


def _names(of_a: str, of_b: str) -> Callable[[Network], None]:
    def write(network: Network) -> None:
        network.hosts["a"].hosts_file(of_a)
        network.hosts["b"].hosts_file(of_b)

    return write


NAMED = "nodea:20001,nodeb:20002"
NAMED_PS = "nodea:10001"
REPORT_3_PS = "11.11.11.47:10001,11.11.11.48:10002"
OTHER_TORCH = "PLAIN_TORCH"

SCENARIOS: dict[str, Scenario] = {
    "report 3: indices and hosts swapped": Scenario(
        acts=(
            Act("a", "ps 1", REPORT_3_PS),
            Act("a", "worker 1", REPORT_3_PS),
            Act("b", "ps 0", REPORT_3_PS),
            Act("b", "worker 0", REPORT_3_PS),
        ),
        doctor=(
            ("ps 1", "ps 1 has the address 11.11.11.48:10002, which is not this machine's; --task_index=0 has"),
            ("worker 0", "worker 0 has the address 11.11.11.47:20001, which is not this machine's; --task_index=1 has"),
        ),
        job=(
            ("ps 1", "ps 1 has the address 11.11.11.48:10002, which is not this machine's; --task_index=0 has"),
            ("worker 0", "use that index here"),
        ),
        first="which is not this machine's",
    ),
    "one task missing": Scenario(
        acts=(PS0, W0),
        doctor=(("ps 0", "worker 1 is missing: 11.11.11.48:20002 refuses connections, so nothing listens there"),),
        job=(
            ("ps 0", "worker 1: 11.11.11.48:20002 has refused connections for"),
            ("worker 0", "worker 1: 11.11.11.48:20002 has refused connections for"),
        ),
    ),
    "the server is missing": Scenario(
        acts=(W0, W1),
        doctor=(("worker 1", "ps 0 is missing: 11.11.11.47:10001 refuses connections"),),
        job=(("worker 1", "server 0: 11.11.11.47:10001 has refused connections for"),),
    ),
    "one host list differs in one port": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", "11.11.11.47:10009")),
        doctor=(
            ("ps 0", "ps 0 is 11.11.11.47:10001 on ps 0 and 11.11.11.47:10009 on worker 1; give every task the same"),
            ("worker 1", "the host lists differ: ps 0 is"),
        ),
        job=(
            ("ps 0", "the host lists differ: ps 0 is 11.11.11.47:10001 on ps 0 and 11.11.11.47:10009 on worker 1"),
            ("worker 1", "the host lists differ: ps 0 is 11.11.11.47:10009 on worker 1 and 11.11.11.47:10001 on"),
        ),
        first="the host lists differ",
    ),
    "wrong order of the servers": Scenario(
        acts=(
            Act("a", "ps 0", REPORT_3_PS),
            Act("b", "ps 1", REPORT_3_PS),
            Act("a", "worker 0", REPORT_3_PS),
            Act("b", "worker 1", "11.11.11.48:10002,11.11.11.47:10001"),
        ),
        doctor=(("worker 1", "the host lists differ in order:"), ("ps 0", "differ in order")),
        job=(
            ("worker 1", "11.11.11.48:10002 is server 1, not server 0"),
            ("worker 1", "the host lists or the task indices do not match"),
        ),
        first="differ in order",
    ),
    "wrong order of the workers": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", worker_hosts="11.11.11.48:20002,11.11.11.47:20001")),
        doctor=(
            ("worker 1", "worker 1 has the address 11.11.11.47:20001, which is not this machine's; --task_index=0"),
        ),
        job=(("worker 1", "worker 1 has the address 11.11.11.47:20001, which is not this machine's; --task_index=0"),),
    ),
    "another number of workers": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", worker_hosts=WORKERS + ",11.11.11.48:20003")),
        doctor=(("ps 0", "--worker_hosts has 2 addresses on ps 0 and 3 addresses on worker 1"),),
        job=(("ps 0", "number of workers"), ("worker 1", "number of workers")),
    ),
    "proxy set on one host": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", environment={"http_proxy": "http://127.0.0.1:9"})),
        doctor=(("worker 1", "http_proxy is set on this machine; Lockstep connects its tasks directly"),),
        job=(("worker 1", "http_proxy is set on this machine"), ("worker 1", "formed"), ("ps 0", "formed")),
        doctor_code=0,
    ),
    "port taken by another program": Scenario(
        acts=(PS0, W0, W1),
        others=(("b", listening("11.11.11.48", 20002, "SSH-2.0-test\r\n")),),
        doctor=(
            ("worker 1", "port 20002 is already taken on this machine by process"),
            (
                "ps 0",
                "11.11.11.48:20002, the address of worker 1, is another program, not Lockstep (it sends 'SSH-2.0-test",
            ),
        ),
        job=(
            ("worker 1", "port 20002 is already taken on this machine by process"),
            ("ps 0", "11.11.11.48:20002 is another program, not Lockstep (it sends 'SSH-2.0-test')"),
        ),
        first="port 20002",
    ),
    "a peer's port held by a program that says nothing": Scenario(
        acts=(PS0, W0),
        others=(("b", listening("11.11.11.48", 20002, "")),),
        doctor=(("ps 0", "11.11.11.48:20002, the address of worker 1, accepts connections but sends nothing"),),
        job=(("ps 0", "11.11.11.48:20002 accepts connections but sends nothing"),),
    ),
    "two workers with one index": Scenario(
        acts=(
            PS0,
            Act("a", "worker 0", environment={"PLAIN_HOLD": "1"}),
            Act("b", "worker 0", more=("--bind=11.11.11.48:20009",), name="second worker 0"),
        ),
        doctor=(("second worker 0", "worker 0 is already running at 11.11.11.47:20001 as process"),),
        job=(("worker 0|second worker 0", "two tasks were started with the same --job_name and --task_index"),),
    ),
    "another model": Scenario(
        acts=(PS0, W0, _with(W1, "--model=resnet50")),
        doctor=(("ps 0", "worker 1 has model=resnet50, ps 0, worker 0 have model=trivial; start all"),),
        job=(
            ("ps 0", "worker/replica:0/task:1 has batch_size=64"),
            ("worker 1", "start all tasks with the same value"),
        ),
    ),
    "another batch size": Scenario(
        acts=(PS0, W0, _with(W1, "--batch_size=7")),
        doctor=(("worker 0", "worker 1 has batch_size=7, "), ("worker 1", "have batch_size=32")),
        job=(("worker 0", "batch_size=7"), ("worker 1", "has batch_size=32")),
        first="worker 1 has batch_size=7",
    ),
    "another optimizer on the server": Scenario(
        acts=(_with(PS0, "--optimizer=momentum"), W0, W1),
        doctor=(("worker 0", "ps 0 has optimizer=momentum"),),
        job=(("worker 0", "has optimizer=momentum"),),
    ),
    "another version of Lockstep": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", environment={"PLAIN_VERSION": "9.9.9"})),
        doctor=(("ps 0", "worker 1 has lockstep version=9.9.9, "), ("worker 1", "install the same version everywhere")),
        job=(
            ("ps 0", "runs Lockstep 9.9.9, "),
            ("worker 1", "runs 9.9.9; install the same version"),
        ),
        first="lockstep version=9.9.9",
    ),
    "another version of torch": Scenario(
        acts=(PS0, W0, Act("b", "worker 1", environment={OTHER_TORCH: "9.9.9"})),
        doctor=(("ps 0", "worker 1 has torch version=9.9.9, "), ("worker 1", "install the same version everywhere")),
        job=(("ps 0", "torch version=9.9.9"), ("worker 1", "torch version=9.9.9")),
        first="torch version=9.9.9",
    ),
    "firewall in one direction": Scenario(
        acts=ALL,
        prepare=_drop_from_b,
        doctor=(
            (
                "worker 1",
                "worker 1 does not reach ps 0 at 11.11.11.47:10001, although ps 0 reaches worker 1: a firewall",
            ),
            ("ps 0", "worker 1 does not reach ps 0 at 11.11.11.47:10001, although"),
        ),
        job=(
            ("worker 1", "11.11.11.47:10001 has not answered for"),
            ("ps 0", "cannot reach server 0: from there, 11.11.11.47:10001 did not answer"),
        ),
        first="a firewall drops connections from worker 1 to",
    ),
    "firewall in both directions": Scenario(
        acts=ALL,
        prepare=_drop_both,
        doctor=(
            ("worker 1", "ps 0 cannot be reached from worker 1: 11.11.11.47:10001 did not answer within"),
            ("ps 0", "worker 1 cannot be reached from ps 0: 11.11.11.48:20002 did not answer within"),
        ),
        job=(
            ("worker 1", "11.11.11.47:10001 has not answered for"),
            ("ps 0", "11.11.11.48:20002 has not answered for"),
        ),
    ),
    "firewall that rejects": Scenario(
        acts=ALL,
        prepare=_reject_from_b,
        doctor=(("worker 1", "although ps 0 reaches worker 1: a firewall rejects connections from worker 1 to ps 0"),),
        job=(("ps 0", "cannot reach server 0: from there, 11.11.11.47:10001 refuses connections"),),
    ),
    "firewall that lets the listed ports through only": Scenario(
        acts=ALL,
        prepare=_only_listed_ports,
        doctor=(("worker 1", "worker 1 reaches ps 0 at 11.11.11.47:10001, but not at other ports"),),
        job=(("worker 1", "so let all TCP ports through between the hosts"),),
    ),
    "host that is not there": Scenario(
        acts=(Act("a", "ps 0", worker_hosts="11.11.11.47:20001,11.11.11.99:20002"),),
        doctor=(("ps 0", "11.11.11.99:20002 "),),
        job=(("ps 0", "worker 1: 11.11.11.99:20002 "),),
    ),
    "a peer's name means loopback": Scenario(
        acts=(Act("a", "ps 0", NAMED_PS), Act("b", "worker 1", NAMED_PS)),
        prepare=_names("11.11.11.47 nodea", "127.0.1.1 nodea"),
        doctor=(
            ("worker 1", "the host name 'nodea' of ps 0 resolves to 127.0.1.1 here, which is this machine itself"),
        ),
        job=(("worker 1", "here nodea resolves to 127.0.1.1, which is this machine itself; correct /etc/hosts"),),
        first="the host name 'nodea'",
    ),
    "the own name means loopback": Scenario(
        acts=(Act("b", "worker 1", worker_hosts=NAMED),),
        prepare=_names("", "11.11.11.47 nodea\n127.0.1.1 nodeb"),
        doctor=(("worker 1", "that name resolves to 127.0.1.1 on this machine, where no other machine can reach it"),),
        job=(("worker 1", "that name resolves to 127.0.1.1 on this machine, where no other machine can reach it"),),
    ),
    "a name with an IPv6 address only": Scenario(
        acts=(Act("a", "ps 0", NAMED_PS), Act("b", "worker 1", NAMED_PS)),
        prepare=_names("11.11.11.47 nodea", "fd11::47 nodea"),
        doctor=(("worker 1", "the host name 'nodea' of ps 0 resolves only to the IPv6 address fd11::47, where"),),
        job=(("worker 1", "nodea resolves only to the IPv6 address fd11::47"),),
    ),
    "a name that does not resolve": Scenario(
        acts=(Act("a", "ps 0", worker_hosts="nodea:20001,nodex:20002"),),
        prepare=_names("11.11.11.47 nodea", ""),
        doctor=(("ps 0", "the host name 'nodex' of worker 1 does not resolve on this machine"),),
        job=(("ps 0", "nodex:20002 cannot be looked up: the name 'nodex' does not resolve"),),
    ),
    "too few open files": Scenario(
        acts=(PS0, Act("b", "worker 1", before="ulimit -n 60")),
        doctor=(
            ("worker 1", "a process may open only 60 files here, but a task of this cluster needs about"),
            ("ps 0", "on b (worker 1): a process may open only 60 files here"),
        ),
        job=(("worker 1", "a process may open only 60 files here"),),
    ),
    "train_dir on a full disk": Scenario(
        acts=(PS0, _with(Act("a", "worker 0", before="mount -t tmpfs -o size=64k none /mnt"), "--train_dir=/mnt/run")),
        doctor=(("worker 0", "--train_dir=/mnt/run is on a disk with only 64 KiB free"),),
        job=(("worker 0", "--train_dir=/mnt/run is on a disk with only 64 KiB free"),),
    ),
    "train_dir that is read-only": Scenario(
        acts=(PS0, _with(Act("a", "worker 0", before="mount -t tmpfs -o ro none /mnt"), "--train_dir=/mnt/run")),
        doctor=(("worker 0", "--train_dir=/mnt/run cannot be written to (Read-only file system)"),),
        job=(("worker 0", "--train_dir=/mnt/run cannot be written to (Read-only file system)"),),
    ),
    "no GPU": Scenario(
        acts=(Act("b", "worker 1", more=("--device=gpu",), environment={"CUDA_VISIBLE_DEVICES": ""}),),
        doctor=(("worker 1", "--device=gpu --num_gpus=1 asks for more GPUs than the 0 that this machine shows"),),
        job=(("worker 1", "asks for more GPUs than the 0 that this machine shows"),),
    ),
    "index out of range": Scenario(
        acts=(Act("b", "worker 2"),),
        doctor=(("worker 2", "--task_index=2 is out of range: --worker_hosts has 2 addresses"),),
        job=(("worker 2", "--task_index=2 is out of range: --worker_hosts has 2 addresses"),),
    ),
    "one address for two tasks": Scenario(
        acts=(Act("a", "ps 0", worker_hosts="11.11.11.47:10001,11.11.11.48:20002"),),
        doctor=(("ps 0", "11.11.11.47:10001 is given for both ps 0 and worker 0"),),
        job=(("ps 0", "11.11.11.47:10001 is given for both ps 0 and worker 0"),),
    ),
    "an address to bind that is not this machine's": Scenario(
        acts=(_with(W1, "--bind=11.11.11.47"),),
        doctor=(("worker 1", "--bind=11.11.11.47 is not an address of this machine"),),
        job=(("worker 1", "--bind=11.11.11.47 is not an address of this machine"),),
    ),
    "report 1: a worker's host is another one": Scenario(
        acts=(
            Act("a", "ps 0", "12.12.12.43:20000", "12.12.12.44:20000,12.12.12.41:20000"),
            Act("b", "worker 1", "12.12.12.43:20000", "12.12.12.44:20000,12.12.12.41:20000"),
        ),
        doctor=(
            ("worker 1", "worker 1 has the address 12.12.12.41:20000, which is not this machine's; --task_index=0 has"),
        ),
        job=(
            ("worker 1", "worker 1 has the address 12.12.12.41:20000, which is not this machine's; --task_index=0 has"),
            ("ps 0", "worker 1: 12.12.12.41:20000 "),
        ),
    ),
}
