"""Trainings in the lab: the command lines of the report about ``grpc+verbs``, with a small model and batch, on CPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rdma.lab.machine import Job, Machine
from rdma.lab.network import ENVIRONMENT, Lab

CLUSTER: Final = (
    "--ps_hosts 12.12.12.43:20000 --worker_hosts 12.12.12.44:20000,12.12.12.41:20000 --batch_size=1 --model=trivial "
    "--data_name=cifar10 --variable_update=parameter_server --local_parameter_device=cpu"
)
SERVER: Final = (
    "CUDA_VISIBLE_DEVICES='' exec python3 -m lockstep bench {cluster} --job_name=ps --task_index=0 "
    "--server_protocol {protocol} --device=cpu"
)
WORKER: Final = (
    "CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7' exec python3 -m lockstep bench {cluster} --job_name=worker "
    "--task_index={index} --num_gpus=8 --data_dir=/data/imagenet_data/ --train_dir=/data/imagenet_train/ "
    "--server_protocol {protocol} --device=cpu"
)
"""Word for word those of the report but for the program, the model (with the data set that makes it small), the batch
and the device."""

STEPS: Final = 100
"""The default of ``--num_batches``; ten more come before them."""
PARAMETER_BYTES: Final = 4 * 52_235
"""Of the small model."""
PACKET_BYTES: Final = 4096
"""The most that one packet of these devices carries."""

MAKE_PICTURES: Final = """
import os, pickle, numpy
os.makedirs("/data/imagenet_data", exist_ok=True)
generator = numpy.random.default_rng(0)
for name in [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]:
    pixels = generator.integers(0, 256, (40, 3072), dtype=numpy.uint8)
    labels = [int(label) for label in generator.integers(0, 10, 40)]
    with open(f"/data/imagenet_data/{name}", "wb") as file:
        pickle.dump({b"data": pixels, b"labels": labels}, file)
"""
"""The report has real pictures, so these are files, too: CIFAR-10's, which are small."""

DEVICE_COUNTERS: Final = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
DROP_RDMA: Final = (
    "tc filter add dev eth0 ingress protocol ip prio 1 flower ip_proto udp dst_port 4791 action drop; "
    "tc filter add dev eth0 ingress protocol ipv6 prio 2 flower ip_proto udp dst_port 4791 action drop"
)
"""RoCE only, by IPv4 and IPv6, where it arrives: dropped where it leaves, it would be an error at once."""
BAD_WIRE: Final = "tc qdisc change dev eth0 root netem loss 1% corrupt 1%"
SLOW_WIRE: Final = "tc qdisc change dev eth0 root netem rate 4mbit"
"""A gradient takes 0.4 s to leave; the device waits for a second before it sends a packet again."""


@dataclass(slots=True)
class Training:
    """One run with the addresses of the report: its server on the first host, its workers on the others."""

    lab: Lab
    protocol: str
    server: Job = field(init=False)
    chief: Job = field(init=False)
    other: Job = field(init=False)

    def __post_init__(self) -> None:
        there = "rm -rf /data/imagenet_train; [ -e /data/imagenet_data/test_batch ]"
        pictures = f"{ENVIRONMENT} {there} || exec python3 -c '{MAKE_PICTURES}'"
        for made in [machine.start(pictures) for machine in self.lab.hosts[1:]]:
            made.wait(120).ok()
        self.server = self.lab.first.start(ENVIRONMENT + SERVER.format(cluster=CLUSTER, protocol=self.protocol))
        self.chief = self.start_worker(0)
        self.other = self.start_worker(1)

    def start_worker(self, index: int) -> Job:
        line = WORKER.format(cluster=CLUSTER, index=index, protocol=self.protocol)
        return self.lab.hosts[1 + index].start(ENVIRONMENT + line)

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        """Until the chief has printed this timed step: the first one, and every tenth."""
        self.chief.wait_for(rf"\n{step}\timages/sec", seconds)

    def wait_well(self, seconds: float) -> None:
        """All of them end well."""
        for job in (self.chief, self.other, self.server):
            job.wait(seconds).ok()

    def digest(self) -> str:
        """A digest of the trained parameters."""
        return self.lab.second.run("sha256sum /data/imagenet_train/final.safetensors", 20).ok().output.split()[0]


def counters(machine: Machine) -> dict[str, int]:
    """What the RDMA device of a host has counted so far."""
    said = machine.run(f"cd {DEVICE_COUNTERS} && grep -H . *", 20).ok().output
    return {name: int(value) for name, _, value in (line.partition(":") for line in said.splitlines())}


def packets_sent(lab: Lab) -> list[int]:
    """How many packets of RDMA have left each of the hosts so far."""
    return [counters(machine)["sent_pkts"] for machine in lab.hosts]


def repeated(lab: Lab) -> int:
    """How often packets were missing, or came again."""
    names = ("completer_retry_err", "rcvd_seq_err", "out_of_seq_request", "duplicate_request")
    return sum(counters(machine)[name] for machine in lab.hosts for name in names)
