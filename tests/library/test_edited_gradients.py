"""A gradient counts as it is at ``optimizer.step()``, whatever was done to it, and whenever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.cluster import InProcessCluster, in_process_cluster
from helpers.waiting import wait_until
from library.same_loop import run_jobs
from lockstep.library.job import Job
from lockstep.library.served import ServedTraining
from lockstep.library.training_way import JobOptions
from lockstep.protocol.core.ids import ClusterShape
from lockstep.protocol.core.journal import Happening
from lockstep.training.digests import digest
from lockstep.training.server.shard_store import TorchShardStore
from lockstep.training.worker.fillings import Filling, edited
from lockstep.training.worker.host_memory import HostMemory
from lockstep.training.worker.sealed_replica import SealedReplica

ALONE = ClusterShape(1, 1)
SECONDS = 10.0
OF_THE_ISSUE = [2.0, 1.0, -3.0, 1.0]
"""Half of the signs in each half of a 64-bit word are positive: negated, its words have the same sum."""

Edit = Callable[[Tensor, random.Random], None]


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def negate(parameter: Tensor, _: random.Random) -> None:
    gradient_of(parameter).neg_()


def negate_every_second(parameter: Tensor, choose: random.Random) -> None:
    gradient_of(parameter)[choose.randrange(2) :: 2].neg_()


def negate_some(parameter: Tensor, choose: random.Random) -> None:
    gradient = gradient_of(parameter)
    gradient[choose.sample(range(len(gradient)), 2)] *= -1


def swap(parameter: Tensor, choose: random.Random) -> None:
    gradient = gradient_of(parameter)
    one, other = choose.sample(range(len(gradient)), 2)
    gradient[[one, other]] = gradient[[other, one]]


def permute(parameter: Tensor, choose: random.Random) -> None:
    gradient = gradient_of(parameter)
    gradient.copy_(gradient[choose.sample(range(len(gradient)), len(gradient))])


def roll(parameter: Tensor, choose: random.Random) -> None:
    gradient_of(parameter).copy_(gradient_of(parameter).roll(choose.randrange(1, 9)))


def negate_data(parameter: Tensor, _: random.Random) -> None:
    gradient_of(parameter).data.neg_()


def set_data(parameter: Tensor, _: random.Random) -> None:
    gradient_of(parameter).data = -gradient_of(parameter)


def replace(parameter: Tensor, _: random.Random) -> None:
    parameter.grad = gradient_of(parameter).flip(0)


def replace_and_edit(parameter: Tensor, choose: random.Random) -> None:
    replace(parameter, choose)
    gradient_of(parameter).neg_()


def flip_one_bit(parameter: Tensor, choose: random.Random) -> None:
    lanes = gradient_of(parameter).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()])
    lanes[choose.randrange(len(lanes))] ^= 1


def there_and_back(parameter: Tensor, _: random.Random) -> None:
    gradient_of(parameter).data.neg_()
    gradient_of(parameter).data.neg_()


EDITS: tuple[Edit, ...] = (
    negate,
    negate_every_second,
    negate_some,
    swap,
    permute,
    roll,
    negate_data,
    set_data,
    replace,
    replace_and_edit,
    flip_one_bit,
    there_and_back,
)
LANES = {torch.float32: (2, 16), torch.float64: (2, 8), torch.float16: (4, 32), torch.bfloat16: (4, 32)}
"""Of each dtype, the smallest and the largest length; the largest fills a bucket."""
PARAMETERS, EDITED = 240, 119
"""Always less than half of the buckets are edited, so that none is ever held back."""
STEPS, ROUNDS = 4, 22
"""Together more than 10,000 edits: each is looked for, and those of the last round of a step are applied."""


def many_parameters(choose: random.Random) -> nn.ParameterList:
    made = nn.ParameterList()
    for index in range(PARAMETERS):
        dtype = list(LANES)[index % len(LANES)]
        made.append(
            nn.Parameter(torch.zeros(2 * choose.randrange(LANES[dtype][0] // 2, LANES[dtype][1] // 2 + 1), dtype=dtype))
        )
    return made


def drawn(like: Tensor, choose: random.Random) -> Tensor:
    """Small whole numbers: many words and many sums are equal by chance."""
    return torch.tensor([float(choose.choice((-3, -2, -1, 1, 2, 3))) for _ in range(len(like))], dtype=like.dtype)


def test_no_edit_of_ten_thousand_is_lost() -> None:
    choose = random.Random(17)
    made = 0

    def body(job: Job) -> None:
        nonlocal made
        model = many_parameters(choose)
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        training = job._training
        assert isinstance(training, ServedTraining)
        replica = training.replica
        assert replica is not None
        assert len(replica.plan.buckets) == PARAMETERS
        changed: set[int] = set()
        again = 0
        for _ in range(STEPS):
            parameters = list(model)
            given = [drawn(parameter, choose) for parameter in parameters]
            torch.autograd.backward(parameters, [gradient.clone() for gradient in given])
            for _ in range(ROUNDS):
                for index in changed:  # what the round before did
                    gradient_of(parameters[index]).copy_(given[index])
                edits = {index: choose.choice(EDITS) for index in choose.sample(range(PARAMETERS), EDITED)}
                for index, edit in edits.items():
                    edit(parameters[index], choose)
                final = [gradient_of(parameter).clone() for parameter in parameters]
                changed = {i for i in range(PARAMETERS) if not torch.equal(given[i], final[i])}
                assert found_edited(replica) == changed, (edits, given, final)
                made += len(edits)
            expected = [parameter.detach() - gradient for parameter, gradient in zip(parameters, final, strict=True)]
            optimizer.step()
            for index, (parameter, value) in enumerate(zip(parameters, expected, strict=True)):
                assert torch.equal(parameter.detach(), value), (edits.get(index), given[index], final[index])
            optimizer.zero_grad(set_to_none=choose.random() < 0.5)
            again += len(changed)
            changed = set()
        assert not replica.holding
        assert replica.sent_again == again

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=64))
    assert made >= 10_000


def found_edited(replica: SealedReplica) -> set[int]:
    """The parameters whose bucket would be sent again if the step were sealed now."""
    return {one.parts[0].bound.index for one in edited(replica._fillings.buckets)}


def test_a_program_that_clips_sends_every_bucket_once_and_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def counting(fillings: list[Filling]) -> list[Filling]:
        compared.append(len(fillings))
        return edited(fillings)

    monkeypatch.setattr("lockstep.training.worker.sealed_replica.edited", counting)
    steps, buckets = 4, []

    def body(job: Job) -> None:
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(job._training, ServedTraining)
        assert job._training.replica is not None
        every = [bucket.id for bucket in job._training.replica.plan.buckets]
        buckets.append(len(every))
        for step in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            made_by = [p.grad for p in model.parameters()]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert sorted(produced(cluster, step)) == ([] if step else every)
            optimizer.step()
            assert all(p.grad is made for p, made in zip(model.parameters(), made_by, strict=True))
            assert sorted(produced(cluster, step)) == sorted(every if step else every + every)
            optimizer.zero_grad()

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body, JobOptions(bucket_bytes=512))
    assert buckets[0] > 2
    assert compared == [buckets[0]] + [0] * (steps - 1)


def test_where_gradients_stay_on_a_gpu_nothing_is_sent_early_or_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "stays_on_gpu", True)  # this model is on the CPU
    compared: list[int] = []

    def counting(fillings: list[Filling]) -> list[Filling]:
        compared.append(len(fillings))
        return edited(fillings)

    monkeypatch.setattr("lockstep.training.worker.sealed_replica.edited", counting)
    weights: list[Tensor] = []

    def body(job: Job) -> None:
        model = nn.Linear(8, 1, bias=False)
        nn.init.ones_(model.weight)
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(8)).backward()
            assert produced(cluster, step) == []
            optimizer.step()
            assert produced(cluster, step) == [0]
        weights.append(model.weight.detach().clone())

    with in_process_cluster(ALONE, TorchShardStore, eager=False) as cluster:
        run_jobs(cluster, body)
    assert weights[0].tolist() == [[-2.0] * 8]
    assert compared == [0, 0, 0]


def produced(cluster: InProcessCluster, step: int) -> list[int]:
    """The buckets that the worker handed over in this step, as its loop has noted them by now."""
    done = threading.Event()
    cluster.workers[0].loop.call(done.set)
    assert done.wait(SECONDS)
    found = [r.bucket for r in cluster.workers[0].journal if r.happening is Happening.PRODUCED and r.step == step]
    return [bucket for bucket in found if bucket is not None]


def arrived(cluster: InProcessCluster) -> bool:
    return any(r.happening is Happening.ARRIVED and r.step == 0 and r.bucket == 0 for r in cluster.servers[0].journal)


def after_a_step(
    protocol: str, between: Callable[[InProcessCluster, Tensor, Callable[[], None]], None], device: str = "cpu"
) -> Tensor:
    """The gradient that was applied, where ``between`` makes the backward pass and what follows it."""
    applied: list[Tensor] = []

    def body(job: Job) -> None:
        model = nn.Linear(1, 4, bias=False, device=device)
        nn.init.zeros_(model.weight)
        _, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def backward() -> None:
            (model(torch.ones(1, device=device)) * torch.tensor(OF_THE_ISSUE, device=device)).sum().backward()

        between(cluster, model.weight, backward)
        optimizer.step()
        applied.append(-model.weight.detach().flatten())

    with in_process_cluster(ALONE, TorchShardStore, eager=False, protocol=protocol) as cluster:
        run_jobs(cluster, body)
    return applied[0]


@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_a_gradient_that_is_negated_after_it_arrived_counts_negated(protocol: str) -> None:
    def between(cluster: InProcessCluster, weight: Tensor, backward: Callable[[], None]) -> None:
        backward()
        wait_until(lambda: arrived(cluster), SECONDS, "the bucket at the server")
        gradient_of(weight).neg_()

    assert after_a_step(protocol, between).tolist() == [-number for number in OF_THE_ISSUE]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("edit", [negate, negate_every_second, negate_data, set_data, replace, there_and_back])
def test_a_gradient_on_a_gpu_that_is_edited_after_it_arrived_counts_edited(edit: Edit) -> None:
    final: list[Tensor] = []

    def between(cluster: InProcessCluster, weight: Tensor, backward: Callable[[], None]) -> None:
        backward()
        wait_until(lambda: arrived(cluster), SECONDS, "the bucket at the server")
        edit(weight, random.Random(1))
        final.append(gradient_of(weight).flatten().clone())

    applied = after_a_step("grpc", between, "cuda")
    assert applied.tolist() == final[0].tolist()


@pytest.mark.parametrize("back", [False, True], ids=["edited", "edited and back"])
@pytest.mark.parametrize("protocol", ["grpc", "grpc+shm"])
def test_a_gradient_that_is_edited_under_way_counts_as_it_is_at_the_end(protocol: str, back: bool) -> None:
    def between(cluster: InProcessCluster, weight: Tensor, backward: Callable[[], None]) -> None:
        may_leave = threading.Event()

        def hold_back() -> None:
            assert may_leave.wait(SECONDS)

        cluster.workers[0].loop.call(hold_back)
        backward()
        gradient_of(weight).data.neg_()
        may_leave.set()
        wait_until(lambda: arrived(cluster), SECONDS, "the bucket at the server")
        if back:
            gradient_of(weight).data.neg_()

    expected = OF_THE_ISSUE if back else [-number for number in OF_THE_ISSUE]
    assert after_a_step(protocol, between).tolist() == expected


def test_parameters_that_were_negated_or_moved_about_have_another_digest() -> None:
    choose = random.Random(5)
    for dtype in LANES:
        values = drawn(torch.zeros(64, dtype=dtype), choose)
        seen = [values, -values, values.flip(0), values.roll(2), values.roll(8)]
        seen += [torch.cat([-values[:2], values[2:]]), torch.cat([-values[:8:2], values[4:]])]
        different = {tuple(value.tolist()) for value in seen}
        assert len({tuple(digest(value).tolist()) for value in seen}) == len(different)
        assert digest(values.clone()).tolist() == digest(values).tolist()
