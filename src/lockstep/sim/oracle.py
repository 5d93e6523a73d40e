"""What must happen in a run, recorded from what the training loops did and compared with what the machines do.

The oracle trusts no machine: it knows which gradients each worker made (incarnation, step, edition), and tracks the
tags of the bytes that servers reduce and workers receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from lockstep.protocol.core.effects import Apply
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, Incarnation, Step, TaskId
from lockstep.protocol.core.messages import CallComplete, CallPlace, GroupRates
from lockstep.sim.memory import Cell, GradientTag, VersionTag
from lockstep.sim.numbers import Numbers
from lockstep.sim.scenario import Scenario
from lockstep.sim.violation import Rule, Violation

Lives = Mapping[TaskId, Incarnation]
Past = Mapping[TaskId, Set[Incarnation]]


def brought_to(place: CallPlace, worker: int) -> bytes:
    """What a worker brings to a call: the same in every incarnation."""
    return f"{place.loop} {place.iteration} {place.number} from {worker}".encode()


class Oracle:
    """Synchronous steps: version s+1 is made of exactly one gradient of each contributor of step s.

    There is one per job: a job that starts again from a checkpoint makes the steps after it once more.
    """

    def __init__(self, scenario: Scenario, incarnations: Mapping[TaskId, Incarnation], past: Past) -> None:
        """``past``: the lost incarnations of each task, in a run that recovers."""
        self.shape = scenario.shape
        self.mode = scenario.mode
        self.numbers: Numbers | None = None
        self._aggregate = scenario.aggregate
        self._shrinks = scenario.shrinks
        self._past = past
        self._decided: dict[Step, tuple[TaskId, ...]] = {}
        """With backup workers: the workers that make a step, as the coordinator decided."""
        self.buckets: tuple[BucketId, ...] = ()
        self._incarnations = incarnations
        self._absent: dict[tuple[TaskId, Step], frozenset[BucketId]] = {}
        self._sealed: dict[tuple[TaskId, Incarnation, Step], Mapping[BucketId, int]] = {}
        self._void: dict[tuple[TaskId, Step], bool] = {}
        self._rates: dict[Step, tuple[GroupRates, ...]] = {INITIAL_STEP: ()}
        self._newest: dict[BucketId, VersionTag] = {}
        self._made: dict[tuple[BucketId, int], VersionTag] = {}
        self._answers: dict[CallPlace, CallComplete] = {}

    def begin_with(self, versions: Iterable[VersionTag]) -> None:
        """The job starts from a checkpoint: these were made before."""
        for tag in versions:
            self._newest[tag.bucket] = self._made[tag.bucket, tag.serial] = tag

    # -- what the training loops did --

    def step_planned(self, worker: TaskId, step: Step, absent: frozenset[BucketId]) -> None:
        self._absent[worker, step] = absent

    def rates_said(self, step: Step, rates: tuple[GroupRates, ...]) -> None:
        self._rates[step] = rates

    def step_sealed(self, worker: TaskId, step: Step, editions: Mapping[BucketId, int], *, void: bool) -> None:
        self._sealed[worker, self._incarnations[worker], step] = editions
        if void:
            self._void[worker, step] = True

    def tag(self, worker: TaskId, step: Step, bucket: BucketId, edition: int, life: Incarnation = 0) -> GradientTag:
        """The bytes of a gradient of this incarnation; 0: the current one."""
        number = 0 if self.numbers is None else self.numbers.gradient(worker, step, bucket)
        return GradientTag(worker, life or self._incarnations[worker], step, bucket, edition, number)

    def call_answered(self, answer: CallComplete) -> None:
        """All workers get the same, in every incarnation: what each brings, in order; without a lost worker only if
        the job goes on without it."""
        everybody = tuple(task.index for task in self.shape.worker_ids())
        known = self._answers.setdefault(answer.place, answer)
        values = tuple(brought_to(answer.place, index) for index in answer.workers)
        if known != answer or answer.values != values or (answer.workers != everybody and not self._shrinks):
            raise Violation(Rule.WRONG_ANSWER, f"{answer} is answered to a call that was answered with {known}")

    # -- what a server does --

    def gradients_of(self, effect: Apply, lives: Lives) -> tuple[GradientTag, ...]:
        """The gradients that this update must be made of, in order; Violation if it must not be made now.

        ``lives``: the incarnation that sent each gradient. It may have been lost: what it delivered stays valid.
        """
        step, bucket = effect.step, effect.bucket
        if (bucket, step + 1) in self._made:
            raise Violation(Rule.APPLIED_TWICE, f"bucket {bucket} is applied a second time for step {step}")
        if step == INITIAL_STEP:
            return (self.tag(CHIEF, step, bucket, 0, self._sender(CHIEF, lives)),)
        self._refuse_early(step, bucket)
        rates = self._rates.get(step) if self.shape.servers else ()
        if effect.rates != rates:
            raise Violation(Rule.WRONG_RATES, f"step {step} is applied with {effect.rates}, the chief sent {rates}")
        members = self._members(effect)
        if any((worker, step) in self._void for worker in members):
            return ()
        if effect.replicas != len(members):
            raise Violation(
                Rule.WRONG_GRADIENTS, f"step {step} is averaged over {effect.replicas} workers, not {len(members)}"
            )
        return tuple(
            self._final(worker, step, bucket, self._sender(worker, lives))
            for worker in members
            if bucket not in self._absent.get((worker, step), frozenset())
        )

    def _sender(self, worker: TaskId, lives: Lives) -> Incarnation:
        life = lives.get(worker, 0)
        return life if life in self._past.get(worker, ()) else self._incarnations[worker]

    def _members(self, effect: Apply) -> tuple[TaskId, ...]:
        """All workers; with backup workers, the same ones for every bucket of the step on every server."""
        if self._shrinks:
            return tuple(w for w in self.shape.worker_ids() if w in effect.contributors or w not in self._past)
        if self._aggregate is None:
            return self.shape.worker_ids()
        chosen = self._decided.get(effect.step, ())
        if len(chosen) != self._aggregate:
            raise Violation(
                Rule.WRONG_GRADIENTS, f"step {effect.step} is made of {chosen}, not of {self._aggregate} workers"
            )
        return chosen

    def contributors_said(self, step: Step, workers: tuple[TaskId, ...]) -> None:
        """The coordinator has decided which workers make a step; the decision must not change."""
        if self._decided.setdefault(step, workers) != workers:
            raise Violation(
                Rule.DECISION_CHANGED, f"step {step} was to be made of {self._decided[step]}, but now of {workers}"
            )

    def _refuse_early(self, step: Step, bucket: BucketId) -> None:
        """Version s-1 may be overwritten (by s+1) only after step s-1 is complete on every server."""
        behind = [b for b in self.buckets if (b, step) not in self._made]
        if behind:
            raise Violation(
                Rule.EARLY_COMMIT,
                f"bucket {bucket} is applied for step {step}, which overwrites version {step - 1}, "
                f"while bucket {behind[0]} is not at version {step} yet: an early commit",
            )

    def _final(self, worker: TaskId, step: Step, bucket: BucketId, life: Incarnation) -> GradientTag:
        """The edition that this incarnation has sealed."""
        if not self.mode.seals:
            return self.tag(worker, step, bucket, 0, life)
        sealed = self._sealed.get((worker, life, step))
        if sealed is None:
            raise Violation(Rule.NOT_SEALED, f"step {step} is applied to bucket {bucket} before {worker} has sealed it")
        return self.tag(worker, step, bucket, sealed[bucket], life)

    def base_of(self, effect: Apply) -> VersionTag | None:
        """What the slot being read must hold."""
        return self._newest.get(effect.bucket)

    def next_tag(self, effect: Apply, gradients: tuple[GradientTag, ...], number: int = 0) -> VersionTag:
        base = self._newest.get(effect.bucket)
        serial = 0 if base is None else base.serial + 1
        if self.numbers is not None:
            self.numbers.version_made(effect.bucket, serial, number)
        return VersionTag(effect.bucket, serial, gradients, number)

    def made(self, tag: VersionTag) -> None:
        """A server has made this version."""
        self._newest[tag.bucket] = tag
        self._made[tag.bucket, tag.serial] = tag

    def version(self, bucket: BucketId, version: int) -> VersionTag | None:
        return self._made.get((bucket, version))

    def newest(self) -> dict[BucketId, int]:
        """The number of each bucket's newest version."""
        return {bucket: tag.number for bucket, tag in self._newest.items()}

    def complete(self, version: int) -> bool:
        """Whether every bucket has reached ``version``."""
        return all(self._newest[b].serial >= version if b in self._newest else False for b in self.buckets)

    # -- what a worker receives --

    def received(self, worker: TaskId, bucket: BucketId, version: int, cell: Cell) -> None:
        tag = self._made.get((bucket, version))
        if tag is None:
            raise Violation(
                Rule.UNKNOWN_VERSION, f"{worker} received version {version} of bucket {bucket}, which was never made"
            )
        cell.expect(tag, f"{worker} at version {version}")

    # -- the end --

    def finished_well(self, steps: Mapping[TaskId, int]) -> None:
        """Every task ended well: check that every step is complete."""
        for bucket in self.buckets:
            newest, version = self._newest.get(bucket), max(steps.values())
            if newest is None or newest.serial != version:
                raise Violation(
                    Rule.INCOMPLETE, f"the job ended well with bucket {bucket} at {newest}, not at version {version}"
                )


class AsyncOracle(Oracle):
    """Without synchronisation: each gradient is applied exactly once, and a worker gets values that include its own."""

    def __init__(self, scenario: Scenario, incarnations: Mapping[TaskId, Incarnation], past: Past) -> None:
        super().__init__(scenario, incarnations, past)
        self._applied: dict[tuple[TaskId, Step, BucketId], int] = {}
        self._held: dict[tuple[TaskId, BucketId], int] = {}

    def gradients_of(self, effect: Apply, lives: Lives) -> tuple[GradientTag, ...]:
        if effect.step == INITIAL_STEP:
            return super().gradients_of(effect, lives)
        if len(effect.contributors) != 1:
            raise Violation(
                Rule.WRONG_GRADIENTS,
                f"bucket {effect.bucket} is updated for {len(effect.contributors)} workers at once",
            )
        worker = effect.contributors[0]
        if (worker, effect.step, effect.bucket) in self._applied:
            raise Violation(
                Rule.APPLIED_TWICE,
                f"bucket {effect.bucket} of {worker} is applied a second time for step {effect.step}",
            )
        if effect.rates not in self._rates.values():
            raise Violation(Rule.WRONG_RATES, f"{effect.rates} were never the chief's rates")
        if (worker, effect.step) in self._void:
            raise Violation(
                Rule.VOID_APPLIED, f"{worker} found infinity in step {effect.step}, but its gradient is applied"
            )
        return (self._final(worker, effect.step, effect.bucket, self._incarnations[worker]),)

    def made(self, tag: VersionTag) -> None:
        super().made(tag)
        for gradient in tag.made_of:
            self._applied[gradient.worker, gradient.step, gradient.bucket] = tag.serial

    def received(self, worker: TaskId, bucket: BucketId, version: int, cell: Cell) -> None:
        tag = cell.whole()
        if not isinstance(tag, VersionTag) or tag.bucket != bucket:
            raise Violation(
                Rule.WRONG_BYTES, f"{worker} received {cell.halves} as version {version} of bucket {bucket}"
            )
        if tag.serial < self._held.get((worker, bucket), 0):
            raise Violation(Rule.OLDER_VALUE, f"{worker} received an older value of bucket {bucket} than it had")
        self._held[worker, bucket] = tag.serial
        step = version - 1
        if step == INITIAL_STEP or not self._owed(worker, step, bucket):
            return
        if self._applied.get((worker, step, bucket), tag.serial + 1) > tag.serial:
            raise Violation(
                Rule.OWN_GRADIENT_MISSING, f"{worker} received bucket {bucket} without its own gradient of step {step}"
            )

    def _owed(self, worker: TaskId, step: Step, bucket: BucketId) -> bool:
        return bucket not in self._absent[worker, step] and (worker, step) not in self._void

    def finished_well(self, steps: Mapping[TaskId, int]) -> None:
        for worker, count in steps.items():
            for step in range(count):
                for bucket in self.buckets:
                    if self._owed(worker, step, bucket) and (worker, step, bucket) not in self._applied:
                        raise Violation(Rule.GRADIENT_LOST, f"bucket {bucket} of {worker} in step {step} was lost")


def make_oracle(scenario: Scenario, incarnations: Mapping[TaskId, Incarnation], past: Past) -> Oracle:
    kind = Oracle if scenario.mode.synchronous else AsyncOracle
    return kind(scenario, incarnations, past)
