"""What a program did before ``job.wrap()``: optimizer state that it loaded, and a ``wrap`` that was refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from library.both_shapes import RANKS, SERVED, both_shapes, run_in
from library.same_loop import Loop, assert_same_bits, in_one_process, plain, small_model
from library.test_copies import hooks_of
from lockstep.library.errors import UsageError
from lockstep.library.job import Job
from lockstep.library.parameters import refuse_local_statistics
from lockstep.protocol.core.ids import ClusterShape

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def saved_after(steps: int, make: Any) -> dict[str, Any]:
    """What one process would have written: the model, and its optimizer."""
    kept: list[Any] = []

    def remembered(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(model.parameters())
        kept.extend((model, optimizer))
        return optimizer

    in_one_process(Loop(make_optimizer=remembered, steps=steps))
    return copy.deepcopy({"model": kept[0].state_dict(), "optimizer": kept[1].state_dict()})


@both_shapes
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_goes_on_from_state_that_was_loaded_before_wrap(shape: ClusterShape, kind: str) -> None:
    """As nanoGPT resumes: model, optimizer, and only then the wrapping; with the bits of one process."""
    make = OPTIMIZERS[kind]
    saved = saved_after(3, make)
    results: dict[int, dict[str, Tensor]] = {}
    states: dict[int, Any] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = make(model.parameters())
        if job.is_chief or not shape.servers:  # with servers the chief's counts, as of parameters
            model.load_state_dict(copy.deepcopy(saved["model"]))
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        job.wrap(model, optimizer)
        for step in range(3, 6):
            plain(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}
        states[job.worker] = optimizer.state_dict()["state"]

    run_in(shape, body)
    whole = saved_after(6, make)
    expected = in_one_process(Loop(make_optimizer=lambda m: make(m.parameters())))
    assert_same_bits(list(results.values()), expected)
    for state in states.values():
        for number, values in whole["optimizer"]["state"].items():
            assert all(
                torch.equal(torch.as_tensor(state[number][name]), torch.as_tensor(v)) for name, v in values.items()
            )


def test_a_chief_that_was_restarted_sends_only_what_the_servers_lack() -> None:
    """It may have been lost before it had sent all; what the servers have may be of a later step."""
    saved = saved_after(2, OPTIMIZERS["AdamW"])
    asked: list[int] = []

    def body(job: Job) -> None:
        model = small_model()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        job.wrap(model, optimizer)
        training: Any = job._training
        known = training._optimizers[0]
        optimizer.load_state_dict(saved["optimizer"])  # the servers have it already
        optimizer.state.update({p: {"step": torch.tensor(9.0)} for p in model.parameters()})
        if job.is_chief:  # another worker may ask before the chief has sent all
            training._state.bring(known, only_missing=True)
            optimizer.state.clear()
            asked.extend(int(one["step"]) for one in optimizer.state_dict()["state"].values())

    run_in(SERVED, body)
    assert set(asked) == {2}


@pytest.mark.parametrize("options", [{"synchronous": False}, {"aggregate": 1}], ids=["asynchronous", "backup"])
def test_state_that_no_common_step_could_begin_with_is_refused(options: dict[str, Any]) -> None:
    def body(job: Job) -> None:
        model = small_model()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        plain(model, 0, 0)
        optimizer.step()
        job.wrap(model, optimizer)

    with pytest.raises(UsageError, match=r"step that all workers make together.*begin with a new optimizer"):
        run_in(SERVED, body, **options)


# -- a refused wrap --


class State:
    """What a wrap may touch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._of = model, optimizer
        self._first = self._look()

    def _look(self) -> list[object]:
        model, optimizer = self._of
        hooks = [hook for part in model.modules() for hook in hooks_of(part)]
        own = [name for one in (*model.modules(), *model.parameters()) for name in vars(one) if name.startswith("__")]
        memory = [(p.data_ptr(), p.requires_grad, p._version) for p in model.parameters()]
        backward = [p._post_accumulate_grad_hooks for p in model.parameters()]
        tables = [len(table) for name, table in vars(optimizer).items() if "hooks" in name]
        return [hooks, own, memory, backward, type(optimizer), sorted(vars(optimizer)), tables, dict(optimizer.state)]

    def assert_same(self) -> None:
        for before, now in zip(self._first, self._look(), strict=True):
            assert before == now


def outside(**options: Any) -> torch.optim.Optimizer:
    """An optimizer of a parameter that is in no model."""
    return torch.optim.SGD([nn.Parameter(torch.ones(2, **options))], lr=0.1)


Wrap = Callable[[Job, nn.Module, torch.optim.Optimizer], object]
REFUSED: list[tuple[ClusterShape, str, Wrap]] = [
    *(
        (shape, *case)
        for shape in (SERVED, RANKS)
        for case in (
            ("no optimizer", lambda job, m, o: job.wrap(m, [o, 0.1])),
            ("no such numbers", lambda job, m, o: job.wrap(m, [o, outside(dtype=torch.complex64)])),
            ("no values", lambda job, m, o: job.wrap(m, [o, outside(device="meta")])),
        )
    ),
    (SERVED, "not on servers", lambda job, m, o: job.wrap(m, [o, torch.optim.Adafactor(small_model().parameters())])),
    (SERVED, "given twice", lambda job, m, o: job.wrap(m, [o, torch.optim.SGD(m.parameters())])),
    *((shape, "no statistics", lambda job, m, o: job.wrap([m, nn.SyncBatchNorm(4)], o)) for shape in (SERVED, RANKS)),
]


@pytest.mark.parametrize(("shape", "case", "wrap"), REFUSED)
def test_a_refused_wrap_leaves_everything_as_it_was_and_the_next_one_works(
    shape: ClusterShape, case: str, wrap: Wrap
) -> None:
    loop = Loop(make_optimizer=lambda m: OPTIMIZERS["AdamW"](m.parameters()), shape=shape)
    results: dict[int, dict[str, Tensor]] = {}

    def body(job: Job) -> None:
        model = small_model()
        optimizer = loop.make_optimizer(model)
        before = State(model, optimizer)
        with pytest.raises(UsageError):
            wrap(job, model, optimizer)
        before.assert_same()
        job.wrap(model, optimizer)
        for step in range(loop.steps):
            plain(model, job.worker, step)
            optimizer.step()
        results[job.worker] = {name: p.detach().clone() for name, p in model.named_parameters()}

    run_in(shape, body)
    assert case
    assert_same_bits(list(results.values()), in_one_process(loop))


@both_shapes
def test_an_optimizer_of_another_model_is_refused(shape: ClusterShape) -> None:
    """The model was made anew after its optimizer: it would never change, and nobody would say so."""

    def body(job: Job) -> None:
        model, former = small_model(), small_model()
        with pytest.raises(UsageError, match="no parameter of the optimizer is one of the model's"):
            job.wrap(model, torch.optim.SGD(former.parameters(), lr=0.1))
        extra = nn.Parameter(torch.ones(1))
        job.wrap(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))

    run_in(shape, body)


def test_statistics_that_servers_would_leave_local_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker normalised with its own batches, and nobody said so."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))]
    with pytest.raises(UsageError, match=r"SyncBatchNorm asks the other workers.*use BatchNorm, or train on GPUs"):
        refuse_local_statistics(layers, 2)
    refuse_local_statistics(layers, 1)
    refuse_local_statistics([small_model()], 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # the program has set it up itself
    refuse_local_statistics(layers, 2)
