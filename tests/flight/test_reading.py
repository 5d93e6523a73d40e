"""Dumps of every format become the same values, and what is no dump, or more than one, becomes a sentence."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight import handmade
from flight.jobs import PaperJob, Planned, steps
from flight.samples import DATA, copied, found
from lockstep.flight.dump_folder import rank_in, read_dump_folder
from lockstep.flight.plain_pickle import PickleRefused, read_plain_pickle
from lockstep.flight.reading import DumpError, read_dump
from lockstep.flight.recording import CallState, Recording


def small_recording() -> Recording:
    plan = [*steps(2), Planned("0", "all_gather", 3)]
    return PaperJob({"0": (0, 1)}, {0: plan, 1: plan}).run().recordings()[0]


# -- formats --


def test_a_real_dump_of_gloo_is_read_with_its_stacks(tmp_path: Path) -> None:
    one = found("gloo-slept", tmp_path).recordings[0]
    assert (one.version, one.lost, one.gaps, one.members) == ("2.10", 0, False, {})
    last = one.calls[-1]
    assert (last.group, last.description, last.backend, last.operation) == ("0", "default_pg", "gloo", "all_reduce")
    assert (last.number, last.state, last.retired, last.over) == (5, CallState.SCHEDULED, False, False)
    assert (last.inputs.sizes, last.inputs.dtypes, last.timeout) == (((4,),), ("Float",), 600.0)
    assert [(line.function, Path(line.file).name) for line in last.stack[-3:]] == [
        ("train_step", "train.py"),
        ("fail", "train.py"),
        ("main", "train.py"),
    ] or last.stack[-1].function == "<module>"
    assert all(call.over for call in one.calls[:-1])


def test_json_says_the_same_as_the_pickle_but_for_the_stacks(tmp_path: Path) -> None:
    pickled = found("gloo-slept", tmp_path).recordings
    as_json = found("gloo-slept-json", tmp_path).recordings
    assert pickled.keys() == as_json.keys()
    for rank, one in pickled.items():
        bare = replace(one, calls=tuple(replace(call, stack=()) for call in one.calls))
        assert bare == as_json[rank]


def test_a_real_dump_of_nccl_says_who_belongs_to_a_group_and_ends_its_batches(tmp_path: Path) -> None:
    one = found("nccl-one-rank-healthy", tmp_path).recordings[0]
    assert one.members == {"0": (0,), "1": (0,)}
    # Of a batch only its own record is completed; it claims to be a collective, with the number of the one before.
    send, receive, batch = one.calls[-3:]
    assert (send.operation, send.source, send.target, receive.operation) == ("send", 0, 0, "recv")
    assert all(call.p2p and call.over for call in (send, receive, batch))
    waiting = found("nccl-one-rank-open", tmp_path).recordings[0]
    assert [call.operation for call in waiting.calls if not call.over] == ["all_reduce", "_all_gather_base"]


@pytest.mark.parametrize("version", handmade.VERSIONS)
@pytest.mark.parametrize("write", [handmade.as_pickle, handmade.as_json])
def test_every_format_is_read(version: str, write: Any) -> None:
    recording = small_recording()
    read = read_dump(write(recording, version), 0)
    if write is handmade.as_json:
        recording = replace(recording, calls=tuple(replace(call, stack=()) for call in recording.calls))
    assert read == replace(recording, version=version)


def test_a_ring_that_has_wrapped_and_a_dump_of_active_calls_are_recognised(tmp_path: Path) -> None:
    one = found("gloo-wrapped", tmp_path).recordings[0]
    assert (len(one.calls), one.lost, one.gaps) == (8, 14, False)
    assert replace(one, calls=(*one.calls[:2], *one.calls[4:])).gaps


def test_a_send_and_a_receive_have_the_same_two_ends() -> None:
    fields = handmade.fields(small_recording(), "2.10", as_json=True)
    fields["entries"][0]["profiling_name"] = "nccl:send 3->11"
    fields["entries"][1]["profiling_name"] = "nccl:recv 11<-3"
    fields["entries"][2]["profiling_name"] = "nccl:send a->b"
    first, second, third = read_dump(json.dumps(fields).encode(), 0).calls
    assert (first.operation, first.source, first.target) == ("send", 3, 11)
    assert (second.operation, second.source, second.target) == ("recv", 3, 11)
    assert (third.operation, third.source) == ("send a->b", -1)


# -- what is no dump --


class _Evil:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trap),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    dump = {**handmade.fields(small_recording(), "2.10", as_json=False), "extra": _Evil(trap)}
    data = pickle.dumps(dump, protocol)
    with pytest.raises(DumpError, match="not readable: it has the instruction"):
        read_dump(data if protocol > 1 else b"\x80\x02" + data, 0)
    assert not trap.exists()
    pickle.loads(data)
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x80\x02cos\nsystem\n(S'true'\ntR.", "the instruction GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "the instruction STACK_GLOBAL"),
        (b"\x80\x02Papple\n.", "the instruction PERSID"),
        (b"\x80\x02U\x01aQ.", "the instruction SHORT_BINSTRING"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"\x80\x02}r" + (50_000_000).to_bytes(4, "little") + b".", "more parts than any dump"),
        (b"\x80\x02" + b")\x85" * 40_000 + b".", "more parts than any dump"),
        (b"\x80\x02]", "damaged or cut off"),
        (b"\x80\x02}]]s.", "damaged or cut off"),
        (b"\x80\x02h\x07.", "damaged or cut off"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "damaged or cut off"),
        (b"\x80", "damaged or cut off"),
    ],
)
def test_what_a_pickle_may_not_do_is_named(data: bytes, sentence: str) -> None:
    with pytest.raises(PickleRefused, match=sentence):
        read_plain_pickle(data)


def test_no_real_dump_needs_an_instruction_that_is_refused() -> None:
    used = {
        instruction.name
        for file in DATA.glob("*/*rank_?")
        for instruction, _, _ in pickletools.genops(file.read_bytes())
    }
    assert used
    assert used.isdisjoint(
        {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "PERSID", "BINPERSID"}
    )


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not readable"),
        (b"{}", "it is not a dump of a flight recorder"),
        (b"[1, 2]", "it is not a dump of a flight recorder"),
        (b'{"version": 3, "pg_config": {}}', "it is not a dump of a flight recorder"),
        (b'{"version": "3.0", "pg_config": {}}', "it has format 3.0; this program reads formats 2.3 to 2.10"),
        (b'{"version": "2.10", "pg_config": {}, "entries": {}}', "it is not a dump of a flight recorder"),
        (b'{"version": "2.1", "pg_config": {}, "entries": [{"seq_id": 1}]}', "a call without a number"),
        (b'{"version": "2.10", "pg_config": {}, "entries": [7]}', "a call without a number"),
        (b'{"version": "2.10", "pg_co', "not readable: not JSON"),
        (b'{"version": ' + b"[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_dump_becomes_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(DumpError, match=sentence):
        read_dump(data, 0)


def test_a_dump_without_any_call_is_one() -> None:
    assert read_dump(b'{"version": "2.10", "pg_config": {}}', 3) == Recording(rank=3, version="2.10")


def test_members_of_a_group_without_a_name_are_of_no_use() -> None:
    """Gloo of torch 2.15 writes those of the group that was made last, counted within it."""
    data = b'{"version": "2.10", "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}}}'
    assert read_dump(data, 3).members == {}


def test_a_small_pickle_that_uses_one_list_many_times_is_stopped() -> None:
    sizes = [[1] * 1000] * 1000
    entry = {"collective_seq_id": 1, "input_sizes": sizes}
    data = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [dict(entry) for _ in range(50)]}, 2)
    assert len(data) < 1 << 16
    with pytest.raises(DumpError, match="more parts than any dump"):
        read_dump(data, 0)


def test_a_dump_that_is_too_long_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.flight.reading.MAX_BYTES", 10)
    with pytest.raises(DumpError, match="more than 0 MiB"):
        read_dump(b"\x80" * 11, 0)
    monkeypatch.undo()
    monkeypatch.setattr("lockstep.flight.reading.MAX_CALLS", 2)
    with pytest.raises(DumpError, match="more than 2 calls"):
        read_dump(handmade.as_json(small_recording(), "2.10"), 0)


def test_no_text_of_a_dump_reaches_a_terminal_as_it_was() -> None:
    escapes = "\x1b]0;owned\x07\x1b[2Jfine\nlockstep: all is well\u202e"
    fields = handmade.fields(small_recording(), "2.10", as_json=False)
    fields["pg_config"] = {escapes: {"ranks": "[0, 1]"}}
    fields["entries"][0] |= {
        "profiling_name": f"{escapes}:{escapes}",
        "process_group": (escapes, escapes),
        "input_dtypes": [escapes],
        "state": escapes,
        "frames": [{"name": escapes, "filename": escapes, "line": escapes}],
    }
    shown = repr(read_dump(pickle.dumps(fields, 2), 0))
    assert "\\x1b" not in shown
    assert "\\n" not in shown
    assert "?[2Jfine lockstep: all is well?" in shown


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = tuple(handmade.fields(small_recording(), "2.10", as_json=False)["entries"][0])


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FIELDS), ANY_VALUE, max_size=4), ANY_VALUE, ANY_VALUE)
def test_a_field_of_a_wrong_type_never_breaks_the_reader(changes: dict[str, Any], config: Any, status: Any) -> None:
    fields = handmade.fields(small_recording(), "2.10", as_json=False) | {"pg_config": config, "pg_status": status}
    fields["entries"][0] |= changes
    try:
        recording = read_dump(pickle.dumps(fields, 2), 0)
    except DumpError:
        return
    assert len(recording.calls) == 3


@given(st.binary(max_size=300))
def test_bytes_that_are_no_dump_become_a_sentence(data: bytes) -> None:
    for head in (b"", b"\x80", b"\x80\x02", b"{"):
        with pytest.raises(DumpError):
            read_dump(head + data, 0)


# -- folders --


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("trace_rank_12.json", 12),
        ("rank0.4711.json", 0),
        ("node7-RANK-5-v2", 5),
        ("dump17", 17),
        ("dump-4.pickle", 4),
        ("dump", None),
        ("rank_99999999", None),
        ("trace-20261117", None),
        ("trace_rank_200000", None),
    ],
)
def test_the_rank_of_a_dump_is_in_its_name(name: str, rank: int | None) -> None:
    assert rank_in(name) == rank


def test_other_files_in_the_folder_are_passed_over_and_bad_dumps_are_named(tmp_path: Path) -> None:
    folder = copied("gloo-slept", tmp_path)
    (folder / "train.log").write_text("step 1\n")
    (folder / "folder_9").mkdir()
    (folder / "trace_rank_3").write_bytes(b"")
    (folder / "trace_rank_4").write_bytes((folder / "trace_rank_0").read_bytes()[:1000])
    (folder / "config.json").write_text("{}")
    (folder / "config_7.json").write_text("{}")
    os.mkfifo(folder / "trace_rank_5")
    (folder / "trace_rank_6").symlink_to(folder / "trace_rank_0")
    read = read_dump_folder(folder)
    assert sorted(read.recordings) == [0, 1, 2]
    assert sorted(read.problems) == [
        "config.json is ignored: its name does not end in the number of a rank",
        "config_7.json is ignored: it is not a dump of a flight recorder",
        "trace_rank_3 is ignored: it is empty; its rank may have died while it wrote",
        "trace_rank_4 is ignored: it is not readable: it is damaged or cut off (ValueError)",
        "trace_rank_5 is ignored: it is not a plain file",
        "trace_rank_6 is ignored: it is not a plain file",
    ]


def test_of_two_dumps_of_one_rank_the_newer_or_the_one_with_stacks_is_used(tmp_path: Path) -> None:
    folder = copied("gloo-slept", tmp_path)
    beside = copied("gloo-slept-json", tmp_path)
    for file in beside.iterdir():
        file.rename(folder / file.name)
    read = read_dump_folder(folder)
    assert all(one.calls[0].stack for one in read.recordings.values())
    assert "trace_rank_0.json is ignored: trace_rank_0 is of the same rank" in read.problems
    other = copied("gloo-skipped", tmp_path)  # made later
    (other / "trace_rank_0").rename(folder / "again_rank_0")
    read = read_dump_folder(folder)
    assert read.recordings[0].calls[-1].operation == "all_gather"
    assert "trace_rank_0 is ignored: again_rank_0 is of the same rank" in read.problems


def test_an_unreadable_folder_becomes_a_sentence(tmp_path: Path) -> None:
    assert read_dump_folder(tmp_path / "gone").problems == [f"{tmp_path}/gone is ignored: No such file or directory"]


def test_the_reader_never_asks_pickle_for_a_name() -> None:
    data = io.BytesIO()
    pickle.dump({"a": [1, 2.5, None, True, ("x", "y")], "b": 1 << 40}, data, 2)
    assert read_plain_pickle(data.getvalue()) == {"a": [1, 2.5, None, True, ("x", "y")], "b": 1 << 40}
