"""A family from outside: built as a wheel, installed, and served with nothing of the core changed.

The package is ``examples/darkbloom-qwen3``, which is no member of the workspace.
"""

from __future__ import annotations

import ast
import codecs
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import openai
import pytest
from darkbloom_qwen3._family import Qwen3Family

from darkbloom_core.checkpoint import read_config
from darkbloom_core.contracts import Chat, ContentDelta, Device, Message, Placement, ReasoningDelta, TextPart
from darkbloom_core.engine import KvStore, step_batch

EXAMPLE = Path(__file__).parent.parent / "examples" / "darkbloom-qwen3"
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small random checkpoint; what it says is noise."""
    spec = importlib.util.spec_from_file_location("qwen3_checkpoints", EXAMPLE / "tests" / "checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write(tmp_path_factory.mktemp("checkpoint"), "transformers")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel was installed into."""
    folder = tmp_path_factory.mktemp("installed")
    uv("build", "--offline", "--wheel", "--out-dir", str(folder / "dist"), str(EXAMPLE))
    (wheel,) = (folder / "dist").glob("*.whl")
    uv("pip", "install", "--offline", "--quiet", "--no-deps", "--python", sys.executable,
       "--target", str(folder / "site"), str(wheel))  # fmt: skip
    return folder / "site"


@pytest.fixture
def with_the_family(process_environment, installed):
    """Processes that the test starts have the family too."""
    process_environment["PYTHONPATH"] = str(installed)


def uv(*arguments: str) -> None:
    command = os.environ.get("UV") or shutil.which("uv")
    assert command, "these tests need uv"
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def direct_answer(checkpoint: Path) -> tuple[str, str]:
    """Reasoning and content of the answer by arg-max, from the family's own objects and the engine's storage."""
    family, device = Qwen3Family(), Device("cpu")
    description = family.describe(read_config(checkpoint), device)
    codec = family.codec(checkpoint, description)
    model = family.load(checkpoint, description, Placement(device))
    chat = Chat(messages=(Message(role="user", content=(TextPart(QUESTION),)),))
    ids = list(codec.encode_chat(chat).ids)
    store = KvStore(description.layers, max_rows=1)
    row = store.open_row(len(ids), len(ids) + ANSWER_TOKENS)
    parser, decoder = codec.parser(chat), codecs.getincrementaldecoder("utf-8")("replace")
    deltas, position = [], 0
    for _ in range(ANSWER_TOKENS):
        batch = step_batch(store, [row], [position], len(ids))
        hidden = model.run_layers(model.embed(mx.array([ids])), batch, 0, len(description.layers))[0]
        position += len(ids)
        token = int(model.logits(hidden[:, -1:]).argmax().item())
        if token in model.stop_ids:
            break
        if token in codec.control_ids:
            decoder.reset()
            deltas += parser.control(token)
        else:
            deltas += parser.text(decoder.decode(codec.token_bytes(token)))
        ids = [token]
    deltas += parser.finish()

    def text(kind):
        return "".join(delta.text for delta in deltas if isinstance(delta, kind))

    return text(ReasoningDelta), text(ContentDelta)


def test_the_core_alone_does_not_read_the_checkpoint(run_darkbloom, checkpoint):
    done = run_darkbloom("models", "inspect", str(checkpoint), code=2)
    assert "qwen3" in done.stderr


def test_once_installed_it_is_listed_and_describes_its_checkpoints(
    with_the_family, run_darkbloom, checkpoint
):
    assert "darkbloom-qwen3" in run_darkbloom("plugins").stdout
    assert "qwen3" in run_darkbloom("models", "inspect", str(checkpoint)).stdout


def test_it_is_served_and_answers_as_a_direct_run_does(with_the_family, serve, checkpoint):
    serving = serve(f"qwen3={checkpoint}")
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        request = {
            "model": "qwen3",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**request)
        streamed = list(client.chat.completions.create(**request, stream=True))
    assert serving.stop() == 0

    reasoning, content = direct_answer(checkpoint)
    assert reasoning + content  # noise, but some
    message = whole.choices[0].message
    assert message.content == content
    assert (getattr(message, "reasoning_content", None) or "") == reasoning
    assert whole.usage.completion_tokens <= ANSWER_TOKENS
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content


def test_it_uses_nothing_but_the_public_contract():
    allowed = {f"darkbloom_core.{room}" for room in ("contracts", "hookspecs", "errors", "checkpoint")}
    for file in (EXAMPLE / "darkbloom_qwen3").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("darkbloom_core"):
                assert node.module in allowed, f"{file.name}:{node.lineno}"
                assert not any(alias.name.startswith("_") for alias in node.names), (
                    f"{file.name}:{node.lineno}"
                )
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("darkbloom_core") for alias in node.names), file.name
