"""How long things may take, where one such time depends on another; ``broken_rules`` says which of them do not match.

What matters is who waits for whom: a waiter must be more patient than the one it waits for, and a sum of waits must
keep what is promised to people. A time on which no other depends stays where it is used.
"""

from __future__ import annotations

from typing import Final

# -- what people are promised, and what they set --

PROMISE_SECONDS: Final = 5.0
"""A wait that is longer than usual is reported within this time."""
VERDICT_SECONDS: Final = 10.0
"""A cause that can be proven is named within this time: what a drill asks for."""
STALL_AFTER_SECONDS: Final = 60.0
"""``--stall_after``: without progress for this long a job has stalled, whatever the cause."""
STARTUP_SECONDS: Final = 300.0
"""``--startup_timeout``: people start the tasks of a cluster by hand, or a queue does, one after the other."""
REJOIN_SECONDS: Final = 300.0
"""``--rejoin_timeout``: as long as a start, since a lost task is started again like any other."""
GRACE_SECONDS: Final = 25.0
"""``--grace``: batch systems give 30 s from SIGTERM to SIGKILL, and leaving takes the rest."""

# -- requests, and when they are repeated --

REPEAT_SECONDS: Final = 2.0
"""A request that is not satisfied is repeated this often. Requests are idempotent; repeating also heals a lost one."""
RESEND_SECONDS: Final = 10.0
"""A transfer that left but is still asked for is started again after this long, then after twice as long, and so on.
Long on purpose: on a slow link the bytes may still be on their way, and sending them twice makes it slower."""
STALE_ROSTER_SECONDS: Final = 5 * REPEAT_SECONDS
"""The coordinator reports who is missing every two seconds. One that is silent this long is itself the problem."""
QUESTION_SECONDS: Final = 5 * REPEAT_SECONDS
"""Longer than for other requests: an answer can carry megabytes, and asking again sends them again."""
SAVE_AGAIN_SECONDS: Final = 10.0
"""How soon after a checkpoint that could not be written (a full disk, for example) the next one is tried."""

# -- heartbeats, and who counts as heard, gone or slow --

HEARTBEAT_SECONDS: Final = 1.0
"""How often each end of a link, and each task to its monitor, sends a heartbeat."""
HEARD_SECONDS: Final = 2.5
"""A peer that sent something this recently is there: two heartbeats, and a late one's delay."""
UNHEARD_SECONDS: Final = 3.0
"""A peer that sent nothing for this long has missed three heartbeats."""
COORDINATOR_UNHEARD_SECONDS: Final = 2.5
"""A task that receives nothing from the coordinator for this long decides on its own."""
GONE_SECONDS: Final = 2.0
"""A peer whose link broke and whose monitor cannot be reached for this long: the other tasks are asked about it."""
LEFT_SECONDS: Final = 3.0
"""A peer that ended with exit code 0 has this long to be explained by the end of the job."""
PUSH_SECONDS: Final = 1.0
"""A watcher is sent something at least this often, so that it can tell silence from "nothing new"."""
WATCHER_GONE_SECONDS: Final = 1.5
"""A watcher comes back to wait after each push; one that did not is gone."""

# -- the watchdog: when it looks, and how long it looks --

TICK_SECONDS: Final = 0.4
"""How often it looks at counters; a look costs half a millisecond."""
NOTICE_SECONDS: Final = 2.0
"""No shorter wait is ever reported."""
FIRST_STEPS_NOTICE_SECONDS: Final = 4.0
"""The same before it is known how long a step takes."""
PATIENCE_SECONDS: Final = 3.0
"""A shorter standstill proves nothing."""
FIRST_STEPS_FACTOR: Final = 10.0
"""The first steps compile, tune and load: a standstill then proves nothing for this many times longer."""
ASK_ALL_SECONDS: Final = 0.6
"""How long an answer is waited for when all tasks are asked."""
ASK_STACK_SECONDS: Final = 1.5
"""How long a stack is waited for: its monitor runs another program to get it."""
WITNESS_SECONDS: Final = 1.0
"""How long another task may take to report what it finds at the address of one that does not answer."""
WITNESS_ASK_SECONDS: Final = 0.5
"""How long it waits for one answer itself."""
OWN_LOOK_SECONDS: Final = 2.0
"""A task that waits this long without a message from the coordinator looks for the cause itself."""
AFTER_COORDINATOR_SECONDS: Final = 10.0
"""The coordinator ends a job that stalls; a task that is connected to it waits this much longer before it does so."""
VERDICT_AGAIN_SECONDS: Final = 30.0
"""How long until a verdict that still holds is repeated: late enough not to fill a log."""
WATCHDOG_JOIN_SECONDS: Final = 6.0
"""A task that leaves waits for a look that is under way."""
PRINTED_SECONDS: Final = 2.0
"""A task that knows of a report and does not learn within this time that another has printed it prints it itself."""
PRINTED_AFTER_SECONDS: Final = 0.5
"""All but the first of those wait this much longer, so that one of them prints it."""

# -- evidence: what a task shows of itself, and from when on it proves anything --

BOOKS_SECONDS: Final = 0.5
"""How often the loop publishes its machines' books for other threads."""
LOOP_ANSWER_SECONDS: Final = 0.2
"""How long a snapshot waits for the loop; one that is stuck is shown by its last books."""
CPU_WINDOW_SECONDS: Final = 2.0
"""The time over which a thread's work is counted: that of the shortest wait which is spoken of."""
KERNEL_SECONDS: Final = 0.3
"""How often the kernel's counters of a connection are read, at most, while something is stuck."""
WATCHED_SECONDS: Final = 1.5
"""The kernel's counters prove that nothing came only if they were watched this long: a heartbeat was due."""
STUCK_SECONDS: Final = 2.0
"""A callback, or the loop, that has run this long does not come back soon: all of them are short."""
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
WHY_ASK_SECONDS: Final = 0.4
"""How long ``lockstep why`` waits for one answer: all of them together must keep its promise."""
WHY_BUDGET_SECONDS: Final = 1.7
"""What may be spent on an answer, less the time that Python takes to start."""
PROOF_SECONDS: Final = 4.0
"""How long proof is looked for after torch.distributed has failed: a monitor knows of a death at once."""

# -- while a cluster forms --

SEARCH_SECONDS: Final = 1.0
"""How often the addresses of missing tasks are looked at."""
QUIET_SECONDS: Final = 2.0
"""Tasks never start in the same instant: one that is missing for less than this is not reported."""
SAY_SECONDS: Final = 5.0
"""How often a task that waits for others reports it."""
ASK_AFTER_SECONDS: Final = 3.0
"""A task that is up and has not joined for this long is asked why. A healthy one joins sooner."""
COMPARE_SECONDS: Final = 5.0
"""How often a task that finds nobody compares its host lists with those of others."""
INQUIRY_SECONDS: Final = 2.0
"""No further task is asked for its host lists after this long."""
SEARCH_JOIN_SECONDS: Final = 5.0
"""A task that leaves waits for a comparison that is under way."""

# -- links and streams are opened and closed --

DIAL_SECONDS: Final = 5.0
"""How long a link of messages may take to open."""
LONGEST_DIAL_SECONDS: Final = 30.0
"""Where a link takes longer to open than it was given, the next try gets twice the time, up to this."""
HELLO_SECONDS: Final = 10.0
"""How long a task that connects may take to identify itself."""
MATCH_SECONDS: Final = 10.0
"""How long an incoming connection waits until its endpoint is asked for here."""
CONNECT_SECONDS: Final = 30.0
"""How long either end of a link waits for the other one."""
FLUSH_SECONDS: Final = 1.0
"""How long a side that ends a link waits for its last frames to go out and for the peer to hang up."""
CUT_SECONDS: Final = 2.0
"""How long ``close`` waits for a link's thread after it has cut the connection."""

# -- a task leaves --

SETTLE_SECONDS: Final = 2.0
"""How long a task that leaves waits until the message that the job is over has gone out."""
LEAVE_SECONDS: Final = 5.0
"""How long a task waits for the others to receive the end, and to receive it itself."""
GIVE_UP_SECONDS: Final = 10.0
"""How long a training thread may take to leave after the job has ended; inside a device call it never does."""
TASKS_LEAVE_SECONDS: Final = 8.0
"""How long after a verdict that ends the job its tasks may take to leave: what a drill asks for."""
SIGNAL_WINDOW_SECONDS: Final = 5.0
"""How long after one task the signal of a whole job may still come to the coordinator's."""
TOLD_SECONDS: Final = 2.0
"""How long a task waits until the job that its signal ends is over."""
ASIDE_SECONDS: Final = 0.3
"""How long the main thread has to notice on its own that the job is over."""
WIND_UP_SECONDS: Final = 3.0
"""How long it then has to wind up."""
SERVER_WIND_UP_SECONDS: Final = 8.0
"""The same on a server, which waits for the others to leave."""
SAME_SIGNAL_SECONDS: Final = 0.3
"""A signal this soon after the first is the same one: some programs send it to a process and also to its group."""

# -- monitors, and the command that starts a whole cluster, see to the end of tasks --

STOP_SECONDS: Final = 5.0
"""How long a task may take to end when its monitor asks it to."""
LINGER_SECONDS: Final = 3.0
"""How long a monitor answers for a task that failed, so that peers learn of it."""
ANSWERED_FOR_SECONDS: Final = 2.0
"""The least time for that, for peers that do not watch but ask when they miss the task."""
TELL_SECONDS: Final = 1.0
"""How long a quiet end waits until watchers are notified."""
LEFTOVER_GRACE_SECONDS: Final = 0.5
"""How long what a task left behind may take to end by itself."""
LEFTOVER_SECONDS: Final = 5.0
"""How long a reaper tries to kill the rest: a process inside a kernel call cannot be killed."""
REAPER_SECONDS: Final = 8.0
"""How long a monitor waits for its reaper."""
FORMER_SECONDS: Final = 10.0
"""How long a sidecar waits for that of a former incarnation of its task to release the address."""
SIDECAR_CLOSE_SECONDS: Final = 5.0
"""How long a program that leaves waits for its sidecar."""
MONITOR_SECONDS: Final = 7.0
"""How long a monitor may take to end when asked to, beside the grace of its task."""
KILL_SECONDS: Final = 1.0
"""The same when it is asked for the second time."""
CLEAN_UP_SECONDS: Final = 8.0
"""How long what is left of a whole cluster may take to end by itself."""


def look_seconds() -> float:
    """How long it takes at most to ask all tasks: a probe, two questions to a monitor, one to its task."""
    return 3 * ASK_ALL_SECONDS + PROBE_ALL_SECONDS


def print_seconds() -> float:
    """How long it takes at most until a task prints a report that no other task has printed."""
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
            "so they do where a task does not answer and its monitor gives its stack",
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
            "what is proven by patience is a verdict in time",
            NOTICE_SECONDS + PATIENCE_SECONDS + TICK_SECONDS + look_seconds() <= VERDICT_SECONDS,
        ),
        ("a verdict comes after the notice", PROMISE_SECONDS < VERDICT_SECONDS),
        ("a job has had its verdict before it counts as stalled", VERDICT_SECONDS < STALL_AFTER_SECONDS),
        (
            "the coordinator is waited for less long than a stall itself",
            AFTER_COORDINATOR_SECONDS < STALL_AFTER_SECONDS,
        ),
        ("a verdict is said twice before a job counts as stalled", 2 * VERDICT_AGAIN_SECONDS <= STALL_AFTER_SECONDS),
        ("a verdict is not said again while the first is being dealt with", VERDICT_AGAIN_SECONDS > VERDICT_SECONDS),
        (
            "proof in the first steps comes before a start has failed",
            FIRST_STEPS_FACTOR * PATIENCE_SECONDS < STARTUP_SECONDS,
        ),
        ("a start and a return take longer than a stall", min(STARTUP_SECONDS, REJOIN_SECONDS) > STALL_AFTER_SECONDS),
        (
            "`lockstep why` has asked everybody within its budget",
            3 * WHY_ASK_SECONDS + PROBE_ALL_SECONDS <= WHY_BUDGET_SECONDS,
        ),
        ("the budget of `lockstep why` keeps its promise of 2 s", WHY_BUDGET_SECONDS < 2.0),
    )


def _requests() -> _Rules:
    return (
        ("a request is repeated before it counts as lost", PATIENCE_SECONDS > REPEAT_SECONDS),
        ("a lost answer is spoken of before it is sent again", RESEND_SECONDS > NOTICE_SECONDS + PATIENCE_SECONDS),
        ("an answer is asked for several times before it is sent again", RESEND_SECONDS >= 3 * REPEAT_SECONDS),
        ("a tensor counts as missing before it is sent again", SENT_SECONDS < RESEND_SECONDS),
        ("a roster is stale only after several that did not come", STALE_ROSTER_SECONDS >= 3 * REPEAT_SECONDS),
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
        ("nobody counts as heard and as unheard", HEARD_SECONDS < UNHEARD_SECONDS),
        (
            "the coordinator has missed two heartbeats before others decide",
            COORDINATOR_UNHEARD_SECONDS > 2 * HEARTBEAT_SECONDS,
        ),
        ("the coordinator no longer counts as heard when others decide", COORDINATOR_UNHEARD_SECONDS >= HEARD_SECONDS),
        ("a gone peer was looked at after its last heartbeat", GONE_SECONDS >= HEARTBEAT_SECONDS + PROBE_SECONDS),
        (
            "a lost task is known before the job counts as stalled",
            GONE_SECONDS + WITNESS_SECONDS < STALL_AFTER_SECONDS,
        ),
        ("the message that the job is over comes before a peer has left early", LEFT_SECONDS > SETTLE_SECONDS),
        ("a watcher comes back within the time after which it is gone", WATCHER_GONE_SECONDS > PUSH_SECONDS),
    )


def _evidence() -> _Rules:
    return (
        (
            "the books are published twice within the shortest wait that is spoken of",
            2 * BOOKS_SECONDS <= NOTICE_SECONDS,
        ),
        ("the watchdog looks twice within that wait", 2 * TICK_SECONDS <= NOTICE_SECONDS),
        ("work is counted over no longer than that wait", CPU_WINDOW_SECONDS <= NOTICE_SECONDS),
        ("several looks fall into the time over which work is counted", CPU_WINDOW_SECONDS >= 3 * TICK_SECONDS),
        (
            "a heartbeat falls into the time for which the kernel is watched",
            HEARTBEAT_SECONDS + max(TICK_SECONDS, KERNEL_SECONDS) <= WATCHED_SECONDS,
        ),
        ("the kernel is watched long enough within the watchdog's patience", WATCHED_SECONDS < PATIENCE_SECONDS),
        ("a stuck thread is proven when its wait is spoken of", STUCK_SECONDS <= NOTICE_SECONDS),
        ("a stuck loop has missed its books", STUCK_SECONDS > BOOKS_SECONDS),
        ("a tensor counts as missing when its wait is spoken of", SENT_SECONDS <= NOTICE_SECONDS),
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
        ("all who leave have left before a missing one is a loss", LAST_WAIT_SECONDS >= LEAVE_SECONDS + SETTLE_SECONDS),
    )


def _asking() -> _Rules:
    one = PROBE_SECONDS + ASK_SECONDS
    return (
        (
            "a task with a stuck loop still answers those who ask all",
            min(ASK_ALL_SECONDS, WHY_ASK_SECONDS) > LOOP_ANSWER_SECONDS,
        ),
        (
            "a task that is asked about another has asked its monitor in that time",
            WITNESS_SECONDS >= PROBE_ALL_SECONDS + WITNESS_ASK_SECONDS,
        ),
        ("a probe is no longer than a question", max(PROBE_SECONDS, GREETING_SECONDS) <= ASK_SECONDS),
        (
            "where all are asked, a probe is no longer than a question",
            min(ASK_ALL_SECONDS, WHY_ASK_SECONDS) >= PROBE_ALL_SECONDS,
        ),
        ("who asks all is less patient than who asks one", ASK_ALL_SECONDS <= ASK_SECONDS),
        ("a comparison of host lists has ended before the next", INQUIRY_SECONDS + one < COMPARE_SECONDS),
        ("who leaves waits for a comparison to end", INQUIRY_SECONDS + one < SEARCH_JOIN_SECONDS),
        ("a missing task was looked at before it is spoken of", QUIET_SECONDS > SEARCH_SECONDS),
        ("a missing task is spoken of before it is asked why", QUIET_SECONDS < ASK_AFTER_SECONDS),
        ("a missing task is spoken of in time", QUIET_SECONDS + SEARCH_SECONDS + one <= PROMISE_SECONDS),
        ("what is said of missing tasks is new each time", SAY_SECONDS > SEARCH_SECONDS),
        ("a look, and a stack, fit into the time for proof", look_seconds() + ASK_STACK_SECONDS < PROOF_SECONDS),
    )


def _opening() -> _Rules:
    return (
        ("who dials a stream waits longer than the other end for its hello", CONNECT_SECONDS > HELLO_SECONDS),
        ("who dials a stream waits longer than the other end for its match", CONNECT_SECONDS > MATCH_SECONDS),
        ("a first dial ends before the other end stops to listen for its hello", DIAL_SECONDS < HELLO_SECONDS),
        ("a last dial gives the other end its whole time", LONGEST_DIAL_SECONDS > HELLO_SECONDS),
        ("a dial is longer than the questions before it", DIAL_SECONDS > PROBE_SECONDS + ASK_SECONDS),
        ("a last dial ends before a start does", LONGEST_DIAL_SECONDS < STARTUP_SECONDS),
        ("a link is cut and closed within the time to wind up", FLUSH_SECONDS + CUT_SECONDS <= WIND_UP_SECONDS),
    )


def _leaving() -> _Rules:
    longest_proof = PROOF_SECONDS + look_seconds() + ASK_STACK_SECONDS
    return (
        (
            "the watchdog's last look has ended when a task leaves",
            look_seconds() + ASK_STACK_SECONDS < WATCHDOG_JOIN_SECONDS,
        ),
        ("a task that leaves prints a report that no other has printed", print_seconds() < WATCHDOG_JOIN_SECONDS),
        ("the first of the others has printed a report before the next does", PRINTED_AFTER_SECONDS > TICK_SECONDS),
        ("a report that nobody has printed is out in time", NOTICE_SECONDS + print_seconds() < VERDICT_SECONDS),
        ("a report is printed by the coordinator before others do", PRINTED_SECONDS > TICK_SECONDS + ASK_ALL_SECONDS),
        ("the end has gone out before a task stops to wait for others", SETTLE_SECONDS < LEAVE_SECONDS),
        ("the end has gone out before a process is forced to end", SETTLE_SECONDS < WIND_UP_SECONDS),
        (
            "a server has seen the others off before it is forced to end",
            LEAVE_SECONDS + SETTLE_SECONDS < SERVER_WIND_UP_SECONDS,
        ),
        ("a drill lets a task see the others off", LEAVE_SECONDS + SETTLE_SECONDS < TASKS_LEAVE_SECONDS),
        ("a training thread that looks for proof is not given up", longest_proof < GIVE_UP_SECONDS),
        ("the end that a signal asks for is awaited as long as it may take to go out", TOLD_SECONDS >= SETTLE_SECONDS),
        ("a signal to all has come to all before one counts as a loss", SIGNAL_WINDOW_SECONDS > TOLD_SECONDS),
        ("it is known within the grace whether a signal is meant for all", SIGNAL_WINDOW_SECONDS < GRACE_SECONDS),
        ("the grace, and leaving after it, keep the 30 s of batch systems", GRACE_SECONDS + STOP_SECONDS <= 30.0),
        ("a second signal of a person is not taken for the first", SAME_SIGNAL_SECONDS <= 0.5),
    )


def _ending() -> _Rules:
    return (
        (
            "a monitor kills no task that winds up after the end of its job",
            STOP_SECONDS > ASIDE_SECONDS + WIND_UP_SECONDS,
        ),
        ("a monitor lets a task wait until its end is told", STOP_SECONDS > TOLD_SECONDS + ASIDE_SECONDS),
        (
            "a cluster waits longer for a monitor than that one for its task",
            MONITOR_SECONDS > STOP_SECONDS + LEFTOVER_GRACE_SECONDS,
        ),
        ("a monitor waits longer than its reaper", REAPER_SECONDS > LEFTOVER_SECONDS),
        ("a reaper kills what is left before it gives up", LEFTOVER_SECONDS > LEFTOVER_GRACE_SECONDS),
        ("a cluster waits longer for what is left than a reaper", CLEAN_UP_SECONDS > LEFTOVER_SECONDS),
        ("a cluster waits longer for what is left than for its monitors", CLEAN_UP_SECONDS > MONITOR_SECONDS),
        ("who asks twice is less patient", KILL_SECONDS < MONITOR_SECONDS),
        ("a failure is answered for longer than a quiet end", TELL_SECONDS < ANSWERED_FOR_SECONDS <= LINGER_SECONDS),
        ("a failure is answered for until peers have asked", ANSWERED_FOR_SECONDS >= 2 * HEARTBEAT_SECONDS),
        ("a sidecar waits until that of a former life has gone", FORMER_SECONDS > LINGER_SECONDS),
        ("a program waits for its sidecar while that one lingers", SIDECAR_CLOSE_SECONDS > LINGER_SECONDS),
    )
