"""The program of the engines' tests as a driver of Ray: ``trains_on_ray.py [flags of the program]``."""

from __future__ import annotations

import sys

import lockstep.ray


def train(words: list[str]) -> str:
    """What every task runs."""
    from library import lasting_program

    sys.argv = ["train", *words]
    lasting_program.main()
    return "done"


if __name__ == "__main__":
    import functools

    given = functools.partial(train, sys.argv[1:])
    print(lockstep.ray.run(given, servers=1, workers=2, strategy="SPREAD"))  # noqa: T201 - for the test
