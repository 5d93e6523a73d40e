"""How fast the simulator is: seeds per second of small clusters with faults, and one step of a large one.

    python bench/simulator.py [--seeds=2000] [--processes=2] [--profile]

The first figure is what ``lockstep sim --seeds=2000`` takes, the second what
``lockstep sim --workers=1000 --ps=32 --steps=5 --growth=no`` takes for its run. ``--profile`` shows where one
process spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import resource
import time

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.capacity import CapacityCase, measure
from lockstep.sim.explore import play_seed
from lockstep.sim.generate import Size
from lockstep.sim.pool import parallel

MIB = 1 << 20
LARGE = CapacityCase(
    workers=1000,
    servers=32,
    steps=5,
    parameters=tuple(ParameterEntry(f"p{i}", MIB // 4, "float32", 0) for i in range(64)),
    bucket_bytes=2 * MIB,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    if asked.profile:
        _profile()
        return
    began = time.monotonic()
    jobs = [(seed, Size()) for seed in range(asked.seeds)]
    broken = [played.seed for played in parallel(play_seed, jobs, asked.processes) if not played.sound]
    seconds = time.monotonic() - began
    print(
        f"{asked.seeds} seeds of 8 workers x 2 servers, {asked.processes} processes: {seconds:.1f} s, broken {broken}"
    )
    began, used = time.monotonic(), time.process_time()
    gc.disable()
    measured = measure(LARGE)
    wall, cpu = time.monotonic() - began, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"1000 workers x 32 servers x 5 steps: {wall:.1f} s ({cpu:.1f} s of one processor), {measured.events} events, "
        f"{cpu / measured.events * 1e6:.1f} us per event, {memory} MiB"
    )


def _profile() -> None:
    profile = cProfile.Profile()
    profile.runcall(lambda: [play_seed(seed, Size()) for seed in range(30)])
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
