"""API keys: where they stand, what is refused, and that no message shows one."""

import pytest

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings import ApiKey, Settings, load_settings, read_keys, require_key

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture
def read(tmp_path):
    """The keys of a key file of this text and of these variables."""

    def read(text=None, mode=0o600, **environment):
        server = ""
        if text is not None:
            path = tmp_path / "keys"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            path.chmod(mode)
            server = f"[server]\nkey_file = '{path}'\n"
        (tmp_path / "darkbloom.toml").write_text(server)
        return read_keys(load_settings(tmp_path / "darkbloom.toml", environment))

    return read


def test_keys_come_from_the_file_and_from_variables(read):
    text = f"# whose  key\n\nalice {ALICE}\n  carol.2\t{ALICE}2  \n"
    found = read(text, DARKBLOOM_KEYS__BOB=BOB)
    assert found == (ApiKey("alice", ALICE), ApiKey("carol.2", ALICE + "2"), ApiKey("bob", BOB))
    assert read() == ()
    assert read(text, mode=0o640)


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        ("", {}, "holds no key"),
        ("# alice\n", {}, "holds no key"),
        (f"alice {ALICE} more", {}, "line 1 must be a name and a key"),
        (f"\n{ALICE}", {}, "line 2 must be a name and a key"),
        (f"Alice {ALICE}", {}, "a key's name has"),
        ("alice tooshort-0123456", {"DARKBLOOM_KEYS__BOB": "short"}, "DARKBLOOM_KEYS__BOB: a key has 16 to 512"),
        ("alice short", {}, "line 1: a key has 16 to 512"),
        (f"alice {'é' * 20}", {}, "a key has 16 to 512"),
        (None, {"DARKBLOOM_KEYS__BOB": ""}, "DARKBLOOM_KEYS__BOB: a key has 16 to 512"),
        (None, {"DARKBLOOM_KEYS__BOB": f"{BOB} "}, "DARKBLOOM_KEYS__BOB: a key has 16 to 512"),
        (f"alice {ALICE}\nalice {BOB}", {}, "line 2 has the name that"),
        (f"alice {ALICE}\nbob {ALICE}", {}, "line 2 has the key that"),
        (f"bob {ALICE}", {"DARKBLOOM_KEYS__BOB": BOB}, "DARKBLOOM_KEYS__BOB has the name that"),
        (b"alice \xff", {}, "is not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused_without_showing_it(read, text, variables, message):
    with pytest.raises(SettingsError) as refused:
        read(text, **variables)
    assert message in refused.value.message
    for secret in (ALICE, BOB, "short "):
        assert secret not in refused.value.message


def test_a_key_file_that_all_users_may_open_is_refused(read):
    for mode in (0o604, 0o602, 0o666):
        with pytest.raises(SettingsError, match="open to all users: chmod o= "):
            read(f"alice {ALICE}", mode=mode)


def test_a_key_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_keys(Settings(server={"key_file": str(tmp_path / "none")}))


def test_a_key_in_the_settings_file_is_refused_without_showing_it(tmp_path):
    (tmp_path / "darkbloom.toml").write_text(f"[keys]\nalice = '{ALICE}'\n")
    with pytest.raises(SettingsError, match="a file of their own") as refused:
        load_settings(tmp_path / "darkbloom.toml", {})
    assert ALICE not in refused.value.message


def test_settings_do_not_show_their_keys(read):
    assert ALICE not in repr(read(f"alice {ALICE}"))
    settings = Settings(keys={"alice": ALICE})
    assert ALICE not in f"{settings!r} {settings.model_dump()} {settings.model_dump_json()}"


@pytest.mark.parametrize("limit", ["key_concurrency", "key_requests_per_minute"])
def test_limits_of_keys_without_a_key_are_refused(limit):
    with pytest.raises(SettingsError, match=f"server.{limit} limits"):
        read_keys(Settings(server={limit: 1}))
    assert read_keys(Settings(server={limit: 1}, keys={"alice": ALICE}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_only_this_machine_may_ask_without_a_key(host):
    require_key(host, needs_key=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org", ""])
def test_an_address_that_others_can_reach_needs_keys(host):
    with pytest.raises(SettingsError, match="name a file of keys in server"):
        require_key(host, needs_key=False)
    require_key(host, needs_key=True)
