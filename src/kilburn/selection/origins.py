"""The places in its sources that a summary's lines come from.

A long history is too much to read again for each new summary. The summary before it tells which lines were worth
keeping, and the sources have their exact words. So the new summary is made from originals, of which little is
read. Only places in originals are returned, never a word of a summary.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import accumulate

from kilburn.page import Span
from kilburn.selection.identifiers import identifiers
from kilburn.selection.lines import OMISSION, merge

LOOKED = 100_000
"""Characters of the sources in which the names of a model's summary are looked for, the oldest first; newer sources are
read in full anyway."""

OFTEN = 6
"""A name that occurs more often does not identify a line."""

MAX_LINE_CHARS = 400
"""Characters of a line that is taken whole; of a longer one what surrounds the name."""

_HEADER = re.compile(r"(?:([0-9a-f]{6,}) )?p([1-9]\d{0,17}) [^\n]*:\s*")
_QUOTE = re.compile(r"p([1-9]\d{0,17}): (.+)")
_MARK = OMISSION.strip()


def find_origins(summary: str, sources: Set[int], text: Callable[[int], str]) -> dict[int, tuple[Span, ...]]:
    """Return where the lines of a summary occur in its sources: spans by page, sorted and disjoint.

    An extract's lines stand under the address of their page, verbatim. Where a summary quotes nothing, a model
    wrote it: then the lines of the sources that hold its rarer names and numbers count, of the first `LOOKED`
    characters. What a model made up is in no source, and is not found.

    Args:
        sources: the originals that may be read, none of them of an image.
        text: the exact text of a page.
    """
    origins: dict[int, list[Span]] = {}
    page = at = 0
    nonce = ""
    for line in summary.splitlines():
        header, quote = _HEADER.fullmatch(line), _QUOTE.fullmatch(line)
        # All headings have the mark of the first one. A line with another mark, or none, is text of a page.
        if header and int(header[2]) in sources and (not page or (header[1] or "") == nonce):
            page, at, nonce = int(header[2]), 0, header[1] or ""
        elif quote and int(quote[1]) in sources:
            _note(origins, text, int(quote[1]), quote[2].strip(_MARK), 0)
        elif page:
            at = _note(origins, text, page, line, at)
    if not origins:
        origins = _named(summary, sorted(sources), text)
    return {number: merge(origins[number]) for number in sorted(origins)}


def words_at(text: str, spans: Iterable[Span]) -> str:
    """The texts of the spans, each ending its line, with an omission between them."""
    parts = [text[start:end] for start, end in spans]
    return OMISSION.join(part if part.endswith("\n") else part + "\n" for part in parts)


def _note(origins: dict[int, list[Span]], text: Callable[[int], str], page: int, line: str, start_at: int) -> int:
    """Note where the line stands in the page, behind `start_at` where it can; returns where it ends."""
    if len(line.strip()) < 3:
        return start_at
    whole = text(page)
    start = whole.find(line, start_at)
    start = whole.find(line) if start < 0 else start
    if start < 0:
        return start_at
    end = start + len(line)
    end += whole.startswith("\n", end)
    origins.setdefault(page, []).append((start, end))
    return end


def _named(summary: str, sources: Iterable[int], text: Callable[[int], str]) -> dict[int, list[Span]]:
    """The lines of the first sources that hold a name or number of the summary."""
    texts: dict[int, str] = {}
    remaining = LOOKED
    for page in sources:
        texts[page] = text(page)[:remaining]
        remaining -= len(texts[page])
        if remaining <= 0:
            break
    joined = "\n".join(texts.values())
    ends = list(accumulate(len(source_text) + 1 for source_text in texts.values()))
    pages = list(texts)
    origins: dict[int, list[Span]] = {}
    for name in dict.fromkeys(mention.text.rstrip(":/.,") for mention in identifiers(summary)):
        places = _places(joined, name) if len(name) > 2 else []
        for place in places if len(places) <= OFTEN else ():
            index = bisect_right(ends, place)
            offset = ends[index - 1] if index else 0
            origins.setdefault(pages[index], []).append(_line(texts[pages[index]], place - offset))
    return origins


def _places(text: str, name: str) -> list[int]:
    """The places where the name occurs as a whole word, at most `OFTEN` + 1 of them."""
    places: list[int] = []
    at = text.find(name)
    while at >= 0 and len(places) <= OFTEN:
        end = at + len(name)
        if not text[at - 1 : at].isalnum() and not text[end : end + 1].isalnum():
            places.append(at)
        at = text.find(name, end)
    return places


def _line(text: str, at: int) -> Span:
    """The line around a place; of a long line the part near it."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at) + 1 or len(text)
    return max(start, at - MAX_LINE_CHARS // 2), min(end, at + MAX_LINE_CHARS // 2)


def all_origins(origins: Iterable[Mapping[int, tuple[Span, ...]]]) -> dict[int, tuple[Span, ...]]:
    """The origins of several summaries, together."""
    spans: dict[int, list[Span]] = {}
    for pages in origins:
        for page, page_spans in pages.items():
            spans.setdefault(page, []).extend(page_spans)
    return {page: merge(spans[page]) for page in sorted(spans)}
