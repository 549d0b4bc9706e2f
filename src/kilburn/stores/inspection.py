"""What can be wrong with a file, and the rebuilding of what is derived.

It refuses to repair by guessing: content that is lost or altered is reported, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator

import apsw
import msgspec

from kilburn.errors import StoreCorrupt
from kilburn.stores.codec import unpack
from kilburn.stores.records import page_of
from kilburn.stores.schema import create_text, text_table
from kilburn.stores.statement import rows, rows_of_each
from kilburn.stores.textindex import TextIndex
from kilburn.stores.transaction import content_of

__all__ = ["Finding", "inspect", "rebuild"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Args:
        kind: "file" (SQLite's own check), "content" (missing or altered), "page" (its row and its
            content disagree), "ledger" (holes or a wrong head), "index" (search would find too much or
            too little), or "orphan" (stored but used by nothing).
        what: in words, with the digest or address.
        derived: whether `repair` makes it good.
        process: the process's number, or 0. page: the page's id, or 0.
    """

    kind: str
    what: str
    derived: bool = False
    process: int = 0
    page: int = 0


def inspect(db: apsw.Connection, index: TextIndex, tenant: int) -> list[Finding]:
    """Everything that is wrong; empty when all is well."""
    return [*_file(db), *_contents(db, tenant), *_pages(db, tenant), *_ledger(db, tenant), *_entries(db, index, tenant)]


def _file(db: apsw.Connection) -> Iterator[Finding]:
    for (line,) in rows(db, "PRAGMA integrity_check"):
        if line != "ok":
            yield Finding(kind="file", what=str(line), derived="fts5" in line.lower() or "index" in line.lower())


def _contents(db: apsw.Connection, tenant: int) -> Iterator[Finding]:
    for digest, size, codec, data in rows_of_each(
        db, "SELECT digest, size, codec, data FROM content WHERE tenant = ?", [(tenant,)]
    ):
        try:
            unpack(codec, data, size, digest)
        except StoreCorrupt as error:
            yield Finding(kind="content", what=error.what)
    orphans = (
        "SELECT digest FROM content WHERE tenant = ? AND NOT EXISTS(SELECT 1 FROM page WHERE content = content.id)"
        " AND NOT EXISTS(SELECT 1 FROM page WHERE extra = content.id)"
    )
    for (digest,) in rows(db, orphans, tenant):
        yield Finding(kind="orphan", what=f"content {digest.hex()} belongs to no page", derived=True)


def _pages(db: apsw.Connection, tenant: int) -> Iterator[Finding]:
    select = (
        "SELECT page.process, page.id, meta, text.digest, extra.digest FROM process JOIN page ON page.process = process.id"
        " LEFT JOIN content AS text ON text.id = page.content LEFT JOIN content AS extra ON extra.id = page.extra"
        " WHERE process.tenant = ?"
    )
    for process, number, meta, text, extra in rows(db, select, tenant):
        try:
            page = page_of(meta)
        except msgspec.DecodeError as error:
            yield Finding(kind="page", what=f"page {number} cannot be read: {error}", process=process, page=number)
            continue
        for digest, found in ((page.digest, text), (page.extra, extra)):
            if digest != (found.hex() if found else ""):
                what = f"{page.address} names content {digest or 'none'}, the store has {found.hex() if found else 'none'}"
                yield Finding(kind="page", what=what, process=process, page=number)


def _ledger(db: apsw.Connection, tenant: int) -> Iterator[Finding]:
    select = (
        "SELECT process.id, head, count(number), coalesce(min(number), 1), coalesce(max(number), 0) FROM process"
        " LEFT JOIN event ON event.process = process.id WHERE tenant = ? GROUP BY process.id"
    )
    for process, head, count, first, last in rows(db, select, tenant):
        if not head == count == last or first != 1:
            what = f"the ledger has {count} events, {first} to {last}; its head is {head}"
            yield Finding(kind="ledger", what=what, process=process)


def _entries(db: apsw.Connection, index: TextIndex, tenant: int) -> Iterator[Finding]:
    """The words in the index against the words of the pages, by a sum over each entry's words."""
    wanted: dict[int, int] = {}
    select = (
        "SELECT page.process, page.id, first, last FROM process JOIN page ON page.process = process.id WHERE tenant = ? AND first"
    )
    for process, number, first, last in rows(db, select, tenant):
        entries = rows(db, "SELECT id, page, start, stop FROM passage WHERE id BETWEEN ? AND ?", first, last)
        try:
            text = content_of(db, process, number)
        except StoreCorrupt:
            # Already reported as content; its entries cannot be compared with anything.
            wanted.update({entry: -1 for entry, *_ in entries})
            continue
        if not entries or any(page != number for _, page, _, _ in entries):
            yield Finding(kind="index", what=f"page {number} has no passages", derived=True, process=process, page=number)
            continue
        for entry, _, start, stop in entries:
            wanted[entry] = sum(hash(word) for word in index.stems(text[start:stop]))
    found: dict[int, int] = {}
    # A tenant that a read-only file does not have has no index either.
    for term, entry in index.postings() if tenant else ():
        found[entry] = found.get(entry, 0) + hash(term)
    for entry in sorted(wanted.keys() | found.keys()):
        if wanted.get(entry, 0) not in (found.get(entry, 0), -1):
            what = f"the text index and the pages disagree about entry {entry & 0xFFFFFFFF}"
            yield Finding(kind="index", what=what, derived=True, process=entry >> 32)


def rebuild(db: apsw.Connection, index: TextIndex, tenant: int) -> None:
    """Make text index and counters anew from pages and ledger; remove content that no page has."""
    name = text_table(tenant)
    db.execute(f"DROP TABLE {name}")
    create_text(db, tenant)
    for (process,) in rows(db, "SELECT id FROM process WHERE tenant = ?", tenant):
        _rebuild_process(db, index, process)
    db.execute(
        "DELETE FROM content WHERE tenant = ? AND NOT EXISTS(SELECT 1 FROM page WHERE content = content.id)"
        " AND NOT EXISTS(SELECT 1 FROM page WHERE extra = content.id)",
        (tenant,),
    )
    db.execute("REINDEX")


def _rebuild_process(db: apsw.Connection, index: TextIndex, process: int) -> None:
    pages = rows(
        db, "SELECT id FROM page WHERE process = ? AND first IS NOT NULL AND content IS NOT NULL ORDER BY first DESC", process
    )
    db.execute("DELETE FROM passage WHERE id BETWEEN ? AND ?", (process << 32, (process + 1 << 32) - 1))
    db.execute("UPDATE page SET first = NULL, last = NULL WHERE process = ?", (process,))
    used = characters = 0
    for (page,) in pages:
        try:
            text = content_of(db, process, page)
        except StoreCorrupt:
            # Reported by `inspect`; what cannot be read cannot be searched.
            continue
        entries, length, ranges = index.add(process, used, [(page, text)])
        used += entries
        characters += length
        db.executemany(
            "UPDATE page SET first = ?, last = ? WHERE process = ? AND id = ?",
            [(first, last, process, number) for number, first, last in ranges],
        )
    db.execute("UPDATE process SET passages = ?, characters = ? WHERE id = ?", (used, characters, process))
