"""Finding one's way in memory with two functions: search, then recall, then on from page to page.

It knows the tools' outputs by their first lines ("json/decoder.py lines 1-120 of 356"), as an agent
does who made the calls, and finds any stretch of a file, a listing or a search again. It refuses to
keep anything beyond one question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kilburn.demo.memory import Memory

__all__ = ["Chunk", "Hit", "NotFound", "Recollection", "Series", "listing", "outline", "reads"]

_HIT = re.compile(r"^\[(?:[0-9a-f]+ )?([pfs]\d+) characters \d+-\d+, [^\]\n]*\]\n", re.MULTILINE)
_LEFT = re.compile(r"\n\[(?:[0-9a-f]+ )?\d+ of \d+ characters left: offset=(\d+)\]\Z")
_READ = re.compile(r"(\S+) lines \d+-\d+ of \d+(?:\n|\Z)")
_NUMBERED = re.compile(r"(\d+)\t(.*)")

TOKENS = 2000
"""Of one search; a small window may give less."""

HEAD = 200
STRIDE = 4
"""Pages after an output within which the next one of its series stands."""


class Hit(NamedTuple):
    """One search hit: the page, and the passage of it."""

    address: str
    text: str


class Series(NamedTuple):
    """Outputs that continue each other: what their first line says (first, last, of how many), and how to search for them."""

    head: str
    query: str
    onward: str = ""


class Chunk(NamedTuple):
    """One output of a series: its page, and the entries that it shows."""

    address: str
    first: int
    last: int
    total: int


class NotFound(LookupError):
    """Memory does not hold it, as far as was searched."""


def reads(path: str) -> Series:
    """The reads of a file."""
    return Series(rf"{re.escape(path)} lines (\d+)-(\d+) of (\d+)(?:\n|\Z)", f"{path} lines", f"{path} start {{}} lines")


def listing(folder: str) -> Series:
    """The listings of a folder."""
    name = f"{'root ' if folder == '.' else ''}folder {folder}"
    return Series(rf"{re.escape(name)}: entries (\d+)-(\d+) of (\d+)(?:\n|\Z)", f"{name} entries")


def outline(folder: str) -> Series:
    """The searches for definitions in a folder."""
    return Series(
        rf"matches (\d+)-(\d+) of (\d+) in {re.escape(folder)} for \S*class.*(?:\n|\Z)",
        f"matches in {folder} for class def async",
    )


class Recollection:
    """What one question has brought back so far."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[str, str] = {}
        self._chunks: dict[Series, list[Chunk]] = {}

    def search(self, query: str) -> list[Hit]:
        """Hits, best first."""
        said = self._memory.search_memory(query, TOKENS)
        marks = list(_HIT.finditer(said))
        ends = [*(mark.start() - 1 for mark in marks[1:]), len(said)]
        return [Hit(mark[1], said[mark.end() : ends[at]]) for at, mark in enumerate(marks)]

    def file_of(self, address: str) -> str:
        """The file that a page shows, by its first line; "" where it is no read."""
        head = _READ.match(self._head(address))
        return head[1] if head else ""

    def lines(self, path: str, start: int) -> Iterator[tuple[int, str]]:
        """The numbered lines of a file from one on."""
        for chunk in self.chunks(reads(path), start):
            for number, line in self.numbered(chunk):
                if number >= start:
                    yield number, line

    def numbered(self, chunk: Chunk) -> Iterator[tuple[int, str]]:
        """The lines of one read, with their numbers."""
        for line in self.page(chunk.address).split("\n")[1:]:
            if match := _NUMBERED.fullmatch(line):
                yield int(match[1]), match[2]

    def chunks(self, series: Series, start: int = 1) -> Iterator[Chunk]:
        """The outputs of a series from the one on that shows an entry.

        Raises:
            NotFound: one of them is not to be found.
        """
        while True:
            chunk = self.chunk(series, start)
            yield chunk
            if chunk.last >= chunk.total:
                return
            start = chunk.last + 1

    def chunk(self, series: Series, number: int) -> Chunk:
        """The output of a series that shows an entry: by search, else by going on from one that was found."""
        known = self._chunks.setdefault(series, [])
        if not known:
            self._look(series, series.query)
        if series.onward and known and not _with(known, number):
            step = max(chunk.last - chunk.first + 1 for chunk in known)
            self._look(series, series.onward.format((number - 1) // step * step + 1))
        found = _with(known, number) or self._walk(series, number)
        if found is None:
            raise NotFound(f"{series.query}, {number}")
        return found

    def follow(self, chunk: Chunk, series: Series) -> None:
        """Look for the first output of a series right behind another output; searching finds it from now on."""
        for pages in range(1, STRIDE + 1):
            found = self._at(series, _after(chunk.address, pages))
            if found is not None:
                self._chunks.setdefault(series, []).append(found)
                return

    def _look(self, series: Series, query: str) -> None:
        for hit in self.search(query):
            # A hit in a call's arguments leads to the output behind it.
            chunk = self._at(series, hit.address) or (
                self._at(series, _after(hit.address, 1)) if hit.text.startswith("{") else None
            )
            if chunk is not None:
                self._chunks[series].append(chunk)

    def _walk(self, series: Series, number: int) -> Chunk | None:
        """On, or back, from the nearest known output to the wanted one, page by page."""
        at = min(self._chunks[series], key=lambda chunk: abs(chunk.first - number), default=None)
        while at is not None and not at.first <= number <= at.last:
            at = self._beside(series, at, 1 if at.last < number else -1)
            if at is not None:
                self._chunks[series].append(at)
        return at

    def _beside(self, series: Series, chunk: Chunk, way: int) -> Chunk | None:
        """The next output of a series, or (way -1) the one before; other pages may stand between."""
        for pages in range(1, STRIDE + 1):
            found = self._at(series, _after(chunk.address, way * pages))
            if found is not None and (found.first == chunk.last + 1 if way > 0 else found.last == chunk.first - 1):
                return found
        return None

    def _at(self, series: Series, address: str) -> Chunk | None:
        head = re.match(series.head, self._head(address)) if address else None
        return Chunk(address, int(head[1]), int(head[2]), int(head[3])) if head else None

    def _head(self, address: str) -> str:
        said = self._memory.recall(address, 0, HEAD)
        return "" if said.startswith("error:") else said.partition("\n")[2]

    def page(self, address: str) -> str:
        """A whole page, part by part.

        Raises:
            NotFound: there is no such page.
        """
        if address not in self._pages:
            text, offset = "", 0
            while True:
                said = self._memory.recall(address, offset)
                if said.startswith("error:"):
                    raise NotFound(said)
                left = _LEFT.search(said)
                text += (said[: left.start()] if left else said).partition("\n")[2]
                if not left:
                    break
                offset = int(left[1])
            self._pages[address] = text
        return self._pages[address]


def _with(known: list[Chunk], number: int) -> Chunk | None:
    return next((chunk for chunk in known if chunk.first <= number <= chunk.last), None)


def _after(address: str, pages: int) -> str:
    """The address so many pages further on; "" where there is none."""
    number = int(address[1:]) + pages
    return f"p{number}" if address.startswith("p") and number > 0 else ""
