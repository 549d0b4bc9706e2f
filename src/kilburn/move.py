"""Moves: all that a policy can want, and `Drop`, which only a person may.

A move is a proposal. The kernel checks it against the laws and either carries it out whole or
raises and changes nothing. Pages are named by id (see `Page.id`).
"""

from __future__ import annotations

import msgspec

from kilburn.page import Parts, Span

__all__ = ["Drop", "Evict", "Fold", "Load", "Move", "Retire"]


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


class Retire(msgspec.Struct, frozen=True):
    """Close pages' validity: they leave the window, stay readable by address as history, and are no
    longer found by search. `by` is the page that superseded them, or 0."""

    pages: tuple[int, ...]
    by: int = 0
    why: str = ""


class Drop(msgspec.Struct, frozen=True):
    """Forget pages and all that was derived from them, in every place. Only an explicit forget of a
    person does this; a policy at a boundary may not."""

    pages: tuple[int, ...]
    why: str = ""


Move = Load | Evict | Fold | Retire | Drop
