"""What runs inside a watched rank: torch loads it at the end of ``import torch``, as it loads any backend.

The environment of the job need not have Lockstep: this file is copied into a temporary folder, and uses the standard
library and torch only. Nothing here may ever disturb the program: every error ends what raised it, and is not shown.

What it does: it starts torch's own worker server on a Unix socket (which gives the flight recorder without the
interpreter's lock), counts optimizer steps in a small shared file, and notes what only the process itself knows: the
members of its groups, which parameters are in which bucket, and the error that ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

FOLDER_VARIABLE = "LOCKSTEP_WATCH_FOLDER"
RING_VARIABLE, OLD_RING_VARIABLE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many calls the recorder keeps. Newer torch warns about the old name, older torch knows no other."""
MODULE = "lockstep_watch_inject"
"""Its name in the folder that a job finds it in."""

STATUS = struct.Struct("<8sqddqq")
"""Mark, optimizer steps, when the last one ended, last sign of the interpreter, how it leaves, calls of FSDP so far."""
MARK = b"lockwat1"
STEP_AT, STEPPED_AT, BEAT_AT, LEAVING_AT, CALLS_AT = 8, 16, 24, 32, 40
RUNNING, EXITING, RAISED = 0, 1, 2
RING_AT, RING, SLOT = 64, 64, 192
"""After the status: the modules of the last collectives of FSDP, one slot each."""
STATUS_BYTES = RING_AT + RING * SLOT

DUMPS = (".dump", ".nccl")
"""Endings of what a rank leaves of its recorders: NCCL has one of its own."""
BEAT_SECONDS = 0.25
MOST_NAMES = 12
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_GATHER, _REDUCE = "foreach_all_gather", "foreach_reduce"
_rank: _Rank | None = None


def start() -> None:
    """The entry point that torch calls."""
    with contextlib.suppress(Exception):
        folder = os.environ.get(FOLDER_VARIABLE, "")
        if folder and os.path.isdir(folder) and not _launches():
            _keep_calls()
            if os.environ.get("RANK", "").isdigit() and not _is_helper():
                _register(folder, int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1")))
            _begin_thread(folder)
            os.register_at_fork(after_in_child=lambda: _after_fork(folder))


def _begin_thread(folder: str) -> None:
    threading.Thread(target=_run, args=(folder,), name="lockstep watch", daemon=True).start()


def _after_fork(folder: str) -> None:
    """Threads do not survive a fork. A child of a rank is its helper; any other may become a rank itself."""
    if _rank is None:
        with contextlib.suppress(Exception):
            _begin_thread(folder)


def _keep_calls() -> None:
    """Under the name that this torch knows; it reads it when the first group is made."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if RING_VARIABLE in os.environ and version < (2, 9):
        os.environ.setdefault(OLD_RING_VARIABLE, os.environ[RING_VARIABLE])


def _launches() -> bool:
    """torchrun itself imports torch, and some platforms give it the variables of a rank."""
    if "torch.distributed.run" in getattr(sys, "orig_argv", ()):
        return True
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "torchrun"


def _is_helper() -> bool:
    """A process that the program has started, such as one that loads data."""
    import multiprocessing

    return multiprocessing.parent_process() is not None


def _register(folder: str, rank: int, world: int) -> None:
    global _rank
    if _rank is None:
        _rank = _Rank(folder, rank, world)


def _run(folder: str) -> None:
    while os.path.isdir(folder):
        time.sleep(BEAT_SECONDS)
        with contextlib.suppress(Exception):
            if _rank is None:
                c10d = sys.modules.get("torch.distributed.distributed_c10d")
                if c10d is not None and c10d.is_initialized():
                    _register(folder, c10d.get_rank(), c10d.get_world_size())
            else:
                _rank.beat()


class _Rank:
    """This process as a rank."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        self.pid = os.getpid()
        self.path = os.path.join(folder, f"rank{rank}.{self.pid}")
        self.facts: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "local": int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
            "pid": self.pid,
            "master": os.environ.get("MASTER_ADDR", ""),
            "port": os.environ.get("MASTER_PORT", ""),
            "groups": {},
            "buckets": [],
            "error": "",
            "place": "",
            "raised": 0.0,
        }
        self.named = False
        self.wrapped = False
        self.counts: Any = weakref.WeakKeyDictionary()
        with open(self.path + ".status", "w+b") as file:
            file.truncate(STATUS_BYTES)
            self.shared = mmap.mmap(file.fileno(), STATUS_BYTES)
        STATUS.pack_into(self.shared, 0, MARK, 0, 0.0, time.time(), RUNNING, 0)
        self.server = _quietly(self._serve)
        self._count_steps()
        self.write()
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            with contextlib.suppress(Exception):
                self.raised(kind, error, trace)
            previous(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self.leave)

    def _serve(self) -> Any:
        from torch._C._distributed_c10d import _WorkerServer

        path = self.path + ".sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return _WorkerServer(path)

    def _count_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        counts, shared, pid = self.counts, self.shared, self.pid
        pack, clock = struct.Struct("<qd").pack_into, time.time

        def stepped(optimizer: Any, _args: Any, _more: Any) -> None:
            with contextlib.suppress(Exception):
                counts[optimizer] = count = counts.get(optimizer, 0) + 1
                if os.getpid() == pid:
                    # Of several optimizers, the one that has made the most steps counts.
                    pack(shared, STEP_AT, max(count, *struct.unpack_from("<q", shared, STEP_AT)), clock())

        register_optimizer_step_post_hook(stepped)

    def beat(self) -> None:
        """Four times a second, on a thread of its own, while native code does not keep the interpreter."""
        struct.pack_into("<d", self.shared, BEAT_AT, time.time())
        groups = _groups()
        changed = groups != self.facts["groups"]
        self.facts["groups"] = groups
        if not self.wrapped and _FSDP in sys.modules:
            self.wrapped = True
            self._wrap_fsdp(sys.modules[_FSDP])
        (steps,) = struct.unpack_from("<q", self.shared, STEP_AT)
        if not self.named and steps >= 2:  # DDP has its final buckets once the second step has begun
            self.named = True
            self.facts["buckets"] = _buckets()
            changed = True
        if changed:
            self.write()

    def _wrap_fsdp(self, module: Any) -> None:
        """Each of these makes one collective, and knows for which parameters."""
        for name in (_GATHER, _REDUCE):
            with contextlib.suppress(AttributeError):
                setattr(module, name, self._noting(getattr(module, name), b"g" if name == _GATHER else b"r"))

    def _noting(self, function: Callable[..., Any], kind: bytes) -> Callable[..., Any]:
        def noting(params: Any, *args: Any, **more: Any) -> Any:
            with contextlib.suppress(Exception):
                (count,) = struct.unpack_from("<q", self.shared, CALLS_AT)
                names = [str(one._param_fqn or "") for one in params[:3]]
                at = RING_AT + count % RING * SLOT
                self.shared[at : at + SLOT] = (kind + " ".join(names).encode()).ljust(SLOT, b"\0")[:SLOT]
                struct.pack_into("<q", self.shared, CALLS_AT, count + 1)
            return function(params, *args, **more)

        return noting

    def write(self) -> None:
        beside = self.path + ".new"
        with open(beside, "w") as file:
            json.dump(self.facts, file)
        os.replace(beside, self.path + ".json")

    def raised(self, kind: Any, error: BaseException, trace: Any) -> None:
        """The program ends by an error: leave it, and the recorder's calls, for whoever watches."""
        if os.getpid() != self.pid:
            return
        self.facts["error"] = f"{kind.__name__}: {error}"[:2000]
        self.facts["place"] = _place(trace)
        self.facts["raised"] = time.time()
        self.write()
        self._dump()
        struct.pack_into("<q", self.shared, LEAVING_AT, RAISED)

    def leave(self) -> None:
        if os.getpid() != self.pid:
            return
        with contextlib.suppress(Exception):
            if struct.unpack_from("<q", self.shared, LEAVING_AT)[0] == RUNNING:
                self._dump()
                struct.pack_into("<q", self.shared, LEAVING_AT, EXITING)
        with contextlib.suppress(Exception):
            _quietly(self.server.shutdown)
            os.unlink(self.path + ".sock")

    def _dump(self) -> None:
        from torch._C import _distributed_c10d as c10d

        for ending, name in zip(DUMPS, ("_dump_fr_trace_json", "_dump_nccl_trace_json"), strict=True):
            with contextlib.suppress(Exception):  # torch without CUDA has no recorder of NCCL; one may fail by itself
                data = getattr(c10d, name)()
                beside = self.path + ".part"
                with open(beside, "wb") as file:
                    file.write(data if isinstance(data, bytes) else data.encode())
                os.replace(beside, self.path + ending)


def _quietly(act: Callable[[], Any]) -> Any:
    """Torch says on stderr that its server listens, which is nobody's business here."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        return act()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _groups() -> dict[str, list[int]]:
    """Members of each group, by its name: gloo's recorder does not say."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    world: Any = c10d._world
    return {str(world.pg_names[group]): sorted(ranks) for group, ranks in list(world.pg_group_ranks.items())}


def _buckets() -> list[dict[str, Any]]:
    """The parameters in each bucket of DDP."""
    import gc

    from torch.nn.parallel import DistributedDataParallel

    found: list[dict[str, Any]] = []
    for model in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
        data = model._get_ddp_logging_data()
        listed = data.get("rebuilt_per_bucket_param_indices") or data.get("initial_per_bucket_param_indices") or ""
        names = [(name, one) for name, one in model.module.named_parameters() if one.requires_grad]
        for bucket in str(listed).split(","):
            places = [int(place) for place in bucket.split() if place.isdigit()]
            inside = [names[place] for place in places if place < len(names)]
            found.append(
                {"elements": sum(one.numel() for _, one in inside), "names": [name for name, _ in inside[:MOST_NAMES]]}
            )
    return found


def _place(trace: Any) -> str:
    """The innermost line of the program itself."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages" not in code.co_filename and os.sep + "torch" + os.sep not in code.co_filename:
            found = f"{code.co_name} ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found[:500]
