"""The dashboard in a real browser, over a busy office of three Macs in this process: live, usable without a mouse, on a
phone, in the dark, behind a key.

METALSLOTS_SCREENSHOTS=1 also writes the pictures that are in docs/.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serve_app.ingress.auth import KeyBook
from serve_app.keys import own_key
from tests.browser import browser, needs_browser, page_at
from tests.dashboard_office import ANSWER, Served, served_office

pytestmark = [needs_browser, pytest.mark.timeout(120)]

DOCS = Path(__file__).parents[2] / "docs"
DESKTOP = {"viewport": {"width": 1280, "height": 1060}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
# Everything that can have the focus, with the name that a screen reader tells; empty where there is none.
NAMES_OF_FOCUSABLE = """() => [...document.querySelectorAll("a, button, input, select, textarea, [tabindex='0']")]
    .filter(it => it.offsetParent !== null)
    .map(it => (it.labels?.[0] ?? it).textContent.trim() || it.getAttribute("aria-label") || "")"""
WIDER_THAN_THE_WINDOW = "() => document.documentElement.scrollWidth > window.innerWidth"
CONTRASTS = """() => {
    const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b; };
    const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    const rgb = text => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const behind = it => { for (; it; it = it.parentElement) {
        const [r, g, b, a] = rgb(getComputedStyle(it).backgroundColor); if (a === 255) return [r, g, b]; }
        return rgb(getComputedStyle(document.documentElement).backgroundColor).slice(0, 3); };
    return [...document.querySelectorAll("main *, header *")].filter(it => it.offsetParent && !it.closest(".slot")
        && [...it.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !it.matches(":disabled")).map(it => {
        const [a, b] = [rgb(getComputedStyle(it).color).slice(0, 3), behind(it)].map(light).sort((x, y) => y - x);
        return [(a + .05) / (b + .05), it.textContent.trim().slice(0, 40)]; });
}"""


@pytest.fixture(scope="module")
def office() -> Iterator[Served]:
    with served_office() as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


def wait_until_live(page: Any) -> None:
    page.wait_for_selector("#connection[data-state=live]")
    page.wait_for_selector(".mac .slot")


def test_it_is_live_and_loads_nothing_from_elsewhere(office: Served, chromium: Any) -> None:
    with page_at(chromium, f"{office.url}/dashboard") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        wait_until_live(page)
        assert page.locator(".mac").count() == 3
        assert page.locator(".mac").first.locator(".slot").count() == 8
        page.wait_for_selector(".slot.decode")
        before = page.inner_text("#mac-list")
        page.wait_for_function("before => document.getElementById('mac-list').innerText !== before", arg=before)
        assert {urllib.parse.urlsplit(url).netloc for url in asked} == {urllib.parse.urlsplit(office.url).netloc}
        # What a person has marked or reached stays while pictures come in.
        page.focus("#trial-text")
        page.evaluate("window.kept = document.querySelector('.mac')")
        page.wait_for_timeout(1500)
        assert page.evaluate("document.activeElement.id") == "trial-text"
        assert page.evaluate("window.kept === document.querySelector('.mac')")


def test_a_question_is_answered_as_it_is_written_and_shows_where_the_time_went(office: Served, chromium: Any) -> None:
    with page_at(chromium, f"{office.url}/dashboard") as page:
        wait_until_live(page)
        page.fill("#trial-text", "Why is the sky blue?")
        page.fill("#trial-tokens", "40")
        page.press("#trial-tokens", "Enter")
        page.wait_for_function("() => document.getElementById('trial-answer').textContent.length > 2")
        page.wait_for_selector("#trial-timeline .timeline .decode")
        assert page.inner_text("#trial-answer") == ANSWER[:40].rstrip()
        told = page.inner_text("#trial-timeline")
        assert "wrote 40 tokens" in told
        assert "Ended by its longest length" in told
        assert "replica-" in told
        page.fill("#trial-tokens", "8000")
        page.click("#trial button[type=submit]")
        page.wait_for_function("() => !document.getElementById('trial-stop').disabled")
        page.click("#trial-stop")
        page.wait_for_function("() => document.getElementById('trial-stop').disabled")


def test_a_mac_that_dies_is_told_and_comes_back(office: Served, chromium: Any) -> None:
    with page_at(chromium, f"{office.url}/dashboard") as page:
        wait_until_live(page)
        office.office.macs[1].alive = False
        try:
            page.wait_for_selector(".mac.stale .pill.bad")
            assert "mac-studio-2 does not answer." in page.inner_text("#summary")
        finally:
            office.office.macs[1].alive = True
        page.wait_for_function("() => document.querySelectorAll('.mac .pill.good').length === 3")


def test_it_says_when_it_is_not_live_and_goes_on_when_it_can(office: Served, chromium: Any) -> None:
    with page_at(chromium, f"{office.url}/dashboard") as page:
        wait_until_live(page)
        office.office.is_mute = True
        try:
            page.wait_for_selector("#connection[data-state=reconnecting]")
            assert page.evaluate("document.getElementById('page').classList.contains('stale')")
        finally:
            office.office.is_mute = False
        wait_until_live(page)
        assert not page.evaluate("document.getElementById('page').classList.contains('stale')")


def test_it_can_be_used_without_a_mouse_and_without_eyes(office: Served, chromium: Any) -> None:
    with page_at(chromium, f"{office.url}/dashboard") as page:
        wait_until_live(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the Macs"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "macs"
        names = page.evaluate(NAMES_OF_FOCUSABLE)
        assert len(names) > 12
        assert all(names), names
        plot = page.locator(".plot").first
        plot.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert "2 minutes ago: written" in plot.get_attribute("aria-label")
        levels = page.evaluate("[...document.querySelectorAll('h2, h3, h4')].map(it => Number(it.tagName[1]))")
        assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
        texts = page.evaluate("[...document.querySelectorAll('.slot')].map(it => it.textContent)")
        assert all("free" in text or any(verb in text for verb in ("reading", "writing", "waiting")) for text in texts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_against_its_background(office: Served, chromium: Any, scheme: str) -> None:
    with page_at(chromium, f"{office.url}/dashboard", color_scheme=scheme, **DESKTOP) as page:
        wait_until_live(page)
        poor = [(ratio, text) for ratio, text in page.evaluate(CONTRASTS) if ratio < 4.5]
        assert poor == []


def test_a_key_is_asked_for_and_forgotten_again(chromium: Any) -> None:
    key, text = own_key()
    with (
        served_office(book=KeyBook((key,)), busy=False) as guarded,
        page_at(chromium, f"{guarded.url}/dashboard") as page,
    ):
        page.fill("#key", "sk-wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("[role=alert]")
        page.fill("#key", text)
        page.press("#key", "Enter")
        wait_until_live(page)
        assert "metalslots_key" not in page.evaluate("document.cookie")
        assert page.inner_text("#summary") == "All 3 Macs are ready. Nobody waits."
        page.fill("#trial-tokens", "5")
        page.click("#trial button[type=submit]")
        page.wait_for_selector("#trial-timeline .timeline")
        page.click("#sign-out button")
        page.wait_for_selector("#key")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light", {**DESKTOP, "color_scheme": "light"}),
        ("dark", {**DESKTOP, "color_scheme": "dark"}),
        ("phone", {**PHONE, "color_scheme": "light"}),
    ],
)
def test_pictures_under_load(office: Served, chromium: Any, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    with page_at(chromium, f"{office.url}/dashboard", **options) as page:
        wait_until_live(page)
        page.wait_for_selector(".slot.decode")
        page.wait_for_selector(".slot.prefill")
        assert not page.evaluate(WIDER_THAN_THE_WINDOW)
        picture = tmp_path / f"dashboard-{name}.png"
        page.screenshot(path=str(picture))
        assert picture.stat().st_size > 20_000
        if os.environ.get("METALSLOTS_SCREENSHOTS") == "1":
            _keep(picture)


def _keep(picture: Path) -> None:
    """Put a picture into docs/, with as many colours as it needs."""
    from PIL import Image

    Image.open(picture).convert("RGB").quantize(256).save(DOCS / picture.name, optimize=True)
