"""``lockstep.ray.run``: a job of the library on a Ray cluster (``pip install 'lockstep-torch[ray]'``, docs/ray.md).

Ray itself is imported only when a job is run.
"""

from __future__ import annotations

from lockstep.ray.ends import RayRunError
from lockstep.ray.running import run

__all__ = ["RayRunError", "run"]
