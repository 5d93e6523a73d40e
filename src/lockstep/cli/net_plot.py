"""The plot of ``lockstep net``: rate and latency over the size. Imported only if it is requested."""

from __future__ import annotations

from lockstep.transports.net.measured import MeasurementReport

_LIMIT_STYLE = "--"


def draw(report: MeasurementReport, path: str) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate, latency) = pyplot.subplots(1, 2, figsize=(13, 5))
    for name in report.contenders():
        rows = [row for size in report.sizes() if (row := report.find(name, size)) is not None]
        sizes = [row.nbytes for row in rows]
        style = "-" if name.startswith("grpc") else _LIMIT_STYLE
        if name != "grpc+shm lend":  # nothing moves, so it has no rate
            rate.plot(sizes, [row.bytes_per_second / 1e9 for row in rows], style, marker="o", label=name)
        latency.plot(sizes, [row.latency(0.5) * 1e6 for row in rows], style, marker="o", label=name)
    for axes, title in ((rate, "GB/s"), (latency, "p50 in microseconds")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes per transfer")
        axes.set_title(title)
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report.here}  to  {report.there}")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
