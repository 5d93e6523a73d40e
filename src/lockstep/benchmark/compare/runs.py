"""One run of one contestant: which programs, with which flags, and the resulting number."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.benchmark.compare.contestants import Comparison, Contestant, ContestantKind
from lockstep.benchmark.compare.programs import Program, Programs, RunFailedError, hear_all
from lockstep.benchmark.compare.results import Measurement, StepDetail
from lockstep.benchmark.compare.start_barrier import GO, PORT, READY, RESULT
from lockstep.benchmark.outputs.times import file_name, read_moments
from lockstep.errors import EXIT_BAD_INPUT
from lockstep.foreign import read_json
from lockstep.protocol.core.ids import server, worker
from lockstep.runtime.local_cluster.cluster import ReservedPort
from lockstep.runtime.trace.step_times import step_shares

CHILD_FLAG = "--lockstep_compare_child="
"""Internal: this process is one of the compared programs; kind, rank, number of ranks, seconds of patience."""
_TF_TOTAL = re.compile(r"^total images/sec: ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs contestants. ``environ`` is the environment of the programs."""

    comparison: Comparison
    environ: Mapping[str, str]

    def measure(self, contestant: Contestant) -> Measurement:
        """Run it once. Failures are part of the result."""
        deadline = time.monotonic() + self.comparison.run_timeout
        with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as place:
            folder = Path(place)
            try:
                with Programs(folder, self.environ) as programs:
                    return self._run(contestant, programs, deadline)
            except RunFailedError as error:
                return Measurement(failure=str(error))

    def _run(self, contestant: Contestant, programs: Programs, deadline: float) -> Measurement:
        match contestant.kind:
            case ContestantKind.LIMIT:
                return self._solo(programs, self.comparison.workers, self.comparison.threads, deadline)
            case ContestantKind.SINGLE:
                return self._solo(programs, 1, self.comparison.threads * self.comparison.workers, deadline)
            case ContestantKind.DDP:
                return self._ddp(programs, deadline)
            case ContestantKind.LOCKSTEP:
                return self._lockstep(contestant.protocol, programs, deadline)
            case ContestantKind.TF_CNN:
                return self._tf_cnn(programs, deadline)

    # -- programs of ours that talk through a barrier --

    def _start(self, programs: Programs, kind: str, rank: int, world: int, threads: int) -> Program:
        patience = self.comparison.run_timeout
        command = [
            *this_program(),
            "compare",
            f"{CHILD_FLAG}{kind},{rank},{world},{patience:g}",
            *self.comparison.bench_flags,
            f"--num_threads={threads}",
        ]
        # The number of OpenMP threads is fixed at the first parallel region; gloo must not leave the machine.
        return programs.start(
            f"{kind}-{rank}", command, talks=True, OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="lo"
        )

    def _solo(self, programs: Programs, world: int, threads: int, deadline: float) -> Measurement:
        started = [self._start(programs, "solo", rank, world, threads) for rank in range(world)]
        results = self._time_together(started, deadline)
        return Measurement(sum(self._images(1) / result["seconds"] for result in results))

    def _ddp(self, programs: Programs, deadline: float) -> Measurement:
        world = self.comparison.workers
        started = [self._start(programs, "ddp", rank, world, self.comparison.threads) for rank in range(world)]
        line = started[0].hear("", deadline)
        if line.startswith(RESULT):
            return Measurement(cannot=read_json(line.removeprefix(RESULT))["cannot"])
        for program in started[1:]:
            program.say(line)
        if not line.startswith(PORT):
            raise RunFailedError(f"{started[0].name} printed {line!r} instead of its port")
        results = self._time_together(started, deadline)
        return Measurement(self._images(world) / max(result["seconds"] for result in results))

    def _time_together(self, started: list[Program], deadline: float) -> list[dict[str, Any]]:
        hear_all(started, READY, deadline)
        for program in started:
            program.say(GO)
        return [read_json(line) for line in hear_all(started, RESULT, deadline)]

    def _images(self, workers: int) -> int:
        run = self.comparison.bench.run
        return run.batch_size * run.num_batches * workers

    # -- a cluster --

    def _lockstep(self, protocol: str, programs: Programs, deadline: float) -> Measurement:
        comparison, times = self.comparison, programs.folder / "times"
        flags = [
            *comparison.bench_flags,
            f"--ps={comparison.servers}",
            f"--workers={comparison.workers}",
            f"--num_threads={comparison.threads}",
            f"--server_protocol={protocol}",
            f"--timing_dir={times}",
        ]
        cluster = programs.start("lockstep", [*this_program(), "bench", *flags], talks=False)
        try:
            cluster.wait(deadline)
        except RunFailedError:
            if cluster.process.poll() == EXIT_BAD_INPUT:
                return Measurement(cannot=cluster.last_words())
            raise
        return self._read_times(times)

    def _read_times(self, folder: Path) -> Measurement:
        workers = [_read(folder / file_name(worker(i))) for i in range(self.comparison.workers)]
        servers = [_read(folder / file_name(server(i))) for i in range(self.comparison.servers)]
        shares = step_shares([read_moments(w) for w in workers], [read_moments(s) for s in servers])
        steps = self.comparison.bench.run.steps
        detail = StepDetail(
            shares,
            sum(s["store"]["reduce"] for s in servers) / steps,
            sum(s["store"]["update"] for s in servers) / steps,
            workers[0]["copies"],
            tuple(workers[0]["links"]),
        )
        return Measurement(workers[0]["images_per_sec"], detail=detail)

    # -- tf_cnn_benchmarks --

    def _tf_cnn(self, programs: Programs, deadline: float) -> Measurement:
        comparison = self.comparison
        ports = [ReservedPort() for _ in range(comparison.servers + comparison.workers)]
        try:
            hosts = [port.address for port in ports]
            lists = hosts[: comparison.servers], hosts[comparison.servers :]
            for index in range(comparison.servers):
                programs.start(f"tf-ps-{index}", self._tf_command("ps", index, *lists), False, CUDA_VISIBLE_DEVICES="")
            started = [
                programs.start(f"tf-worker-{index}", self._tf_command("worker", index, *lists), False)
                for index in range(comparison.workers)
            ]
            # Its servers never end by themselves; the end of the block stops them.
            for program in started:
                program.wait(deadline)
        finally:
            for port in ports:
                port.close()
        said = started[0].output.read_text(errors="replace") + started[0].errors.read_text(errors="replace")
        found = _TF_TOTAL.search(said)
        if found is None:
            raise RunFailedError(f"tf_cnn_benchmarks printed no rate: {started[0].last_words()}")
        return Measurement(float(found[1]))

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


def _read(path: Path) -> dict[str, Any]:
    try:
        times: dict[str, Any] = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFailedError(f"a task wrote no times ({path.name}: {error})") from None
    return times
