"""What to watch, and what to do about what is found."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.runtime.startup.metrics_options import NO_METRICS, MetricsOptions
from lockstep.runtime.startup.pages import NO_PAGES, Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSpec:
    """``command``: start it; ``pids``: it runs already."""

    command: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    folder: str = ""
    abort: bool = False
    pages: Pages = NO_PAGES
    metrics: MetricsOptions = NO_METRICS
    port: int = 0
    """Where the watcher of rank 0 listens for those of other hosts; 0: beside the port of rank 0 itself."""
