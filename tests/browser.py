"""A real browser for tests: Debian's or anybody's Chromium, found on the PATH, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 30_000


def find_browser() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(find_browser() is None, reason=f"needs one of {', '.join(NAMES)} on the PATH")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, which is who tests are in a container.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def page_at(running: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page in a context of its own; an error in its scripts, or a file that it cannot load, fails the test."""
    context = running.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.goto(url)
    try:
        yield page
        assert faults == []
    finally:
        context.close()
