"""That a job is over, beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.runtime.checkpoint.ending import note_end, noted_end


@pytest.mark.parametrize("ok", [True, False])
def test_only_the_newest_end_in_a_folder_is_noted_and_only_for_its_job(ok: bool, tmp_path: Path) -> None:
    assert noted_end(tmp_path, 7) is None
    note_end(tmp_path, 7, ok=not ok)
    note_end(tmp_path, 8, ok=ok)
    assert (noted_end(tmp_path, 7), noted_end(tmp_path, 8), noted_end(tmp_path, 0)) == (None, ok, None)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
