"""Two ends that agree prove it to each other; what is changed, repeated, sent back or of another key proves nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.security.proof import (
    INSECURE,
    NONCE_BYTES,
    Acceptor,
    Dialer,
    Parties,
    ProofError,
    Refusal,
    Session,
    check_agreement,
    pack_fields,
    refusal_by_peer,
    unpack_fields,
)

KEYS = st.binary(min_size=32, max_size=32)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
LIVES = st.integers(0, 2**64 - 1)
PARTIES = st.builds(
    Parties,
    **{each.name: LIVES if each.name.endswith("life") else TEXTS for each in fields(Parties)},
)


def prove(key: bytes, theirs: bytes, dialer_says: Parties, acceptor_says: Parties) -> tuple[Session, Session]:
    dialer = Dialer(key, dialer_says)
    acceptor = Acceptor(theirs, acceptor_says, dialer.nonce)
    proof, session = dialer.answer(acceptor.opening)
    return session, acceptor.check(proof)


@given(KEYS, PARTIES, st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), max_size=8))
def test_two_ends_that_agree_share_a_session(key: bytes, parties: Parties, said: list[tuple[bool, bytes]]) -> None:
    one, other = prove(key, key, parties, parties)
    for forth, message in said:
        sender, receiver = (one, other) if forth else (other, one)
        assert receiver.open(sender.seal(message)) == message


@given(KEYS, KEYS, PARTIES)
def test_another_key_is_refused_before_the_dialer_has_shown_anything(
    key: bytes, other: bytes, parties: Parties
) -> None:
    if key == other:
        return
    with pytest.raises(ProofError) as refused:
        prove(key, other, parties, parties)
    assert refused.value.refusal is Refusal.OTHER_KEY


@given(KEYS, PARTIES, st.sampled_from([each.name for each in fields(Parties)]), st.data())
def test_a_changed_field_is_refused_by_both_ends(key: bytes, parties: Parties, name: str, data: Any) -> None:
    before = getattr(parties, name)
    after = data.draw((LIVES if isinstance(before, int) else TEXTS).filter(lambda value: value != before))
    changed = replace(parties, **{name: after})
    dialer = Dialer(key, parties)
    with pytest.raises(ProofError):
        dialer.answer(Acceptor(key, changed, dialer.nonce).opening)
    # A relay that has one honest opening for each end still cannot join the two.
    honest = Acceptor(key, parties, dialer.nonce)
    proof, _ = dialer.answer(honest.opening)
    with pytest.raises(ProofError):
        Acceptor(key, changed, dialer.nonce).check(proof)


@given(KEYS, TEXTS, TEXTS)
def test_letters_do_not_wander_from_one_field_to_the_next(key: bytes, first: str, second: str) -> None:
    one = Parties(purpose="data", dialer=first + "x", acceptor=second, version="1")
    two = Parties(purpose="data", dialer=first, acceptor="x" + second, version="1")
    with pytest.raises(ProofError):
        prove(key, key, one, two)


@given(KEYS, PARTIES)
def test_a_proof_is_worth_nothing_the_second_time(key: bytes, parties: Parties) -> None:
    dialer = Dialer(key, parties)
    first = Acceptor(key, parties, dialer.nonce)
    proof, _ = dialer.answer(first.opening)
    with pytest.raises(ProofError):
        Acceptor(key, parties, dialer.nonce).check(proof)
    with pytest.raises(ProofError):
        Dialer(key, parties).answer(first.opening)


@given(KEYS, PARTIES)
def test_a_message_sent_back_to_its_maker_is_no_proof(key: bytes, parties: Parties) -> None:
    dialer = Dialer(key, parties)
    acceptor = Acceptor(key, parties, dialer.nonce)
    with pytest.raises(ProofError):
        acceptor.check(acceptor.opening[NONCE_BYTES:])
    proof, session = dialer.answer(acceptor.opening)
    with pytest.raises(ProofError):
        dialer.answer(acceptor.opening[:NONCE_BYTES] + proof)
    with pytest.raises(ProofError):
        session.open(session.seal(b"mine"))


@given(KEYS, PARTIES, st.binary(max_size=100))
def test_bytes_that_are_no_proof_are_refused(key: bytes, parties: Parties, noise: bytes) -> None:
    dialer = Dialer(key, parties)
    with pytest.raises(ProofError):
        dialer.answer(noise)
    with pytest.raises(ProofError):
        Acceptor(key, parties, dialer.nonce).check(noise)
    with pytest.raises(ProofError):
        Acceptor(key, parties, dialer.nonce[1:] + noise + b"--")


@given(KEYS, PARTIES, st.binary(max_size=30), st.data())
def test_a_sealed_message_that_was_changed_repeated_or_left_out_is_refused(
    key: bytes, parties: Parties, message: bytes, data: Any
) -> None:
    one, other = prove(key, key, parties, parties)
    sealed = one.seal(message)
    at = data.draw(st.integers(0, len(sealed) - 1))
    with pytest.raises(ProofError):
        replace(other).open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
    with pytest.raises(ProofError):
        replace(other).open(one.seal(message))  # the second, before the first
    assert other.open(sealed) == message
    with pytest.raises(ProofError):
        other.open(sealed)


@given(st.lists(st.binary(max_size=20), max_size=5), st.binary(max_size=20), st.integers(0, 6))
def test_fields_come_back_as_they_were_and_anything_else_is_refused(
    parts: list[bytes], noise: bytes, count: int
) -> None:
    packed = pack_fields(parts)
    assert unpack_fields(packed, len(parts)) == parts
    if count != len(parts):
        with pytest.raises(ProofError):
            unpack_fields(packed, count)
    if noise:
        with pytest.raises(ProofError):
            unpack_fields(packed + noise, len(parts))


def test_one_end_with_a_key_and_one_without_are_told_apart() -> None:
    for key, nonce, refusal in (
        (b"k" * 32, INSECURE, Refusal.NO_KEY_THERE),
        (None, b"n" * NONCE_BYTES, Refusal.NO_KEY_HERE),
    ):
        with pytest.raises(ProofError) as refused:
            check_agreement(key, nonce)
        assert refused.value.refusal is refusal
    check_agreement(None, INSECURE)
    check_agreement(b"k" * 32, b"n" * NONCE_BYTES)


@given(st.binary(max_size=30))
def test_an_unknown_refusal_is_malformed(value: bytes) -> None:
    assert refusal_by_peer(value) in Refusal
    assert refusal_by_peer(b"\xff") is Refusal.MALFORMED
