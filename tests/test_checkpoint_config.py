"""Reading a checkpoint's JSON files: every fault is one line that names the file."""

import json

import pytest

from darkbloom_core.checkpoint import read_config, read_generation_config
from darkbloom_core.errors import CheckpointError


def fault(call, *arguments):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    message = caught.value.message
    assert "\n" not in message
    return message


def test_the_config_is_returned_as_it_stands(tmp_path):
    config = {"model_type": "thing", "layers": [1, 2], "rope": {"theta": 1e4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{not json", "not JSON"),
        (b"", "not JSON"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"{}", "no model_type"),
        (b'{"model_type": ""}', "no model_type"),
        (b'{"model_type": 7}', "no model_type"),
    ],
)
def test_a_bad_config_is_named_with_what_is_wrong(tmp_path, content, says):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    message = fault(read_config, tmp_path)
    assert message.startswith(f"{file}: ")
    assert says in message


def test_a_missing_folder_a_file_and_a_missing_config_are_told_apart(tmp_path):
    assert fault(read_config, tmp_path / "absent") == f"{tmp_path / 'absent'}: no such folder"
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"")
    assert "not a folder" in fault(read_config, file)
    assert fault(read_config, tmp_path) == f"{tmp_path / 'config.json'}: no such file"


def test_a_loop_of_symbolic_links_is_named(tmp_path):
    folder = tmp_path / "loop"
    folder.symlink_to(folder)
    assert fault(read_config, folder) == f"{folder}: a loop of symbolic links"
    config = tmp_path / "config.json"
    config.symlink_to(config)
    assert fault(read_config, tmp_path) == f"{config}: a loop of symbolic links"


def test_a_generation_config_may_be_missing_but_not_damaged(tmp_path):
    assert read_generation_config(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}
    file.write_text("{")
    assert str(file) in fault(read_generation_config, tmp_path)
    file.unlink()
    file.symlink_to(file)
    assert "loop" in fault(read_generation_config, tmp_path)
