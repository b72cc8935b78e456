"""Loading is shown as bars on a terminal and as plain lines elsewhere."""

import io

from darkbloom_core.cli._progress import loading_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_one_line_begins_and_one_ends() -> None:
    stream = io.StringIO()
    with loading_progress(stream) as progress_for:
        heard = progress_for("one")
        for done in (0, 1024, 2048, 2048):
            heard(done, 2048)
    first, last = stream.getvalue().splitlines()
    assert first == "loading one"
    assert last.startswith("loaded one: 2 KiB in ")


def test_models_that_load_at_the_same_time_are_told_apart() -> None:
    stream = io.StringIO()
    with loading_progress(stream) as progress_for:
        one, two = progress_for("one"), progress_for("two")
        two(1, 1)
        one(1, 1)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "loading one",
        "loading two",
        "loaded two",
        "loaded one",
    ]


def test_a_terminal_gets_a_bar_that_fills() -> None:
    stream = Terminal()
    with loading_progress(stream) as progress_for:
        heard = progress_for("demo/one")
        heard(512, 1024)
        heard(1024, 1024)
    shown = stream.getvalue()
    assert "loading demo/one" in shown
    assert "1.0/1.0 kB" in shown
