"""Moves: all that a policy can want, and `Drop`, which only a person may.

A move is a proposal. The kernel checks it against the laws and either carries it out whole or
raises and changes nothing. Pages are named by id (see `Page.id`).
"""

from __future__ import annotations

import msgspec

from kilburn.message import Kind, Trust
from kilburn.page import Claim, Parts, Span

__all__ = ["Add", "Bring", "Drop", "Evict", "Fold", "Load", "Move", "Restore", "Retire"]


class Load(msgspec.Struct, frozen=True):
    """Bring pages back to the upper level, whole, to the place where they stood."""

    pages: tuple[int, ...]
    why: str = ""


class Evict(msgspec.Struct, frozen=True):
    """Take pages out of the upper level; a handle stays, the content stays below.

    A result whose call stays becomes a handle in place, so that the transcript stays valid; a call
    leaves only together with its results.
    """

    pages: tuple[int, ...]
    why: str = ""


class Fold(msgspec.Struct, frozen=True):
    """Put a derived page in place of its sources.

    Give `text` for a written summary, `keep` for a verbatim excerpt of exactly one source, or `parts`
    for a verbatim excerpt of several: the kept spans, byte-identical, all else left out. Sources that are resident leave the
    window and the fold stands in their place; sources that are already out stay out, and the fold
    is added at the end of the window.
    """

    pages: tuple[int, ...]
    text: str | None = None
    keep: tuple[Span, ...] = ()
    parts: Parts = ()
    why: str = ""


class Bring(msgspec.Struct, frozen=True):
    """Show passages of originals once more: a page with these spans, byte-identical, each under the address of its original. It
    stands directly before the prompt's last message; behind results, before the assistant's messages that called.

    It is a copy beside its sources and stands for nothing: they stay where they are, on any level, and when it is evicted it
    leaves neither handle nor gap. Nothing before it changes, so a provider's cache keeps that.

    Args:
        parts: the spans of each original, in order of their ids.
    """

    parts: Parts
    why: str = ""

    @property
    def pages(self) -> tuple[int, ...]:
        """The originals that it quotes."""
        return tuple([page for page, _ in self.parts])


class Retire(msgspec.Struct, frozen=True):
    """Close pages' validity: they leave the window, stay readable by address as history, and are no
    longer found by search, but by one that asks for an earlier time.

    `by` is the page that superseded them, or 0. `refers` names it where it is an `Add` of the same plan, counted from 0;
    derived pages have negative ids, so no number of `by` can. `until` is when they stopped being true, in seconds since
    the epoch; None for when `by` begins to be true, or now. At a window only `pages` and `by` count.
    """

    pages: tuple[int, ...]
    by: int = 0
    until: float | None = None
    why: str = ""
    refers: int | None = None


class Add(msgspec.Struct, frozen=True, kw_only=True):
    """Append a page to a collection: a fact, an entity, a passage of a document. Only a policy at a collection's boundary
    does this.

    Args:
        sources: pages of the same collection that it was made from, by their ids; those of the same plan have none yet.
        refers: `Add`s of the same plan that it is made from too, counted from 0.
        cites: pages of other segments of the tenant that it was made from: (number of the segment, page id).
        since, until: from when to when it is true, in seconds since the epoch; see `Page`.
        importance: 0 to 1.
        trust: that it has at most; None for all that the pages that it was made from give it.
        name: of a note: `core/human`. Nothing else in a collection has one.
    """

    text: str
    kind: Kind = Kind.FACT
    claim: Claim | None = None
    sources: tuple[int, ...] = ()
    refers: tuple[int, ...] = ()
    cites: tuple[tuple[int, int], ...] = ()
    since: float | None = None
    until: float | None = None
    importance: float = 0.0
    why: str = ""
    trust: Trust | None = None
    name: str = ""


class Restore(msgspec.Struct, frozen=True):
    """Put retired or proposed pages in force again. Only a person does this: to undo, or to accept what was proposed.

    Args:
        proposed: let rejected pages wait again instead, as before.
    """

    pages: tuple[int, ...]
    why: str = ""
    proposed: bool = False


class Drop(msgspec.Struct, frozen=True):
    """Forget pages and all that was derived from them, in every place. Only an explicit forget of a
    person does this; a policy at a boundary may not."""

    pages: tuple[int, ...]
    why: str = ""


Move = Load | Evict | Fold | Bring | Retire | Drop
"""What may happen at a window; at a collection: `Add`, `Retire`, `Restore`, `Drop`."""
