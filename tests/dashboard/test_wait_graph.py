"""Who waits for whom, folded and in layers."""

from __future__ import annotations

from dataclasses import replace

from diagnose.faulty import frozen
from helpers.snapshots import PS0, W0, W1, healthy
from lockstep.dashboard.wait_graph import MAX_NODES, GraphEdge, drawn, wait_graph
from lockstep.diagnose.analyse import analyse
from lockstep.protocol.core.ids import server, worker

PS, SLOW = str(server(0)), str(worker(7))


def waits_on(on: str, waiters: range) -> list[GraphEdge]:
    return [GraphEdge(str(worker(index)), on, "a tensor", index / 10) for index in waiters if str(worker(index)) != on]


def test_a_thousand_workers_behind_one_are_two_nodes_and_the_way_to_the_culprit() -> None:
    edges = [*waits_on(PS, range(1000)), GraphEdge(PS, SLOW, "its gradient", 9.0, first=True)]
    edges = [edge for edge in edges if edge.waiter != SLOW]
    graph = drawn(edges, SLOW)
    assert [(node.label, node.layer, node.count, node.culprit) for node in graph.nodes] == [
        ("worker 7", 0, 1, True),
        ("ps 0", 1, 1, False),
        ("999 workers", 2, 999, False),
    ]
    assert [(edge.on, edge.seconds, edge.count, edge.first) for edge in graph.edges] == [
        (PS, 99.9, 999, False),
        (SLOW, 9.0, 1, True),
    ]
    assert graph.left_out == 0


def test_those_whom_one_waits_for_are_folded_too_but_never_the_culprit() -> None:
    edges = [GraphEdge(PS, str(worker(index)), "a gradient", 1.0) for index in range(20)]
    labels = {node.label for node in drawn(edges, SLOW).nodes}
    assert labels == {"ps 0", "19 workers", "worker 7"}


def test_a_ring_is_drawn_and_a_crowd_is_cut() -> None:
    ring = drawn([GraphEdge(str(W0), str(W1), "x", 1.0), GraphEdge(str(W1), str(W0), "y", 2.0)], "")
    assert {node.layer for node in ring.nodes} == {0, 1}
    crowd = [GraphEdge(str(worker(index)), str(worker(index + 1)), "x", 1.0) for index in range(60)]
    graph = drawn(crowd, "")
    assert (len(graph.nodes), graph.left_out) == (MAX_NODES, 61 - MAX_NODES)


def test_the_graph_of_a_verdict_leads_to_its_culprit_and_a_healthy_job_shows_this_moment() -> None:
    cluster = frozen()
    evidence = cluster.evidence()
    graph = wait_graph(evidence.tasks, analyse(evidence))
    assert [node.name for node in graph.nodes if node.culprit] == [str(W1)]
    assert any(edge.first and (edge.waiter, edge.on) == (str(PS0), str(W1)) for edge in graph.edges)
    named = {edge.waiter for edge in graph.edges}
    few = replace(analyse(evidence), consequences=())
    assert {edge.waiter for edge in wait_graph(evidence.tasks, few).edges} == named, "however many a report names"
    calm = healthy().evidence()
    assert not any(node.culprit for node in wait_graph(calm.tasks, analyse(calm)).nodes)
