"""One commit in PostgreSQL: what it needs to know is asked in one go, and written in another.

The row of the segment is the lock and the fence. It is locked first, with those of the segments that new pages cite, in the order
of their numbers. While it is locked nobody else changes the segment, so what is read is true until the commit. The last statement
gives it the next `epoch`, which the database itself refuses from a writer that does not know the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kilburn.backend import Batch, Digests, SegmentKind, State
from kilburn.backends import citations, histories, mentions
from kilburn.backends.chilling import OpenPlace
from kilburn.backends.codec import check_storable, digest_bytes, encode_text, pack
from kilburn.backends.postgres import postings
from kilburn.backends.postgres.coldrows import ROW, PostgresColdRows, searchable_in
from kilburn.backends.postgres.erasing import flag
from kilburn.backends.postgres.statements import Merged, Row, Sender, ServerAnswer, Statements
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
from kilburn.backends.sealed import ADVICE, Seals, SegmentRow, seal_of_segment
from kilburn.backends.transaction import encode_state, sealed_event
from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Event
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of, make_tombstone, searchable

SEALS = Seals()

MARK = 8
"""Bytes of the mark of a write."""

MARKS = 8
"""Marks that a segment keeps, of its last writes: who lost a reply finds its own, though others have gone on by then."""

COUNTERS = "used, head, pages, tokens, passages, characters"

SEGMENT = f"id, tenant, name, created, 0, convert_to(kind, 'UTF8'), owner, seal, {COUNTERS}, counters_seal"
"""The columns of a segment as `Seals.parse_segment` takes them."""

# Each is looked up by itself, in the order in which it is given. Before PostgreSQL 17, and without statistics of the table,
# "id = ANY" would read all segments of the tenant.
_LOCK = (
    "SELECT own.* FROM unnest(%s::bigint[]) AS wanted(id) CROSS JOIN LATERAL"
    f" (SELECT {SEGMENT}, epoch FROM kilburn.segment WHERE tenant = %s AND segment.id = wanted.id FOR UPDATE{{wait}}) AS own"
)

_CITED = (
    "SELECT cited.segment, cited.page, page.id, page.content IS NULL, EXISTS(SELECT FROM kilburn.citation AS own"
    f" CROSS JOIN (VALUES(cited.page), ({citations.WHOLE})) AS named(page) WHERE own.tenant = %s AND own.segment = cited.segment"
    " AND own.page = named.page AND own.citing_segment = cited.segment AND own.citing_page = named.page)"
    " FROM unnest(%s::bigint[], %s::bigint[]) AS cited(segment, page)"
    " LEFT JOIN kilburn.page ON page.tenant = %s AND page.segment = cited.segment AND page.id = cited.page"
)
_GOING = (
    "WITH RECURSIVE going(segment, page) AS (SELECT * FROM unnest(%s::bigint[], %s::bigint[]) UNION"
    " SELECT citing_segment, citing_page FROM going CROSS JOIN LATERAL (SELECT citing_segment, citing_page FROM kilburn.citation"
    " WHERE tenant = %s AND citation.segment = going.segment AND citation.page = going.page OFFSET 0) AS citing)"
    " SELECT segment, page FROM going"
)
_UNCITED = (
    "SELECT citing_segment, citing_page, page FROM kilburn.citation WHERE tenant = %s AND segment = %s"
    " AND page = ANY(%s::bigint[]) AND citing_segment <> %s LIMIT 1"
)
_PAGES = (
    "SELECT page.id, first_passage, last_passage, record, page.seal, content, extra,"
    " text.size, text.codec, text.data, text.digest, own.size, own.codec, own.data, own.digest FROM kilburn.page"
    " LEFT JOIN kilburn.content AS text ON text.tenant = page.tenant AND text.digest = page.content"
    " LEFT JOIN kilburn.content AS own ON own.tenant = page.tenant AND own.digest = page.extra"
    " WHERE page.tenant = %s AND page.segment = %s AND page.id = ANY(%s::bigint[])"
)
_SELECT_PAGE_IDS = "SELECT id FROM kilburn.page WHERE tenant = %s AND segment = %s AND id = ANY(%s::bigint[])"
_TEXTS = "SELECT digest FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[])"

# What is said again will be read: a text that is cold comes back.
_ADD_CONTENT = (
    "WITH new AS (SELECT %s::bigint AS tenant, * FROM unnest(%s::bytea[], %s::bigint[], %s::bigint[], %s::bytea[])"
    " AS given(digest, size, codec, data)), again AS (UPDATE kilburn.content SET codec = new.codec, data = new.data FROM new"
    " WHERE content.tenant = new.tenant AND content.digest = new.digest AND content.codec = 3)"
    " INSERT INTO kilburn.content(tenant, digest, size, codec, data)"
    " SELECT * FROM new ON CONFLICT DO NOTHING"
)
_ADD_PAGES = (
    "INSERT INTO kilburn.page(tenant, segment, id, content, extra, call, place, pinned, importance, valid_until, state_seal,"
    " first_passage, last_passage, record, seal)"
    " SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bytea[], %s::bytea[], %s::bytea[], %s::text[], %s::bigint[],"
    " %s::double precision[], %s::double precision[], %s::bytea[], %s::bigint[], %s::bigint[], %s::bytea[], %s::bytea[])"
)
_SET_RANGES = (
    "UPDATE kilburn.page SET first_passage = new.first_passage, last_passage = new.last_passage"
    " FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS new(id, first_passage, last_passage)"
    " WHERE tenant = %s AND segment = %s AND page.id = new.id"
)
_SET_STATES = (
    "UPDATE kilburn.page SET place = new.place, pinned = new.pinned, importance = new.importance, valid_until = new.valid_until,"
    " state_seal = new.state_seal"
    " FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::double precision[], %s::double precision[], %s::bytea[])"
    " AS new(id, place, pinned, importance, valid_until, state_seal) WHERE tenant = %s AND segment = %s AND page.id = new.id"
)
_ADD_EVENTS = (
    "INSERT INTO kilburn.event(tenant, segment, number, act, body, seal)"
    " SELECT %s, %s, * FROM unnest(%s::bigint[], %s::text[], %s::bytea[], %s::bytea[])"
)
_ADD_MENTIONS = (
    "INSERT INTO kilburn.mention(tenant, segment, node, event)"
    " SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[]) ON CONFLICT DO NOTHING"
)
_ADD_REPLIES = (
    "INSERT INTO kilburn.history(tenant, segment, message, digest, is_last, last_page)"
    " SELECT %s, %s, message, digest, false, 0 FROM unnest(%s::bigint[], %s::bytea[]) AS new(message, digest)"
    " ON CONFLICT DO NOTHING"
)
_ADD_CITATIONS = (
    "INSERT INTO kilburn.citation(tenant, segment, page, citing_segment, citing_page)"
    " SELECT %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) ON CONFLICT DO NOTHING"
)
_REMOVE_CITATIONS = (
    "DELETE FROM kilburn.citation USING (SELECT %s::bigint AS tenant, *"
    " FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])"
    " AS former(segment, page, citing_segment, citing_page)) AS gone"
    " WHERE citation.tenant = gone.tenant AND citation.segment = gone.segment AND citation.page = gone.page"
    " AND citation.citing_segment = gone.citing_segment AND citation.citing_page = gone.citing_page"
)
_END = (
    "UPDATE kilburn.segment SET used = %s, head = %s, pages = %s, tokens = %s, passages = %s, characters = %s,"
    f" counters_seal = %s, epoch = %s, writer = substring(%s || writer FOR {MARK * MARKS}) WHERE tenant = %s AND id = %s"
)


def lock(statements: Statements, tenant: int, segments: Iterable[int], *, wait: bool = True) -> ServerAnswer:
    """Lock the rows of segments, in order; the answer has them."""
    return statements.send(_LOCK.format(wait="" if wait else " NOWAIT"), sorted(set(segments)), tenant)


def locked(answer: ServerAnswer) -> tuple[dict[int, SegmentRow], dict[int, int]]:
    """The segments of such an answer, and their epochs."""
    rows = answer.fetchall()
    return {row[0]: SEALS.parse_segment(row[:-1]) for row in rows}, {row[0]: row[-1] for row in rows}


def set_counters(statements: Sender, tenant: int, segment: int, counters: Sequence[float], epoch: int, writer: bytes) -> None:
    """Write a segment's counters as its write number `epoch`: time of last use, head, pages, tokens, passages, characters."""
    statements.send(_END, *counters, compute_seal("counters", segment, *counters), epoch, writer, tenant, segment)


def has_mark(writer: bytes, mark: bytes) -> bool:
    """Whether a write with this mark is among the last ones of a segment."""
    return mark in (writer[at : at + MARK] for at in range(0, len(writer), MARK))


def change_citations(statements: Sender, sql: str, tenant: int, rows: Iterable[citations.Citation]) -> None:
    """Put citations into the index or take them out of it."""
    if ordered := sorted(rows):
        statements.send(sql, tenant, *(list(column) for column in zip(*ordered, strict=True)))


def mark_leaving(statements: Statements, tenant: int, keys: Iterable[tuple[int, int]]) -> set[citations.Citation]:
    """Keep new pages from citing these, and what cites them by now, where that is not forgotten; returns what says so."""
    going, locked_segments = sorted(keys), set[int]()
    # Whoever cites a page has locked its segment.
    while new := {segment for segment, _ in going} - locked_segments:
        lock(statements, tenant, new).fetchall()
        locked_segments |= new
        going = statements.rows(_GOING, [segment for segment, _ in going], [page for _, page in going], tenant)
    cited_rows = statements.rows(_CITED, tenant, [segment for segment, _ in going], [page for _, page in going], tenant)
    marks = {
        citations.forgotten_mark(segment, page)
        for segment, page, row, is_forgotten, _ in cited_rows
        if row is not None and not is_forgotten
    }
    marks |= citations.marks_of_whole(going)
    change_citations(statements, _ADD_CITATIONS, tenant, marks)
    return marks


def remove_citations(statements: Statements, tenant: int, rows: Iterable[citations.Citation]) -> None:
    """Take citations out of the index."""
    change_citations(statements, _REMOVE_CITATIONS, tenant, rows)


class Writing:
    """The steps of writing one batch to one segment, in a transaction that its caller ends."""

    def __init__(
        self, statements: Statements, tenant: int, segment: int, batch: Batch, opened: OpenPlace, mark: bytes = b""
    ) -> None:
        self._statements, self._tenant, self._segment, self._batch = statements, tenant, segment, batch
        self._mark = mark
        self._cold = PostgresColdRows(statements, tenant, opened)
        self._own = tenant, segment
        self._memo: Memo = {}
        # What only adds rows, or changes those that are there, goes out as one statement.
        begins = batch.digests is not None and not batch.digests.offset
        removes = batch.unindex or batch.erase or batch.inherited or batch.replaced or begins
        self._merged = None if removes else Merged()
        self._changes: Sender = self._merged or statements
        self.last: tuple[int, bytes] | None = None
        """The number and the seal of the batch's last event, by which it is known again."""

    def write(self) -> None:
        """All of the batch."""
        batch, segment, send = self._batch, self._segment, self._statements.send
        citing = [page for page in batch.pages if page.digest and (page.cites or page.sources)]
        cited = sorted({key for page in citing for key in page.cites}) if not batch.copied else []
        above = [batch.above[0]] if batch.above is not None else []
        added = {page.id for page in batch.pages}
        state_pages = batch.states.keys() - added
        removed = sorted({*batch.unindex, *batch.erase})
        index_pages = sorted({page for page in batch.index if page not in added})
        digest_keys = {digest: digest_bytes(digest) for page in batch.pages for digest in (page.digest, page.extra) if digest}
        missing = [key for digest, key in digest_keys.items() if digest not in batch.texts]
        # All questions go out together.
        rows = lock(
            self._statements, self._tenant, [segment, *above, *(other_segment for other_segment, _ in cited)], wait=batch.wait
        )
        sources = [segment_number for segment_number, _ in cited], [page for _, page in cited]
        cited_answer = send(_CITED, self._tenant, *sources, self._tenant) if cited else None
        citer = send(_UNCITED, *self._own, list(batch.erase), segment) if batch.erase and not batch.copied else None
        known_answer = send(_SELECT_PAGE_IDS, *self._own, sorted(state_pages)) if state_pages else None
        old = send(_PAGES, *self._own, sorted({*removed, *index_pages})) if removed or index_pages else None
        texts = send(_TEXTS, self._tenant, missing) if missing else None
        digests_answer = self._ask_said(batch.digests) if batch.digests is not None else None

        segments, epochs = locked(rows)
        segment_row = self._check_head(segments)
        if cited_answer is not None:
            self._check_cited(cited_answer.fetchall(), segments)
        if citer is not None and (citing_row := citer.fetchone()) is not None:
            by, citing_page, page = citing_row
            problem = f"{address_of(page)} of segment {segment} is cited by {address_of(citing_page)} of segment {by}"
            raise StoreStale(problem, advice="forget what cites it first, then do it again")
        if texts is not None and (lost := set(missing) - {key for (key,) in texts.fetchall()}):
            raise StoreError(f"no text for digest {min(lost).hex()}", advice="put it into the batch's texts")
        if known_answer is not None and len(known_answer.fetchall()) != len(state_pages):
            raise StoreError("a state names a page that does not exist", advice="add the page in the same batch")
        old_rows = {row[0]: row for row in old.fetchall()} if old is not None else {}
        keeps_said = digests_answer is None or digests_answer.fetchone() is not None
        if missing_pages := set(removed) - old_rows.keys() - added:
            raise StoreError(f"no page {min(missing_pages)} in segment {segment}", advice="name pages that exist")

        entries = self._entries(old_rows, segment_row.passages)
        if removed:
            self._remove_entries([old_rows[page] for page in removed if page not in added])
        if batch.pages:
            self._add_pages(digest_keys, entries)
        if citing:
            self._add_citations(segment_row.kind, citing)
        if entries:
            self._add_entries(entries, added)
        if late := sorted(added.intersection(removed)):
            # Added and removed by the same batch.
            new = send(_PAGES, *self._own, late).fetchall()
            old_rows |= {row[0]: row for row in new}
            self._remove_entries(new)
        if state_pages:
            self._set_states(sorted(state_pages))
        if batch.events:
            self._add_events()
        if batch.replaced:
            self._replace_events()
        if batch.above is not None:
            self._hold_checkpoint(batch.above)
        if batch.checkpoint is not None:
            self._keep_checkpoint(batch.checkpoint)
        if batch.digests is not None and self._new() and keeps_said:
            put_history(self._changes, *self._own, batch.digests, max(self._new()))
        if batch.erase or batch.inherited:
            self._erase([old_rows[page] for page in batch.erase], segment_row)
        passages = [entry for page_entries in entries.values() for entry in page_entries]
        set_counters(
            self._changes,
            *self._own,
            (
                float(max([segment_row.used, *(event.time for event in batch.events)])),
                segment_row.head + len(batch.events),
                segment_row.pages + len(batch.pages),
                segment_row.tokens + sum(page.tokens for page in batch.pages),
                segment_row.passages + len(passages),
                segment_row.characters + sum(stop - start for _, _, start, stop, _ in passages),
            ),
            epochs[segment] + 1,
            self._mark,
        )
        if self._merged is not None:
            self._merged.end(self._statements)

    def _check_head(self, segments: dict[int, SegmentRow]) -> SegmentRow:
        batch, row = self._batch, segments.get(self._segment)
        if row is None:
            raise StoreError(f"no segment {self._segment} here", advice="open it by name with `segment`")
        if row.whole().kind is SegmentKind.FORGOTTEN:
            raise StoreStale(f"segment {self._segment} was forgotten", advice="open it again, as a new one")
        batch.check_continues(self._segment, row.head, row.used)
        if batch.above is not None:
            above = segments.get(batch.above[0])
            batch.check_above(above.head if above is not None else 0)
        return row

    def _check_cited(self, rows: Sequence[Row], segments: dict[int, SegmentRow]) -> None:
        for segment, page, page_id, forgotten, leaving in sorted(rows):
            owner = segments.get(segment)
            if (owner is not None and owner.kind is SegmentKind.FORGOTTEN) or (page_id is not None and forgotten):
                raise citations.cites_gone(segment, page)
            if page_id is None or owner is None:
                raise StoreError(f"no page {address_of(page)} in segment {segment}", advice="cite pages that exist")
            if leaving:
                raise citations.cites_leaving(segment, page)

    def _new(self) -> list[int]:
        return [page.id for page in self._batch.pages if page.id > 0]

    def _ask_said(self, digests: Digests) -> ServerAnswer | None:
        """Ask whether the digests before the new pages are kept; None where that is known."""
        new = self._new()
        if not new or digests.inherits or (not digests.offset and min(new) == 1):
            return None
        if digests.offset:
            select = (
                "SELECT 1 FROM kilburn.history WHERE tenant = %s AND segment = %s AND message = %s AND is_last AND last_page = %s"
            )
            return self._statements.send(select, *self._own, digests.offset, min(new) - 1)
        return self._statements.send(
            "SELECT 1 WHERE NOT EXISTS(SELECT FROM kilburn.page WHERE tenant = %s AND segment = %s AND content IS NULL)",
            *self._own,
        )

    def _entries(self, old_rows: dict[int, Row], passage_count: int) -> dict[int, list[postings.Entry]]:
        """The passages of the pages that become searchable, by page."""
        batch, entries = self._batch, {}
        pages = {page.id: page for page in batch.pages}
        for number in dict.fromkeys(batch.index):
            page, old = pages.get(number), old_rows.get(number)
            if page is not None:
                text = searchable(self._text(page.digest), self._text(page.extra) if page.extra else "")
            elif old is None or old[5] is None:
                raise StoreError(f"page {number} cannot be indexed: it has no text here", advice="add it in the same batch")
            elif old[1] is not None:
                continue
            else:
                text, page = self._indexed_text(number, old), SEALS.page(self._segment, number, *old[3:5])
            entries[number] = postings.page_entries(self._segment, passage_count, page, text)
            passage_count += len(entries[number])
        return entries

    def _text(self, digest: str) -> str:
        if digest in self._batch.texts:
            return self._batch.texts[digest]
        (row,) = self._statements.rows(ROW, self._tenant, digest_bytes(digest))
        return self._cold.text(row)

    def _indexed_text(self, page: int, row: Row) -> str:
        """The text that a page is found by, verified.

        Raises:
            StoreCorrupt: altered or missing. StoreError: the cold place cannot be reached.
        """
        text = searchable_in(row[7:11], row[11:], self._cold.text)
        if text is None:
            raise StoreCorrupt(f"the content of page {page} is missing", advice=ADVICE)
        return text

    def _text_to_remove(self, page: int, row: Row) -> str | None:
        try:
            return self._indexed_text(page, row)
        except StoreCorrupt:
            # What nobody can read any more can still be forgotten.
            return None

    def _add_pages(self, digest_keys: dict[str, bytes], entries: dict[int, list[postings.Entry]]) -> None:
        batch = self._batch
        # In order, so that of two that add the same texts none waits for the other in a circle.
        contents = []
        for digest, key in sorted(digest_keys.items()):
            if digest in batch.texts:
                data = encode_text(batch.texts[digest], digest)
                contents.append((key, len(data), *pack(data)))
        if contents:
            self._statements.send(_ADD_CONTENT, self._tenant, *(list(column) for column in zip(*contents, strict=True)))
        pages = []
        for page in batch.pages:
            if not page.digest and not batch.copied:
                raise StoreError(f"page {page.id} has no text", advice="give its digest")
            page_entries: Sequence[tuple[Any, ...]] = entries.get(page.id) or [(None,)]
            call = page.call.encode() if page.kind is Kind.CALL and page.call is not None else None
            state = encode_state(self._segment, page.id, batch.states.get(page.id) or State())
            content, extra = (digest_keys[digest] if digest else None for digest in (page.digest, page.extra))
            record = self._sealed_record(page)
            pages.append((page.id, content, extra, call, *state, page_entries[-1][0], page_entries[0][0], *record))
        self._changes.send(_ADD_PAGES, *self._own, *(list(column) for column in zip(*pages, strict=True)))

    def _sealed_record(self, page: Page) -> tuple[bytes, bytes]:
        record = record_of_page(page, self._memo)
        return record, compute_seal("page", self._segment, page.id, record)

    def _add_entries(self, entries: dict[int, list[postings.Entry]], added: set[int]) -> None:
        every = [entry for page_entries in entries.values() for entry in page_entries]
        if every:
            postings.add(self._changes, self._tenant, every)
        old = [
            (page, page_entries[-1][0], page_entries[0][0])
            for page, page_entries in entries.items()
            if page_entries and page not in added
        ]
        if old:
            self._statements.send(_SET_RANGES, *(list(column) for column in zip(*old, strict=True)), *self._own)

    def _remove_entries(self, pages: Sequence[Row]) -> None:
        indexed = sorted([(row[1], row[2], self._text_to_remove(row[0], row)) for row in pages if row[1] is not None])
        if indexed:
            postings.remove(self._statements, self._tenant, indexed)
            numbers = [row[0] for row in pages if row[1] is not None]
            nothing = [None] * len(numbers)
            self._statements.send(_SET_RANGES, numbers, nothing, nothing, *self._own)

    def _set_states(self, pages: Sequence[int]) -> None:
        states = [(page, *encode_state(self._segment, page, self._batch.states[page])) for page in pages]
        self._changes.send(_SET_STATES, *(list(column) for column in zip(*states, strict=True)), *self._own)

    def _add_events(self) -> None:
        batch = self._batch
        events = [sealed_event(self._segment, event, record_of_event(event, self._memo))[1:] for event in batch.events]
        self.last = batch.events[-1].number, events[-1][-1]
        self._changes.send(_ADD_EVENTS, *self._own, *(list(column) for column in zip(*events, strict=True)))
        quoting = {page.id: page for page in batch.pages if page.sources}
        nodes = sorted({(node, event.number) for event in batch.events for node in mentions.event_nodes(event, quoting)})
        if nodes:
            self._changes.send(_ADD_MENTIONS, *self._own, [node for node, _ in nodes], [event for _, event in nodes])
        if noted := histories.reply_rows(batch.events):
            self._changes.send(_ADD_REPLIES, *self._own, [at for at, _ in noted], [key for _, key in noted])

    def _replace_events(self) -> None:
        """Write events over those with their numbers: what they say of a forgotten page went in the store that this is a copy
        of. What they name stays the same."""
        rows = [sealed_event(self._segment, event, record_of_event(event))[1:] for event in self._batch.replaced]
        replaced = self._statements.rows(
            "UPDATE kilburn.event SET body = new.body, seal = new.seal"
            " FROM unnest(%s::bigint[], %s::text[], %s::bytea[], %s::bytea[]) AS new(number, act, body, seal)"
            " WHERE tenant = %s AND segment = %s AND event.number = new.number AND event.act = new.act RETURNING event.number",
            *(list(column) for column in zip(*rows, strict=True)),
            *self._own,
        )
        if len(replaced) != len(rows):
            raise StoreError("an event is to be replaced that is not there", advice="give its number and its act")

    def _add_citations(self, kind: SegmentKind, citing: Sequence[Page]) -> None:
        rows = {row for page in citing for row in citations.page_citations(self._segment, kind, page)}
        change_citations(self._changes, _ADD_CITATIONS, self._tenant, rows)

    def _hold_checkpoint(self, above: tuple[int, int]) -> None:
        """Keep the parent's last one before the fork: this segment is read from it."""
        keep = (
            "UPDATE kilburn.checkpoint SET forked = true WHERE tenant = %s AND segment = %s AND head = (SELECT max(head)"
            " FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s AND head <= %s)"
        )
        self._statements.send(keep, self._tenant, above[0], self._tenant, *above)

    def _keep_checkpoint(self, checkpoint: bytes) -> None:
        head = self._batch.head + len(self._batch.events)
        codec, data = pack(checkpoint)
        seal = compute_seal("checkpoint", self._segment, head, len(checkpoint), codec, data)
        delete = "DELETE FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s AND (NOT forked OR head = %s)"
        self._statements.send(delete, *self._own, head)
        insert = (
            "INSERT INTO kilburn.checkpoint(tenant, segment, head, forked, size, codec, data, seal)"
            " VALUES(%s, %s, %s, false, %s, %s, %s, %s)"
        )
        self._statements.send(insert, *self._own, head, len(checkpoint), codec, data, seal)

    def _erase(self, pages: Sequence[Row], segment_row: SegmentRow) -> None:
        batch, send = self._batch, self._statements.send
        words = {word for page in batch.inherited for word in telling_words(page)}
        contents: set[bytes] = set()
        cited: set[citations.Citation] = set()
        blank = []
        for number, _, _, record, seal, content, extra, *_ in pages:
            page = SEALS.page(self._segment, number, record, seal)
            words.update(telling_words(page))
            contents.update(key for key in (content, extra) if key is not None)
            cited.update(citations.page_citations(self._segment, segment_row.kind, page))
            cited.add(citations.forgotten_mark(self._segment, number))
            state = encode_state(self._segment, number, State(Place.DROPPED))
            blank.append((number, *state, *self._sealed_record(make_tombstone(page))))
        remove_citations(self._statements, self._tenant, cited)
        if blank:
            send(
                "UPDATE kilburn.page SET content = NULL, extra = NULL, call = NULL, place = new.place, pinned = new.pinned,"
                " importance = new.importance, valid_until = new.valid_until, state_seal = new.state_seal, record = new.record,"
                " seal = new.seal"
                " FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::double precision[], %s::double precision[],"
                " %s::bytea[], %s::bytea[], %s::bytea[]) AS new(id, place, pinned, importance, valid_until,"
                " state_seal, record, seal)"
                " WHERE tenant = %s AND segment = %s AND page.id = new.id",
                *(list(column) for column in zip(*blank, strict=True)),
                *self._own,
            )
        if blank or batch.inherited:
            # A digest of a forgotten text does not stay, and neither do those that come after it. A reply's key says nothing.
            send("DELETE FROM kilburn.history WHERE tenant = %s AND segment = %s AND message > 0", *self._own)
        remove_unused(self._statements, self._tenant, sorted(contents))
        # An object that is just being written to the cold place may hold its words: whoever writes it finds this out.
        self._cold.give_up()
        self._blank_events({*batch.erase, *(page.id for page in batch.inherited)}, words, segment_row)
        flag(self._statements, self._tenant)

    def _blank_events(self, erased: set[int], words: set[str], segment_row: SegmentRow) -> None:
        numbers = events_with_nodes(self._statements, *self._own, mentions.page_nodes(erased))
        head = segment_row.head + len(self._batch.events)
        blanked, quotations = [], Quotations(words)
        for event in read_events(self._statements, self._tenant, segment_row, [number for number in numbers if number <= head]):
            if concerns(event, erased):
                *_, body, seal = sealed_event(self._segment, event, record_of_event(scrub(event, quotations)))
                blanked.append((event.number, body, seal))
        if blanked:
            self._statements.send(
                "UPDATE kilburn.event SET body = new.body, seal = new.seal"
                " FROM unnest(%s::bigint[], %s::bytea[], %s::bytea[]) AS new(number, body, seal)"
                " WHERE tenant = %s AND segment = %s AND event.number = new.number",
                *(list(column) for column in zip(*blanked, strict=True)),
                *self._own,
            )


def remove_unused(statements: Statements, tenant: int, contents: Sequence[bytes]) -> None:
    """Remove those of these texts that no page has."""
    if not contents:
        return
    # Who has just found one of them and is about to use it is waited for: the next statement sees its page.
    lock = "SELECT FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[]) ORDER BY digest FOR UPDATE"
    statements.send(lock, tenant, list(contents))
    statements.send(
        "DELETE FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[])"
        " AND NOT EXISTS(SELECT FROM kilburn.page WHERE page.tenant = content.tenant AND page.content = content.digest)"
        " AND NOT EXISTS(SELECT FROM kilburn.page WHERE page.tenant = content.tenant AND page.extra = content.digest)",
        *(tenant, list(contents)),
    )


def events_with_nodes(statements: Statements, tenant: int, segment: int, nodes: list[int]) -> list[int]:
    """Return the numbers of the events with any of these nodes of `mentions`, in order."""
    select = (
        "SELECT DISTINCT event FROM kilburn.mention"
        " WHERE tenant = %s AND segment = %s AND node = ANY(%s::bigint[]) ORDER BY event"
    )
    return [number for (number,) in statements.rows(select, tenant, segment, nodes)]


def read_events(statements: Statements, tenant: int, segment: SegmentRow, numbers: Sequence[int]) -> list[Event]:
    """The events with these numbers, which come in order.

    Raises:
        StoreCorrupt: one is missing, or not what was written.
    """
    select = (
        "SELECT number, convert_to(act, 'UTF8'), body, seal FROM kilburn.event"
        " WHERE tenant = %s AND segment = %s AND number = ANY(%s::bigint[]) ORDER BY number"
    )
    rows = statements.rows(select, tenant, segment.number, list(numbers)) if numbers else []
    if len(rows) < len(numbers):
        raise StoreCorrupt(f"an event of session {segment.name!r} is missing", advice=ADVICE)
    return [SEALS.whole_event(segment, *row) for row in rows]


def put_history(statements: Sender, tenant: int, segment: int, new_digests: Digests, page: int) -> None:
    """Keep the digests of a session behind its first ones, which are kept."""
    segment_key, offset, digests = (tenant, segment), new_digests.offset, new_digests.added
    if not offset:
        statements.send("DELETE FROM kilburn.history WHERE tenant = %s AND segment = %s AND message > 0", *segment_key)
    elif new_digests.inherits:
        pass
    elif not digests:
        update = "UPDATE kilburn.history SET last_page = %s WHERE tenant = %s AND segment = %s AND message = %s"
        statements.send(update, page, *segment_key, offset)
    else:
        statements.send(
            "UPDATE kilburn.history SET is_last = false WHERE tenant = %s AND segment = %s AND message = %s", *segment_key, offset
        )
    if digests:
        places = list(range(offset + 1, offset + len(digests) + 1))
        statements.send(
            "INSERT INTO kilburn.history(tenant, segment, message, digest, is_last, last_page, tail)"
            " SELECT %s, %s, message, digest, message = %s, %s, tail"
            " FROM unnest(%s::bigint[], %s::bytea[], %s::bytea[]) AS new(message, digest, tail)",
            *(*segment_key, places[-1], page, places, list(digests), list(new_digests.tails)),
        )


def create(statements: Statements, tenant: int, name: str, time: float, kind: SegmentKind, user: str) -> int | None:
    """Add the row of a segment; returns its number, or None if the name is taken."""
    # Who creates a segment holds this row until the end: so numbers have no gaps.
    ((number,),) = statements.rows(
        "INSERT INTO kilburn.counter(tenant, segments) VALUES(%s, 1)"
        " ON CONFLICT(tenant) DO UPDATE SET segments = counter.segments + 1 RETURNING segments",
        tenant,
    )
    check_storable(name)
    stored_name, owner = name.encode(), user.encode()
    seal = seal_of_segment(number, tenant, stored_name, float(time), 0, kind.value.encode(), owner)
    counters = float(time), 0, 0, 0, 0, 0
    insert = (
        f"INSERT INTO kilburn.segment(tenant, id, name, created, kind, owner, seal, {COUNTERS}, counters_seal, epoch, writer)"
        " VALUES(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, 0, '') ON CONFLICT DO NOTHING RETURNING id"
    )
    counters_seal = compute_seal("counters", number, *counters)
    row = statements.row(insert, tenant, number, stored_name, float(time), kind.value, owner, seal, *counters, counters_seal)
    if row is not None:
        return int(number)
    statements.send("UPDATE kilburn.counter SET segments = segments - 1 WHERE tenant = %s", tenant)
    return None


def erase_segment(statements: Statements, tenant: int, segment: int, *, wipe: bool = True) -> None:
    """Delete what is left of a segment of which every page is forgotten. An empty row keeps its number, which is in the
    ledgers of others.

    Raises:
        StoreError: there is none, or it has pages that are not forgotten.
    """
    rows = lock(statements, tenant, [segment])
    page_count = statements.send(
        "SELECT count(*) FROM kilburn.page WHERE tenant = %s AND segment = %s AND place <> %s",
        tenant,
        segment,
        Place.DROPPED.value,
    )
    segments, epochs = locked(rows)
    if segment not in segments:
        raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
    segments[segment].whole()
    if page_count.fetchall() != [(0,)]:
        raise StoreError(f"segment {segment} has pages that are not forgotten", advice="forget them first")
    for statement in (
        "DELETE FROM kilburn.page WHERE tenant = %s AND segment = %s",
        "DELETE FROM kilburn.event WHERE tenant = %s AND segment = %s",
        "DELETE FROM kilburn.mention WHERE tenant = %s AND segment = %s",
        "DELETE FROM kilburn.history WHERE tenant = %s AND segment = %s",
        "DELETE FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s",
        "DELETE FROM kilburn.embedded WHERE tenant = %s AND segment = %s",
    ):
        statements.send(statement, tenant, segment)
    remove_citations(statements, tenant, [citations.forgotten_mark(segment, citations.WHOLE)])
    name, kind = f"@forgotten/{segment}".encode(), SegmentKind.FORGOTTEN.value
    seal = seal_of_segment(segment, tenant, name, 0.0, 0, kind.encode(), b"")
    counters = 0.0, 0, 0, 0, 0, 0
    statements.send(
        "UPDATE kilburn.segment SET name = %s, created = 0, kind = %s, owner = '', seal = %s, used = %s, head = %s, pages = %s,"
        " tokens = %s, passages = %s, characters = %s, counters_seal = %s, epoch = %s WHERE tenant = %s AND id = %s",
        *(name, kind, seal, *counters, compute_seal("counters", segment, *counters), epochs[segment] + 1, tenant, segment),
    )
    if wipe:
        flag(statements, tenant)
