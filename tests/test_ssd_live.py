"""The cache on disk under real engines and servers: after a restart, or a kill, nothing of a prompt is computed again."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import threading
import time

import httpx
import pytest
from darkbloom_demo import checked_prompts
from darkbloom_ssd_tier._store import Stores
from darkbloom_ssd_tier._tier import SsdTierFactory
from soak import keep, length
from warm import Warm, bits_equal

from darkbloom_core.contracts import Chat, Device, Message, Placement, TextPart, TierContext
from darkbloom_core.plugins import load_plugins
from darkbloom_core.telemetry import SinkEmitter

CHUNK = 256
SETTINGS = """
[prefix]
tiers = ["ssd-tier"]
state_folder = "state"

[options.ssd-tier]
key_store = "file"
"""


def turns(count: int, start: int = 0) -> list[dict[str, str]]:
    """A conversation of so many questions, the last of them without its answer."""
    asked = itertools.islice(itertools.cycle(checked_prompts()), start, start + count)
    messages = [
        {"role": role, "content": text}
        for one in asked
        for role, text in (("user", one.question), ("assistant", one.contains))
    ]
    return messages[:-1]


class NumberCodec:
    """Token ``n`` is the character number ``32 + n``."""

    control_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def token_bytes(self, token):
        return chr(32 + token).encode()


def tiers(folder):
    """Opens the tier as a process does that has just begun."""
    context = TierContext(
        model="m",
        directory=folder / "cache",
        bytes_limit=None,
        options={"key_store": "file", "key_file": str(folder / "key")},
        reserve=lambda size: True,
        emitter=SinkEmitter(),
    )

    def open_tiers():
        tier = SsdTierFactory(Stores()).open(context)
        assert tier.settle()
        return {"ssd-tier": tier}

    return open_tiers


@pytest.mark.parametrize("name", ["demo/gpt-oss", pytest.param("demo/gemma4", marks=pytest.mark.soak)])
def test_a_family_goes_on_from_disk_in_the_chunks_of_a_cold_prompt_and_with_its_bits(name, tmp_path):
    plugins, device = load_plugins(), Device("cpu")
    path = plugins.checkpoints()[name]
    family = plugins.family_for(config := json.loads((path / "config.json").read_text()))
    description = family.describe(config, device)
    codec = family.codec(path, description)
    messages = tuple(Message(role=each["role"], content=(TextPart(each["content"]),)) for each in turns(22))
    ids = codec.encode_chat(Chat(messages=messages)).ids
    assert len(ids) > 2 * CHUNK
    model = family.load(path, description, Placement(device))
    for is_warm in (False, True):
        with Warm(model, codec=NumberCodec(codec.vocab_size), open_tiers=tiers(tmp_path)) as warm:
            ran = warm.run(ids, 6)
            warm.reuse._spill.wait()
            if not is_warm:
                cold = ran
                continue
            stats = warm.status.tiers["ssd-tier"]
            assert warm.is_at_rest()
    assert cold.cached == 0
    assert ran.cached >= len(ids) - 1 - CHUNK
    assert ran.chunks == [chunk for chunk in cold.chunks if chunk[0] >= ran.cached]
    assert ran.tokens == cold.tokens
    assert bits_equal(ran, cold)
    assert (stats.misses, stats.damaged) == (0, 0)
    assert stats.hits > 0


@pytest.fixture
def serve_with_disk(serve, tmp_path):
    """Start a server with the cache on disk; each has the same folder."""
    (tmp_path / "darkbloom.toml").write_text(SETTINGS)
    return lambda *models: serve("--config", "darkbloom.toml", *models)


def ask(serving, model, messages, most=8):
    """One answer's text, and how many of the prompt's tokens there were and were cached."""
    body = {"model": model, "messages": messages, "max_tokens": most, "temperature": 0}
    answer = httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer["choices"][0]["message"], usage["prompt_tokens"], cached


@pytest.mark.soak
def test_a_server_that_starts_again_is_warm(serve_with_disk, run_darkbloom):
    serving = serve_with_disk("demo/gpt-oss")
    answer, length, cached = ask(serving, "demo/gpt-oss", turns(22))
    assert cached == 0
    assert length > 2 * CHUNK
    assert serving.stop(signal.SIGTERM) == 0
    serving = serve_with_disk("demo/gpt-oss")
    again, _, cached = ask(serving, "demo/gpt-oss", turns(22))
    assert again == answer
    assert cached >= length - 1 - CHUNK
    assert serving.stop(signal.SIGTERM) == 0
    said = run_darkbloom("ssd", "verify", "--config", "darkbloom.toml").stdout
    assert ", 0 damaged, 0 removed\n" in said


def test_without_the_plugin_the_tier_is_gone_and_settings_that_name_it_are_an_error(
    run_darkbloom, process_environment, tmp_path
):
    (tmp_path / "darkbloom.toml").write_text(SETTINGS)
    process_environment["DARKBLOOM_BLOCK_PLUGINS"] = "ssd-tier"
    done = run_darkbloom("serve", "--config", "darkbloom.toml", "demo/gpt-oss", code=2)
    assert "no installed plugin offers a tier 'ssd-tier'" in done.stderr
    run_darkbloom("ssd", "status", code=2)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_server_that_is_killed_at_any_moment_leaves_only_sound_files_or_none(
    serve_with_disk, run_darkbloom
):
    """50 times, 5 in a sample, killed while prompts are computed and written, then asked again."""
    chance = random.Random(1)
    kills, sound, with_files = length(50, 5), 0, 0
    for number in range(kills):
        serving = serve_with_disk("demo/gpt-oss")
        asking = threading.Thread(target=_ask_until_it_ends, args=(serving, number))
        asking.start()
        time.sleep(chance.uniform(0.05, 2.5))
        serving.process.send_signal(signal.SIGKILL)
        asking.join(30)
        serving.end()
        said = run_darkbloom("ssd", "verify", "--config", "darkbloom.toml").stdout
        assert ", 0 damaged," in said or "there is no cache" in said, said
        found = re.match(r"(\d+) files are sound", said)
        if found is not None:
            with_files, sound = with_files + (int(found[1]) > 0), int(found[1])
    serving = serve_with_disk("demo/gpt-oss")
    answer, tokens, after_kills = ask(serving, "demo/gpt-oss", turns(22))
    assert serving.stop(signal.SIGTERM) == 0
    serving = serve_with_disk("demo/gpt-oss")
    again, _, cached = ask(serving, "demo/gpt-oss", turns(22))
    assert again == answer
    assert cached >= tokens - 1 - CHUNK
    assert not list(serving.errors.parent.glob("state/tiers/ssd-tier/*/.tmp-*"))
    keep(
        "ssd-kills",
        f"killed {kills} times while prompts were computed and written: 0 files damaged after any, {with_files} times "
        f"there were some, {sound} in the end; {after_kills} of {tokens} tokens came from them, {cached} after a stop",
        {"kills": kills, "damaged": 0, "times_with_files": with_files, "files_in_the_end": sound,
         "prompt_tokens": tokens, "cached_after_kills": after_kills, "cached_after_stop": cached},
    )  # fmt: skip


def _ask_until_it_ends(serving, number):
    for start in itertools.count(number):
        try:
            ask(serving, "demo/gpt-oss", turns(22, start))
        except httpx.HTTPError:
            return
