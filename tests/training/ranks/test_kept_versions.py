"""What a rank keeps for another one that comes back, and when it can be had."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch import Tensor, nn

from lockstep.training.ranks.kept_versions import (
    BEFORE,
    MEANS,
    NOW,
    PIECE_BYTES,
    SIZES,
    KeptVersions,
    question,
    read_stream,
)


class Rank:
    """Two parameters, one of them of more than one piece, and an optimizer that is a number."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(PIECE_BYTES // 4 + 5))]
        self.momentum = torch.tensor([1.0, 2.0], dtype=torch.float64)
        self.means = {1: torch.arange(7, dtype=torch.uint8), 2: torch.arange(9, dtype=torch.uint8)}
        self.kept = KeptVersions(self.parameters, 1, lambda: ("text", {"m": self.momentum}), self.means.__getitem__)

    def fetch(self, what: str, version: int) -> tuple[str, dict[str, Tensor]] | None:
        sizes = self.kept.answer(what, question(version, SIZES))
        if not sizes:
            return None
        header, total = json.loads(sizes)
        data = bytearray()
        while len(data) < total:
            data += self.kept.answer(what, question(version, len(data)))
        return read_stream(data, header)


def test_what_can_be_had_when() -> None:
    rank = Rank()
    assert rank.fetch(NOW, 0) is None
    rank.kept.open(0)
    found = rank.fetch(NOW, 0)
    assert found is not None
    assert found[0] == "text"
    assert all(torch.equal(found[1][str(i)], p) for i, p in enumerate(rank.parameters))
    assert torch.equal(found[1]["m"], rank.momentum)
    assert rank.fetch(NOW, 1) is None
    assert rank.fetch(BEFORE, 0) is None
    rank.kept.close(0)
    assert rank.fetch(NOW, 0) is None, "parameters are being changed"
    with torch.no_grad():
        rank.parameters[0].add_(1)
    before, means = rank.fetch(BEFORE, 0), rank.fetch(MEANS, 1)
    assert before is not None
    assert torch.equal(before[1]["0"], rank.parameters[0] - 1)
    assert means is not None
    assert torch.equal(means[1]["means"], rank.means[1])
    assert rank.fetch(MEANS, 2) is None


def test_in_a_call_after_the_step_nobody_changes_anything() -> None:
    rank = Rank()
    rank.kept.open(0)
    rank.kept.close(0)
    with rank.kept.still():
        assert rank.fetch(NOW, 1) is None, "its optimizer has not made its step"
    rank.kept.stepped(0)
    assert rank.fetch(NOW, 1) is None
    with rank.kept.still():
        assert rank.fetch(NOW, 1) is not None
    assert rank.fetch(NOW, 1) is None


def test_what_is_to_be_saved_stays_until_it_is_copied() -> None:
    rank = Rank()
    rank.kept.open(3)
    rank.kept.expect_save(3)
    closing = threading.Thread(target=rank.kept.close, args=(3,))
    closing.start()
    assert rank.kept.save(3, lambda: "copied") == "copied"
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(ValueError, match="past version 3"):
        rank.kept.save(3, lambda: "copied")
