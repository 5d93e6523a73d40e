"""What a job needs of a machine, as a lower bound: with less it cannot run, with this much it may."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lockstep.protocol.core.ids import Role

MEBIBYTE: Final = 1 << 20

PARAMETERS: Final = MappingProxyType(
    {
        ("imagenet", "trivial"): 4_263_877,
        ("imagenet", "lenet"): 2_173_353,
        ("imagenet", "alexnet"): 61_842_345,
        ("imagenet", "overfeat"): 145_924_969,
        ("imagenet", "vgg11"): 132_867_433,
        ("imagenet", "vgg16"): 138_361_641,
        ("imagenet", "vgg19"): 143_671_337,
        ("imagenet", "googlenet"): 6_999_577,
        ("imagenet", "inception3"): 23_819_401,
        ("imagenet", "inception4"): 42_649_769,
        ("imagenet", "resnet50"): 25_559_081,
        ("imagenet", "resnet50_v1.5"): 25_559_081,
        ("imagenet", "resnet50_v2"): 25_551_529,
        ("imagenet", "resnet101"): 44_551_209,
        ("imagenet", "resnet101_v1.5"): 44_551_209,
        ("imagenet", "resnet101_v2"): 44_543_657,
        ("imagenet", "resnet152"): 60_194_857,
        ("imagenet", "resnet152_v1.5"): 60_194_857,
        ("imagenet", "resnet152_v2"): 60_187_305,
        ("imagenet", "mobilenet"): 3_506_153,
        ("imagenet", "nasnet"): 5_291_035,
        ("imagenet", "nasnetlarge"): 88_757_183,
    }
)
"""Parameter counts of the large models, as in ``docs/models.md`` (a test compares them). Other models count as 0."""

_BYTES: Final = 4
_TASK_BYTES: Final = 150 * MEBIBYTE
"""What a process that has imported torch uses before it does anything."""
_FILES_OF_A_TASK: Final = 64
_FILES_OF_A_LINK: Final = 8


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes and counts, for all tasks of one host together; only ``open_files`` is per process."""

    memory: int
    shared_memory: int
    locked_memory: int
    disk: int
    open_files: int


def needs_of(roles: tuple[Role, ...], servers: int, workers: int, model: str, data_name: str) -> Needs:
    """What the tasks of one host need; ``roles`` has one entry per task."""
    model_bytes = PARAMETERS.get((data_name, model), 0) * _BYTES
    shard = model_bytes // max(servers, 1)
    # A server holds two versions of its shard and the gradients of each worker; a worker has parameters, gradients,
    # and registered copies of both.
    of_server = shard * (2 + workers)
    of_worker = model_bytes * 4
    moved = sum(of_server if role is Role.SERVER else 2 * model_bytes for role in roles)
    memory = sum(_TASK_BYTES + (of_server if role is Role.SERVER else of_worker) for role in roles)
    return Needs(
        memory=memory,
        shared_memory=moved,
        locked_memory=max((of_server if role is Role.SERVER else 2 * model_bytes for role in roles), default=0),
        disk=max(model_bytes, MEBIBYTE),
        open_files=_FILES_OF_A_TASK + _FILES_OF_A_LINK * (servers + workers),
    )


def size(count: int) -> str:
    """``1.5 GiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MEBIBYTE), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"
