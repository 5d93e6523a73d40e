"""What the training and its decoding processes say to one another: one line of JSON each, never a pickle."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from lockstep.training.data.preparing import Preparation
from lockstep.training.data.slots import SlotShape
from lockstep.training.data.source import Reference


@dataclass(frozen=True, slots=True)
class SetUp:
    """The first line: what all later work has in common."""

    descriptor: int
    shape: SlotShape
    number: int
    """Which of the processes this is."""
    classes: int
    preparation: Preparation

    def to_line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> SetUp:
        said = json.loads(line)
        said["shape"] = SlotShape(**said["shape"])
        said["preparation"] = Preparation(**said["preparation"])
        return SetUp(**said)


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture to prepare: where it lies, and what its chance depends on."""

    reference: Reference
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Fill these neighbouring places of a slot."""

    ticket: int
    slot: int
    first: int
    samples: tuple[Sample, ...]

    def to_line(self) -> bytes:
        samples = [[*dataclasses.astuple(sample.reference), sample.index, sample.epoch] for sample in self.samples]
        return json.dumps([self.ticket, self.slot, self.first, samples]).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> DecodeJob:
        ticket, slot, first, samples = json.loads(line)
        return DecodeJob(ticket, slot, first, tuple(Sample(Reference(*said[:4]), said[4], said[5]) for said in samples))


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """A job's end; ``bad`` are the places (counted in the job) that could not be filled, each with the reason."""

    ticket: int
    bad: tuple[tuple[int, str], ...] = ()

    def to_line(self) -> bytes:
        return json.dumps([self.ticket, self.bad]).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> DecodeResult:
        ticket, bad = json.loads(line)
        return DecodeResult(ticket, tuple((int(place), str(reason)) for place, reason in bad))
