"""No decision reads a sentence: texts are searched only where foreign formats are parsed, each place named here.

A message may be reworded at any time, so no code may look into one. What looks into a text at all (``in``,
``startswith``, ``re``) is listed with whose text it is; a new place must be one of these kinds, or use a value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
MESSAGES = frozenset(
    {"text", "reason", "message", "detail", "details", "what", "finding", "sentence", "problem", "why"}
)
SEARCHES = frozenset({"startswith", "endswith", "find", "index", "rfind", "rindex", "count"})

COMMAND_LINES = {
    "cli/bench.py",
    "cli/checkpoint.py",
    "cli/compare.py",
    "cli/compare_flags.py",
    "cli/compare_program.py",
    "cli/data.py",
    "cli/doctor.py",
    "cli/drill.py",
    "library/launcher.py",
    "runtime/startup/run_name.py",
    "runtime/monitor/python_command.py",
    "cli/flags/__init__.py",
    "cli/flags/parsing.py",
    "cli/flags/values.py",
    "cli/key_flags.py",
    "cli/library_flags.py",
    "cli/main.py",
    "cli/manifest/kubernetes.py",
    "cli/manifest/slurm.py",
    "cli/net.py",
    "cli/ps.py",
    "cli/sim.py",
    "cli/watching.py",
    "cli/trace.py",
    "cli/watch.py",
    "cli/why.py",
    "benchmark/settings/rules.py",
}
"""What a person typed, or a launcher set."""

THE_KERNEL_AND_OTHER_PROGRAMS = {
    "cli/compare_turns.py": "/proc/cpuinfo",
    "flight/dump_folder.py": "names of torch's dumps",
    "doctor/machine.py": "/proc, cgroups, nvidia-smi, versions of packages",
    "runtime/watch/kernel_tcp.py": "/proc/net",
    "runtime/monitor/oom.py": "cgroups",
    "runtime/monitor/spare.py": "/proc, names of variables that libraries read, names in __main__",
    "runtime/startup/preflight.py": "nvidia-smi",
    "runtime/cores.py": "/proc, cgroups",
    "runtime/processes.py": "/proc",
    "runtime/watch/status.py": "/proc",
    "runtime/watch/stacks.py": "the file names of a Python stack",
    "benchmark/outputs/metric_log.py": "/proc/cpuinfo",
    "benchmark/compare/runs.py": "the lines of tf_cnn_benchmarks",
    "transports/memory.py": "cgroups",
    "transports/verbs/checks.py": "/proc, the NVIDIA driver",
    "transports/verbs/devices.py": "/sys, names of libraries",
    "transports/verbs/provider.py": "names of libraries",
    "transports/quiet_forks.py": "gRPC's log lines",
    "transports/control/reasons.py": "gRPC's details of an error, from which our own words are made",
    "diagnose/monitor_view.py": "py-spy's listing of a stack",
    "watch/stack_reading.py": "py-spy's listing of a stack",
    "watch/injected.py": "the command line of a launcher, the file names of a Python stack",
}

OUR_OWN_FORMATS = {
    "dashboard/page_server.py": "the headers and paths of HTTP",
    "foreign.py": "the characters that a terminal would obey",
    "diagnose/evidence.py": "task names",
    "protocol/core/ids.py": "task names",
    "protocol/core/keys.py": "tensor keys",
    "transports/control/addresses.py": "host:port",
    "transports/control/channels.py": "host:port with or without TLS",
    "transports/control/ports.py": "ranges of ports",
    "runtime/checkpoint/folder.py": "names of files",
    "runtime/startup/rendezvous.py": "addresses",
    "runtime/running_jobs.py": "names of files",
    "runtime/watch/run_folder.py": "names of folders",
    "watch/ranks.py": "names of files",
    "runtime/monitor/sidecar.py": "addresses",
    "runtime/trace/page.py": "names of spans, for their colours",
    "benchmark/compare/start_barrier.py": "lines between a command and its children",
    "benchmark/compare/programs.py": "lines between a command and its children",
    "training/export.py": "names of tensors in a file",
    "training/worker/local_state.py": "names of tensors in a file",
    "library/program_state.py": "names of tensors in a file",
    "transports/control/codec.py": "names of classes",
    "transports/verbs/options.py": "names of devices",
    "cli/net_plot.py": "names of transports",
    "cli/manifest/yaml_text.py": "which texts YAML takes without quotes",
}

FOLDERS = {
    "benchmark/data": "data sets and their files",
    "benchmark/models": "names of models and layers",
    "transports/conformance": "a suite of tests: it asks for words, and decides nothing by them",
}


def searches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every place that looks into a text, by its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            by_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            if by_re or (node.func.attr in SEARCHES and _about_text(node)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare):
            yield from ((node.lineno, ast.unparse(node)) for _ in [0] if _compares_words(node))


def _about_text(call: ast.Call) -> bool:
    """``index`` and ``count`` are methods of sequences, too; of texts they are given one."""
    if call.func.attr in ("startswith", "endswith"):  # type: ignore[attr-defined]  # the caller has seen to it
        return True
    return bool(call.args) and isinstance(call.args[0], (ast.Constant, ast.JoinedStr)) and _is_text(call.args[0])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _compares_words(node: ast.Compare) -> bool:
    """A text of several words, looked for in another or compared with it."""
    texts = [side.value for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)]
    if any(isinstance(text, str) and " " in text.strip() for text in texts):
        return True
    looks_into = isinstance(node.ops[0], (ast.In, ast.NotIn)) and _is_text(node.left)
    return looks_into and getattr(node.comparators[0], "attr", getattr(node.comparators[0], "id", "")) in MESSAGES


def may_search(path: str) -> bool:
    listed = {*COMMAND_LINES, *THE_KERNEL_AND_OTHER_PROGRAMS, *OUR_OWN_FORMATS}
    return (
        path in listed
        or "phrases" in Path(path).with_suffix("").parts
        or any(path.startswith(f"{folder}/") for folder in FOLDERS)
    )


def test_no_decision_reads_a_sentence() -> None:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        path = str(file.relative_to(SOURCE))
        if not may_search(path):
            found += [f"{path}:{line}: {what}" for line, what in searches(ast.parse(file.read_text()))]
    assert not found, "these look into a text; use a value, or name whose format it is:\n" + "\n".join(found)


def test_what_is_listed_exists() -> None:
    for path in (*COMMAND_LINES, *THE_KERNEL_AND_OTHER_PROGRAMS, *OUR_OWN_FORMATS, *FOLDERS):
        assert (SOURCE / path).exists(), path


def test_a_search_in_a_message_is_found() -> None:
    for code in (
        "x = reason.startswith('was killed')",
        "x = 'out of memory' in reason",
        "x = wait.what == 'the end of the job'",
        "x = re.search('life', text)",
        "x = text.find('no path')",
        "x = 'life' in outcome.reason",
    ):
        assert list(searches(ast.parse(code))), code
    for code in ("x = kind is Kind.END", "x = rows.index(row)", "x = name in names", "x = flag == 'auto'"):
        assert not list(searches(ast.parse(code))), code
