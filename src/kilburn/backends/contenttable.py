"""The texts of one tenant, one row for each digest.

The text of an excerpt is stored as pieces of its sources' texts and the few words between them. So a fold that is remade every
few steps does not store the same passages repeatedly. Two rules keep every text readable as long as a page has it:

- Pieces refer only to texts that are stored whole. The text of an original always is.
- A text in pieces belongs to excerpts of exactly these pieces. An excerpt is forgotten with its sources, so it never outlives
  them. If another page gets the same text, the text is stored whole.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import apsw

from kilburn.backend import Batch, Pieces
from kilburn.backends.chilling import MIN_ROW_BYTES, SETTING, Coming, Lying, OpenPlace, Returning, required
from kilburn.backends.codec import COLD, PLAIN, SPLICED, ZSTD, digest_bytes, encode_text, pack, pack_pieces, parted, unpack
from kilburn.backends.connection import StoreConnection, insert, listed, row, rows, rows_of_each
from kilburn.backends.records import compute_seal
from kilburn.backends.schema import FLAG
from kilburn.errors import StoreCorrupt, StoreError
from kilburn.message import Kind
from kilburn.page import searchable_words

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

_EXCHANGE = "UPDATE content SET codec = ?, data = ? WHERE tenant = ? AND digest = ? AND codec = ? AND data = ? RETURNING 1"
"""Exchanges the stored form of a text, if it is still the given one."""

OF_NO_PAGE = (
    "NOT EXISTS(SELECT 1 FROM page WHERE content = content.id) AND NOT EXISTS(SELECT 1 FROM page WHERE extra = content.id)"
)
"""SQL condition on a content: no page uses it."""

GIVE_UP = "UPDATE cold_object SET deleting = ? WHERE tenant = ? AND deleting = 0"
"""Gives up the announced objects of the cold place; the programs that write them will notice."""

_INSERT = (
    "INSERT INTO content(tenant, digest, size, codec, data) VALUES(?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING digest, id"
)

_SELECT = "SELECT size, codec, data, digest FROM content WHERE id = ?"


class Packed(NamedTuple):
    """A text of a new page in its stored form.

    Args:
        plain: the text in UTF-8; None if the batch does not contain it: then the store must have it.
        pieces: the pieces to store in its place if that saves space; the text is then not packed yet.
    """

    key: bytes
    plain: bytes | None = None
    codec: int = PLAIN
    data: bytes = b""
    pieces: Pieces | None = None


def packed_texts(batch: Batch) -> dict[str, Packed]:
    """Return the packed texts of a batch's new pages, by digest.

    Raises:
        StoreError: a text has another digest.
    """
    whole = {page.extra for page in batch.pages if page.extra}
    whole.update(page.digest for page in batch.pages if page.kind is not Kind.EXCERPT or page.digest not in batch.pieces)
    if batch.copied:
        whole.discard("")  # of a page that was forgotten
    packed: dict[str, Packed] = {}
    for digest in whole.union(page.digest for page in batch.pages if page.digest):
        key = digest_bytes(digest)
        if digest not in batch.texts:
            packed[digest] = Packed(key)
            continue
        plain = encode_text(batch.texts[digest], digest)
        if digest in whole:
            packed[digest] = Packed(key, plain, *pack(plain))
        else:
            packed[digest] = Packed(key, plain, pieces=batch.pieces[digest])
    return packed


class ContentTable:
    """Reads and writes texts within the caller's transactions."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        self._db, self._tenant = db, tenant

    def texts(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield digests with their verified texts. Missing texts are left out.

        Raises:
            StoreCorrupt: a text does not match its digest.
        """
        select = (
            "SELECT value, digest, size, codec, data FROM json_each(?) CROSS JOIN content ON tenant = ? AND digest = unhex(value)"
        )
        wholes = Wholes(self._db)
        for digest, key, size, codec, data in rows(self._db, select, listed(digests), self._tenant):
            yield digest, unpack(*thawed(self._db, codec, data, key), size, key, wholes.text)

    def add(self, texts: Mapping[str, Packed]) -> dict[str, int]:
        """Return the row numbers of new pages' texts, by digest. Missing rows are written.

        Raises:
            StoreError: a text is missing.
        """
        numbers = self._add({digest: text for digest, text in texts.items() if text.pieces is None})
        spliced: dict[str, Packed] = {}
        for digest, text in texts.items():
            if text.pieces is not None and text.plain is not None:
                # The texts of its pieces may have been added just before.
                codec, data = self._packed(text.pieces, text.plain) or pack(text.plain)
                spliced[digest] = text._replace(codec=codec, data=data)
        return numbers | self._add(spliced) if spliced else numbers

    def _add(self, texts: Mapping[str, Packed]) -> dict[str, int]:
        new_rows = (
            (self._tenant, text.key, len(text.plain), text.codec, text.data) for text in texts.values() if text.plain is not None
        )
        # Most texts are new, so they are written without looking first.
        numbers: dict[bytes, int] = dict(insert(self._db, _INSERT, new_rows))
        for digest, text in texts.items():
            if text.key not in numbers:
                select = "SELECT id, codec, data FROM content WHERE tenant = ? AND digest = ?"
                stored_row = row(self._db, select, self._tenant, text.key)
                if stored_row is None:
                    raise StoreError(f"no text for digest {digest}", advice="put it into the batch's texts")
                if stored_row[1] == SPLICED and stored_row[1:] != (text.codec, text.data):
                    self._store_whole(stored_row[0])
                elif stored_row[1] == COLD and text.plain is not None:
                    # A text that is written again will be read.
                    self._db.execute("UPDATE content SET codec = ?, data = ? WHERE id = ?", (*pack(text.plain), stored_row[0]))
                numbers[text.key] = stored_row[0]
        return {digest: numbers[text.key] for digest, text in texts.items()}

    def _packed(self, pieces: Pieces, data: bytes) -> tuple[int, bytes] | None:
        """Return codec and bytes of a text in pieces; None if that would save nothing, or a piece is not of a whole text."""
        numbers: dict[str, int] = {}
        for digest in {piece[0] for piece in pieces if not isinstance(piece, str)}:
            select = "SELECT id, codec FROM content WHERE tenant = ? AND digest = ?"
            stored_row = row(self._db, select, self._tenant, digest_bytes(digest))
            if stored_row is None or stored_row[1] == SPLICED:
                return None
            numbers[digest] = stored_row[0]
        packed = pack_pieces([piece if isinstance(piece, str) else (numbers[piece[0]], *piece[1:]) for piece in pieces])
        return packed if len(packed[1]) < len(data) else None

    def _store_whole(self, number: int) -> None:
        """Store a text whole that is stored in pieces."""
        ((size, codec, data, digest),) = rows(self._db, _SELECT, number)
        text = unpack(codec, data, size, digest, Wholes(self._db).text)
        self._db.execute("UPDATE content SET codec = ?, data = ? WHERE id = ?", (*pack(text.encode("utf-8")), number))


class Wholes:
    """Reads texts that are stored whole, each once."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._texts: dict[int, str] = {}

    def text(self, number: int) -> str:
        """Return the text of a row.

        Raises:
            StoreCorrupt: it is missing or altered.
        """
        if number not in self._texts:
            stored_row = row(self._db, _SELECT, number)
            if stored_row is None:
                raise StoreCorrupt("a text that an excerpt quotes is missing", advice="run `kilburn fsck`")
            size, codec, data, digest = stored_row
            self._texts[number] = unpack(*thawed(self._db, codec, data, digest), size, digest)
        return self._texts[number]


def thawed(db: apsw.Connection, codec: int, data: bytes, digest: bytes) -> tuple[int, bytes]:
    """Return codec and bytes of a stored text; for a cold text, those in its object.

    Raises:
        StoreCorrupt: the object is missing or altered. StoreError: the cold place cannot be reached.
    """
    if codec != COLD:
        return codec, data
    fetch = db.fetch if isinstance(db, StoreConnection) else None
    if fetch is None:
        raise StoreCorrupt(
            "a text is cold, and the setting of the cold place is missing", advice="set it again with `kilburn cold set`"
        )
    return parted(fetch(data.decode("ascii", "replace"), digest))


def searchable_text(db: apsw.Connection, segment: int, page: int) -> str:
    """Return the verified text by which a page is found.

    Raises:
        StoreCorrupt: it is altered or missing.
    """
    page_row = row(db, "SELECT content, extra FROM page WHERE segment = ? AND id = ?", segment, page)
    wholes = Wholes(db)
    words = "" if page_row is None or page_row[1] is None else searchable_words(wholes.text(page_row[1]))
    if words:
        return words
    content = None if page_row is None or page_row[0] is None else row(db, _SELECT, page_row[0])
    if content is None:
        raise StoreCorrupt(f"the content of page {page} is missing", advice="run `kilburn fsck`")
    size, codec, data, digest = content
    return unpack(*thawed(db, codec, data, digest), size, digest, wholes.text)


def remove_unused(db: apsw.Connection, contents: Iterable[int]) -> None:
    """Remove those of these texts that no page uses."""
    db.executemany(f"DELETE FROM content WHERE id = ? AND {OF_NO_PAGE}", [(content,) for content in sorted(contents)])


class ColdTable:
    """Reads and writes what the file says of cold texts, see `ColdRows`. It does not open transactions: its caller does."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        self._db, self._tenant = db, tenant
        self._opened = OpenPlace()

    def place(self) -> ColdPlace | None:
        """See `ColdRows`."""
        setting = row(self._db, "SELECT value, seal FROM setting WHERE tenant = ? AND name = ?", self._tenant, SETTING)
        if setting is None:
            return None
        if setting[1] != compute_seal("setting", self._tenant, SETTING, setting[0]):
            raise StoreCorrupt(f"the setting {SETTING!r} is not what was written", advice="set it again with `kilburn cold set`")
        return self._opened.of(setting[0])

    def fetch(self, name: str, digest: bytes) -> bytes:
        """Return the content of a text's object.

        Raises:
            StoreCorrupt: it is missing or altered, or there is no cold place. The errors of `place`.
        """
        return required(self.place()).get(name, digest)

    def whole(self, keys: Collection[bytes]) -> list[tuple[bytes, int, bytes]]:
        """See `ColdRows`."""
        select = (
            "SELECT digest, codec, data FROM content WHERE tenant = ? AND digest = ? AND codec IN (?, ?) AND length(data) > ?"
        )
        return list(rows_of_each(self._db, select, [(self._tenant, key, PLAIN, ZSTD, MIN_ROW_BYTES) for key in keys]))

    def announce(self, names: Iterable[str]) -> None:
        """See `ColdRows`."""
        insert = "INSERT INTO cold_object(tenant, name, deleting) VALUES(?, ?, 0)"
        self._db.executemany(insert, [(self._tenant, name.encode()) for name in names])

    def give_up(self, names: Iterable[str] | None = None) -> None:
        """See `ColdRows`."""
        if names is None:
            self._db.execute(GIVE_UP, (time.time(), self._tenant))
            return
        give_up = "INSERT INTO cold_object(tenant, name, deleting) VALUES(?, ?, 1) ON CONFLICT DO UPDATE SET deleting = 1"
        self._db.executemany(give_up, [(self._tenant, name.encode()) for name in names])

    def settle(self, coming: Sequence[Coming], place: ColdPlace) -> list[Coming]:
        """See `ColdRows`."""
        settled: list[Coming] = []
        for text in coming if self.place() is place else ():
            name = text.name.encode()
            take = "DELETE FROM cold_object WHERE tenant = ? AND name = ? AND NOT deleting RETURNING 1"
            if row(self._db, take, self._tenant, name) is None:
                continue
            if row(self._db, _EXCHANGE, COLD, name, self._tenant, text.key, text.codec, text.data) is not None:
                settled.append(text)
        self.give_up(text.name for text in coming if text not in settled)
        return settled

    def lying(self, keys: Collection[bytes] | None = None) -> list[Lying]:
        """See `ColdRows`."""
        select = "SELECT digest, size, data FROM content WHERE tenant = ? AND codec = ?"
        if keys is None:
            cold_rows: Iterable[tuple[bytes, int, bytes]] = rows(self._db, select, self._tenant, COLD)
        else:
            cold_rows = list(rows_of_each(self._db, f"{select} AND digest = ?", [(self._tenant, COLD, key) for key in keys]))
        return [Lying(digest, size, name.decode("ascii", "replace")) for digest, size, name in cold_rows]

    def take(self, back: Sequence[Returning]) -> list[bytes]:
        """See `ColdRows`."""
        returned = []
        for key, name, codec, data in back:
            if row(self._db, _EXCHANGE, codec, data, self._tenant, key, COLD, name.encode()) is not None:
                returned.append(data)
        return returned

    def strays(self) -> dict[str, float]:
        """See `ColdRows`."""
        objects = rows(self._db, "SELECT name, deleting FROM cold_object WHERE tenant = ?", self._tenant)
        return {name.decode("ascii", "replace"): since for name, since in objects}

    def gone(self, names: Iterable[str]) -> None:
        """See `ColdRows`."""
        delete = "DELETE FROM cold_object WHERE tenant = ? AND name = ? AND deleting"
        self._db.executemany(delete, [(self._tenant, name.encode()) for name in names])
        # A name is a hash of the object's content.
        self._db.execute(FLAG)
