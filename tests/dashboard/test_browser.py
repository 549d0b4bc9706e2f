"""The dashboard in a real browser: every screen, with and without scripts, light and dark, on a phone, by keyboard.

Skipped where no Chromium is found: Debian's package `chromium`, or its path in $KILBURN_CHROMIUM.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import kilburn
from dashboard.made import HOSTILE, SCRIPT, WIDE, work
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.export import write
from kilburn.dashboard.screens import SCREENS
from waiting import until

CHROMIUM = os.environ.get("KILBURN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

if CHROMIUM is None:
    pytest.skip("no browser: install Debian's chromium, or set KILBURN_CHROMIUM", allow_module_level=True)

sync_api = pytest.importorskip("playwright.sync_api")
uvicorn = pytest.importorskip("uvicorn")

pytestmark = pytest.mark.slow

PAGES = {
    path: f"{path}?{urlencode({'name': 'parser', 'address': 'p4', 'q': 'strips', 'user': 'ana', 'of': '@document/handbook'})}"
    for path in SCREENS
    if path != "/receipt"
}
MORE = {
    "kv": "/cache?name=cached",
    "alarms": "/window?name=misses",
}
"""Screens in a state that has more on it, by the names of their pictures."""
AGENTS = {
    "sub-agents": "/branches?name=work",
    "recursive": "/branches?name=ask",
    "calls": "/calls?name=ask",
    "cell": "/calls?name=ask&cell=p4",
}
"""The same, of a store of agents."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        # In a container there is often no sandbox for root; what is shown here is our own.
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Served:
    """A dashboard that runs."""

    def __init__(self, path: Path) -> None:
        self.backend = Sqlite(path, readonly=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        app = build(self.backend, every=0.05, ending=lambda: self.server.should_exit)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=60))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.backend.close()


@pytest.fixture(scope="module")
def served(made: Path) -> Iterator[str]:
    running = Served(made)
    yield running.url
    running.close()


@pytest.fixture(scope="module")
def agents(worked: Path) -> Iterator[str]:
    running = Served(worked)
    yield running.url
    running.close()


class Seen:
    """A page of the browser, and all that went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}") or dialog.dismiss())
        self.page.on("request", lambda request: self.asked.append(request.url))


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = Seen(context)
    yield found
    context.close()
    assert not found.wrong


def test_every_link_of_every_screen_leads_somewhere(seen: Seen, served: str, agents: str) -> None:
    for url, paths in ((served, [*PAGES.values(), *MORE.values()]), (agents, [*AGENTS.values()])):
        links: dict[str, str] = {}
        for path in paths:
            assert seen.page.goto(url + path).status == 200
            for link in seen.page.locator("a[href]").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))"):
                # One of each kind: there are thousands of pages.
                links.setdefault(re.sub(r"=[^&]*", "", link), link)
        for link in (one for one in links.values() if not one.startswith("#")):
            assert seen.page.goto(url + link).status == 200, link


def test_calls_are_opened_one_by_one(seen: Seen, agents: str) -> None:
    page = seen.page
    page.goto(f"{agents}/branches?name=ask")
    page.get_by_role("link", name="the steps and their calls").click()
    page.locator("details.left summary").first.click()
    page.get_by_role("link", name="Open the 12 calls").click()
    page.locator("details.left summary", has_text="line 5").click()
    assert "LINE 5" in page.locator("details[open] pre").last.inner_text()
    assert page.locator("main img, main script").count() == 0
    assert "broken in" not in page.title()


def test_a_reader_walks_from_an_alarm_to_the_words_that_left(seen: Seen, served: str) -> None:
    page = seen.page
    page.goto(served)
    page.get_by_role("link", name="misses").click()
    assert "hit rate 52%" in page.locator("main").inner_text()
    page.get_by_role("navigation", name="Session").get_by_role("link", name="Receipts").click()
    picture(page, "receipts-wide", odd=False)
    page.locator("tbody a[href*='/receipt?']").last.click()
    assert page.get_by_role("heading", name="Before and after").is_visible()
    picture(page, "receipt-wide", odd=False)
    page.locator("details.left summary").first.click()
    assert page.locator("details.left pre").first.is_visible()
    page.locator("details.left .back a").first.click()
    assert page.get_by_role("heading", name="History").is_visible()
    page.get_by_role("link", name="Exact plain text").click()
    # The browser makes its <pre> before the text has come.
    page.locator("pre", has_text=re.compile(r"\S")).wait_for()


def test_the_strip_names_what_the_pointer_and_the_keys_are_on(seen: Seen, served: str) -> None:
    page = seen.page
    page.goto(f"{served}/session?name=parser")
    picture(page, "session-wide", odd=False)
    readout = page.locator("[data-readout]")
    page.locator(".blocks rect.k-fold").first.hover()
    assert re.match(r"summary f\d+, \d+ tokens", readout.inner_text())
    page.get_by_role("link", name="Prompt at message 128").focus()
    assert readout.inner_text().startswith("Prompt at message 128")
    page.keyboard.press("ArrowLeft")
    assert readout.inner_text().startswith("Prompt at message 12")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert re.match(r"\w+ (p|f)\d+", readout.inner_text()) or "tokens" in readout.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/page?**")


def test_a_search_is_made_by_keyboard(seen: Seen, served: str) -> None:
    page = seen.page
    page.goto(served)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_role("searchbox", name="Search everything").fill("tea")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?**")
    assert "prefers tea" in page.locator("main").inner_text()


def test_hostile_contents_stay_text(seen: Seen, served: str) -> None:
    page = seen.page
    for path in PAGES:
        for address in ("p3", "p5", "p7", "p9", "p13", "p15", "p16", "f1"):
            page.goto(f"{served}{path}?{urlencode({'name': HOSTILE, 'address': address, 'q': SCRIPT, 'user': HOSTILE})}")
            assert "broken in" not in page.title()
            assert page.locator("main img, main script, main b, main iframe").count() == 0
    # What Chromium says of a page that is not there is no error of ours.
    seen.wrong[:] = [said for said in seen.wrong if "status of 404" not in said]


def test_every_control_has_a_name_and_every_table_its_heads(seen: Seen, served: str, agents: str) -> None:
    page = seen.page
    mine = [served + path for path in (*PAGES.values(), *MORE.values())]
    for path in (*mine, *(agents + path for path in AGENTS.values())):
        page.goto(path)
        nameless = page.evaluate(NAMELESS)
        assert nameless == [], path
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
        assert page.locator("html[lang=en]").count() == page.locator("main").count() == page.locator("header.top").count() == 1
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), path
        assert page.locator("table:not(.plain):not(:has(thead th))").count() == 0
        tree = page.locator("main").aria_snapshot()
        assert "- heading" in tree


NAMELESS = """() => {
    const named = (one) => {
        const by = one.getAttribute('aria-labelledby');
        return one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.[0]?.textContent ||
            (by && document.getElementById(by)?.textContent);
    };
    return [...document.querySelectorAll('a, button, input:not([type=hidden]), svg[role], summary, nav, [role=region]')]
        .filter((one) => !one.closest('[aria-hidden=true]') && !named(one)).map((one) => one.outerHTML.slice(0, 100));
}"""

CONTRAST = """() => {
    const light = (rgb) => rgb.map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (one) => {
        for (; one; one = one.parentElement) {
            const [r, g, b, a = 1] = parse(getComputedStyle(one).backgroundColor);
            if (a > 0) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const faint = [];
    for (const one of document.querySelectorAll('body *')) {
        const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || one.closest('svg') || !one.getClientRects().length || one.matches('.unseen, .skip')) continue;
        const [a, b] = [light(parse(getComputedStyle(one).color).slice(0, 3)), light(behind(one))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(one.outerHTML.slice(0, 120));
    }
    return faint;
}"""


def picture(page: Any, name: str, odd: bool) -> None:
    """Keep a picture of the page in the folder $KILBURN_PICTURES, if it is set."""
    folder = os.environ.get("KILBURN_PICTURES")
    if folder and not odd:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_and_a_phone_has_room(browser: Any, served: str, agents: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    seen = Seen(context)
    wide = [f"{path}?{urlencode({'name': WIDE, 'address': 'p1', 'user': WIDE, 'q': 'w' * 400})}" for path in PAGES]
    named = {path.strip("/") or "sessions": served + url for path, url in PAGES.items()}
    named |= {name: served + path for name, path in MORE.items()} | {name: agents + path for name, path in AGENTS.items()}
    for name, path in [*named.items(), *(("", served + path) for path in wide if not path.startswith("/collection"))]:
        seen.page.goto(path)
        # What is worked out comes by itself.
        seen.page.locator("[data-again]").first.wait_for(state="detached")
        seen.page.evaluate("document.querySelectorAll('main details.left').forEach((one, at) => (one.open = at < 2))")
        picture(seen.page, f"{name}-{scheme}", not name)
        assert seen.page.evaluate(CONTRAST) == [], path
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, path
    context.close()
    assert not seen.wrong


def test_it_works_without_scripts(browser: Any, served: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    seen = Seen(context)
    page = seen.page
    page.goto(served)
    page.get_by_role("link", name="parser", exact=True).click()
    page.get_by_role("link", name="20 prompts", exact=True).click()
    page.get_by_role("link", name="Earlier").click()
    page.get_by_role("link", name="Prompt at message").last.click()
    assert "The window at message" in page.locator("h2").inner_text()
    context.close()
    assert not seen.wrong


def test_a_page_follows_the_ledger(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("busy")
        work(session, 3)
        running = Served(path)
        try:
            seen.page.goto(f"{running.url}/window?name=busy")
            seen.page.get_by_role("button", name="Keep this page up to date").wait_for()
            seen.page.evaluate("window.kept = 1")
            session.append({"role": "user", "content": "Something new."})
            seen.page.get_by_role("cell", name="Something new.").first.wait_for()
            assert seen.page.evaluate("window.kept") == 1
        finally:
            seen.page.goto("about:blank")
            running.close()


def test_an_export_needs_nothing_else_and_has_no_words(browser: Any, made: Path, tmp_path: Path) -> None:
    with Sqlite(made, readonly=True) as backend:
        write(backend, tmp_path / "redacted.html")
        write(backend, tmp_path / "whole.html", "parser", redact=False)
    for name, words in (("redacted.html", False), ("whole.html", True)):
        context = browser.new_context(offline=True)
        seen = Seen(context)
        seen.page.goto((tmp_path / name).as_uri())
        text = seen.page.locator("body").inner_text()
        assert "parser" in text
        assert seen.page.locator("svg[role=group]").count() >= 1
        source = (tmp_path / name).read_text(encoding="utf-8")
        assert ("I look at part" in source) == words
        assert "<script" not in source
        assert "href=" not in source
        assert seen.asked == [(tmp_path / name).as_uri()]
        context.close()
        assert not seen.wrong


def test_open_pages_do_not_keep_it_from_ending(seen: Seen, made: Path) -> None:
    running = Served(made)
    seen.page.goto(running.url)
    seen.page.get_by_role("button", name="Keep this page up to date").wait_for()
    running.server.should_exit = True
    until(lambda: not running.thread.is_alive())
    running.close()
    assert not running.thread.is_alive()
    seen.wrong.clear()
