"""The world of machines with second homes, with workers that do what programs of the library do.

They make calls together, ask for norms that they clip by, ask servers for the optimizers' state and load one, seal
steps without gradients, void ones and such that publish values. What they hear must not depend on who was lost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.effects import (
    Answered,
    BecameMember,
    CallAnswered,
    Effect,
    Measure,
    NormKnown,
    Serve,
    VersionReady,
)
from lockstep.protocol.core.events import (
    Asked,
    BucketMeasured,
    Calling,
    Finished,
    Produced,
    Sealed,
    Served,
    StateTaken,
    StepBegun,
    Tick,
)
from lockstep.protocol.core.ids import CHIEF, BucketId, Role, TaskId
from lockstep.protocol.core.messages import (
    Answer,
    CallMade,
    CallPlace,
    Clip,
    GroupRates,
    Question,
)
from lockstep.protocol.core.timing import CALL_SECONDS
from lockstep.sim.replicas.judged_world import JudgedWorld
from lockstep.sim.replicas.step_loops import StepLoops
from lockstep.sim.replicas.stores import mixed
from lockstep.sim.replicas.world import ReplicaTask
from lockstep.sim.violation import Rule

GET, PUT = "get", "put"
CLIP = Clip(5.0, 2.0)
STEPS = 5
Wanted = tuple[str, int]
Script = Generator[Wanted, object, None]
Told = Generator[Wanted, object, object]
_PAUSE: Wanted = ("pause", 0)


def state_before(task: TaskId, step: int) -> bytes:
    """What a worker takes into this step; the same in two steps in a row."""
    return mixed(task, step // 2).to_bytes(8, "big")


class _Scripted(StepLoops):
    """The script of a worker goes on with what it waits for."""

    def go_on(self, name: TaskId) -> None:
        pass


class LibraryWorld(JudgedWorld):
    """Step 0 is clipped by a norm that workers wait for, 1 has buckets without gradients, and a parameter, 2 is clipped
    by a norm that is known later, 3 is void, 4 publishes values."""

    eager = False

    def __init__(self, seed: int = 0, servers: int = 2, workers: int = 2, steps: int = STEPS, buckets: int = 4) -> None:
        self._scripts: dict[TaskId, Script] = {}
        self._wants: dict[TaskId, Wanted] = {}
        self._questions = 0
        self.late: dict[tuple[TaskId, Wanted], object] = {}
        """Answers that came before the script waits for them."""
        super().__init__(seed, servers, workers, steps, buckets)
        self.loops = _Scripted(self)

    def _hear(self, what: object, told: object) -> object:
        """Every incarnation of a worker hears the same."""
        first = self.heard.setdefault(what, told)
        self.must(first == told, Rule.WRONG_ANSWER, f"{what} was {first!r} and is {told!r}")
        return told

    # -- effects --

    def carry_out(self, name: TaskId, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case BecameMember() if name.role is Role.WORKER:
                    self._scripts[name] = self._program(name, effect)
                    self._wants[name] = _PAUSE
                    self._tell(name, _PAUSE, None)
                case Measure():
                    self._measure(name, effect)
                case Serve():
                    self.put(("store", name), partial(self._serve, name, effect))
                case NormKnown():
                    self._tell(name, ("norm", effect.step), effect.norm)
                case CallAnswered(answer=answer):
                    self._tell(name, ("call", 0), answer.values)
                case Answered(answer=answer):
                    self._tell(name, ("answer", answer.number), answer)
                case VersionReady(version=version):
                    super().carry_out(name, [effect])
                    if self.loops.has(name, version):
                        self._tell(name, ("version", version), None)
                case _:
                    super().carry_out(name, [effect])

    def _tell(self, name: TaskId, what: Wanted, told: object) -> None:
        self.put(("train", name), partial(self._resume, name, self.tasks[name], what, told))

    def _resume(self, name: TaskId, task: ReplicaTask, what: Wanted, told: object) -> None:
        if self.tasks[name] is not task or not task.alive or task.ended is not None:
            return
        if self._wants[name] != what:
            self.late[name, what] = told
            return
        self._wants[name] = ("nothing", 0)
        try:
            wanted = self._scripts[name].send(told)
        except StopIteration:
            return
        self._wants[name] = wanted
        if not self.tasks[name].alive:
            return
        if wanted == _PAUSE or (wanted[0] == "version" and self.loops.has(name, wanted[1])):
            self._tell(name, wanted, None)
        elif (name, wanted) in self.late:
            self._tell(name, wanted, self.late.pop((name, wanted)))

    def kill(self, name: TaskId) -> None:
        super().kill(name)
        for key in [key for key in self.late if key[0] == name]:
            del self.late[key]

    # -- the store --

    def _measure(self, name: TaskId, effect: Measure) -> None:
        task = self.tasks[name]
        cells = [tuple(task.store.arrivals[number]) for number in effect.arrivals]
        norm = mixed(cells, effect.replicas) / 7e10 if cells else 0.0
        self.put(("store", name), partial(self.handle, name, BucketMeasured(effect.bucket, effect.attempt, norm)))

    def _serve(self, name: TaskId, effect: Serve) -> None:
        task, question = self.tasks[name], effect.question
        if question.what == PUT:
            task.store.momentum[question.bucket] = int(question.data)
        state = task.store.momentum.get(question.bucket, 0)
        answer = Answer(question.number, str(state).encode(), "")
        if effect.tells:
            self.handle(name, Served(effect.peer, question, answer))
        else:
            self.say(name, effect.peer, answer)

    # -- the program of a worker --

    def _program(self, name: TaskId, member: BecameMember) -> Script:
        yield from self._call(name, CallPlace(0, OUTSIDE_LOOPS, 0))
        start, step = member.start, max(member.start, 0)
        is_same = start <= 0 or member.state == state_before(name, start)
        self.must(is_same, Rule.NOT_REPEATED, f"{name} begins step {start} with another state")
        self.loops.lay_out(name, start)
        yield ("version", step)
        if name == CHIEF and start <= 0:
            yield from self._load(name)
        while step < self.steps:
            if step > start:
                self.handle(name, StateTaken(step, state_before(name, step)))
                if step == 2 or step == self.steps - 1:
                    yield from self._look_at_states(name, step)
            yield from self._make_step(name, step)
            step += 1
            yield ("version", step)
        self.handle(name, StateTaken(step, state_before(name, step)))
        yield from self._call(name, CallPlace(1, OUTSIDE_LOOPS, 0))
        self.handle(name, Finished(self.steps))

    def _call(self, name: TaskId, place: CallPlace, value: object = "") -> Told:
        data = repr((name.index, place, value)).encode()
        self.handle(name, Calling(CallMade(place, "gather", "bytes", "", "here:1", data)))
        values = yield ("call", 0)
        return self._hear(("call", place), values)

    def _ask(self, name: TaskId, what: str, bucket: BucketId, data: bytes = b"") -> Generator[Wanted, object, int]:
        self._questions += 1
        number = self._questions
        self.handle(name, Asked(Question(number, what, data, bucket, changes=what == PUT)))
        answer = yield ("answer", number)
        assert isinstance(answer, Answer)
        return int(answer.data)

    def _load(self, name: TaskId) -> Script:
        """A state that was loaded before the model was wrapped goes to the servers, if they have none."""
        for bucket in self.plan.buckets:
            if (yield from self._ask(name, GET, bucket.id)) == 0:
                yield from self._ask(name, PUT, bucket.id, str(mixed("loaded", bucket.id)).encode())

    def _look_at_states(self, name: TaskId, step: int) -> Script:
        for bucket in self.plan.buckets:
            state = yield from self._ask(name, GET, bucket.id)
            self._hear(("state", step, bucket.id), state)

    def _make_step(self, name: TaskId, step: int) -> Script:
        task = self.tasks[name]
        values = sorted(task.loop.values.items())
        absent = self._absent(name, step)
        self.handle(name, StepBegun(step, ()))
        for bucket in self.plan.buckets:
            for edition in range(2 if (step, name.index, bucket.id) == (1, 0, 2) else 1):
                if bucket.id in absent:
                    continue
                task.loop.gradients[bucket.id] = [mixed(name, step, bucket.id, edition, values)]
                self.handle(name, Produced(step, bucket.id))
                yield _PAUSE
        clip, norm = ((CLIP,) if step % 2 == 0 and step < 4 else ()), 0.0
        if clip:
            self.handle(name, Sealed(step, absent, (), clip=clip, asks=True, occasion="clipped"))
        if step == 0:
            norm = yield from self._norm(step)
        yield from self._call(name, CallPlace(1, step, 0), norm)
        rates = (GroupRates(("lr",), (0.1 / (step + 1),)),) if name == CHIEF else ()
        void, publishes = step == 3 and name.index == 1, step == 4
        occasion = "clipped" if clip else ""
        without = ((2, 3) if name == CHIEF else (3,)) if step == 1 else ()  # 3 has none on any worker
        told = Sealed(step, absent, rates, without, void, publishes, state=None, clip=clip, occasion=occasion)
        self.handle(name, told)
        if step == 1 and name != CHIEF:
            self._let_time_pass()
        yield from self._call(name, CallPlace(1, step, 1))
        if clip and step:
            yield from self._norm(step)

    def _let_time_pass(self) -> None:
        """A worker that is in a call asks who is missing, and hears that the coordinator has its value."""
        self.now += CALL_SECONDS
        self.put((CHIEF, "time"), partial(self.handle, CHIEF, Tick()))

    def _norm(self, step: int) -> Generator[Wanted, object, float]:
        norm = yield ("norm", step)
        assert isinstance(norm, float)
        self._hear(("norm", step), norm)
        return norm

    def _absent(self, name: TaskId, step: int) -> tuple[BucketId, ...]:
        buckets = [bucket.id for bucket in self.plan.buckets]
        if step == 4:  # the values are the chief's
            return () if name == CHIEF else tuple(buckets)
        return tuple(b for b in buckets if step == 1 and (b == 0 or (b == 1 and name.index == 1)))
