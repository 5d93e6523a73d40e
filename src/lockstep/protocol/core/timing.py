"""How long things may take, where one such time depends on another; ``broken_rules`` lists the rules that do not hold.

What matters is who waits for whom: a waiter must be more patient than the task it waits for, and a sum of waits must
keep what people are promised. A time that no other depends on stays where it is used.
"""

from __future__ import annotations

from typing import Final

# -- what people are promised, and what they set --

PROMISE_SECONDS: Final = 5.0
"""An unusually long wait is reported within this time."""
VERDICT_SECONDS: Final = 10.0
"""A cause that can be proven is named within this time; drills require it."""
STALL_AFTER_SECONDS: Final = 60.0
"""``--stall_after``: without progress for this long a job has stalled, unless user code is the cause."""
USER_CODE_SECONDS: Final = 600.0
"""``--user_code_timeout``: how long user code may wait, or loop, in one step: long enough for most evaluations."""
STARTUP_SECONDS: Final = 300.0
"""``--startup_timeout``: people start the tasks of a cluster by hand, or a queue does, one after the other."""
REJOIN_SECONDS: Final = 300.0
"""``--rejoin_timeout``: as long as a start, since a lost task is restarted like any other."""
GRACE_SECONDS: Final = 25.0
"""``--grace``: batch systems give 30 s between SIGTERM and SIGKILL, and leaving takes the rest."""

# -- requests, and when they are repeated --

REPEAT_SECONDS: Final = 2.0
"""A request that is not satisfied is repeated this often. Requests are idempotent; repeating also heals a lost one."""
RESEND_SECONDS: Final = 10.0
"""A transfer that left but is still asked for is started again after this long, then after twice as long, and so on.
Long on purpose: on a slow link the bytes may still be on their way, and sending them twice makes it slower."""
STALE_ROSTER_SECONDS: Final = 5 * REPEAT_SECONDS
"""The coordinator reports every two seconds who is missing. If it is silent this long, it is itself the problem."""
HEADLESS_SECONDS: Final = 15 * REPEAT_SECONDS
"""How long a task waits for the coordinator's deputy, once the coordinator has provably ended. The deputy needs the
same proof, and may get it later."""
QUESTION_SECONDS: Final = 5 * REPEAT_SECONDS
"""Longer than for other requests: an answer can carry megabytes, and asking again sends them again."""
CALL_SECONDS: Final = 1.0
"""A worker in a call that is not complete asks this often who is missing: soon enough for the first notice."""
SAVE_AGAIN_SECONDS: Final = 10.0
"""How long after a checkpoint could not be written (a full disk, for example) the next one is tried."""

# -- heartbeats, and which peers count as heard, gone or slow --

HEARTBEAT_SECONDS: Final = 1.0
"""How often each end of a link, and each task to its monitor, sends a heartbeat."""
HEARD_SECONDS: Final = 2.5
"""A peer that sent something this recently is there: two heartbeats, one of them late."""
UNHEARD_SECONDS: Final = 3.0
"""A peer that sent nothing for this long has missed three heartbeats."""
COORDINATOR_UNHEARD_SECONDS: Final = 2.5
"""A task that receives nothing from the coordinator for this long decides on its own."""
GONE_SECONDS: Final = 2.0
"""A peer whose link broke and whose monitor cannot be reached for this long: the other tasks are asked about it."""
LEFT_SECONDS: Final = 3.0
"""A peer that ended with exit code 0 has this long to be explained by the end of the job."""
PUSH_SECONDS: Final = 1.0
"""A watcher receives something at least this often, so that it can tell silence from "nothing new"."""
WATCHER_GONE_SECONDS: Final = 1.5
"""A watcher comes back to wait after each push; one that does not within this time is gone."""

# -- the watchdog: when it looks, and how long it looks --

TICK_SECONDS: Final = 0.4
"""How often it looks at counters; a look costs half a millisecond."""
NOTICE_SECONDS: Final = 2.0
"""No shorter wait is ever reported."""
FIRST_STEPS_NOTICE_SECONDS: Final = 4.0
"""The same while it is not known how long a step takes."""
PATIENCE_SECONDS: Final = 3.0
"""A shorter standstill proves nothing."""
FIRST_STEPS_FACTOR: Final = 10.0
"""The first steps compile, tune and load: a standstill then proves nothing for this many times longer."""
ASK_ALL_SECONDS: Final = 0.6
"""How long to wait for an answer when all tasks are asked."""
ASK_STACK_SECONDS: Final = 1.5
"""How long to wait for a stack: the monitor runs another program to get it."""
WITNESS_SECONDS: Final = 1.0
"""How long another task may take to report what it finds at the address of one that does not answer."""
WITNESS_ASK_SECONDS: Final = 0.5
"""How long it waits for one answer itself."""
OWN_LOOK_SECONDS: Final = 2.0
"""A task that waits this long without a message from the coordinator looks for the cause itself."""
AFTER_COORDINATOR_SECONDS: Final = 10.0
"""The coordinator ends a job that stalls; a task connected to it waits this much longer before doing so itself."""
VERDICT_AGAIN_SECONDS: Final = 30.0
"""How long until a verdict that still holds is repeated: late enough not to fill a log."""
WATCHDOG_JOIN_SECONDS: Final = 6.0
"""How long a task that leaves waits for a look that is under way."""
PAGE_SECONDS: Final = 3.0
"""How long a command of ``--on_verdict`` may run, and a webhook may take to answer."""
PRINTED_SECONDS: Final = 2.0
"""A task prints a report itself if it does not learn within this time that another task has printed it."""
PRINTED_AFTER_SECONDS: Final = 0.5
"""All but the first of those tasks wait this much longer, so that only one prints it."""

# -- evidence: what a task reveals about itself, and when it proves anything --

BOOKS_SECONDS: Final = 0.5
"""How often the loop publishes its machines' books for other threads."""
LOOP_ANSWER_SECONDS: Final = 0.2
"""How long a snapshot waits for the loop; one that is stuck is shown by its last books."""
CPU_WINDOW_SECONDS: Final = 2.0
"""The time over which a thread's work is counted: the shortest wait that is reported."""
STACK_AFTER_SECONDS: Final = 0.5
"""A training thread that has been doing the same for this long has its stack taken with each look."""
LOOP_SECONDS: Final = 1.0
"""What the stacks of at least this long have in common is where a thread is, and not where it was by chance."""
KERNEL_LOOKS: Final = 10
"""How many readings of those counters are kept."""
KERNEL_SECONDS: Final = 0.3
"""How often the kernel's counters of a connection are read, at most, while something is stuck."""
CHANGED_SECONDS: Final = 4.5
"""For how long a verdict that differs from the one before must be found: longer than the kernel's counters reach back,
or the seconds in which a link heals would look like another fault."""
WATCHED_SECONDS: Final = 1.5
"""The kernel's counters prove that nothing came only if they were watched this long: a heartbeat was due."""
STUCK_SECONDS: Final = 2.0
"""A callback, or the loop, that has run this long is stuck: all of them are short."""
SENT_SECONDS: Final = 2.0
"""A tensor that left this long ago over a link that works should be there."""
STOPPED_SECONDS: Final = 2.5
"""A process that is stopped for less than this may just be under a debugger for a moment."""
LAST_WAIT_SECONDS: Final = 10.0
"""Tasks leave one after the other: for this long a missing one does not count as lost while others wait for the end."""

# -- one question to one address --

ASK_SECONDS: Final = 1.0
"""How long a monitor may take to answer; a sound one takes some milliseconds."""
PROBE_SECONDS: Final = 1.0
"""How long a plain connection may take: one lost packet is sent again within a second."""
GREETING_SECONDS: Final = 0.7
"""How long a program may take to show what it is, once it has accepted a connection."""
PROBE_ALL_SECONDS: Final = 0.4
"""The same as a probe where all tasks are asked at once, and people wait for the answer."""
WHY_ASK_SECONDS: Final = 1.1
"""How long ``lockstep why`` waits for all answers from one address: a live task on a busy host may need most of it."""
WHY_AGAIN_SECONDS: Final = 4.0
"""The same for tasks that did not answer, where nothing is proven: their hosts may be that busy."""
WHY_BUDGET_SECONDS: Final = 1.7
"""What may be spent on an answer, less the time that Python takes to start."""
PROOF_SECONDS: Final = 4.0
"""How long the coordinator has to find out why torch.distributed has failed: a monitor knows of a death at once."""

# -- while a cluster forms --

SEARCH_SECONDS: Final = 1.0
"""How often the addresses of missing tasks are probed."""
QUIET_SECONDS: Final = 2.0
"""Tasks never start in the same instant: one that is missing for less than this is not reported."""
SAY_SECONDS: Final = 5.0
"""How often a task that waits for others reports it."""
ASK_AFTER_SECONDS: Final = 3.0
"""A task that is up and has not joined for this long is asked why. A healthy one joins sooner."""
COMPARE_SECONDS: Final = 5.0
"""How often a task that finds no other task compares its host lists with those of others."""
INQUIRY_SECONDS: Final = 2.0
"""No further task is asked for its host lists after this long."""
SEARCH_JOIN_SECONDS: Final = 5.0
"""How long a task that leaves waits for a comparison that is under way."""

# -- opening and closing links and streams --

DIAL_SECONDS: Final = 5.0
"""How long a link of messages may take to open."""
LONGEST_DIAL_SECONDS: Final = 30.0
"""If a link does not open in time, the next try gets twice the time, up to this."""
HELLO_SECONDS: Final = 10.0
"""How long a task that connects may take to identify itself."""
MATCH_SECONDS: Final = 10.0
"""How long an incoming connection waits for its endpoint to be requested here."""
CONNECT_SECONDS: Final = 30.0
"""How long either end of a link waits for the other."""
FLUSH_SECONDS: Final = 1.0
"""How long a side that ends a link waits for its last frames to go out and for the peer to hang up."""
CUT_SECONDS: Final = 2.0
"""How long ``close`` waits for a link's thread after it has cut the connection."""

# -- a task leaves --

SETTLE_SECONDS: Final = 2.0
"""How long a task that leaves waits until the message that the job is over has gone out."""
LEAVE_SECONDS: Final = 5.0
"""How long a task waits for the others to receive the end, and to receive it itself."""
FORCE_SECONDS: Final = 5.0
"""How long a training thread may take to leave after the job has ended; inside a device call it never does. Its process
is then ended by force."""
PROGRAM_FORCE_SECONDS: Final = 8.0
"""The same for the user's own program, which may be in the middle of a long step."""
OVERSTAY_SECONDS: Final = 8.0
"""How long after a worker has reported a failed job its monitor waits before it ends the worker by force."""
MUTE_SECONDS: Final = 5.0
"""After this long without a sign of life from its task, a monitor asks whether the others have left."""
OTHERS_GONE_SECONDS: Final = 1.5
"""How long all others must have been gone before a monitor ends a task without a sign of life."""
TASKS_LEAVE_SECONDS: Final = 12.0
"""How long tasks may take to leave after a verdict that ends the job; drills require it."""
SIGNAL_WINDOW_SECONDS: Final = 5.0
"""How long after one task's signal the coordinator's task may still receive it, if it is meant for the whole job."""
TOLD_SECONDS: Final = 2.0
"""How long a task waits for the job that its signal ends to be over."""
ASIDE_SECONDS: Final = 0.3
"""How long the main thread has to notice on its own that the job is over."""
WIND_UP_SECONDS: Final = 3.0
"""How long it then has to wind up."""
SERVER_WIND_UP_SECONDS: Final = 8.0
"""The same on a server, which waits for the others to leave."""
SAME_SIGNAL_SECONDS: Final = 0.3
"""A signal this soon after the first is the same one: some programs send it to a process and also to its group."""

# -- monitors, and the command that starts a whole cluster, make sure that tasks end --

STOP_SECONDS: Final = 5.0
"""How long a task may take to end when its monitor asks it to."""
LINGER_SECONDS: Final = 3.0
"""How long a monitor answers for a task that failed, so that peers learn of it."""
ANSWERED_FOR_SECONDS: Final = 2.0
"""The minimum for that, for peers that do not watch but ask when the task goes missing."""
TELL_SECONDS: Final = 1.0
"""How long a normal end waits for watchers to be notified."""
LEFTOVER_GRACE_SECONDS: Final = 0.5
"""How long processes that a task left behind may take to end by themselves."""
LEFTOVER_SECONDS: Final = 5.0
"""How long a reaper tries to kill the rest: a process inside a kernel call cannot be killed."""
REAPER_SECONDS: Final = 8.0
"""How long a monitor waits for its reaper."""
FORMER_SECONDS: Final = 10.0
"""How long a sidecar waits for its predecessor (of a former incarnation of its task) to release the address."""
SIDECAR_CLOSE_SECONDS: Final = 5.0
"""How long a program that leaves waits for its sidecar."""
MONITOR_SECONDS: Final = 7.0
"""How long a monitor may take to end when asked to, on top of its task's grace."""
KILL_SECONDS: Final = 1.0
"""The same when it is asked a second time."""
CLEAN_UP_SECONDS: Final = 8.0
"""How long the remains of a whole cluster may take to end by themselves."""


def look_seconds() -> float:
    """The longest that asking all tasks takes: a probe, two questions to a monitor, one to its task."""
    return 3 * ASK_ALL_SECONDS + PROBE_ALL_SECONDS


def print_seconds() -> float:
    """The longest until a task prints a report that no other task has printed."""
    return PRINTED_SECONDS + PRINTED_AFTER_SECONDS + 2 * ASK_ALL_SECONDS


def broken_rules() -> tuple[str, ...]:
    """The rules between these times that do not hold, each as a sentence."""
    rules = (*_promises(), *_requests(), *_hearing(), *_evidence(), *_asking(), *_opening(), *_leaving(), *_ending())
    return tuple(sentence for sentence, holds in rules if not holds)


_Rules = tuple[tuple[str, bool], ...]


def _promises() -> _Rules:
    silent_culprit = ASK_ALL_SECONDS + PROBE_ALL_SECONDS + ASK_STACK_SECONDS
    return (
        (
            "a long wait, a tick and a look keep the promise",
            NOTICE_SECONDS + TICK_SECONDS + look_seconds() <= PROMISE_SECONDS,
        ),
        (
            "they also do if a task does not answer and its monitor gives its stack",
            NOTICE_SECONDS + TICK_SECONDS + silent_culprit <= PROMISE_SECONDS,
        ),
        (
            "so they do where a monitor does not answer and the other tasks are asked about it",
            NOTICE_SECONDS + TICK_SECONDS + ASK_ALL_SECONDS + PROBE_ALL_SECONDS + WITNESS_SECONDS <= PROMISE_SECONDS,
        ),
        (
            "a first notice in the first steps comes before the promise ends",
            FIRST_STEPS_NOTICE_SECONDS < PROMISE_SECONDS,
        ),
        ("no notice comes sooner in the first steps than later", FIRST_STEPS_NOTICE_SECONDS >= NOTICE_SECONDS),
        (
            "what patience proves becomes a verdict in time",
            NOTICE_SECONDS + PATIENCE_SECONDS + TICK_SECONDS + look_seconds() <= VERDICT_SECONDS,
        ),
        ("a verdict comes after the notice", PROMISE_SECONDS < VERDICT_SECONDS),
        ("a job has had its verdict before it counts as stalled", VERDICT_SECONDS < STALL_AFTER_SECONDS),
        (
            "tasks wait for the coordinator for less time than a stall takes",
            AFTER_COORDINATOR_SECONDS < STALL_AFTER_SECONDS,
        ),
        (
            "a verdict is reported twice before a job counts as stalled",
            2 * VERDICT_AGAIN_SECONDS <= STALL_AFTER_SECONDS,
        ),
        ("a verdict is not repeated while the first is being handled", VERDICT_AGAIN_SECONDS > VERDICT_SECONDS),
        ("user code is given longer than a stall", USER_CODE_SECONDS > STALL_AFTER_SECONDS),
        (
            "proof in the first steps comes before a start has failed",
            FIRST_STEPS_FACTOR * PATIENCE_SECONDS < STARTUP_SECONDS,
        ),
        ("a start and a return take longer than a stall", min(STARTUP_SECONDS, REJOIN_SECONDS) > STALL_AFTER_SECONDS),
        (
            "`lockstep why` has asked all tasks within its budget",
            WHY_ASK_SECONDS + PROBE_ALL_SECONDS <= WHY_BUDGET_SECONDS,
        ),
        ("what `lockstep why` asks again gets longer to answer", WHY_AGAIN_SECONDS > 2 * WHY_ASK_SECONDS),
        ("the budget of `lockstep why` keeps its promise of 2 s", WHY_BUDGET_SECONDS < 2.0),
    )


def _requests() -> _Rules:
    return (
        ("a request is repeated before it counts as lost", PATIENCE_SECONDS > REPEAT_SECONDS),
        ("a worker in a call knows who is missing before that is reported", CALL_SECONDS < NOTICE_SECONDS),
        ("a lost answer is reported before it is sent again", RESEND_SECONDS > NOTICE_SECONDS + PATIENCE_SECONDS),
        ("an answer is asked for several times before it is sent again", RESEND_SECONDS >= 3 * REPEAT_SECONDS),
        ("a tensor counts as missing before it is sent again", SENT_SECONDS < RESEND_SECONDS),
        ("a roster is stale only after several that did not come", STALE_ROSTER_SECONDS >= 3 * REPEAT_SECONDS),
        ("a deputy has time to find out that the coordinator has ended", HEADLESS_SECONDS > 2 * GONE_SECONDS),
        ("a question is more patient than a request", QUESTION_SECONDS > REPEAT_SECONDS),
        ("a checkpoint is not tried again with each request", SAVE_AGAIN_SECONDS > REPEAT_SECONDS),
        ("a checkpoint is tried again before the job counts as stalled", SAVE_AGAIN_SECONDS < STALL_AFTER_SECONDS),
    )


def _hearing() -> _Rules:
    return (
        ("a peer counts as unheard only after three heartbeats", UNHEARD_SECONDS >= 3 * HEARTBEAT_SECONDS),
        (
            "a peer counts as heard after two heartbeats, one of them late",
            HEARD_SECONDS >= 2 * HEARTBEAT_SECONDS + TICK_SECONDS,
        ),
        ("no peer counts as both heard and unheard", HEARD_SECONDS < UNHEARD_SECONDS),
        (
            "the coordinator has missed two heartbeats before others decide",
            COORDINATOR_UNHEARD_SECONDS > 2 * HEARTBEAT_SECONDS,
        ),
        ("the coordinator no longer counts as heard when others decide", COORDINATOR_UNHEARD_SECONDS >= HEARD_SECONDS),
        ("a peer that is gone was probed after its last heartbeat", GONE_SECONDS >= HEARTBEAT_SECONDS + PROBE_SECONDS),
        (
            "a lost task is known before the job counts as stalled",
            GONE_SECONDS + WITNESS_SECONDS < STALL_AFTER_SECONDS,
        ),
        (
            "the message that the job is over comes before a peer counts as having left early",
            LEFT_SECONDS > SETTLE_SECONDS,
        ),
        ("a watcher comes back within the time after which it is gone", WATCHER_GONE_SECONDS > PUSH_SECONDS),
    )


def _evidence() -> _Rules:
    return (
        (
            "the books are published twice within the shortest wait that is reported",
            2 * BOOKS_SECONDS <= NOTICE_SECONDS,
        ),
        ("the watchdog looks twice within that wait", 2 * TICK_SECONDS <= NOTICE_SECONDS),
        ("work is counted over no longer than that wait", CPU_WINDOW_SECONDS <= NOTICE_SECONDS),
        ("several looks fall into the time over which work is counted", CPU_WINDOW_SECONDS >= 3 * TICK_SECONDS),
        (
            "a heartbeat falls into the time for which the kernel is watched",
            HEARTBEAT_SECONDS + max(TICK_SECONDS, KERNEL_SECONDS) <= WATCHED_SECONDS,
        ),
        ("a verdict does not change by old counters", CHANGED_SECONDS > KERNEL_LOOKS * TICK_SECONDS),
        ("the kernel is watched long enough within the watchdog's patience", WATCHED_SECONDS < PATIENCE_SECONDS),
        ("a stuck thread is proven when its wait is reported", STUCK_SECONDS <= NOTICE_SECONDS),
        (
            "where a thread computes is known when its wait is reported",
            STACK_AFTER_SECONDS + LOOP_SECONDS + TICK_SECONDS <= NOTICE_SECONDS,
        ),
        ("a stuck loop has missed its books", STUCK_SECONDS > BOOKS_SECONDS),
        ("a tensor counts as missing when its wait is reported", SENT_SECONDS <= NOTICE_SECONDS),
        ("a stopped process is proven before patience ends", STOPPED_SECONDS < NOTICE_SECONDS + PATIENCE_SECONDS),
        ("a stopped process is proven in time", STOPPED_SECONDS + TICK_SECONDS + look_seconds() <= VERDICT_SECONDS),
        (
            "a task looks by itself only after the coordinator had time for a look",
            OWN_LOOK_SECONDS >= TICK_SECONDS + 2 * ASK_ALL_SECONDS,
        ),
        (
            "the coordinator has ended a stalled job before another task does",
            look_seconds() + ASK_STACK_SECONDS + LEAVE_SECONDS < AFTER_COORDINATOR_SECONDS,
        ),
        (
            "all tasks that leave have left before a missing one is a loss",
            LAST_WAIT_SECONDS >= LEAVE_SECONDS + SETTLE_SECONDS,
        ),
    )


def _asking() -> _Rules:
    one = PROBE_SECONDS + ASK_SECONDS
    return (
        (
            "a task with a stuck loop still answers when all tasks are asked",
            min(ASK_ALL_SECONDS, WHY_ASK_SECONDS) > LOOP_ANSWER_SECONDS,
        ),
        (
            "a task that is asked about another has asked its monitor in that time",
            WITNESS_SECONDS >= PROBE_ALL_SECONDS + WITNESS_ASK_SECONDS,
        ),
        ("a probe takes no longer than a question", max(PROBE_SECONDS, GREETING_SECONDS) <= ASK_SECONDS),
        (
            "when all tasks are asked, a probe takes no longer than a question",
            min(ASK_ALL_SECONDS, WHY_ASK_SECONDS) >= PROBE_ALL_SECONDS,
        ),
        ("asking all tasks is less patient than asking one", ASK_ALL_SECONDS <= ASK_SECONDS),
        ("a comparison of host lists has ended before the next", INQUIRY_SECONDS + one < COMPARE_SECONDS),
        ("a task that leaves waits for a comparison to end", INQUIRY_SECONDS + one < SEARCH_JOIN_SECONDS),
        ("a missing task was probed before it is reported", QUIET_SECONDS > SEARCH_SECONDS),
        ("a missing task is reported before it is asked why", QUIET_SECONDS < ASK_AFTER_SECONDS),
        ("a missing task is reported in time", QUIET_SECONDS + SEARCH_SECONDS + one <= PROMISE_SECONDS),
        ("each report of missing tasks is new", SAY_SECONDS > SEARCH_SECONDS),
        ("a look, and a stack, fit into the time for proof", look_seconds() + ASK_STACK_SECONDS < PROOF_SECONDS),
    )


def _opening() -> _Rules:
    return (
        ("the dialer of a stream waits longer than the other end waits for its hello", CONNECT_SECONDS > HELLO_SECONDS),
        ("the dialer of a stream waits longer than the other end waits for its match", CONNECT_SECONDS > MATCH_SECONDS),
        ("a first dial ends before the other end stops waiting for its hello", DIAL_SECONDS < HELLO_SECONDS),
        ("a last dial gives the other end its whole time", LONGEST_DIAL_SECONDS > HELLO_SECONDS),
        ("a dial is longer than the questions before it", DIAL_SECONDS > PROBE_SECONDS + ASK_SECONDS),
        ("a last dial ends before a start does", LONGEST_DIAL_SECONDS < STARTUP_SECONDS),
        ("a link is cut and closed within the time to wind up", FLUSH_SECONDS + CUT_SECONDS <= WIND_UP_SECONDS),
    )


def _leaving() -> _Rules:
    return (
        (
            "the watchdog's last look has ended when a task leaves",
            look_seconds() + ASK_STACK_SECONDS < WATCHDOG_JOIN_SECONDS,
        ),
        ("a task that leaves prints a report that no other has printed", print_seconds() < WATCHDOG_JOIN_SECONDS),
        ("the first of the others has printed a report before the next does", PRINTED_AFTER_SECONDS > TICK_SECONDS),
        ("a report that no task has printed is out in time", NOTICE_SECONDS + print_seconds() < VERDICT_SECONDS),
        ("a report is printed by the coordinator before others do", PRINTED_SECONDS > TICK_SECONDS + ASK_ALL_SECONDS),
        ("the end has gone out before a task stops waiting for others", SETTLE_SECONDS < LEAVE_SECONDS),
        ("the end has gone out before a process is forced to end", SETTLE_SECONDS < WIND_UP_SECONDS),
        (
            "a server has seen the others off before it is forced to end",
            LEAVE_SECONDS + SETTLE_SECONDS < SERVER_WIND_UP_SECONDS,
        ),
        ("a drill lets a task see the others off", LEAVE_SECONDS + SETTLE_SECONDS < TASKS_LEAVE_SECONDS),
        ("a worker is ended by force before a drill gives up on it", FORCE_SECONDS < TASKS_LEAVE_SECONDS),
        ("a worker has told the end before it is ended by force", FORCE_SECONDS > SETTLE_SECONDS),
        ("a program has longer than a benchmark to leave", FORCE_SECONDS < PROGRAM_FORCE_SECONDS < TASKS_LEAVE_SECONDS),
        ("a monitor waits until a worker has forced its own end", OVERSTAY_SECONDS > FORCE_SECONDS + SETTLE_SECONDS),
        ("a task that is started again at once is not called gone", OTHERS_GONE_SECONDS > HEARTBEAT_SECONDS),
        ("a mute task is ended as soon as one that stays", MUTE_SECONDS + OTHERS_GONE_SECONDS < OVERSTAY_SECONDS),
        (
            "a monitor ends a mute task before a drill gives up on it",
            LEAVE_SECONDS + SETTLE_SECONDS + OTHERS_GONE_SECONDS + ASK_SECONDS < TASKS_LEAVE_SECONDS,
        ),
        ("a task that gives signs of life is not called mute", MUTE_SECONDS > 4 * TICK_SECONDS),
        (
            "a task waits for the end that a signal asks for as long as it may take to go out",
            TOLD_SECONDS >= SETTLE_SECONDS,
        ),
        ("a signal to all has come to all before one counts as a loss", SIGNAL_WINDOW_SECONDS > TOLD_SECONDS),
        ("it is known within the grace whether a signal is meant for all", SIGNAL_WINDOW_SECONDS < GRACE_SECONDS),
        ("the grace, and leaving after it, keep the 30 s of batch systems", GRACE_SECONDS + STOP_SECONDS <= 30.0),
        ("a person's second signal is not mistaken for the first", SAME_SIGNAL_SECONDS <= 0.5),
    )


def _ending() -> _Rules:
    return (
        (
            "a monitor does not kill a task that winds up after the end of its job",
            STOP_SECONDS > ASIDE_SECONDS + WIND_UP_SECONDS,
        ),
        ("a monitor lets a task wait until its end is reported", STOP_SECONDS > TOLD_SECONDS + ASIDE_SECONDS),
        (
            "a cluster waits longer for a monitor than the monitor for its task",
            MONITOR_SECONDS > STOP_SECONDS + LEFTOVER_GRACE_SECONDS,
        ),
        ("a monitor waits longer than its reaper", REAPER_SECONDS > LEFTOVER_SECONDS),
        ("a reaper kills what is left before it gives up", LEFTOVER_SECONDS > LEFTOVER_GRACE_SECONDS),
        ("a cluster waits longer for what is left than a reaper", CLEAN_UP_SECONDS > LEFTOVER_SECONDS),
        ("a cluster waits longer for what is left than for its monitors", CLEAN_UP_SECONDS > MONITOR_SECONDS),
        ("a second request to end is less patient", KILL_SECONDS < MONITOR_SECONDS),
        ("a failure is answered for longer than a normal end", TELL_SECONDS < ANSWERED_FOR_SECONDS <= LINGER_SECONDS),
        ("a failure is answered for until peers have asked", ANSWERED_FOR_SECONDS >= 2 * HEARTBEAT_SECONDS),
        ("a task that ends can still page somebody", PAGE_SECONDS < OVERSTAY_SECONDS),
        ("a sidecar waits until that of a former incarnation has gone", FORMER_SECONDS > LINGER_SECONDS),
        ("a program waits for its sidecar while the sidecar lingers", SIDECAR_CLOSE_SECONDS > LINGER_SECONDS),
    )
