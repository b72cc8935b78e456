"""`darkbloom serve` as a process: what it serves, what it leaves out, how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from darkbloom_core.plugins import load_plugins

BROKEN = "raise RuntimeError('the disk is on fire')\n"


def served(serving) -> list[str]:
    return sorted(model["id"] for model in serving.get("/v1/models").json()["data"])


def test_the_demo_serves_every_checkpoint_of_plugins_and_ends_with_exit_code_0(serve) -> None:
    serving = serve("--demo", "--routes", "webui")
    assert served(serving) == ["demo/gemma4", "demo/gpt-oss"]
    assert "<title>darkbloom</title>" in serving.get("/").text
    for model in served(serving):
        assert "Paris" in serving.ask(model, "What is the capital of France?")
    assert serving.stop(signal.SIGINT) == 0
    lines = serving.errors.read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{word} {model}" for model in ("demo/gpt-oss", "demo/gemma4") for word in ("loading", "loaded")
    ]


@pytest.mark.soak
def test_a_folder_an_alias_and_a_name_of_ones_own_are_served_under_their_names(serve, tmp_path) -> None:
    folder = load_plugins().checkpoints()["demo/gpt-oss"]
    shutil.copytree(folder, tmp_path / "copied")
    (tmp_path / "settings.toml").write_text('[models]\nassistant = "demo/gpt-oss"\n')
    serving = serve("--config", "settings.toml", "copied", "mine/one=demo/gpt-oss", "assistant")
    assert served(serving) == ["assistant", "copied", "mine/one"]
    assert serving.stop(signal.SIGTERM) == 0


def test_without_a_model_the_settings_models_are_served(serve, tmp_path) -> None:
    (tmp_path / "settings.toml").write_text('[models]\nassistant = "demo/gpt-oss"\n')
    assert served(serve("--config", "settings.toml")) == ["assistant"]


def test_ctrl_c_during_a_stream_ends_it_within_two_seconds_with_exit_code_0(serve) -> None:
    serving = serve("demo/gpt-oss")
    body = {
        "model": "demo/gpt-oss",
        "stream": True,
        "messages": [{"role": "user", "content": "Count from 1 to 400."}],
    }
    flowing = threading.Event()

    def read() -> None:
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", f"{serving.url}/v1/chat/completions", json=body) as answer,
        ):
            try:
                for count, _ in enumerate(answer.iter_lines()):
                    if count == 20:
                        flowing.set()
            except httpx.HTTPError:
                pass  # the server may break the connection off

    reader = threading.Thread(target=read)
    reader.start()
    assert flowing.wait(30)
    began = time.monotonic()
    assert serving.stop(signal.SIGINT) == 0
    assert time.monotonic() - began < 2
    reader.join(10)
    assert not reader.is_alive()


SLOW_TO_LOAD = """
import time
from darkbloom_core.hookspecs import hookimpl
api_version = (1, 0)

@hookimpl
def model_families():
    from toy_server import ToyFamily

    class Slow(ToyFamily):
        name, model_types = "slow", frozenset({"slow"})

        def load(self, path, description, placement, progress=None):
            for done in range(6000):
                progress(done, 6000)
                time.sleep(0.01)

    return [Slow()]
"""


def test_ctrl_c_while_a_model_loads_ends_the_load_with_exit_code_0(
    make_plugin, process_environment, tmp_path
) -> None:
    make_plugin("slow", SLOW_TO_LOAD)
    process_environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent / "support")
    (tmp_path / "config.json").write_text('{"model_type": "slow"}')
    code = "from darkbloom_core.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", ".", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=process_environment,
        cwd=tmp_path,
    ) as process:
        assert process.stderr.readline().startswith("loading ")
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(10) == 0
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_a_broken_plugin_is_named_once_in_the_log_and_by_readiness_and_breaks_nothing(
    serve, make_plugin
) -> None:
    make_plugin("broken", BROKEN)
    serving = serve("demo/gpt-oss")
    assert served(serving) == ["demo/gpt-oss"]
    assert "Paris" in serving.ask("demo/gpt-oss", "What is the capital of France?")
    ready = serving.get("/health/ready")
    assert ready.status_code == 200
    (failed,) = ready.json()["failed_plugins"]
    assert (failed["name"], failed["distribution"]) == ("broken", "darkbloom-broken")
    assert "the disk is on fire" in failed["reason"]
    assert serving.stop() == 0
    assert sum("plugin broken" in line for line in serving.errors.read_text().splitlines()) == 1


def test_a_demo_checkpoint_whose_family_is_missing_is_left_out_with_what_to_do(
    serve, process_environment
) -> None:
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "gemma4"
    serving = serve("--demo")
    assert served(serving) == ["demo/gpt-oss"]
    lines = serving.errors.read_text().splitlines()
    (warning,) = [line for line in lines if "leaving out" in line]
    assert "demo/gemma4" in warning
    assert "darkbloom-gemma4" in warning


def test_a_named_checkpoint_whose_family_is_missing_is_an_error(run_darkbloom, process_environment) -> None:
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "gemma4"
    (line,) = run_darkbloom("serve", "--demo", "demo/gemma4", code=2).stderr.splitlines()
    assert line.startswith("darkbloom: demo/gemma4: ")
    assert "darkbloom-gemma4" in line


def test_without_any_family_the_demo_serves_nothing(run_darkbloom, process_environment) -> None:
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "gemma4,gpt-oss"
    lines = run_darkbloom("serve", "--demo", code=2).stderr.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "darkbloom: no family for any of the demo checkpoints is installed"


def test_without_the_demos_package_there_is_no_demo(run_darkbloom, process_environment) -> None:
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "demo"
    assert "pip install darkbloom-demo" in run_darkbloom("serve", "--demo", code=2).stderr


def test_an_address_that_others_can_reach_is_refused_without_keys_and_served_with(
    run_darkbloom, serve, process_environment
) -> None:
    (line,) = run_darkbloom("serve", "--demo", "--host", "0.0.0.0", code=2).stderr.splitlines()
    assert line.startswith("darkbloom: server.host 0.0.0.0 can be reached from other machines")
    process_environment["DARKBLOOM_KEYS__ALICE"] = "alice-0123456789abcdef"
    serving = serve("demo/gpt-oss", "--host", "0.0.0.0")
    assert "alice" not in serving.said + serving.errors.read_text()
    models = f"{serving.url}/v1/models"
    assert httpx.get(models).status_code == 401
    key = {"Authorization": "Bearer alice-0123456789abcdef"}
    assert httpx.get(models, headers=key).json()["data"][0]["id"] == "demo/gpt-oss"
    assert serving.stop(signal.SIGTERM) == 0


def test_a_port_that_is_taken_is_one_line_before_anything_is_loaded(run_darkbloom) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (line,) = run_darkbloom("serve", "demo/gpt-oss", "--port", port, code=2).stderr.splitlines()
    assert line.startswith(f"darkbloom: cannot listen on 127.0.0.1 port {port}")
