"""Starts two of the three ranks of a job: the third never comes."""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> None:
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | variables | {"RANK": str(rank)})
        for rank in (0, 2)
    ]
    for rank in ranks:
        rank.wait()


if __name__ == "__main__":
    main()
