"""Programs of others, as they are, with a fault planted from outside: which programs there are, and how they start."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.drill.systems import PROGRAM

HERE = Path(__file__).parent
FRAMEWORKS = "LOCKSTEP_FRAMEWORKS"
"""Names the Python of that environment."""


@dataclass(frozen=True, slots=True)
class Script:
    """``loads``: it has a process of its own that loads data. ``frameworks``: it needs transformers and accelerate."""

    name: str
    arguments: tuple[str, ...]
    sharded: str
    loads: bool = True
    frameworks: bool = False

    def command(self, system: str) -> list[str]:
        """What stands after the launcher."""
        more = [self.sharded] if system == "fsdp" else []
        return [str(HERE / "scripts" / f"{self.name}.py"), *self.arguments, *more]


SCRIPTS = (
    Script("multi_rank_tutorial", ("1000", "10"), "--fsdp"),
    Script("char_gpt", (), "--wrap=fsdp", loads=False),
    Script("transformers_loop", (), "--fsdp", frameworks=True),
)


def script_for(number: int, fault: str) -> Script:
    """They take turns over the faults."""
    able = [script for script in SCRIPTS if script.loads or fault != "loader"]
    return able[number % len(able)]


def python_for(script: Script) -> str:
    """The environment of the frameworks, where Lockstep's own does not have them (``make test-watch``)."""
    return os.environ.get(FRAMEWORKS, "") or sys.executable if script.frameworks else sys.executable


def torchrun(script: Script, system: str) -> list[str]:
    launcher = [python_for(script), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    return [*launcher, *script.command(system)]


def planted(folder: Path, fault: str, mark: Path) -> dict[str, str]:
    """Variables that let the fault into a job. ``folder``: an empty one, in which torch finds it."""
    named = folder / "planted-1.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (named / "entry_points.txt").write_text("[torch.backends]\nplanted = planted:start\n")
    (folder / "planted.py").symlink_to(PROGRAM)
    ways = [str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(ways), "PLANT_FAULT": fault, "PLANT_MARK": str(mark)}
