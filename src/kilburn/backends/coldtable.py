"""Which texts of a tenant are in its cold place, and which objects there are to be deleted, in a file of SQLite."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import apsw

from kilburn.backends.chilling import MIN_ROW_BYTES, SETTING, Coming, Lying, OpenPlace, Returning, required
from kilburn.backends.codec import COLD, PLAIN, ZSTD
from kilburn.backends.connection import row, rows, rows_of_each
from kilburn.backends.records import seal_of
from kilburn.backends.transaction import FLAG, GIVE_UP
from kilburn.errors import StoreCorrupt

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

_TURN = "UPDATE content SET codec = ?, data = ? WHERE tenant = ? AND digest = ? AND codec = ? AND data = ? RETURNING 1"


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
        if setting[1] != seal_of("setting", self._tenant, SETTING, setting[0]):
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
            update = (
                "UPDATE content SET codec = ?, data = ? WHERE tenant = ? AND digest = ? AND codec = ? AND data = ? RETURNING 1"
            )
            if row(self._db, update, COLD, name, self._tenant, text.key, text.codec, text.data) is not None:
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
            update = (
                "UPDATE content SET codec = ?, data = ? WHERE tenant = ? AND digest = ? AND codec = ? AND data = ? RETURNING 1"
            )
            if row(self._db, update, codec, data, self._tenant, key, COLD, name.encode()) is not None:
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
