"""The demo checkpoints answer through the API, and `darkbloom demo` shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from darkbloom_demo import checked_prompts
from openai import AuthenticationError, OpenAI

from darkbloom_core.cli import CommandContext, main, running_server
from darkbloom_core.plugins import load_plugins

MODELS = ("demo/gpt-oss", "demo/gemma4")
PROMPTS = checked_prompts()
SOME_OR_ALL = ("some", pytest.param("all", marks=pytest.mark.soak))
"""Every third prompt, and one with tools of each task of a checkpoint; the long runs ask them all."""


@pytest.fixture(scope="module")
def client():
    with (
        running_server(CommandContext(load_plugins()), demo=True) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client,
    ):
        yield client


def test_nobody_else_gets_into_a_commands_own_server(client) -> None:
    other = client.with_options(api_key="none")  # it shares the client's connections
    with pytest.raises(AuthenticationError):
        other.models.list()


def ask(client, model, question) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


def ask_streamed(client, model, question) -> str:
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


@pytest.mark.parametrize("asked", SOME_OR_ALL)
@pytest.mark.parametrize("model", MODELS)
def test_checked_prompts_are_answered_right(client, model, asked) -> None:
    prompts = PROMPTS if asked == "all" else PROMPTS[::3]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: ask(client, model, prompt.question), prompts))
    wrong = {
        prompt.question: answer
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.contains not in answer
    }
    assert wrong == {}


@pytest.mark.parametrize("model", MODELS)
def test_a_streamed_answer_is_the_whole_answer(client, model) -> None:
    for prompt in PROMPTS[:2]:
        assert ask_streamed(client, model, prompt.question) == ask(client, model, prompt.question)


def requests_with_tools():
    """Those in a checkpoint's own file, in the shape of the API, with what must come of them."""
    for model, folder in load_plugins().checkpoints().items():
        file = folder / "prompts.json"
        for request in json.loads(file.read_text()) if file.exists() else ():
            if "tools" in request:
                yield model, request


@pytest.mark.parametrize("asked", SOME_OR_ALL)
def test_prompts_with_tools_of_a_checkpoints_own_file_are_answered_right(client, asked) -> None:
    fields = ("messages", "tools", "tool_choice", "reasoning_effort")

    def answer(asked):
        model, request = asked
        given = {field: request[field] for field in fields if field in request}
        message = client.chat.completions.create(model=model, temperature=0, **given).choices[0].message
        calls = [
            {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            for call in message.tool_calls or ()
        ]
        return message.content or None, calls

    requests = list(requests_with_tools())
    if asked == "some":
        requests = list({(model, request["task"]): (model, request) for model, request in requests}.values())
    assert len(requests) >= 5
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, requests))
    expected = [(request["answer"] or None, request.get("calls", [])) for _, request in requests]
    assert answers == expected


def test_a_question_was_never_checked_twice() -> None:
    assert len({prompt.question for prompt in PROMPTS}) == len(PROMPTS)


def run_demo() -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DARKBLOOM_")}
    quick = {"DARKBLOOM_ENGINE__CHAIN": "always", "DARKBLOOM_ENGINE__PACK": "never"}
    done = subprocess.run(
        [sys.executable, "-c", "from darkbloom_core.cli import main; main()", "demo"],
        env={**kept, **quick},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_command_says_what_was_loaded_by_which_plugin_and_answers() -> None:
    *loaded, where, _, asked, answer = run_demo().stdout.splitlines()
    assert [line.split(" ")[0] for line in loaded] == ["demo/gpt-oss:", "demo/gemma4:"]
    for line, distribution in zip(loaded, ("darkbloom-gpt-oss", "darkbloom-gemma4"), strict=True):
        assert f"({distribution} " in line
    assert where.startswith("serving at http://127.0.0.1:")
    assert asked == "demo/gpt-oss is asked: What is the capital of France?"
    assert answer == "The capital of France is Paris."


@pytest.fixture
def demo_here(monkeypatch, capsys):
    """The same command in this process; gives its exit code and what it wrote."""
    monkeypatch.setenv("DARKBLOOM_ENGINE__CHAIN", "always")
    monkeypatch.setenv("DARKBLOOM_ENGINE__PACK", "never")

    def run(*arguments: str):
        with pytest.raises(SystemExit) as left:
            main(["demo", *arguments])
        return left.value.code, capsys.readouterr()

    return run


@pytest.mark.soak
def test_the_other_checkpoint_can_be_asked(demo_here) -> None:
    code, said = demo_here("What is 12 + 30?", "--model", "demo/gemma4")
    assert (code, said.out.splitlines()[-1]) == (0, "12 + 30 = 42")


def test_a_model_that_is_not_there_is_refused_with_those_that_are(demo_here) -> None:
    code, said = demo_here("--model", "gpt-5")
    assert code == 2
    (line,) = said.err.splitlines()
    assert line.startswith("darkbloom: no model 'gpt-5'")
    assert "offered: demo/gemma4, demo/gpt-oss" in line
