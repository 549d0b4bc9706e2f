"""The index of citations: which page is cited by which, across the segments of a tenant.

It is derived from the pages. A page of any segment is in it with its `cites`, and a page of a collection with its
`sources` too. A page that is forgotten cites nothing. A page that is being forgotten cites itself: no new page may cite it.
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
"""Of a row: the page is being forgotten."""

WHOLE = 0
"""Stands for all pages of a segment, also those that are not there yet, where it is forgotten as a whole."""

Citation = tuple[int, int, int, int]
"""Segment and page that are cited, segment and page that cite."""


def citations_of(segment: int, kind: SegmentKind, page: Page) -> set[Citation]:
    """What a page of a segment of this kind cites."""
    found = {(other, cited, segment, page.id) for other, cited in page.cites}
    if kind is not SegmentKind.SESSION:
        found.update((segment, source, segment, page.id) for source in page.sources)
    return found


def add(db: apsw.Connection, citations: Iterable[Citation]) -> None:
    """Put citations into the index; those that it has stay."""
    insert = "INSERT INTO citation(segment, page, citing_segment, citing_page) VALUES(?, ?, ?, ?) ON CONFLICT DO NOTHING"
    db.executemany(insert, sorted(citations))


def remove(db: apsw.Connection, citations: Iterable[Citation]) -> None:
    """Take citations out of the index."""
    delete = "DELETE FROM citation WHERE segment = ? AND page = ? AND citing_segment = ? AND citing_page = ?"
    db.executemany(delete, sorted(citations))


def citing(db: apsw.Connection, segment: int, pages: Iterable[int]) -> set[tuple[int, int]]:
    """The pages that cite any of these pages of a segment."""
    select = f"SELECT citing_segment, citing_page FROM citation WHERE segment = ? AND page = ? AND NOT {LEAVES}"
    return {(by, page) for by, page in rows_of_each(db, select, [(segment, page) for page in pages])}


def mark_of(segment: int, page: int) -> Citation:
    """What says that a page is being forgotten."""
    return segment, page, segment, page


def marks_of_whole(keys: Iterable[tuple[int, int]]) -> set[Citation]:
    """What says that segments are being forgotten, of those of which all pages are meant."""
    return {mark_of(segment, page) for segment, page in keys if page == WHOLE}


def mark_leaving(db: apsw.Connection, keys: Iterable[tuple[int, int]]) -> set[Citation]:
    """Keep new pages from citing these, and what cites them by now, where that is not forgotten; returns what says so."""
    select = "SELECT citing_segment, citing_page FROM citation WHERE segment = ? AND page = ?"
    going = fresh = set(keys)
    while fresh:
        fresh = {(by, page) for by, page in rows_of_each(db, select, list(fresh))} - going
        going = going | fresh
    there = rows_of_each(db, "SELECT segment, id FROM page WHERE segment = ? AND id = ? AND content IS NOT NULL", list(going))
    marks = {mark_of(segment, page) for segment, page in there} | marks_of_whole(going)
    add(db, marks)
    return marks


def check_cited(db: apsw.Connection, tenant: int, pages: Iterable[Page]) -> None:
    """Check that everything that new pages cite in other segments is there.

    Raises:
        StoreStale: a cited page is forgotten by now. Forgotten: it is being forgotten. StoreError: it never existed.
    """
    cited = sorted({key for page in pages for key in page.cites})
    kinds: dict[int, str] = {}
    for segment, number in cited:
        if segment not in kinds:
            (kinds[segment],) = row(db, "SELECT kind FROM segment WHERE id = ? AND tenant = ?", segment, tenant) or ("",)
        found = row(db, "SELECT content FROM page WHERE segment = ? AND id = ?", segment, number) if kinds[segment] else None
        if kinds[segment] == SegmentKind.FORGOTTEN or found == (None,):
            raise cites_gone(segment, number)
        if found is None:
            raise StoreError(f"no page {address_of(number)} in segment {segment}", advice="cite pages that exist")
        select = f"SELECT 1 FROM citation WHERE segment = ? AND page IN (?, {WHOLE}) AND {LEAVES}"
        if row(db, select, segment, number) is not None:
            raise cites_leaving(segment, number)


def cites_gone(segment: int, page: int) -> StoreStale:
    """The error of who would cite a page that is forgotten."""
    what = f"{address_of(page)} of segment {segment}, which a new page cites, is forgotten"
    return StoreStale(what, advice="read what is there now, then do it again without this page")


def cites_leaving(segment: int, page: int) -> Forgotten:
    """The error of who would cite a page that is being forgotten."""
    what = f"{address_of(page)} of segment {segment}, which a new page cites, is being forgotten"
    return Forgotten(what, advice="do it again without this page; if the forgetting has broken off, forget it again")


def check_uncited(db: apsw.Connection, segment: int, pages: Sequence[int]) -> None:
    """Check that no other segment cites these pages.

    Raises:
        StoreStale: one does.
    """
    select = (
        "SELECT citing_segment, citing_page, page FROM citation WHERE segment = ?1 AND page = ?2 AND citing_segment <> ?1 LIMIT 1"
    )
    for by, citer, number in rows_of_each(db, select, [(segment, page) for page in pages]):
        what = f"{address_of(number)} of segment {segment} is cited by {address_of(citer)} of segment {by}"
        raise StoreStale(what, advice="forget what cites it first, then do it again")


def cited_by(segments: Iterable[tuple[SegmentRow, PageRows]]) -> set[Citation]:
    """Return what the pages of these sessions cite."""
    return {
        citation
        for one, each in segments
        for _, page, _ in each
        if isinstance(page, Page) and page.digest
        for citation in citations_of(one.number, one.kind, page)
    }
