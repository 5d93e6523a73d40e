"""A cluster that an engine describes to the program: TF_CONFIG, in place of the arguments of ``lockstep.join``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.errors import BadInput
from lockstep.runtime.startup.tf_config import read_tf_config

if TYPE_CHECKING:
    from lockstep.library.join import JoinArguments


def as_tf_config_says(arguments: JoinArguments, environ: Mapping[str, str]) -> JoinArguments:
    """The arguments, with the tasks that TF_CONFIG names where they name none. torchrun goes first: it is nearer."""
    if arguments.job_name or {"RANK", "WORLD_SIZE"} <= environ.keys():
        return arguments
    found = read_tf_config(environ)
    if found is None:
        return arguments
    if found.evaluates:
        raise BadInput(
            "TF_CONFIG makes this process an evaluator, which belongs to no job: do not call lockstep.join() there; "
            "read the checkpoints of the job instead ('lockstep checkpoint export')."
        )
    ps_hosts, worker_hosts = found.lists(arguments.ps_hosts, arguments.worker_hosts)
    if arguments.servers not in (None, len(ps_hosts)):
        raise BadInput(
            f"servers={arguments.servers} was given, but TF_CONFIG has {len(ps_hosts)} of type ps; leave servers out."
        )
    return dataclasses.replace(
        arguments,
        job_name=found.task.role.value,
        task_index=found.task.index,
        ps_hosts=ps_hosts,
        worker_hosts=worker_hosts,
    )
