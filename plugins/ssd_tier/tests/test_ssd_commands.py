"""``darkbloom ssd``: what is shown, checked and wiped."""

from __future__ import annotations

import json

import pytest
import typer
from darkbloom_ssd_tier import cli_commands
from typer.testing import CliRunner

from darkbloom_core.cli import CommandContext
from darkbloom_core.errors import SettingsError, SetupError
from darkbloom_core.plugins import PluginOptions, load_plugins


@pytest.fixture
def run(place, tmp_path):
    """Run ``darkbloom ssd ...`` on the place's folder; gives exit code and output."""
    config = tmp_path / "darkbloom.toml"
    app = typer.Typer()

    @app.callback()
    def start(context: typer.Context):
        context.obj = CommandContext(load_plugins(PluginOptions(allow=frozenset())))

    cli_commands(app)

    def call(*words, text="", **options):
        lines = [f"{name} = {json.dumps(value)}" for name, value in place.options(**options).items()]
        more = [f"directory = {json.dumps(str(place.folder))}", "write_bytes_per_day = 1000000"]
        config.write_text("\n".join(["[models]", 'm = "somewhere"', "[options.ssd-tier]", *lines, *more]))
        done = CliRunner().invoke(app, ["ssd", *words, "--config", str(config)], input=text)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return call


@pytest.fixture
def keys(place, ssd):
    found = [ssd.part(number) for number in range(3)]
    ssd.put(place.open(), found)
    return found


def test_status_of_nothing_says_so_and_makes_nothing(run, place):
    assert run("status") == (0, f"there is no cache in {place.folder}\n")
    assert not place.folder.exists()
    assert not place.key_file.exists()


def test_status_shows_what_there_is(run, place, ssd, keys):
    place.open("unknown")
    code, said = run("status", "--json")
    assert code == 0
    found = json.loads(said)
    assert found["folder"] == str(place.folder)
    assert found["key"] == f"file, id {place.keys.key_id.hex()}"
    assert found["bytes_per_day"] == 1_000_000
    assert found["written"]["written_bytes"] == sum(file.stat().st_size for file in place.files())
    by_name = {model["model"]: model for model in found["models"]}
    assert (by_name["m"]["files"], by_name["m"]["is_in_use"]) == (3, True)
    assert by_name[None]["files"] == 0
    place.restart()
    code, said = run("status")
    assert code == 0
    assert "m: 3 files, 24.0 KiB, idle" in said
    assert 'not in use: add "ssd-tier" to prefix.tiers' in said


def test_status_works_without_the_key(run, place, keys):
    place.restart()
    place.key_file.chmod(0o644)
    code, said = run("status")
    assert code == 0
    assert "not available: others may read the key file" in said


def test_verify_finds_what_is_damaged_and_removes_it_if_asked(run, place, ssd, keys):
    place.restart()
    assert run("verify") == (0, "3 files are sound, 0 damaged, 0 removed\n")
    file = place.file_of(keys[0])
    *rest, last = file.read_bytes()
    file.write_bytes(bytes([*rest, last ^ 1]))
    place.file_of(keys[1]).write_bytes(b"short")
    (file.parent / "notes").write_text("")
    code, said = run("verify")
    assert code == 1
    assert said.startswith("1 files are sound, 2 damaged, 0 removed\n")
    assert "not checked: 1 no file of the cache\n" in said
    assert run("verify", "--remove")[0] == 1
    assert run("verify")[0] == 0
    assert ssd.get(place.open(), keys) == [False, False, True]


def test_verify_removes_nothing_from_under_a_running_server(run, place, ssd, keys):
    place.file_of(keys[0]).write_bytes(bytes(place.file_of(keys[0]).stat().st_size))
    code, said = run("verify", "--remove")
    assert (code, "0 removed" in said) == (1, True)
    assert place.file_of(keys[0]).exists()


def test_verify_tells_another_keys_files_from_damage(run, place, keys):
    place.restart()
    place.key_file.unlink()
    place.open()
    assert "0 files are sound, 0 damaged, 0 removed\nnot checked: 3 of another key" in run("verify")[1]


def test_wipe_destroys_key_and_files(run, place, keys):
    place.restart()
    code, said = run("wipe", "--yes")
    assert code == 0
    assert "removed 3 files" in said
    assert "the key is destroyed" in said
    assert not place.folder.exists()
    assert not place.key_file.exists()


def test_wipe_asks_first(run, place, keys):
    place.restart()
    assert run("wipe", text="n\n")[0] == 1
    assert len(place.files()) == 3
    assert run("wipe", text="y\n")[0] == 0


def test_wipe_refuses_while_the_cache_is_in_use(run, place, keys):
    with pytest.raises(SetupError, match="is in use"):
        run("wipe", "--yes")
    assert len(place.files()) == 3
    assert place.key_file.exists()


def test_wipe_leaves_alone_what_is_not_ours_and_a_key_that_was_provided(run, place, ssd, monkeypatch):
    monkeypatch.setenv("SSD_TIER_KEY", "ab" * 32)
    ssd.put(place.open(key_store="environment"), [ssd.part(1)])
    place.restart()
    note = place.files()[0].parent / "notes"
    note.write_text("mine")
    code, said = run("wipe", "--yes", key_store="environment")
    assert code == 0
    assert "the key was provided by you and is yours to destroy" in said
    assert f"left alone, not ours: {note.parent.name}/notes" in said
    assert note.read_text() == "mine"


def test_wipe_begins_anew_where_notes_cannot_be_read(run, place, keys):
    place.restart()
    (place.folder / "about.json").write_text("{")
    assert run("wipe", "--yes")[0] == 0
    place.open()


def test_wrong_options_are_told(run, place, keys):
    with pytest.raises(SettingsError, match=r"options\.ssd-tier\.reader: did you mean readers"):
        run("status", reader=1)
