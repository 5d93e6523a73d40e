"""What a worker has beside the parameters: buffers (batch-norm statistics), random numbers, the loss scale.

A worker that is lost gets it back in its next life, and a checkpoint holds it for each worker, so it is told in every
step: small, as safetensors, and one flat tensor for each dtype, because a model has hundreds of small buffers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.training.benchmark.scaling import LossScale

MOST_BYTES = 8 << 20
"""It travels in a control message, in every step."""


DESCRIPTION = "model"


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
    """A state that was kept for another model, or too large a one; the text is a plain sentence."""


class LocalState:
    """Takes the state of one worker's models, and puts it back."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device],
        scale: LossScale,
        *,
        describes: bool = False,
    ) -> None:
        """``describes``: say what the model's tensors are called, so that a checkpoint can be used without the model.
        One worker does that, the chief."""
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._metadata = {DESCRIPTION: json.dumps(_describe(models[0]))} if describes else {}
        self._devices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._scale = scale
        self._last: tuple[Tensor, tuple[float, int, int]] | None = None
        self._packed = b""

    def take(self) -> bytes:
        """The state as bytes. A model without buffers that draws no random numbers is not packed again."""
        random, scale = torch.get_rng_state(), self._scale.numbers()
        if not self._buffers and not self._devices and self._last is not None:
            known, factor = self._last
            if factor == scale and torch.equal(known, random):
                return self._packed
        tensors = {"random": random, "scale": torch.tensor(scale, dtype=torch.float64)}
        for device in self._devices:
            tensors[f"random/cuda:{device}"] = torch.cuda.get_rng_state(device)
        for dtype, buffers in self._by_dtype().items():
            tensors[f"buffers/{dtype}"] = torch.cat([b.detach().reshape(-1) for b in buffers]).cpu()
        packed = save(tensors, self._metadata)
        if len(packed) > MOST_BYTES:
            raise StateDoesNotFitError(
                f"this model has {len(packed) >> 20} MiB of buffers, and a worker tells at most {MOST_BYTES >> 20} MiB "
                "in a step; use --on_worker_loss=abort without checkpoints"
            )
        self._last, self._packed = (random, scale), packed
        return packed

    def put(self, packed: bytes) -> None:
        """Go on from there. StateDoesNotFitError where it is of another model; nothing is changed then."""
        tensors = load(packed)
        flat = {name.removeprefix("buffers/"): t for name, t in tensors.items() if name.startswith("buffers/")}
        wanted = self._by_dtype()
        sizes = {dtype: sum(b.numel() for b in buffers) for dtype, buffers in wanted.items()}
        if "random" not in tensors or "scale" not in tensors or {d: t.numel() for d, t in flat.items()} != sizes:
            raise StateDoesNotFitError("the local state that was kept for this worker is of another model")
        torch.set_rng_state(tensors["random"])
        for device in self._devices:
            if (state := tensors.get(f"random/cuda:{device}")) is not None:
                torch.cuda.set_rng_state(state, device)
        self._scale.set_numbers(*tensors["scale"].tolist())
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
