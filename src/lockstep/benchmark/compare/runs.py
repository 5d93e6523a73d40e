"""One run of one contestant: which programs, with which flags, and the resulting number."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.benchmark.compare.contestants import Comparison, Contestant, ContestantKind
from lockstep.benchmark.compare.processor_watch import ProcessorWatch
from lockstep.benchmark.compare.programs import Program, Programs, RunFailedError, hear_all
from lockstep.benchmark.compare.results import Measurement, StepDetail
from lockstep.benchmark.compare.run_hosts import HERE, RunHost, RunHosts, made_hosts
from lockstep.benchmark.compare.start_barrier import GO, PORT, READY, RESULT
from lockstep.benchmark.outputs.times import file_name, read_moments
from lockstep.errors import EXIT_BAD_INPUT
from lockstep.foreign import plain, read_json
from lockstep.protocol.core.ids import ClusterShape, Role, server, worker
from lockstep.runtime.host_network import HostsError
from lockstep.runtime.local_cluster.cluster import ReservedPort
from lockstep.runtime.trace.step_times import step_shares

CHILD_FLAG = "--lockstep_compare_child="
"""Internal: this process is one of the compared programs; kind, rank, number of ranks, seconds of patience, and the
addresses of all ranks."""
_TF_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs contestants. ``environ`` is the environment of the programs."""

    comparison: Comparison
    environ: Mapping[str, str]

    def measure(self, contestant: Contestant) -> Measurement:
        """Run it once. Failures are part of the result."""
        deadline = time.monotonic() + self.comparison.run_timeout
        with contextlib.ExitStack() as run:
            folder = Path(run.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-compare-")))
            try:
                hosts = run.enter_context(self._hosts())
                watch = run.enter_context(ProcessorWatch()) if hosts else None
                programs = run.enter_context(Programs(folder, self.environ))
                found = OneRun(self.comparison, programs, hosts, deadline).of(contestant)
            except (RunFailedError, HostsError) as error:
                return Measurement(failure=str(error))
        if watch is None or found.window is None:
            return found
        return replace(found, processor_seconds=watch.used(*found.window) / self.comparison.bench.run.num_batches)

    def _hosts(self) -> contextlib.AbstractContextManager[RunHosts]:
        comparison = self.comparison
        if not comparison.on_hosts:
            return contextlib.nullcontext(RunHosts())
        return made_hosts(comparison.servers, comparison.workers)


@dataclass(frozen=True, slots=True)
class OneRun:
    """One run of one contestant."""

    comparison: Comparison
    programs: Programs
    hosts: RunHosts
    deadline: float

    def of(self, contestant: Contestant) -> Measurement:
        comparison = self.comparison
        match contestant.kind:
            case ContestantKind.LIMIT:
                return self._solo(comparison.workers, comparison.threads)
            case ContestantKind.SINGLE:
                return self._solo(1, comparison.threads * comparison.workers)
            case ContestantKind.DDP:
                return self._ddp()
            case ContestantKind.LOCKSTEP if self.hosts:
                return self._cluster(contestant.protocol, self.hosts)
            case ContestantKind.LOCKSTEP:
                return self._lockstep(contestant.protocol)
            case ContestantKind.BESIDE:
                return self._cluster(contestant.protocol, self.hosts.beside())
            case ContestantKind.RANKS:
                return self._ranks()
            case ContestantKind.TF_CNN:
                return self._tf_cnn()

    # -- programs of ours that talk through a barrier --

    def _start(self, kind: str, rank: int, world: int, threads: int, addresses: Sequence[str] = ()) -> Program:
        patience = self.comparison.run_timeout
        command = [
            *this_program(),
            "compare",
            CHILD_FLAG + ",".join([kind, str(rank), str(world), f"{patience:g}", *addresses]),
            *self.comparison.bench_flags,
            f"--num_threads={threads}",
        ]
        host = self.hosts.worker(rank)
        # The number of OpenMP threads is fixed at the first parallel region; gloo must not leave the machine.
        return self._on(
            host, f"{kind}-{rank}", command, talks=True, OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME=host.interface
        )

    def _on(self, host: RunHost, name: str, command: Sequence[str], talks: bool, **more: str) -> Program:
        return self.programs.start(name, [*host.prefix, *command], talks, **more)

    def _solo(self, world: int, threads: int) -> Measurement:
        started = [self._start("solo", rank, world, threads) for rank in range(world)]
        results, window = self._time_together(started)
        return Measurement(sum(self._images(1) / result["seconds"] for result in results), window=window)

    def _ddp(self) -> Measurement:
        world, threads = self.comparison.workers, self.comparison.threads
        addresses = [self.hosts.worker(rank).address for rank in range(world)]
        started = [self._start("ddp", rank, world, threads, addresses) for rank in range(world)]
        line = started[0].hear("", self.deadline)
        if line.startswith(RESULT):
            return Measurement(cannot=read_json(line.removeprefix(RESULT))["cannot"])
        for program in started[1:]:
            program.say(line)
        if not line.startswith(PORT):
            raise RunFailedError(f"{started[0].name} printed {line!r} instead of its port")
        return self._as_fast_as_the_slowest(started)

    def _ranks(self) -> Measurement:
        world, threads = self.comparison.workers, self.comparison.threads
        addresses = self.hosts.worker_addresses()
        started = [self._start("ranks", rank, world, threads, addresses) for rank in range(world)]
        found = self._as_fast_as_the_slowest(started)
        for program in started:
            program.wait(self.deadline)  # the end of the job is part of it, and the paths are told by then
        return replace(found, paths=tuple(path for program in started for path in _told_paths(program)))

    def _as_fast_as_the_slowest(self, started: list[Program]) -> Measurement:
        results, window = self._time_together(started)
        seconds = max(result["seconds"] for result in results)
        return Measurement(self._images(len(started)) / seconds, window=window)

    def _time_together(self, started: list[Program]) -> tuple[list[dict[str, Any]], tuple[float, float]]:
        hear_all(started, READY, self.deadline)
        begin = time.monotonic()
        for program in started:
            program.say(GO)
        results = [read_json(line) for line in hear_all(started, RESULT, self.deadline)]
        return results, (begin, time.monotonic())

    def _images(self, workers: int) -> int:
        run = self.comparison.bench.run
        return run.batch_size * run.num_batches * workers

    # -- a cluster --

    def _lockstep(self, protocol: str) -> Measurement:
        """All tasks on this machine, started by one command."""
        comparison, times = self.comparison, self.programs.folder / "times"
        size = [f"--ps={comparison.servers}", f"--workers={comparison.workers}"]
        command = self._bench_command(protocol, times, size)
        cluster = self.programs.start("lockstep", command, talks=False)
        return self._ended([cluster]) or self._read_times(times, comparison.servers)

    def _cluster(self, protocol: str, hosts: RunHosts) -> Measurement:
        """Every task on its host, each started by a command of its own."""
        times = self.programs.folder / "times"
        lists = [
            f"--ps_hosts={','.join(hosts.server_addresses())}",
            f"--worker_hosts={','.join(hosts.worker_addresses())}",
        ]
        started = []
        for task in ClusterShape(len(hosts.servers), len(hosts.workers)).tasks():
            host = (hosts.servers if task.role is Role.SERVER else hosts.workers)[task.index]
            which = [f"--job_name={task.role.value}", f"--task_index={task.index}", *lists]
            command = self._bench_command(protocol, times, which)
            started.append(self._on(host, f"{task.role.value}-{task.index}", command, talks=False))
        return self._ended(started) or self._read_times(times, len(hosts.servers))

    def _bench_command(self, protocol: str, times: Path, more: Sequence[str]) -> list[str]:
        comparison = self.comparison
        return [
            *this_program(),
            "bench",
            *comparison.bench_flags,
            *more,
            f"--num_threads={comparison.threads}",
            f"--server_protocol={protocol}",
            f"--timing_dir={times}",
        ]

    def _ended(self, started: Sequence[Program]) -> Measurement | None:
        """Wait until all have ended well; the sentence of one that cannot run here."""
        for program in started:
            try:
                program.wait(self.deadline)
            except RunFailedError:
                if program.process.poll() == EXIT_BAD_INPUT:
                    return Measurement(cannot=program.last_words())
                raise
        return None

    def _read_times(self, folder: Path, count: int) -> Measurement:
        workers = [_read(folder / file_name(worker(i))) for i in range(self.comparison.workers)]
        servers = [_read(folder / file_name(server(i))) for i in range(count)]
        moments = [read_moments(w) for w in workers]
        shares = step_shares(moments, [read_moments(s) for s in servers])
        run = self.comparison.bench.run
        detail = StepDetail(
            shares,
            sum(s["store"]["reduce"] for s in servers) / run.steps,
            sum(s["store"]["update"] for s in servers) / run.steps,
            workers[0]["copies"],
            tuple(workers[0]["links"]),
        )
        rate = workers[0]["images_per_sec"]
        begin = min((ready for one in moments for ready, _ in one.values()), default=0.0)
        window = (begin, begin + self._images(len(workers)) / rate) if begin and rate else None
        paths = tuple(plain(f"{w['task']} to {link['peer']}: {link['path']}") for w in workers for link in w["links"])
        return Measurement(rate, detail=detail, window=window, paths=paths)

    # -- tf_cnn_benchmarks --

    def _tf_cnn(self) -> Measurement:
        comparison, hosts = self.comparison, self.hosts
        ports = [] if hosts else [ReservedPort() for _ in range(comparison.servers + comparison.workers)]
        try:
            given = [port.address for port in ports] or [*hosts.server_addresses(), *hosts.worker_addresses()]
            lists = given[: comparison.servers], given[comparison.servers :]
            for index in range(comparison.servers):
                host = hosts.servers[index] if hosts else HERE
                command = self._tf_command("ps", index, *lists)
                self._on(host, f"tf-ps-{index}", command, talks=False, CUDA_VISIBLE_DEVICES="")
            started = [
                self._on(hosts.worker(index), f"tf-worker-{index}", self._tf_command("worker", index, *lists), False)
                for index in range(comparison.workers)
            ]
            # Its servers never end by themselves; the end of the block stops them.
            for program in started:
                program.wait(self.deadline)
        finally:
            for port in ports:
                port.close()
        said = started[0].output.read_text(errors="replace") + started[0].errors.read_text(errors="replace")
        found = _TF_TOTAL.search(said)
        if found is None:
            raise RunFailedError(f"tf_cnn_benchmarks printed no rate: {started[0].last_words()}")
        rate = float(found[1])
        # Its last line comes right after its last step.
        end = time.monotonic() - (time.time() - started[0].output.stat().st_mtime)
        return Measurement(rate, window=(end - self._images(comparison.workers) / rate, end) if rate else None)

    def _tf_command(self, job: str, index: int, servers: list[str], workers: list[str]) -> list[str]:
        comparison = self.comparison
        bench, threads = comparison.bench, comparison.threads if job == "worker" else 1
        on_gpu = bench.devices.device == "gpu"
        return [
            comparison.tf_python,
            str(Path(comparison.tf_cnn) / "tf_cnn_benchmarks.py"),
            f"--job_name={job}",
            f"--task_index={index}",
            f"--ps_hosts={','.join(servers)}",
            f"--worker_hosts={','.join(workers)}",
            f"--model={bench.model}",
            f"--data_name={bench.data_name}",
            f"--batch_size={bench.run.batch_size}",
            f"--num_batches={bench.run.num_batches}",
            f"--num_warmup_batches={bench.run.num_warmup_batches}",
            f"--optimizer={bench.optimizer.name}",
            f"--num_intra_threads={threads}",
            "--num_gpus=1",
            "--local_parameter_device=cpu",
            "--variable_update=parameter_server",
            "--server_protocol=grpc",
            f"--device={'gpu' if on_gpu else 'cpu'}",
            f"--data_format={'NCHW' if on_gpu else 'NHWC'}",  # its CPU convolutions support no other
        ]


def this_program() -> tuple[str, ...]:
    """The command that starts this program."""
    return (sys.executable, "-m", "lockstep")


def _told_paths(program: Program) -> list[str]:
    """The lines about paths that one of our workers has printed, to be shown as they are."""
    lines = program.errors.read_text(errors="replace").splitlines()
    return [plain(line.partition("lockstep: ")[2]) for line in lines if " to worker " in line]


def _read(path: Path) -> dict[str, Any]:
    try:
        times: dict[str, Any] = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFailedError(f"a task wrote no times ({path.name}: {error})") from None
    return times
