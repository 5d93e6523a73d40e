"""Reading a TFRecord file from its beginning to its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.benchmark.data.records import index_records, read_payload


def read_records(path: Path) -> Iterator[bytes]:
    """All payloads of a file in order, checksums verified."""
    spans = index_records(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for span in spans:
            yield read_payload(descriptor, span)
    finally:
        os.close(descriptor)
