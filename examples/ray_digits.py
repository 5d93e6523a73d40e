"""``examples/digits.py`` on a Ray cluster: ``python examples/ray_digits.py --workers=2``, or by ``ray job submit``.

Without a cluster, Ray starts one on this machine. The program itself knows nothing of Ray.
"""

from __future__ import annotations

import argparse
import sys

import lockstep.ray


def train() -> None:
    """What every task runs; ``lockstep.join()`` in it does not return on a server."""
    import digits

    sys.argv = ["digits.py"]
    digits.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    lockstep.ray.run(train, servers=asked.servers, workers=asked.workers)


if __name__ == "__main__":
    main()
