"""However many connections say nothing, a task keeps descriptors for its checkpoints, and members get in.

Half of them go to the port for tensors, which has no TLS, speak HTTP/2 and then say nothing.
"""

from __future__ import annotations

import subprocess
import sys

_TASK = """
import os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path.insert(0, "tests")
import grpc
from helpers.waiting import wait_until
from lockstep.transports.control.channels import open_channel, open_data_channel
from lockstep.transports.control.server import ControlServer, method_path
server = ControlServer("127.0.0.1", 0, threads=4)
server.add_handlers("Task", {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)})
bulk = server.add_bulk_handlers("Task", {"Data": grpc.unary_unary_rpc_method_handler(lambda request, context: request)})
server.start()
print(server.port, bulk.rpartition(":")[2], flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(40)]
print("40 files are open", flush=True)
for file in files:
    file.close()
sys.stdin.readline()
with open_channel(server.address) as channel:
    channel.unary_unary(method_path("Task", "Echo"))(b"", timeout=15, wait_for_ready=True)
with open_data_channel(bulk) as channel:
    channel.unary_unary(method_path("Task", "Data"))(b"", timeout=15, wait_for_ready=True)
print("a member got in", flush=True)
server.stop(0)
"""

_STRANGERS = """
import socket, sys
http2 = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + b"\\0\\0\\0\\4\\0\\0\\0\\0\\0"
held = []
for number in range(600):
    stranger = socket.socket()
    stranger.settimeout(10)
    held.append(stranger)
    try:
        stranger.connect(("127.0.0.1", int(sys.argv[1 + number % 2])))
        stranger.sendall(http2 if number % 2 else b"")
    except OSError:
        pass
print("connected", flush=True)
sys.stdin.readline()
"""


def test_silent_connections_leave_descriptors_and_end() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _TASK], **pipes) as task:  # type: ignore[call-overload]
        ports = task.stdout.readline().split()
        with subprocess.Popen([sys.executable, "-c", _STRANGERS, *ports], **pipes) as strangers:  # type: ignore[call-overload]
            try:
                assert strangers.stdout.readline() == "connected\n"
                task.stdin.write("\n")
                task.stdin.flush()
                assert task.stdout.readline() == "40 files are open\n"
                task.stdin.write("\n")
                task.stdin.flush()
                assert task.stdout.readline() == "a member got in\n"
            finally:
                strangers.kill()
                task.kill()
