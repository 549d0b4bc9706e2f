"""Templates and what they need: figures for people, links, and the words of pages, which are data.

Every text of a page goes through `words`: what would control, reorder or break is made visible, and in a redacted copy only its
length is left.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kilburn import __version__
from kilburn.dashboard.screens import TABS
from kilburn.dashboard.strip import SHADES, shade_of
from kilburn.errors import MissingExtra
from kilburn.page import address_of, span_of
from kilburn.terminal import age, line, plain

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "jinja2", "dashboard") from error

HERE = Path(__file__).resolve().parent
STATIC = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "mark.svg": "image/svg+xml",
}
"""Our own files, which the pages name, and their types."""


@cache
def static(name: str) -> str:
    """The text of one of our own files."""
    return (HERE / "static" / name).read_text(encoding="utf-8")


def short(number: float) -> str:
    """A number in three or four digits: 95.5k."""
    for size, mark in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if abs(number) >= size:
            size = 1_000 if mark == "k" else size
            return f"{number / size:.1f}{mark}"
    return f"{number:,.0f}"


def money(amount: float) -> str:
    """A price, to a ten-thousandth."""
    return "< 0.0001" if 0 < amount < 0.0001 else f"{amount:,.4f}"


def stamp(seconds: float | None) -> str:
    """A moment for people, in UTC, to the second."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f} s"


def pages_named(pages: Iterable[int]) -> str:
    """The first and last page of a block: `p3`, `p3-p6`, `f2`, or two addresses."""
    first, last = pages
    if not first or not last or first == last:
        return address_of(first or last) if first or last else ""
    return span_of(first, last) if 0 < first < last else f"{address_of(first)} to {address_of(last)}"


def environment(*, root: str = "", redact: bool = False, links: bool = True) -> Environment:
    """What renders the templates.

    Args:
        root: the path under which the dashboard stands.
        redact: whether no word of a page is shown.
        links: whether there is something to follow a link to.
    """

    def words(text: object, kind: str = "") -> str:
        said = "" if text is None else str(text)
        if redact and said:
            return f"[{len(said):,} characters]"
        return plain(said)

    def link(path: str, **query: object) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "", 0)}
        return f"{root}{path}{'?' + urlencode(given) if given else ''}" if links else ""

    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        words=words,
        name=line,
        quoted=lambda text: line(shlex.quote(text)),
        shade=shade_of,
        count=lambda number: f"{number:,}",
        short=short,
        money=money,
        named=lambda one: (one.policy, one),
        share=lambda share: "–" if share is None else f"{share:.0%}",
        stamp=stamp,
        ago=age,
        address=address_of,
        pages=pages_named,
    )
    made.globals.update(link=link, tabs=TABS, shades=SHADES, version=__version__, redacted=redact, root=root)
    return made


def rendered(look: Environment, template: str, shown: Mapping[str, Any]) -> str:
    """A page, as text."""
    return look.get_template(template).render(shown)
