"""What is installed is what is served: a family's package is really uninstalled, and comes back.

The environment is made from the lock file and uv's cache, without the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parent.parent


class Installation:
    """An environment of its own with everything that the lock file names."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        uv = os.environ.get("UV") or shutil.which("uv")
        assert uv, "these tests need uv"
        self._uv = uv
        self._environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder)}

    def install_everything(self) -> None:
        self._run("sync", "--frozen", "--offline", "--quiet")

    def uninstall(self, distribution: str) -> None:
        self._run("pip", "uninstall", "--quiet", "--python", str(self.python), distribution)

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            [self._uv, *arguments],
            cwd=ROOT,
            env=self._environment,
            check=True,
            capture_output=True,
            timeout=120,
        )


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "environment")


def served(serving) -> list[str]:
    return sorted(model["id"] for model in serving.get("/v1/models").json()["data"])


@pytest.mark.soak
def test_uninstalling_a_family_removes_it_and_installing_it_brings_it_back(
    installation, serve, process_environment, tmp_path
) -> None:
    installation.install_everything()
    installation.uninstall("darkbloom-gemma4")

    serving = serve("--demo", python=installation.python)
    assert served(serving) == ["demo/gpt-oss"]
    assert "Paris" in serving.ask("demo/gpt-oss", "What is the capital of France?")
    with pytest.raises(openai.NotFoundError) as raised:
        serving.ask("demo/gemma4", "What is the capital of France?")
    assert raised.value.code == "model_not_found"
    assert serving.stop() == 0
    assert "pip install darkbloom-gemma4" in serving.errors.read_text()

    inspect = [installation.python, "-c", "from darkbloom_core.cli import main; main()", "models", "inspect"]
    done = subprocess.run(
        [*inspect, "demo/gemma4"],
        env=process_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "pip install darkbloom-gemma4" in done.stderr

    installation.install_everything()
    serving = serve("--demo", python=installation.python)
    assert served(serving) == ["demo/gemma4", "demo/gpt-oss"]
    assert "Paris" in serving.ask("demo/gemma4", "What is the capital of France?")
    assert serving.stop() == 0


def test_without_a_backend_the_line_says_which_extra_to_install(
    installation, process_environment, tmp_path
) -> None:
    installation.install_everything()
    installation.uninstall("mlx-metal" if sys.platform == "darwin" else "mlx-cpu")
    done = subprocess.run(
        [installation.python, "-c", "from darkbloom_core.cli import main; main()", "serve", "--demo"],
        env=process_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'darkbloom[cpu]'" in line
