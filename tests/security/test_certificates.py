"""Certificates of a key: signed by whoever has it, stored beside it, and renewed when they do not fit any more."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from helpers.keys import make_key
from lockstep.errors import BadInput
from lockstep.security import certificates
from lockstep.security.certificates import NAME, Certificates, certificates_for
from lockstep.security.key import Key, find_key


def _leaf(made: Certificates) -> x509.Certificate:
    return x509.load_pem_x509_certificate(made.certificate)


def _root(made: Certificates) -> x509.Certificate:
    return x509.load_pem_x509_certificate(made.authority)


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return find_key(make_key(tmp_path / "key"))


def test_whoever_has_the_key_signs_for_the_same_authority(tmp_path: Path, key: Key) -> None:
    (tmp_path / "other").mkdir()
    here, there = certificates_for(key), certificates_for(find_key(make_key(tmp_path / "other" / "key")))
    assert here != there
    _leaf(there).verify_directly_issued_by(_root(here))
    assert _root(here).public_key() == _root(there).public_key()


def test_another_key_signs_for_another_authority(tmp_path: Path, key: Key) -> None:
    other = certificates_for(find_key(make_key(tmp_path / "other", byte=8)))
    with pytest.raises(InvalidSignature):
        _leaf(other).verify_directly_issued_by(_root(certificates_for(key)))


def test_what_was_made_is_stored_for_this_user_only_and_used_again(key: Key) -> None:
    made = certificates_for(key)
    assert certificates_for(key) == made
    stored = key.path.with_name("key.tls")
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert sorted(os.listdir(key.path.parent)) == ["key", "key.tls"]


def test_a_stored_one_needs_no_cryptography(key: Key) -> None:
    certificates_for(key)
    script = (
        "import sys; from lockstep.security.certificates import certificates_for as c; "
        f"from lockstep.security.key import find_key; c(find_key({str(key.path)!r})); "
        "print('cryptography' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("False\n", "")


def test_one_of_another_key_version_or_age_is_replaced(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    first = certificates_for(key)
    make_key(key.path, byte=9)
    changed = find_key(key.path)
    second = certificates_for(changed)
    assert second != first
    monkeypatch.setattr(certificates, "__version__", "99.0")
    third = certificates_for(changed)
    assert third != second
    later = time.time() + 500 * 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    fourth = certificates_for(changed)
    assert _leaf(fourth).not_valid_after_utc > _leaf(third).not_valid_after_utc


@pytest.mark.parametrize("content", [b"", b"rubbish", b"a\nb", b"\n" * 100_000])
def test_a_stored_file_that_somebody_has_changed_is_replaced(key: Key, content: bytes) -> None:
    certificates_for(key)
    stored = key.path.with_name("key.tls")
    stored.write_bytes(content)
    made = certificates_for(key)
    assert certificates_for(key) == made
    assert stored.read_bytes() != content


def test_one_that_others_could_read_is_replaced(key: Key) -> None:
    made = certificates_for(key)
    key.path.with_name("key.tls").chmod(0o644)
    assert certificates_for(key) != made
    assert stat.S_IMODE(key.path.with_name("key.tls").stat().st_mode) == 0o600


def test_it_is_not_written_through_a_link(tmp_path: Path, key: Key) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    key.path.with_name("key.tls").symlink_to(victim)
    certificates_for(key)
    assert victim.read_text() == "untouched"


def test_where_nothing_can_be_stored_every_process_signs_its_own(key: Key) -> None:
    key.path.with_name("key.tls").mkdir()
    assert certificates_for(key) != certificates_for(key)
    assert sorted(os.listdir(key.path.parent)) == ["key", "key.tls"]


def test_many_at_once_leave_one_that_is_whole(key: Key) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: certificates_for(key), range(32)))
    kept = certificates_for(key)
    assert kept in made
    for one in made:
        _leaf(one).verify_directly_issued_by(_root(kept))


def test_a_certificate_is_for_both_ends_of_a_connection_and_signs_nothing(key: Key) -> None:
    leaf = _leaf(certificates_for(key))
    usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NAME]


def test_the_users_own_authority_replaces_the_derived_one(tmp_path: Path, key: Key) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    environ = {"LOCKSTEP_CERTIFICATES": str(folder)}
    with pytest.raises(BadInput, match=r"must have ca\.pem, task\.pem and task\.key"):
        certificates_for(key, environ)
    for name in ("ca.pem", "task.pem", "task.key"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o644)
    with pytest.raises(BadInput, match=r"chmod 600 .*task\.key"):
        certificates_for(key, environ)
    (folder / "task.key").chmod(0o600)
    assert certificates_for(key, environ) == Certificates(b"ca.pem", b"task.pem", b"task.key")


def test_private_keys_are_not_shown(key: Key) -> None:
    assert b"PRIVATE" in certificates_for(key).private
    assert "PRIVATE" not in repr(certificates_for(key))
