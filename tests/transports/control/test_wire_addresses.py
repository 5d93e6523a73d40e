"""Addresses as people write them, and what this machine knows of them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from lockstep.transports.control.addresses import (
    Address,
    AddressError,
    interface_addresses,
    is_local_address,
    parse_address,
    parse_bind,
    resolve,
    who_listens,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:2222", "10.0.0.1", 2222),
        ("node-1.cluster.local:1", "node-1.cluster.local", 1),
        ("node_1:65535", "node_1", 65535),
        ("localhost:80", "localhost", 80),
        ("node.:80", "node.", 80),
        ("[::1]:2222", "::1", 2222),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
    ],
)
def test_an_address_is_read_and_printed_back(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' has no port; write HOST:PORT, for example 10.0.0.1:2222."),
        ("node", "'node' has no port; write HOST:PORT, for example node:2222."),
        (":22", "':22' has no host; write HOST:PORT, for example 10.0.0.1:2222."),
        ("node:", "the port in 'node:' is not a number from 1 to 65535; write HOST:PORT."),
        ("node:0", "the port in 'node:0' is not a number from 1 to 65535; write HOST:PORT."),
        ("node:65536", "the port in 'node:65536' is not a number from 1 to 65535; write HOST:PORT."),
        ("node:http", "the port in 'node:http' is not a number from 1 to 65535; write HOST:PORT."),
        ("node:٢٢", "the port in 'node:٢٢' is not a number from 1 to 65535; write HOST:PORT."),
        ("::1:22", "'::1:22' has more than one colon; write HOST:PORT, and an IPv6 address as [ADDRESS]:PORT."),
        ("[::1]", "'[::1]' is not an address; write an IPv6 address as [ADDRESS]:PORT."),
        ("[node]:1", "'node' in '[node]:1' is not an IPv6 address; only those take brackets."),
        ("10.0.0.256:1", "'10.0.0.256' in '10.0.0.256:1' is not an IPv4 address; it needs four numbers from 0 to 255."),
        ("10.0.0:1", "'10.0.0' in '10.0.0:1' is not an IPv4 address; it needs four numbers from 0 to 255."),
        ("a b:1", "'a b' in 'a b:1' is not a host name; use letters, digits, '-' and '.' only."),
        ("a..b:1", "'a..b' in 'a..b:1' is not a host name; use letters, digits, '-' and '.' only."),
        ("-a:1", "'-a' in '-a:1' is not a host name; use letters, digits, '-' and '.' only."),
        (
            "http://node:1",
            "'http://node:1' looks like a web address; write HOST:PORT alone, for example 10.0.0.1:2222.",
        ),
    ],
)
def test_a_malformed_address_says_what_is_wrong(text: str, sentence: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0", Address("0.0.0.0", 7)),
        ("::", Address("::", 7)),
        ("[::]", Address("::", 7)),
        ("[::]:9", Address("::", 9)),
        ("10.0.0.1:9", Address("10.0.0.1", 9)),
        ("eth.node", Address("eth.node", 7)),
    ],
)
def test_what_to_listen_on_may_leave_the_port_out(text: str, expected: Address) -> None:
    assert parse_bind(text, default_port=7) == expected


@pytest.mark.parametrize("text", ["", "a b", "node:x", "10.0.0.300"])
def test_a_malformed_bind_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_bind(text, default_port=7)


def test_spellings_of_one_address_are_the_same_place() -> None:
    assert parse_address("NODE:1").same_place() == parse_address("node.:1").same_place()
    assert parse_address("[0:0::1]:1").same_place() == parse_address("[::1]:1").same_place()
    assert parse_address("node:1").same_place() != parse_address("node:2").same_place()


def test_wildcards_are_told_from_addresses() -> None:
    assert parse_address("0.0.0.0:1").is_wildcard
    assert parse_address("[::]:1").is_wildcard
    assert not parse_address("10.0.0.1:1").is_wildcard
    assert not parse_address("node:1").is_wildcard


def test_this_machine_knows_its_own_addresses() -> None:
    assert interface_addresses()
    assert all(is_local_address(str(address)) for address in interface_addresses())
    assert is_local_address("localhost")
    assert is_local_address("127.9.9.9")


def test_addresses_for_documentation_belong_to_no_machine() -> None:
    assert not is_local_address("192.0.2.1")
    assert not is_local_address("2001:db8::1")


def test_a_name_that_does_not_exist_does_not_resolve() -> None:
    with pytest.raises(AddressError, match=r"the name 'no-such-host\.invalid' does not resolve"):
        resolve("no-such-host.invalid")


def test_a_name_server_that_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: answer.wait(30) and [])
    try:
        with pytest.raises(AddressError, match=r"the name 'slow\.example' did not resolve within 0\.05 seconds"):
            resolve("slow.example", deadline=0.05)
    finally:
        answer.set()
        for thread in threading.enumerate():
            if thread.name == "resolve slow.example":
                thread.join(30)


def test_who_listens_names_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        holder = who_listens(listening.getsockname()[1])
    assert holder is not None
    assert holder.pid == os.getpid()
    assert str(holder).startswith(f"process {os.getpid()} (")


def test_nobody_listens_on_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert who_listens(port) is None
