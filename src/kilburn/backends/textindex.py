"""The text index of one tenant. Words of a query are bound as values, never interpreted as syntax.

`kilburn.backends.ranked` explains the numbers of entries and the ranking. FTS5 reads upwards a third faster than downwards, and
its own `rank` visits every passage with any of the words, which for common words is all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

import apsw
import msgspec

from kilburn.backends.connection import Row, by_segment, insert, listed, rows, rows_of_each
from kilburn.backends.passages import TOKENIZER, add_name_parts, passages
from kilburn.backends.ranked import DEPTH, RankedIndex, is_by_user, make_entry
from kilburn.backends.slack import varint
from kilburn.page import Span

SETTINGS = {"secure-delete": 1, "automerge": 2}
"""Settings of FTS5; see `TextIndex.create`."""

PARTS = ("data", "idx", "content", "docsize", "config")
"""The tables that FTS5 creates for an index."""


CHUNK = 1000
"""Passages that one statement adds, at most."""

_integers = msgspec.json.Decoder(list[int]).decode


class PassageWords(NamedTuple):
    """The span of a passage in its text, its index words, and whether it is the user's."""

    start: int
    stop: int
    words: str
    by_user: bool


class IndexEntry(NamedTuple):
    """A numbered passage of a page."""

    number: int
    page: int
    start: int
    stop: int
    words: str


def passage_words(text: str, *, by_user: bool) -> list[PassageWords]:
    """Return the passages of a text."""
    return [PassageWords(start, stop, add_name_parts(text[start:stop], by_user), by_user) for start, stop in passages(text)]


def number_passages(
    segment: int, passages_made: int, pages: Iterable[tuple[int, Sequence[PassageWords]]]
) -> tuple[list[IndexEntry], dict[int, tuple[int, int]]]:
    """Return the entries of pages of a segment with `passages_made` earlier entries, and the range of each page."""
    entries: list[IndexEntry] = []
    ranges: dict[int, tuple[int, int]] = {}
    for page, page_passages in pages:
        for passage in page_passages:
            start, stop, words, by_user = passage
            number = make_entry(segment, passages_made + len(entries), stop - start, by_user=by_user)
            entries.append(IndexEntry(number, page, start, stop, words))
            # Numbers descend.
            ranges[page] = number, ranges.get(page, (0, number))[1]
    return entries, ranges


class TextIndex(RankedIndex):
    """Adds, removes and finds passages within the caller's transactions."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        super().__init__(db)
        self._db = db
        # SQL cannot bind a table's name. This is the only place that builds SQL from a value, and the value is an integer from
        # the file itself, never a name or a text.
        name = self._name = f"text_{int(tenant):d}"
        self._insert = f"INSERT INTO {name}(rowid, words) VALUES(?, ?)"
        self._insert_all = f"INSERT INTO {name}(rowid, words) SELECT value ->> 0, value ->> 1 FROM json_each(?)"
        self._delete = f"INSERT INTO {name}({name}, rowid, words) VALUES('delete', ?, ?)"
        # One array instead of many rows takes half the time.
        self._scan = (
            "SELECT json_group_array(rowid)"
            f" FROM (SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid BETWEEN ? AND ? ORDER BY rowid LIMIT ?)"
        )
        self._newest = f"SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid BETWEEN ? AND ? ORDER BY rowid LIMIT ?"
        self._flush = f"INSERT INTO {name}({name}) VALUES('flush')"
        pages = f"{name}_idx CROSS JOIN {name}_data ON id = (segid << 37) + (pgno >> 1)"
        # For each segment of the index, the page on which each word is or would be, if the word begins with its guide.
        self._guides_of = (
            f"WITH segment(id) AS (SELECT min(segid) FROM {name}_idx UNION ALL"
            f" SELECT (SELECT min(segid) FROM {name}_idx WHERE segid > id) FROM segment WHERE id IS NOT NULL),"
            " word(word) AS (SELECT CAST('0' || value AS BLOB) FROM json_each(?)),"
            " guide(segment, word, guide) AS MATERIALIZED (SELECT id, word,"
            f" (SELECT term FROM {name}_idx WHERE segid = segment.id AND term <= word ORDER BY term DESC LIMIT 1)"
            " FROM segment CROSS JOIN word)"
            " SELECT segid, term, block FROM"
            " (SELECT DISTINCT segment, guide FROM guide WHERE substr(word, 1, length(guide)) = guide)"
            f" CROSS JOIN {pages} WHERE segid = segment AND term = guide"
        )
        self._reguide = f"UPDATE {name}_idx SET term = ? WHERE segid = ? AND term = ?"

    def create(self) -> None:
        """Create the index.

        Contentless: it has the words only, not a second copy of the text. `detail=none`: it stores which passage has which word,
        not where, since no search asks for neighbours. `secure-delete`: a deleted entry's words leave the index at once, not at
        a later merge. `automerge=2`: a search opens every segment for every word, so few segments are worth more than cheap
        merging.
        """
        tokenizer = " ".join(f"''{word}''" for word in TOKENIZER)
        options = f"content='', columnsize=0, detail=none, tokenize='{tokenizer}'"
        self._db.execute(f"CREATE VIRTUAL TABLE {self._name} USING fts5(words, {options})")
        self.configure()

    def configure(self) -> None:
        """Store the settings of the index."""
        self._db.executemany(f"INSERT INTO {self._name}({self._name}, rank) VALUES(?, ?)", SETTINGS.items())

    def is_configured(self) -> bool:
        """Whether the index has its settings: without `secure-delete` forgotten words would stay in it."""
        return (
            SETTINGS.items()
            <= {str(name): value for name, value in rows(self._db, f"SELECT k, v FROM {self._name}_config")}.items()
        )

    def look_again(self) -> None:
        """Let FTS5 reread which pages the index has. A search does so by itself. SQLite's integrity check uses what this
        connection read last, and would miss pages that another connection has merged since. It reports any damage."""
        with suppress(apsw.CorruptError, apsw.SQLError):
            rows(self._db, self._newest, '"a"', 0, 0, 1)

    def drop(self) -> None:
        """Remove the index. If FTS5 refuses because of damage, its plain tables are removed one by one."""
        db = self._db
        try:
            db.execute(f"DROP TABLE {self._name}")
            return
        except (apsw.SQLError, apsw.CorruptError):
            if not db.in_transaction:
                raise
        db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
        try:
            for part in PARTS:
                db.execute(f"DROP TABLE IF EXISTS {self._name}_{part}")
            db.execute("PRAGMA writable_schema = 1")
            db.execute("DELETE FROM sqlite_schema WHERE name = ?", (self._name,))
            db.execute("PRAGMA writable_schema = RESET")
        finally:
            db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)

    def add(self, entries: Sequence[IndexEntry]) -> None:
        """Index numbered passages."""
        # In ascending order, or FTS5 would flush its buffer before each entry.
        upwards = sorted(entries)
        for at in range(0, len(upwards), CHUNK):
            chunk = [(entry.number, entry.words) for entry in upwards[at : at + CHUNK]]
            if len(chunk) == 1:
                self._db.execute(self._insert, chunk[0])
            else:
                self._db.execute(self._insert_all, (msgspec.json.encode(chunk).decode(),))
        passage_rows = ((entry.number, entry.page, entry.start, entry.stop) for entry in upwards)
        insert(self._db, "INSERT INTO passage(id, page, start, stop) VALUES(?, ?, ?, ?)", passage_rows)

    def put(self, texts: Sequence[tuple[int, str]]) -> None:
        """Index passages again under their numbers."""
        entries = [(number, add_name_parts(text, is_by_user(number))) for number, text in sorted(texts)]
        self._db.executemany(self._insert, entries)

    def remove(self, pages: Iterable[tuple[int, int, str]]) -> None:
        """Remove the entries of pages, given as first entry, last entry and the page's text, lowest entries first."""
        ranges: list[tuple[int, int]] = []
        words: set[str] = set()
        select = "SELECT id, start, stop FROM passage WHERE id BETWEEN ? AND ?"

        def entries() -> Iterator[tuple[int, str]]:
            for first, last, text in pages:
                ranges.append((first, last))
                for number, start, stop in rows(self._db, select, first, last):
                    by_user = is_by_user(number)
                    words.update(self.stems(text[start:stop], by_user))
                    yield number, add_name_parts(text[start:stop], by_user)

        # In ascending order, or FTS5 would flush its buffer before each entry.
        self._db.executemany(self._delete, entries())
        self._db.executemany("DELETE FROM passage WHERE id BETWEEN ? AND ?", ranges)
        self._reguide_past(words)

    def _reguide_past(self, words: Collection[str]) -> None:
        """Remove words that may have left the index from its guides."""
        # Until then FTS5 has only recorded what to remove.
        self._db.execute(self._flush)
        self._set_guides(rows_of_each(self._db, self._guides_of, [(msgspec.json.encode(list(words)).decode(),)]))

    def _set_guides(self, pages: Iterable[Row]) -> None:
        """Replace the guides of pages of the index, each given as (segment, guide, page), whose words have left it.

        FTS5 finds a page of the index by its guide: a beginning of the first word when the page was written, often the whole
        word. FTS5 keeps the guide when the word leaves. A beginning of the present first word serves as well.
        """
        stale: list[tuple[bytes, int, bytes]] = []
        for segment, guide, page in pages:
            first = _first_word(page)
            if first and not first.startswith(guide):
                # The shortest beginning that sorts after all words of the pages before.
                shared = next(at for at in range(len(guide)) if first[at : at + 1] != guide[at : at + 1])
                stale.append((first[: shared + 1], segment, guide))
        if stale:
            # FTS5 has no interface for this.
            self._db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
            try:
                self._db.executemany(self._reguide, stale)
            finally:
                self._db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """See `RankedIndex`."""
        # A quoted word is never syntax: the tokenizer leaves only letters, digits and `_` in it.
        match = f'"{word}"'
        if among:
            alternatives = '" OR "'.join(among)
            match = f'{match} AND ("{alternatives}")'
        limit = max(DEPTH, depth // len(ranges))
        bindings = [(match, low, high, limit) for low, high in ranges]
        entries: list[int] = []
        for (numbers,) in rows_of_each(self._db, self._scan, bindings):
            entries += _integers(numbers)
        return entries

    def newest(self, every: str, any_of: str, segment: int, limit: int) -> list[int]:
        """See `RankedIndex`."""
        words, alternatives = self.terms(every), self.terms(any_of) if any_of else {}
        if not words or limit < 1:
            return []
        match = " AND ".join(f'"{word}"' for word in words)
        if alternatives:
            listed = '" OR "'.join(alternatives)
            match = f'{match} AND ("{listed}")'
        entries = rows(self._db, self._newest, match, segment << 32, (segment + 1 << 32) - 1, limit)
        return [number for (number,) in entries if isinstance(number, int)]

    def postings(self) -> Iterator[tuple[str, int]]:
        """Yield every word of the index with every entry that has it."""
        view = f"temp.{self._name}_words"
        self._db.execute(f"CREATE VIRTUAL TABLE IF NOT EXISTS {view} USING fts5vocab(main, {self._name}, instance)")
        yield from cast("Iterator[tuple[str, int]]", self._db.execute(f"SELECT term, doc FROM {view}"))

    def spans(self, numbers: Sequence[int]) -> dict[int, tuple[int, Span]]:
        """See `RankedIndex`."""
        select = "SELECT value, page, start, stop FROM json_each(?) CROSS JOIN passage ON passage.id = value"
        spans = rows(self._db, select, listed(numbers))
        return {
            number: (page, (start, stop))
            for number, page, start, stop in spans
            if isinstance(page, int) and _is_span(start, stop)
        }

    def of_pages(self, keys: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int, Span]]:
        """Yield the entries of pages with their spans, in reading order for each page."""
        select = (
            "SELECT segment, page.id, passage.id, start, stop FROM json_each(?)"
            " CROSS JOIN page ON segment = ? AND page.id = value"
            " CROSS JOIN passage ON passage.id BETWEEN first_passage AND last_passage"
            " WHERE passage.page = page.id ORDER BY key, passage.id DESC"
        )
        for segment, page, number, start, stop in rows_of_each(self._db, select, by_segment(keys)):
            if _is_span(start, stop):
                yield (segment, page), number, (start, stop)


def _is_span(start: object, stop: object) -> bool:
    """Whether these are a span. An impossible span is damage, which `fsck` reports; it is not a hit."""
    return isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop


def _first_word(leaf: bytes) -> bytes:
    """Return the first word of a page of the index as stored, or b"" if there is none."""
    try:
        footer, _ = varint(leaf, int.from_bytes(leaf[2:4]))
        length, start = varint(leaf, footer)
    except IndexError:
        return b""
    return leaf[start : start + length]
