"""gRPC is imported by one module only, which leaves nothing in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.transports.quiet_forks import QuietForks

SOURCES = Path(__file__).parents[2] / "src" / "lockstep"
FORKS = """
import os
from lockstep.transports.control.server import ControlServer

server = ControlServer("127.0.0.1", 0, threads=2)
server.start()
for _ in range(3):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
server.stop(0.1)
print(sorted(name for name in os.environ if name.startswith("GRPC_")))
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    return subprocess.run(
        [sys.executable, "-c", script], env={**clean, **environment}, capture_output=True, text=True, timeout=60
    )


def test_a_process_with_grpc_forks_without_a_word_of_it_and_with_its_environment_as_it_was() -> None:
    ended = run(FORKS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_a_program_that_imported_grpc_before_forks_without_a_word_of_it_and_keeps_its_own() -> None:
    ended = run("import grpc" + FORKS + "import sys; sys.stderr.write('its own')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "its own")


def test_what_others_write_while_the_process_forks_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    forks = QuietForks()
    forks.before()
    os.write(2, b"one\nI1117 11:52:11.232455   26865 fork_posix.cc:71] Other threads are calling\ntwo\n")
    forks.after()
    os.write(2, b"three\n")
    forks.before()
    os.write(2, b"the parent writes this\n")
    forks.after_in_child()
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


def test_a_fork_without_stderr_is_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "dup", full)
    forks = QuietForks()
    forks.before()
    forks.after()


def test_who_asks_for_the_words_of_grpc_gets_them() -> None:
    ended = run(FORKS, GRPC_VERBOSITY="INFO", GRPC_ENABLE_FORK_SUPPORT="1")
    assert ended.returncode == 0
    assert "fork" in ended.stderr
    assert ended.stdout == "['GRPC_ENABLE_FORK_SUPPORT', 'GRPC_VERBOSITY']\n"


def test_nothing_else_imports_grpc() -> None:
    importing = {
        file.relative_to(SOURCES).as_posix()
        for file in SOURCES.rglob("*.py")
        if any(line.strip().startswith(("import grpc", "from grpc")) for line in file.read_text().splitlines())
    }
    assert importing == {"transports/quiet_grpc.py"}


STRANGERS = """
import gc, socket, ssl
from lockstep.transports.control.channels import open_plain_channel
from lockstep.transports.control.server import ControlServer

anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
for _ in range(3):
    server = ControlServer("127.0.0.1", 0, threads=2)
    server.start()
    place = ("127.0.0.1", server.port)
    for hello in (b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\x16\\x03\\x01\\xff\\xff" + bytes(100), b""):
        with socket.create_connection(place, 5) as line:
            line.sendall(hello)
            line.shutdown(socket.SHUT_WR)
            while line.recv(4096):
                pass
    with socket.create_connection(place, 5) as line, anonymous.wrap_socket(line) as shaken:
        try:
            shaken.recv(4096)
        except OSError:
            pass
    server.stop(0.1)
    del server
    gc.collect()
"""


def test_strangers_at_a_port_make_grpc_print_nothing() -> None:
    ended = run(STRANGERS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
