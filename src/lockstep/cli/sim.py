"""``lockstep sim``: runs the real protocol on a virtual clock, to search for bugs or to size a cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import BadInput, HelpAsked

_HELP = """\
lockstep sim: the protocol of a whole cluster in one process, on a virtual clock, without GPU, network or torch.

How long does a step take, and how many servers does this network need?

  lockstep sim --workers=1000 --ps=32 --steps=5      the parts of a step's time, and how they grow
  lockstep sim --workers=64 --ps=search              the smallest number of servers that is enough

  --model=NAME           model whose parameters are sent (resnet50); --model_mb=N: N MiB of parameters instead
  --compute_ms=T         forward and backward pass of one worker, in milliseconds (300)
  --jitter=SHARE         how much longer the slowest worker computes (0.05)
  --gbit=RATE            gigabits per second of each host's adapter, in each direction (25)
  --latency_us=T         one-way latency, in microseconds (50)
  --bucket_mb=N          size of a bucket in MiB (4; a job over a network chooses 4 to 8)
  --store_gb=RATE        gigabytes per second that a server reads and writes in its updates (4)
  --loop_us=T            time that a task's loop takes per event, in microseconds (30)
  --shared_hosts         server i runs on the host of worker i and shares its adapter
  --enough=SHARE         for --ps=search: this share of the best speed is enough (0.95)
  --growth=no            measure only this case, not how a step grows
  --plot=FILE.png        draw the result (needs matplotlib)

Does every run with faults end well, or with a verdict that names the fault?

  lockstep sim --seeds=2000                          play 2000 random runs of 8 workers and 2 servers
  lockstep sim --seeds=2000 --workers=4 --ps=0       without servers: every worker averages its share
  lockstep sim --seed=17                             replay one of them, and print what happened

  --workers=N --ps=N --steps=N   the cluster of each run (8, 2, 3)
  --first=N                      first seed (0)
  --fault=JSON                   plant this instead of what the seed draws; repeat for more; 'none' for nothing
  --mishap=TEXT                  the network does exactly this; repeat for more; 'none' for nothing
  --shrink=no                    do not look for a shorter run that fails in the same way

Does a job with --server_replicas=1 survive every loss?

  lockstep sim --server_replicas=1                   a kill at every event of 2 workers and 2 servers
  lockstep sim --server_replicas=1 --kills=2         two kills, at every two events (a quarter of an hour)

  --workers=N --ps=N --steps=N   the cluster of each run (2, 2, 2)
  --seeds=N --first=N            how many orders of events, and which is the first (1, 0)

  --processes=N                  how many runs at once (2)
  --json=FILE                    write the result there ('-': to standard output, instead of the text)

A fault is printed as in the drills:
  '{"fault": "Freeze", "task": "/job:worker/replica:0/task:1", "step": 2}'.
docs/simulator.md lists them, and shows how to read the output.
Exit codes: 0 done, 1 a run broke a rule (it is shrunk, and the command that repeats it is printed), 2 bad input.
"""

_NUMBERS = {
    "workers": (int, 1, 100_000),
    "steps": (int, 1, 1000),
    "seed": (int, 0, 1 << 62),
    "seeds": (int, 1, 10_000_000),
    "first": (int, 0, 1 << 62),
    "processes": (int, 1, 256),
    "server_replicas": (int, 1, 1),
    "kills": (int, 1, 2),
    "model_mb": (float, 0.001, 1e6),
    "compute_ms": (float, 0.001, 1e7),
    "jitter": (float, 0.0, 10.0),
    "gbit": (float, 0.001, 1e5),
    "latency_us": (float, 0.0, 1e7),
    "bucket_mb": (float, 0.001, 1024.0),
    "store_gb": (float, 0.001, 1e4),
    "loop_us": (float, 0.0, 1e6),
    "enough": (float, 0.01, 1.0),
}
_TEXTS = ("ps", "model", "fault", "mishap", "growth", "shrink", "json", "plot")
_SWITCHES = ("shared_hosts",)
_OF_SEARCH = ("seed", "seeds", "first", "fault", "mishap", "shrink")
_OF_CAPACITY = ("model", "model_mb", "compute_ms", "jitter", "gbit", "latency_us", "bucket_mb", "store_gb", "loop_us")
_OF_CAPACITY_TOO = ("enough", "growth", "plot", "shared_hosts")


@dataclass(slots=True)
class SimRequest:
    """The parsed command line."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)

    def whole(self, name: str, default: int) -> int:
        return int(self.numbers.get(name, default))

    def number(self, name: str, default: float) -> float:
        return self.numbers.get(name, default)

    def text(self, name: str, default: str = "") -> str:
        return self.texts.get(name, [default])[-1]

    def given(self) -> set[str]:
        return {*self.numbers, *self.texts, *self.switches}

    @property
    def searches(self) -> bool:
        """Whether the request is for runs with faults, rather than for the time of a step."""
        return not self.given().isdisjoint(_OF_SEARCH)

    def servers(self, default: int, least: int = 1) -> int:
        text = self.text("ps", str(default))
        if not text.isdecimal() or not least <= int(text) <= 10_000:
            raise BadInput(f"--ps={text} must be a whole number from {least} to 10000.")
        return int(text)


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = parse(argv)
    if "server_replicas" in asked.numbers:
        from lockstep.cli.sim_replicas import run_replicas

        return run_replicas(asked)
    if asked.searches:
        from lockstep.cli.sim_search import run_search

        return run_search(asked)
    from lockstep.cli.sim_capacity import run_capacity

    return run_capacity(asked)


def parse(argv: Sequence[str]) -> SimRequest:
    """Parse a command line; BadInput explains what is wrong."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP)
    asked = SimRequest()
    words = list(argv)
    while words:
        name, value = _take(words)
        if name in _NUMBERS:
            asked.numbers[name] = _number(name, value)
        elif name in _TEXTS:
            asked.texts.setdefault(name, []).append(value)
        else:
            asked.switches.add(name)
    _refuse_mixtures(asked)
    return asked


def _take(words: list[str]) -> tuple[str, str]:
    """The next flag with its value: ``--name=value``, ``--name value``, or a switch."""
    from lockstep.cli.flags.values import did_you_mean, nearest

    word = words.pop(0)
    name, equals, value = word.removeprefix("--").partition("=")
    known = [*_NUMBERS, *_TEXTS, *_SWITCHES]
    if not word.startswith("--") or name not in known:
        alike = nearest(f"--{name}", [f"--{one}" for one in known])
        remedy = did_you_mean(alike) if alike else "'lockstep sim --help' lists the flags."
        raise BadInput(f"{word!r} is not a flag of 'lockstep sim'; {remedy}")
    if name in _SWITCHES:
        return name, ""
    if not equals:
        if not words or words[0].startswith("--"):
            raise BadInput(f"--{name} needs a value; write --{name}=VALUE.")
        value = words.pop(0)
    return name, value


def _number(name: str, text: str) -> float:
    kind, low, high = _NUMBERS[name]
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        what = "whole number" if kind is int else "number"
        raise BadInput(f"--{name}={text} must be a {what} from {low:g} to {high:g}.")
    return float(value) if kind is float else value


def _refuse_mixtures(asked: SimRequest) -> None:
    given = asked.given()
    if "kills" in given and "server_replicas" not in given:
        raise BadInput("--kills applies to --server_replicas=1; give that too, or leave it out.")
    if asked.searches:
        odd = sorted(given & {*_OF_CAPACITY, *_OF_CAPACITY_TOO})
        if odd:
            raise BadInput(f"--{odd[0]} applies to the time of a step, not to a search through seeds; leave it out.")
    if "seed" in given and "seeds" in given:
        raise BadInput("give --seed for one run, or --seeds for many; not both.")
    if "mishap" in given and "seed" not in given:
        raise BadInput("--mishap repeats one run; give its --seed too.")
    if "model" in given and "model_mb" in given:
        raise BadInput("give --model or --model_mb, not both.")
    for name in ("growth", "shrink"):
        if asked.text(name, "yes") not in ("yes", "no"):
            raise BadInput(f"--{name}={asked.text(name)} must be 'yes' or 'no'.")
    if asked.text("plot") and importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            "--plot needs matplotlib, which is not installed; install it with: pip install 'lockstep-torch[plot]'."
        )
