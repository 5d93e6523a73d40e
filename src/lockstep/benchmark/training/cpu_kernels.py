"""Which of torch's two libraries for matrices computes the layers of a model on a processor.

Of convolutions torch gives those of single pixels (1 x 1) to MKL if there is one thread and a small batch, and all
others to oneDNN; linear layers always to MKL. But MKL leaves half of the width of AMD's processors with AVX-512 unused:
94 GFLOP/s instead of oneDNN's 209 on one core of one of them (a product of two matrices of 1,024 x 1,024).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.training.onednn_linear import OneDnnLinear

LARGE_BATCH = 16
"""From here on torch itself gives convolutions of single pixels to oneDNN."""
_LEAST_SIDE = 64
"""Of a weight: for thin ones MKL is not slower."""
_PROCESSORS = Path("/proc/cpuinfo")
_ONE, _TWO = (1, 1), (2, 2)


def prefer_onednn(model: nn.Module, batch_size: int) -> None:
    """Let oneDNN compute the layers of this model for which torch would take MKL, if that is slower here.

    Every task must decide the same, or bits differ: it depends on the kind of processor, not on a measurement.
    """
    if not has_slow_mkl():
        return
    small = torch.get_num_threads() == 1 and batch_size < LARGE_BATCH
    for module in model.modules():
        if type(module) is nn.Linear and _is_thick(module.weight):
            module.__class__ = OneDnnLinear
        elif type(module) is nn.Conv2d and small and _is_pointwise(module):
            module.dilation = _TWO  # torch gives it to oneDNN then, and there is nothing to dilate


def _is_thick(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and min(weight.shape) >= _LEAST_SIDE


def _is_pointwise(module: nn.Conv2d) -> bool:
    """oneDNN computes what has strides or groups anyway."""
    plain = module.kernel_size == module.stride == module.dilation == _ONE
    return plain and module.groups == 1


def has_slow_mkl(processors: Path = _PROCESSORS) -> bool:
    """Whether this is a processor of AMD's with AVX-512, and torch has both libraries."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in processors.read_text()
    except OSError:
        return False
