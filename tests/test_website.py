"""The documentation as a site: built from a copy of the checkout, checked as files, and looked at in a browser."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zensical", reason="the site's builder is not installed: pip install '.[docs]' in the checkout")

import website

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = os.environ.get("KILBURN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
BLOCKS = {"h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "td", "th", "pre", "blockquote", "em", "strong", "img", "hr"}

pytestmark = pytest.mark.slow


def run(checkout: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(checkout / "docs" / "website.py"), "--no-pictures", *args],
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the site is made of, with a page that is new, and the site of two versions of it."""
    copy = tmp_path_factory.mktemp("site") / "checkout"
    for name in ("docs", "examples", "lab/recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("reference", "__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "changelog.d/README.md"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    (copy / "docs" / "howto" / "brand-new.md").write_text(
        "# Brand new\n\n[The rules](../../CONTRIBUTING.md#the-rules-of-the-house)\n"
    )
    for release in ("0.9.0", "0.10.0"):
        done = run(copy, "--release", release)
        assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.fixture(scope="module")
def site(checkout: Path) -> Path:
    return checkout / "build" / "site" / "0.10.0"


def read(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_in_one_of_four_groups(checkout: Path, site: Path) -> None:
    start = read(site, "howto/forget.html")
    menu = start[start.index('data-md-type="navigation"') : start.index("<article")]
    listed = {os.path.normpath(f"howto/{link}") for link in re.findall(r'href="([^"#]+)"', menu)}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert "howto/brand-new.html" in pages
    # Of the current page, the navigation names what stands on it.
    assert pages - listed <= {"howto/forget.html"}
    tabs = re.search(r'<ul class="md-tabs__list">(.*?)</ul>', start, re.DOTALL)
    assert tabs is not None
    assert re.sub(r"<[^>]+>|\s+", " ", tabs[1]).split() == ["Home", "Tutorial", "How-to", "Explanation", "Reference"]


def test_all_links_of_the_site_lead_somewhere_and_nothing_foreign_is_loaded(site: Path) -> None:
    assert website.faults(site) == []


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ('<a href="nowhere.html">x</a>', "index.html: nowhere.html leads nowhere"),
        ('<a href="howto/forget.html#not-there">x</a>', "index.html: howto/forget.html#not-there has no such anchor"),
        ('<script src="https://unpkg.com/x.js"></script>', "index.html: loads https://unpkg.com/x.js"),
        ('<link rel="preconnect" href="https://fonts.gstatic.com">', "index.html: loads https://fonts.gstatic.com"),
        ('<img src="//cdn.example.org/a.png">', "index.html: loads //cdn.example.org/a.png"),
    ],
)
def test_the_check_sees_what_is_wrong(site: Path, tmp_path: Path, broken: str, says: str) -> None:
    copy = tmp_path / "0.10.0"
    shutil.copytree(site, copy)
    page = copy / "index.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</article>", broken + "</article>"), encoding="utf-8")
    assert website.faults(copy) == [says]


def test_the_check_sees_a_font_from_elsewhere_and_a_page_without_its_policy(site: Path, tmp_path: Path) -> None:
    copy = tmp_path / "0.10.0"
    shutil.copytree(site, copy)
    (copy / "assets" / "more.css").write_text('@font-face { src: url("https://fonts.example.org/a.woff2") }')
    page = copy / "index.html"
    page.write_text(page.read_text(encoding="utf-8").replace("Content-Security-Policy", "x"), encoding="utf-8")
    assert len(website.faults(copy)) == 2


def test_a_dead_link_stops_the_build_and_leaves_the_site_that_was_there(checkout: Path, site: Path) -> None:
    before = read(site, "index.html")
    page = checkout / "docs" / "howto" / "brand-new.md"
    good = page.read_text()
    page.write_text(good + "\n[gone](gone.md)\n")
    try:
        done = run(checkout, "--release", "0.10.0")
    finally:
        page.write_text(good)
    assert done.returncode == 1
    assert "howto/brand-new.html: gone.html leads nowhere" in done.stderr
    assert read(site, "index.html") == before
    assert sorted(path.name for path in site.parent.iterdir()) == [
        "0.10.0",
        "0.9.0",
        "index.html",
        "versions.html",
        "versions.json",
    ]


def test_versions_stand_side_by_side_and_the_newest_opens(site: Path) -> None:
    out = site.parent
    assert json.loads((out / "versions.json").read_text()) == ["0.10.0", "0.9.0"]
    assert 'url=0.10.0/index.html"' in read(out, "index.html")
    listed = re.findall(r'href="([^"]+)"', read(out, "versions.html"))
    assert listed == ["0.10.0/index.html", "0.9.0/index.html"]
    assert all((out / name).is_file() for name in listed)
    assert 'href="../../versions.html"' in read(out, "0.9.0/howto/forget.html")
    assert "Kilburn 0.9.0 ·" in read(out, "0.9.0/howto/forget.html")


@pytest.mark.parametrize("release", ["../elsewhere", "", ".hidden", "versions.html"])
def test_a_version_is_the_name_of_a_folder(checkout: Path, release: str) -> None:
    done = run(checkout, "--release", release)
    assert done.returncode == 2
    assert "cannot be a folder's name" in done.stderr


def test_a_folder_that_is_no_site_is_not_replaced(checkout: Path, tmp_path: Path) -> None:
    kept = tmp_path / "letters" / "kept.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    done = run(checkout, "--out", str(tmp_path), "--release", "letters")
    assert done.returncode == 2
    assert "is there and is no site" in done.stderr
    assert kept.read_text() == "mine"


def test_the_first_page_shows_figures_that_were_measured(site: Path) -> None:
    measured = json.loads((ROOT / "docs" / "explanation" / "performance.json").read_text())
    rows = {row["what"]: row for part in measured for row in part["ratios"]}
    text = re.sub(r"<[^>]+>", "", read(site, "index.html"))
    for name, words in website.SHOWN.items():
        found = re.search(re.escape(words).replace("'", "(?:'|&#39;)") + r"\s+([\d.,]+)( ?%| ms)", text)
        assert found, words
        value = rows[name]["measured"] * (100 if found[2] == "%" else 1)
        assert float(found[1].replace(",", "")) == pytest.approx(value, rel=0.01)


class Structure(website.HTMLParser):
    """How often each kind of block stands in a page, or in its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.found[tag] += 1


def test_the_site_shows_the_lists_tables_and_blocks_that_github_shows(checkout: Path, site: Path) -> None:
    from markdown_it import MarkdownIt

    github = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    for path in sorted((checkout / "docs").rglob("*.md")):
        name = path.relative_to(checkout / "docs").with_suffix(".html").as_posix()
        if name == "index.html" or name.startswith("reference/"):
            continue  # The first page has figures on the site, and the reference is not on GitHub.
        page = read(site, name)
        article = page[page.index("<article") : page.index("</article>")]
        assert Structure(article).found == Structure(github.render(path.read_text(encoding="utf-8"))).found, name


def test_a_block_has_no_note_for_the_tests_and_its_file_as_its_title(site: Path) -> None:
    page = read(site, "howto/command-line.html")
    assert "no-run" not in page
    assert '<span class="filename">run.jsonl</span>' in page


# --- in a browser ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no browser: install Debian's chromium, or set KILBURN_CHROMIUM")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module", params=["file", "http"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """The site opened from its folder, and from a server."""
    if request.param == "file":
        yield site.as_uri()
        return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site.parent)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/0.10.0"
    server.shutdown()
    server.server_close()
    thread.join()


class Visit:
    """A page of the browser, with all that went wrong in it and all that it asked for."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def end(self, address: str) -> None:
        self.context.close()
        assert self.wrong == []
        elsewhere = [url for url in self.asked if not url.startswith((address.rpartition("/")[0], "data:"))]
        assert elsewhere == []


def test_the_search_finds_without_a_network(browser: Any, address: str) -> None:
    visit = Visit(browser, viewport={"width": 1280, "height": 900}, offline=address.startswith("file:"))
    visit.page.goto(f"{address}/index.html")
    visit.page.keyboard.press("/")
    visit.page.get_by_placeholder("Search").wait_for()
    visit.page.keyboard.type("forget", delay=40)
    visit.page.get_by_text(re.compile(r"^\d+ results$")).wait_for()
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_url("**/howto/forget.html*")
    assert visit.page.locator("h1").inner_text().startswith("Forget something")
    visit.end(address)


def test_the_first_page_says_in_one_screen_what_it_is_for_whom_and_how_well(browser: Any, site: Path) -> None:
    visit = Visit(browser, viewport={"width": 1280, "height": 900})
    visit.page.goto(f"{site.as_uri()}/index.html")
    for words in ("A one-level store for LLM agents", "compare mechanisms", "python3 run.py test", *website.SHOWN.values()):
        place = visit.page.locator("article").get_by_text(words).first.bounding_box()
        assert place["y"] + place["height"] <= 900, words
    visit.end(site.as_uri())


FAINT = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, at) => c * a + under[at] * (1 - a));
    const behind = (one) => one ? over(parse(getComputedStyle(one).backgroundColor), behind(one.parentElement)) : [255, 255, 255];
    const light = (rgb) => rgb.map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
    return [...document.querySelectorAll('body *')].filter((one) => {
        const says = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        // The mark of a heading's own link shows when the pointer is on it.
        const own = one.matches('.headerlink, .md-skip');
        const seen = one.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !own;
        if (!says || !seen || one.closest('svg')) return false;
        const ground = behind(one);
        const [a, b] = [light(over(parse(getComputedStyle(one).color), ground)), light(ground)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05) < 4.5;
    }).map((one) => `${one.outerHTML.slice(0, 120)} ${getComputedStyle(one).color}`);
}"""
"""The elements whose words stand out too little from what is behind them."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out(browser: Any, site: Path, scheme: str) -> None:
    visit = Visit(browser, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    for name in ("index", "howto/write-a-policy", "howto/command-line", "explanation/policies", "reference/cli"):
        visit.page.goto(f"{site.as_uri()}/{name}.html")
        assert visit.page.evaluate(FAINT) == [], name
    visit.end(site.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_on_a_phone_in_the_light_and_in_the_dark(browser: Any, address: str, scheme: str) -> None:
    visit = Visit(browser, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    for name in ("index", "explanation/policies", "howto/gateway", "reference/cli", "design/architecture"):
        visit.page.goto(f"{address}/{name}.html")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert visit.page.locator("h1").count() == 1
        ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(float, re.findall(r"[\d.]+", ground)[:3])) < 60) is (scheme == "dark")
    visit.end(address)


def test_the_keyboard_reaches_the_text_and_the_navigation(browser: Any, address: str) -> None:
    visit = Visit(browser, viewport={"width": 1280, "height": 900})
    visit.page.goto(f"{address}/howto/forget.html")
    visit.page.keyboard.press("Tab")
    assert "Skip to content" in visit.page.evaluate("document.activeElement.textContent")
    visit.page.keyboard.press("Tab")
    names = []
    for _ in range(8):
        names.append(visit.page.evaluate("document.activeElement.textContent.trim()"))
        visit.page.keyboard.press("Tab")
    assert "How-to" in names
    visit.end(address)


def test_it_reads_without_scripts(browser: Any, site: Path) -> None:
    visit = Visit(browser, java_script_enabled=False)
    visit.page.goto(f"{site.as_uri()}/index.html")
    visit.page.get_by_role("link", name="the gateway").first.click()
    assert visit.page.locator("h1").inner_text().startswith("Put the gateway before an agent")
    visit.end(site.as_uri())
