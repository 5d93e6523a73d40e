"""What an engine gives in TF_CONFIG instead of flags: which tasks there are, and which this one is."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cli.flags.flag import Value
from lockstep.cli.flags.parsing import CommandLine, Given
from lockstep.runtime.startup.tf_config import read_tf_config

EVALUATED_EVERY = 60
"""Seconds between two evaluations of an evaluator, which starts with the others: there is nothing to evaluate yet."""
_DESCRIBE_A_TASK = ("ps", "workers", "job_name", "eval")


def add_tf_config(line: CommandLine, environ: Mapping[str, str]) -> None:
    """Fill in what the variable says, where the flags name no task; lists that they give go first.

    BadInput if the variable makes no sense.
    """
    if line.mistakes or any(line.gives(name) for name in _DESCRIBE_A_TASK):
        return
    found = read_tf_config(environ)
    if found is None:
        return
    if found.evaluates:
        _evaluate(line)
        return
    ps_hosts, worker_hosts = found.lists(_hosts(line, "ps_hosts"), _hosts(line, "worker_hosts"))
    _add(line, "job_name", found.task.role.value)
    _add(line, "task_index", found.task.index)
    _add(line, "ps_hosts", ps_hosts)
    _add(line, "worker_hosts", worker_hosts)


def _evaluate(line: CommandLine) -> None:
    """An evaluator gets the same flags as the tasks, but is none of them."""
    for name in [name for name, given in line.given.items() if given.flag.needs == "job_name"]:
        del line.given[name]
    _add(line, "eval", True)
    if "eval_interval_secs" not in line.given:
        _add(line, "eval_interval_secs", EVALUATED_EVERY)


def _hosts(line: CommandLine, name: str) -> tuple[str, ...]:
    value = line.value(name)
    assert isinstance(value, tuple)
    return value


def _add(line: CommandLine, name: str, value: Value) -> None:
    line.given[name] = Given(line.flags[name], name, value)
