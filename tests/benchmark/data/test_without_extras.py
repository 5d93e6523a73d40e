"""`pip install lockstep-torch` alone is enough to train on synthetic data."""

from __future__ import annotations

import sys

import pytest

from helpers.programs import Program

EXTRAS = ("cv2", "google_crc32c", "matplotlib", "nixl", "PIL", "simplejpeg")
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"


@pytest.mark.slow
def test_a_run_without_data_needs_nothing_of_the_extras() -> None:
    flags = ["bench", "--device=cpu", "--model=lenet", "--batch_size=2", "--num_batches=1", "--num_warmup_batches=0"]
    train = f"{WITHOUT}from lockstep.cli.main import main; sys.exit(main({flags!r}))"
    with Program((sys.executable, "-c", train), {}) as program:
        done = program.wait(50)
    assert done.code == 0, done
    assert "total images/sec" in done.stdout


def test_record_files_without_their_package_give_one_sentence() -> None:
    read = f"{WITHOUT}from lockstep.benchmark.data.records import masked_checksum; masked_checksum(b'')"
    with Program((sys.executable, "-c", read), {}) as program:
        done = program.wait(50)
    assert "install it with 'pip install lockstep-torch[data]'" in done.stderr
