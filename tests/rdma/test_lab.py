"""The lab leaves nothing behind, however the tests end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rdma

OWNER = """
import sys, tempfile, threading
from pathlib import Path
from rdma.lab.host import folder, prepare
from rdma.lab.image import build
from rdma.lab.machine import Machine
image = build(folder(), prepare())
machine = Machine("alone", image, "12.12.12.45", Path(sys.argv[1]) / "alone.console")
with tempfile.TemporaryFile(dir=sys.argv[1]) as tree:
    tree.truncate(1 << 20)
    machine.power_on(tree.fileno(), [], [], "tcg")
    print(machine.pid, flush=True)
    threading.Event().wait(60)
"""
SECONDS = 10.0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("image")
def test_an_emulator_ends_with_the_process_that_started_it(tmp_path: Path, end: signal.Signals) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        emulator = os.pidfd_open(int(owner.stdout.readline()))
        try:
            assert not select.select([emulator], [], [], 0)[0], "it runs"
            owner.send_signal(end)
            owner.wait(SECONDS)
            assert select.select([emulator], [], [], SECONDS)[0], "it is over"
        finally:
            os.close(emulator)
    assert {file.name for file in tmp_path.iterdir()} <= {"alone.console", "alone.log"}
