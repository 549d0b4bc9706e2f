"""One long tool output, condensed to the lines that tell most, verbatim.

Rules for the outputs of common tools: totals of a test run, names of failed tests, exceptions and
their last frames, definitions in code, what the query names, head and tail; repeated log lines
once. Nothing is written but the marks for gaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from kilburn.page import Span
from kilburn.text.identifiers import rare_words
from kilburn.text.lines import OMISSION, join, merge, outline, plain, sample, skeleton, units
from kilburn.text.signs import Sign, case_of, sign_of

__all__ = ["condense"]

_LARGE = 4_000_000


def condense(text: str, tokens: int, count: Callable[[str], int], query: str = "") -> tuple[Span, ...]:
    """Spans of the text to keep, sorted and apart, so that `join(text, spans)` is within `tokens`.

    The whole text if it fits; no span if not even one line does. Lines are kept whole, except those over 320
    characters, which are cut. A text of more than 4 million characters is sampled: head, tail, and what surrounds
    error words between.

    Args:
        tokens: the budget, marks included, in the unit of `count`.
        query: what the reader wants to know; lines with its names and rare words come first.
    """
    if tokens <= 0 or not text:
        return ()
    if len(text) <= 40 * tokens + 200 and count(text) <= tokens:
        return ((0, len(text)),)
    lines = [span for start, end in sample(text, _LARGE) for span in units(text, 320, start, end)]
    reading = _Reading(text, lines)
    picker = Picker(text, reading.lines, count)
    for indices, share in reading.rounds(picker, query, tokens):
        picker.offer(indices, int(tokens * share))
    return picker.fit(tokens)


_HEADING = re.compile(r"((?:\x1b\[[0-9;]*m)*_{3,} ?(?:ERROR at \w+ of )?)([^\s_].*?)( ?_{3,}(?:\x1b\[[0-9;]*m)*\s*)")
_NAME = re.compile(r"[A-Za-z]\w*(?:[._/]\w+)+|[A-Z]?[a-z]+[A-Z]\w+")
_CASE_LINE = re.compile(r"(?:\x1b\[[0-9;]*m)*(?:FAILED|ERROR) ?(?:\x1b\[[0-9;]*m)* ?\S+")


def _split(text: str, lines: Sequence[Span]) -> tuple[list[Span], frozenset[int]]:
    """The lines, and which of them are names of failed tests. A line with such a name is cut around the name, so that
    names can be kept even if messages do not fit."""
    result: list[Span] = []
    named: set[int] = set()
    for start, end in lines:
        first = text[start]
        match = _HEADING.fullmatch(text, start, end) if first in "_\x1b" else None
        if match:
            named.add(len(result) + 1)
            result.extend(match.span(group) for group in (1, 2, 3))
            continue
        if first in "\x1bFE" and _CASE_LINE.match(text, start, end):
            cut = text.find(" - ", start, end)
            if cut > 0:
                result.append((start, cut))
                start = cut
        result.append((start, end))
    return result, frozenset(named)


class _Reading:
    """The signs of all lines, with repetitions known."""

    def __init__(self, text: str, lines: Sequence[Span]) -> None:
        self.text = text
        self.lines, named = _split(text, lines)
        lines = self.lines
        self.signs: dict[Sign, list[int]] = {sign: [] for sign in Sign}
        self.fresh: list[bool] = [False] * len(lines)
        self.novel: list[bool] = [False] * len(lines)
        outlines: set[str] = set()
        seen: dict[str, Sign] = {}
        for index, (start, end) in enumerate(lines):
            line = text[start:end]
            shape = skeleton(line)
            sign = seen.get(shape)
            if index in named:
                seen[shape] = Sign.FAILED
                self.signs[Sign.FAILED].append(index)
            elif sign is None:
                sign = seen[shape] = sign_of(line)
                self.fresh[index] = len(shape) > 1
                rough = outline(shape)
                self.novel[index] = self.fresh[index] and rough not in outlines
                outlines.add(rough)
                self.signs[sign].append(index)
            elif sign in (Sign.SUMMARY, Sign.FAILED):
                self.signs[sign].append(index)

    def line(self, index: int) -> str:
        start, end = self.lines[index]
        return self.text[start:end]

    def rounds(self, picker: Picker, query: str, tokens: int) -> Iterator[tuple[Iterable[int], float]]:
        """Lines from the most to the least informative, each round with the share of the budget that it may fill."""
        last = len(self.lines) - 1
        summaries = self.signs[Sign.SUMMARY]
        errors = self.signs[Sign.ERROR]
        failed = bool(self.signs[Sign.FAILED])
        yield [*self._tail(2), *self._head(1)], 0.15
        yield summaries[::-1][:6], 0.4
        asked = self._asked(query)[:40]
        yield asked[:1], 0.7
        yield asked, 0.4 if failed else 0.3
        yield from self._failures(picker, tokens)
        yield self._cause(errors), 0.85
        yield self._ordered(errors), 0.88 if failed else 0.75
        yield self._frames(errors), 0.92 if failed else 0.85
        definitions = self.signs[Sign.DEFINITION]
        yield self._spread(definitions), 0.95 if not failed else 0.92
        yield [index for index in self.signs[Sign.WARNING] if self.novel[index]][-6:], 0.95
        yield summaries[::-1][:12], 0.95
        yield self._naming(), 0.9
        yield self._edges(last, self.novel), 1.0
        yield self._edges(last, self.fresh), 0.6

    def _head(self, most: int) -> list[int]:
        return [index for index in range(min(len(self.lines), 12)) if self.line(index).strip()][:most]

    def _tail(self, most: int) -> list[int]:
        last = len(self.lines) - 1
        return [index for index in range(last, max(-1, last - 12), -1) if self.line(index).strip()][:most]

    def _failures(self, picker: Picker, tokens: int) -> Iterator[tuple[list[int], float]]:
        """One line for each failed test, with its message if all of
        those fit, else its name in the fullest notation that fits, else in the shortest."""
        full: dict[tuple[str, str], int] = {}
        short: dict[tuple[str, str], int] = {}
        for index in self.signs[Sign.FAILED]:
            line = self.line(index)
            case = case_of(line)
            if case not in full or plain(line).startswith(("FAILED", "ERROR", "FAIL:")):
                full[case] = index
            if case not in short or picker.cost(index) < picker.cost(short[case]):
                short[case] = index
        report = self._report()
        named = {name for owner, name in full if owner}
        for case in list(full):
            if case not in report if report else not case[0] and case[1] in named:
                del full[case], short[case]
        room = int(tokens * 0.8) - picker.spent
        for forms in (full, short):
            cases = sorted(forms, key=lambda case: forms[case])
            order = [forms[case] for case in cases]
            costs = sum(picker.cost(index) + picker.gap for index in order)
            if costs <= room or forms is short:
                yield order, 0.8
                messages = [index + 1 for index in order if self._has_message(index)]
                yield messages, 0.8
                return

    def _has_message(self, index: int) -> bool:
        """Whether the next unit is the message behind this name."""
        end = self.lines[index][1]
        return index + 1 < len(self.lines) and self.lines[index + 1][0] == end and self.text.startswith(" - ", end)

    def _report(self) -> set[tuple[str, str]]:
        """The cases in the run's own list of failed tests, where it has one: pytest's short summary, or
        the headings of unittest. Else none: every line that names a failed test counts."""
        begin = self.text.rfind("short test summary info")
        if begin >= 0:
            lines = [self.line(index) for index in self.signs[Sign.FAILED] if self.lines[index][0] > begin]
        else:
            lines = [line for line in map(self.line, self.signs[Sign.FAILED]) if line.startswith(("ERROR: ", "FAIL: "))]
        return {case_of(line) for line in lines}

    def _cause(self, errors: list[int]) -> list[int]:
        """The first and the last error."""
        return [errors[-1], errors[0]] if errors else []

    def _ordered(self, errors: list[int]) -> list[int]:
        """Errors that name a class or a place before those that only mention one, the rest in order."""
        strong = [index for index in errors if any(word in self.line(index) for word in ("Error", ": error", "Exception"))]
        ranked = dict.fromkeys([*(index for index in strong if self.novel[index]), *strong, *errors])
        return list(ranked)

    def _frames(self, errors: list[int]) -> list[int]:
        """The line before each error and the last frame above it."""
        wanted: list[int] = []
        for index in errors:
            for back in range(1, 5):
                at = index - back
                if at < 0:
                    break
                line = self.line(at).lstrip()
                if line.startswith(("File ", "at ", "--> ")):
                    wanted.extend((at, at + 1))
                    break
            else:
                wanted.append(index + 1 if index + 1 < len(self.lines) else index)
        return list(dict.fromkeys(wanted))

    def _asked(self, query: str) -> list[int]:
        """Lines with the query's terms; rarer terms and more of them first."""
        terms = [term.lower() for term in rare_words(query)] if query else []
        if not terms:
            return []
        scores: dict[int, float] = {}
        low = [self.line(index).lower() if self.fresh[index] else "" for index in range(len(self.lines))]
        for term in terms:
            hits = [index for index, line in enumerate(low) if term in line]
            if hits and len(hits) < max(30, len(low) // 4):
                for index in hits:
                    scores[index] = scores.get(index, 0.0) + 1.0 / (2 + len(hits)) ** 0.5
        for index in self.signs[Sign.DEFINITION]:
            if index in scores:
                scores[index] *= 1.5
        return sorted(scores, key=lambda index: (-scores[index], index))

    def _spread(self, indices: list[int]) -> list[int]:
        """Every n-th first, so that a part of a long list still covers the whole text."""
        order: list[int] = []
        step = 1 << max(0, len(indices).bit_length() - 1)
        while step >= 1:
            order.extend(indices[place] for place in range(0, len(indices), step))
            step //= 2
        return list(dict.fromkeys(order))

    def _naming(self) -> list[int]:
        """Lines by the number of names that no earlier line had, relative to their length."""
        seen: set[str] = set()
        density: dict[int, float] = {}
        for index, wanted in enumerate(self.novel):
            if wanted:
                names = set(_NAME.findall(self.line(index)))
                fresh = names - seen
                seen |= names
                if fresh:
                    density[index] = len(fresh) / (self.lines[index][1] - self.lines[index][0] + 24)
        return sorted(density, key=lambda index: (-density[index], index))

    def _edges(self, last: int, wanted: Sequence[bool]) -> Iterator[int]:
        """Wanted lines from both ends inwards."""
        for step in range(last + 1):
            for index in (step, last - step):
                if wanted[index]:
                    yield index


class Picker:
    """Lines of one text that were chosen so far, and what they cost.

    Args:
        text: the original.
        lines: candidate spans, sorted, not overlapping.
        count: tokens of a text.
    """

    def __init__(self, text: str, lines: Sequence[Span], count: Callable[[str], int]) -> None:
        self.text, self.lines, self.count = text, lines, count
        self.gap = max(1, count(OMISSION))
        self.order: list[int] = []
        self.chosen: set[int] = set()
        self.spent = self.gap
        self._costs: dict[int, int] = {}

    def cost(self, index: int) -> int:
        """Tokens of one line alone, counted once."""
        known = self._costs.get(index)
        if known is None:
            start, end = self.lines[index]
            piece = self.text[start:end]
            known = self._costs[index] = max(1, self.count(piece)) + (0 if piece[-1:] == "\n" else 1)
        return known

    def price(self, index: int) -> int:
        """What choosing the line would add: its own tokens, and a gap more or less."""
        return self.cost(index) + self.gap * (1 - self._joined(index - 1, index) - self._joined(index, index + 1))

    def _joined(self, left: int, right: int) -> int:
        """1 where choosing the one beside the other, or beside the text's edge, leaves no gap between."""
        if left < 0:
            return int(self.lines[right][0] == 0)
        if right >= len(self.lines):
            return int(self.lines[left][1] == len(self.text))
        near = left in self.chosen or right in self.chosen
        return int(near and self.lines[left][1] == self.lines[right][0])

    def offer(self, indices: Iterable[int], cap: int) -> bool:
        """Take the lines in that order while the whole stays at or under `cap` tokens; one that does not
        fit is passed over, eight in a row end it. True where all were taken."""
        refused, all_taken = 0, True
        for index in indices:
            if index in self.chosen:
                continue
            price = self.price(index)
            if self.spent + price > cap:
                refused, all_taken = refused + 1, False
                if refused >= 8:
                    break
                continue
            refused = 0
            self.chosen.add(index)
            self.order.append(index)
            self.spent += price
        return all_taken

    def fit(self, tokens: int) -> tuple[Span, ...]:
        """The chosen spans, merged, the latest choices given up until the finished text fits `tokens`."""
        keep = len(self.order)
        while keep > 0:
            spans = merge(self.lines[index] for index in self.order[:keep])
            used = self.count(join(self.text, spans))
            if used <= tokens:
                return spans
            keep = min(keep - 1, int(keep * tokens / used))
        return ()
