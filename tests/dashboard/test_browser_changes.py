"""Changes by hand in a real browser: in the dashboard of its own that may write, and within a gateway, behind its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kilburn
from dashboard.made import make
from dashboard.test_browser import CHROMIUM, CONTRAST, NAMELESS, Seen, picture, sync_api
from gateway.place import Place
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.behind_keys import mounted
from kilburn.dashboard.changes import OwnHands, Visit, fresh_word
from kilburn.gateway.keys import Key
from kilburn.testing.upstream import serving
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Seen]]:
    """Opens pages of a browser, in which nothing may go wrong."""
    with ExitStack() as stack:
        all_of_them: list[Seen] = []

        def look(**options: Any) -> Seen:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
            stack.callback(context.close)
            all_of_them.append(Seen(context))
            return all_of_them[-1]

        yield look
        assert [wrong for seen in all_of_them for wrong in seen.wrong] == []


@pytest.fixture
def writing(tmp_path: Path, stack: ExitStack) -> tuple[str, Path]:
    """A dashboard that may write, and its store."""
    path = make(tmp_path / "agent.db")
    backend = stack.enter_context(Sqlite(path, readonly=True))
    return stack.enter_context(serving(build(backend, visit=Visit(fresh_word(), OwnHands(path, "default"))))), path


def receipts(path: Path, name: str = "parser") -> list[Any]:
    with kilburn.open(str(path), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        return store.session(name).ledger.receipts()


def stretch(path: Path) -> str:
    """A range of pages that may be compacted."""
    with kilburn.open(str(path), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        session = store.session("parser")
        there = [page.address for page in session.window.resident() if page.id > 0 and page.id not in session.window.pins]
        return f"{there[0]}-{there[-4]}"


@pytest.mark.parametrize("scripts", [True, False])
def test_a_range_is_compacted_and_taken_back(opened: Callable[..., Seen], writing: tuple[str, Path], scripts: bool) -> None:
    url, path = writing
    page = opened(java_script_enabled=scripts).page
    page.goto(f"{url}/session?name=parser")
    page.get_by_role("link", name="Preview and change").click()
    page.get_by_role("textbox", name="Pages").first.fill(stretch(path))
    page.get_by_role("form", name="Compact a range").get_by_role("button").click()
    assert page.get_by_text("processed again").is_visible()
    before = len(receipts(path))
    page.get_by_role("button", name="Compact now").click()
    assert "Compacted." in page.get_by_role("status").inner_text()
    assert page.get_by_role("heading", name="Receipts").is_visible()
    made = receipts(path)
    assert len(made) == before + 1
    assert made[-1].policy == "compact on demand"
    page.get_by_role("link", name="Undo the newest").click()
    other = page.context.new_page()
    other.goto(page.url)
    page.get_by_role("button", name="Undo now").click()
    assert "The compaction was undone" in page.get_by_role("status").inner_text()
    assert len(receipts(path)) == before + 2
    other.get_by_role("button", name="Undo now").click()
    assert "something else has happened" in other.locator("main").inner_text()
    assert len(receipts(path)) == before + 2


def test_pages_are_let_go_and_kept_and_facts_decided(opened: Callable[..., Seen], writing: tuple[str, Path]) -> None:
    url, path = writing
    seen = opened()
    page = seen.page
    page.goto(f"{url}/window?name=parser")
    button = page.get_by_role("button", name="Evict: p").last
    address = button.get_attribute("aria-label").partition(": ")[2]
    button.click()
    assert "Evicted." in page.get_by_role("status").inner_text()
    assert receipts(path)[-1].left == (address,)
    page.goto(f"{url}/page?name=parser&address={address}")
    page.get_by_role("button", name=f"Pin: {address}").click()
    assert "pinned" in page.locator("dl.card").inner_text()
    page.get_by_role("button", name="Unpin").click()
    page.goto(f"{url}/memory?user=ana")
    page.get_by_role("button", name="Accept: f3").click()
    assert "the fact is in force now" in page.get_by_role("status").inner_text()
    assert page.get_by_text("Proposed facts").count() == 0


SHOWN = [
    "/change?name=parser&show=compact&pages=RANGE",
    "/change?name=parser&show=undo",
    "/change?name=parser&show=leaves&tokens=900",
    "/change?name=parser&show=diff&turn=3&until=60",
    "/window?name=parser&done=evict",
    "/memory?user=ana",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forms_have_names_stand_out_and_fit_a_phone(opened: Callable[..., Seen], writing: tuple[str, Path], scheme: str) -> None:
    url, db = writing
    page = opened(viewport={"width": 390, "height": 800}, color_scheme=scheme).page
    for path in SHOWN:
        page.goto(url + path.replace("RANGE", stretch(db)))
        assert page.evaluate(NAMELESS) == [], path
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids)), path
        assert page.evaluate(CONTRAST) == [], path
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        picture(page, f"changes-{SHOWN.index(path)}-{scheme}", False)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_person_signs_in_at_a_gateway_changes_a_prompt_and_signs_out(
    opened: Callable[..., Seen], tmp_path: Path, stack: ExitStack, scripts: bool
) -> None:
    it = Place(tmp_path, stack, {"ana": Key(tenant="acme", user="ana"), "bob": Key(tenant="acme", user="bob")}, mounted())
    for number in range(5):
        it.say(f"Number {number}: src/m{number}.py has a fault. " * 4, "ana", "work")
    it.talk, talk = [], it.talk
    it.say("I am bob.", "bob", "bob's")
    seen = opened(java_script_enabled=scripts)
    page = seen.page
    page.goto(f"{it.url}/dashboard/window?name=work")
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(CONTRAST) == []
    picture(page, "sign-in", scripts)
    page.get_by_label("Key of the gateway").fill("kilburn-00000000-" + "A" * 43)
    page.get_by_role("button", name="Sign in").click()
    assert "unknown here" in page.get_by_role("alert").inner_text()
    page.get_by_label("Key of the gateway").fill(it.keys["ana"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="The window now").wait_for()
    # What Chromium says of an answer that is a page to sign in is no error of ours.
    seen.wrong[:] = [said for said in seen.wrong if "status of 401" not in said]
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Evict: p3").click()
    assert "Evicted." in page.get_by_role("status").inner_text()
    it.talk = talk
    assert "src/m1.py" not in str(it.say("And now?", "ana", "work")["messages"])
    page.get_by_role("link", name="Sessions").first.click()
    names = page.locator("th[role=rowheader] a").all_inner_texts()
    assert names == ["work"]
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Key of the gateway").wait_for()
    page.go_back()
    until(lambda: "Key of the gateway" in page.content())
    seen.wrong[:] = [said for said in seen.wrong if "status of 401" not in said]


def test_a_page_in_a_gateway_follows_the_ledger(opened: Callable[..., Seen], tmp_path: Path, stack: ExitStack) -> None:
    it = Place(tmp_path, stack, {}, mounted())
    it.say("Hello.")
    page = opened().page
    page.goto(f"{it.url}/dashboard/window?name=work")
    page.get_by_role("button", name="Keep this page up to date").wait_for()
    page.evaluate("window.kept = 1")
    it.say("Something new is said.")
    page.get_by_role("cell", name="Something new is said.").first.wait_for()
    assert page.evaluate("window.kept") == 1
    page.goto("about:blank")
