"""What workers bring to a call survives the way as it was, and is made one in the order of workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.library.call_values import OPERATIONS, packed, reduced, unpacked

NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, *NARROW),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    for value in (tensor, tensor.mT.contiguous().mT if len(shape) > 1 else tensor):
        found = unpacked(packed(value))
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1 << 100, 0.1, math.inf, "text\n\0ü", [], {}, (1, [2, {"a": None}]), {1: "one", (2, 3): "pair"}],
    ids=repr,
)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    found = unpacked(packed(value))
    assert found == value
    assert type(found) is type(value)


def test_tensors_inside_of_plain_data_arrive() -> None:
    value: Any = {"weights": [torch.arange(3, dtype=torch.bfloat16), torch.tensor(1.5)], "name": "best"}
    found = unpacked(packed(value))
    assert found["name"] == "best"
    assert all(torch.equal(one, other) for one, other in zip(found["weights"], value["weights"], strict=True))


@pytest.mark.parametrize("data", [b"", b"J", b"J{", b"T", b"Tabc", b"X", b'J{"dict": 3}', b'J{"tensor": "a"}'], ids=str)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpacked(data)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 6], (3.0, 9, 6, 1)),
        ([1, 0.5], (0.75, 1.5, 1, 0.5)),
        ([True, False], (0.5, 1, True, False)),
        ([-1.5], (-1.5, -1.5, -1.5, -1.5)),
    ],
    ids=str,
)
def test_numbers_are_made_one(values: list[float], expected: tuple[float, ...]) -> None:
    found = tuple(reduced(values, op) for op in OPERATIONS)
    assert found == expected
    assert [type(one) for one in found] == [type(one) for one in expected]


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_number_that_is_none_spoils_the_result(op: str) -> None:
    assert math.isnan(reduced([1.0, math.nan, 2.0], op))
    assert torch.isnan(reduced([torch.tensor([1.0]), torch.tensor([math.nan])], op)).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    values = [torch.tensor([1.0, 0.25]).to(dtype)] * 3
    assert torch.equal(reduced(values, "sum").float(), torch.tensor([3.0, 0.75]).to(dtype).float())
    assert reduced(values, "max").dtype == dtype


def test_truth_values_are_counted_and_whole_numbers_divided() -> None:
    truths = [torch.tensor([True, False]), torch.tensor([True, True])]
    assert reduced(truths, "sum").tolist() == [2, 1]
    assert reduced(truths, "mean").tolist() == [1.0, 0.5]
    assert reduced(truths, "min").tolist() == [True, False]
    whole: list[Tensor] = [torch.tensor([1]), torch.tensor([2])]
    assert reduced(whole, "mean").tolist() == [1.5]
    assert reduced(whole, "sum").dtype == torch.int64
