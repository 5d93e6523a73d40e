"""The decoding processes and what they make of pictures, good and bad."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.programs import Program, alive
from helpers.waiting import wait_until
from lockstep.benchmark.data.errors import BadData, BadRecord, TooManyBadRecords
from lockstep.benchmark.data.example import PictureExample, encode_example
from lockstep.benchmark.data.geometry import AREAS, ASPECTS, Window, middle_window, random_window
from lockstep.benchmark.data.order import OnceThrough, Order, TrainingOrder
from lockstep.benchmark.data.pictures import PictureSource
from lockstep.benchmark.data.pipeline import DecodePipeline, InputOptions
from lockstep.benchmark.data.records import framed
from lockstep.benchmark.data.tfrecords import TFRecordSource
from lockstep.benchmark.data.transforms import ENGINES, Preparation, distort_colors, make_engine, prepare
from lockstep.protocol.core.activity import InputWait
from lockstep.runtime.reading_process import InputLost

SIZE = 16


def jpeg(color: tuple[int, int, int], size: tuple[int, int] = (40, 30), kind: str = "JPEG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).convert(mode).save(out, kind)
    return out.getvalue()


def _set(folder: Path, pictures: list[tuple[bytes, int]], name: str = "train-00000-of-00001") -> TFRecordSource:
    payloads = [encode_example(PictureExample(encoded, label)) for encoded, label in pictures]
    (folder / name).write_bytes(b"".join(framed(payload) for payload in payloads))
    return TFRecordSource(folder, "train")


def _colors(count: int) -> list[tuple[bytes, int]]:
    """Each picture is of one grey, which tells its number."""
    return [(jpeg((5 * number,) * 3), number) for number in range(count)]


@contextlib.contextmanager
def _pipeline(
    source: Any, order: Order, first_step: int = 0, how: Preparation | None = None, **options: Any
) -> Iterator[DecodePipeline]:
    pipeline = DecodePipeline(
        source, order, how or Preparation(SIZE), InputOptions(**{"processes": 2, **options}), first_step
    )
    try:
        yield pipeline
    finally:
        pipeline.close()


def test_pixels_and_labels_belong_together(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(20))
    order = TrainingOrder(20, 6, 0, 1, 3)
    with _pipeline(source, order) as pipeline:
        for step in range(10):
            batch = pipeline.next()
            assert batch.step == step
            assert batch.labels.tolist() == [place.index for place in order.places(step)]
            assert np.abs(batch.images.mean(axis=(1, 2, 3)) - 5 * batch.labels).max() < 3


def test_an_epoch_of_two_workers_is_disjoint_complete_and_the_same_after_a_resume(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(12))

    def labels(worker: int, first: int, steps: int) -> list[list[int]]:
        order = TrainingOrder(12, 2, worker, 2, 9)
        with _pipeline(source, order, first) as pipeline:
            return [pipeline.next().labels.tolist() for _ in range(steps)]

    of_all = [labels(worker, 0, 3) for worker in range(2)]
    assert sorted(label for worker in of_all for batch in worker for label in batch) == list(range(12))
    assert labels(1, 2, 1) == of_all[1][2:]


def test_pixels_do_not_depend_on_how_many_processes_there_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pictures = []
    for number in range(9):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).save(out, "JPEG")
        pictures.append((out.getvalue(), number))
    source = _set(tmp_path, pictures)
    made = []
    for processes in (1, 3):
        with _pipeline(source, TrainingOrder(9, 4, 0, 1, 3), processes=processes) as pipeline:
            made.append(np.stack([pipeline.next().images.copy() for _ in range(5)]))
    assert np.array_equal(made[0], made[1])


def test_five_records_feed_a_larger_batch_for_ever(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(5))
    with _pipeline(source, TrainingOrder(5, 16, 0, 1, 3)) as pipeline:
        for _ in range(5):
            assert len(pipeline.next().labels) == 16


def test_the_last_batch_of_an_evaluation_is_smaller(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(5))
    with _pipeline(source, OnceThrough(5, 4), how=Preparation(SIZE, training=False)) as pipeline:
        assert [pipeline.next().labels.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4]]


def test_a_bad_record_is_counted_named_and_replaced_by_the_next_one(tmp_path: Path) -> None:
    pictures = _colors(4)
    pictures[2] = (b"\xff\xd8 no picture", 2)
    source = _set(tmp_path, pictures)
    said: list[str] = []
    with _pipeline(source, OnceThrough(4, 4), on_bad=said.append) as pipeline:
        for _ in range(3):
            assert pipeline.next().labels.tolist() == [0, 1, 3, 3]
        assert len(pipeline.status.bad) == 1
    assert len(said) == 1
    assert "skipped a bad record (1 of 10 allowed)" in said[0]
    assert "train-00000-of-00001, record at byte" in said[0]


def test_more_bad_records_than_allowed_end_the_run(tmp_path: Path) -> None:
    pictures = [(b"no picture", 1), (b"nor this", 1), *_colors(2)]
    source = _set(tmp_path, pictures)
    with (
        _pipeline(source, OnceThrough(4, 4), max_bad_records=1) as pipeline,
        pytest.raises(TooManyBadRecords, match="2 records are bad, but --max_bad_records allows only 1"),
    ):
        pipeline.next()


def test_a_set_of_bad_records_only_ends_however_many_are_allowed(tmp_path: Path) -> None:
    source = _set(tmp_path, [(b"no picture", 1)] * 3)
    with (
        _pipeline(source, OnceThrough(3, 3), max_bad_records=100) as pipeline,
        pytest.raises(BadData, match="all 3 records are bad"),
    ):
        pipeline.next()


def test_a_damaged_checksum_and_a_label_out_of_range_are_told_apart(tmp_path: Path) -> None:
    _set(tmp_path, [(jpeg((1, 2, 3)), 5000), *_colors(3)])
    path = tmp_path / "train-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[-10] ^= 0xFF
    path.write_bytes(content)
    with _pipeline(TFRecordSource(tmp_path, "train"), OnceThrough(4, 4)) as pipeline:
        pipeline.next()
        reasons = sorted(pipeline.status.bad.values())
    assert len(reasons) == 2
    assert "its label 5000 is not between 0 and 1000" in reasons[0]
    assert "checksum" in reasons[1]


def _open_for_writing(fifo: Path) -> int | None:
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None  # nobody reads yet


def test_while_a_read_does_not_return_the_file_is_published(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stuck.jpg")
    said: list[InputWait] = []
    source = PictureSource(tmp_path, "train")
    with _pipeline(source, OnceThrough(1, 1), processes=1, patience=0.1, on_wait=said.append) as pipeline:
        with pytest.raises(InputLost, match=r"no image has arrived for 0\.1 s: reading .*stuck\.jpg hangs"):
            pipeline.next()
        assert pipeline.status.waiting_for.endswith("stuck.jpg")
        # Let the reader go, so that closing does not have to use force.
        writing = wait_until(lambda: _open_for_writing(folder / "stuck.jpg"), 20, "the process opens the file")
        assert writing is not None
        os.close(writing)
    assert said[0].file.endswith("stuck.jpg")
    assert {wait.read for wait in said} == {0}


def test_the_clock_of_a_wait_does_not_restart_with_each_record(tmp_path: Path) -> None:
    """Each read takes long: the wait is as old as its first record, and says how many were read since."""
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    names = [folder / f"{number}.jpg" for number in range(3)]
    for name in names:
        os.mkfifo(name)
    said: list[InputWait] = []
    with _pipeline(PictureSource(tmp_path, "train"), OnceThrough(3, 3), processes=1, on_wait=said.append) as pipeline:
        feeding = threading.Thread(target=_feed_slowly, args=(names, said), daemon=True)
        feeding.start()
        pipeline.next()
        feeding.join(20)
    assert [Path(file).name for file in dict.fromkeys(wait.file for wait in said)] == ["0.jpg", "1.jpg", "2.jpg"]
    assert len({wait.since for wait in said}) == 1
    assert max(wait.read for wait in said) == 2
    assert all(wait.pids and wait.step_since <= wait.since for wait in said)


def _feed_slowly(names: list[Path], said: list[InputWait]) -> None:
    """Each file is complete only after the training has published that it waits for it."""
    for name in names:
        wait_until(partial(_waited_for, name, said), 20, f"it waits for {name}")
        name.write_bytes(jpeg((9, 9, 9)))


def _waited_for(name: Path, said: list[InputWait]) -> bool:
    return any(wait.file == str(name) for wait in list(said))


def _take(pipeline: DecodePipeline, batches: int) -> None:
    for _ in range(batches):
        pipeline.next()


def test_the_death_of_a_decoding_process_is_told_with_its_signal(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(4))
    with _pipeline(source, TrainingOrder(4, 2, 0, 1, 3), processes=1) as pipeline:
        pipeline.next()
        os.kill(pipeline.pids[0], signal.SIGKILL)
        with pytest.raises(InputLost, match=r"was killed by SIGKILL; ") as lost:
            _take(pipeline, 10)
    if pipeline._witness.readable:
        assert "not for lack of memory" in str(lost.value)


def test_stopped_decoding_processes_are_ended_together_and_soon(tmp_path: Path) -> None:
    source = _set(tmp_path, _colors(4))
    with _pipeline(source, TrainingOrder(4, 2, 0, 1, 3), processes=3) as pipeline:
        pipeline.next()
        pids = pipeline.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_decoding_goes_on_after_a_request_to_end_that_the_training_handles(tmp_path: Path, signum: int) -> None:
    """Slurm sends SIGTERM to every process of a step; the step that is saved after it still needs its batch."""
    source = _set(tmp_path, _colors(4))
    with _pipeline(source, TrainingOrder(4, 2, 0, 1, 3), processes=1) as pipeline:
        pipeline.next()
        os.kill(pipeline.pids[0], signum)
        _take(pipeline, 10)


def test_no_decoding_process_outlives_a_killed_training(tmp_path: Path) -> None:
    _set(tmp_path, _colors(4))
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lockstep.benchmark.data.pipeline import DecodePipeline, InputOptions\n"
        "from lockstep.benchmark.data.order import TrainingOrder\n"
        "from lockstep.benchmark.data.transforms import Preparation\n"
        "from lockstep.benchmark.data.tfrecords import TFRecordSource\n"
        "source, order = TFRecordSource(Path(sys.argv[1]), 'train'), TrainingOrder(4, 2, 0, 1, 3)\n"
        "p = DecodePipeline(source, order, Preparation(16), InputOptions(processes=2))\n"
        "p.next(); print('pids', *p.pids, flush=True); time.sleep(60)\n"
    )
    with Program([sys.executable, "-c", code, str(tmp_path)]) as program:
        text = program.wait_for("pids", 20)
        wait_until(lambda: program.stdout().endswith("\n"), 5, "whole line")
        pids = [int(word) for word in program.stdout().split()[1:]]
        assert len(pids) == 2, text
        program.signal(signal.SIGKILL)
        program.wait(10)
        wait_until(lambda: not any(alive(pid) for pid in pids), 10, "decoding processes ended")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P")]
)
def test_every_kind_of_picture_that_imagenet_holds_is_read(engine: str, kind: str, mode: str) -> None:
    target = np.zeros((SIZE, SIZE, 3), np.uint8)
    encoded = jpeg((200, 200, 200), (90, 70), kind, mode)
    prepare(encoded, (), Preparation(SIZE), make_engine(engine), random.Random(1), target)
    assert np.abs(target.astype(int) - 200).max() < 12


@pytest.mark.parametrize("method", ["bilinear", "nearest", "bicubic", "area"])
def test_both_engines_cut_out_the_same_part(method: str) -> None:
    picture = np.zeros((300, 400, 3), np.uint8)
    picture[:, 200:] = (255, 0, 0)
    picture[150:, :, 1] = 255
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", quality=95, subsampling=0)
    made = []
    for name in ("turbo", "pillow"):
        target = np.zeros((SIZE, SIZE, 3), np.uint8)
        make_engine(name).cut_out(out.getvalue(), Window(150, 100, 100, 100), SIZE, method, target)
        made.append(target.astype(int))
    assert np.abs(made[0] - made[1]).mean() < 6
    assert made[0][2, 2].tolist() == pytest.approx([0, 0, 0], abs=12)
    assert made[0][13, 13].tolist() == pytest.approx([255, 255, 0], abs=12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mirrored_picture_is_the_same_one_mirrored(engine: str) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (60, 80, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    made = []
    for mirrored in (False, True):
        target = np.zeros((SIZE, SIZE, 3), np.uint8)
        make_engine(engine).cut_out(out.getvalue(), Window(3, 5, 50, 40), SIZE, "bilinear", target, mirrored)
        made.append(target)
    assert np.array_equal(made[0][:, ::-1], made[1])
    assert not np.array_equal(made[0], made[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kept", [0, 2, 30])
def test_a_picture_that_is_cut_off_is_bad_in_words(engine: str, kept: int) -> None:
    target = np.zeros((SIZE, SIZE, 3), np.uint8)
    with pytest.raises(BadRecord):
        prepare(jpeg((1, 2, 3))[:kept], (), Preparation(SIZE), make_engine(engine), random.Random(1), target)


def test_windows_keep_to_their_ranges_and_cover_a_marked_object() -> None:
    chance = random.Random(5)
    box = (0.1, 0.1, 0.2, 0.2)
    for _ in range(300):
        window = random_window(400, 300, (box,), chance)
        assert 0 <= window.x <= 400 - window.width
        assert 0 <= window.y <= 300 - window.height
        if (window.width, window.height) == (400, 300):
            continue
        assert ASPECTS[0] * 0.95 <= window.width / window.height <= ASPECTS[1] * 1.05
        assert AREAS[0] * 0.9 <= window.width * window.height / 120_000 <= 1
        wide = min(80, window.x + window.width) - max(40, window.x)
        high = min(60, window.y + window.height) - max(30, window.y)
        assert max(0, wide) * max(0, high) >= 0.09 * 40 * 30


def test_evaluation_takes_the_middle() -> None:
    assert middle_window(458, 229) == Window(129, 14, 200, 200)


def test_distortion_changes_colors_and_keeps_grey_grey() -> None:
    pixels = np.full((4, 4, 3), 128, np.uint8)
    distort_colors(pixels, random.Random(3))
    assert (pixels.max(axis=2).astype(int) - pixels.min(axis=2)).max() <= 2
    colored = np.zeros((4, 4, 3), np.uint8)
    colored[..., 0] = 200
    before = colored.copy()
    distort_colors(colored, random.Random(3))
    assert not np.array_equal(before, colored)
