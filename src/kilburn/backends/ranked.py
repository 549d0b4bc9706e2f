"""Ranks the passages of a tenant by the words of a query, for every backend.

An entry's number is segment << 32 | place << 5 | by_user << 4 | length class, so that one segment is a range of numbers, and
ranking knows a passage's length, and the index its words, without a look-up. Places count down, because the newest passages are
examined first.

Passages of the user also have the word `BY_USER`, so a search limited to them reads no others.

Ranking sums, over the query's words, the word's rarity times the passage's shortness: BM25
(Robertson & Zaragoza 2009) with each word counted once. A path counts as one word, by the rarest of its parts that the
passage has: otherwise a passage that only names a file would outrank the file's content. At most `ROWS` passages are
visited. The
frequency of a word that has more is estimated from how close together the visited ones lie, and such a word is
looked up only among the passages that have a rarer word of the query.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache, cached_property
from itertools import accumulate
from typing import cast

import apsw

from kilburn.backends.passages import BY_USER, JOINT, PATH, TOKENIZER, add_name_parts, shorten
from kilburn.page import Span
from kilburn.retrieval import STOP

CLASSES = 16
NUMBERS = 2 * CLASSES
"""Number of entries per place: one for each length class, for the user's passages and for others."""

MAX_TERMS = 16
"""Words of a query that are looked up, at most: the longest and most unusual ones, which are the rarest."""

ROWS = 4096
"""Passages visited for all words of a query together, at most."""

DEPTH = 33
"""Passages visited for each word in each range, at least."""

MAX_RANGES = 64
"""Ranges that are searched separately, at most; from more ranges hits are picked out of one large range."""

RARE_PER_HIT = 8
"""Passages with rarer words visited for each hit, before common words are looked up only among these."""

PLACES = (1 << 27) - 1
"""Maximum number of passages of a segment."""

K1, B = 1.2, 0.5


@cache
def length_class(length: int) -> int:
    """Return the class of a passage's length: 0 for up to 25 characters, 15 for 800 and more, three classes per doubling."""
    return max(0, min(CLASSES - 1, round(3 * math.log2(max(length, 1) / 25))))


CLASS_LENGTH = tuple(25 * 2 ** (number / 3) for number in range(CLASSES))


def make_entry(segment: int, number: int, length: int, *, by_user: bool) -> int:
    """Return the entry of a segment's passage `number`, counted from 0 in the order of indexing, with `length` characters."""
    return segment << 32 | (PLACES - number) << 5 | (CLASSES if by_user else 0) | length_class(length)


def last_entry(segment: int, number: int) -> int:
    """Return the highest number that a segment's passage `number` can have as an entry."""
    return segment << 32 | (PLACES - number) << 5 | NUMBERS - 1


def is_by_user(entry: int) -> bool:
    """Return whether an entry is of a passage of the user."""
    return bool(entry & CLASSES)


def passage_number(entry: int) -> int:
    """Return how many passages its segment had before this one."""
    return PLACES - ((entry & 0xFFFFFFFF) >> 5)


class Extents:
    """The extent of some segments: how many passages they have, and how long these are.

    Args:
        segments: (segment, entries ever added, their total characters), oldest first.
    """

    def __init__(self, segments: Iterable[tuple[int, int, int]]) -> None:
        searchable_rows = [row for row in segments if row[1]]
        self.segments = [segment for segment, *_ in searchable_rows]
        self._until = list(accumulate(passages for _, passages, _ in searchable_rows))
        self._characters = {segment: characters for segment, _, characters in searchable_rows}
        self._total = sum(self._characters.values())
        self._note()

    def _note(self) -> None:
        self.count = self._until[-1] if self._until else 0
        self.mean = self._total / max(1, self.count)

    @cached_property
    def wanted(self) -> Set[int]:
        """The numbers of the segments."""
        return self._characters.keys()

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """The entries of the segments as ranges; adjacent segments share one."""
        return entry_ranges(self.segments)

    def put(self, segment: int, passages: int, characters: int) -> None:
        """Update a segment's figures."""
        if not passages:
            return
        at = bisect_left(self.segments, segment)
        preceding = self._until[at - 1] if at else 0
        if segment not in self._characters:
            self.segments.insert(at, segment)
            self._until.insert(at, preceding)
            self.__dict__.pop("ranges", None)
        if more := preceding + passages - self._until[at]:
            self._until[at:] = [until + more for until in self._until[at:]]
        self._total += characters - self._characters.get(segment, 0)
        self._characters[segment] = characters
        self._note()

    def estimate(self, numbers: Sequence[int]) -> float:
        """Estimate how many entries have a word, from the first ones that were examined."""
        segment, newer = numbers[-1] >> 32, passage_number(numbers[-1])
        at = bisect_right(self.segments, segment) - 1
        # Entries up to the last examined one.
        preceding = self._until[at] - (newer if self.segments[at] == segment else 0)
        return min(float(self.count), len(numbers) * self.count / max(len(numbers), preceding))


class RankedIndex:
    """Ranks the passages that have a query's words. A backend looks words up: `_having`.

    Every backend splits and stems words with SQLite's tokenizers, so all find the same passages.
    """

    def __init__(self, db: apsw.Connection) -> None:
        # Splits like the index but does not stem: the look-up stems, and stemming twice differs from stemming once.
        self._split = db.fts5_tokenizer(TOKENIZER[1], list(TOKENIZER[2:]))
        self._stem = db.fts5_tokenizer(TOKENIZER[0], list(TOKENIZER[1:]))

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """Return the first entries with a word, at most `depth` from all ranges together; with `among`, only entries that also
        have one of these words."""
        raise NotImplementedError

    def _having_each(
        self, words: Sequence[str], ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()
    ) -> list[list[int]]:
        """Return the first entries of each word; see `_having`."""
        return [self._having(word, ranges, depth, among) for word in words]

    def expect(self, query: str, first: int, last: int, *, by_user: bool = False) -> None:
        """Prepare a search of segments from `first` to `last`, where that saves waiting for a server."""

    def newest(self, every: str, any_of: str, segment: int, limit: int) -> list[int]:
        """Return the newest entries of a segment that have every word of `every` and, unless that is "", one of `any_of`: those
        with the lowest numbers."""
        raise NotImplementedError

    def spans(self, numbers: Sequence[int]) -> dict[int, tuple[int, Span]]:
        """Return page and span of entries, by number."""
        raise NotImplementedError

    def terms(self, query: str) -> dict[str, str]:
        """Return the words of a query to look up, split like the index, each with its compound (such as a path) or itself."""
        text = shorten(query)
        wholes: dict[str, str] = {}
        runs = {run: self._words(run) for run in dict.fromkeys(PATH.findall(text)) if len(JOINT.split(run)) > 2}
        for run in sorted(runs, key=lambda run: len(runs[run]), reverse=True):
            wholes.update(dict.fromkeys(runs[run], run))
        words_in_order = dict.fromkeys(self._words(text))
        words = [word for word in words_in_order if word not in STOP] or list(words_in_order)
        if len(words) > MAX_TERMS:
            words.sort(key=lambda word: (not word.isalpha(), len(word)), reverse=True)
            # Half of the words are reserved for others than parts of paths.
            plain = [word for word in words if word not in wholes][: MAX_TERMS // 2]
            words = [*plain, *(word for word in words if word not in plain)][:MAX_TERMS]
        return {word: wholes.get(word, word) for word in words}

    def _words(self, text: str) -> list[str]:
        return _tokens(self._split, add_name_parts(text).encode("utf-8", "replace"), apsw.FTS5_TOKENIZE_QUERY)

    def search(
        self, query: str, extents: Extents, limit: int, *, apart: bool = False, by_user: bool = False
    ) -> list[tuple[int, float]]:
        """Return the best matching entries with scores, best first.

        Args:
            extents: the segments to search.
            apart: whether entries of other segments may lie between theirs.
            by_user: search only entries of the user's passages.
        """
        terms = self.terms(query)
        words, count = list(terms), extents.count
        if not words or limit < 1 or count < 1:
            return []
        depth = max(DEPTH, ROWS // len(words))
        ranges = [(extents.segments[0] << 32, (extents.segments[-1] + 1 << 32) - 1)]
        among = (BY_USER,) if by_user else ()
        # One long look-up is cheaper than one for each range.
        first = ROWS if apart else depth
        entries = self._having_each(words, ranges, first, among)
        full = [len(numbers) >= first for numbers in entries]
        numbers_searched = extents.wanted
        if apart:
            runs = extents.ranges
            for at, numbers in enumerate(entries):
                inside = [number for number in numbers if number >> 32 in numbers_searched]
                if full[at] and len(runs) > MAX_RANGES:
                    inside = self._having_within(words[at], inside, numbers[-1], ranges[0][1], numbers_searched, depth, among)
                    full[at] = len(inside) >= depth
                elif full[at]:
                    inside = self._having(words[at], runs, depth, among)
                    full[at] = len(runs) == 1 and len(inside) >= depth
                entries[at] = inside
            if len(runs) == 1:
                ranges = runs
        short = [(K1 + 1) / (1 + K1 * (1 - B + B * length / max(extents.mean, 1.0))) for length in CLASS_LENGTH]
        sizes = [extents.estimate(numbers) if cut else len(numbers) for numbers, cut in zip(entries, full, strict=True)]
        worth = [math.log(1 + (count - size + 0.5) / (size + 0.5)) for size in sizes]
        rarities: dict[int, float] = {}
        having: dict[str, set[int]] = {}
        rarer: list[int] = []
        visited = 0
        for at in sorted(range(len(words)), key=lambda at: (full[at], sizes[at])):
            if full[at] and visited >= RARE_PER_HIT * limit:
                # Passages with a common word and no rarer one are rarely among the best.
                numbers = [number for number in self._among(words, at, rarer, entries, full, ranges) if number in rarities]
            else:
                numbers = entries[at]
                rarer.append(at)
                visited += len(numbers)
            if terms[words[at]] != words[at]:
                # The rarest part of a path comes first; its other parts do not count.
                counted = having.setdefault(terms[words[at]], set())
                numbers = [number for number in numbers if number not in counted]
                counted.update(numbers)
            rarity = worth[at]
            if rarities:
                rarity_of = rarities.get
                for number in numbers:
                    rarities[number] = rarity_of(number, 0.0) + rarity
            else:
                rarities = dict.fromkeys(numbers, rarity)
        return _best(rarities, short, limit)

    def _among(
        self,
        words: Sequence[str],
        word: int,
        rarer: Sequence[int],
        entries_by_word: Sequence[Sequence[int]],
        full: Sequence[bool],
        ranges: Sequence[tuple[int, int]],
    ) -> set[int]:
        """Return the entries with a word and a rarer one, as far as those were examined, and a few others."""
        whole = [words[at] for at in rarer if not full[at]]
        entries = set(self._having(words[word], ranges, ROWS, whole) if whole else ())
        if cut := [at for at in rarer if full[at]]:
            last = max(max(entries_by_word[at]) for at in cut)
            looked = [(low, min(high, last)) for low, high in ranges if low <= last]
            entries.update(self._having(words[word], looked, ROWS, [words[at] for at in cut]))
        return entries

    def _having_within(
        self, word: str, entries: list[int], last: int, high: int, segments: Set[int], depth: int, among: Sequence[str]
    ) -> list[int]:
        """Return the first entries of these segments with a word, given those up to entry `last`."""
        while len(entries) < depth:
            numbers = self._having(word, [(last + 1, high)], ROWS, among)
            entries += [number for number in numbers if number >> 32 in segments]
            if len(numbers) < ROWS:
                break
            last = numbers[-1]
        return entries

    def query_stem(self, word: str) -> str:
        """Return the stem of a query's word."""
        stems = _tokens(self._stem, word.encode("utf-8", "replace"), apsw.FTS5_TOKENIZE_QUERY)
        return stems[0] if stems else word

    def stems(self, text: str, by_user: bool) -> set[str]:
        """Return the stems by which the index has a passage with this text."""
        data = add_name_parts(text, by_user).encode("utf-8")
        return set(_tokens(self._stem, data, apsw.FTS5_TOKENIZE_DOCUMENT))


def _best(rarities: Mapping[int, float], short: Sequence[float], limit: int) -> list[tuple[int, float]]:
    """Return the best entries with their scores; of equals, the newer one."""
    scores = [rarity * short[number & 15] for number, rarity in rarities.items()]
    threshold = sorted(scores)[-limit] if len(scores) >= limit else 0.0
    best = sorted([(-score, number) for score, number in zip(scores, rarities, strict=True) if score >= threshold])
    return [(number, -score) for score, number in best[:limit]]


def _tokens(split: apsw.FTS5Tokenizer, data: bytes, reason: int) -> list[str]:
    return cast("list[str]", split(data, reason, None, include_offsets=False, include_colocated=False))


def entry_ranges(segments: Iterable[int]) -> list[tuple[int, int]]:
    """Return the entries of segments in ascending order as ranges; adjacent segments share one."""
    runs: list[list[int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment - 1:
            runs[-1][1] = segment
        else:
            runs.append([segment, segment])
    return [(first << 32, (last + 1 << 32) - 1) for first, last in runs]
