"""The text index of a tenant in PostgreSQL: a row for each word of each passage. It ranks as SQLite's does.

Words are split and stemmed by SQLite's tokenizers: PostgreSQL's own would find other passages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import apsw

from kilburn.backends.passages import passages
from kilburn.backends.postgres.statements import Answer, Statements
from kilburn.backends.ranked import DEPTH, ROWS, RankedIndex, entry_of, length_class
from kilburn.page import Span

LONGEST = 64
"""Bytes of a word as it is stored; of a longer one, its digest is."""

_HAVING = (
    "SELECT found.entry FROM unnest(%s::bigint[], %s::bigint[]) WITH ORDINALITY AS range(low, high, place)"
    " CROSS JOIN LATERAL (SELECT entry FROM kilburn.posting AS one WHERE tenant = %s AND word = %s"
    " AND entry BETWEEN low AND high{among} ORDER BY entry LIMIT %s) AS found ORDER BY range.place, found.entry"
)
_AMONG = (
    " AND EXISTS(SELECT FROM kilburn.posting AS other WHERE other.tenant = one.tenant AND other.entry = one.entry"
    " AND other.word = ANY(%s::bytea[]))"
)
_OF_THESE = "SELECT entry FROM kilburn.posting WHERE tenant = %s AND word = %s AND entry = ANY(%s::bigint[]) ORDER BY entry"
_PLAIN, _WITH = _HAVING.format(among=""), _HAVING.format(among=_AMONG)
_NEWEST = (
    "SELECT entry FROM kilburn.posting AS one WHERE tenant = %s AND word = %s AND entry BETWEEN %s AND %s"
    " AND NOT EXISTS(SELECT FROM unnest(%s::bytea[]) AS wanted(word) WHERE NOT EXISTS(SELECT FROM kilburn.posting AS other"
    " WHERE other.tenant = one.tenant AND other.word = wanted.word AND other.entry = one.entry))"
    " AND (%s::bytea[] = '{}' OR EXISTS(SELECT FROM kilburn.posting AS other WHERE other.tenant = one.tenant"
    " AND other.word = ANY(%s::bytea[]) AND other.entry = one.entry)) ORDER BY entry LIMIT %s"
)

_tokenizers = RankedIndex(apsw.Connection(":memory:"))


def key_of(word: str) -> bytes:
    """A stem as it is stored."""
    data = word.encode("utf-8", "replace")
    # No word has a NUL.
    return data if len(data) <= LONGEST else b"\0" + blake2b(data, digest_size=32).digest()


def words_of(text: str) -> list[bytes]:
    """The words, as stored, by which a passage with this text is found."""
    return sorted(key_of(stem) for stem in _tokenizers.stems(text))


Entry = tuple[int, int, int, int, list[bytes]]
"""Number, page, start and stop of a passage, and its words."""


def entries_of(segment: int, used: int, page: int, text: str) -> list[Entry]:
    """The passages of a page's text, in reading order; its segment has made `used` before."""
    return [
        (entry_of(segment, number, length_class(stop - start)), page, start, stop, words_of(text[start:stop]))
        for number, (start, stop) in enumerate(passages(text), used)
    ]


def add(statements: Statements, tenant: int, entries: Sequence[Entry]) -> None:
    """Put passages and their words into the index."""
    numbers, pages, starts, stops, words = zip(*entries, strict=True)
    statements.send(
        "INSERT INTO kilburn.passage(tenant, id, page, start, stop)"
        " SELECT %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])",
        *(tenant, list(numbers), list(pages), list(starts), list(stops)),
    )
    pairs = sorted((word, number) for number, some in zip(numbers, words, strict=True) for word in some)
    if pairs:
        statements.send(
            "INSERT INTO kilburn.posting(tenant, word, entry) SELECT %s, * FROM unnest(%s::bytea[], %s::bigint[])",
            *(tenant, [word for word, _ in pairs], [number for _, number in pairs]),
        )


def remove(statements: Statements, tenant: int, ranges: Sequence[tuple[int, int, str | None]]) -> None:
    """Take pages' passages out again, with their words and vectors; given as first entry, last entry and the page's text. Where
    that cannot be read, its words are looked for among all of the tenant's."""
    spans = [
        statements.rows(
            "SELECT id, start, stop FROM kilburn.passage WHERE tenant = %s AND id BETWEEN %s AND %s", tenant, first, last
        )
        for first, last, _ in ranges
    ]
    pairs = sorted(
        (word, number)
        for found, (_, _, text) in zip(spans, ranges, strict=True)
        if text is not None
        for number, start, stop in found
        for word in words_of(text[start:stop])
    )
    statements.send(
        "DELETE FROM kilburn.posting USING unnest(%s::bytea[], %s::bigint[]) AS gone(word, entry)"
        " WHERE tenant = %s AND posting.word = gone.word AND posting.entry = gone.entry",
        *([word for word, _ in pairs], [number for _, number in pairs], tenant),
    )
    lost = [(first, last) for first, last, text in ranges if text is None]
    if lost:
        statements.send(
            "DELETE FROM kilburn.posting USING unnest(%s::bigint[], %s::bigint[]) AS gone(low, high)"
            " WHERE tenant = %s AND entry BETWEEN low AND high",
            *([first for first, _ in lost], [last for _, last in lost], tenant),
        )
    lows, highs = [first for first, *_ in ranges], [last for _, last, _ in ranges]
    for statement in (
        "DELETE FROM kilburn.passage USING unnest(%s::bigint[], %s::bigint[]) AS gone(low, high)"
        " WHERE tenant = %s AND id BETWEEN low AND high",
        "DELETE FROM kilburn.vector USING unnest(%s::bigint[], %s::bigint[]) AS gone(low, high)"
        " WHERE tenant = %s AND entry BETWEEN low AND high",
    ):
        statements.send(statement, lows, highs, tenant)


class Postings(RankedIndex):
    """Looks words up for one search."""

    def __init__(self, statements: Statements, tenant: int) -> None:
        self._split, self._stem = _tokenizers._split, _tokenizers._stem
        self._statements, self._tenant = statements, tenant
        self._whole: dict[str, list[int]] = {}
        """Words of which all entries are known, with these."""
        self._looked: set[str] = set()
        """Those, and words that have too many."""
        self._span: Sequence[tuple[int, int]] = ()

    def _key(self, word: str) -> bytes:
        """A word of a query as it is stored."""
        return key_of(self.stem_of(word))

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """See `RankedIndex`."""
        if not among:
            return [entry for (entry,) in self._ask(word, ranges, depth).fetchall()]
        # Entries of a rarer word are known most often: it is much quicker to look for these than for all of a common one.
        self._learn([other for other in among if other not in self._looked])
        known = {entry for other in among for entry in self._whole.get(other, ())}
        unknown = [other for other in among if other not in self._whole]
        these = sorted(entry for entry in known if any(low <= entry <= high for low, high in ranges))
        answers = []
        if these:
            answers.append(self._statements.send(_OF_THESE, self._tenant, self._key(word), these))
        if unknown:
            answers.append(self._ask(word, ranges, depth, unknown))
        found = sorted({entry for answer in answers for (entry,) in answer.fetchall()})
        return [entry for low, high in ranges for entry in _inside(found, low, high)[: _each(ranges, depth)]]

    def _having_each(self, words: Sequence[str], ranges: Sequence[tuple[int, int]], depth: int) -> list[list[int]]:
        """See `RankedIndex`."""
        answers = [self._ask(word, ranges, depth) for word in words]
        found = [[entry for (entry,) in answer.fetchall()] for answer in answers]
        if len(ranges) == 1:
            self._span, self._looked = ranges, set()
            self._note(words, found, depth)
        return found

    def _learn(self, words: Sequence[str]) -> None:
        """Look up all entries of words of which more are there than were looked at, if they are not very many."""
        if words and self._span:
            answers = [self._ask(word, self._span, ROWS) for word in words]
            self._looked.update(words)
            self._note(words, [[entry for (entry,) in answer.fetchall()] for answer in answers], ROWS)

    def _note(self, words: Sequence[str], found: Sequence[list[int]], depth: int) -> None:
        for word, entries in zip(words, found, strict=True):
            if len(entries) < _each(self._span, depth):
                self._whole[word] = entries
                self._looked.add(word)

    def _ask(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> Answer:
        each = _each(ranges, depth)
        place = [low for low, _ in ranges], [high for _, high in ranges], self._tenant, self._key(word)
        if among:
            return self._statements.send(_WITH, *place, [self._key(other) for other in among], each)
        return self._statements.send(_PLAIN, *place, each)

    def newest(self, every: str, some: str, segment: int, limit: int) -> list[int]:
        """The newest entries of a segment that have every one of these words, and one of the others if there are any."""
        words = [self._key(word) for word in self.terms(every)]
        others = [self._key(word) for word in self.terms(some)] if some else []
        if not words or limit < 1:
            return []
        inside = segment << 32, (segment + 1 << 32) - 1
        found = self._statements.rows(_NEWEST, self._tenant, words[0], *inside, words[1:], others, others, limit)
        return [entry for (entry,) in found]

    def spans(self, numbers: Iterable[int]) -> dict[int, tuple[int, Span]]:
        """Page and span of entries."""
        select = "SELECT id, page, start, stop FROM kilburn.passage WHERE tenant = %s AND id = ANY(%s::bigint[])"
        found = {
            number: (page, (start, stop))
            for number, page, start, stop in self._statements.rows(select, self._tenant, list(numbers))
        }
        return {number: found[number] for number in numbers if number in found}


def _each(ranges: Sequence[tuple[int, int]], depth: int) -> int:
    """Entries of each range that are looked at."""
    return max(DEPTH, depth // len(ranges))


def _inside(entries: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those of entries in order that are in a range."""
    return entries[bisect_left(entries, low) : bisect_right(entries, high)]
