"""`darkbloom chat` in a real terminal and with a pipe, against a real server."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest
from PIL import Image
from toy_seeing import SeeingFamily
from toy_server import ToyServer

# Makes the terminal the process's own, so that Ctrl-C typed there is a signal, and becomes the command.
ON_ITS_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
]
COMMAND = [sys.executable, "-c", "from darkbloom_core.cli import main; main()", "chat"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {"toy": {}, "seeing": {"sees": True}, "slow": {"seconds": 0.02}, "broken": {"fail_on": 1}}
    with ToyServer(
        tmp_path_factory.mktemp("models"), models, family=SeeingFamily, engine={"default_max_tokens": 200}
    ).running() as it:
        yield it


class Terminal:
    """A process on a terminal of its own: type to it and wait for what it shows."""

    def __init__(self, command, environment):
        self.terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            [*ON_ITS_TERMINAL, *command],
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment,
            start_new_session=True,
        )
        os.close(end)
        self.shown = ""

    def expect(self, text, seconds=30.0):
        """Wait until ``text`` was shown after what was expected before."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown, but {self.shown!r}"
            self._read()
        self.shown = self.shown.partition(text)[2]

    def type(self, text):
        os.write(self.terminal, text.encode())

    def press(self, key, until):
        """Type ``key`` until ``until`` is shown: Python's line editor misses a signal that comes between two waits."""
        for _ in range(10):
            self.type(key)
            again = time.monotonic() + 3
            while until not in self.shown and time.monotonic() < again:
                self._read()
            if until in self.shown:
                break
        self.expect(until)

    def exit_code(self):
        return self.process.wait(10)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)

    def _read(self):
        if select.select([self.terminal], [], [], 0.2)[0]:
            self.shown += os.read(self.terminal, 4096).decode(errors="replace")


@pytest.fixture
def terminal(process_environment, server):
    opened = []

    def open_terminal(*arguments):
        opened.append(Terminal([*COMMAND, "--url", server.url, *arguments], process_environment))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def test_a_pipe_is_answered_line_by_line_with_nothing_but_answers(run_darkbloom, server) -> None:
    done = run_darkbloom("chat", "toy", "--url", server.url, stdin="hello\n\nand again\n")
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout.isprintable() or done.stdout.replace("\n", "").isprintable()
    assert "hello" not in done.stdout
    assert done.stderr == ""


def test_without_an_address_it_serves_the_model_itself(run_darkbloom) -> None:
    said = "What is 12 + 30?\nWhat is the capital of Peru?\n"
    answers = run_darkbloom("chat", "demo/gpt-oss", stdin=said).stdout.splitlines()
    assert answers == ["12 + 30 = 42", "The capital of Peru is Lima."]


def test_without_a_model_the_servers_first_is_asked(run_darkbloom, server) -> None:
    done = run_darkbloom("chat", "--url", server.url, stdin="", code=0)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_refused_turn_is_told_and_the_next_one_is_asked_all_the_same(run_darkbloom, server) -> None:
    done = run_darkbloom("chat", "nobody", "--url", server.url, stdin="a\nb\n", code=1)
    assert done.stdout == ""
    assert [line.startswith("darkbloom: no model 'nobody'") for line in done.stderr.splitlines()] == [
        True
    ] * 2


def test_pictures_are_shown_with_the_first_turn_and_stay_with_the_conversation(
    run_darkbloom, server, tmp_path
) -> None:
    vision = server.engine("seeing").vision
    files = [tmp_path / name for name in ("one.png", "two.png")]
    for file, colour in zip(files, ("red", "blue"), strict=True):
        Image.new("RGB", (32, 32), colour).save(file)
    shown = [word for file in files for word in ("--image", str(file))]
    vision.looks.clear()
    done = run_darkbloom("chat", "seeing", "--url", server.url, *shown, stdin="what?\nand now?\n")
    assert (len(done.stdout.splitlines()), done.stderr) == (2, "")
    assert vision.looks.count("start") == 2  # the second turn's are known by then
    blind = run_darkbloom("chat", "toy", "--url", server.url, *shown, stdin="what?\nand now?\n", code=1)
    assert blind.stderr.count("this model does not accept images") == 2


def test_ctrl_c_stops_an_answer_and_frees_its_row_and_ctrl_d_leaves(terminal, server) -> None:
    chat = terminal("slow")
    chat.expect("> ")
    chat.type("hello\n")
    chat.expect("\n")
    deadline = time.monotonic() + 20
    while server.engine("slow").status().output_tokens < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    chat.type("\x03")
    chat.expect("(stopped)", seconds=2)
    server.wait_until_idle(seconds=2)
    chat.expect("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_at_the_prompt_begins_a_new_line(terminal) -> None:
    chat = terminal("toy")
    chat.expect("> ")
    chat.type("half a senten")
    chat.expect("senten")
    chat.press("\x03", until="> ")
    chat.type("\x04")
    assert chat.exit_code() == 0
