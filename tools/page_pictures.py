"""Takes the pictures of the web page in docs/webui, from the demo checkpoints in Debian's Chromium.

    uv run --group browser python tools/page_pictures.py

Looks best where the fonts Inter and DejaVu are installed (Debian: fonts-inter, fonts-dejavu-core).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page

from darkbloom_core.plugins import load_plugins

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import chromium  # noqa: E402  # the folder is only now on the path
from seeing import question  # noqa: E402

FOLDER = ROOT / "docs" / "webui"
DESKTOP = {"viewport": {"width": 1080, "height": 720}}
PHONE = {
    "viewport": {"width": 390, "height": 760},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
SETTINGS = """
[server]
route_plugins = ["webui"]
[memory]
kv_bytes = 1610612736
[engine]
chain = "always"
pack = "never"
"""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The URL of `darkbloom serve --demo` with the page."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "darkbloom.toml"
        config.write_text(SETTINGS)
        command = [sys.executable, "-c", "from darkbloom_core.cli import main; main()"]
        command += ["serve", "--demo", "--port", "0", "--config", str(config)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DARKBLOOM_")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            found = re.search(r"(http://\S+)/v1", process.stdout.readline())
            assert found, "the server did not start"
            yield found[1]
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def requests_of_others(url: str) -> Iterator[None]:
    """Long requests that run meanwhile, so that there is something to see."""
    ended, checkpoints = threading.Event(), load_plugins().checkpoints()

    def ask(model: str, tokens: int) -> None:
        stops = json.loads((checkpoints[model] / "generation_config.json").read_text())["eos_token_id"]
        body = {"model": model, "max_tokens": tokens, "prompt": "Count from 1 to 900.", "stream": True}
        body["logit_bias"] = dict.fromkeys(map(str, stops if isinstance(stops, list) else [stops]), -100)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_bytes():
                if ended.wait(0.2):
                    return

    asked = [("demo/gpt-oss", 120_000), ("demo/gpt-oss", 90_000), ("demo/gemma4", 60_000)]
    threads = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def open_page(browser: Browser, url: str, **options: Any) -> Page:
    page = browser.new_context(reduced_motion="reduce", **options).new_page()
    page.goto(url)
    page.locator("#model:enabled").wait_for()
    return page


def ask(page: Page, model: str, text: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    message = page.get_by_role("textbox", name="Message", exact=True)
    message.fill(text)
    message.press("Enter")
    page.locator(".answer[aria-busy=false] >> nth=-1").wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for()


def add_picture(page: Page, uri: str) -> None:
    data = base64.b64decode(uri.partition(",")[2])
    page.set_input_files("#picture-files", {"name": "picture.png", "mimeType": "image/png", "buffer": data})
    page.locator("#pictures img").wait_for()


def save(page: Page, name: str) -> None:
    """As a PNG of 256 colours, which is a third of the size."""
    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    file = FOLDER / f"{name}.png"
    image.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    seen = question("two", 2)
    with serving() as url, chromium() as browser:
        page = open_page(browser, url, **DESKTOP)
        ask(page, "demo/gpt-oss", "What is 47 plus 38?")
        page.locator("summary").click()
        ask(page, "demo/gpt-oss", "Answer in JSON: what is the capital of Italy?")
        save(page, "chat")

        page = open_page(browser, url, color_scheme="dark", **DESKTOP)
        page.get_by_label("Model", exact=True).select_option("demo/gemma4")
        add_picture(page, seen.uris[0])
        ask(page, "demo/gemma4", seen.text)
        save(page, "picture")

        page = open_page(browser, url, **PHONE)
        ask(page, "demo/gpt-oss", "Hi, who are you?")
        ask(page, "demo/gpt-oss", "List the days of the week.")
        save(page, "phone")

        with requests_of_others(url):
            page = open_page(browser, url, **DESKTOP)
            page.get_by_role("link", name="Server").click()
            page.locator("#plugins .card").first.wait_for()
            page.wait_for_timeout(2500)
            save(page, "server")


if __name__ == "__main__":
    main()
