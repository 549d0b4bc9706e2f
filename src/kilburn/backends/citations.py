"""The index of citations between pages, across the segments of a tenant.

It is derived from the pages: the `cites` of every page, and the `sources` of pages of collections. A forgotten page cites
nothing. A page that is being forgotten cites itself as a mark: no new page may cite it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import apsw

from kilburn.backend import SegmentKind
from kilburn.backends.connection import row, rows_of_each
from kilburn.errors import Forgotten, StoreError, StoreStale
from kilburn.page import Page, address_of

if TYPE_CHECKING:
    from kilburn.backends.sealed import PageRows, SegmentRow

SELECT = "SELECT segment, page, citing_segment, citing_page FROM citation"

LEAVES = "(citing_segment = segment AND citing_page = page)"
"""SQL condition on a row: it marks a page that is being forgotten."""

WHOLE = 0
"""Stands for all present and future pages of a segment that is being forgotten as a whole."""

Citation = tuple[int, int, int, int]
"""Cited segment and page, citing segment and page."""


def page_citations(segment: int, kind: SegmentKind, page: Page) -> set[Citation]:
    """Return the citations of a page in a segment of this kind."""
    citations = {(segment_cited, cited, segment, page.id) for segment_cited, cited in page.cites}
    if kind is not SegmentKind.SESSION:
        citations.update((segment, source, segment, page.id) for source in page.sources)
    return citations


def add(db: apsw.Connection, citations: Iterable[Citation]) -> None:
    """Add citations to the index, unless it has them."""
    insert = "INSERT INTO citation(segment, page, citing_segment, citing_page) VALUES(?, ?, ?, ?) ON CONFLICT DO NOTHING"
    db.executemany(insert, sorted(citations))


def remove(db: apsw.Connection, citations: Iterable[Citation]) -> None:
    """Remove citations from the index."""
    delete = "DELETE FROM citation WHERE segment = ? AND page = ? AND citing_segment = ? AND citing_page = ?"
    db.executemany(delete, sorted(citations))


def citing(db: apsw.Connection, segment: int, pages: Iterable[int]) -> set[tuple[int, int]]:
    """Return the pages that cite any of these pages of a segment."""
    select = f"SELECT citing_segment, citing_page FROM citation WHERE segment = ? AND page = ? AND NOT {LEAVES}"
    return {(by, page) for by, page in rows_of_each(db, select, [(segment, page) for page in pages])}


def forgotten_mark(segment: int, page: int) -> Citation:
    """Return the mark of a page that is being forgotten."""
    return segment, page, segment, page


def marks_of_whole(keys: Iterable[tuple[int, int]]) -> set[Citation]:
    """Return the marks of the segments among these keys that are being forgotten as a whole."""
    return {forgotten_mark(segment, page) for segment, page in keys if page == WHOLE}


def mark_leaving(db: apsw.Connection, keys: Iterable[tuple[int, int]]) -> set[Citation]:
    """Mark these pages, and all pages that cite them, as being forgotten. Return the marks."""
    select = "SELECT citing_segment, citing_page FROM citation WHERE segment = ? AND page = ?"
    going = fresh = set(keys)
    while fresh:
        fresh = {(by, page) for by, page in rows_of_each(db, select, list(fresh))} - going
        going = going | fresh
    existing = rows_of_each(db, "SELECT segment, id FROM page WHERE segment = ? AND id = ? AND content IS NOT NULL", list(going))
    marks = {forgotten_mark(segment, page) for segment, page in existing} | marks_of_whole(going)
    add(db, marks)
    return marks


def check_cited(db: apsw.Connection, tenant: int, pages: Iterable[Page]) -> None:
    """Check that all pages of other segments that new pages cite exist.

    Raises:
        StoreStale: a cited page is forgotten. Forgotten: it is being forgotten. StoreError: it never existed.
    """
    cited = sorted({key for page in pages for key in page.cites})
    kinds: dict[int, str] = {}
    for segment, number in cited:
        if segment not in kinds:
            (kinds[segment],) = row(db, "SELECT kind FROM segment WHERE id = ? AND tenant = ?", segment, tenant) or ("",)
        content = row(db, "SELECT content FROM page WHERE segment = ? AND id = ?", segment, number) if kinds[segment] else None
        if kinds[segment] == SegmentKind.FORGOTTEN or content == (None,):
            raise cites_gone(segment, number)
        if content is None:
            raise StoreError(f"no page {address_of(number)} in segment {segment}", advice="cite pages that exist")
        select = f"SELECT 1 FROM citation WHERE segment = ? AND page IN (?, {WHOLE}) AND {LEAVES}"
        if row(db, select, segment, number) is not None:
            raise cites_leaving(segment, number)


def cites_gone(segment: int, page: int) -> StoreStale:
    """Return the error for citing a forgotten page."""
    message = f"{address_of(page)} of segment {segment}, which a new page cites, is forgotten"
    return StoreStale(message, advice="read the present state, then do it again without this page")


def cites_leaving(segment: int, page: int) -> Forgotten:
    """Return the error for citing a page that is being forgotten."""
    message = f"{address_of(page)} of segment {segment}, which a new page cites, is being forgotten"
    return Forgotten(message, advice="do it again without this page; if forgetting it was interrupted, forget it again")


def check_uncited(db: apsw.Connection, segment: int, pages: Sequence[int]) -> None:
    """Check that no other segment cites these pages.

    Raises:
        StoreStale: one does.
    """
    select = (
        "SELECT citing_segment, citing_page, page FROM citation WHERE segment = ?1 AND page = ?2 AND citing_segment <> ?1 LIMIT 1"
    )
    for by, citer, number in rows_of_each(db, select, [(segment, page) for page in pages]):
        message = f"{address_of(number)} of segment {segment} is cited by {address_of(citer)} of segment {by}"
        raise StoreStale(message, advice="forget what cites it first, then do it again")


def cited_by(segments: Iterable[tuple[SegmentRow, PageRows]]) -> set[Citation]:
    """Return what the pages of these sessions cite."""
    return {
        citation
        for segment, pages in segments
        for _, page, _ in pages
        if isinstance(page, Page) and page.digest
        for citation in page_citations(segment.number, segment.kind, page)
    }
