"""Where the key is: one for all who begin together, for its owner alone, and destroyed when that is wanted."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import keyring
import keyring.backend
import keyring.backends.fail
import pytest
from darkbloom_ssd_tier import _stores
from darkbloom_ssd_tier._stores import FileStore, KeyringStore, ProvidedStore, chosen_store

from darkbloom_core.errors import SetupError


class FolderKeyring(keyring.backend.KeyringBackend):
    """A keyring that keeps its passwords in files."""

    priority = 5

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.delay = 0.0

    def _file(self, service, username):
        time.sleep(self.delay)
        return self.folder / f"{service} {username}"

    def get_password(self, service, username):
        file = self._file(service, username)
        return file.read_text() if file.exists() else None

    def set_password(self, service, username, password):
        self._file(service, username).write_text(password)

    def delete_password(self, service, username):
        self._file(service, username).unlink()


@pytest.fixture
def ring(tmp_path):
    before = keyring.get_keyring()
    (tmp_path / "ring").mkdir()
    found = FolderKeyring(tmp_path / "ring")
    keyring.set_keyring(found)
    yield found
    keyring.set_keyring(before)


@pytest.fixture
def no_ring():
    before = keyring.get_keyring()
    keyring.set_keyring(keyring.backends.fail.Keyring())
    yield
    keyring.set_keyring(before)


def chosen(tmp_path, wanted="auto", noted=None, environment=None):
    return chosen_store(wanted, tmp_path / "keys" / "ssd.key", "VARIABLE", environment or {}, noted)


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path):
    store = FileStore(tmp_path / "keys" / "ssd.key")
    assert store.load() is None
    secret = store.create()
    assert len(secret) == 32
    assert (store.load(), store.create()) == (secret, secret)
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in store.path.parent.iterdir()] == ["ssd.key"]


def test_those_who_begin_together_have_one_key(tmp_path, ring):
    for make in (
        lambda: FileStore(tmp_path / "ssd.key").create(),
        lambda: KeyringStore(tmp_path / ".lock").create(),
    ):
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(lambda _, make=make: make(), range(24)))) == 1


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    store = FileStore(tmp_path / "ssd.key")
    store.create()
    store.path.chmod(0o640)
    with pytest.raises(SetupError, match="others may read"):
        store.load()


def test_a_key_file_that_is_a_link_or_no_file_is_refused(tmp_path):
    FileStore(tmp_path / "real").create()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SetupError, match="cannot be read"):
        FileStore(tmp_path / "link").load()
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SetupError, match="not a file of this user"):
        FileStore(tmp_path / "fifo").load()


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "zz" * 32, "\xff"])
def test_what_is_no_key_is_refused(tmp_path, text):
    file = tmp_path / "ssd.key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(SetupError, match="64 hexadecimal digits"):
        FileStore(file).load()
    with pytest.raises(SetupError, match="64 hexadecimal digits"):
        ProvidedStore.of_environment("VARIABLE", {"VARIABLE": text}).load()


def test_a_key_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be made"):
        FileStore(tmp_path / "file" / "ssd.key").create()


def test_destroyed_keys_are_gone(tmp_path, ring):
    file, kept = FileStore(tmp_path / "ssd.key"), KeyringStore(tmp_path / ".lock")
    for store in (file, kept):
        store.create()
        assert store.destroy()
        assert store.load() is None
        assert store.destroy()
    assert not list(ring.folder.iterdir())


def test_a_provided_key_is_used_and_never_made_or_destroyed(tmp_path):
    secret = bytes(range(32))
    (tmp_path / "data").write_text(secret.hex() + "\n")
    (tmp_path / "secret").symlink_to("data")
    stores = [
        chosen_store("secret", tmp_path / "secret", "VARIABLE", {}, None),
        chosen(tmp_path, "environment", environment={"VARIABLE": secret.hex()}),
    ]
    for store in stores:
        assert store.load() == store.create() == secret
        assert not store.destroy()
        assert store.load() == secret
    for missing in (chosen(tmp_path, "secret"), chosen(tmp_path, "environment")):
        with pytest.raises(SetupError, match="nothing is kept on disk"):
            missing.create()
    assert not (tmp_path / "keys").exists()


def test_auto_takes_the_keyring_if_there_is_one_and_else_a_file(tmp_path, ring):
    assert isinstance(chosen(tmp_path), KeyringStore)
    keyring.set_keyring(keyring.backends.fail.Keyring())
    assert isinstance(chosen(tmp_path), FileStore)


def test_auto_stays_with_where_the_key_is(tmp_path, ring):
    assert isinstance(chosen(tmp_path, noted="file"), FileStore)


def test_a_keyring_that_went_away_is_not_replaced_by_another_key(tmp_path, no_ring):
    store = chosen(tmp_path, noted="keyring")
    with pytest.raises(SetupError, match="the keyring cannot be used"):
        store.load()


def test_a_keyring_that_hangs_is_not_waited_for_for_ever(tmp_path, ring, monkeypatch):
    monkeypatch.setattr(_stores, "KEYRING_SECONDS", 0.1)
    ring.delay = 0.5
    with pytest.raises(SetupError, match="did not answer"):
        KeyringStore(tmp_path / ".lock").load()
    time.sleep(0.5)


def test_a_tier_lives_with_its_key_in_the_keyring(place, ssd, ring):
    tier = place.open(key_store="auto")
    ssd.put(tier, [ssd.part(1)])
    place.restart()
    assert not place.key_file.exists()
    assert ssd.get(place.open(key_store="auto"), [ssd.part(1)]) == [True]
