"""The drills: each is a fault as data, with the report that it must produce."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import EXIT_FAILED, EXIT_VERDICT
from lockstep.protocol.core.causes import CANNOT_HEAL, Cause, ReportKind
from lockstep.protocol.core.faults import (
    BlockCallback,
    BlockLoop,
    Callback,
    Die,
    DropMessage,
    DropTensor,
    EndEarly,
    Fault,
    FaultPlace,
    Freeze,
    OddModel,
    OddSetting,
    OddVersion,
    Raise,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.ids import server, worker

STEP = 25
"""The step in which most faults strike: by then it is known how long a step takes."""

PS0, PS1, W0, W1 = str(server(0)), str(server(1)), str(worker(0)), str(worker(1))
ENOSPC = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What goes wrong around the tasks, rather than in them."""

    missing: tuple[str, ...] = ()
    """Tasks that are never started."""
    late: tuple[tuple[str, float], ...] = ()
    """Tasks that start to answer this many seconds late."""
    swapped: tuple[tuple[str, str], ...] = ()
    """Two tasks that were started with each other's index."""
    twice: str = ""
    """A task that is started a second time, at another port."""
    restarted: str = ""
    """A task whose monitor is killed mid-run, and which is restarted at once."""
    leftover: bool = False
    """The server of an older job still holds its port; the workers of the new job find it there."""
    environment: tuple[tuple[str, str], ...] = ()
    cut: tuple[str, str, str] | None = None
    """Two tasks on separate hosts between which packets are dropped: both, from (of the first), or slow."""
    order: tuple[str, ...] = ()
    """Start in this order, a second apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault and what is expected. ``kind``: verdict, notice, or healthy (nothing may be reported)."""

    name: str
    group: str
    story: str
    faults: tuple[Fault, ...] = ()
    around: Surroundings = Surroundings()
    servers: int = 1
    workers: int = 2
    kind: ReportKind | None = ReportKind.VERDICT
    """What must be reported; None: nothing."""
    cause: Cause = Cause.UNKNOWN
    or_cause: Cause | None = None
    """Another cause that is equally right, depending on which of two things happens first."""
    pair: tuple[str, ...] = ()
    """The tasks of which the report must name at least the first as culprit or peer."""
    key: str = ""
    """What the key must contain."""
    step: int = -2
    startup_timeout: float = 60.0
    steps: int = 4000
    elements: int = 256
    bucket_bytes: int = 1024

    def is_right(self, cause: str) -> bool:
        """Whether this is the expected cause."""
        return cause == self.cause.value or (self.or_cause is not None and cause == self.or_cause.value)

    @property
    def ends_with(self) -> int | None:
        """The exit code of the tasks that were not struck; None if the job need not end, or never began."""
        if self.kind is not ReportKind.VERDICT or self.cause not in CANNOT_HEAL or not self.faults:
            return None
        own = all(isinstance(fault, Raise) for fault in self.faults)
        return EXIT_FAILED if own else EXIT_VERDICT

    @property
    def needs_hosts(self) -> bool:
        return self.around.cut is not None


def find(name: str) -> Drill:
    """The drill of this name; KeyError if there is none."""
    return {drill.name: drill for drill in DRILLS}[name]


_GRADIENT, _PARAMETER = "gradient/bucket_", "parameter/bucket_"

DRILLS: tuple[Drill, ...] = (
    # -- a tensor or a message is lost (report 2; failure modes 2, 3, 5) --
    Drill(
        name="request-lost",
        group="lost",
        story="report 2: a worker's request for parameters never reaches the server (modes 2, 3)",
        faults=(DropMessage(W1, PS0, "Pull", STEP),),
        cause=Cause.REQUEST_LOST,
        pair=(W1, PS0),
        key=_PARAMETER,
        step=STEP,
    ),
    Drill(
        name="open-lost",
        group="lost",
        story="a server's request for gradients never reaches one worker (mode 2)",
        faults=(DropMessage(PS0, W1, "Open", STEP),),
        cause=Cause.REQUEST_LOST,
        pair=(W1, PS0),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="gradient-lost",
        group="lost",
        story="a gradient leaves the worker and never arrives (modes 4, 5)",
        faults=(DropTensor(W1, PS0, STEP, 0),),
        cause=Cause.ANSWER_LOST,
        pair=(W1, PS0),
        key=_GRADIENT + "0",
        step=STEP,
    ),
    Drill(
        name="parameter-lost",
        group="lost",
        story="a new version leaves the server and never arrives (modes 4, 5)",
        faults=(DropTensor(PS0, W1, STEP + 1, 1),),
        cause=Cause.ANSWER_LOST,
        pair=(PS0, W1),
        key=_PARAMETER + "1",
        step=STEP,
    ),
    Drill(
        name="commit-lost",
        group="lost",
        story="the message that a step is complete is lost between two servers (modes 3, 12)",
        faults=(DropMessage(PS0, PS1, "Commit", STEP),),
        servers=2,
        cause=Cause.ANSWER_LOST,
        pair=(PS0, PS1),
    ),
    # -- a thread is stuck (report 1; failure modes 1, 56, 57, 64) --
    Drill(
        name="callback-blocks",
        group="stuck",
        story="report 1: the callback for an arrived tensor waits for a copy (modes 1, 57)",
        faults=(BlockCallback(W1, PS0, Callback.TENSOR, STEP),),
        cause=Cause.COMMUNICATION,
        pair=(W1, PS0),
    ),
    Drill(
        name="server-callback-blocks",
        group="stuck",
        story="the same on the server, for the gradients of one worker (mode 1)",
        faults=(BlockCallback(PS0, W1, Callback.TENSOR, STEP),),
        cause=Cause.COMMUNICATION,
        pair=(PS0, W1),
        key=_GRADIENT,
    ),
    Drill(
        name="message-callback-blocks",
        group="stuck",
        story="the callback for control messages blocks: heartbeats pile up unread (mode 64)",
        faults=(BlockCallback(W1, PS0, Callback.MESSAGE, STEP),),
        cause=Cause.COMMUNICATION,
        pair=(W1, PS0),
    ),
    Drill(
        name="loop-blocks",
        group="stuck",
        story="the one loop of a server blocks (modes 56, 64)",
        faults=(BlockLoop(PS0, STEP),),
        cause=Cause.COMMUNICATION,
        pair=(PS0,),
    ),
    Drill(
        name="user-code-sleeps",
        group="stuck",
        story="the training program of a worker hangs",
        faults=(Stick(W1, FaultPlace.USER_CODE, STEP),),
        cause=Cause.USER_CODE,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="device-call-hangs",
        group="stuck",
        story="a device call of a worker does not return (modes 1, 11)",
        faults=(Stick(W1, FaultPlace.DEVICE, STEP),),
        cause=Cause.DEVICE_CALL,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="input-starved",
        group="data",
        story="real data: the input of one worker delivers nothing (modes 47, 48, 49)",
        faults=(Stick(W1, FaultPlace.INPUT, STEP, detail="/data/train-00003-of-01024"),),
        cause=Cause.INPUT_STARVED,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="deadlock",
        group="stuck",
        story="a worker waits for parameters that need its own gradient (modes 18, 60)",
        faults=(Stick(W1, FaultPlace.BEFORE_PRODUCING, STEP),),
        cause=Cause.DEADLOCK,
        pair=(W1, PS0),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="checkpoint-stuck",
        group="disk",
        story="the file system under a checkpoint does not answer (mode 63)",
        faults=(Stick(W0, FaultPlace.CHECKPOINT, STEP, detail="/checkpoints/model.safetensors"),),
        cause=Cause.CHECKPOINT_STUCK,
        pair=(W0,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="disk-full",
        group="disk",
        story="writing fails because the disk is full",
        faults=(Raise(W0, STEP, ENOSPC, "/checkpoints/model.safetensors"),),
        cause=Cause.DISK_FULL,
        pair=(W0,),
    ),
    # -- a whole task is gone or stuck (failure modes 16, 17, 28, 35) --
    Drill(
        name="worker-killed",
        group="lost task",
        story="kill -9 of a worker in the middle of a step (mode 16)",
        faults=(Die(W1, STEP),),
        cause=Cause.DEAD,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="chief-killed",
        group="lost task",
        story="kill -9 of the chief (mode 17)",
        faults=(Die(W0, STEP),),
        cause=Cause.DEAD,
        pair=(W0,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="server-killed",
        group="lost task",
        story="kill -9 of the only server, which is also the coordinator",
        faults=(Die(PS0, STEP),),
        cause=Cause.DEAD,
        pair=(PS0,),
    ),
    Drill(
        name="worker-crashes",
        group="lost task",
        story="a worker dies of a segmentation fault (modes 28, 38, 39)",
        faults=(Die(W1, STEP, 11),),
        cause=Cause.DEAD,
        pair=(W1,),
        step=STEP,
    ),
    Drill(
        name="worker-exits",
        group="lost task",
        story="a library calls exit(7) in a worker (mode 35)",
        faults=(Die(W1, STEP, 0, 7),),
        cause=Cause.DEAD,
        pair=(W1,),
        step=STEP,
    ),
    Drill(
        name="worker-raises",
        group="lost task",
        story="the training program of a worker raises an error",
        faults=(Raise(W1, STEP),),
        cause=Cause.FAILED,
        pair=(W1,),
    ),
    Drill(
        name="stuck-when-the-job-ends",
        group="lost task",
        story="a worker hangs in its program while the job ends; it has to leave too (it had stayed for ever)",
        faults=(Stick(W1, FaultPlace.USER_CODE, STEP), SlowSteps(W0, STEP, 1.0), Die(W0, STEP)),
        cause=Cause.DEAD,
        pair=(W0,),
    ),
    Drill(
        name="frozen-when-the-job-ends",
        group="lost task",
        story="a stopped worker never learns that the job has ended; it has to leave too (it had stayed for ever)",
        faults=(Freeze(W1, STEP), SlowSteps(W0, STEP, 1.0), Die(W0, STEP)),
        cause=Cause.DEAD,
        pair=(W0,),
    ),
    Drill(
        name="worker-frozen",
        group="lost task",
        story="a worker is stopped, by a debugger or a batch system (mode 13: polling continues)",
        faults=(Freeze(W1, STEP),),
        cause=Cause.FROZEN,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="server-frozen",
        group="lost task",
        story="the only server is stopped; it is also the coordinator",
        faults=(Freeze(PS0, STEP),),
        cause=Cause.FROZEN,
        pair=(PS0,),
        key=_PARAMETER,
        step=STEP,
    ),
    Drill(
        name="worker-restarted",
        group="lost task",
        story="a worker and its monitor are killed and restarted at once (modes 30, 33)",
        around=Surroundings(restarted=W1),
        cause=Cause.STALE_INCARNATION,
        or_cause=Cause.DEAD,  # if the new process takes more than two seconds to start, nothing answers at first
        pair=(W1,),
    ),
    # -- slow, but alive: no alarm, a notice with the reason (failure modes 36, 50) --
    Drill(
        name="straggler",
        group="slow",
        story="one worker computes much longer than before (mode 50)",
        faults=(SlowSteps(W1, STEP, 6.0),),
        kind=ReportKind.NOTICE,
        cause=Cause.STRAGGLER,
        pair=(W1,),
        key=_GRADIENT,
        step=STEP,
    ),
    Drill(
        name="server-overloaded",
        group="slow",
        story="the server cannot keep up with its updates (mode 36)",
        faults=(SlowStore(PS0, STEP, 6.0),),
        kind=ReportKind.NOTICE,
        cause=Cause.OVERLOADED_SERVER,
        pair=(PS0,),
        key=_PARAMETER,
        step=STEP,
    ),
    # -- a cluster that does not start (report 3; failure modes 14, 20 to 25, 27, 54, 55) --
    Drill(
        name="never-started",
        group="start",
        story="report 3: a peer is not up, and never starts (modes 20, 21)",
        around=Surroundings(missing=(W1,)),
        startup_timeout=6.0,
        cause=Cause.NEVER_STARTED,
        pair=(W1,),
    ),
    Drill(
        name="server-never-started",
        group="start",
        story="report 3: the server is not up, and never starts (modes 20, 23)",
        around=Surroundings(missing=(PS0,)),
        startup_timeout=6.0,
        cause=Cause.NEVER_STARTED,
        pair=(PS0,),
    ),
    Drill(
        name="late-worker",
        group="start",
        story="report 2: worker 1 is not ready; worker 0 must not train on (modes 14, 19)",
        around=Surroundings(late=((W1, 6.0),)),
        kind=ReportKind.NOTICE,
        cause=Cause.UNKNOWN,
        pair=(W1,),
    ),
    Drill(
        name="swapped-indices",
        group="start",
        story="report 3: the two servers were started with each other's index (mode 27)",
        around=Surroundings(swapped=((PS0, PS1),)),
        servers=2,
        cause=Cause.WIRING,
        pair=(PS0, PS1),
    ),
    Drill(
        name="proxy-set",
        group="start",
        story="report 3: proxy variables are set; cluster traffic must not honour them (mode 24)",
        around=Surroundings(environment=(("http_proxy", "http://127.0.0.1:9"), ("https_proxy", "http://127.0.0.1:9"))),
        kind=None,
        steps=60,
    ),
    Drill(
        name="workers-first",
        group="start",
        story="report 3: the tasks start in what people consider the wrong order (modes 21, 22)",
        around=Surroundings(order=(W1, W0, PS0)),
        kind=None,
        steps=60,
    ),
    Drill(
        name="settings-differ",
        group="start",
        story="one worker was started with another optimizer (mode 59)",
        faults=(OddSetting(W1),),
        cause=Cause.MISMATCH,
        pair=(W1,),
    ),
    Drill(
        name="model-differs",
        group="start",
        story="one worker builds another model (modes 6, 32)",
        faults=(OddModel(W1),),
        cause=Cause.MISMATCH,
        pair=(W1,),
    ),
    Drill(
        name="version-differs",
        group="start",
        story="one worker runs another version of the program (mode 54)",
        faults=(OddVersion(W1),),
        cause=Cause.MISMATCH,
        pair=(W1, PS0),
    ),
    Drill(
        name="duplicate-task",
        group="start",
        story="two processes were started with the same index (modes 30, 55)",
        around=Surroundings(twice=W1),
        cause=Cause.DUPLICATE_TASK,
        pair=(W1,),
    ),
    Drill(
        name="leftover-server",
        group="start",
        story="the server of an older job still runs at its port (modes 31, 32, 34)",
        around=Surroundings(leftover=True),
        cause=Cause.LEFTOVER_SERVER,
        pair=(PS0, W0, W1),
    ),
    Drill(
        name="uneven-steps",
        group="data",
        story="one worker runs out of data before the others (mode 15)",
        faults=(EndEarly(W1, STEP),),
        cause=Cause.OUT_OF_STEP,
        pair=(W1,),
        step=STEP,
    ),
    # -- the network between hosts (failure modes 25, 26, 42) --
    Drill(
        name="link-cut",
        group="network",
        story="a worker and a server can no longer reach each other; the others can (mode 25)",
        around=Surroundings(cut=(PS0, W1, "both")),
        servers=2,
        cause=Cause.LINK_DOWN,
        pair=(PS0, W1),
    ),
    Drill(
        name="link-one-way",
        group="network",
        story="packets from a worker to one server are dropped; the other direction works (mode 25)",
        around=Surroundings(cut=(W1, PS1, "from")),
        servers=2,
        cause=Cause.ONE_WAY_LINK,
        pair=(W1, PS1),
    ),
    Drill(
        name="host-gone",
        group="network",
        story="the host of a worker vanishes without notice (modes 25, 42)",
        around=Surroundings(cut=(PS0, W1, "both")),
        cause=Cause.LINK_DOWN,
        pair=(PS0, W1),
    ),
    Drill(
        name="slow-link",
        group="network",
        story="the network to one worker becomes very slow",
        around=Surroundings(cut=(PS0, W1, "slow")),
        kind=ReportKind.NOTICE,
        cause=Cause.SLOW_LINK,
        pair=(W1, PS0),
        elements=400_000,
        bucket_bytes=1 << 20,
    ),
)
