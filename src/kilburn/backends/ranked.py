"""What ranks the passages of a tenant by the words of a query, wherever the words of its passages are kept.

An entry's number is segment << 32 | place << 4 | length class, so that one segment is a range of
numbers and ranking knows a passage's length without another look-up. Places count down, because the
newest passages are looked at first.

Ranking sums, over the query's words, the word's rarity times the passage's shortness: BM25
(Robertson & Zaragoza 2009) with each word counted once. A path counts as one word, by the rarest of its parts that the
passage has: else whoever only names a file would outrank what stands in it. Only `ROWS` passages are visited at most. The
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

from kilburn.backends.passages import JOINT, PATH, TOKENIZER, searchable, shorten
from kilburn.page import Span
from kilburn.retrieval import STOP

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

PLACES = (1 << 28) - 1
"""Passages that one segment can have."""

K1, B = 1.2, 0.5


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
        return ranges_of(self.segments)

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


class RankedIndex:
    """Ranks the passages that have a query's words. A backend knows which passages have a word: `_having`.

    Words are split and stemmed by SQLite's tokenizers, for every backend: so all find the same.
    """

    def __init__(self, db: apsw.Connection) -> None:
        # Splits as the index does, but leaves stemming to whoever looks a word up: stemming twice is not stemming once.
        self._split = db.fts5_tokenizer(TOKENIZER[1], list(TOKENIZER[2:]))
        self._stem = db.fts5_tokenizer(TOKENIZER[0], list(TOKENIZER[1:]))

    def _having(self, word: str, ranges: Sequence[tuple[int, int]], depth: int, among: Sequence[str] = ()) -> list[int]:
        """The first entries that have a word, at most so many of all ranges together; if `among` is given, of those that also
        have one of these words."""
        raise NotImplementedError

    def _having_each(self, words: Sequence[str], ranges: Sequence[tuple[int, int]], depth: int) -> list[list[int]]:
        """The first entries that have each of these words."""
        return [self._having(word, ranges, depth) for word in words]

    def newest(self, every: str, some: str, segment: int, limit: int) -> list[int]:
        """Return the newest entries of a segment that have every word of `every` and, unless that is "", one of `some`: those
        with the lowest numbers."""
        raise NotImplementedError

    def spans(self, numbers: Sequence[int]) -> dict[int, tuple[int, Span]]:
        """Return page and span of entries, by number."""
        raise NotImplementedError

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
        found = self._having_each(words, ranges, first)
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
        rarities: dict[int, float] = {}
        having: dict[str, set[int]] = {}
        rarer: list[int] = []
        visited = 0
        for at in sorted(range(len(words)), key=lambda at: (full[at], sizes[at])):
            if full[at] and visited >= ENOUGH * limit:
                # Most passages that have a common word and no rarer one cannot be among the best.
                numbers = [number for number in self._among(words, at, rarer, found, full, ranges) if number in rarities]
            else:
                numbers = found[at]
                rarer.append(at)
                visited += len(numbers)
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
        return _best(rarities, short, limit)

    def _among(
        self,
        words: Sequence[str],
        word: int,
        rarer: Sequence[int],
        found: Sequence[Sequence[int]],
        full: Sequence[bool],
        ranges: Sequence[tuple[int, int]],
    ) -> set[int]:
        """The entries that have a word and, as far as these were looked at, a rarer one; and a few others."""
        whole = [words[other] for other in rarer if not full[other]]
        entries = set(self._having(words[word], ranges, ROWS, whole) if whole else ())
        if cut := [other for other in rarer if full[other]]:
            last = max(max(found[other]) for other in cut)
            looked = [(low, min(high, last)) for low, high in ranges if low <= last]
            entries.update(self._having(words[word], looked, ROWS, [words[other] for other in cut]))
        return entries

    def _having_within(self, word: str, found: list[int], last: int, high: int, wanted: Set[int], depth: int) -> list[int]:
        """The first entries of these segments that have a word, of which `found` are those up to entry `last`."""
        while len(found) < depth:
            numbers = self._having(word, [(last + 1, high)], ROWS)
            found += [number for number in numbers if number >> 32 in wanted]
            if len(numbers) < ROWS:
                break
            last = numbers[-1]
        return found

    def stem_of(self, word: str) -> str:
        """A word of a query as it is stored."""
        found = _tokens(self._stem, word.encode("utf-8", "replace"), apsw.FTS5_TOKENIZE_QUERY)
        return found[0] if found else word

    def stems(self, text: str) -> set[str]:
        """The words, as stored, that a passage with this text has in the index."""
        data = searchable(text).encode("utf-8")
        return set(_tokens(self._stem, data, apsw.FTS5_TOKENIZE_DOCUMENT))


def _best(rarities: Mapping[int, float], short: Sequence[float], limit: int) -> list[tuple[int, float]]:
    """The best entries, with their scores; of equals, the newer one."""
    scores = [rarity * short[number & 15] for number, rarity in rarities.items()]
    least = sorted(scores)[-limit] if len(scores) >= limit else 0.0
    best = sorted([(-score, number) for score, number in zip(scores, rarities, strict=True) if score >= least])
    return [(number, -score) for score, number in best[:limit]]


def _tokens(split: apsw.FTS5Tokenizer, data: bytes, reason: int) -> list[str]:
    return cast("list[str]", split(data, reason, None, include_offsets=False, include_colocated=False))


def _oddness(word: str) -> tuple[bool, int]:
    return not word.isalpha(), len(word)


def ranges_of(segments: Iterable[int]) -> list[tuple[int, int]]:
    """The entries of segments, which come in order, as ranges; neighbours share one."""
    runs: list[list[int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment - 1:
            runs[-1][1] = segment
        else:
            runs.append([segment, segment])
    return [(first << 32, (last + 1 << 32) - 1) for first, last in runs]
