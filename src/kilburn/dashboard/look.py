"""Templates and their filters: formatted figures, links, and the texts of pages.

Every text of a page passes through the filter `words`, which makes control and bidirectional characters visible. In a redacted
export it replaces the text by its length.
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
from kilburn.dashboard.strip import SHADES, page_shade
from kilburn.errors import MissingExtra
from kilburn.page import address_of, span_of
from kilburn.terminal import age, line, plain

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "jinja2", "dashboard") from error

FOLDER = Path(__file__).resolve().parent
STATIC = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "mark.svg": "image/svg+xml",
}
"""Static files of the pages, and their media types."""


@cache
def static(name: str) -> str:
    """Return the text of a static file."""
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


def short(number: float) -> str:
    """Format a number with three or four digits: 95.5k."""
    for size, mark in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if abs(number) >= size:
            size = 1_000 if mark == "k" else size
            return f"{number / size:.1f}{mark}"
    return f"{number:,.0f}"


def money(amount: float) -> str:
    """Format a price with four decimal places."""
    return "< 0.0001" if 0 < amount < 0.0001 else f"{amount:,.4f}"


def stamp(seconds: float | None) -> str:
    """Format a time in UTC, to the second."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f} s"


def pages_named(pages: Iterable[int]) -> str:
    """Format the first and last page of a block: `p3`, `p3-p6`, `f2`, or two addresses."""
    first, last = pages
    if not first or not last or first == last:
        return address_of(first or last) if first or last else ""
    return span_of(first, last) if 0 < first < last else f"{address_of(first)} to {address_of(last)}"


def environment(*, root: str = "", redact: bool = False, links: bool = True) -> Environment:
    """Return the environment that renders the templates.

    Args:
        root: the path below which the dashboard is mounted.
        redact: replace texts of pages by their lengths.
        links: whether pages have links; an export has none.
    """

    def words(value: object) -> str:
        text = "" if value is None else str(value)
        if redact and text:
            return f"[{len(text):,} characters]"
        return plain(text)

    def link(path: str, **query: object) -> str:
        fields = {name: value for name, value in query.items() if value not in (None, "", 0)}
        return f"{root}{path}{'?' + urlencode(fields) if fields else ''}" if links else ""

    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        words=words,
        name=line,
        quoted=lambda text: line(shlex.quote(text)),
        shade=page_shade,
        count=lambda number: f"{number:,}",
        short=short,
        money=money,
        share=lambda share: "–" if share is None else f"{share:.0%}",
        stamp=stamp,
        ago=age,
        address=address_of,
        pages=pages_named,
    )
    templates.globals.update(link=link, tabs=TABS, shades=SHADES, version=__version__, redacted=redact, root=root)
    return templates


def rendered(templates: Environment, template: str, context: Mapping[str, Any]) -> str:
    """Render a page."""
    return templates.get_template(template).render(context)
