"""Loading is shown as bars on a terminal and as plain lines elsewhere."""

import io

import pytest

from darkbloom_core.cli._progress import loading_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_one_line_begins_and_one_ends() -> None:
    stream = io.StringIO()
    with loading_progress(stream) as loading, loading("one") as report:
        for done in (0, 1024, 2048, 2048):
            report(done, 2048)
        assert stream.getvalue() == "loading one\n"
    assert stream.getvalue().splitlines()[1].startswith("loaded one: 2 KiB in ")


def test_a_family_need_not_report() -> None:
    for stream, said in ((io.StringIO(), "loaded one: in "), (Terminal(), "loading one")):
        with loading_progress(stream) as loading, loading("one"):
            pass
        assert said in stream.getvalue()


def test_what_failed_to_load_is_not_called_loaded() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), loading_progress(stream) as loading, loading("one"):
        raise RuntimeError
    assert stream.getvalue() == "loading one\n"


def test_a_terminal_gets_a_bar_that_fills() -> None:
    stream = Terminal()
    with loading_progress(stream) as loading, loading("demo/one") as report:
        report(512, 1024)
        report(1024, 1024)
    shown = stream.getvalue()
    assert "loading demo/one" in shown
    assert "1.0/1.0 kB" in shown
