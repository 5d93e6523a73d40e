"""The folder by which torch lets us in, and what ranks write into it; without torch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from lockstep.flight.recording import RecordedCall, Recording, StackLine, Tensors
from lockstep.watch import injected
from lockstep.watch.entry import entered, entry_folder, kept_out
from lockstep.watch.naming import names_of
from lockstep.watch.ranks import RankFacts, RankProcess, RankStatus, read_facts, read_status, registered_in
from lockstep.watch.sights import Work
from lockstep.watch.stack_reading import main_stack, work_of


def test_the_folder_has_the_entry_point_and_is_gone_afterwards() -> None:
    with entry_folder() as folder:
        points = folder / f"{injected.MODULE}-1.dist-info" / "entry_points.txt"
        assert f"= {injected.MODULE}:start" in points.read_text()
        assert (folder / f"{injected.MODULE}.py").read_text() == Path(injected.__file__).read_text()
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_what_a_killed_watcher_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path) if len(str(tmp_path)) < 50 else "/tmp")
    base = Path(str(tmp_path) if len(str(tmp_path)) < 50 else "/tmp")
    left = base / "lockstep-watch-4194999-abc"  # above the highest number of a process
    left.mkdir()
    own = base / f"lockstep-watch-{os.getpid()}-other"
    own.mkdir()
    with entry_folder():
        assert not left.exists()
        assert own.exists()
    own.rmdir()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    found = entered({"PYTHONPATH": "/mine", "TORCH_FR_BUFFER_SIZE": "9"}, tmp_path)
    assert found["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/mine"
    assert found["TORCH_FR_BUFFER_SIZE"] == "9"
    assert entered({}, tmp_path)["TORCH_FR_BUFFER_SIZE"] == "256"
    assert entered({}, tmp_path)["PYTHONPATH"] == str(tmp_path)
    assert kept_out({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert not kept_out({})


def test_the_status_of_a_rank_and_the_modules_of_its_last_calls(tmp_path: Path) -> None:
    data = bytearray(injected.STATUS_BYTES)
    injected.STATUS.pack_into(data, 0, injected.MARK, 7, 11.5, 12.5, injected.EXITING, 2)
    for place, slot in enumerate((b"glayers.0.weight layers.0.bias", b"rlayers.1.weight")):
        at = injected.RING_AT + place * injected.SLOT
        data[at : at + len(slot)] = slot
    expected = RankStatus(7, 11.5, 12.5, injected.EXITING, ("layers.0.weight layers.0.bias",), ("layers.1.weight",))
    assert read_status(bytes(data)) == expected
    assert read_status(bytes(injected.STATUS_BYTES)) == RankStatus()
    (tmp_path / "rank3.77.status").write_bytes(data)
    assert registered_in(tmp_path) == [(3, 77)]
    process = RankProcess(3, 77, tmp_path / "rank3.77")
    assert process.status() == expected
    assert process.facts() == RankFacts()
    assert process.dump() == b""
    process.close()


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"groups": 3, "buckets": "x", "world": true, "port": "99999999"}'])
def test_facts_of_another_shape_are_no_facts(text: bytes) -> None:
    found = read_facts(text)
    assert (found.groups, found.buckets, found.port) == ({}, (), 0)


def test_modules_of_fsdp_are_matched_from_the_end() -> None:
    def call(record: int, operation: str) -> RecordedCall:
        return RecordedCall(record=record, group="0", operation=operation, inputs=Tensors(((4,),), ("Float",)))

    calls = tuple(call(place, "_all_gather_base" if place % 2 else "all_reduce") for place in range(8))
    recording = Recording(rank=0, calls=calls)
    status = RankStatus(gathered=("a", "b c", "d"))
    assert names_of(calls[7], recording, RankFacts(), status) == ("d",)
    assert names_of(calls[5], recording, RankFacts(), status) == ("b", "c")
    assert names_of(calls[1], recording, RankFacts(), status) == ()


def test_where_a_stack_stands() -> None:
    torch, mine = "/venv/lib/python3.11/site-packages/torch", StackLine("main", "/home/me/train.py", 3)
    loader = StackLine("_get_data", f"{torch}/utils/data/dataloader.py", 1)
    joining = StackLine("init_process_group", f"{torch}/distributed/distributed_c10d.py", 1)
    reduces = StackLine("all_reduce", f"{torch}/distributed/distributed_c10d.py", 2)
    assert [work_of(stack) for stack in ([], [mine], [loader, mine], [joining, mine], [reduces, mine])] == [
        Work.NOT_SEEN,
        Work.PROGRAM,
        Work.INPUT,
        Work.JOINING,
        Work.COLLECTIVE,
    ]


def test_the_main_thread_among_those_that_py_spy_lists() -> None:
    threads = [
        {"os_thread_id": 8, "thread_name": "pin", "frames": []},
        {"os_thread_id": 7, "thread_name": "x", "frames": [{"name": "f", "filename": "/a/b.py", "line": 3}, 5]},
    ]
    assert main_stack(threads, 7) == (StackLine("f", "/a/b.py", 3),)
    assert main_stack("?", 7) == ()


def test_a_shared_file_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.1.status"
    path.write_bytes(bytes(injected.STATUS_BYTES))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), injected.STATUS_BYTES) as shared:
        process = RankProcess(0, 1, tmp_path / "rank0.1")
        injected.STATUS.pack_into(shared, 0, injected.MARK, 1, 0.0, 0.0, 0, 0)
        assert process.status().step == 1
        injected.STATUS.pack_into(shared, 0, injected.MARK, 2, 0.0, 0.0, 0, 0)
        assert process.status().step == 2
        process.close()
