"""Properties of every plan, over drawn parameter lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import (
    ALIGNMENT,
    BUFFERS,
    DEFAULT_BUCKET_BYTES,
    ELEMENT_BYTES,
    PAGE,
    PRESENCE,
    Plan,
    PlanError,
    aligned,
    first_difference,
    make_plan,
)

_shapes = st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 400)), st.sampled_from(sorted(ELEMENT_BYTES)), st.integers(0, 2)
)


@st.composite
def parameter_lists(draw: st.DrawFn) -> tuple[ParameterEntry, ...]:
    shapes = draw(st.lists(_shapes, max_size=12))
    return tuple(ParameterEntry(f"p{index}", *shape) for index, shape in enumerate(shapes))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    bucket_bytes = draw(st.one_of(st.integers(1, 8).map(lambda count: ALIGNMENT * count), st.just(PAGE)))
    return make_plan(draw(parameter_lists()), draw(st.integers(1, 5)), bucket_bytes)


@given(plans())
def test_every_element_of_every_parameter_is_covered_exactly_once(plan: Plan) -> None:
    covered: dict[int, list[tuple[int, int]]] = {}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            covered.setdefault(piece.parameter, []).append((piece.first, piece.elements))
    assert sorted(covered) == list(range(len(plan.parameters)))
    for index, entry in enumerate(plan.parameters):
        position = 0
        for first, elements in covered[index]:
            assert first == position
            position += elements
        assert position == entry.elements


@given(plans())
def test_pieces_are_aligned_inside_their_bucket_and_do_not_overlap(plan: Plan) -> None:
    for bucket in plan.buckets:
        size = ELEMENT_BYTES[bucket.dtype]
        assert bucket.nbytes % ALIGNMENT == 0
        assert bucket.nbytes <= plan.bucket_bytes
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.elements * size
        assert end <= bucket.nbytes


@given(plans())
def test_a_bucket_holds_parameters_of_one_dtype_and_one_group(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert {(plan.parameters[p.parameter].dtype, plan.parameters[p.parameter].group) for p in bucket.pieces} == {
            (bucket.dtype, bucket.group)
        }


@given(plans())
def test_a_parameter_is_one_contiguous_range_of_the_arena_also_where_it_is_cut(plan: Plan) -> None:
    for index, entry in enumerate(plan.parameters):
        size = ELEMENT_BYTES[entry.dtype]
        places = [
            (piece.first, bucket.arena_offset + piece.offset)
            for bucket in plan.buckets
            for piece in bucket.pieces
            if piece.parameter == index
        ]
        start = places[0][1]
        assert start % ALIGNMENT == 0
        assert all(place == start + first * size for first, place in places)


@given(plans())
def test_arena_and_shards_are_filled_in_the_order_of_buckets_and_pages_are_kept_whole(
    plan: Plan,
) -> None:
    assert [bucket.id for bucket in plan.buckets] == list(range(len(plan.buckets)))
    position = 0
    for bucket in plan.buckets:
        assert bucket.arena_offset == position
        position += bucket.nbytes
    assert plan.arena_bytes == position
    for index in range(plan.servers):
        position = 0
        for bucket in plan.buckets_of(index):
            unit = PAGE if plan.bucket_bytes % PAGE == 0 else ALIGNMENT
            assert bucket.shard_offset == -(-position // unit) * unit
            position = bucket.shard_offset + bucket.nbytes
        assert plan.shard_room(index) == position
    assert sum(plan.shard_bytes(index) for index in range(plan.servers)) == plan.arena_bytes


@given(plans())
def test_servers_differ_by_at_most_one_bucket(plan: Plan) -> None:
    loads = [plan.shard_bytes(index) for index in range(plan.servers)]
    assert max(loads) - min(loads) <= max((bucket.nbytes for bucket in plan.buckets), default=0)


@given(plans())
def test_buckets_of_each_kind_come_in_the_order_in_which_backward_fills_them(plan: Plan) -> None:
    for kind in {(bucket.dtype, bucket.group) for bucket in plan.buckets}:
        mine = [bucket for bucket in plan.buckets if (bucket.dtype, bucket.group) == kind]
        order = [piece.parameter for bucket in mine for piece in bucket.pieces]
        assert order == sorted(order, reverse=True)
    completed = [bucket.pieces[-1].parameter for bucket in plan.buckets]
    for index in reversed(range(len(completed) - 1)):
        if plan.buckets[index + 1].pieces[0].parameter == completed[index]:  # pieces of one parameter stay together
            completed[index] = completed[index + 1]
    assert completed == sorted(completed, reverse=True)


def test_a_small_group_of_all_layers_comes_with_the_first_layer() -> None:
    """Layer norms in a group without decay: one bucket, which the first layer waits for."""
    entries = [
        ParameterEntry(f"{layer}.{kind}", size, "float32", group)
        for layer in range(4)
        for kind, size, group in (("norm", 16, 1), ("weight", 256, 0))
    ]
    plan = make_plan(entries, 1, 1024)
    assert [plan.names_in(bucket.id)[-1] for bucket in plan.buckets] == [
        "3.weight",
        "2.weight",
        "1.weight",
        "0.weight",
        "0.norm",
    ]


_any_entry = st.builds(
    ParameterEntry,
    st.text(st.characters(codec="utf-8") | st.sampled_from("\t\n01'\","), max_size=6),
    st.integers(0, 3),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 1),
)
_any_list = st.lists(_any_entry, max_size=3, unique_by=lambda entry: entry.name)


@given(_any_list, _any_list, st.integers(1, 2), st.integers(1, 2), st.sampled_from([64, 128]))
def test_hashes_are_equal_exactly_where_the_plans_are(
    ours: list[ParameterEntry], theirs: list[ParameterEntry], our_servers: int, their_servers: int, size: int
) -> None:
    one, other = make_plan(ours, our_servers, size), make_plan(theirs, their_servers, 64)
    assert (one.hash == other.hash) == (one == other)
    assert len(one.hash) == 16


def test_a_name_that_looks_like_a_separator_does_not_fool_the_hash() -> None:
    """Two models whose lists differ, although their fields written one after the other would read the same."""
    two = [ParameterEntry("a", 1, "float32", 0), ParameterEntry("b", 2, "float32", 0)]
    one = [ParameterEntry("a\t1\tfloat32\t0\nb", 2, "float32", 0)]
    assert make_plan(two, 1).hash != make_plan(one, 1).hash


@given(parameter_lists(), st.integers(1, 3))
def test_a_plan_depends_on_nothing_but_the_list_and_the_number_of_servers(
    parameters: tuple[ParameterEntry, ...], servers: int
) -> None:
    assert make_plan(parameters, servers) == make_plan(list(parameters), servers, DEFAULT_BUCKET_BYTES)


@given(parameter_lists(), parameter_lists())
def test_a_difference_is_found_exactly_where_there_is_one(
    ours: tuple[ParameterEntry, ...], theirs: tuple[ParameterEntry, ...]
) -> None:
    assert (first_difference(ours, theirs) is None) == (ours == theirs)


def test_the_first_difference_is_named_with_both_sides() -> None:
    ours = [ParameterEntry("a", 4, "float32", 0), ParameterEntry("b", 4, "float32", 0)]
    theirs = [ParameterEntry("a", 4, "float32", 0), ParameterEntry("b", 5, "float32", 0)]
    assert first_difference(ours, theirs) == (
        "parameter 1 is 'b' (4 x float32, group 0) on one side and 'b' (5 x float32, group 0) on the other"
    )
    assert first_difference(ours, theirs[:1]) == (
        "one side has 2 parameters, the other 1; the first extra one is 'b' (4 x float32, group 0)"
    )


def test_a_large_parameter_is_cut_and_its_rest_shares_a_bucket_with_its_neighbour() -> None:
    parameters = [ParameterEntry("small", 4, "float32", 0), ParameterEntry("large", 40, "float32", 0)]
    plan = make_plan(parameters, 2, 64)
    assert [plan.names_in(bucket.id) for bucket in plan.buckets] == [("large",), ("large",), ("large",), ("small",)]
    plan = make_plan(parameters, 2, 128)
    assert [plan.names_in(bucket.id) for bucket in plan.buckets] == [("large",), ("large", "small")]
    assert [bucket.server for bucket in plan.buckets] == [0, 1]


def test_empty_parameters_and_an_empty_model_can_be_planned() -> None:
    plan = make_plan([ParameterEntry("empty", 0, "float32", 0)], 3)
    assert [(bucket.nbytes, bucket.server) for bucket in plan.buckets] == [(0, 0)]
    assert make_plan([], 2).buckets == ()


@pytest.mark.parametrize(
    ("parameters", "servers", "size", "text"),
    [
        ([], 0, 64, "at least one server"),
        ([], 1, 100, "multiple of 64 bytes, not 100"),
        ([], 1, 0, "positive multiple of 64"),
        ([ParameterEntry("w", 1, "int8", 0)], 1, 64, "parameter 'w' has dtype int8; use one of float32"),
        ([ParameterEntry("w", -1, "float32", 0)], 1, 64, "parameter 'w' has -1 elements"),
        ([ParameterEntry("w", 1, "float32", 0)] * 2, 1, 64, "two parameters are named 'w'"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    parameters: list[ParameterEntry], servers: int, size: int, text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        make_plan(parameters, servers, size)


@given(st.integers(0, 10_000))
def test_aligned_rounds_up_to_the_next_multiple(nbytes: int) -> None:
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT


def test_entries_of_our_own_are_not_named_among_parameters() -> None:
    entries = [
        ParameterEntry(BUFFERS, 16, "float32", 1),
        ParameterEntry(PRESENCE, 16, "float32", 0),
        ParameterEntry("weight", 16, "float32", 0),
    ]
    plan = make_plan(entries, 1, 1024)
    assert sorted(plan.names_in(bucket.id) for bucket in plan.buckets) == [(BUFFERS,), ("weight",)]
