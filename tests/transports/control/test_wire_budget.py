"""However many connections say nothing, a task keeps descriptors for its checkpoints, and members get in."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
tensors = server.add_bulk_handlers("Task", {"Data": grpc.unary_unary_rpc_method_handler(lambda request, _: request)})
server.start()
print(server.port if sys.argv[1] == "calls" else tensors.rpartition(":")[2], flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(40)]
print("40 files are open", flush=True)
for file in files:
    file.close()
sys.stdin.readline()
with open_channel(server.address) as channel, open_data_channel(tensors) as data:
    channel.unary_unary(method_path("Task", "Echo"))(b"", timeout=15, wait_for_ready=True)
    data.unary_unary(method_path("Task", "Data"))(b"", timeout=15, wait_for_ready=True)
print("a member got in", flush=True)
server.stop(0)
"""

_STRANGERS = """
import socket, sys
held = []
for _ in range(600):
    stranger = socket.socket()
    stranger.setblocking(False)
    try:
        stranger.connect(("127.0.0.1", int(sys.argv[1])))
    except BlockingIOError:
        pass
    held.append(stranger)
for stranger in held:
    try:
        stranger.send(bytes.fromhex(sys.argv[2]))
    except OSError:
        pass
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("hello", ["", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], ids=["silent", "idle"])
@pytest.mark.parametrize("port_for", ["calls", pytest.param("tensors", marks=pytest.mark.slow)])
def test_connections_without_a_call_leave_descriptors_and_end(port_for: str, hello: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _TASK, port_for], **pipes) as task:  # type: ignore[call-overload]
        port = task.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", _STRANGERS, port, hello.encode().hex()], **pipes) as strangers:  # type: ignore[call-overload]
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
