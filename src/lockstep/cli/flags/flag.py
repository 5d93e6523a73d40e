"""One flag: a row of the table that parsing, help and documentation share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Value = str | int | float | bool | tuple[str, ...] | None


class FlagKind(StrEnum):
    """How the text of a value is read; help shows the enum's value in its place."""

    TEXT = "TEXT"
    SECRET = "SECRET"
    WHOLE = "N"
    NUMBER = "X"
    SWITCH = "SWITCH"
    CHOICE = "CHOICE"
    HOSTS = "HOST:PORT,..."
    LIST = "A,B,..."


class Status(StrEnum):
    """What Lockstep does with a flag."""

    WORKS = "works"
    NOTICE = "accepted, does nothing"
    REFUSED = "refused"


class Group(StrEnum):
    """The topics of the help, in the order shown; the value is what ``--help=GROUP`` takes."""

    CLUSTER = "cluster"
    EXCHANGE = "exchange"
    RUN = "run"
    DEVICES = "devices"
    OPTIMIZER = "optimizer"
    OUTPUT = "output"
    DATA = "data"
    EVALUATION = "evaluation"
    PRECISION = "precision"
    TENSORFLOW = "tensorflow"
    OLDER = "older"


TITLES: dict[Group, str] = {
    Group.CLUSTER: "Cluster: its tasks, and how long they wait",
    Group.EXCHANGE: "Exchange: how gradients and parameters travel",
    Group.RUN: "Run: what is trained, and for how long",
    Group.DEVICES: "Devices: where the arithmetic happens",
    Group.OPTIMIZER: "Optimizer and learning rate",
    Group.OUTPUT: "Output: lines, files, checkpoints, traces",
    Group.DATA: "Data: which images are used and how they are read",
    Group.EVALUATION: "Evaluation and other modes besides training",
    Group.PRECISION: "Precision: half-precision numbers",
    Group.TENSORFLOW: "Settings of TensorFlow's own engine",
    Group.OLDER: "Flags of older releases of tf_cnn_benchmarks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    A refused flag is accepted with its ``default``, because that requests nothing. ``reason`` explains why a flag
    does nothing or is refused, and what to do instead.
    """

    name: str
    kind: FlagKind
    default: Value
    group: Group
    help: str
    status: Status = Status.WORKS
    reason: str = ""
    choices: tuple[str, ...] = ()
    refused_choices: tuple[tuple[str, str], ...] = ()
    """Values that tf_cnn_benchmarks takes and this program does not, each with the reason and the remedy."""
    same_as: str = ""
    """The flag of which this is another spelling (that one is stored)."""
    only_with: tuple[str, tuple[str, ...]] | None = None
    """(flag, its values): the setting without which this flag has no effect; a notice then reports that."""
    needs: str = ""
    """A flag without which this one is refused, because it makes no sense."""
    upstream: bool = True
    """Whether tf_cnn_benchmarks has it too."""

    def usage(self) -> str:
        """How it is written, with its kind of value: ``--model=TEXT``, ``--[no]eval``."""
        if self.kind is FlagKind.SWITCH:
            return f"--[no]{self.name}"
        if self.kind is FlagKind.CHOICE:
            return f"--{self.name}={'|'.join(choice for choice in self.choices if choice)}"
        return f"--{self.name}={self.kind.value}"

    def default_text(self) -> str:
        """The default as a user would type it; empty if nothing is set."""
        return value_text(self.default)


def value_text(value: Value) -> str:
    """A value as a user would type it."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True, slots=True)
class Rows:
    """Makes the rows of one group, so that a row need not repeat it."""

    group: Group

    def works(
        self,
        name: str,
        kind: FlagKind,
        default: Value,
        help: str,  # noqa: A002 - the field's own name
        *,
        choices: tuple[str, ...] = (),
        refused_choices: tuple[tuple[str, str], ...] = (),
        same_as: str = "",
        only_with: tuple[str, tuple[str, ...]] | None = None,
        needs: str = "",
        upstream: bool = True,
    ) -> Flag:
        """A flag that has an effect."""
        return Flag(
            name=name,
            kind=kind,
            default=default,
            group=self.group,
            help=help,
            choices=choices,
            refused_choices=refused_choices,
            same_as=same_as,
            only_with=only_with,
            needs=needs,
            upstream=upstream,
        )

    def notice(self, name: str, kind: FlagKind, default: Value, help: str, reason: str, *choices: str) -> Flag:  # noqa: A002
        """A flag that is accepted and does nothing here; ``reason`` explains why."""
        return self._other(Status.NOTICE, name, kind, default, help, reason, choices)

    def refused(self, name: str, kind: FlagKind, default: Value, help: str, reason: str, *choices: str) -> Flag:  # noqa: A002
        """A flag whose effect Lockstep does not have; ``reason`` explains why and what to do instead."""
        return self._other(Status.REFUSED, name, kind, default, help, reason, choices)

    def _other(
        self,
        status: Status,
        name: str,
        kind: FlagKind,
        default: Value,
        help: str,  # noqa: A002
        reason: str,
        choices: tuple[str, ...],
    ) -> Flag:
        return Flag(
            name=name,
            kind=kind,
            default=default,
            group=self.group,
            help=help,
            status=status,
            reason=reason,
            choices=choices,
        )
