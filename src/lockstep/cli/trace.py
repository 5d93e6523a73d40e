"""``lockstep trace merge``: the traces of all tasks of a cluster on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import BadInput, HelpAsked

_HELP = """\
Put the traces that the tasks of a cluster wrote (--trace_file) on one clock.

  lockstep trace merge OUT TRACE TRACE ...

OUT opens in https://ui.perfetto.dev and in chrome://tracing; if it ends in .html,
it is a timeline that a browser shows by itself. Clocks of different machines are
aligned by the tensors that both sides saw.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    words = list(argv)
    if not words or any(word in ("-h", "--help", "help") for word in words):
        raise HelpAsked(_HELP)
    if words[0] != "merge":
        raise BadInput(f"there is no 'lockstep trace {words[0]}'; use 'lockstep trace merge OUT TRACE TRACE ...'.")
    flags = [word for word in words[1:] if word.startswith("-")]
    if flags:
        raise BadInput(f"'lockstep trace merge' has no flag {flags[0]}; 'lockstep trace --help' shows how it is used.")
    if len(words) < 4:
        raise BadInput("give the file to write and at least two traces: lockstep trace merge OUT TRACE TRACE.")
    return _merge(Path(words[1]), [Path(word) for word in words[2:]])


def _merge(target: Path, sources: list[Path]) -> int:
    from lockstep.private_files import replace_file
    from lockstep.runtime.trace.merge import merged, read_trace
    from lockstep.runtime.trace.page import trace_page
    from lockstep.runtime.trace.task_trace import write_trace

    if target in sources:
        raise BadInput(f"{target} is one of the traces to merge; give another name for the result first.")
    result = merged([read_trace(source) for source in sources])
    try:
        if target.suffix == ".html":
            replace_file(target, trace_page(result))
        else:
            write_trace(target, result)
    except OSError as error:
        raise BadInput(f"{target} cannot be written ({error.strerror}); give another name.") from None
    for task, clock in result["lockstep"]["clocks"].items():
        print(f"{task or 'single process'}: clock moved by {clock['offset_seconds']:.6f} s, according to {clock['by']}")
    print(f"Wrote {target}: {len(result['traceEvents'])} events of {len(sources)} tasks")
    return 0
