"""``python -m lockstep.ray.program FOLDER``: the process below an actor in which ``train`` runs.

Not the actor's own: a task that goes back to a checkpoint needs a fresh process, and ``lockstep run`` above it answers
for it meanwhile. What is unpickled here has come from the driver by way of Ray, which unpickles all that it starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.private_files import replace_file
from lockstep.ray.handover import ERROR, MOST_ERROR, RESULT, TRAIN


def main(folder: Path) -> None:
    """Run it to its end; what it returns or raises is left in the folder for the actor."""
    from ray import cloudpickle

    train = cloudpickle.loads((folder / TRAIN).read_bytes())
    try:
        result = train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        replace_file(folder / ERROR, said[:MOST_ERROR].encode())
        raise
    replace_file(folder / RESULT, cloudpickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
