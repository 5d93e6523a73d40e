"""Layers that oneDNN computes where MKL is slower, and what they compute."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.benchmark.training import cpu_kernels
from lockstep.benchmark.training.cpu_kernels import LARGE_BATCH, has_slow_mkl, prefer_onednn
from lockstep.training.onednn_linear import OneDnnLinear

AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 16, 1),
        nn.Conv2d(16, 16, 1, stride=2),
        nn.Conv2d(16, 16, 1, groups=4),
        nn.Conv2d(16, 4, 1, bias=False),
        nn.Flatten(),
        nn.Linear(64, 80),
        nn.Linear(80, 96, bias=False),
        nn.Linear(96, 5),
    )


def _linears(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


def _dilations(model: nn.Module) -> list[int]:
    return [module.dilation[0] for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def _with_gradients(model: nn.Module, given: Tensor) -> list[Tensor]:
    result = model(given)
    result.square().sum().backward()
    return [result, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.usefixtures("slow_mkl")
def test_the_numbers_stay() -> None:
    torch.manual_seed(1)
    plain, given = _model(), torch.randn(4, 3, 9, 9)
    preferred = copy.deepcopy(plain)
    prefer_onednn(preferred, 4)
    assert _dilations(preferred) == [1, 2, 1, 1, 2]
    assert _linears(preferred) == [OneDnnLinear, OneDnnLinear, nn.Linear]
    expected, found = _with_gradients(plain, given), _with_gradients(preferred, given)
    assert len(found) == len(expected) == 15
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("slow_mkl")
def test_16_bit_arithmetic_and_more_dimensions_are_as_they_were() -> None:
    plain = nn.Linear(64, 64)
    preferred = copy.deepcopy(plain)
    prefer_onednn(preferred, 4)
    assert type(preferred) is OneDnnLinear
    cube, matrix = torch.randn(2, 3, 64), torch.randn(2, 64)
    assert torch.equal(preferred(cube), plain(cube))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(preferred(matrix), plain(matrix))


@pytest.mark.usefixtures("slow_mkl")
def test_a_large_batch_of_convolutions_is_left_alone() -> None:
    model = _model()
    prefer_onednn(model, LARGE_BATCH)
    assert set(_dilations(model)) == {1}


@pytest.mark.usefixtures("slow_mkl")
def test_convolutions_with_several_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = _model()
    prefer_onednn(model, 4)
    assert set(_dilations(model)) == {1}


def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "has_slow_mkl", lambda: False)
    model = _model()
    prefer_onednn(model, 4)
    assert set(_dilations(model)) == {1}
    assert set(_linears(model)) == {nn.Linear}


@pytest.mark.parametrize(
    ("processors", "capability", "slow"),
    [(AMD, "AVX512", True), (AMD, "AVX2", False), (INTEL, "AVX512", False), (None, "AVX512", False)],
)
def test_it_depends_on_the_kind_of_processor(
    processors: str | None, capability: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    listed = tmp_path / "cpuinfo"
    if processors is not None:
        listed.write_text(processors)
    assert has_slow_mkl(listed) is slow
