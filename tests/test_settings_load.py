"""Settings: the file, the environment over it, and one line for whatever is wrong with either."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from darkbloom_core.errors import SettingsError
from darkbloom_core.settings import RESERVED, Settings, load_settings, variable_name

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def load(tmp_path):
    """Load settings from a file of the given text, and from these variables alone."""

    def load(text="", **environment):
        path = tmp_path / "darkbloom.toml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, environment)

    return load


@pytest.fixture
def complaint(load):
    def complaint(text="", **environment):
        with pytest.raises(SettingsError) as raised:
            load(text, **environment)
        message = str(raised.value)
        assert "\n" not in message
        return message

    return complaint


def test_everything_has_a_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings(environment={}) == Settings()


def test_the_file_is_read_and_the_environment_wins_over_it(load):
    settings = load(
        "[server]\nport = 1\nhost = 'h'\ndrain_seconds = 3\nroute_plugins = ['a']\n[models]\nm = '/file'\n",
        DARKBLOOM_SERVER__PORT="2",
        DARKBLOOM_SERVER__ROUTE_PLUGINS="b, c,",
        DARKBLOOM_MEMORY__KV_BYTES="5",
        DARKBLOOM_TELEMETRY__SAMPLE_SECONDS="0.5",
        DARKBLOOM_MODELS__N="/variable",
        DARKBLOOM_PLUGINS="not a setting",
        DARKBLOOM_BLOCK_PLUGINS="not a setting",
        UNRELATED="x",
    )
    assert settings.server.model_dump(exclude_unset=True) == {
        "host": "h",
        "port": 2,
        "drain_seconds": 3.0,
        "route_plugins": ("b", "c"),
    }
    assert settings.memory.kv_bytes == 5
    assert settings.telemetry.sample_seconds == 0.5
    assert settings.models == {"m": "/file", "n": "/variable"}


def test_a_setting_without_limits_can_come_from_the_environment(load):
    settings = load(DARKBLOOM_ENGINE__DETERMINISTIC="true", DARKBLOOM_ENGINE__COMPILE="never")
    assert settings.engine.deterministic is True
    assert settings.engine.compile == "never"


def test_the_file_is_the_given_one_else_the_variables_else_the_default_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".config" / "darkbloom" / "darkbloom.toml"
    default.parent.mkdir(parents=True)
    for port, path in ((1, default), (2, tmp_path / "named.toml"), (3, tmp_path / "given.toml")):
        path.write_text(f"[server]\nport = {port}\n")
    named = {"DARKBLOOM_CONFIG": "~/named.toml"}
    assert load_settings(environment={}).server.port == 1
    assert load_settings(environment={"DARKBLOOM_CONFIG": ""}).server.port == 1
    assert load_settings(environment=named).server.port == 2
    assert load_settings(tmp_path / "given.toml", named).server.port == 3


def test_a_models_rows_come_from_its_own_setting_however_its_name_is_written(load):
    settings = load(
        '[engine]\nmax_rows = 5\n[max_rows]\n"demo/one" = 2\nmy-model = 3\n',
        DARKBLOOM_MAX_ROWS__OTHER_MODEL="4",
    )
    assert settings.max_rows_of("demo/one") == 2
    assert settings.max_rows_of("my-model") == settings.max_rows_of("my_model") == 3
    assert settings.max_rows_of("other_model") == settings.max_rows_of("other-model") == 4
    assert settings.max_rows_of("any") == 5


def test_options_of_a_plugin_are_found_however_its_name_is_written(load):
    settings = load(
        "[options.disk-tier]\nsize = 3\n",
        DARKBLOOM_OPTIONS__DISK_TIER__PATH="/p",
        DARKBLOOM_OPTIONS__X__Y="z",
    )
    assert settings.options_of("disk-tier") == settings.options_of("disk_tier") == {"size": 3, "path": "/p"}
    assert settings.options_of("x") == {"y": "z"}
    assert settings.options_of("absent") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "unknown setting server.prot in FILE: did you mean server.port?"),
        (
            "[server]\nchunk_tokens = 1",
            "unknown setting server.chunk_tokens in FILE: did you mean engine.chunk_tokens?",
        ),
        ("port = 1", "unknown setting port in FILE: did you mean server.port?"),
        ("[sever]\nport = 1", "unknown setting sever in FILE: did you mean the table [server]?"),
        (
            "[telemetry]\nxyzzy = 1",
            "unknown setting telemetry.xyzzy in FILE: [telemetry] has sample_seconds",
        ),
        (
            "[xyzzy]",
            "unknown setting xyzzy in FILE: there are the tables server, engine, memory, slots, prefix, "
            "media, telemetry, models, max_rows, options",
        ),
        ("[server]\nport = 'x'", "server.port in FILE must be a whole number, not 'x'"),
        ("[server]\nport = '80'", "server.port in FILE must be a whole number, not '80'"),
        ("[server]\nport = true", "server.port in FILE must be a whole number, not True"),
        ("[server]\nport = 1.5", "server.port in FILE must be a whole number, not 1.5"),
        ("[server]\nport = 70000", "server.port in FILE must be at most 65535, not 70000"),
        ("[server]\nhost = ''", "server.host in FILE must not be empty, not ''"),
        ("[server]\nhost = 1", "server.host in FILE must be text, not 1"),
        ("[server]\nroute_plugins = 'otel'", "server.route_plugins in FILE must be a list, not 'otel'"),
        (
            "[server]\ncors_origins = ['https://a.example/']",
            "server.cors_origins.0 in FILE must be an origin as browsers write it, such as https://chat.example.org, or *, "
            "not 'https://a.example/'",
        ),
        ("[server]\nroute_plugins = [1]", "server.route_plugins.0 in FILE must be text, not 1"),
        (
            "[engine]\nslice_milliseconds = 0",
            "engine.slice_milliseconds in FILE must be greater than 0.0, not 0",
        ),
        (
            "[telemetry]\nsample_seconds = nan",
            "telemetry.sample_seconds in FILE must be a finite number, not nan",
        ),
        ("[memory]\nkv_bytes = 0", "memory.kv_bytes in FILE must be at least 1, not 0"),
        ("server = 3", "server in FILE must be a table, not 3"),
        ("[models]\na = 1", "models.a in FILE must be text, not 1"),
        ("[options]\na = 1", "options.a in FILE must be a table, not 1"),
        (
            f"[server]\nport = '{'9' * 100}'",
            f"server.port in FILE must be a whole number, not '{'9' * 59}...",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_setting_and_the_place(text, message, complaint, tmp_path):
    assert complaint(text) == message.replace("FILE", str(tmp_path / "darkbloom.toml"))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DARKBLOOM_SERVER_PORT", "1", "unknown setting DARKBLOOM_SERVER_PORT in the environment: did you mean DARKBLOOM_SERVER__PORT?"),
        ("DARKBLOOM_SERVER__PROT", "1", "unknown setting DARKBLOOM_SERVER__PROT in the environment: did you mean DARKBLOOM_SERVER__PORT?"),
        ("DARKBLOOM_PLUGIN", "a", "unknown setting DARKBLOOM_PLUGIN in the environment: did you mean DARKBLOOM_PLUGINS?"),
        ("DARKBLOOM_OPTIONS__A", "1", "as in DARKBLOOM_SERVER__PORT"),
        ("DARKBLOOM_MODELS__", "1", "as in DARKBLOOM_SERVER__PORT"),
        ("DARKBLOOM_", "1", "as in DARKBLOOM_SERVER__PORT"),
        ("DARKBLOOM_SERVER__PORT", "x", "DARKBLOOM_SERVER__PORT must be a whole number, not 'x'"),
        ("DARKBLOOM_SERVER__PORT", "", "DARKBLOOM_SERVER__PORT must be a whole number, not ''"),
        ("DARKBLOOM_SERVER__PORT", "-1", "DARKBLOOM_SERVER__PORT must be at least 0, not '-1'"),
        ("DARKBLOOM_SERVER__DRAIN_SECONDS", "inf", "DARKBLOOM_SERVER__DRAIN_SECONDS must be a finite number, not 'inf'"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_one_line_that_names_it(variable, value, message, complaint):
    assert complaint(**{variable: value}).endswith(message)


def test_a_wrong_file_is_blamed_even_where_a_variable_stands_over_it(complaint, tmp_path):
    message = complaint("[server]\nport = 'x'", DARKBLOOM_SERVER__PORT="1")
    assert str(tmp_path) in message


def test_a_file_that_cannot_be_read_is_one_line_that_names_it(complaint, tmp_path):
    assert "is not valid TOML" in complaint("[server")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for path, message in {
        tmp_path / "absent.toml": "does not exist",
        tmp_path: "cannot be read: Is a directory",
        tmp_path / "bytes.toml": "is not valid TOML",
    }.items():
        with pytest.raises(SettingsError, match=message) as raised:
            load_settings(path, {})
        assert str(path) in str(raised.value)


@pytest.fixture(scope="module")
def empty_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "empty.toml"
    path.write_text("")
    return path


@given(name=st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ_0", max_size=20), value=st.text(max_size=8))
def test_no_variable_with_our_prefix_is_ignored(empty_file, name, value):
    variable = f"DARKBLOOM_{name}"
    assume(variable not in RESERVED)
    complaint = ""
    try:
        changed = load_settings(empty_file, {variable: value}) != Settings()
    except SettingsError as error:
        complaint = str(error)
    assert variable in complaint or changed


def test_the_reference_page_says_what_the_model_says():
    specification = importlib.util.spec_from_file_location(
        "settings_reference", ROOT / "tools" / "settings_reference.py"
    )
    reference = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reference)
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        "docs/settings.md is out of date: uv run python tools/settings_reference.py"
    )
    for table, field in Settings.model_fields.items():
        assert field.description or field.annotation.__doc__
        for key, inner in getattr(field.annotation, "model_fields", {}).items():
            assert inner.description, f"{table}.{key} needs a text under it in settings/_model.py"
            assert variable_name(table, key) in reference.page()
