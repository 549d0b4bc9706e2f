"""Which texts of a tenant are in its cold place, and which objects there are to be deleted.

An object is announced before it is written, in a transaction of its own; the text's row then takes its name, in another one. So
an object that nobody knows never is one that a text needs, whatever is killed in between. A row that is removed leaves the name
of its object behind in the same transaction (`content_gone`), to be deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import apsw

from kilburn.backends.codec import COLD, PLAIN, ZSTD, unpack
from kilburn.backends.connection import row, rows, rows_of_each
from kilburn.backends.contenttable import thawed
from kilburn.backends.inspection import Finding
from kilburn.backends.records import seal_of
from kilburn.errors import StoreCorrupt

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

T = TypeVar("T")

SETTING = "cold"
"""The setting of a tenant that says where its cold place is."""

SMALL = 200
"""Bytes of a row; a smaller one is not worth an object."""

OBJECTS = 64
"""Texts that are moved at a time."""


class Coming(NamedTuple):
    """A text on its way to the cold place: its row as it was read, and its object."""

    row: int
    codec: int
    data: bytes
    name: str
    body: bytes


class ColdTable:
    """Reads and writes what the file says of cold texts. It does not open transactions: its caller does."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        self._db, self._tenant = db, tenant
        self._known: tuple[str, ColdPlace] | None = None

    def place(self) -> ColdPlace | None:
        """The tenant's cold place, opened; None where it has none.

        Raises:
            StoreCorrupt, StoreError, SpecError, MissingExtra: it cannot be opened.
        """
        found = row(self._db, "SELECT value, seal FROM setting WHERE tenant = ? AND name = ?", self._tenant, SETTING)
        if found is None:
            return None
        if found[1] != seal_of("setting", self._tenant, SETTING, found[0]):
            raise StoreCorrupt(f"the setting {SETTING!r} is not what was written", advice="`kilburn cold set` it again")
        if self._known is None or self._known[0] != found[0]:
            # Only who has a cold place pays for it.
            from kilburn.backends.cold import ColdPlace, place_of

            place = place_of(found[0])
            assert place is not None
            self._known = found[0], ColdPlace(place)
        return self._known[1]

    def fetch(self, name: str, digest: bytes) -> bytes:
        """What the object of a text holds.

        Raises:
            StoreCorrupt: it is missing or altered, or nothing says where it is. What `place` raises.
        """
        place = self.place()
        if place is None:
            raise StoreCorrupt("a text is cold, and the store does not say where", advice="`kilburn cold set` says where")
        return place.get(name, digest)

    def sizes(self) -> dict[str, int]:
        """The texts that are cold, by digest, with their lengths in bytes."""
        select = "SELECT digest, size FROM content WHERE tenant = ? AND codec = ?"
        return {digest.hex(): size for digest, size in rows(self._db, select, self._tenant, COLD)}

    def coming(self, keys: Collection[bytes], place: ColdPlace) -> list[Coming]:
        """New objects for those of these texts that are stored whole here, and are longer than an object's name."""
        select = (
            "SELECT id, codec, data, digest FROM content WHERE tenant = ? AND digest = ? AND codec IN (?, ?) AND length(data) > ?"
        )
        found = rows_of_each(self._db, select, [(self._tenant, key, PLAIN, ZSTD, SMALL) for key in keys])
        return [
            Coming(number, codec, data, *place.made(bytes([codec]) + data, digest)) for number, codec, data, digest in list(found)
        ]

    def announce(self, coming: Iterable[Coming]) -> None:
        """Say that these objects are being written."""
        insert = "INSERT INTO stray(tenant, name, going) VALUES(?, ?, 0)"
        self._db.executemany(insert, [(self._tenant, each.name.encode()) for each in coming])

    def are_coming(self) -> bool:
        """Whether objects are announced."""
        return row(self._db, "SELECT 1 FROM stray WHERE tenant = ? AND NOT going", self._tenant) is not None

    def give_up(self, names: Iterable[str] | None = None) -> None:
        """Say that objects that were announced are to be deleted, or all such objects."""
        if names is None:
            self._db.execute("UPDATE stray SET going = 1 WHERE tenant = ?", (self._tenant,))
            return
        give_up = "UPDATE stray SET going = 1 WHERE tenant = ? AND name = ?"
        self._db.executemany(give_up, [(self._tenant, name.encode()) for name in names])

    def settle(self, coming: Iterable[Coming]) -> list[Coming]:
        """Let the texts take the objects that were written for them: those that are still what they were, and whose objects
        nobody has given up meanwhile."""
        settled = []
        for each in coming:
            take = "DELETE FROM stray WHERE tenant = ? AND name = ? AND NOT going RETURNING 1"
            if row(self._db, take, self._tenant, each.name.encode()) is None:
                continue
            update = "UPDATE content SET codec = ?, data = ? WHERE id = ? AND codec = ? AND data = ? RETURNING 1"
            if row(self._db, update, COLD, each.name.encode(), each.row, each.codec, each.data) is None:
                self._db.execute("INSERT INTO stray(tenant, name, going) VALUES(?, ?, 1)", (self._tenant, each.name.encode()))
            else:
                settled.append(each)
        return settled

    def back(self, keys: Collection[bytes]) -> list[tuple[int, bytes, int, bytes]]:
        """What the objects of these texts hold, verified: row, the object's name, codec and bytes.

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        select = "SELECT id, size, data, digest FROM content WHERE tenant = ? AND digest = ? AND codec = ?"
        found = []
        for number, size, name, digest in list(rows_of_each(self._db, select, [(self._tenant, key, COLD) for key in keys])):
            codec, data = thawed(self._db, COLD, name, digest)
            unpack(codec, data, size, digest)
            found.append((number, name, codec, data))
        return found

    def take(self, back: Iterable[tuple[int, bytes, int, bytes]]) -> list[bytes]:
        """Store texts here again that are still in these objects, which are then to be deleted."""
        taken = []
        for number, name, codec, data in back:
            update = "UPDATE content SET codec = ?, data = ? WHERE id = ? AND codec = ? AND data = ? RETURNING 1"
            if row(self._db, update, codec, data, number, COLD, name) is not None:
                taken.append(data)
        return taken

    def going(self) -> list[str]:
        """The objects that are to be deleted."""
        select = "SELECT name FROM stray WHERE tenant = ? AND going"
        return [name.decode("ascii", "replace") for (name,) in rows(self._db, select, self._tenant)]

    def gone(self, names: Iterable[str]) -> None:
        """Say that these objects are deleted."""
        delete = "DELETE FROM stray WHERE tenant = ? AND name = ? AND going"
        self._db.executemany(delete, [(self._tenant, name.encode()) for name in names])

    def check(self, *, read: bool) -> tuple[list[Finding], set[str]]:
        """What is wrong with the objects of texts, and all objects that are known.

        Args:
            read: whether each is read.
        """
        found, known = [], set[str]()
        select = "SELECT size, data, digest FROM content WHERE tenant = ? AND codec = ?"
        for size, name, digest in rows(self._db, select, self._tenant, COLD):
            known.add(name.decode("ascii", "replace"))
            try:
                if read:
                    unpack(*thawed(self._db, COLD, name, digest), size, digest)
            except StoreCorrupt as error:
                found.append(Finding(kind="cold", what=error.what))
        for name, going in rows(self._db, "SELECT name, going FROM stray WHERE tenant = ?", self._tenant):
            known.add(name.decode("ascii", "replace"))
            if going:
                what = f"the object {name.decode('ascii', 'replace')} is to be deleted, and may still be there"
                found.append(Finding(kind="cold", what=what, derived=True))
        return found, known


def chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The values in lists of this length; the last one may be shorter."""
    for at in range(0, len(values), size):
        yield values[at : at + size]
