"""The command line as a person meets it: a process, its output and its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from darkbloom_core import __version__

HEAVY = {"mlx", "numpy", "transformers", "torch", "tokenizers", "jinja2", "starlette", "uvicorn", "rich"}
"""Together these take several times as long to import as all of `darkbloom --help` may take."""


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], HEAVY | {"pydantic"}),
        (["--version"], HEAVY | {"pydantic"}),
        (["serve", "--help"], HEAVY),  # Typer itself builds a command's parameters with pydantic
        (["models", "--help"], HEAVY),
        (["demo", "--help"], HEAVY | {"openai"}),
    ],
)
def test_help_imports_nothing_heavy(run_python, arguments, forbidden) -> None:
    done = run_python(
        "-c",
        "import sys, json\n"
        "from darkbloom_core.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n",
        *arguments,
    )
    assert done.returncode == 0
    imported = {name.split(".")[0] for name in json.loads(done.stderr)}
    assert imported & forbidden == set()


def test_help_lists_the_commands_of_the_core_and_of_plugins(run_darkbloom, make_plugin) -> None:
    make_plugin(
        "greeter",
        "from darkbloom_core.hookspecs import hookimpl\n"
        "api_version = (1, 0)\n"
        "@hookimpl\n"
        "def cli_commands(app):\n"
        "    @app.command()\n"
        "    def greet(name: str):\n"
        "        'Greet someone.'\n"
        "        print('hello', name)\n",
    )
    shown = run_darkbloom("--help").stdout
    for command in ("serve", "chat", "models", "plugins", "greet"):
        assert f"  {command} " in shown
    assert run_darkbloom("greet", "you").stdout == "hello you\n"


def test_the_version_is_told(run_darkbloom) -> None:
    assert run_darkbloom("--version").stdout == f"darkbloom {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "name a model"),
        (["serve", "nobody/nothing"], "no model 'nobody/nothing'"),
        (["models", "inspect", "nobody/nothing"], "no model 'nobody/nothing'"),
        (["serve", "--config", "absent.toml", "x"], "absent.toml does not exist"),
        (["chat", "--url", "localhost"], "not the address of a server"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server answers"),
    ],
)
def test_a_wrong_setup_is_one_line_and_exit_code_2(run_darkbloom, arguments, said) -> None:
    done = run_darkbloom(*arguments, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("darkbloom: ")
    assert said in line
    assert done.stdout == ""


def test_a_checkpoint_that_is_not_json_names_the_file(run_darkbloom, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = run_darkbloom("serve", str(tmp_path), code=2)
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "config.json") in line


def test_a_wrong_command_line_is_exit_code_2(run_darkbloom) -> None:
    assert "--port" in run_darkbloom("serve", "--prot", "1", code=2).stderr


def test_the_module_of_the_entry_point_is_importable_without_a_backend(run_python) -> None:
    """Where MLX cannot be imported, what needs it says what to install."""
    done = run_python(
        "-c",
        "import sys\n"
        "sys.modules['mlx.core'] = None\n"
        "from darkbloom_core.cli import main\n"
        "main(['serve', '--demo'])",
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'darkbloom[cpu]'" in line
    assert sys.version_info >= (3, 11)
