"""The offline optimum: it knows what will be needed and when, and is the bound for policies that do not.

From Belady's MIN (IBM Systems Journal 5:2, 1966): what is needed furthest in the future leaves first. Here the unit
is a span of a page: of what leaves, the spans that will be needed stay, those needed soonest first. If each span is
needed once and all have one size, no choice shows more of them (the greedy rule for intervals on k machines). For
spans of mixed sizes it is a close bound. Existing excerpts are left alone while they fit, so it edits little. It is
only for measurements on recorded runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kilburn.message import Kind
from kilburn.move import Fold, Move
from kilburn.page import Page, Parts, Span
from kilburn.policy import View
from kilburn.selection.excerpts import cited_stretch, excerpt_moves, old_pages, split_excerpts
from kilburn.selection.lines import merge

__all__ = ["Belady"]

Future = Mapping[int, Sequence[tuple[int, Sequence[Span]]]]
"""By original page: the turns at which it is needed, in order, and which spans of it."""


@dataclass(frozen=True)
class Belady:
    """Keep exactly what a recorded run will need.

    Args:
        future: what is needed when. Spans of the turn that was just admitted are still needed.
    """

    future: Future = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.future, Mapping):
            raise ValueError(f"future={self.future!r} is no mapping of pages to their uses")

    def plan(self, view: View) -> Sequence[Move]:
        """Replace everything older than the latest message by an excerpt of the spans that will be needed."""
        mended = self._mended(view)
        if not view.excess:
            return mended
        leaving = old_pages(view, 0, 0)
        saved, latest = self._latest(view)
        if not leaving:
            return mended or latest
        excerpts, young = split_excerpts(leaving)
        stays = view.use - saved - sum(page.tokens for page in leaving)
        room = view.budget.capacity - stays - 2 * view.handle
        excerpt_tokens = sum(page.tokens for page in excerpts)
        moves = self._excerpt(view, young, room - excerpt_tokens) if young else []
        if not moves or excerpt_tokens + _size(moves) > room - view.budget.capacity // 8:
            moves = self._excerpt(view, leaving, room)
        return [*(mended or latest), *moves]

    def needed(self, page: int, turn: int) -> list[tuple[int, Span]]:
        """The spans of an original that are needed at this turn or later, each with the turn of its next use."""
        first: dict[Span, int] = {}
        for due, spans in self.future.get(page, ()):
            if due >= turn:
                for span in spans:
                    first.setdefault(span, due)
        return [(due, span) for span, due in first.items()]

    def _excerpt(self, view: View, pages: Sequence[Page], room: int) -> list[Move]:
        stretch = cited_stretch(view, pages)
        parts = self._parts(view, stretch.sources, room - view.handle)
        why = f"what {len(pages)} pages will be needed for"
        return excerpt_moves(stretch, parts, why, nothing="never needed again", torn="never needed again")

    def _parts(self, view: View, sources: Iterable[int], room: int) -> Parts:
        """Return the spans that will be needed, soonest first, as many as fit."""
        due_spans = sorted((due, source, span) for source in sources for due, span in self.needed(source, view.turn))
        chosen: dict[int, list[Span]] = {}
        for _, source, span in due_spans:
            cost = view.count(view.text(source)[slice(*span)]) + 3 + (0 if source in chosen else 4)
            if cost <= room:
                room -= cost
                chosen.setdefault(source, []).append(span)
        return tuple((source, merge(spans)) for source, spans in sorted(chosen.items()))

    def _latest(self, view: View) -> tuple[int, list[Move]]:
        """A new message that takes more than half of the window is cut to its first part and what will be needed."""
        half = view.budget.capacity // 2
        moves: list[Move] = []
        saved = 0
        for page in view.latest():
            if page.tokens > half and page.id not in view.pins and page.id > 0 and page.kind in (Kind.RESULT, Kind.TEXT):
                text = view.text(page.id)
                head = text.rfind("\n", 0, max(1, len(text) * (half // 2) // page.tokens)) + 1
                spans = merge([*([(0, head)] if head else []), *(span for _, span in self.needed(page.id, view.turn))])
                if spans:
                    moves.append(Fold(pages=(page.id,), keep=spans, why="longer than half of the window"))
                    saved += page.tokens - view.count("".join(text[slice(*span)] for span in spans)) - 4 * len(spans)
        return saved, moves

    def _mended(self, view: View) -> list[Move]:
        """A page that came too long for the window was cut without knowledge of the future: cut it again."""
        moves: list[Move] = []
        for page in view.latest():
            if page.kind is Kind.EXCERPT and len(page.sources) == 1:
                spans = [span for _, span in self.needed(page.sources[0], view.turn)]
                if any(not any(low <= start and stop <= high for low, high in page.spans) for start, stop in spans):
                    keep = merge([*page.spans[:1], *spans])
                    moves.append(Fold(pages=page.sources, keep=keep, why="what will be needed of it"))
        return moves


def _size(moves: Iterable[Move]) -> int:
    return (
        sum(stop - start + 8 for move in moves if isinstance(move, Fold) for _, spans in move.parts for start, stop in spans) // 4
    )
