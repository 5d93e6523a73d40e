"""Parsers of what people and launchers write: flags, host lists, names, variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from fuzz.engine import Target
from lockstep.benchmark.settings.schedules import BadSchedule, parse_piecewise
from lockstep.cli.flags import parse_bench, parse_doctor
from lockstep.doctor.machine import read_nvidia_smi
from lockstep.errors import BadInput, HelpAsked
from lockstep.foreign import JsonError, plain, plain_lines, read_json
from lockstep.library.launcher import launched_by
from lockstep.protocol.core.faults import Die, parse_faults, to_text
from lockstep.protocol.core.ids import TaskId, worker
from lockstep.protocol.core.keys import TensorKey
from lockstep.runtime.startup.tf_config import read_tf_config
from lockstep.sim.faults import Crash, parse_fault
from lockstep.sim.faults import to_text as to_fault
from lockstep.transports.control.addresses import AddressError, parse_address, parse_bind
from lockstep.transports.control.tcp_probe import _banner

_HOSTS = "--ps_hosts=10.0.0.1:20000 --worker_hosts=10.0.0.2:20000,[::1]:20001,node3:20000"
_LINES = (
    f"{_HOSTS} --job_name=worker --task_index=1 --model=resnet50 --batch_size=64 --device=cpu",
    f"{_HOSTS} --job_name=ps --task_index=0 --server_protocol=grpc+shm --variable_update=parameter_server",
    "--ps=1 --workers=2 --model=lenet --num_batches=10 --optimizer=momentum --init_learning_rate=0.02",
    "--model=alexnet --piecewise_learning_rate_schedule=0.1;30;0.01 --weight_decay=1e-4 --nodistortions",
)
_VARIABLES = (
    "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500",
    "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NODELIST=node[01-03,7],b1 SLURM_JOB_ID=7 SLURM_STEP_ID=0",
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_HOSTNAME=a MASTER_ADDR=a MASTER_PORT=1",
)


def _text(data: bytes) -> str:
    """As Python has the words of a command line: what is not UTF-8 becomes lone surrogates."""
    return data.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _shown(text: str) -> None:
    for line in (plain(text), *plain_lines(text.split("\n")).split("\n")):
        assert line.isprintable() or not _OBEYED.search(line)


_OBEYED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LIMIT = 512
"""Of a command line, or of a variable: for each word that is no flag, similar ones are looked for."""


def text_targets() -> Iterator[Target]:
    lines = [line.encode() for line in _LINES]
    spoken = (BadInput, HelpAsked)
    yield _target("flags of bench", lambda text: parse_bench(text.split(" "), {}), lines, *spoken)
    yield _target("flags of doctor", lambda text: parse_doctor(text.split(" "), {}), lines[:2], *spoken)
    hosts = [b"10.0.0.1:20000", b"[fe80::1%eth0]:1", b"node-3.example:65535"]
    yield _target("address", parse_address, hosts, AddressError)
    yield _target("address to bind", lambda text: parse_bind(text, 1), [*hosts, b"0.0.0.0", b"[::]"], AddressError)
    yield _target("task name", TaskId.parse, [b"/job:ps/replica:0/task:12"], ValueError)
    key = str(TensorKey(worker(0), 1, worker(1), "gradient/bucket_0")).encode()
    yield _target("tensor key", TensorKey.parse, [key], ValueError)
    fault = to_text(Die(str(worker(1)), 3)).encode()
    yield _target("planted faults", parse_faults, [fault, fault + b"\n" + fault], ValueError)
    yield _target(
        "faults of the simulator", parse_fault, [fault, to_fault(Crash(str(worker(1)), 3.5)).encode()], ValueError
    )
    yield _target("JSON", read_json, [b'{"a": [1, 2.5, null, "b"], "c": {"d": true}}', b"[[], {}]"], JsonError)
    yield _target("text for a terminal", _shown, [b"a line\n\x1b[31mred\x1b[0m", "\u202ereversed".encode()])
    smi = b"CUDA Version                              : 12.6\n\nAttached GPUs                             : 2\n"
    yield _target("output of nvidia-smi", read_nvidia_smi, [smi])
    yield _target("first words of another program", lambda text: _banner(_bytes(text)), [b"SSH-2.0-OpenSSH_9.2\r\n"])
    yield _target("learning rates", parse_piecewise, [b"0.1;30;0.01;60;0.001"], BadSchedule)
    told = b'{"cluster":{"ps":["a:1"],"worker":{"0":"b:1","1":"c:1"}},"task":{"type":"worker","index":1}}'
    yield _target("TF_CONFIG", lambda text: read_tf_config({"TF_CONFIG": text}), [told], BadInput)
    yield _target("variables of launchers", _launched, [line.encode() for line in _VARIABLES], BadInput)


def _target(name: str, parse: Callable[[str], object], seeds: list[bytes], *documented: type[BaseException]) -> Target:
    return Target(name, lambda data: parse(_text(data)), seeds, documented, LIMIT)


def _launched(text: str) -> None:
    pairs = [word.partition("=") for word in text.split(" ")]
    launched_by({name: value for name, _, value in pairs})
