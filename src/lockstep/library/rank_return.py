"""A rank that is lost comes back: what it gets from the others, and what it keeps for them (``docs/recovery.md``).

A rank that comes back has its own told state. Parameters and optimizers are everybody's, so it takes them from another
rank: of the step that it begins with, or, where it replays a step that is committed, first the parameters that step was
computed with, then its means, and after ``optimizer.step()`` what another rank has after its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.library.errors import UsageError
from lockstep.library.parameters import OwnOptimizer
from lockstep.library.state_codec import from_text, to_text
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import INITIAL_STEP, Step, TaskId
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.ranks.kept_versions import (
    BEFORE,
    MEANS,
    NOW,
    SIZES,
    KeptVersions,
    question,
    read_sizes,
    read_stream,
)
from lockstep.training.tensors import as_tensor
from lockstep.training.worker.binding import Trained

_PAUSE_SECONDS: Final = 0.02
Found = tuple[str, dict[str, Tensor]]


class RankReturn:
    """One rank of a job whose ranks come back."""

    def __init__(self, node: WorkerNode, trained: Sequence[Trained], optimizers: Sequence[OwnOptimizer]) -> None:
        self._node = node
        self._parameters = [one.parameter for one in trained]
        self._optimizers = optimizers
        self._groups: list[Any] = [None for _ in optimizers]
        """The numbers of each optimizer's groups after its last step, before the program changed them."""
        self.kept = KeptVersions(self._parameters, len(optimizers), self._describe, self._landed)
        self.late = node.late and node.start_step > INITIAL_STEP
        self.replayed: Step | None = node.start_step - 1 if self.late and node.replays else None
        """The step that is replayed."""
        self._after: tuple[list[Tensor], list[dict[str, Any]], list[Any]] | None = None
        self.restoring = False
        """``load_state_dict()`` is called from here, and not by the program."""
        node.while_calling = self.kept.still

    # -- what others ask for --

    def _describe(self) -> Found:
        tensors: dict[str, Tensor] = {}
        both = zip(self._optimizers, self._groups, strict=True)
        states = [{"state": one.optimizer.state_dict(), "groups": groups} for one, groups in both]
        try:
            return to_text(states, tensors), tensors
        except UsageError as error:
            raise ValueError(str(error)) from None

    def _landed(self, version: int) -> Tensor:
        assert self._node.plan is not None
        return as_tensor(self._node.training.landing(version).buffer[: self._node.plan.arena_bytes], torch.uint8)

    # -- what this one asks for --

    def begin(self) -> None:
        """After ``job.wrap()`` of a rank that has come back: the parameters of its first step, and its optimizers."""
        if not self.late:
            return
        start = self._node.start_step
        if self.replayed is not None:
            values = self._values(self._fetch(BEFORE, self.replayed))
            self.kept.take_before(self.replayed, values)
            self._put_values(values)
        elif start > 0:
            values, states, _ = self._outcome(start)
            self._put_values(values)
            for one, state in zip(self._optimizers, states, strict=True):
                one.optimizer.load_state_dict(state)

    def initial(self) -> Tensor:
        """What the job began with, as it arrived elsewhere."""
        return self._fetch(MEANS, 0)[1]["means"]

    def means_of(self, step: Step) -> Tensor:
        """The means of the step that is replayed; another rank may ask this one for them."""
        found = self._fetch(MEANS, step + 1)[1]["means"]
        self._landed(step + 1).copy_(found)
        self.kept.has_means(step + 1)
        return found

    def on_stepped(self, number: int) -> None:
        """An optimizer has made its step; in a replay, another rank's outcome takes the place of its own."""
        one = self._optimizers[number]
        if self.replayed is not None:
            self._take_outcome(number)
        self._groups[number] = _numbers(one.optimizer)
        self.kept.stepped(number)

    def on_iteration(self, version: Step) -> None:
        """An iteration begins, or the program has ended: nobody changes parameters from now on."""
        if self.replayed is not None and version > self.replayed:
            for number in range(len(self._optimizers)):
                if self._after is None or self._groups[number] is None:
                    self._take_outcome(number)
            assert self._after is not None
            self._put_values(self._after[0])
            self._after, self.replayed = None, None
        self.kept.open(version)

    def _take_outcome(self, number: int) -> None:
        assert self.replayed is not None
        if self._after is None:
            self._after = self._outcome(self.replayed + 1)
        values, states, groups = self._after
        self._put_values(values)
        optimizer = self._optimizers[number].optimizer
        mine = optimizer.param_groups
        self.restoring = True
        optimizer.load_state_dict(states[number])
        self.restoring = False
        # The program's own groups stay the objects that they were, with the numbers of the moment after the step.
        loaded, optimizer.param_groups = optimizer.param_groups, mine
        for group, other, told in zip(mine, loaded, groups[number] or [{}] * len(mine), strict=True):
            group["params"] = other["params"]
            for name, value in told.items():
                if not isinstance(group.get(name), Tensor):
                    group[name] = value

    def _outcome(self, version: Step) -> tuple[list[Tensor], list[dict[str, Any]], list[Any]]:
        text, tensors = found = self._fetch(NOW, version)
        states = from_text(text, tensors)
        return self._values(found), [one["state"] for one in states], [one["groups"] for one in states]

    def _values(self, found: Found) -> list[Tensor]:
        return [found[1][str(number)] for number in range(len(self._parameters))]

    def _put_values(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def _fetch(self, what: str, version: Step) -> Found:
        """From any other rank that has it; JobEndedError if none has in the time that a lost rank has to come back."""
        seconds = self._node.rules.rejoin_seconds
        deadline = time.monotonic() + seconds
        with self._node.main.during(Doing.WAITING, f"another rank's {what}, version {version}"):
            while time.monotonic() < deadline:
                self._node.raise_if_ended()
                for peer in self._node.links.up():
                    try:
                        if (found := self._fetch_from(peer, what, version, deadline)) is not None:
                            return found
                    except (ValueError, KeyError, TypeError) as error:
                        reason = f"cannot come back: {peer.short} could not give it its {what} ({error})"
                        raise JobEndedError(self._node.fail(own_error(reason))) from None
                time.sleep(_PAUSE_SECONDS)
        reason = f"cannot come back: no other rank has had the {what} of version {version} for {seconds:g} s"
        raise JobEndedError(self._node.fail(own_error(reason)))

    def _fetch_from(self, peer: TaskId, what: str, version: Step, deadline: float) -> Found | None:
        def in_vain() -> bool:
            return peer not in self._node.links.up() or time.monotonic() >= deadline

        sizes = self._node.training.ask_within(peer, what, question(version, SIZES), in_vain)
        if not sizes:
            return None
        header, total = read_sizes(sizes)
        data = bytearray()
        while len(data) < total:
            piece = self._node.training.ask_within(peer, what, question(version, len(data)), in_vain)
            if not piece:
                return None
            data += piece
        return read_stream(data, header)


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of its parameter groups; a tensor as it is now."""

    def kept(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    groups = optimizer.param_groups
    return [{name: kept(value) for name, value in group.items() if name != "params"} for group in groups]
