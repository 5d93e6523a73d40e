"""The messages between the training and its decoding processes: one line of JSON each, never a pickle."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from lockstep.benchmark.data.slots import SlotShape
from lockstep.benchmark.data.source import Reference
from lockstep.benchmark.data.transforms import Preparation
from lockstep.foreign import read_json


@dataclass(frozen=True, slots=True)
class SetUp:
    """The first line: what all later jobs have in common."""

    descriptor: int
    shape: SlotShape
    number: int
    """The number of this process."""
    classes: int
    preparation: Preparation

    def to_line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> SetUp:
        said = read_json(line)
        said["shape"] = SlotShape(**said["shape"])
        said["preparation"] = Preparation(**said["preparation"])
        return SetUp(**said)


@dataclass(frozen=True, slots=True)
class Sample:
    """One image to prepare: where it is, and what its random choices depend on."""

    reference: Reference
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Fill consecutive places of a slot with these samples."""

    ticket: int
    slot: int
    first: int
    samples: tuple[Sample, ...]

    def to_line(self) -> bytes:
        samples = [[*dataclasses.astuple(sample.reference), sample.index, sample.epoch] for sample in self.samples]
        return json.dumps([self.ticket, self.slot, self.first, samples]).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> DecodeJob:
        ticket, slot, first, samples = read_json(line)
        return DecodeJob(ticket, slot, first, tuple(Sample(Reference(*said[:4]), said[4], said[5]) for said in samples))


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The end of a job; ``bad`` lists the places within the job that could not be filled, each with the reason."""

    ticket: int
    bad: tuple[tuple[int, str], ...] = ()

    def to_line(self) -> bytes:
        return json.dumps([self.ticket, self.bad]).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> DecodeResult:
        ticket, bad = read_json(line)
        return DecodeResult(ticket, tuple((int(place), str(reason)) for place, reason in bad))
