"""Checks of this machine before anything is started."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

import pytest

from helpers.ports import free_port, free_ports
from lockstep.protocol.core.ids import server, worker
from lockstep.runtime.startup import preflight
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.preflight import count_gpus, folder_problems, task_problems, visible_gpus

FOREIGN = "192.0.2.1"
"""An address reserved for documentation: no machine has it."""


def _spec(own: str, *others: str, bind: str | None = None) -> ClusterSpec:
    return ClusterSpec(ps_hosts=(own,), worker_hosts=others or ("192.0.2.9:1",), task=server(0), bind=bind)


def test_a_free_port_of_this_machine_is_fine() -> None:
    assert task_problems(_spec(f"127.0.0.1:{free_port()}")) == []
    assert task_problems(_spec(f"localhost:{free_port()}")) == []


def test_a_description_of_no_task_needs_nothing() -> None:
    assert task_problems(ClusterSpec()) == []


def test_the_address_of_another_machine_is_refused() -> None:
    (sentence,) = task_problems(_spec(f"{FOREIGN}:4001"))
    assert sentence == (
        "ps 0 has the address 192.0.2.1:4001, which is not this machine's; start it there, "
        "or add --bind=ADDRESS with the address to listen on here."
    )


def test_a_wrong_index_gets_the_index_of_this_machine() -> None:
    """The mistake of report 3: the first machine of the list starts index 1."""
    spec = ClusterSpec(ps_hosts=("192.0.2.3:1",), worker_hosts=("127.0.0.1:20001", f"{FOREIGN}:20002"), task=worker(1))
    (sentence,) = task_problems(spec)
    assert "--task_index=0 has 127.0.0.1:20001, which is; use that index here" in sentence


def test_bind_names_another_address_to_listen_on() -> None:
    port = free_port()
    assert task_problems(_spec(f"{FOREIGN}:{port}", bind="127.0.0.1")) == []
    assert task_problems(_spec(f"{FOREIGN}:{port}", bind="0.0.0.0")) == []
    assert task_problems(_spec(f"{FOREIGN}:1", bind=f"0.0.0.0:{port}")) == []


def test_bind_must_be_an_address_of_this_machine() -> None:
    (sentence,) = task_problems(_spec("127.0.0.1:4001", bind=FOREIGN))
    assert sentence == ("--bind=192.0.2.1 is not an address of this machine; give one that is.")


def test_an_own_name_that_does_not_resolve_is_refused() -> None:
    (sentence,) = task_problems(_spec("no-such-host.invalid:4001"))
    assert sentence.startswith(
        "ps 0 cannot listen at no-such-host.invalid:4001: the name 'no-such-host.invalid' does not"
    )
    assert sentence.endswith("); correct the host list, or add --bind=ADDRESS.")


def test_a_peer_that_does_not_resolve_is_a_missing_task_and_not_bad_input() -> None:
    assert task_problems(_spec(f"127.0.0.1:{free_port()}", "no-such-host.invalid:1")) == []


def test_an_own_name_that_only_this_machine_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems map their own name to 127.0.1.1; other machines would wait for this task forever."""
    monkeypatch.setattr(preflight, "resolve", lambda _host: (ip_address("127.0.1.1"),))
    monkeypatch.setattr(preflight, "is_local_address", lambda _host: True)
    port, other = free_ports(2)
    (sentence,) = task_problems(_spec(f"node1:{port}", f"node2:{other}"))
    assert "that name resolves to 127.0.1.1 on this machine, where no other machine can reach it" in sentence
    assert task_problems(_spec(f"node1:{port}", f"node1:{other}")) == []


def test_a_taken_port_names_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        (sentence,) = task_problems(_spec(f"127.0.0.1:{port}"))
    assert sentence.startswith(f"port {port} is already taken on this machine by process {os.getpid()} (")
    assert sentence.endswith("); end that process, or use another port.")


def test_a_port_is_free_again_while_connections_of_an_earlier_run_close() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _peer = listening.accept()
        accepted.close()  # the listener's side closes first, so that its address stays in TIME_WAIT
        client.close()
    assert task_problems(_spec(f"127.0.0.1:{port}")) == []


def test_an_ipv6_address_can_be_listened_on() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert task_problems(_spec(f"[::1]:{port}")) == []


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    assert folder_problems("train_dir", str(tmp_path)) == []
    assert folder_problems("train_dir", str(tmp_path / "a" / "b")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    (sentence,) = folder_problems("train_dir", str(file / "sub"))
    assert (
        sentence == f"--train_dir={file}/sub cannot be used: {file} is not a folder; give one that can be written to."
    )


def test_a_folder_that_cannot_be_written_to_is_refused() -> None:
    # Not even root may create a file in /proc.
    (sentence,) = folder_problems("train_dir", "/proc/sys")
    assert sentence.startswith("--train_dir=/proc/sys cannot be written to (")
    assert sentence.endswith("); give another folder, or correct its permissions.")


def test_a_folder_name_that_no_system_takes_is_refused() -> None:
    assert len(folder_problems("train_dir", "/" + "x" * 5000)) == 1


@pytest.mark.parametrize(
    ("present", "visible", "count"),
    [
        (8, None, 8),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,1,2,3,4,5,6,7", 8),
        (8, "3, 1", 2),
        (2, "0,5,1", 1),
        (2, "GPU-0f1e,GPU-77", 2),
        (0, "0", 0),
        (1, "x", 0),
    ],
)
def test_cuda_visible_devices_decides_what_is_seen(present: int, visible: str | None, count: int) -> None:
    assert visible_gpus(present, visible) == count


def test_counting_gpus_works_with_and_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool is found through PATH; a stand-in shows how its answer is read."""
    assert count_gpus("") == 0
    assert count_gpus(None) >= 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert count_gpus(None) == 2
    assert count_gpus("1") == 1
