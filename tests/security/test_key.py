"""The key file: made once, the same for everyone who makes it at once, and refused if others may know it."""

from __future__ import annotations

import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import BadInput
from lockstep.security.chosen import choose, chosen_key
from lockstep.security.key import Key, Purpose, find_key, usual_path


def _environ(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder), **more}


def _named(tmp_path: Path, text: str = "ab" * 32, mode: int = 0o600) -> Path:
    path = tmp_path / "named"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_users_own_key_is_made_at_first_use_and_kept(tmp_path: Path) -> None:
    first, second = find_key(environ=_environ(tmp_path)), find_key(environ=_environ(tmp_path))
    assert first == second
    assert first.path == tmp_path / "lockstep" / "key"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    assert os.listdir(first.path.parent) == ["key"]


def test_processes_that_make_it_at_once_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = list(pool.map(lambda _: find_key(environ=_environ(tmp_path)), range(64)))
    assert len({key.sub(Purpose.LINKS) for key in keys}) == 1
    assert os.listdir(tmp_path / "lockstep") == ["key"]


def test_two_users_have_two_keys(tmp_path: Path) -> None:
    one, other = (find_key(environ=_environ(tmp_path / name)) for name in "ab")
    assert one.sub(Purpose.LINKS) != other.sub(Purpose.LINKS)


def test_the_flag_wins_over_the_variable_and_the_variable_over_the_users_own(tmp_path: Path) -> None:
    flag, variable = tmp_path / "flag", tmp_path / "variable"
    for path in (flag, variable):
        path.write_text(os.urandom(32).hex())
        path.chmod(0o600)
    environ = _environ(tmp_path, LOCKSTEP_KEY_FILE=str(variable))
    assert find_key(flag, environ).path == flag
    assert find_key(None, environ).path == variable
    assert not (tmp_path / "lockstep").exists()


def test_a_key_never_shows_its_bytes_and_cannot_be_sent(tmp_path: Path) -> None:
    key = find_key(_named(tmp_path))
    assert "ab" * 8 not in f"{key!r} {key}"
    assert repr(bytes.fromhex("ab" * 32)) not in repr(key)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)


def test_every_purpose_has_a_sub_key_of_its_own_and_none_is_the_key(tmp_path: Path) -> None:
    key = find_key(_named(tmp_path))
    subs = {key.sub(purpose) for purpose in Purpose}
    assert len(subs) == len(Purpose)
    assert bytes.fromhex("ab" * 32) not in subs
    assert key.sub(Purpose.DATA, 80)[:32] == key.sub(Purpose.DATA)


def test_the_derivation_is_that_of_rfc_5869() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    expected = HKDF(SHA256(), 80, b"lockstep 1", b"store").derive(b"x" * 32)
    assert Key(b"x" * 32, Path("key")).sub(Purpose.STORE, 80) == expected


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadInput, match="chmod 600"):
        find_key(_named(tmp_path, mode=mode))
    own = usual_path(_environ(tmp_path))
    find_key(environ=_environ(tmp_path)).path.chmod(mode)
    with pytest.raises(BadInput, match=f"chmod 600 {own}"):
        find_key(environ=_environ(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _named(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(BadInput, match="belongs to user 12345"):
        find_key(path)


@pytest.mark.parametrize("text", ["", "hello", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 5000, "\u00e9" * 64])
def test_what_is_not_a_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="64 hexadecimal digits"):
        find_key(_named(tmp_path, text))


def test_a_named_key_that_is_missing_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist; make one with"):
        find_key(tmp_path / "none")
    assert os.listdir(tmp_path) == []


def test_the_users_own_key_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep" / "key").symlink_to(_named(tmp_path))
    with pytest.raises(BadInput, match="it is a link"):
        find_key(environ=_environ(tmp_path))


def test_a_mounted_secret_is_a_link_and_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(_named(tmp_path))
    assert find_key(tmp_path / "mounted").sub(Purpose.DATA) == find_key(tmp_path / "named").sub(Purpose.DATA)


def test_a_pipe_in_place_of_a_key_does_not_hold_anyone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(BadInput, match="not a plain file"):
        find_key(tmp_path / "pipe")


def test_a_folder_that_cannot_be_made_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--key_file or LOCKSTEP_KEY_FILE"):
        find_key(environ=_environ(tmp_path / "file"))


def test_a_choice_is_passed_on_to_children_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCKSTEP_KEY_FILE", "LOCKSTEP_INSECURE"):
        monkeypatch.setenv(name, "")
    choose(key_file=_named(tmp_path))
    assert os.environ["LOCKSTEP_KEY_FILE"] == str(tmp_path / "named")
    key = chosen_key()
    assert key is not None
    assert key.path == tmp_path / "named"
    choose(insecure=True)
    assert chosen_key() is None
