"""Build the documentation as a site, with Zensical, into a folder per version.

    python3 run.py docs                      into build/site/, with pictures of the dashboard where a browser is found
    python3 run.py docs --serve              the same, then serve it on this machine until Ctrl-C
    python3 run.py docs --release NAME       into build/site/NAME/ beside the versions that are there

The pages are those that GitHub shows. What is added: the reference, made from the code; the figures of the first page, from
explanation/performance.json; pictures of the dashboard, taken by its tests; and the files outside docs/ that a page links to.
What stands behind a fence's language is for the tests, and is left out. zensical.toml, beside this file, has the navigation.

The build fails where a link of the site leads nowhere, or a page would load anything from elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUT = ROOT / "build" / "site"
CHECKOUT = Path("checkout")
"""Where files stand that pages link to and that lie elsewhere in the checkout."""
FENCE = re.compile(r"^( *)```([a-z]+)( [^\n`]*)?$", re.MULTILINE)
FENCED = re.compile(r"^( *```.*?^ *```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s]+)(\))")
GENERATED = re.compile(r"`docs/reference/(\w+\.md)?`")
"""How a page names the reference, which GitHub does not show: on the site it is a link."""
FOREIGN = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)""")
"""What a style sheet would load from elsewhere."""
FIGURES, PICTURES = "<!-- figures -->", "<!-- pictures -->"
"""Where a page has room for what only the site shows."""
FIRST = "---\nhide: [navigation, toc]\n---\n\n"
"""What the first page begins with, so that it has the width of the window."""
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self' data:; connect-src 'self'; worker-src 'self'; frame-src 'self'; base-uri 'self'; form-action 'none'"
)
"""What a browser may load for a page: what lies beside it. The theme's script knows addresses of other sites."""

SHOWN = {
    "hybrid, 2,000: right answers": "exact questions about agents' recorded runs: the window of 2,000 tokens shows the answer",
    "hybrid, a chat of 600 questions: right answers": "the same in one chat of 600 questions, window 8,000",
    "hybrid, a chat of 600 questions, 8,000: share of the prefix kept": "of each prompt there, what a cache has already",
    "hybrid, 4,000: tasks solved": "small tasks that a scripted agent solves through a window of 4,000 tokens",
    "a turn, 1,000,000 pages, p50": "a turn in a store of a million pages, all of it synced to disk",
    "search among 1,000,000, by words": "a search by words among a million pages",
}
"""The figures on the first page: their rows in performance.json, and their names for who reads nothing else."""
RIVALS = {
    "tail": "the newest messages",
    "tail+turns": "the newest messages, and a search over all others",
    "tail+chunks": "the newest text, and a search over passages of the others",
    "tail+outputs": "the newest text, and a search over older outputs",
    "cost": "the policy `cost`, which is made for this",
    "FTS5's rank": "SQLite's own ranking",
}
"""What stands beside them, in words."""

SCREENS = {
    "session": "A window over time: a column for each prompt, its pages by kind, the prefix that a cache had",
    "receipts": "The receipts of a session: each compaction with its policy, its reason and its price",
    "receipt": "One receipt: the window before and after, side by side, and the way back to each page",
}
"""The pictures of the dashboard that a page shows, of those that its tests take."""


# --- the pages ---------------------------------------------------------------------------------------------------------------


def shown(value: float, unit: str) -> str:
    """A figure in three digits, a share in percent."""
    return f"{value:.0%}" if not unit else f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def figures(measured: list[dict[str, Any]]) -> str:
    """The figures of the first page, as a table."""
    rows = {row["what"]: row for part in measured for row in part["ratios"]}
    missing = [name for name in SHOWN if name not in rows]
    if missing:
        raise SystemExit(f"docs/explanation/performance.json has no {missing}: name another figure in SHOWN, in docs/website.py")
    lines = ["| measured | Kilburn | beside it |", "|---|---|---|"]
    for name, words in SHOWN.items():
        row = rows[name]
        beside = RIVALS.get(row["against"], row["against"])
        lines.append(f"| {words} | {shown(row['measured'], row['unit'])} | {shown(row['baseline'], row['unit'])}: {beside} |")
    return "\n".join(lines)


def staged(path: Path) -> Path:
    """Where a file of the checkout stands among the pages. The site begins where the README does; a program becomes a page."""
    if path == ROOT / "README.md":
        return Path("index.md")
    code = path.suffix in (".py", ".toml")
    if path.is_relative_to(DOCS) and not code:
        return path.relative_to(DOCS)
    outside = CHECKOUT / path.relative_to(ROOT)
    return outside.with_name(f"{outside.name}.md") if code else outside


def beside(file: Path, path: Path) -> str:
    """How a page of the site names another file of it."""
    return os.path.relpath(staged(file), staged(path).parent).replace(os.sep, "/")


def listing(path: Path) -> str:
    """A program as a page."""
    language = {".py": "python"}.get(path.suffix, path.suffix[1:])
    return f"# `{path.relative_to(ROOT).as_posix()}`\n\n```` {language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def page(text: str, path: Path, linked: set[Path]) -> str:
    """The text of a page as the site shows it; `linked` gains the files that it links to and that are no pages of docs/."""

    def follow(match: re.Match[str]) -> str:
        target, hash, anchor = match[2].partition("#")
        file = (path.parent / target).resolve()
        if not target or re.match(r"[a-z]+:", target) or not file.is_file() or not file.is_relative_to(ROOT):
            return match[0]
        if staged(file).is_relative_to(CHECKOUT):
            linked.add(file)
        return match[1] + beside(file, path) + hash + anchor + match[3]

    def generated(match: re.Match[str]) -> str:
        return f"[{match[0]}]({beside(DOCS / 'reference' / (match[1] or 'index.md'), path)})"

    pieces = FENCED.split(text)
    for at, piece in enumerate(pieces):
        pieces[at] = FENCE.sub(fence, piece) if at % 2 else LINK.sub(follow, GENERATED.sub(generated, piece))
    return "".join(pieces)


def fence(match: re.Match[str]) -> str:
    """The beginning of a block, without what it tells the tests; a file that the block becomes is its title."""
    file = re.search(r"\bfile=(\S+)", match[3] or "")
    return f"{match[1]}```{match[2]}" + (f' title="{file[1]}"' if file else "")


def gallery(taken: list[Path], where: Path) -> str:
    """The pictures of the dashboard, in the folder of a page; nothing where none were taken."""
    names = {path.stem for path in taken}
    shown = [name for name in SCREENS if f"{name}-wide" in names]
    for name in shown:
        shutil.copyfile(next(path for path in taken if path.stem == f"{name}-wide"), where / f"dashboard-{name}.png")
    return "\n\n".join(f"![{SCREENS[name]}](dashboard-{name}.png)" for name in shown)


def stage(pages: Path, taken: list[Path]) -> None:
    """Write everything that becomes the site into a folder."""
    sys.path.insert(0, str(DOCS))
    import generate

    measured = json.loads((DOCS / "explanation" / "performance.json").read_text(encoding="utf-8"))
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.py", "*.toml", "theme", "reference", "__pycache__"))
    made = {generate.REFERENCE / name: text for name, text in generate.pages().items()}
    written = {path for path in DOCS.rglob("*.md") if path.parent != generate.REFERENCE}
    waiting, done = {*written, *made}, set[Path]()
    while waiting:
        path = waiting.pop()
        done.add(path)
        target = pages / staged(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            target.write_text(listing(path), encoding="utf-8")
            continue
        linked: set[Path] = set()
        text = page(made.get(path) or path.read_text(encoding="utf-8"), path, linked)
        waiting |= linked - done
        text = text.replace(FIGURES, figures(measured)).replace(PICTURES, gallery(taken, target.parent))
        target.write_text(FIRST * (path == DOCS / "index.md") + text, encoding="utf-8")


# --- the navigation ----------------------------------------------------------------------------------------------------------


def named(nav: object) -> Iterator[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for inner in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from named(inner)


def filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """A navigation whose "folder/*" are the pages that stand nowhere else in it; a group without a page is left out."""
    known = set(named(nav))

    def fill(items: list[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, dict):
                ((title, inner),) = item.items()
                inside = list(fill(inner)) if isinstance(inner, list) else inner
                if inside:
                    yield {title: inside}
            elif item.endswith("/*"):
                yield from (name for name in pages if name.startswith(item[:-1]) and name not in known)
            else:
                yield item

    return list(fill(nav))


# --- the check ---------------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """What a page of the site names: its anchors, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag == "link" and has.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(has.get("href", ""))
        elif tag == "meta" and has.get("http-equiv") == "Content-Security-Policy":
            self.policy = has["content"]
        self.loads += [has[name] for name in ("src", "srcset", "poster", "data", "xlink:href") if name in has]


def faults(site: Path) -> list[str]:
    """What is wrong in a site: links and anchors that lead nowhere, and whatever is loaded from elsewhere."""
    seen = {path: Seen(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, has in seen.items():
        name = path.relative_to(site).as_posix()
        if has.policy != POLICY:
            found.append(f"{name}: the policy of what it may load is missing")
        for target in [*has.links, *has.loads]:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "mailto", "data") or parts.netloc:
                if target in has.loads and parts.scheme != "data":
                    found.append(f"{name}: loads {target}")
                continue
            file = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not file.is_file():
                # The page of all versions lies one above.
                if not (file.parent == site.parent and file.name == "versions.html"):
                    found.append(f"{name}: {target} leads nowhere")
            elif parts.fragment and file in seen and unquote(parts.fragment) not in seen[file].anchors:
                found.append(f"{name}: {target} has no such anchor")
    for path in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path.name}: loads {url}" for url in FOREIGN.findall(text)]
    return found


# --- the build ---------------------------------------------------------------------------------------------------------------


def pictures(into: Path) -> list[Path]:
    """Have the browser's tests of the dashboard leave their pictures in a folder; say why where there are none."""
    if not any(map(shutil.which, (os.environ.get("KILBURN_CHROMIUM", "chromium"), "chromium-browser"))):
        print("no pictures of the dashboard: no Chromium is found (Debian: apt install chromium, or set KILBURN_CHROMIUM)")
        return []
    tests = ["tests/dashboard/test_browser.py", "-k", "reader_walks or strip_names"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "KILBURN_PICTURES": str(into)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(
            done.stdout[-2000:] + "no pictures of the dashboard: its tests in a browser did not all pass; above is what they say"
        )
        return []
    return sorted(into.glob("*.png"))


def build(out: Path, release: str, taken: list[Path]) -> Path:
    """Build the site of a version into its folder below `out`, whole or not at all; return the folder."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as folder:
        work = Path(folder).resolve()
        stage(work / "pages", taken)
        shutil.copytree(DOCS / "theme", work / "theme")
        project = tomllib.loads((DOCS / "zensical.toml").read_text(encoding="utf-8"))["project"]
        pages = sorted(path.relative_to(work / "pages").as_posix() for path in (work / "pages").rglob("*.md"))
        project |= {"docs_dir": "pages", "site_dir": "made", "nav": filled(project["nav"], pages)}
        project["extra"] |= {"policy": POLICY, "release": release}
        # Zensical reads YAML, of which JSON is a part, and TOML, which Python does not write.
        (work / "mkdocs.yml").write_text(json.dumps(project), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--config-file", str(work / "mkdocs.yml")],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr + "zensical could not build the site")
        # The links of the one hold only where the site is the root of a host, and the other names no page without its address.
        for name in ("404.html", "sitemap.xml"):
            (work / "made" / name).unlink(missing_ok=True)
        wrong = faults(work / "made")
        if wrong:
            raise SystemExit("\n".join(wrong) + f"\n{len(wrong)} faults in the site; the one that was there stays")
        shutil.rmtree(out / release, ignore_errors=True)
        (work / "made").rename(out / release)
    list_versions(out)
    return out / release


def order(release: str) -> tuple[object, ...]:
    """Versions in order: 0.10 after 0.9."""
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"[.\-+]", release))


def list_versions(out: Path) -> None:
    """Write what leads to the versions that are there: versions.json, a page of them, and a first page that opens the newest."""
    found = sorted((path.parent.name for path in out.glob("[!.]*/index.html")), key=order, reverse=True)
    (out / "versions.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    entries = "\n".join(f'<li><a href="{html.escape(name)}/index.html">Kilburn {html.escape(name)}</a></li>' for name in found)
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        '<meta name="color-scheme" content="light dark">\n<title>Kilburn, all versions</title>\n'
    )
    body = f"</head>\n<body>\n<main>\n<h1>Kilburn, all versions</h1>\n<ul>\n{entries}\n</ul>\n</main>\n</body>\n</html>\n"
    (out / "versions.html").write_text(head + body, encoding="utf-8")
    newest = f'<meta http-equiv="refresh" content="0; url={html.escape(found[0])}/index.html">\n'
    (out / "index.html").write_text(head + newest + body, encoding="utf-8")


def serve(out: Path) -> None:
    """Serve a folder on this machine until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def main() -> int:
    """Build, say where it is, and serve it if asked."""
    import kilburn

    parser = argparse.ArgumentParser(prog="run.py docs", description="Build the documentation as a site.")
    parser.add_argument("--release", default=kilburn.__version__, help="the version's name, and its folder (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of all versions (build/site)")
    parser.add_argument("--no-pictures", action="store_true", help="take no pictures of the dashboard")
    parser.add_argument("--serve", action="store_true", help="serve it on this machine until Ctrl-C")
    asked = parser.parse_args()
    if not re.fullmatch(r"\w[\w.+-]*(?<!\.html)(?<!\.json)", asked.release):
        parser.error(f"--release {asked.release!r} cannot be a folder's name: use letters, digits, and . + - _")
    there = asked.out / asked.release
    if there.exists() and not (there / "search.json").is_file():
        parser.error(f"{there} is there and is no site: give another --out or --release")
    with tempfile.TemporaryDirectory() as folder:
        taken = [] if asked.no_pictures else pictures(Path(folder))
        made = build(asked.out.resolve(), asked.release, taken)
    print(f"{len(list(made.rglob('*.html')))} pages, {len(taken)} pictures; open {made / 'index.html'}", flush=True)
    if asked.serve:
        serve(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
