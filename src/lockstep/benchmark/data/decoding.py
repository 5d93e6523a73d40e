"""A decoding process: it reads jobs from standard input and writes results to standard output, one per line.

It ends when its standard input ends, that is when its parent closes it or dies. It does not import torch.
"""

from __future__ import annotations

import random
import signal
import sys

from lockstep.benchmark.data.errors import BadRecord
from lockstep.benchmark.data.jobs import DecodeJob, DecodeResult, SetUp
from lockstep.benchmark.data.order import mixed
from lockstep.benchmark.data.slots import Slots
from lockstep.benchmark.data.source import Reader
from lockstep.benchmark.data.transforms import make_engine, prepare
from lockstep.runtime.processes import STOP_SIGNALS


def main() -> int:
    """Serve until the input ends."""
    for signum in STOP_SIGNALS:  # Slurm sends them to every process; the training handles them, and closes our input
        signal.signal(signum, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    set_up = SetUp.from_line(source.readline())
    slots = Slots(set_up.shape, set_up.descriptor)
    decoder = _Decoder(set_up, slots)
    while line := source.readline():
        done = decoder.work(DecodeJob.from_line(line))
        try:
            sink.write(done.to_line())
            sink.flush()
        except BrokenPipeError:
            break
    return 0


class _Decoder:
    def __init__(self, set_up: SetUp, slots: Slots) -> None:
        self._set_up = set_up
        self._slots = slots
        self._engine = make_engine(set_up.preparation.engine)
        self._reader = Reader()

    def work(self, job: DecodeJob) -> DecodeResult:
        images, labels = self._slots.images(job.slot), self._slots.labels(job.slot)
        how = self._set_up.preparation
        bad: list[tuple[int, str]] = []
        for number, sample in enumerate(job.samples):
            # The training sees this even while a read hangs, and can then name the file.
            self._slots.progress[self._set_up.number] = job.ticket << 16 | number
            place = job.first + number
            try:
                picture = self._reader.read(sample.reference, self._set_up.classes)
                chance = random.Random(mixed(how.seed, sample.epoch, sample.index))
                prepare(picture.encoded, picture.boxes, how, self._engine, chance, images[place])
                labels[place] = picture.label
            except BadRecord as error:
                bad.append((number, str(error)))
        return DecodeResult(job.ticket, tuple(bad))


if __name__ == "__main__":
    sys.exit(main())
