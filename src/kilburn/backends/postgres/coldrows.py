"""Which texts of a tenant are in its cold place, and which objects there are to be deleted, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kilburn.backends.chilling import MIN_ROW_BYTES, SETTING, Coming, Lying, OpenPlace, Returning, required
from kilburn.backends.codec import COLD, PLAIN, ZSTD, parted, unpack
from kilburn.backends.postgres.statements import Row, Statements
from kilburn.backends.records import compute_seal
from kilburn.errors import StoreCorrupt
from kilburn.page import searchable_words

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

ROW = "SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s AND digest = %s"
"""A text's row, as `text_at` takes it."""


def searchable_in(content: Row, extra: Row, text_of: Callable[[Row], str]) -> str | None:
    """Return the text that a page is found by, from the rows of its text and of its leftovers, whose columns are None where there
    is none; None without a text."""
    words = searchable_words(text_of(extra)) if extra[-1] is not None else ""
    return words or (text_of(content) if content[-1] is not None else None)


class PostgresColdRows:
    """Reads and writes what the database says of cold texts, see `ColdRows`, in a transaction that its caller ends."""

    def __init__(self, statements: Statements, tenant: int, opened: OpenPlace) -> None:
        self._statements, self._tenant, self._opened = statements, tenant, opened

    def place(self) -> ColdPlace | None:
        """See `ColdRows`."""
        select = "SELECT value, seal FROM kilburn.setting WHERE tenant = %s AND name = %s"
        row = self._statements.row(select, self._tenant, SETTING.encode())
        if row is None:
            return None
        if row[1] != compute_seal("setting", self._tenant, SETTING.encode(), row[0]):
            raise StoreCorrupt(f"the setting {SETTING!r} is not what was written", advice="`kilburn cold set` it again")
        return self._opened.of(row[0].decode())

    def text(self, row: Row) -> str:
        """The text of a row, of one that is cold too. Raises what `text_at` raises."""
        return text_at(
            row,
            lambda name, digest: required(self.place()).get(name, digest),
            lambda digest: self._statements.row(ROW, self._tenant, digest),
        )

    def whole(self, keys: Collection[bytes]) -> list[tuple[bytes, int, bytes]]:
        """See `ColdRows`."""
        select = (
            "SELECT digest, codec, data FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[])"
            " AND codec IN (%s, %s) AND length(data) > %s"
        )
        rows = self._statements.rows(select, self._tenant, list(keys), PLAIN, ZSTD, MIN_ROW_BYTES)
        return [(digest, codec, data) for digest, codec, data in rows]

    def announce(self, names: Iterable[str]) -> None:
        """See `ColdRows`."""
        insert = (
            "INSERT INTO kilburn.cold_object(tenant, name, deleting) SELECT %s, name, 0 FROM unnest(%s::bytea[]) AS new(name)"
        )
        self._statements.send(insert, self._tenant, _stored(names))

    def give_up(self, names: Iterable[str] | None = None) -> None:
        """See `ColdRows`."""
        if names is None:
            clock = "extract(epoch FROM clock_timestamp())"
            self._statements.send(
                f"UPDATE kilburn.cold_object SET deleting = {clock} WHERE tenant = %s AND deleting = 0", self._tenant
            )
            return
        insert = (
            "INSERT INTO kilburn.cold_object(tenant, name, deleting) SELECT %s, name, 1 FROM unnest(%s::bytea[]) AS new(name)"
            " ON CONFLICT(tenant, name) DO UPDATE SET deleting = 1"
        )
        self._statements.send(insert, self._tenant, sorted(_stored(names)))

    def settle(self, coming: Sequence[Coming], place: ColdPlace) -> list[Coming]:
        """See `ColdRows`."""
        settled = self._settled(coming, place)
        self.give_up(text.name for text in coming if text not in settled)
        return settled

    def _settled(self, coming: Sequence[Coming], place: ColdPlace) -> list[Coming]:
        # Who names another place waits until the texts are cold, and sees them then.
        lock = "SELECT FROM kilburn.setting WHERE tenant = %s AND name = %s FOR SHARE"
        self._statements.send(lock, self._tenant, SETTING.encode())
        if self.place() is not place:
            return []
        # In the order of who forgets: the texts first, then their objects.
        lock = "SELECT FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[]) ORDER BY digest FOR NO KEY UPDATE"
        self._statements.send(lock, self._tenant, [text.key for text in coming])
        take = "DELETE FROM kilburn.cold_object WHERE tenant = %s AND name = ANY(%s::bytea[]) AND deleting = 0 RETURNING name"
        ours = {name for (name,) in self._statements.rows(take, self._tenant, _stored(text.name for text in coming))}
        announced = [text for text in coming if text.name.encode() in ours]
        if not announced:
            return []
        update = (
            "UPDATE kilburn.content SET codec = %s, data = new.name"
            " FROM unnest(%s::bytea[], %s::bigint[], %s::bytea[], %s::bytea[]) AS new(digest, codec, data, name)"
            " WHERE tenant = %s AND content.digest = new.digest AND content.codec = new.codec AND content.data = new.data"
            " RETURNING new.name"
        )
        columns = ([text.key for text in announced], [text.codec for text in announced], [text.data for text in announced])
        names = {
            name
            for (name,) in self._statements.rows(update, COLD, *columns, _stored(text.name for text in announced), self._tenant)
        }
        return [text for text in announced if text.name.encode() in names]

    def lying(self, keys: Collection[bytes] | None = None) -> list[Lying]:
        """See `ColdRows`."""
        # The index of what is cold is for this number as it stands here.
        select = "SELECT digest, size, data FROM kilburn.content WHERE tenant = %s AND codec = 3"
        if keys is None:
            rows = self._statements.rows(select, self._tenant)
        else:
            rows = self._statements.rows(f"{select} AND digest = ANY(%s::bytea[])", self._tenant, list(keys))
        return [Lying(digest, size, _read(name)) for digest, size, name in rows]

    def take(self, back: Sequence[Returning]) -> list[bytes]:
        """See `ColdRows`."""
        if not back:
            return []
        update = (
            "UPDATE kilburn.content SET codec = new.codec, data = new.data"
            " FROM unnest(%s::bytea[], %s::bytea[], %s::bigint[], %s::bytea[]) AS new(digest, name, codec, data)"
            " WHERE tenant = %s AND content.digest = new.digest AND content.codec = 3 AND content.data = new.name"
            " RETURNING content.data"
        )
        columns = (
            [text.key for text in back],
            _stored(text.name for text in back),
            [text.codec for text in back],
            [text.data for text in back],
        )
        return [data for (data,) in self._statements.rows(update, *columns, self._tenant)]

    def strays(self) -> dict[str, float]:
        """See `ColdRows`."""
        rows = self._statements.rows(
            "SELECT name, deleting FROM kilburn.cold_object WHERE tenant = %s ORDER BY name", self._tenant
        )
        return {_read(name): deleting for name, deleting in rows}

    def gone(self, names: Iterable[str]) -> None:
        """See `ColdRows`."""
        delete = "DELETE FROM kilburn.cold_object WHERE tenant = %s AND name = ANY(%s::bytea[]) AND deleting > 0"
        self._statements.send(delete, self._tenant, _stored(names))


def text_at(row: Row, fetch: Callable[[str, bytes], bytes], reread: Callable[[bytes], Row | None]) -> str:
    """The text of a row, verified; of one that is cold, what its object holds.

    Args:
        row: size, codec, data, digest.
        fetch: what an object holds, by its name and the digest of its text.
        reread: returns the row as it is by now: a text may have been brought back, and its object be gone.

    Raises:
        StoreCorrupt: altered, or its object is missing. StoreError: the cold place cannot be reached.
    """
    size, codec, data, digest = row
    if codec != COLD:
        return unpack(codec, data, size, digest)
    try:
        return unpack(*parted(fetch(_read(data), digest)), size, digest)
    except StoreCorrupt:
        new_row = reread(digest)
        if new_row is None or new_row == row:
            raise
        return text_at(new_row, fetch, reread)


def _stored(names: Iterable[str]) -> list[bytes]:
    return [name.encode() for name in names]


def _read(name: bytes) -> str:
    return name.decode("ascii", "replace")
