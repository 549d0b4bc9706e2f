"""The steps of one commit, within a transaction of the caller. Any error rolls the whole batch back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import apsw
import msgspec

from kilburn.backend import Batch, SegmentKind, State
from kilburn.backends import citations, histories, mentions
from kilburn.backends.codec import pack
from kilburn.backends.connection import insert, row, rows_of_each
from kilburn.backends.contenttable import GIVE_UP, ContentTable, Packed, packed_texts, remove_unused, searchable_text
from kilburn.backends.records import (
    Memo,
    Quotations,
    compute_seal,
    concerns,
    record_of_event,
    record_of_page,
    scrub,
    telling_words,
)
from kilburn.backends.schema import FLAG
from kilburn.backends.sealed import SealedRows, SegmentRow, seal_of_state
from kilburn.backends.textindex import IndexEntry, PassageWords, TextIndex, number_passages, passage_words
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.message import Kind
from kilburn.page import Place, make_tombstone, searchable

SMALL_BATCH = 16
"""Pages that are prepared before the write lock is taken, at most."""


class Prepared(NamedTuple):
    """The parts of a batch that are computed without the file, before the write lock is taken.

    Args:
        records: records of its new pages. In a large batch these and the passages are computed one by one while they are
            written, so that a long history is not in memory twice.
        bodies: records of its events.
        words: passages of the pages to index whose texts come with the batch. unprepared: the other pages to index.
        mentions: rows of the index of mentions: (node, number of the event).
    """

    texts: dict[str, Packed]
    records: Iterable[bytes]
    bodies: list[bytes]
    words: Iterable[tuple[int, list[PassageWords]]]
    unprepared: list[int]
    mentions: list[tuple[int, int]]
    checkpoint: tuple[int, bytes] | None


def prepared(batch: Batch) -> Prepared | StoreError:
    """Return the prepared parts of a batch.

    An error of the batch is returned, not raised: `BatchWriter.write` raises it, after its checks against the file, so that a
    stale writer gets `StoreStale`.
    """
    memo: Memo = {}
    quoting = {page.id: page for page in batch.pages if page.sources}
    texts = {"": "", **batch.texts}
    new = {page.id: page for page in batch.pages if page.digest in texts and page.extra in texts} if batch.index else {}
    records = (record_of_page(page, memo) for page in batch.pages)
    pages = (new[number] for number in dict.fromkeys(batch.index) if number in new)
    words = (
        (page.id, passage_words(searchable(texts[page.digest], texts[page.extra]), by_user=page.is_by_user)) for page in pages
    )
    is_small = len(batch.pages) <= SMALL_BATCH
    try:
        return Prepared(
            texts=packed_texts(batch),
            records=list(records) if is_small else records,
            bodies=[record_of_event(event, memo) for event in batch.events],
            words=list(words) if is_small else words,
            unprepared=[number for number in dict.fromkeys(batch.index) if number not in new],
            mentions=[(node, event.number) for event in batch.events for node in sorted(mentions.event_nodes(event, quoting))],
            checkpoint=pack(batch.checkpoint) if batch.checkpoint is not None else None,
        )
    except StoreError as error:
        return error


class BatchWriter:
    """Writes batches, one at a time."""

    def __init__(
        self, db: apsw.Connection, sealed: SealedRows, contents: ContentTable, index: TextIndex, vectors: VectorTable, tenant: int
    ) -> None:
        self._db = db
        self._vectors = vectors
        self._sealed = sealed
        self._contents = contents
        self._index = index
        self._tenant = tenant
        self._segment = 0

    def write(self, segment: int, batch: Batch, work: Prepared | StoreError) -> bool:
        """Write the whole batch. Return whether the file may contain erased bytes."""
        self._segment = segment
        stored_row, unwiped = self._sealed.to_write(self._tenant, segment)
        if stored_row is None:
            raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
        if stored_row.whole().kind is SegmentKind.FORGOTTEN:
            raise StoreStale(f"segment {segment} was forgotten", advice="open it again, as a new one")
        batch.check_continues(segment, stored_row.head, stored_row.used)
        if batch.above is not None:
            above = self._sealed.segment(self._tenant, batch.above[0])
            batch.check_above(above.head if above is not None else 0)
        # Most batches only append. Each further step runs only if the batch needs it.
        citing = [page for page in batch.pages if page.digest and (page.cites or page.sources)]
        if citing and not batch.copied:
            citations.check_cited(self._db, self._tenant, citing)
        if batch.erase and not batch.copied:
            citations.check_uncited(self._db, segment, batch.erase)
        if isinstance(work, StoreError):
            raise work
        contents = self._contents.add(work.texts)
        work.texts.clear()
        entries, ranges = number_passages(segment, stored_row.passages, work.words)
        if batch.pages:
            self._add_pages(batch, work.records, contents, ranges)
        if citing:
            citations.add(
                self._db, {citation for page in citing for citation in citations.page_citations(segment, stored_row.kind, page)}
            )
        if entries:
            self._index.add(entries)
        if work.unprepared:
            entries += self._add_entries(work.unprepared, stored_row.passages + len(entries))
        if batch.unindex or batch.erase:
            self._remove_entries({*batch.unindex, *batch.erase})
        if changed_pages := batch.states.keys() - {page.id for page in batch.pages}:
            self._set_states(batch, changed_pages)
        events = (sealed_event(segment, event, body) for event, body in zip(batch.events, work.bodies, strict=True))
        insert(self._db, "INSERT INTO event(segment, number, act, body, seal) VALUES(?, ?, ?, ?, ?)", events)
        insert(self._db, mentions.INSERT, ((segment, *mention) for mention in work.mentions))
        if notes := [event for event in batch.events if event.act is Act.NOTE]:
            histories.add_replies(self._db, self._tenant, segment, histories.reply_rows(notes))
        if batch.replaced:
            self._replace_events(batch)
        if batch.above is not None:
            self._hold_checkpoint(batch.above)
        if batch.checkpoint is not None and work.checkpoint is not None:
            self._keep_checkpoint(batch, len(batch.checkpoint), *work.checkpoint)
        if batch.digests is not None and (new := [page.id for page in batch.pages if page.id > 0]):
            histories.add(self._db, self._tenant, segment, batch.digests, min(new), max(new))
        if batch.erase or batch.inherited:
            self._erase(batch, msgspec.structs.replace(stored_row, head=stored_row.head + len(batch.events)))
        counters = (
            float(max([stored_row.used, *(event.time for event in batch.events)])),
            stored_row.head + len(batch.events),
            stored_row.pages + len(batch.pages),
            stored_row.tokens + sum(page.tokens for page in batch.pages),
            stored_row.passages + len(entries),
            stored_row.characters + sum(citation.stop - citation.start for citation in entries),
        )
        set_counters(self._db, segment, counters)
        return unwiped or bool(batch.erase or batch.inherited)

    def _add_pages(
        self,
        batch: Batch,
        records: Iterable[bytes],
        contents: Mapping[str, int | None],
        ranges: Mapping[int, tuple[int, int]],
    ) -> None:
        contents = {"": None, **contents}
        new = (
            (
                *(self._segment, page.id, contents[page.digest], contents[page.extra]),
                *ranges.get(page.id, (None, None)),
                page.call if page.kind is Kind.CALL else None,
                *encode_state(self._segment, page.id, batch.states.get(page.id) or State()),
                *(record, compute_seal("page", self._segment, page.id, record)),
            )
            for page, record in zip(batch.pages, records, strict=True)
        )
        try:
            insert(
                self._db,
                "INSERT INTO page(segment, id, content, extra, first_passage, last_passage,"
                " call, place, pinned, importance, valid_until, state_seal, record, seal)"
                " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                new,
            )
        except apsw.ConstraintError as error:
            raise StoreError(
                "a new page has the id of one that exists", advice="pages are immutable; give it its own id"
            ) from error

    def _add_entries(self, pages: Sequence[int], passages_made: int) -> list[IndexEntry]:
        """Index pages whose texts are not in the batch."""
        page_words: list[tuple[int, list[PassageWords]]] = []
        for number in pages:
            select = "SELECT first_passage, record, seal FROM page WHERE segment = ? AND id = ? AND content IS NOT NULL"
            page_row = row(self._db, select, self._segment, number)
            if page_row is None:
                raise StoreError(f"page {number} cannot be indexed: it has no text here", advice="add it in the same batch")
            first, record, seal = page_row
            if first is None:
                text = searchable_text(self._db, self._segment, number)
                page = self._sealed.page(self._segment, number, record, seal)
                page_words.append((number, passage_words(text, by_user=page.is_by_user)))
        return index_pages(self._db, self._index, self._segment, passages_made, page_words)

    def _remove_entries(self, pages: Iterable[int]) -> None:
        select = "SELECT first_passage, last_passage, id FROM page WHERE segment = ? AND id = ?"
        keys = [(self._segment, page) for page in pages]
        page_rows = list(rows_of_each(self._db, select, keys))
        if missing := {page for _, page in keys} - {page for *_, page in page_rows}:
            raise StoreError(f"no page {min(missing)} in segment {self._segment}", advice="name pages that exist")
        ranges = sorted((first, last, page) for first, last, page in page_rows if first is not None)
        if not ranges:
            return
        self._index.remove((first, last, searchable_text(self._db, self._segment, page)) for first, last, page in ranges)
        self._vectors.remove((first, last) for first, last, _ in ranges)
        self._db.executemany(
            "UPDATE page SET first_passage = NULL, last_passage = NULL WHERE segment = ? AND id = ?",
            [(self._segment, page) for *_, page in ranges],
        )

    def _set_states(self, batch: Batch, pages: Set[int]) -> None:
        changes = self._db.total_changes()
        set_states(self._db, self._segment, {page: batch.states[page] for page in sorted(pages)})
        if self._db.total_changes() - changes != len(pages):
            raise StoreError("a state names a page that does not exist", advice="add the page in the same batch")

    def _replace_events(self, batch: Batch) -> None:
        """Replace events. In the store that this is a copy of, their data about a forgotten page was removed; the pages that they
        name are the same."""
        changes = self._db.total_changes()
        event_rows = [sealed_event(self._segment, event, record_of_event(event)) for event in batch.replaced]
        self._db.executemany(
            "UPDATE event SET body = ?, seal = ? WHERE segment = ? AND number = ? AND act = ?",
            [(body, seal, segment, number, act) for segment, number, act, body, seal in event_rows],
        )
        if self._db.total_changes() - changes != len(event_rows):
            raise StoreError("the batch replaces an event that does not exist", advice="give its number and its act")

    def _hold_checkpoint(self, above: tuple[int, int]) -> None:
        """Retain the parent's last checkpoint before the fork: this segment is read from it."""
        keep = (
            "UPDATE checkpoint SET forked = 1 WHERE segment = ?1 AND head ="
            " (SELECT max(head) FROM checkpoint WHERE segment = ?1 AND head <= ?2)"
        )
        self._db.execute(keep, above)

    def _keep_checkpoint(self, batch: Batch, size: int, codec: int, data: bytes) -> None:
        head = batch.head + len(batch.events)
        seal = compute_seal("checkpoint", self._segment, head, size, codec, data)
        self._db.execute("DELETE FROM checkpoint WHERE segment = ? AND (NOT forked OR head = ?)", (self._segment, head))
        self._db.execute(
            "INSERT INTO checkpoint(segment, head, size, codec, data, seal) VALUES(?, ?, ?, ?, ?, ?)",
            (self._segment, head, size, codec, data, seal),
        )

    def _erase(self, batch: Batch, segment: SegmentRow) -> None:
        words = {word for page in batch.inherited for word in telling_words(page)}
        contents: set[int] = set()
        cited: set[citations.Citation] = set()
        blank = []
        # `_remove_entries` has checked that they exist.
        select = "SELECT id, content, extra, record, seal FROM page WHERE segment = ? AND id = ?"
        for number, content, extra, record, seal in rows_of_each(
            self._db, select, [(self._segment, page) for page in batch.erase]
        ):
            page = self._sealed.page(self._segment, number, record, seal)
            words.update(telling_words(page))
            contents.update(row for row in (content, extra) if row is not None)
            cited.update(citations.page_citations(self._segment, segment.kind, page))
            cited.add(citations.forgotten_mark(self._segment, number))
            state, tombstone = encode_state(self._segment, number, State(Place.DROPPED)), record_of_page(make_tombstone(page))
            blank.append((*state, tombstone, compute_seal("page", self._segment, number, tombstone), self._segment, number))
        citations.remove(self._db, cited)
        replies = histories.replies(self._db, self._segment)
        self._db.executemany(
            "UPDATE page SET content = NULL, extra = NULL, call = NULL, place = ?, pinned = ?, importance = ?, valid_until = ?,"
            " state_seal = ?, record = ?, seal = ? WHERE segment = ? AND id = ?",
            blank,
        )
        if batch.inherited:
            self._db.execute("DELETE FROM history WHERE segment = ?", (self._segment,))
        # A trigger of the file removes all digests of the session. Replies have no text, so their rows are added again.
        histories.add_replies(self._db, self._tenant, self._segment, replies)
        remove_unused(self._db, contents)
        erased = {*batch.erase, *(page.id for page in batch.inherited)}
        blanked, quotations = [], Quotations(words)
        for event in self._sealed.numbered(
            segment, mentions.events_with_nodes(self._db, self._segment, mentions.page_nodes(erased))
        ):
            if concerns(event, erased):
                *_, body, seal = sealed_event(self._segment, event, record_of_event(scrub(event, quotations)))
                blanked.append((body, seal, self._segment, event.number))
        self._db.executemany("UPDATE event SET body = ?, seal = ? WHERE segment = ? AND number = ?", blanked)
        # Quarantined bytes may contain its words too; forgetting takes precedence over preserving a damaged record.
        self._db.execute("DELETE FROM quarantine WHERE segment = ?", (self._segment,))
        # So may an object that is being written to the cold place: its writer will notice.
        self._db.execute(GIVE_UP, (time.time(), self._tenant))
        self._db.execute(FLAG)


def index_pages(
    db: apsw.Connection, index: TextIndex, segment: int, passages_made: int, pages: Iterable[tuple[int, Sequence[PassageWords]]]
) -> list[IndexEntry]:
    """Index stored pages of a segment with `passages_made` earlier entries, and record each page's range."""
    entries, ranges = number_passages(segment, passages_made, pages)
    index.add(entries)
    db.executemany(
        "UPDATE page SET first_passage = ?, last_passage = ? WHERE segment = ? AND id = ?",
        [(*range_, segment, page) for page, range_ in ranges.items()],
    )
    return entries


def encode_state(segment: int, page: int, state: State) -> tuple[str, int, float, float | None, bytes]:
    """Return the stored form of a page's state, with its seal. SQLite does not preserve a negative zero."""
    pinned, importance = int(state.pinned), float(state.importance) + 0.0
    until = None if state.until is None else float(state.until) + 0.0
    return state.at, pinned, importance, until, seal_of_state(segment, page, state.at.encode(), pinned, importance, until)


def set_states(db: apsw.Connection, segment: int, states: Mapping[int, State]) -> None:
    """Write the states of pages."""
    db.executemany(
        "UPDATE page SET place = ?, pinned = ?, importance = ?, valid_until = ?, state_seal = ? WHERE segment = ? AND id = ?",
        [(*encode_state(segment, page, state), segment, page) for page, state in states.items()],
    )


def sealed_event(segment: int, event: Event, body: bytes) -> tuple[int, int, str, bytes, bytes]:
    """Return the row of an event with this record."""
    act = event.act.value
    return segment, event.number, act, body, compute_seal("event", segment, event.number, act.encode(), body)


def set_counters(db: apsw.Connection, segment: int, counters: tuple[float, int, int, int, int, int]) -> None:
    """Write a session's counters: time of last use, head, pages, tokens, passages, characters."""
    seal = compute_seal("counters", segment, *counters)
    db.execute(
        "UPDATE segment SET used = ?, head = ?, pages = ?, tokens = ?, passages = ?, characters = ?, counters_seal = ?"
        " WHERE id = ?",
        (*counters, seal, segment),
    )
