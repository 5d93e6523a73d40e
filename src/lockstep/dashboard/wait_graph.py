"""Who waits for whom, small enough to be drawn: waits in layers that lead to the culprit, alike waiters as one node.

A thousand workers that wait for one make two nodes and one arrow. Pure; the page and the terminal draw what is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lockstep.dashboard.names import short, tensor
from lockstep.diagnose.evidence import Seen, waits_of
from lockstep.diagnose.verdict import Diagnosis, Edge

ALIKE = 4
"""More tasks than this that wait for the same, or that the same wait for, become one node."""
MAX_NODES = 24
MAX_EDGES = 5000
LONG_WAIT = 1.5
"""Beside a verdict, shorter waits are part of every step."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A task, or ``count`` tasks that wait for the same one."""

    name: str
    label: str
    layer: int
    """How many waits away from the culprit, or from whoever waits for nobody."""
    count: int = 1
    culprit: bool = False


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """One wait, or those of all tasks of a node: the longest."""

    waiter: str
    on: str
    what: str
    seconds: float
    count: int = 1
    first: bool = False
    """It leads to the culprit, rather than following from it."""


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """What is drawn; ``left_out`` tasks had no room."""

    nodes: tuple[GraphNode, ...] = ()
    edges: tuple[GraphEdge, ...] = ()
    left_out: int = 0


def wait_graph(found: Mapping[str, Seen], diagnosis: Diagnosis) -> WaitGraph:
    """The waits of a diagnosis, which names some of those that follow from its cause, and all others that are as long;
    in a healthy job, those of this moment."""
    culprit = "" if diagnosis.verdict is None else diagnosis.verdict.culprit
    edges = [_edge(one, first=True) for one in diagnosis.causes]
    edges += [_edge(one, first=False) for one in diagnosis.consequences[:MAX_EDGES]]
    known = {(one.waiter, one.on) for one in edges}
    now = _of_this_moment(found)
    edges += [one for one in now if (one.waiter, one.on) not in known and (not known or one.seconds >= LONG_WAIT)]
    return drawn(edges, culprit)


def drawn(edges: Iterable[GraphEdge], culprit: str) -> WaitGraph:
    """Edges with the names of tasks, folded and in layers."""
    longest = _longest(edges)
    members = _folded(longest, culprit)
    edges = _longest(
        replace(one, waiter=members.get(one.waiter, one.waiter), on=members.get(one.on, one.on)) for one in longest
    )
    names = list(dict.fromkeys(name for one in edges for name in (one.on, one.waiter)))
    layers = _layers(edges, names, culprit)
    names.sort(key=lambda name: (layers[name], name != culprit))
    shown = names[:MAX_NODES]
    counts: dict[str, int] = defaultdict(int)
    for group in members.values():
        counts[group] += 1
    nodes = tuple(
        GraphNode(name, _label(name, counts.get(name, 1)), layers[name], counts.get(name, 1), name == culprit)
        for name in shown
    )
    kept = tuple(
        replace(one, count=max(counts.get(one.waiter, 1), counts.get(one.on, 1)))
        for one in edges
        if one.waiter in shown and one.on in shown
    )
    return WaitGraph(nodes, kept, len(names) - len(shown))


def _edge(edge: Edge, *, first: bool) -> GraphEdge:
    return GraphEdge(edge.waiter, edge.on, tensor(edge.what), edge.seconds, first=first)


def _of_this_moment(found: Mapping[str, Seen]) -> list[GraphEdge]:
    return [
        GraphEdge(one.waiter, one.on, tensor(one.wait.what), one.wait.seconds)
        for seen in found.values()
        if seen.view is not None
        for one in waits_of(seen.view)
    ][:MAX_EDGES]


def _longest(edges: Iterable[GraphEdge]) -> list[GraphEdge]:
    """One edge for each pair: the one that leads to the culprit, or the longest."""
    found: dict[tuple[str, str], GraphEdge] = {}
    for one in edges:
        known = found.get((one.waiter, one.on))
        if known is None or (one.first, one.seconds) > (known.first, known.seconds):
            found[one.waiter, one.on] = one
    return list(found.values())


def _folded(edges: list[GraphEdge], culprit: str) -> dict[str, str]:
    """For each task that becomes part of a node with others: that node's name."""
    onward: dict[str, list[str]] = defaultdict(list)
    back: dict[str, list[str]] = defaultdict(list)
    for one in edges:
        onward[one.waiter].append(one.on)
        back[one.on].append(one.waiter)
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*onward, *back]):
        if name != culprit and not (onward[name] and back[name]):
            alike[_role(name), ">", *sorted(onward[name]), "<", *sorted(back[name])].append(name)
    return {name: " ".join(key) for key, names in alike.items() if len(names) > ALIKE for name in names}


def _role(name: str) -> str:
    return short(name).partition(" ")[0]


def _label(name: str, count: int) -> str:
    role = "server" if name.partition(" ")[0] == "ps" else "worker"
    return f"{count} {role}s" if count > 1 else short(name)


def _layers(edges: Iterable[GraphEdge], names: list[str], culprit: str) -> dict[str, int]:
    """The shortest way to the culprit, against the arrows; what does not lead there has its own end."""
    into: dict[str, list[str]] = defaultdict(list)
    waiting = set()
    for one in edges:
        into[one.on].append(one.waiter)
        waiting.add(one.waiter)
    layers: dict[str, int] = {}
    # In a ring nobody waits for nobody: the first one then stands for the end.
    for start in (*[culprit] * (culprit in names), *(n for n in names if n not in waiting), *names):
        if start in layers:
            continue
        layers[start] = 0
        reached = [start]
        for name in reached:
            for waiter in into[name]:
                if waiter not in layers:
                    layers[waiter] = layers[name] + 1
                    reached.append(waiter)
    return layers
