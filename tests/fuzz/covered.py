"""What reads bytes of others, module by module, and which target feeds it; or why none does.

``python -m fuzz --list`` prints this. A test looks for calls that read (``READERS``) in all sources, so that a module
with a new one has to be entered here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import lockstep

READERS: Final = frozenset(
    {
        *("read_json", "FromString", "ParseFromString", "recv", "recv_into", "recv_fds", "safe_open", "load"),
        *("read_plain", "read_held", "read_bytes", "read_text", "readline", "readlines", "read_available"),
        *("unpack", "unpack_from", "fromhex", "load_der_x509_certificate", "genops", "scatter"),
    }
)


@dataclass(frozen=True, slots=True)
class Fed:
    """By these targets: whole names, or what several begin with."""

    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exempt:
    """Not fed; ``why`` is a phrase."""

    why: str


def _by(*targets: str) -> Fed:
    return Fed(targets)


LIVE: Final = ("live ports", "member: ", "rendezvous", "net --serve")
"""Not parsers but listeners: a job, a task visited by members, rank 0, a server of measurements."""

KERNEL: Final = Exempt("files and messages of the kernel")
OWN_CHILD: Final = Exempt("lines of a process that this one has started, and arguments that it has given it")
OWN_PACKAGE: Final = Exempt("a file of this package")
NEEDS_HARDWARE: Final = Exempt("needs a GPU, or NIXL; what is common to all streams is fed")
NO_READER: Final = Exempt("what it calls has the name of a reader and is none")

OWN_TERMINAL: Final = Exempt("what the user types in its terminal")

COVERED: Final[Mapping[str, Fed | Exempt]] = MappingProxyType(
    {
        "benchmark/compare/programs.py": OWN_CHILD,
        "benchmark/compare/runs.py": OWN_CHILD,
        "benchmark/compare/start_barrier.py": OWN_CHILD,
        "benchmark/data/cifar.py": _by("CIFAR-10: batch"),
        "benchmark/data/decoding.py": OWN_CHILD,
        "benchmark/data/digits.py": OWN_PACKAGE,
        "benchmark/data/example.py": _by("TFRecord: example"),
        "benchmark/data/jobs.py": OWN_CHILD,
        "benchmark/data/records.py": _by("TFRecord: file"),
        "benchmark/data/source.py": _by("image, "),
        "benchmark/outputs/metric_log.py": KERNEL,
        "benchmark/training/cpu_kernels.py": KERNEL,
        "cli/compare_turns.py": KERNEL,
        "cli/dashboard.py": OWN_TERMINAL,
        "cli/manifest/kubernetes.py": Exempt("the user's own key"),
        "cli/metrics.py": OWN_PACKAGE,
        "cli/start_checks.py": KERNEL,
        "dashboard/page_server.py": OWN_PACKAGE,
        "diagnose/fields.py": _by("snapshot of a task", "snapshot of a monitor"),
        "diagnose/files.py": _by("run folder"),
        "diagnose/verdict.py": _by("report.json"),
        "diagnose/witness.py": _by("statement of a witness"),
        "doctor/listening.py": _by("doctor: report of another", "member: "),
        "drill/reading.py": OWN_CHILD,
        "drill/run.py": OWN_CHILD,
        "drill/systems.py": OWN_CHILD,
        "drill/task.py": OWN_CHILD,
        "flight/dump_folder.py": _by("flight recorder: folder"),
        "flight/merging.py": _by("watch: two recorders"),
        "flight/plain_pickle.py": _by("flight recorder: dump"),
        "flight/reading.py": _by("flight recorder: dump"),
        "library/call_values.py": _by("value of a call"),
        "library/optimizer_state.py": _by("optimizer state"),
        "library/program_state.py": _by("state of a program"),
        "library/state_codec.py": _by("state of kept objects"),
        "library/store_meeting.py": _by("rendezvous: entry of a store"),
        "protocol/core/faults.py": _by("planted faults"),
        "runtime/checkpoint/folder.py": _by("checkpoint: manifest"),
        "runtime/checkpoint/resuming.py": _by("state of a worker", "state of a program"),
        "ray/host.py": OWN_CHILD,
        "ray/program.py": Exempt("the user's own function, in a folder of this user; Ray has brought it"),
        "runtime/compared.py": OWN_CHILD,
        "runtime/cores.py": KERNEL,
        "runtime/local_cluster/gpu_sharing.py": OWN_CHILD,
        "runtime/local_cluster/member.py": OWN_CHILD,
        "runtime/local_cluster/output_relay.py": OWN_CHILD,
        "runtime/monitor/freezer.py": KERNEL,
        "runtime/monitor/metrics_keeper.py": _by("monitor: metrics of its task"),
        "runtime/monitor/oom.py": KERNEL,
        "runtime/monitor/reaper.py": OWN_CHILD,
        "runtime/monitor/reporter.py": _by("monitor: report of its task"),
        "runtime/monitor/door.py": OWN_CHILD,
        "runtime/monitor/sidecar.py": OWN_CHILD,
        "runtime/monitor/spare.py": OWN_CHILD,
        "runtime/monitor/spares.py": OWN_CHILD,
        "runtime/monitor/task_process.py": _by("monitor: news of its reaper"),
        "runtime/processes.py": KERNEL,
        "runtime/running_jobs.py": _by("list of running jobs"),
        "runtime/startup/rendezvous.py": _by("rendezvous: line", "rendezvous"),
        "runtime/startup/tf_config.py": _by("TF_CONFIG"),
        "runtime/task/signals.py": KERNEL,
        "runtime/trace/merge.py": _by("trace merge"),
        "runtime/watch/kernel_tcp.py": KERNEL,
        "runtime/watch/status.py": KERNEL,
        "security/certificates.py": _by("stored certificates"),
        "security/key.py": _by("key file"),
        "security/proof.py": _by("proof: "),
        "security/signing.py": _by("certificate of another program"),
        "security/tls.py": _by("proof: "),
        "security/wire.py": _by("proof: ", "rendezvous", "net --serve"),
        "sim/faults.py": _by("faults of the simulator"),
        "training/export.py": _by("checkpoint: state, exported", "checkpoint: shard, exported"),
        "training/gpu/gpu_twins.py": _by("twin of a region"),
        "training/gpu/shared_events.py": NEEDS_HARDWARE,
        "training/ranks/saving.py": _by("checkpoint: optimizers of ranks"),
        "training/ranks/torch_averager.py": Exempt("an entry of the chief of this run, which has a MAC"),
        "training/server/named_optimizer.py": _by("optimizer: options"),
        "training/ranks/kept_versions.py": _by("what a rank keeps: "),
        "training/server/optimizer_state.py": _by("optimizer state"),
        "training/server/shard_file.py": _by("checkpoint: shard"),
        "training/server/shard_store.py": _by("optimizer state: question"),
        "training/worker/local_state.py": _by("state of a worker"),
        "transports/auto/tickets.py": _by("auto: "),
        "transports/conformance/node.py": Exempt("a suite that tests transports, with both ends in one process"),
        "transports/control/callers.py": _by("live ports"),
        "transports/control/codec.py": _by("control: ", "machine: ", "member: "),
        "transports/control/generate.py": OWN_PACKAGE,
        "transports/control/host_names.py": Exempt(
            "lines that are compared with a name, and an address that is checked"
        ),
        "transports/control/monitor_client.py": _by("control: SnapshotReply", "JSON"),
        "transports/control/tcp_probe.py": _by("first words of another program"),
        "transports/memory.py": KERNEL,
        "transports/net/contenders.py": Exempt("a caller that the proven server of its own measurement answers"),
        "transports/net/control.py": _by("net: call", "net --serve"),
        "transports/net/links.py": _by("net: call", "net --serve"),
        "transports/net/measurement.py": OWN_CHILD,
        "transports/net/serving.py": _by("net --serve"),
        "transports/registry.py": NO_READER,
        "transports/shm/frames.py": _by("shm: ", "member: "),
        "transports/shm/handshake.py": KERNEL,
        "transports/shm/host.py": _by("shm: address"),
        "transports/shm/signal_socket.py": _by("member: "),
        "transports/stream/frames.py": _by("stream: ", "grpc: chunk", "member: "),
        "transports/stream/stream_life.py": _by("member: "),
        "transports/tcp/frames.py": _by("tcp: ", "member: "),
        "transports/tcp/receiving.py": _by("tcp: chunk", "member: "),
        "transports/tcp/spreading.py": KERNEL,
        "transports/ucx/endpoint.py": NEEDS_HARDWARE,
        "transports/verbs/checks.py": KERNEL,
        "transports/verbs/devices.py": KERNEL,
        "transports/verbs/endpoint.py": NEEDS_HARDWARE,
        "watch/asking.py": _by("watch: entry of a job", "report.json"),
        "watch/drill_program.py": OWN_PACKAGE,
        "watch/hosts.py": _by("watch: another host"),
        "watch/injected.py": OWN_PACKAGE,
        "watch/ranks.py": _by("watch: status of a rank", "watch: facts of a rank"),
        "watch/sight_codec.py": _by("watch: another host"),
        "watch/stack_reading.py": _by("watch: stacks"),
    }
)
"""The readers of all these (``foreign.py``, ``private_files.py``) are fed with them, and by "JSON"."""


def modules_that_read() -> set[str]:
    """Of the package, by their paths in it."""
    root = Path(lockstep.__file__).parent
    return {str(path.relative_to(root)) for path in root.rglob("*.py") if _reads(path.read_text())}


def _reads(source: str) -> bool:
    if not any(f"{name}(" in source for name in READERS):  # most have none, and parsing takes time
        return False
    called = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in called)
    return any(name in READERS for name in names)


def table() -> str:
    """For people."""
    rows = (
        f"{module:<42} {', '.join(how.targets) if isinstance(how, Fed) else f'- {how.why}'}"
        for module, how in COVERED.items()
    )
    return "\n".join(rows)
