"""Where a program is in its loops over ``job.steps()``, and what it reports of that to the coordinator.

A new incarnation of this worker, and a job that starts from a checkpoint, resume at the beginning of an iteration. So
the worker's state is reported when the next iteration begins: code after ``optimizer.step()``, schedulers for example,
then belongs to its own iteration and is repeated with it. Where a program could not resume (in the middle of an
iteration that makes several steps, or outside such loops), the reason is reported instead, as a phrase.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from lockstep.library.errors import UsageError
from lockstep.library.nodes import JobNode
from lockstep.library.parameters import HasOptimizer
from lockstep.library.program_state import LoopPosition, ProgramState, TooLargeError
from lockstep.library.sharding import DataShard, step_seed
from lockstep.library.state_codec import Stateful
from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.ids import Step
from lockstep.training.torch_private import mark_as_stepped

OUTSIDE = "it makes steps outside job.steps()"
BETWEEN = "it was in the middle of an iteration of several steps"
UNAPPLIED = "it had gradients that no optimizer had applied when an iteration began"
UNKEPT = "it uses a {kind} that was not passed to job.keep()"


def seed_everything(seed: int) -> None:
    """Seed torch (all its devices), Python's random module, and numpy if the program uses it."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


class LoopTracker:
    """One worker's progress through its program."""

    def __init__(self, node: JobNode, say: Callable[[str], None]) -> None:
        self._node = node
        self._say = say
        self._state: ProgramState | None = None
        self._optimizers: Sequence[HasOptimizer] = ()
        self.iteration = 0
        self.in_steps = False
        self.resumed = False
        """This incarnation began in the middle of the job."""
        self.scales = False
        """The program uses a gradient scaler."""
        self.unapplied = False
        """Without servers: backward passes were averaged that no optimizer has applied; a checkpoint has none."""
        self._resumed_loop = -1
        """The number of the loop in which this incarnation resumes."""
        self._entered = 0
        self._done = 0
        """``_entered``: loops that this incarnation has begun; ``_done``: loops that the job has completed."""
        self._start = 0
        self._ended = False
        """The last completed loop ran to its end and was not left early."""
        self._stepped = False
        self._outside = False
        self._owed: Step | None = None
        """The step for which the state has not been reported yet."""
        self.on_iteration: Callable[[Step], None] = lambda _step: None
        """Called when an iteration begins, or the program has ended, before its state is taken."""
        self._said = False

    # -- the beginning --

    def begin(self, state: ProgramState, optimizers: Sequence[HasOptimizer], step: Step) -> None:
        """The parameters of ``step`` are in the model: continue from where the job is."""
        self._state, self._optimizers = state, optimizers
        if not self._node.keeps_state:
            self.iteration = step
            return
        if self._node.local_state:
            place = state.put(self._node.local_state)
            self.iteration, self._done, self._start = place.iteration, place.loops, place.start
            self.resumed, self._ended = True, place.ended
            self._resumed_loop = place.loops - place.ended
            for known in optimizers:
                mark_as_stepped(known.optimizer)
            self._say(f"{self._node.task} resumes at step {place.iteration}")
        elif step:
            raise UsageError(
                f"the job begins at step {step}, but its checkpoint does not hold this program's position: it was "
                "saved outside job.steps(); give another train_dir, or export that checkpoint and load it"
            )

    def owe(self, step: Step) -> None:
        """The first iteration's state is reported too: another rank must hold it before its step is made."""
        self._owed = step

    def refuse_where_resumed(self, what: str) -> None:
        """Raise UsageError if ``what`` would replace what this job has already trained."""
        if self.resumed and not self.in_steps:
            raise UsageError(
                f"{what} would replace what this job has already trained: it resumes at step {self.iteration}; "
                "load before job.wrap(), so that loading only affects a job that starts from scratch"
            )

    def keep(self, objects: dict[str, Stateful]) -> None:
        """Report these objects' state with every step, by name."""
        if self._state is None:
            raise UsageError("job.keep() was called before job.wrap(); call it after")
        if self._entered:
            raise UsageError("job.keep() was called after the first loop over job.steps(); call it before")
        for name, one in objects.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise UsageError(f"job.keep({name}=...) takes an object with state_dict() and load_state_dict()")
            self._state.kept[name] = one
        if self._node.keeps_state:
            self._state.take(self._place())  # what cannot be reported is refused now, not in the first step

    def place_of_calls(self) -> tuple[int, int]:
        """How many loops this program has begun, and the iteration it is in: the same in every incarnation."""
        return self._entered, self.iteration if self.in_steps else OUTSIDE_LOOPS

    # -- loops --

    def steps(self, count: int, seed: int | None, data: DataShard | None) -> Iterator[int]:
        """The iterations of one loop that this job has not completed yet."""
        end = self._enter_loop(count)
        while self.iteration < end:
            self._node.raise_if_ended()
            self.settle()
            step = self.iteration
            if seed is not None:
                seed_everything(step_seed(seed, step, self._node.task.index))
            if data is not None:
                data.position(step)
            self.in_steps, self._stepped = True, False
            try:
                yield step
            except GeneratorExit:
                self.iteration += self._stepped
                self._done, self._ended = self._entered, False
                raise
            finally:
                self.in_steps = False
            self.iteration += 1
        if self._done < self._entered:
            self._done, self._ended = self._entered, True

    def _enter_loop(self, count: int) -> int:
        """The iteration at which this loop ends."""
        number, self._entered = self._entered, self._entered + 1
        # A loop that a previous incarnation completed is resumed only if it has become longer.
        longer = number == self._resumed_loop and self._ended and self._start + count > self.iteration
        if number < self._done and not longer:
            return self.iteration
        if self._state is not None:
            self._state.put_program()
        if number != self._resumed_loop:
            self._start = self.iteration
        self._done = number
        return self._start + count

    def _place(self) -> LoopPosition:
        return LoopPosition(self.iteration, self._done, self._start, self._ended and self._done == self._entered)

    # -- what is reported --

    def before_step(self, what: str) -> None:
        """The parameters are about to change. Raise UsageError if a resumed job would do it twice."""
        if not self._node.keeps_state:
            return
        if self.resumed and not self.in_steps:
            raise UsageError(
                f"{what} outside job.steps() cannot be repeated, and this job was resumed at step {self.iteration}; "
                "call it in the loop or before job.wrap(), or start afresh (with another train_dir, or "
                "on_worker_loss='abort')"
            )
        if self._owed is not None:
            self._tell(self._owed, b"", BETWEEN if self.in_steps else OUTSIDE)

    def after_step(self, step: Step) -> None:
        """Step ``step`` is sealed."""
        self._stepped = True
        if not self._node.keeps_state:
            return
        if self.in_steps:
            self._owed = step + 1
            return
        self._outside = True
        self._tell(step + 1, b"", OUTSIDE)
        self._warn(OUTSIDE)

    def settle(self) -> None:
        """An iteration begins or the program has ended: report the state that goes with the newest parameters."""
        if self._owed is None or self._state is None:
            return
        self.on_iteration(self._owed)
        stuck, data = self._why_stuck(), b""
        if not stuck:
            try:
                data = self._state.take(self._place())
            except TooLargeError as error:
                stuck = str(error)
        self._tell(self._owed, data, stuck)
        if stuck:
            self._warn(stuck)

    def _tell(self, step: Step, data: bytes, stuck: str) -> None:
        self._owed = None
        self._node.tell_state(step, data, stuck)

    def _why_stuck(self) -> str:
        assert self._state is not None
        kept = self._state.kept.values()
        if self._outside:
            return OUTSIDE
        if self.unapplied:
            return UNAPPLIED
        scheduled = any("initial_lr" in group for one in self._optimizers for group in one.optimizer.param_groups)
        if scheduled and not any(isinstance(one, torch.optim.lr_scheduler.LRScheduler) for one in kept):
            return UNKEPT.format(kind="learning-rate scheduler")
        if self.scales and not any(isinstance(one, torch.amp.GradScaler) for one in kept):
            return UNKEPT.format(kind="gradient scaler")
        return ""

    def _warn(self, stuck: str) -> None:
        """Warn once, on the chief."""
        if self._said or self._node.task.index:
            return
        self._said = True
        saves = ", and only its last version is saved" if self._node.saves else ""
        self._say(f"the loss of a worker ends this job{saves}: {stuck} (docs/library.md)")
