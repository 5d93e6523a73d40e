"""The text format of Prometheus, as much of it as is needed here. Pure.

Written here and not taken from prometheus_client: that keeps numbers in the process that counts, and these come from
another one, on request; what remains is how a name, labels and a number are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAX_LABEL: Final = 200

Labels = Mapping[str, str]


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric: what it is called, and what it means in one sentence."""

    name: str
    kind: MetricKind
    meaning: str


@dataclass(slots=True)
class MetricPage:
    """What is shown at one moment. ``common``: labels that every sample has."""

    common: Labels
    _samples: dict[str, tuple[MetricFamily, list[str]]] = field(default_factory=dict)

    def add(self, family: MetricFamily, value: float, **labels: str) -> None:
        self._line(family, family.name, value, labels)

    def add_histogram(
        self, family: MetricFamily, bounds: Sequence[float], counts: Sequence[int], seconds: float, **labels: str
    ) -> None:
        """``counts``: of durations up to each bound and above the one before, and at last of those above all."""
        if len(counts) != len(bounds) + 1:
            return
        below = 0
        for bound, count in zip((*map(_number, bounds), "+Inf"), counts, strict=True):
            below += count
            self._line(family, f"{family.name}_bucket", below, {**labels, "le": bound})
        self._line(family, f"{family.name}_sum", seconds, labels)
        self._line(family, f"{family.name}_count", below, labels)

    def text(self) -> str:
        """The whole page."""
        parts: list[str] = []
        for family, lines in self._samples.values():
            parts.append(f"# HELP {family.name} {family.meaning}\n# TYPE {family.name} {family.kind}\n")
            parts.extend(lines)
        return "".join(parts)

    def _line(self, family: MetricFamily, name: str, value: float, labels: Labels) -> None:
        written = _labels({**self.common, **labels}.items())
        self._samples.setdefault(family.name, (family, []))[1].append(f"{name}{written} {_number(value)}\n")


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels if value)
    return f"{{{shown}}}" if shown else ""


def _escaped(value: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in value[:_MAX_LABEL])
    return plain.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
