"""Makes derived pages: the page that a fold puts in place of its sources.

Whatever a policy proposes, trust, depth, sources and the kept spans are set here, from the sources
themselves (laws 4 and 7). Kept spans are cut from the original, so they are byte-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kilburn.budget import Counter
from kilburn.errors import KernelError, LawBroken
from kilburn.kernel.admission import cost_of, text_cost
from kilburn.kernel.laws import Change
from kilburn.kernel.tier import Tier
from kilburn.message import Kind, Role, Trust
from kilburn.move import Fold
from kilburn.page import OMITTED, Page, Parts, Span, address_of, digest_of, span_of

__all__ = ["arguments_of", "cut", "derived_page", "excerpt_of", "runs_of"]


LOWEST = min(Trust)


def cut(text: str, keep: Sequence[Span]) -> str:
    """The kept spans of a text with a mark wherever something is missing between or around them.

    Raises:
        KernelError: spans that are empty, overlap, run backwards or lie outside of the text.
    """
    pieces: list[str] = []
    end = 0
    for start, stop in keep:
        if not end <= start < stop <= len(text):
            raise KernelError(
                f"span {start}:{stop} is not one of {len(text)} characters after {end}",
                advice="give sorted, disjoint spans of the source",
            )
        if start > end or (start and not pieces):
            pieces.append(_mark(pieces))
        pieces.append(text[start:stop])
        end = stop
    if end < len(text):
        pieces.append(_mark(pieces))
    return "".join(pieces)


def _mark(pieces: list[str]) -> str:
    """The omission mark, on a line of its own whatever stands before it."""
    return ("" if not pieces or pieces[-1].endswith("\n") else "\n") + OMITTED + "\n"


def runs_of(pages: Sequence[int]) -> str:
    """Addresses of a set of pages in short: `p3-p9 p12 f2`."""
    runs: list[str] = []
    originals = sorted(page for page in pages if page > 0)
    start = 0
    for index, page in enumerate(originals):
        if index + 1 == len(originals) or originals[index + 1] != page + 1:
            runs.append(span_of(originals[start], page))
            start = index + 1
    return " ".join([*runs, *(f"f{-page}" for page in sorted(pages, reverse=True) if page < 0)])


def derived_page(
    move: Fold, change: Change, tier: Tier, counter: Counter, now: float, text_of: Callable[[int], str]
) -> tuple[Page, str]:
    """The page that a checked fold makes, and its text, its heading included.

    Args:
        text_of: the exact text of a page; asked for pages of which spans are kept.
    """
    single = tier.pages[move.pages[0]] if len(move.pages) == 1 else None
    in_place = single is not None and change.place is not None
    kind = Kind.FOLD if move.text is not None else Kind.EXCERPT
    heading = _heading(kind, move.pages)
    text = f"{heading}\n{move.text if move.text is not None else _kept(move.pages, move.keep, move.parts, text_of)}"
    stands_for = single if in_place and single is not None else None
    call = stands_for.call if stands_for else None
    page = Page(
        id=tier.last_derived - 1,
        digest=digest_of(text),
        kind=kind,
        role=stands_for.role if stands_for else Role.USER,
        message=stands_for.message if stands_for else 0,
        tokens=cost_of(counter, Kind.RESULT, _as_shown(text, stands_for), call, stands_for.name)
        if stands_for
        else text_cost(counter, text),
        time=now,
        trust=_least_trust(move.pages, tier),
        group=stands_for.group if stands_for else 0,
        answers=stands_for.answers if stands_for else 0,
        call=call,
        name=stands_for.name if stands_for else None,
        sources=move.pages,
        spans=tuple(move.keep),
        parts=move.parts,
        depth=1 + change.depth,
        place=change.place or (tier.last, 1 - tier.last_derived),
        label=heading[:80],
    )
    _check_progress(page, change, tier)
    return page, text


def arguments_of(text: str) -> str:
    """The arguments, still JSON, of a call of which only an excerpt is shown."""
    return msgspec.json.encode({"excerpt": text}).decode()


def _as_shown(text: str, stands_for: Page) -> str:
    return arguments_of(text) if stands_for.kind is Kind.CALL else text


def excerpt_of(page: Page, text_of: Callable[[int], str]) -> str:
    """What an excerpt must have under its heading, made again from its sources.

    Raises:
        KernelError: its spans do not fit them.
    """
    return _kept(page.sources, page.spans, page.parts, text_of)


def _kept(sources: Sequence[int], keep: Sequence[Span], parts: Parts, text_of: Callable[[int], str]) -> str:
    if keep:
        return cut(text_of(sources[0]), keep)
    return "".join(f"{address_of(page)}:\n{_ended(cut(text_of(page), spans))}" for page, spans in parts)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _least_trust(pages: Sequence[int], tier: Tier) -> Trust:
    """The lowest of the sources' trust (law 7); of many, the first few usually have it."""
    least = max(Trust)
    for page in pages:
        least = min(least, tier.pages[page].trust)
        if least is LOWEST:
            break
    return least


def _heading(kind: Kind, sources: Sequence[int]) -> str:
    first = min(sources)
    addresses = span_of(first, max(sources)) if len(sources) > 8 and first > 0 else runs_of(sources)
    if kind is Kind.FOLD:
        return f"[{addresses} in short:]"
    return f"[{addresses} in part:]"


def _check_progress(page: Page, change: Change, tier: Tier) -> None:
    """A summary that costs what it replaces, or more, would make the window worse."""
    if page.kind is not Kind.FOLD or change.place is None:
        return
    freed = sum(
        tier.stubs.get(member, tier.cost(member))
        for member, at in change.at.items()
        if at not in ("in", "stub") and tier.is_visible(member)
    )
    if page.tokens >= freed:
        raise LawBroken(2, f"no progress: a fold of {page.tokens} tokens for {freed}", advice="fold more, or write less")
