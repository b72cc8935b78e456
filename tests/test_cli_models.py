"""`darkbloom models`: what can be named here, and what a checkpoint is, without loading it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from darkbloom_core.cli._models import layer_lines
from darkbloom_core.contracts import LayerKind
from darkbloom_core.plugins import load_plugins


@pytest.fixture
def demo_folder() -> Path:
    return load_plugins().checkpoints()["demo/gemma4"]


def add_to_hub(home: Path, model_id: str, config: str) -> None:
    folder = (
        home / ".cache/huggingface/hub" / ("models--" + model_id.replace("/", "--")) / "snapshots" / "abc"
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)


def test_every_name_is_listed_with_family_size_and_origin(
    run_darkbloom, process_environment, tmp_path, demo_folder
) -> None:
    add_to_hub(Path(process_environment["HOME"]), "org/unknown", '{"model_type": "nobody_reads_this"}')
    (tmp_path / "settings.toml").write_text(f'[models]\nmine = "{demo_folder}"\nlost = "/nowhere"\n')
    arguments = ("models", "list", "--config", "settings.toml")
    listed = {model["name"]: model for model in json.loads(run_darkbloom(*arguments, "--json").stdout)}
    assert listed["mine"]["family"] == listed["demo/gemma4"]["family"] == "gemma4"
    assert (listed["mine"]["source"], listed["mine"]["path"]) == ("settings", str(demo_folder))
    assert listed["mine"]["weight_bytes"] == (demo_folder / "model.safetensors").stat().st_size
    assert (listed["org/unknown"]["source"], listed["org/unknown"]["family"]) == ("Hugging Face cache", None)
    assert "nobody_reads_this" in listed["org/unknown"]["problem"]
    assert "no model '/nowhere'" in listed["lost"]["problem"]
    table = run_darkbloom(*arguments).stdout
    for model in listed.values():
        assert model["name"] in table
        assert model["problem"] is None or f"{model['name']}: {model['problem']}\n" in table


def test_inspect_says_what_a_checkpoint_is_and_costs(run_darkbloom, demo_folder) -> None:
    facts = json.loads(run_darkbloom("models", "inspect", str(demo_folder), "--json").stdout)
    config = json.loads((demo_folder / "config.json").read_text())
    assert facts["family"] == "gemma4"
    assert facts["context_tokens"] == config["text_config"]["max_position_embeddings"]
    assert sum(int(line.split(" x ")[0]) for line in facts["layers"]) == 6
    assert facts["weight_bytes_on_disk"] > 10_000_000
    assert facts["kv_bytes_at_full_context"] > facts["kv_bytes_per_token"] * facts["context_tokens"]
    text = run_darkbloom("models", "inspect", "demo/gemma4").stdout
    for said in (
        "demo/gemma4",
        "gemma4",
        "131,072 tokens",
        "sliding attention over 128",
        "bytes per token on",
    ):
        assert said in text
    for line in (*facts["layers"], *facts["notes"]):
        assert line in text


def test_a_field_that_was_ignored_is_shown(run_darkbloom, tmp_path, demo_folder) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(demo_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "my_harmless_remark": "hello"}))
    assert "my_harmless_remark" in run_darkbloom("models", "inspect", "copy").stdout


def test_a_checkpoint_that_no_family_reads_is_an_error_with_its_path(run_darkbloom, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_reads_this"}')
    (line,) = run_darkbloom("models", "inspect", ".", code=2).stderr.splitlines()
    assert str(tmp_path) in line
    assert "nobody_reads_this" in line


def test_a_missing_weight_file_is_an_error_with_its_folder(run_darkbloom, tmp_path, demo_folder) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(demo_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (line,) = run_darkbloom("models", "inspect", "copy", code=2).stderr.splitlines()
    assert str(folder) in line


def test_layers_of_one_kind_are_one_line_with_their_number() -> None:
    full = LayerKind(q_heads=8, kv_heads=4, k_dim=64, v_dim=64)
    window = LayerKind(q_heads=8, kv_heads=4, k_dim=64, v_dim=32, window=128, sinks=True, dtype="float32")
    borrowed = LayerKind(q_heads=8, k_dim=64, v_dim=64, source=1)
    recurrent = LayerKind(state=((16, 64, 64), (4,)), dtype="float32")
    assert layer_lines([window, full, window, borrowed, recurrent]) == [
        "2 x sliding attention over 128, 8 query heads, 4 KV heads x 64 and 32, float32, sinks",
        "1 x full attention, 8 query heads, 4 KV heads x 64, bfloat16",
        "1 x full attention, 8 query heads, K and V of layer 1",
        "1 x recurrent, state 16x64x64, 4, float32",
    ]
