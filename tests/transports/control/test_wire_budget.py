"""However many connections say nothing, a task keeps descriptors for its checkpoints, and members get in."""

from __future__ import annotations

import subprocess
import sys

_TASK = """
import os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path.insert(0, "tests")
import grpc
from helpers.waiting import wait_until
from lockstep.transports.control.channels import open_channel
from lockstep.transports.control.server import ControlServer, method_path
server = ControlServer("127.0.0.1", 0, threads=4)
server.add_handlers("Task", {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)})
server.start()
print(server.port, flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(40)]
print("40 files are open", flush=True)
for file in files:
    file.close()
sys.stdin.readline()
with open_channel(server.address) as channel:
    channel.unary_unary(method_path("Task", "Echo"))(b"", timeout=15, wait_for_ready=True)
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
print("connected", flush=True)
sys.stdin.readline()
"""


def test_silent_connections_leave_descriptors_and_end() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _TASK], **pipes) as task:  # type: ignore[call-overload]
        port = task.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", _STRANGERS, port], **pipes) as strangers:  # type: ignore[call-overload]
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
