"""Makes ``contract.binpb`` from ``contract.proto`` (for developers: needs grpcio-tools).

We commit the descriptor set and build the classes at import, instead of committing generated Python code: generated
code works with only one major version of protobuf, a descriptor set with all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CONTRACT = HERE / "contract.proto"
DESCRIPTORS = HERE / "contract.binpb"


def compile_contract() -> bytes:
    """The serialized FileDescriptorSet of the current contract."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / DESCRIPTORS.name
        # In a separate process: protoc's library brings a protobuf that conflicts with torch's.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={HERE}", f"--descriptor_set_out={target}"]
        done = subprocess.run([*command, CONTRACT.name], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"protoc could not compile {CONTRACT}: {done.stderr.strip()}")
        return target.read_bytes()


def main() -> None:
    """Write the descriptor set next to the contract."""
    DESCRIPTORS.write_bytes(compile_contract())


if __name__ == "__main__":
    main()
