"""What users can choose about RDMA, and the UCX settings that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

NIXL_MODULES: Final = ("nixl_cu12", "nixl_cu13")
TRANSPORTS: Final = "rc"
"""UCX's reliable connections, by plain verbs or the faster interface of mlx5, with the datagrams that they need
to connect. Nothing else: no TCP, no shared memory."""

GPU_TRANSPORTS: Final = f"{TRANSPORTS},cuda_copy"
"""``cuda_copy`` lets UCX recognize GPU memory. It moves nothing between tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaOptions:
    """None or an empty text leaves the choice to UCX and the device."""

    device: str = ""
    """``NAME`` or ``NAME:PORT``; empty: the first active port."""
    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    timeout: float | None = None
    """Seconds until an unacknowledged packet is sent again."""
    retry_count: int | None = None
    gpudirect: bool = False
    """The device reads and writes GPU memory directly."""

    @property
    def name(self) -> str:
        return self.device.partition(":")[0]

    @property
    def port(self) -> int | None:
        text = self.device.partition(":")[2]
        return int(text) if text.isdecimal() else None


NO_OPTIONS: Final = RdmaOptions()

_RANGES: Final = (("gid_index", 0, 255), ("traffic_class", 0, 255), ("service_level", 0, 15), ("retry_count", 0, 7))
_LONGEST_TIMEOUT: Final = 30.0


def option_problems(options: RdmaOptions) -> Iterator[str]:
    """Values that no device accepts."""
    name, colon, port = options.device.partition(":")
    if options.device and (not name or "/" in name or (colon and not (port.isdecimal() and int(port) > 0))):
        yield f"--rdma_device={options.device} is not a device; write NAME or NAME:PORT, for example mlx5_0:1."
    for field, least, most in _RANGES:
        value = getattr(options, field)
        if value is not None and not least <= value <= most:
            yield f"--rdma_{field}={value} is out of range; give a number from {least} to {most}."
    if options.timeout is not None and not 0 < options.timeout <= _LONGEST_TIMEOUT:
        yield (
            f"--rdma_timeout={options.timeout:g} is out of range; give a number of seconds above 0 and up to "
            f"{_LONGEST_TIMEOUT:g}."
        )


def ucx_settings(options: RdmaOptions, device: str, port: int) -> tuple[tuple[str, str], ...]:
    """The variables that restrict UCX to this port and pass on the options; the rest is left to UCX."""
    chosen = (
        ("UCX_IB_GID_INDEX", options.gid_index),
        ("UCX_IB_TRAFFIC_CLASS", options.traffic_class),
        ("UCX_IB_SL", options.service_level),
        ("UCX_RC_TIMEOUT", None if options.timeout is None else f"{options.timeout * 1e6:.0f}us"),
        ("UCX_RC_RETRY_COUNT", options.retry_count),
    )
    held = (("UCX_TLS", GPU_TRANSPORTS if options.gpudirect else TRANSPORTS), ("UCX_NET_DEVICES", f"{device}:{port}"))
    return held + tuple((name, str(value)) for name, value in chosen if value is not None)
