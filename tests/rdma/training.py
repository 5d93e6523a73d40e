"""Trainings in the lab: the command lines of the report about ``grpc+verbs``, with a small model."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from rdma.lab.machine import Done, Job, LabError, Machine
from rdma.lab.pair import LOCKSTEP, Pair

SMALL: Final = "--model=trivial --data_name=cifar10 --batch_size=4"
LARGE: Final = "--model=trivial --batch_size=2"
"""About 17 MB of parameters: a step takes long enough to be disturbed in its middle."""

HOSTS: Final = "--ps_hosts 12.12.12.43:20000 --worker_hosts 12.12.12.44:20000,12.12.12.41:20000"
LINE: Final = (
    "bench {hosts} {model} --variable_update=parameter_server --local_parameter_device=cpu --job_name={job} "
    "--task_index={index} {rest} --server_protocol {protocol}"
)
DEVICE_COUNTERS: Final = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
DROP_RDMA: Final = (
    "tc qdisc add dev eth0 clsact; "
    "tc filter add dev eth0 ingress protocol ip prio 1 flower ip_proto udp dst_port 4791 action drop; "
    "tc filter add dev eth0 ingress protocol ipv6 prio 2 flower ip_proto udp dst_port 4791 action drop"
)
"""RoCE only, by IPv4 and IPv6, where it arrives: dropped where it leaves, it would be an error at once."""
STARTED_SECONDS: Final = 150.0


@dataclass(slots=True)
class Training:
    """One run with the addresses of the report: server and worker 1 on the first host, worker 0 on the second."""

    server: Job
    workers: tuple[Job, Job]

    def jobs(self) -> tuple[Job, Job, Job]:
        return (self.server, *self.workers)

    def wait(self, seconds: float) -> list[Done]:
        """How all three ended."""
        deadline = time.monotonic() + seconds
        return [job.wait(max(1.0, deadline - time.monotonic())) for job in self.jobs()]

    def wait_well(self, seconds: float) -> list[str]:
        """All three ended well; what they said."""
        return [done.ok() for done in self.wait(seconds)]

    def wait_for_step(self, step: int, seconds: float = STARTED_SECONDS) -> None:
        """Until the chief has printed this timed step."""
        self.workers[0].wait_for(f"\n{step}\timages/sec", seconds)


def start(pair: Pair, protocol: str, model: str, batches: int, more: str = "", folder: str = "") -> Training:
    """Start all three tasks. ``folder``: where the chief writes the trained parameters."""
    rest = f"--device=cpu --num_gpus=1 --num_batches={batches} --num_warmup_batches=1 --display_every=1 {more}"
    written = f"--train_dir={folder}" if folder else ""

    def begin(machine: Machine, job: str, index: int, extra: str) -> Job:
        line = LINE.format(hosts=HOSTS, model=model, job=job, index=index, rest=extra, protocol=protocol)
        return machine.start(LOCKSTEP + line)

    server = begin(pair.first, "ps", 0, rest)
    chief = begin(pair.second, "worker", 0, f"{rest} {written}")
    other = begin(pair.first, "worker", 1, f"{rest} {written}")
    return Training(server, (chief, other))


def counters(machine: Machine) -> dict[str, int]:
    """What the RDMA device of a host has counted so far."""
    said = machine.run(f"cd {DEVICE_COUNTERS} && grep -H . *", 20).ok()
    return {name: int(value) for name, _, value in (line.partition(":") for line in said.splitlines())}


def digest(machine: Machine, folder: str) -> str:
    """A digest of the trained parameters."""
    return machine.run(f"sha256sum {folder}/final.safetensors", 20).ok().split()[0]


def rdma_bytes(counted_before: dict[str, int], counted_after: dict[str, int]) -> int:
    """At least so many bytes went through the device: packets carry up to 4096 each."""
    return (counted_after["sent_pkts"] - counted_before["sent_pkts"]) * 4096


def seconds_until(job: Job, pattern: str, since: float, seconds: float) -> float:
    """How long after ``since`` a line that matches came up in the output of a job."""
    deadline = since + seconds
    while time.monotonic() < deadline:
        if re.search(pattern, job.output()):
            return time.monotonic() - since
        time.sleep(0.05)
    raise LabError(f"not within {seconds:g} s: {pattern!r}\n{job.output()[-3000:]}")
