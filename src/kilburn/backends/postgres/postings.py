"""The text index of a tenant in PostgreSQL. It ranks as SQLite's does.

The passages of a segment lie in blocks of `BLOCK`, in the order of their entries. A row says for a word which passages of a
block have it: two bytes each, see `encode_low`. So a word that occurs again adds no row, and no entry to the table's index.
Who writes to a block holds its segment's row.

Words are split and stemmed by SQLite's tokenizers: PostgreSQL's own would find other passages.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from hashlib import blake2b

import apsw

from kilburn.backends.passages import BY_USER, passages
from kilburn.backends.postgres.statements import Sender, ServerAnswer, Statements
from kilburn.backends.ranked import DEPTH, NUMBERS, ROWS, RankedIndex, is_by_user, make_entry
from kilburn.page import Page, Span

MAX_WORD_BYTES = 64
"""Bytes of a word as it is stored; of a longer one, its digest is."""

BLOCK = 256
"""Passages of a block."""

BITS = (BLOCK * NUMBERS - 1).bit_length()
"""Bits of an entry's number within its block."""

STRETCH = 32
"""Blocks that are looked through first, where words have to be together in one passage; then twice as many, and so on."""

BYTES_PER_LOOKUP = 12
"""Where so many times fewer entries are looked for than there are bytes in a row, they are looked for one by one."""

AHEAD = 1 << 15
"""Entries of each word that are read before anybody asks for them: they are few bytes, and an answer is what takes long."""

TOGETHER = 512
"""Blocks of which what all words of a query have in them is read at once."""

_FIRST = (
    "SELECT asked.place, block, lows FROM unnest(%s::bytea[]) WITH ORDINALITY AS asked(word, place)"
    " CROSS JOIN unnest(%s::bigint[], %s::bigint[]) WITH ORDINALITY AS range(low, high, place)"
    " CROSS JOIN LATERAL (SELECT block, lows, sum(length(lows)) OVER (ORDER BY block) - length(lows) AS before"
    " FROM (SELECT block, lows FROM kilburn.posting WHERE tenant = %s AND word = asked.word"
    " AND block BETWEEN low AND high ORDER BY block LIMIT %s) AS one) AS found"
    " WHERE before < %s ORDER BY asked.place, range.place, block"
)
_OF_THESE = (
    "SELECT word, block, lows FROM kilburn.posting WHERE tenant = %s AND word = ANY(%s::bytea[]) AND block = ANY(%s::bigint[])"
)
# Each block is looked up by itself (OFFSET 0): a join would read the words of all.
_TOGETHER = (
    "SELECT first.block, word, lows FROM (SELECT block FROM kilburn.posting WHERE tenant = %s AND word = %s"
    " AND block BETWEEN %s AND %s ORDER BY block LIMIT %s) AS first CROSS JOIN LATERAL (SELECT word, lows"
    " FROM kilburn.posting WHERE tenant = %s AND word = ANY(%s::bytea[]) AND posting.block = first.block OFFSET 0) AS own"
    " ORDER BY first.block"
)
# The newest passages of a segment come first. Each row is looked up by itself, whatever is known of the table: an UPDATE would
# read all words of the tenant as long as there are no statistics.
_ADD = (
    "INSERT INTO kilburn.posting(tenant, word, block, lows)"
    " SELECT %s, * FROM unnest(%s::bytea[], %s::bigint[], %s::bytea[]) AS new(word, block, lows)"
    " ON CONFLICT(tenant, word, block) DO UPDATE SET lows = excluded.lows || posting.lows"
)
_TAKE = (
    "UPDATE kilburn.posting SET lows = (SELECT coalesce(string_agg(substr(posting.lows, at, 2), '' ORDER BY at), '')"
    " FROM generate_series(1, length(posting.lows), 2) AS at WHERE {kept}) FROM {gone} WHERE tenant = %s AND {where}"
)
_TAKE_WORDS = _TAKE.format(
    kept="position(substr(posting.lows, at, 2) IN gone.lows) = 0",
    gone="unnest(%s::bytea[], %s::bigint[], %s::bytea[]) AS gone(word, block, lows)",
    where="posting.word = gone.word AND posting.block = gone.block",
)
_TAKE_RANGE = _TAKE.format(
    kept=(
        f"((posting.block << {BITS}) | (get_byte(posting.lows, at - 1) << 7) | (get_byte(posting.lows, at) & 127))"
        " NOT BETWEEN gone.low AND gone.high"
    ),
    gone="(SELECT %s::bigint AS low, %s::bigint AS high) AS gone",
    where=f"posting.block BETWEEN gone.low >> {BITS} AND gone.high >> {BITS}",
)

_tokenizers = RankedIndex(apsw.Connection(":memory:"))


def stored_word(word: str) -> bytes:
    """Return the stored form of a stem."""
    data = word.encode("utf-8", "replace")
    # No word has a NUL.
    return data if len(data) <= MAX_WORD_BYTES else b"\0" + blake2b(data, digest_size=32).digest()


def word_keys(text: str, by_user: bool) -> list[bytes]:
    """Return the stored words by which a passage with this text is found."""
    return sorted(stored_word(stem) for stem in _tokenizers.stems(text, by_user))


Entry = tuple[int, int, int, int, list[bytes]]
"""Number, page, start and stop of a passage, and its words."""


def page_entries(segment: int, passage_count: int, page: Page, text: str) -> list[Entry]:
    """Return the passages of a page's text in reading order, numbered from `passage_count`."""
    by_user = page.is_by_user
    return [
        (
            make_entry(segment, number, stop - start, by_user=by_user),
            *(page.id, start, stop, word_keys(text[start:stop], by_user)),
        )
        for number, (start, stop) in enumerate(passages(text), passage_count)
    ]


def add(statements: Sender, tenant: int, entries: Sequence[Entry]) -> None:
    """Put passages and their words into the index."""
    numbers, pages, starts, stops, words = zip(*entries, strict=True)
    statements.send(
        "INSERT INTO kilburn.passage(tenant, id, page, start, stop)"
        " SELECT %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])",
        *(tenant, list(numbers), list(pages), list(starts), list(stops)),
    )
    pairs = [(word, number) for number, words_of_passage in zip(numbers, words, strict=True) for word in words_of_passage]
    if pairs:
        statements.send(_ADD, tenant, *_columns(pairs))


def encode_low(entry: int) -> bytes:
    """Encode the number of an entry within its block: the high bits, then the low seven bits with a mark, so that a search for
    two bytes matches only where a number begins. The order of the bytes is that of the numbers."""
    low = entry & (1 << BITS) - 1
    return bytes((low >> 7, 128 | low & 127))


_LOWS = {int.from_bytes(encode_low(low), sys.byteorder): low for low in range(1 << BITS)}


def entries_in(block: int, lows: bytes) -> list[int]:
    """The entries of a row; -1 for what is damaged."""
    first, low_of_bytes = block << BITS, _LOWS.get
    return [first | low_of_bytes(low, -1) for low in memoryview(lows)[: len(lows) & ~1].cast("H")]


def _columns(pairs: Iterable[tuple[bytes, int]]) -> tuple[list[bytes], list[int], list[bytes]]:
    """Words and entries as rows: words, blocks and lows, in the order in which everyone locks them."""
    rows: dict[tuple[bytes, int], list[int]] = {}
    for word, entry in pairs:
        rows.setdefault((word, entry >> BITS), []).append(entry)
    keys = sorted(rows)
    lows = [b"".join(map(encode_low, sorted(rows[key]))) for key in keys]
    return [word for word, _ in keys], [block for _, block in keys], lows


def remove(statements: Statements, tenant: int, ranges: Sequence[tuple[int, int, str | None]]) -> None:
    """Remove the passages of pages, with their words and vectors, given as first entry, last entry and the page's text. If the
    text cannot be read, its words are searched among all words of the tenant."""
    spans = [
        statements.rows(
            "SELECT id, start, stop FROM kilburn.passage WHERE tenant = %s AND id BETWEEN %s AND %s", tenant, first, last
        )
        for first, last, _ in ranges
    ]
    pairs = [
        (word, number)
        for passage_rows, (_, _, text) in zip(spans, ranges, strict=True)
        if text is not None
        for number, start, stop in passage_rows
        for word in word_keys(text[start:stop], is_by_user(number))
    ]
    words, blocks, low_bytes = _columns(pairs)
    statements.send(_TAKE_WORDS, words, blocks, low_bytes, tenant)
    statements.send(
        "DELETE FROM kilburn.posting USING unnest(%s::bytea[], %s::bigint[]) AS gone(word, block)"
        " WHERE tenant = %s AND posting.word = gone.word AND posting.block = gone.block AND lows = ''",
        *(words, blocks, tenant),
    )
    for first, last, text in ranges:
        if text is None:
            statements.send(_TAKE_RANGE, first, last, tenant)
            delete = "DELETE FROM kilburn.posting WHERE tenant = %s AND block BETWEEN %s AND %s AND lows = ''"
            statements.send(delete, tenant, first >> BITS, last >> BITS)
    lows, highs = [first for first, *_ in ranges], [last for _, last, _ in ranges]
    for statement in (
        "DELETE FROM kilburn.passage USING unnest(%s::bigint[], %s::bigint[]) AS gone(low, high)"
        " WHERE tenant = %s AND id BETWEEN low AND high",
        "DELETE FROM kilburn.vector USING unnest(%s::bigint[], %s::bigint[]) AS gone(low, high)"
        " WHERE tenant = %s AND entry BETWEEN low AND high",
    ):
        statements.send(statement, lows, highs, tenant)


class Postings(RankedIndex):
    """Looks words up for one search.

    Args:
        ahead: entries of each word that are read at once.
    """

    def __init__(self, statements: Statements, tenant: int, *, ahead: int = AHEAD) -> None:
        self._split, self._stem = _tokenizers._split, _tokenizers._stem
        self._statements, self._tenant, self._ahead = statements, tenant, ahead
        self._expected: tuple[object, ServerAnswer] | None = None
        """The values of a look-up that was sent in advance, and its answer."""
        self._rows: dict[str, dict[int, bytes]] = {}
        """What is known of words, by block."""
        self._whole: set[str] = set()
        """Words of which all is known, of the range in which all are looked for."""
        self._blocks: set[int] = set()
        """Blocks of which all words are known."""
        self._grouped: dict[tuple[str, ...], dict[int, dict[int, bytes]]] = {}
        """The entries of words of which all is known, by block, with their numbers in it."""

    def _key(self, word: str) -> bytes:
        """A word of a query as it is stored."""
        return stored_word(self.query_stem(word))

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """See `RankedIndex`."""
        if not among:
            is_known = word in self._whole
            rows = list(self._rows[word].items()) if is_known else self._ask([word], ranges, depth)[0]
            return _first(rows, ranges, depth)
        # Entries of a rarer word are known most often: it is much quicker to look for these than for all of a common one.
        unknown = [self._key(other_word) for other_word in among if other_word not in self._whole]
        entries = self._with(word, tuple(other_word for other_word in among if other_word in self._whole))
        hits: list[int] = []
        for low, high in ranges:
            inside = {entry for entry in entries if low <= entry <= high}
            if unknown:
                inside.update(self._beside(self._key(word), [], unknown, low, high, _each(ranges, depth)))
            hits += sorted(inside)[: _each(ranges, depth)]
        return hits

    def _with(self, word: str, whole_words: tuple[str, ...]) -> list[int]:
        """The entries that have a word and one of others, of which all is known."""
        blocks = self._grouped.get(whole_words)
        if blocks is None:
            blocks = self._grouped[whole_words] = {}
            for entry in {
                entry for whole_word in whole_words for row in self._rows[whole_word].items() for entry in entries_in(*row)
            }:
                blocks.setdefault(entry >> BITS, {})[entry] = encode_low(entry)
        if word not in self._whole:
            self._read(word, blocks.keys() - self._blocks)
        rows, hits = self._rows[word], list[int]()
        for block, lows in blocks.items():
            lows_in_block = rows.get(block)
            if lows_in_block is not None and len(lows) * BYTES_PER_LOOKUP < len(lows_in_block):
                hits += [entry for entry, low in lows.items() if low in lows_in_block]
            elif lows_in_block is not None:
                hits += lows.keys() & entries_in(block, lows_in_block)
        return hits

    def _read(self, word: str, blocks: Set[int]) -> None:
        """Read what a word has in blocks of which that is not known."""
        if not blocks:
            return
        words = {self._key(word): [word]}
        if len(blocks) <= TOGETHER:
            # The other common words are looked for next, among the same entries.
            self._blocks |= blocks
            for other_word in self._rows.keys() - self._whole - {word}:
                words.setdefault(self._key(other_word), []).append(other_word)
        for key, block, lows in self._statements.rows(_OF_THESE, self._tenant, list(words), sorted(blocks)):
            for other_word in words[key]:
                self._rows[other_word][block] = lows

    def expect(self, query: str, first: int, last: int, *, by_user: bool = False) -> None:
        """See `RankedIndex`: the look-up of the words goes out with the next statement."""
        words = [*self.terms(query), *([BY_USER] if by_user else [])]
        if words:
            values = self._values(words, [(first << 32, (last + 1 << 32) - 1)], self._ahead)
            self._expected = values, self._statements.send(_FIRST, *values)

    def _having_each(
        self, words: Sequence[str], ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()
    ) -> list[list[int]]:
        """See `RankedIndex`."""
        ahead = max(self._ahead, _each(ranges, depth) + BLOCK)
        rows_by_word = self._ask([*words, *among], ranges, depth, ahead)
        for word, rows in zip([*words, *among], rows_by_word, strict=True):
            self._rows[word] = dict(rows)
            if len(rows) < ROWS + BLOCK and sum(len(lows) for _, lows in rows) < 2 * ahead:
                self._whole.add(word)
        if among:
            return [self._having(word, ranges, depth, among) for word in words]
        return [_first(rows, ranges, depth) for rows in rows_by_word]

    def _ask(
        self, words: Sequence[str], ranges: Sequence[tuple[int, int]], depth: int, ahead: int = 0
    ) -> list[list[tuple[int, bytes]]]:
        """The first rows of each range that have a word, until there are enough entries."""
        # A block in which a range begins may have entries before it. None of a block's rows is empty.
        values = self._values(words, ranges, max(ahead, _each(ranges, depth) + BLOCK))
        if self._expected is not None and self._expected[0] == values:
            rows = self._expected[1].fetchall()
        else:
            rows = self._statements.rows(_FIRST, *values)
        rows_by_word: list[list[tuple[int, bytes]]] = [[] for _ in words]
        for number, block, lows in rows:
            rows_by_word[number - 1].append((block, lows))
        return rows_by_word

    def _values(self, words: Sequence[str], ranges: Sequence[tuple[int, int]], enough: int) -> tuple[object, ...]:
        """Return the values of `_FIRST`, for `enough` entries of each word in each range."""
        place = [low >> BITS for low, _ in ranges], [high >> BITS for _, high in ranges]
        return list(map(self._key, words)), *place, self._tenant, ROWS + BLOCK, 2 * enough

    def _beside(
        self, word: bytes, all_words: Sequence[bytes], any_words: Sequence[bytes], low: int, high: int, limit: int
    ) -> Iterator[int]:
        """The first entries of a range that have a word, every one of others, and one of some if there are any."""
        first, count, stretch = low >> BITS, 0, STRETCH
        words = list({word, *all_words, *any_words})
        while True:
            place = self._tenant, word, first, high >> BITS, stretch
            rows = self._statements.rows(_TOGETHER, *place, self._tenant, words)
            blocks: dict[int, dict[bytes, set[int]]] = {}
            for block, word_in_block, lows in rows:
                blocks.setdefault(block, {})[word_in_block] = set(entries_in(block, lows))
            for of in blocks.values():
                entries = of[word].intersection(*(of.get(other_word, ()) for other_word in all_words))
                if any_words:
                    entries &= set().union(*(of.get(other_word, ()) for other_word in any_words))
                for entry in sorted(entries):
                    if low <= entry <= high:
                        yield entry
                        count += 1
                        if count == limit:
                            return
            if len(blocks) < stretch:
                return
            first, stretch = max(blocks) + 1, 2 * stretch

    def newest(self, every: str, any_of: str, segment: int, limit: int) -> list[int]:
        """Return the newest entries of a segment that have all words of `every`, and one of `any_of` unless it is empty."""
        words = [self._key(word) for word in self.terms(every)]
        any_words = [self._key(word) for word in self.terms(any_of)] if any_of else []
        if not words or limit < 1:
            return []
        return list(self._beside(words[0], words[1:], any_words, segment << 32, (segment + 1 << 32) - 1, limit))

    def spans(self, numbers: Iterable[int]) -> dict[int, tuple[int, Span]]:
        """Page and span of entries."""
        select = "SELECT id, page, start, stop FROM kilburn.passage WHERE tenant = %s AND id = ANY(%s::bigint[])"
        spans = {
            number: (page, (start, stop))
            for number, page, start, stop in self._statements.rows(select, self._tenant, list(numbers))
        }
        return {number: spans[number] for number in numbers if number in spans}


def _each(ranges: Sequence[tuple[int, int]], depth: int) -> int:
    """Entries of each range that are looked at."""
    return max(DEPTH, depth // len(ranges))


def _first(rows: Iterable[tuple[int, bytes]], ranges: Sequence[tuple[int, int]], depth: int) -> list[int]:
    """The first entries of each range that are in these rows, which come in order."""
    every, per_range = list(rows), _each(ranges, depth)
    if len(ranges) == 1:
        # No more rows are read than need be.
        hits: list[int] = []
        for block, lows in every:
            hits += _inside(entries_in(block, lows), *ranges[0])
            if len(hits) >= per_range:
                break
        return hits[:per_range]
    whole = [entry for row in every for entry in entries_in(*row)]
    return [entry for low, high in ranges for entry in _inside(whole, low, high)[:per_range]]


def _inside(entries: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those of entries in order that are in a range."""
    return entries[bisect_left(entries, low) : bisect_right(entries, high)]
