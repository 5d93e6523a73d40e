"""A model and its optimizer can be copied and saved while they train, and the copy is an ordinary one."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from library.both_shapes import RANKS, SERVED, both_shapes, run_in
from library.same_loop import Loop, in_one_process, plain, small_model
from lockstep.library.job import Job
from lockstep.protocol.core.ids import ClusterShape

pytestmark = pytest.mark.timeout(120)


def through_torch(one: Any) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def through_pickle(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch,
}


def tied_model() -> Any:
    """Two layers share their weight."""
    model = small_model()
    model.append(nn.Linear(16, 48))
    model[5].weight = model[0].weight
    model.append(nn.Linear(48, 16))
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def own_hook(*_: object) -> None:
    """Of the program itself: copies have it too."""


def hooks_of(module: nn.Module) -> list[object]:
    tables = [value for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)]
    return [hook for table in tables for hook in table.values()]


@both_shapes
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_model_in_training_is_an_ordinary_model(shape: ClusterShape, way: str) -> None:
    made: dict[int, nn.Module] = {}
    fresh = tied_model().state_dict()

    def body(job: Job) -> None:
        model = tied_model()
        model[1].register_forward_hook(own_hook)
        job.wrap(model, optimizer := adam(model))
        for step in range(3):
            plain(model, job.worker, step)
            optimizer.step()
        taken = WAYS[way](model)  # right after a step: parameters may still arrive
        made[job.worker] = taken
        steps = job.step
        taken.load_state_dict(fresh)
        plain(taken, job.worker, 0)
        plain(model, job.worker, 3)
        optimizer.step()
        assert job.step == steps + 1  # nothing was published, and the copy's backward is its own business
        assert vars(model)["__reduce_ex__"]
        job.close()
        assert "__reduce_ex__" not in vars(model)
        assert not any("__reduce_ex__" in vars(p) for p in model.parameters())

    run_in(shape, body)
    for taken in made.values():
        last = taken.state_dict()
        assert all(torch.equal(last[name], fresh[name]) for name in fresh)
        assert [hook for part in taken.modules() for hook in hooks_of(part)] == [own_hook]
        assert taken[5].weight is taken[0].weight  # type: ignore[index]
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in taken.parameters())


@both_shapes
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_values_of_its_moment(shape: ClusterShape, way: str) -> None:
    taken: dict[int, dict[str, Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := adam(model))
        for step in range(6):
            plain(model, job.worker, step)
            optimizer.step()
            if step == 2:
                taken[job.worker] = dict(WAYS[way](model).named_parameters())

    run_in(shape, body)
    expected = in_one_process(Loop(make_optimizer=adam, steps=3))
    for values in taken.values():
        assert all(torch.equal(values[name], expected[name]) for name in expected)


@both_shapes
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_model_and_optimizer_goes_on_alone(shape: ClusterShape, way: str) -> None:
    """As one process with the same state would."""
    ended: dict[int, list[Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := adam(model))
        for step in range(3):
            plain(model, job.worker, step)
            optimizer.step()
        other, its = WAYS[way]((model, optimizer))
        assert type(its) is torch.optim.Adam
        assert its.param_groups[0]["params"][0] is next(other.parameters())
        assert type(optimizer.state_dict()["state"][0]["exp_avg"]) is Tensor
        for step in range(3, 6):
            plain(other, 0, step)
            its.step()
        ended[job.worker] = [p.detach() for p in other.parameters()]
        plain(model, job.worker, 3)  # the job itself goes on
        optimizer.step()

    run_in(shape, body)
    expected = alone_after(3)
    for values in ended.values():
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


def alone_after(steps: int) -> list[Tensor]:
    kept: list[Any] = []

    def remembered(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)
        kept.extend((model, optimizer))
        return optimizer

    in_one_process(Loop(make_optimizer=remembered, steps=steps))
    model, optimizer = kept
    for step in range(steps, 6):
        plain(model, 0, step)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@both_shapes
def test_a_moving_average_of_torch_follows(shape: ClusterShape) -> None:
    averages: dict[int, list[Tensor]] = {}

    def follow(model: nn.Module) -> Any:
        return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := adam(model))
        average = follow(model)
        for step in range(4):
            plain(model, job.worker, step)
            optimizer.step()
            average.update_parameters(model)
        averages[job.worker] = [p.detach() for p in average.module.parameters()]

    run_in(shape, body)
    kept: list[Any] = []

    def followed(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)
        kept.append(follow(model))
        optimizer.register_step_post_hook(lambda *_: kept[0].update_parameters(model))
        return optimizer

    in_one_process(Loop(make_optimizer=followed, steps=4))
    expected = list(kept[0].module.parameters())
    for values in averages.values():
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


class CopiesItself(nn.Linear):
    """Takes everything along, as some classes do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        other = CopiesItself.__new__(CopiesItself)
        vars(other).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "__reduce_ex__"})
        return other


def test_a_class_that_copies_itself_takes_only_hooks_along_that_do_nothing() -> None:
    def body(job: Job) -> None:
        model = nn.Sequential(CopiesItself(16, 16))
        job.wrap(model, optimizer := adam(model))
        plain(model, job.worker, 0)
        optimizer.step()
        other = copy.deepcopy(model)
        assert {type(hook).__name__ for hook in hooks_of(other[0])} == {"method"}
        steps = job.step
        other.load_state_dict(model.state_dict())
        plain(other, 0, 0)
        plain(model, job.worker, 1)
        optimizer.step()
        assert job.step == steps + 1

    run_in(SERVED, body)


READS = """
import sys, torch
sys.modules["lockstep"] = None  # as where it is not installed
model, optimizer = torch.load(sys.argv[1], weights_only=False)
print(len(list(model.parameters())), type(optimizer).__name__)
"""


@pytest.mark.parametrize("shape", [SERVED, RANKS], ids=["servers", "ranks"])
def test_whoever_reads_the_file_needs_no_lockstep(shape: ClusterShape, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"

    def body(job: Job) -> None:
        model = small_model()
        job.wrap(model, optimizer := adam(model))
        plain(model, job.worker, 0)
        optimizer.step()
        if job.is_chief:
            torch.save((model, optimizer), file)

    run_in(shape, body)
    done = subprocess.run([sys.executable, "-c", READS, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("6 Adam\n", 0), done.stderr
