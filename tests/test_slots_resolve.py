"""How models are named: aliases, offered names, folders, the hub's cache, NAME=MODEL."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkbloom_core.errors import CheckpointError, SettingsError
from darkbloom_core.slots._resolve import (
    ModelPlaces,
    NamedCheckpoint,
    hub_checkpoints,
    hub_folder,
    resolve_model,
    resolve_models,
)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def places(tmp_path: Path, hub: Path) -> ModelPlaces:
    return ModelPlaces(
        hub=hub,
        aliases={"small": "demo/one", "lost": "demo/none", "disk": str(tmp_path)},
        offered={"demo/one": tmp_path / "one"},
    )


def add_snapshot(hub: Path, model_id: str, revision: str, *, main: bool = True) -> Path:
    folder = hub / ("models--" + model_id.replace("/", "--"))
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return snapshot


def test_an_offered_name_keeps_its_name(places: ModelPlaces, tmp_path: Path) -> None:
    assert resolve_model("demo/one", places) == NamedCheckpoint("demo/one", tmp_path / "one")


def test_a_folder_is_served_under_its_last_name(places: ModelPlaces, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve_model(str(folder), places) == NamedCheckpoint("my-model", folder)
    monkeypatch.chdir(folder)
    assert resolve_model(".", places) == NamedCheckpoint("my-model", folder)


def test_a_tilde_is_the_home_folder(places: ModelPlaces, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    assert resolve_model("~/weights", places).path == tmp_path / "weights"


def test_an_alias_names_the_model_and_may_lead_anywhere(places: ModelPlaces, tmp_path: Path) -> None:
    assert resolve_model("small", places) == NamedCheckpoint("small", tmp_path / "one")
    assert resolve_model("disk", places) == NamedCheckpoint("disk", tmp_path)


def test_an_alias_that_leads_nowhere_is_named_as_the_setting_at_fault(places: ModelPlaces) -> None:
    with pytest.raises(SettingsError, match=r"models\.lost: no model 'demo/none'"):
        resolve_model("lost", places)


def test_a_name_of_ones_own_goes_before_an_equals_sign(places: ModelPlaces, tmp_path: Path) -> None:
    assert resolve_model("mine/x=demo/one", places) == NamedCheckpoint("mine/x", tmp_path / "one")


def test_a_folder_with_an_equals_sign_is_a_folder(places: ModelPlaces, tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert resolve_model(str(folder), places).path == folder


@pytest.mark.parametrize("word", ["=demo/one", "mine="])
def test_half_a_name_is_refused(places: ModelPlaces, word: str) -> None:
    with pytest.raises(CheckpointError, match="a part is empty"):
        resolve_model(word, places)


def test_the_hubs_main_revision_is_taken(places: ModelPlaces, hub: Path) -> None:
    add_snapshot(hub, "org/model", "aaa", main=False)
    newest = add_snapshot(hub, "org/model", "bbb")
    assert resolve_model("org/model", places) == NamedCheckpoint("org/model", newest)


def test_a_single_snapshot_needs_no_ref_but_two_are_ambiguous(places: ModelPlaces, hub: Path) -> None:
    only = add_snapshot(hub, "org/model", "aaa", main=False)
    assert resolve_model("org/model", places).path == only
    add_snapshot(hub, "org/model", "bbb", main=False)
    with pytest.raises(CheckpointError, match="not in the Hugging Face cache"):
        resolve_model("org/model", places)


def test_a_ref_to_a_snapshot_that_is_gone_finds_nothing(places: ModelPlaces, hub: Path) -> None:
    add_snapshot(hub, "org/model", "aaa")
    (hub / "models--org--model" / "refs" / "main").write_text("gone")
    with pytest.raises(CheckpointError, match="no model 'org/model'"):
        resolve_model("org/model", places)


def test_what_is_not_found_is_told_with_every_place_looked_at(places: ModelPlaces, hub: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve_model("nobody/nothing", places)
    message = str(raised.value)
    for place in ("disk, lost, small", "demo/one", str(Path("nobody/nothing").absolute()), str(hub)):
        assert place in message
    assert "\n" not in message


def test_a_file_is_refused_with_what_to_give_instead(places: ModelPlaces, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="the folder that holds"):
        resolve_model(str(file), places)


def test_two_models_of_one_name_are_refused(places: ModelPlaces, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="NAME=MODEL"):
        resolve_models([str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")], places)
    names = [model.name for model in resolve_models([str(tmp_path / "a/model"), f"x={tmp_path}"], places)]
    assert names == ["model", "x"]


def test_a_model_named_twice_is_one_model(places: ModelPlaces) -> None:
    assert len(resolve_models(["demo/one", "demo/one"], places)) == 1


def test_the_hubs_models_are_listed_by_id(hub: Path) -> None:
    snapshot = add_snapshot(hub, "org/b", "aaa")
    add_snapshot(hub, "org/a", "bbb")
    (add_snapshot(hub, "org/data-only", "ccc") / "config.json").unlink()
    assert list(hub_checkpoints(hub)) == ["org/a", "org/b"]
    assert hub_checkpoints(hub)["org/b"] == snapshot
    assert hub_checkpoints(hub / "absent") == {}


def test_the_hubs_folder_follows_its_variables() -> None:
    assert hub_folder({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_folder({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert hub_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert hub_folder({}) == Path.home() / ".cache/huggingface/hub"
