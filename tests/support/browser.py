"""Debian's Chromium without a window, driven by Playwright; it can look up no name but this machine's."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

SWITCHES = (
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a fresh profile. Each of its contexts begins without cookies and storage."""
    program = shutil.which("chromium")
    assert program, "these tests need Chromium: .ci/run installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(SWITCHES), headless=True)
        try:
            yield browser
        finally:
            browser.close()
