"""Data sets: what is recognised, what is refused and in which words."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lockstep.benchmark.data.cifar import cifar_source, read_batch, read_pickle
from lockstep.benchmark.data.digits import digits_source, load_digits
from lockstep.benchmark.data.errors import BadData, BadRecord
from lockstep.benchmark.data.example import PictureExample, encode_example
from lockstep.benchmark.data.geometry import Window
from lockstep.benchmark.data.open_dataset import kind_of, open_source, recognised
from lockstep.benchmark.data.pictures import PictureSource
from lockstep.benchmark.data.records import framed
from lockstep.benchmark.data.tfrecords import TFRecordSource, missing_files, record_files
from lockstep.benchmark.data.transforms import PillowEngine


def _cifar_batch(folder: Path, name: str, count: int = 4) -> None:
    rng = np.random.default_rng(len(name))
    content = {
        b"batch_label": b"training",
        b"data": rng.integers(0, 256, (count, 3072), np.uint8),
        b"labels": list(range(count)),
        b"filenames": [b"a.png"] * count,
    }
    (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def _cifar(folder: Path) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        _cifar_batch(folder, name)


def _records(folder: Path, name: str, labels: list[int]) -> None:
    payloads = [encode_example(PictureExample(b"jpeg", label)) for label in labels]
    (folder / name).write_bytes(b"".join(framed(payload) for payload in payloads))


def test_cifar_has_its_pictures_in_the_right_order_of_axes(tmp_path: Path) -> None:
    _cifar(tmp_path)
    source = cifar_source(tmp_path, "train")
    assert source.pixels.shape == (20, 32, 32, 3)
    raw = np.random.default_rng(len("data_batch_1")).integers(0, 256, (4, 3072), np.uint8)
    assert source.pixels[0, 1, 2].tolist() == [raw[0, 34], raw[0, 1024 + 34], raw[0, 2048 + 34]]
    assert len(cifar_source(tmp_path, "validation")) == 4


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_wants_to_run_something_is_refused_by_name(
    tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": _Evil()}, protocol=protocol))
    with pytest.raises(BadData, match=r"data_batch_1 is refused: it asks for (posix|os)\.system"):
        read_batch(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("value", [{b"data": {1, 2}}, {b"data": np.array([object()])}, [1 + 2j]])
def test_a_pickle_of_anything_but_plain_values_is_refused(value: object) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_pickle(pickle.dumps(value, protocol=2))


def _doubled(times: int) -> bytes:
    """Lists that hold the one before twice: few bytes, and without end for whoever follows each reference."""
    return b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(times)) + b"."


GREEDY = {
    "a place in memory far beyond the file": b"\x80\x02}r" + (50_000_000).to_bytes(4, "little") + b".",
    "the same as text": b"\x80\x02}p50000000\n.",
    "a length far beyond the file": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b".",
    "tuples in tuples as a key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "too many instructions": b"\x80\x02]" + b"]0" * 200_000 + b".",
    "an array of any size": b"\x80\x02cnumpy\nndarray\n(J\x00\x00\x00\x40\x85R.",
    "an array of objects": b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R.",
    "the same text encoded again and again": (
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"X\x06\x00\x00\x00latin1\x86q\x010"
        + b"]" + b"h\x00h\x01Ra" * 100 + b"."
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", GREEDY.values(), ids=GREEDY)
def test_a_pickle_that_would_take_memory_or_the_stack_is_refused_and_takes_neither(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(BadData, match="is refused"):
            read_batch(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_lists_that_hold_one_another_are_looked_at_once() -> None:
    assert len(read_pickle(_doubled(60))) == 2


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_is_read_from_every_format_of_pickle(protocol: int, order: Literal["C", "F"]) -> None:
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072).copy(order=order)
    found = read_pickle(pickle.dumps({b"data": pixels, b"labels": [1, 2]}, protocol=protocol))
    assert (found[b"data"] == pixels).all()
    assert found[b"labels"] == [1, 2]


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)})]
)
def test_a_file_that_is_no_batch_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"data_batch_1 .*unpack the archive again\.") as caught:
        read_batch(path)
    assert "\n" not in str(caught.value)


def test_digits_are_split_four_to_one_and_complete() -> None:
    train, held_out = digits_source("train"), digits_source("validation")
    assert (len(train), len(held_out)) == (1438, 359)
    assert sorted(set(train.labels.tolist())) == list(range(10))
    assert train.pixels.max() == 255


def test_the_digits_are_those_of_the_uci_set() -> None:
    """The digest was taken of scikit-learn's copy, labels first."""
    images, labels = load_digits()
    digest = hashlib.sha256(labels.astype(np.uint8).tobytes() + images.tobytes()).hexdigest()
    assert digest == "e1d88a0854e29e01d16358d2cd026aa8fc20dfc4cdb3fce004300857ea82aa70"


def test_tfrecords_know_every_record_of_every_file(tmp_path: Path) -> None:
    _records(tmp_path, "train-00000-of-00002", [1, 2])
    _records(tmp_path, "train-00001-of-00002", [3])
    source = TFRecordSource(tmp_path, "train")
    assert len(source) == 3
    assert {Path(source.reference(index).path).name for index in range(3)} == {
        "train-00000-of-00002",
        "train-00001-of-00002",
    }


def test_an_empty_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not hold a known data set"):
        open_source("imagenet", str(tmp_path))


def test_a_missing_part_names_the_pattern_that_was_looked_for(tmp_path: Path) -> None:
    _records(tmp_path, "train-00000-of-00001", [1])
    with pytest.raises(BadData, match=r"matching: .*/validation-\*-of-\*"):
        open_source("imagenet", str(tmp_path), "validation")


def test_files_without_a_single_record_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00001").touch()
    with pytest.raises(BadData, match="contain no records"):
        open_source("imagenet", str(tmp_path))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    _records(tmp_path, "train-00001-of-00003", [1])
    assert missing_files(record_files(tmp_path, "train")) == ["train-00000-of-00003", "train-00002-of-00003"]


def test_a_wrong_data_name_is_refused_with_the_right_one(tmp_path: Path) -> None:
    _cifar(tmp_path)
    with pytest.raises(BadData, match=r"holds the Python batches of CIFAR-10; give --data_name=cifar10"):
        recognised(str(tmp_path), "imagenet")


def test_sets_are_recognised_by_content_and_not_by_the_folders_name(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet"
    folder.mkdir()
    assert kind_of(folder) is None
    _cifar(folder)
    assert kind_of(folder) == "cifar10"


def test_a_folder_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist"):
        recognised(str(tmp_path / "nowhere"), None)


def test_pictures_count_their_classes_by_name_in_both_parts(tmp_path: Path) -> None:
    for part, names in (("train", ("cat", "dog", "owl")), ("val", ("cat", "owl"))):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.jpg").write_bytes(b"x")
    source = PictureSource(tmp_path, "validation")
    assert source.classes == 3
    assert [source.reference(index).label for index in range(2)] == [0, 2]


def test_a_class_that_is_only_evaluated_is_refused(tmp_path: Path) -> None:
    for place in ("train/cat", "val/cat", "val/emu"):
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(BadData, match="lacks: emu"):
        PictureSource(tmp_path, "validation")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02\x8b\xff\xff\xff\x7f9" + b"9" * 10,
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f",
        b"\x80\x02r\xff\xff\xff\x7f",
        b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft\x85R.",
        b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
        b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    ],
    ids=["long", "bytes", "memo", "array", "lists", "lists in lists"],
)
def test_a_pickle_with_lengths_that_no_memory_has_is_damaged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(BadData, match="unpack the archive again"):
        read_batch(path)


def test_memory_that_runs_out_is_damage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"x")

    def full(_data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr("lockstep.benchmark.data.cifar.read_pickle", full)
    with pytest.raises(BadData, match="is refused"):
        read_batch(path)


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "PPM", "WEBP", "ICO", "TGA"])
def test_pillow_decodes_jpeg_and_png_only(form: str) -> None:
    from PIL import Image

    engine, picture = PillowEngine(), Image.new("RGB", (8, 8))
    encoded = io.BytesIO()
    picture.save(encoded, form)
    with pytest.raises(BadRecord, match="not a readable image"):
        engine.size_of(encoded.getvalue())
    with pytest.raises(BadRecord, match="damaged"):
        engine.cut_out(encoded.getvalue(), Window(0, 0, 8, 8), 8, "bilinear", np.zeros((8, 8, 3), np.uint8))
    for known in ("JPEG", "PNG"):
        encoded = io.BytesIO()
        picture.save(encoded, known)
        assert engine.size_of(encoded.getvalue()) == (8, 8)


def test_a_picture_in_a_format_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    (tmp_path / "train" / "cats" / "one.bmp").touch()
    with pytest.raises(BadData, match=r"one.bmp is neither JPEG nor PNG; convert it, or move it away"):
        PictureSource(tmp_path, "train")
