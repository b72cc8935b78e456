"""Links between documents lead somewhere, and commands in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from darkbloom_core.cli._main import build_app
from darkbloom_core.plugins import load_plugins

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def names(documents):
    return [str(document.relative_to(ROOT)) for document in documents]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_to_a_file_or_heading_leads_there(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        if heading:
            assert heading in headings(file), target


def headings(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_command_that_users_are_told_exists() -> None:
    app = build_app()
    load_plugins().cli_commands(app)
    known = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    for document in ("README.md", "CONTRIBUTING.md", "docs/cli.md", "docs/operations.md"):
        text = (ROOT / document).read_text()
        assert set(re.findall(r"(?:uv run |`|[|] |bin/)darkbloom ([a-z]+)", text)) <= known, document
