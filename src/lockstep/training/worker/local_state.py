"""A worker's state besides the parameters: buffers (batch-norm statistics), random numbers, the loss scale.

A lost worker gets it back in its next incarnation, and a checkpoint holds it for each worker, so it is reported in
every step: small, as safetensors, and one flat tensor per dtype, because a model has hundreds of small buffers.

It must be the state of exactly that step, but on a GPU that step is still being computed when its state is requested.
So capturing it has two halves: the training thread only queues copies, behind the step's kernels and before those of
the next step, and another thread waits for them. The coordinator needs a step's state when the next step is applied.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.training.worker.loss_scale import LossScale

MOST_BYTES = 8 << 20
"""It is sent in a control message, in every step."""
HELD_BYTES = 14 << 20
"""Of all workers together, where a deputy of the coordinator holds them: it gets them in one message."""


def most_bytes(workers: int, *, held: bool) -> int:
    """How large the state of one worker may be; ``held``: by a deputy."""
    return min(MOST_BYTES, HELD_BYTES // workers) if held else MOST_BYTES


DESCRIPTION = "model"

TakenState = Callable[[], bytes]
"""The state of one step, packed when called; that may wait for a GPU, and may happen on any thread."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the host knows about a state without asking a GPU."""

    random: dict[str, Tensor]
    scale: tuple[float, int, int]

    def equals(self, other: _Known) -> bool:
        same = self.scale == other.scale and self.random.keys() == other.random.keys()
        return same and all(torch.equal(known, other.random[name]) for name, known in self.random.items())

    def tensors(self) -> dict[str, Tensor]:
        return {**self.random, "scale": torch.tensor(self.scale, dtype=torch.float64)}


def _describe(model: nn.Module) -> dict[str, list[list[object]]]:
    """Names and shapes of the parameters and buffers, the latter in the order in which they are packed."""
    kept = model.state_dict().keys()
    return {
        "parameters": [[name, list(p.shape)] for name, p in model.named_parameters() if p.requires_grad],
        "buffers": [
            [name, list(b.shape), str(b.dtype).removeprefix("torch."), name in kept]
            for name, b in model.named_buffers()
        ],
    }


class StateDoesNotFitError(ValueError):
    """The state was saved for another model, or is too large; the text is a plain sentence."""


class WorkerState:
    """Captures the state of one worker's models, and restores it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device],
        scale: LossScale,
        *,
        describes: bool = False,
        held_of: int = 0,
    ) -> None:
        """``describes``: include the names of the model's tensors, so that a checkpoint can be used without the model.
        Only the chief does that. ``held_of``: how many workers' states a deputy holds; 0: there is none."""
        self._held_of = held_of
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._metadata = {DESCRIPTION: json.dumps(_describe(models[0]))} if describes else {}
        self._devices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._scale = scale
        self._last: tuple[_Known, bytes] | None = None

    def begin_taking(self) -> TakenState:
        """The state after everything that this thread has computed or queued so far; never waits for a GPU.

        A model without buffers that draws no random numbers is not packed again.
        """
        known = self._known()
        if not self._buffers:
            packed = self._packed_without_buffers(known)
            return lambda: packed
        self._refuse_if_large(sum(buffer.nbytes for buffer in self._buffers))
        copies = {f"buffers/{dtype}": _Copies(buffers) for dtype, buffers in self._by_dtype().items()}
        metadata = self._metadata

        def pack() -> bytes:
            return save({**known.tensors(), **{name: one.flat() for name, one in copies.items()}}, metadata)

        return pack

    def take(self) -> bytes:
        """The state as bytes, now. Waits for a GPU."""
        return self.begin_taking()()

    def _known(self) -> _Known:
        random = {"random": torch.get_rng_state()}
        for device in self._devices:
            # A seed and a count that the host keeps: no need to ask the GPU.
            random[f"random/cuda:{device}"] = torch.cuda.get_rng_state(device)
        return _Known(random, self._scale.numbers())

    def _packed_without_buffers(self, known: _Known) -> bytes:
        if self._last is None or not known.equals(self._last[0]):
            self._last = known, save(known.tensors(), self._metadata)
        return self._last[1]

    def _refuse_if_large(self, nbytes: int) -> None:
        most = most_bytes(self._held_of, held=True) if self._held_of else MOST_BYTES
        if nbytes <= most:
            return
        remedy = "use --on_worker_loss=abort without checkpoints"
        if nbytes <= MOST_BYTES:
            remedy = f"with --server_replicas=1 another server holds those of all {self._held_of} workers; leave it out"
        raise StateDoesNotFitError(
            f"this model has {nbytes / (1 << 20):.1f} MiB of buffers, but a worker reports at most "
            f"{most / (1 << 20):.1f} MiB per step; {remedy}"
        )

    def put(self, packed: bytes) -> None:
        """Continue from this state. StateDoesNotFitError if it belongs to another model, or is damaged; then nothing
        changes."""
        try:
            tensors = load(packed)
        except SafetensorError as error:
            raise StateDoesNotFitError(f"the local state saved for this worker is damaged: {error}") from error
        flat = {name.removeprefix("buffers/"): t for name, t in tensors.items() if name.startswith("buffers/")}
        wanted = self._by_dtype()
        sizes = {dtype: sum(b.numel() for b in buffers) for dtype, buffers in wanted.items()}
        if "random" not in tensors or "scale" not in tensors or {d: t.numel() for d, t in flat.items()} != sizes:
            raise StateDoesNotFitError("the local state saved for this worker belongs to another model")
        scale = tensors["scale"].to(torch.float64).flatten()
        if scale.numel() != len(self._scale.numbers()) or not scale.isfinite().all():
            raise StateDoesNotFitError("the local state saved for this worker has no loss scale")
        try:
            torch.set_rng_state(tensors["random"])
        except (RuntimeError, TypeError) as error:
            raise StateDoesNotFitError("the local state saved for this worker has no random numbers") from error
        for device in self._devices:
            if (state := tensors.get(f"random/cuda:{device}")) is not None:
                torch.cuda.set_rng_state(state, device)
        self._scale.set_numbers(*scale.tolist())
        with torch.no_grad():
            for dtype, buffers in wanted.items():
                offset = 0
                for buffer in buffers:
                    buffer.copy_(flat[dtype][offset : offset + buffer.numel()].view(buffer.shape))
                    offset += buffer.numel()

    def _by_dtype(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for buffer in self._buffers:
            found.setdefault(str(buffer.dtype).removeprefix("torch."), []).append(buffer)
        return found


class _Copies:
    """Copies of some buffers: made at once on the CPU, and on a GPU queued there, into pinned memory."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._parts: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        # The towers of a worker may be on several devices; one part per device, in the order of the buffers.
        for device, group in itertools.groupby(buffers, lambda buffer: buffer.device):
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in group])
            self._parts.append(self._on_host(flat, device) if device.type == "cuda" else flat)

    def _on_host(self, flat: Tensor, device: torch.device) -> Tensor:
        """On the computation's stream, so behind this step and before the next one changes the buffers."""
        # Fresh memory each time: the previous step's may not have been read yet. Torch keeps pinned memory for reuse.
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        with torch.cuda.device(device):
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        self._events.append(event)
        return host

    def flat(self) -> Tensor:
        """All of them; waits until they have arrived."""
        for event in self._events:
            event.synchronize()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
