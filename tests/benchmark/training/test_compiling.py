"""``--compile``: a chain in stages, its names and numbers unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lockstep.benchmark.models import build_model
from lockstep.benchmark.settings.config import COMPILED_BUCKET_BYTES
from lockstep.benchmark.training.compiling import MOST_STAGES, chains_of, compile_model, cut, elements_of
from lockstep.benchmark.training.job import DECAYED, NOT_DECAYED, BenchJob, in_groups_of_stages, trained_parameters
from lockstep.cli.flags import parse_bench
from lockstep.protocol.core.plan import make_plan
from lockstep.training.bucket_size import LARGEST_FITTING_BUCKET
from lockstep.training.tensors import entry_of

# Torch warns in its own compiler, and takes a warning that became an error for code that it cannot compile.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def _forget_compiled() -> Iterator[None]:
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def chain() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def test_every_stage_holds_half_of_what_the_stages_after_it_left() -> None:
    sizes = [10, 0, 20, 30, 0, 100, 200, 40]
    stages = cut(sizes)
    assert [(one.start, one.stop) for one in stages] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8)]
    left = sum(sizes)
    for stage in reversed(stages[1:]):
        held = sum(sizes[stage])
        assert 2 * held >= left
        left -= held
    covered = [index for stage in stages for index in range(stage.start, stage.stop)]
    assert covered == list(range(len(sizes)))


@pytest.mark.parametrize("sizes", [[], [5], [0, 0], [1] * 200, [1 << n for n in range(30)]])
def test_all_modules_are_in_some_stage_and_stages_are_few(sizes: list[int]) -> None:
    stages = cut(sizes)
    assert [index for stage in stages for index in range(stage.start, stage.stop)] == list(range(len(sizes)))
    assert len(stages) <= MOST_STAGES


def test_the_last_gradients_of_resnet50_are_few() -> None:
    with torch.device("meta"):
        model = build_model("resnet50", "imagenet", 1001)
    [whole] = chains_of(model)
    sizes = [elements_of(module) for module in whole]
    stages = cut(sizes)
    assert len(stages) == 5
    assert sum(sizes[stages[0]]) < 0.03 * sum(sizes)


def test_a_model_of_two_chains_and_one_that_is_none() -> None:
    with torch.device("meta"):
        inception = build_model("inception3", "imagenet", 1001)
    assert len(chains_of(inception)) == 2
    assert chains_of(nn.TransformerEncoderLayer(8, 2)) == []


class CountingBackend:
    """Runs what torch captured as it is, and counts the pieces."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.usefixtures("_forget_compiled")
def test_compiled_stages_give_the_gradients_of_the_plain_model_under_the_same_names() -> None:
    plain, compiled = chain(), chain()
    backend = CountingBackend()
    stages = len(compile_model(compiled, backend))
    pictures = torch.randn(5, 8)
    for _ in range(3):
        for model in (plain, compiled):
            model.zero_grad()
            model(pictures).square().sum().backward()
    assert backend.graphs == stages == len(cut([elements_of(module) for module in chain()]))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    found = {name: p.grad for name, p in compiled.named_parameters()}
    assert list(expected) == list(found)
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.equal(gradient, found[name])  # type: ignore[arg-type]


@pytest.mark.usefixtures("_forget_compiled")
def test_the_model_of_a_later_life_is_compiled_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.benchmark.training.compiling.MOST_VARIANTS", 4)
    torch._dynamo.config.recompile_limit = 4
    backend = CountingBackend()
    for life in range(1, 4):
        model = chain()
        stages = len(compile_model(model, backend))
        model(torch.ones(1, 8))
        assert backend.graphs == life * stages


class NoChain(nn.Module):
    """Two ways that are added: nothing that could be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 5)
        self.other = nn.Linear(3, 5)

    def forward(self, given: Tensor) -> Tensor:
        total: Tensor = self.one(given) + self.other(given)
        return total


@pytest.mark.usefixtures("_forget_compiled")
def test_a_model_that_is_no_chain_is_compiled_whole() -> None:
    backend = CountingBackend()
    model = NoChain()
    assert compile_model(model, backend) == [[model]]
    model(torch.randn(2, 3)).sum().backward()
    assert backend.graphs == 1
    assert model.other.weight.grad is not None


def test_a_bucket_holds_parameters_of_one_stage_only() -> None:
    model = chain()
    first, second = list(model)[:4], list(model)[4:]
    trained = in_groups_of_stages(trained_parameters(model), [first, second])
    assert {one.group for one in trained if one.name[0] in "02"} == {DECAYED}
    assert {one.group for one in trained if one.name[0] in "46"} == {NOT_DECAYED + 1}
    plan = make_plan([entry_of(one.name, one.parameter, one.group) for one in trained], 1)
    assert [set(plan.names_in(bucket.id)) for bucket in plan.buckets] == [
        {"4.weight", "4.bias", "6.weight", "6.bias"},
        {"0.weight", "0.bias", "2.weight", "2.bias"},
    ]


def test_parameters_of_batch_norm_stay_in_their_group_whatever_their_stage() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    trained = in_groups_of_stages(trained_parameters(model), [list(model)[:2], list(model)[2:]])
    assert [one.group for one in trained] == [0, 0, 1, 1, 2, 2, 1, 1]


def test_a_compiled_run_asks_for_fused_optimizers_and_larger_buckets() -> None:
    compiled = parse_bench(["--model=trivial", "--compile", "--device=cpu"], {})
    assert compiled.exchange.bucket_bytes == COMPILED_BUCKET_BYTES > LARGEST_FITTING_BUCKET
    assert parse_bench(["--model=trivial"], {}).exchange.bucket_bytes is None
    assert parse_bench(["--compile", "--bucket_mb=2"], {}).exchange.bucket_bytes == 2 << 20
    job = BenchJob(compiled, 0, [torch.device("cpu")])
    assert all(json.loads(entry.options)["fused"] for entry in job.optimizers())
    assert len(job.optimizers()) == len(job.rates(0)) == max(one.group for one in job.trained) + 1
    job.close()
