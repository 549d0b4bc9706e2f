"""The text index of one tenant. Words of a query are always bound as values, never interpreted as syntax.

An entry's number is process << 32 | place << 4 | length class, so that one process is a range of
numbers and ranking knows a passage's length without another look-up. Places count down, because the
newest passages are looked at first and FTS5 reads upwards a third faster than downwards.

Ranking sums, over the query's words, the word's rarity times the passage's shortness: BM25
(Robertson & Zaragoza 2009) with each word counted once. A path counts as one word, by the rarest of its parts that the
passage has: else whoever only names a file would outrank what stands in it. FTS5's own `rank` visits every passage that
has any word, which for common words is all of them. Here at most `ROWS` are visited. The frequency of a
word that has more is estimated from how close together the visited ones lie, and such a word is
looked up only among the passages that have a rarer word of the query.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property
from itertools import accumulate
from typing import cast

import apsw
import msgspec

from kilburn.backends.connection import Row, by_segment, listed, rows, rows_of_each
from kilburn.backends.passages import JOINT, PATH, TOKENIZER, passages, searchable, shorten
from kilburn.backends.slack import varint
from kilburn.page import Span
from kilburn.retrieval import STOP

SETTINGS = {"secure-delete": 1, "automerge": 2}
"""Of FTS5; see `TextIndex.create`."""

PARTS = ("data", "idx", "content", "docsize", "config")
"""The tables that FTS5 makes for an index."""

CLASSES = 16
TERMS = 16
"""Words of a query that are looked up at most. The longest and most unusual are taken, as they are the rarest."""

ROWS = 4096
"""Passages visited for all words of a query together."""

DEPTH = 33
"""Passages visited for each word of each range at least."""

RUNS = 64
"""Ranges that are each looked through by themselves; more are cheaper to pick out of the whole."""

ENOUGH = 8
"""Passages with rarer words that are visited for each hit, before common words are only looked up among these."""

SLACK = 1 + 1e-9
"""A bound is so much larger than the sum that it bounds, whatever was rounded."""

PLACES = (1 << 28) - 1
"""Passages that one segment can have."""

K1, B = 1.2, 0.5

_integers = msgspec.json.Decoder(list[int]).decode


@cache
def length_class(length: int) -> int:
    """0 for up to 25 characters, 15 for 800 and more, three classes a doubling."""
    return max(0, min(CLASSES - 1, round(3 * math.log2(max(length, 1) / 25))))


CLASS_LENGTH = tuple(25 * 2 ** (number / 3) for number in range(CLASSES))


def entry_of(segment: int, number: int, length: int) -> int:
    """The number of a segment's passage `number`, counted from 0 as they were made, of that class of length."""
    return segment << 32 | (PLACES - number) << 4 | length


def number_of(entry: int) -> int:
    """How many passages its segment had when this one was made."""
    return PLACES - ((entry & 0xFFFFFFFF) >> 4)


class Extents:
    """How much there is to look through.

    Args:
        made: (segment, entries ever made, characters of these together) of the segments, oldest first.
    """

    def __init__(self, made: Iterable[tuple[int, int, int]]) -> None:
        some = [one for one in made if one[1]]
        self.segments = [segment for segment, *_ in some]
        self._until = list(accumulate(used for _, used, _ in some))
        self._characters = {segment: characters for segment, _, characters in some}
        self._total = sum(self._characters.values())
        self._note()

    def _note(self) -> None:
        self.count = self._until[-1] if self._until else 0
        self.mean = self._total / max(1, self.count)

    @cached_property
    def wanted(self) -> Set[int]:
        """Their numbers."""
        return self._characters.keys()

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Their entries, as ranges; neighbours share one."""
        return _ranges(self.segments)

    def put(self, segment: int, used: int, characters: int) -> None:
        """Take what a segment has now."""
        if not used:
            return
        at = bisect_left(self.segments, segment)
        before = self._until[at - 1] if at else 0
        if segment not in self._characters:
            self.segments.insert(at, segment)
            self._until.insert(at, before)
            self.__dict__.pop("ranges", None)
        if more := before + used - self._until[at]:
            self._until[at:] = [until + more for until in self._until[at:]]
        self._total += characters - self._characters.get(segment, 0)
        self._characters[segment] = characters
        self._note()

    def estimate(self, numbers: Sequence[int]) -> float:
        """How many entries have a word of which only these, the first ones, were looked at."""
        segment, newer = numbers[-1] >> 32, number_of(numbers[-1])
        at = bisect_right(self.segments, segment) - 1
        # Entries in reading order up to the last one that was looked at.
        before = self._until[at] - (newer if self.segments[at] == segment else 0)
        return min(float(self.count), len(numbers) * self.count / max(len(numbers), before))


class TextIndex:
    """Add, remove and search passages. It does not open transactions: its caller does."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        self._db = db
        # SQL cannot bind a table's name. This is the only place that makes SQL from a value, and the value
        # is an integer that the file itself gave out, never a name or a text.
        name = self._name = f"text_{int(tenant):d}"
        self._insert = f"INSERT INTO {name}(rowid, words) VALUES(?, ?)"
        self._delete = f"INSERT INTO {name}({name}, rowid, words) VALUES('delete', ?, ?)"
        # One array in place of many rows: half the time.
        self._scan = (
            "SELECT json_group_array(rowid)"
            f" FROM (SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid BETWEEN ? AND ? ORDER BY rowid LIMIT ?)"
        )
        self._newest = f"SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid BETWEEN ? AND ? ORDER BY rowid LIMIT ?"
        self._flush = f"INSERT INTO {name}({name}) VALUES('flush')"
        pages = f"{name}_idx CROSS JOIN {name}_data ON id = (segid << 37) + (pgno >> 1)"
        self._guides = f"SELECT segid, term, block FROM {pages}"
        # Of each segment the page on which each word is or would be, if its guide begins this word.
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
        # Splits as the index does, but leaves stemming to MATCH: stemming twice is not stemming once.
        self._split = db.fts5_tokenizer(TOKENIZER[1], list(TOKENIZER[2:]))
        self._stem = db.fts5_tokenizer(TOKENIZER[0], list(TOKENIZER[1:]))

    def create(self) -> None:
        """Make the index.

        Contentless: the words only, not the text a second time. `detail=none`: which passage has which
        word, not where, since no search asks for neighbours. `secure-delete`: a deleted entry's words
        leave the index at once, not at some later merge. `automerge=2`: a search opens every segment for
        every word, so few segments are worth more than cheap merging.
        """
        tokenizer = " ".join(f"''{word}''" for word in TOKENIZER)
        options = f"content='', columnsize=0, detail=none, tokenize='{tokenizer}'"
        self._db.execute(f"CREATE VIRTUAL TABLE {self._name} USING fts5(words, {options})")
        self.configure()

    def configure(self) -> None:
        """Give the index its settings."""
        self._db.executemany(f"INSERT INTO {self._name}({self._name}, rank) VALUES(?, ?)", SETTINGS.items())

    def is_configured(self) -> bool:
        """Whether it has its settings: without `secure-delete` forgotten words would stay in it."""
        return (
            SETTINGS.items()
            <= {str(name): value for name, value in rows(self._db, f"SELECT k, v FROM {self._name}_config")}.items()
        )

    def drop(self) -> None:
        """Remove the index. If it is so damaged that FTS5 refuses it, its plain tables are removed one by one."""
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

    def add(self, segment: int, used: int, texts: Iterable[tuple[int, str]]) -> tuple[int, int]:
        """Index texts of pages of a segment that has made `used` entries before, and note with each page which are its.

        Returns:
            Entries and characters added.
        """
        entries: list[tuple[int, str]] = []
        made: list[tuple[int, int, int, int]] = []
        ranges: list[tuple[int, int, int, int]] = []
        characters = 0
        for page, text in texts:
            first = len(made)
            for start, stop in passages(text):
                number = entry_of(segment, used + len(made), length_class(stop - start))
                entries.append((number, searchable(text[start:stop])))
                made.append((number, page, start, stop))
                characters += stop - start
            if len(made) > first:
                ranges.append((made[-1][0], made[first][0], segment, page))
        # Upwards, or FTS5 would write out its buffer before each entry.
        self._db.executemany(self._insert, reversed(entries))
        self._db.executemany("INSERT INTO passage(id, page, start, stop) VALUES(?, ?, ?, ?)", made)
        self._db.executemany("UPDATE page SET first = ?, last = ? WHERE process = ? AND id = ?", ranges)
        return len(made), characters

    def put(self, texts: Sequence[tuple[int, str]]) -> None:
        """Index passages that have their numbers already."""
        self._db.executemany(self._insert, [(number, searchable(text)) for number, text in sorted(texts)])

    def remove(self, pages: Iterable[tuple[int, int, str]]) -> None:
        """Take pages' entries out again, given as first entry, last entry and the page's text, lowest entries first."""
        ranges: list[tuple[int, int]] = []
        words: set[str] = set()
        select = "SELECT id, start, stop FROM passage WHERE id BETWEEN ? AND ?"

        def entries() -> Iterator[tuple[int, str]]:
            for first, last, text in pages:
                ranges.append((first, last))
                for number, start, stop in rows(self._db, select, first, last):
                    words.update(self.stems(text[start:stop]))
                    yield number, searchable(text[start:stop])

        # Upwards, or FTS5 would write out its buffer before each entry.
        self._db.executemany(self._delete, entries())
        self._db.executemany("DELETE FROM passage WHERE id BETWEEN ? AND ?", ranges)
        self._reguide_past(words)

    def _reguide_past(self, words: Collection[str]) -> None:
        """Take words that may have left the index out of its guides."""
        # Until then FTS5 has noted what is to be removed, and removed nothing.
        self._db.execute(self._flush)
        self._set_guides(rows_of_each(self._db, self._guides_of, [(msgspec.json.encode(list(words)).decode(),)]))

    def reguide(self) -> None:
        """Take every word that has left the index out of its guides."""
        self._set_guides(rows_of_each(self._db, self._guides, [()]))

    def _set_guides(self, pages: Iterable[Row]) -> None:
        """Give pages of the index, each as (segment, guide, page), another guide if theirs has left it.

        FTS5 finds a page of the index by its guide: a beginning of what was the first word of the page when it was
        written, often all of that word. It leaves the guide when the word leaves. A beginning of the word that is the
        first one now does as well.
        """
        stale: list[tuple[bytes, int, bytes]] = []
        for segment, guide, page in pages:
            first = _first_word(page)
            if first and not first.startswith(guide):
                # The shortest one that still comes after all words of the pages before.
                shared = next(at for at in range(len(guide)) if first[at : at + 1] != guide[at : at + 1])
                stale.append((first[: shared + 1], segment, guide))
        if stale:
            # The index does not offer to write this.
            self._db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
            try:
                self._db.executemany(self._reguide, stale)
            finally:
                self._db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)

    def terms(self, query: str) -> dict[str, str]:
        """The words of a query worth looking up, as the index would split them, each with the compound that it is a part of,
        such as a path, or else itself."""
        text = shorten(query)
        wholes: dict[str, str] = {}
        runs = {run: self._words(run) for run in dict.fromkeys(PATH.findall(text)) if len(JOINT.split(run)) > 2}
        for run in sorted(runs, key=lambda run: len(runs[run]), reverse=True):
            wholes.update(dict.fromkeys(runs[run], run))
        found = dict.fromkeys(self._words(text))
        words = [word for word in found if word not in STOP] or list(found)
        if len(words) > TERMS:
            words.sort(key=_oddness, reverse=True)
            # The parts of paths leave half of the room to other words.
            others = [word for word in words if word not in wholes][: TERMS // 2]
            words = [*others, *(word for word in words if word not in others)][:TERMS]
        return {word: wholes.get(word, word) for word in words}

    def _words(self, text: str) -> list[str]:
        return _tokens(self._split, searchable(text).encode("utf-8", "replace"), apsw.FTS5_TOKENIZE_QUERY)

    def search(self, query: str, extents: Extents, limit: int, *, apart: bool = False) -> list[tuple[int, float]]:
        """Entries that match, best first, with scores.

        Args:
            extents: the segments to look through.
            apart: whether there may be entries of other segments between theirs.
        """
        terms = self.terms(query)
        words, count = list(terms), extents.count
        if not words or limit < 1 or count < 1:
            return []
        depth = max(DEPTH, ROWS // len(words))
        ranges = [(extents.segments[0] << 32, (extents.segments[-1] + 1 << 32) - 1)]
        # One long look is cheaper than one for each range.
        first = ROWS if apart else depth
        found = [self._having(word, ranges, first) for word in words]
        full = [len(numbers) >= first for numbers in found]
        wanted = extents.wanted
        if apart:
            runs = extents.ranges
            for at, numbers in enumerate(found):
                inside = [number for number in numbers if number >> 32 in wanted]
                if full[at] and len(runs) > RUNS:
                    inside = self._having_within(words[at], inside, numbers[-1], ranges[0][1], wanted, depth)
                    full[at] = len(inside) >= depth
                elif full[at]:
                    inside = self._having(words[at], runs, depth)
                    full[at] = len(runs) == 1 and len(inside) >= depth
                found[at] = inside
            if len(runs) == 1:
                ranges = runs
        short = [(K1 + 1) / (1 + K1 * (1 - B + B * length / max(extents.mean, 1.0))) for length in CLASS_LENGTH]
        sizes = [extents.estimate(numbers) if cut else len(numbers) for numbers, cut in zip(found, full, strict=True)]
        worth = [math.log(1 + (count - size + 0.5) / (size + 0.5)) for size in sizes]
        # What the words that are not counted yet can add to a passage's rarity.
        ahead = sum(worth) * SLACK
        rarities: dict[int, float] = {}
        having: dict[str, set[int]] = {}
        rarer: list[int] = []
        visited = 0
        # The rarity of the word that brought enough passages. From `closed` on no further ones can be among the best.
        enough, closed = 0.0, False
        for at in sorted(range(len(words)), key=lambda at: (full[at], sizes[at])):
            if not closed and ahead < enough:
                closed = ahead * short[0] < _least(_scores(rarities, short), limit)
            ahead -= worth[at]
            numbers = found[at]
            if full[at] and visited >= ENOUGH * limit:
                # Most passages that have a common word and no rarer one cannot be among the best.
                if closed:
                    numbers = self._among(words, at, rarities, rarer, found, full)
                else:
                    numbers = self._having(words[at], ranges, ROWS, [words[other] for other in rarer])
                    numbers = [number for number in numbers if number >> 32 in wanted]
            else:
                rarer.append(at)
                visited += len(numbers)
            if closed:
                numbers = [number for number in numbers if number in rarities]
            if terms[words[at]] != words[at]:
                # The rarest part of a path comes first, and the others count no more.
                counted = having.setdefault(terms[words[at]], set())
                numbers = [number for number in numbers if number not in counted]
                counted.update(numbers)
            rarity = worth[at]
            if rarities:
                known = rarities.get
                for number in numbers:
                    rarities[number] = known(number, 0.0) + rarity
            else:
                rarities = dict.fromkeys(numbers, rarity)
            if not enough and len(rarities) >= limit:
                enough = rarity
        return _best(rarities, short, limit)

    def _among(
        self,
        words: Sequence[str],
        word: int,
        entries: Collection[int],
        rarer: Sequence[int],
        found: Sequence[Sequence[int]],
        full: Sequence[bool],
    ) -> list[int]:
        """Those of these entries that have a word, and others; each of these entries has a rarer one. They are looked for among
        those with as few rarer words as need be, and where such a word is common, not beyond those that were looked at."""
        low, high = min(entries), max(entries)
        few: list[str] = []
        numbers: list[int] = []
        for other in _cover(entries, rarer, found):
            if full[other]:
                numbers += self._having(words[word], [(low, min(high, max(found[other])))], ROWS, [words[other]])
            else:
                few.append(words[other])
        if few:
            numbers += self._having(words[word], [(low, high)], ROWS, few)
        return list(dict.fromkeys(numbers))

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """The first entries that have a word, at most so many of all ranges together; if `among` is given, of those that also
        have one of these words."""
        # A quoted word is never syntax: the tokenizer leaves letters, digits and `_` in it, no quote.
        match = f'"{word}"'
        if among:
            others = '" OR "'.join(among)
            match = f'{match} AND ("{others}")'
        each = max(DEPTH, depth // len(ranges))
        bindings = [(match, low, high, each) for low, high in ranges]
        found: list[int] = []
        for (numbers,) in rows_of_each(self._db, self._scan, bindings):
            found += _integers(numbers)
        return found

    def newest(self, every: str, some: str, segment: int, limit: int) -> list[int]:
        """The newest entries of a segment that have every one of these words, and one of the others if there are any: those with
        the lowest numbers."""
        words, others = self.terms(every), self.terms(some) if some else {}
        if not words or limit < 1:
            return []
        match = " AND ".join(f'"{word}"' for word in words)
        if others:
            listed = '" OR "'.join(others)
            match = f'{match} AND ("{listed}")'
        found = rows(self._db, self._newest, match, segment << 32, (segment + 1 << 32) - 1, limit)
        return [number for (number,) in found if isinstance(number, int)]

    def _having_within(self, word: str, found: list[int], last: int, high: int, wanted: Set[int], depth: int) -> list[int]:
        """The first entries of these segments that have a word, of which `found` are those up to entry `last`."""
        while len(found) < depth:
            numbers = self._having(word, [(last + 1, high)], ROWS)
            found += [number for number in numbers if number >> 32 in wanted]
            if len(numbers) < ROWS:
                break
            last = numbers[-1]
        return found

    def stems(self, text: str) -> set[str]:
        """The words, as stored, that a passage with this text has in the index."""
        data = searchable(text).encode("utf-8")
        return set(_tokens(self._stem, data, apsw.FTS5_TOKENIZE_DOCUMENT))

    def postings(self) -> Iterator[tuple[str, int]]:
        """Every word of the index with every entry that has it."""
        view = f"temp.{self._name}_words"
        self._db.execute(f"CREATE VIRTUAL TABLE IF NOT EXISTS {view} USING fts5vocab(main, {self._name}, instance)")
        yield from cast("Iterator[tuple[str, int]]", self._db.execute(f"SELECT term, doc FROM {view}"))

    def spans(self, numbers: Sequence[int]) -> dict[int, tuple[int, Span]]:
        """Page and span of entries."""
        select = "SELECT value, page, start, stop FROM json_each(?) CROSS JOIN passage ON passage.id = value"
        spans = rows(self._db, select, listed(numbers))
        return {
            number: (page, (start, stop))
            for number, page, start, stop in spans
            if isinstance(page, int) and _is_span(start, stop)
        }

    def of_pages(self, keys: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int, Span]]:
        """The entries of pages with their spans, of each page in reading order."""
        select = (
            "SELECT process, page.id, passage.id, start, stop FROM json_each(?)"
            " CROSS JOIN page ON process = ? AND page.id = value"
            " CROSS JOIN passage ON passage.id BETWEEN first AND last WHERE passage.page = page.id ORDER BY key, passage.id DESC"
        )
        for segment, page, number, start, stop in rows_of_each(self._db, select, by_segment(keys)):
            if _is_span(start, stop):
                yield (segment, page), number, (start, stop)


def _best(rarities: Mapping[int, float], short: Sequence[float], limit: int) -> list[tuple[int, float]]:
    """The best entries, with their scores; of equals, the newer one."""
    scores = _scores(rarities, short)
    least = _least(scores, limit)
    best = sorted([(-score, number) for score, number in zip(scores, rarities, strict=True) if score >= least])
    return [(number, -score) for score, number in best[:limit]]


def _scores(rarities: Mapping[int, float], short: Sequence[float]) -> list[float]:
    return [rarity * short[number & 15] for number, rarity in rarities.items()]


def _least(scores: Sequence[float], limit: int) -> float:
    """What each of the best has at least."""
    return sorted(scores)[-limit] if len(scores) >= limit else 0.0


def _cover(entries: Iterable[int], words: Sequence[int], found: Sequence[Sequence[int]]) -> Sequence[int]:
    """The first of these words, which are the rarest, of which each entry has one; all of them, where some has none that was
    looked at."""
    left = set(entries)
    for number, word in enumerate(words, 1):
        left.difference_update(found[word])
        if not left:
            return words[:number]
    return words


def _is_span(start: object, stop: object) -> bool:
    """A nonsensical entry is damage, which `fsck` reports; it is not a hit."""
    return isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop


def _tokens(split: apsw.FTS5Tokenizer, data: bytes, reason: int) -> list[str]:
    return cast("list[str]", split(data, reason, None, include_offsets=False, include_colocated=False))


def _first_word(leaf: bytes) -> bytes:
    """The first word of a page of the index, as it is stored; empty where there is none."""
    try:
        footer, _ = varint(leaf, int.from_bytes(leaf[2:4]))
        length, start = varint(leaf, footer)
    except IndexError:
        return b""
    return leaf[start : start + length]


def _oddness(word: str) -> tuple[bool, int]:
    return not word.isalpha(), len(word)


def _ranges(segments: Iterable[int]) -> list[tuple[int, int]]:
    """The entries of segments, which come in order, as ranges; neighbours share one."""
    runs: list[list[int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment - 1:
            runs[-1][1] = segment
        else:
            runs.append([segment, segment])
    return [(first << 32, (last + 1 << 32) - 1) for first, last in runs]
