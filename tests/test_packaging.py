"""What installing each distribution brings along, read from the lock file and asked of uv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKED = {package["name"]: package for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
DISTRIBUTIONS = {
    project["name"]: project
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
    for project in [tomllib.loads(file.read_text())["project"]]
}


def installed_with(name: str, *extras: str) -> set[str]:
    """``name`` with its ``extras`` and everything that it needs, on any platform."""
    seen, todo = set(), [(name, extras)]
    while todo:
        current, extras = todo.pop()
        package = LOCKED[current]
        seen.add((current, extras))
        optional = package.get("optional-dependencies", {})
        needs = [
            *package.get("dependencies", ()),
            *(need for extra in extras for need in optional.get(extra, ())),
        ]
        wanted = {(need["name"], tuple(need.get("extra", ()))) for need in needs}
        todo += wanted - seen
    return {package for package, _ in seen}


@pytest.mark.parametrize("name", ["darkbloom-core", "darkbloom-gpt-oss"])
def test_the_core_and_the_first_family_install_without_mlx_vlm_and_torch(name: str) -> None:
    assert installed_with(name).isdisjoint({"mlx-vlm", "torch", "torchvision"})


def test_the_core_installs_without_any_family_or_other_mlx_library() -> None:
    needed = installed_with("darkbloom-core")
    assert {package for package in needed if package.startswith("darkbloom")} == {"darkbloom-core"}
    assert needed.isdisjoint({"mlx-lm", "transformers"})


def test_no_distribution_brings_the_package_whose_wheel_holds_gpl_libraries_but_by_its_extra() -> None:
    for name in DISTRIBUTIONS:
        assert "av" not in installed_with(name), name
    assert "pillow" in installed_with("darkbloom-gemma4")
    for name in ("darkbloom", "darkbloom-core"):
        assert {"av", "pillow"} <= installed_with(name, "media")


def test_the_bundle_pins_the_versions_that_are_here() -> None:
    for requirement in DISTRIBUTIONS["darkbloom"]["dependencies"]:
        name, version = requirement.split("==")
        assert DISTRIBUTIONS[name]["version"] == version


def test_every_distribution_says_the_same_python_and_licence() -> None:
    for field in ("requires-python", "license"):
        assert len({project[field] for project in DISTRIBUTIONS.values()}) == 1


@pytest.mark.parametrize("name", ["darkbloom", "darkbloom-core"])
def test_every_backend_is_an_extra(name: str) -> None:
    assert {"cpu", "cuda12", "cuda13"} <= DISTRIBUTIONS[name]["optional-dependencies"].keys()


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = os.environ.get("UV") or shutil.which("uv")
    assert command, "these tests need uv"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VIRTUAL_ENV")}
    return subprocess.run(
        [command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def exported(*options: str) -> set[str]:
    done = uv("export", "--frozen", "--offline", "--no-hashes", "--no-header", *options)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^([a-z0-9-]+)==", done.stdout, re.MULTILINE))


def test_a_cuda_backend_replaces_the_one_for_cpus() -> None:
    assert "mlx-cpu" in exported()
    for extra, package in (("cuda12", "mlx-cuda-12"), ("cuda13", "mlx-cuda-13")):
        with_cuda = exported("--no-group", "cpu", "--extra", extra)
        assert package in with_cuda
        assert "mlx-cpu" not in with_cuda


def test_two_backends_at_once_are_refused() -> None:
    done = uv("sync", "--frozen", "--offline", "--dry-run", "--extra", "cuda13")
    assert done.returncode != 0
    assert "incompatible" in done.stderr
