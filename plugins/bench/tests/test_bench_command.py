"""``darkbloom bench engine`` on the demo checkpoints, in a run so small that its numbers mean nothing."""

import json

import pytest
from darkbloom_bench._subject import shape_names, shape_subject

from darkbloom_core.cli import main
from darkbloom_core.contracts import Device
from darkbloom_core.plugins import load_plugins

TINY = (
    "--chunk-tokens",
    "16",
    "--workload",
    "rows-2x8",
    "--repeats",
    "1",
    "--new-tokens",
    "3",
    "--against",
    "mlx-lm",
)
FIGURES = [
    "decode",
    "end to end",
    "first token p50",
    "inter-token p50",
    "inter-token p99",
    "same tokens",
]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run ``darkbloom bench engine`` with the arguments given; gives its exit code."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["bench", "engine", *arguments])
        return left.value.code

    return run


@pytest.mark.parametrize("model", ["demo/gpt-oss", pytest.param("demo/gemma4", marks=pytest.mark.soak)])
def test_cells_of_a_demo_checkpoint_against_mlx_lm_and_the_same_tokens(bench, tmp_path, capsys, model):
    file = tmp_path / "cells.json"
    assert bench("--model", model, *TINY, "--json", str(file)) == 0
    cells = json.loads(file.read_text())
    assert [cell["metric"] for cell in cells] == FIGURES
    for cell in cells:
        assert (cell["workload"], cell["rows"], cell["model"]) == ("rows-2x8", 2, model)
        assert cell["ratio"] == cell["ours"] / cell["peer"]
        assert cell["unit"]
        assert cell["better"] in ("higher", "lower")
    assert (cells[-1]["ours"], cells[-1]["peer"]) == (2, 2)
    shown = capsys.readouterr()
    assert "MLX" in shown.out.splitlines()[0]
    assert all(figure.split()[0] in shown.out for figure in FIGURES)
    assert "rows-2x8, decode, warm-up" in shown.err


def shortened(model, quantization):
    """The demo checkpoint's config with its last two layers only, and quantised."""
    config = json.loads((load_plugins().checkpoints()[model] / "config.json").read_text())
    text = config.get("text_config", config)
    heads_of_layer = text.get("per_layer_config", {})
    last = str(text["num_hidden_layers"] - 1)
    if last in heads_of_layer:
        text["per_layer_config"] = {"1": heads_of_layer[last]}
    text |= {"num_hidden_layers": 2, "layer_types": text["layer_types"][-2:]}
    return config if quantization is None else {**config, "quantization_config": quantization}


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("demo/gpt-oss", {"quant_method": "mxfp4"}),
        ("demo/gpt-oss", {"bits": 4, "group_size": 32}),
        ("demo/gpt-oss", None),
        pytest.param("demo/gemma4", {"bits": 4, "group_size": 32, "mode": "mxfp4"}, marks=pytest.mark.soak),
    ],
)
def test_random_weights_in_the_shape_of_a_config_run_on_both_sides(bench, tmp_path, model, quantization):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(shortened(model, quantization)))
    assert bench("--random", str(file), *TINY, "--json", str(tmp_path / "cells.json")) == 0
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert [cell["metric"] for cell in cells] == FIGURES
    assert all(cell["note"] is None for cell in cells)


@pytest.mark.parametrize("name", shape_names())
def test_a_family_describes_each_shape_of_the_package(name):
    description = shape_subject(name, load_plugins(), Device("cuda")).description
    assert description.kv_dtypes == {"bfloat16"}
    assert description.ignored_fields == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say one of --model, --shape and --random"),
        (("--model", "demo/gpt-oss", "--shape", "gpt-oss-20b"), "say one of --model, --shape and --random"),
        (("--shape", "gpt-oss-21b"), "no shape 'gpt-oss-21b': there are "),
        (("--model", "demo/gpt-oss", "--against", "nobody"), "no peer 'nobody': there is mlx-lm"),
        (("--model", "demo/gpt-oss", "--workload", "none"), "no workload 'none'"),
        (("--random", "/does/not/exist.json"), "not a readable config"),
        (("--model", "demo/gpt-oss", "--workload", "rows-1x200000"), "the model has 131072"),
    ],
)
def test_what_cannot_be_measured_is_one_line_on_stderr(bench, capsys, arguments, message):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
