"""Moves texts to the cold place and back, for every backend.

A first transaction announces an object before it is written; a second transaction lets the text's row refer to it. So an object
that no row refers to is never needed, whenever the program is killed. When a row is removed or takes its text back, the same
transaction records the name of its object, which is deleted afterwards. Objects are read and written outside of transactions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kilburn.backend import Moved
from kilburn.backends.codec import digest_bytes, parted, unpack
from kilburn.errors import KilburnError, SpecError, StoreCorrupt

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

T = TypeVar("T")

log = logging.getLogger("kilburn")

SETTING = "cold"
"""The name of the tenant's setting with its cold place."""

MIN_ROW_BYTES = 200
"""Smaller rows are not worth an object."""

ABANDONED_SECONDS = 3600.0
"""Time for which a program may still write an object that was given up: it is deleted repeatedly."""

MOVE_BATCH = 64
"""Texts that are moved at a time."""


class Coming(NamedTuple):
    """A text on its way to the cold place: its digest, its row as it was read, and its object."""

    key: bytes
    codec: int
    data: bytes
    name: str
    body: bytes


class Lying(NamedTuple):
    """A text that is cold: its digest, its length in bytes, and its object."""

    key: bytes
    size: int
    name: str


class Returning(NamedTuple):
    """A text on its way back: its digest, its object, and what its row is to have."""

    key: bytes
    name: str
    codec: int
    data: bytes


class ColdRows(Protocol):
    """The rows of a tenant's cold texts and objects, within one transaction of the caller."""

    def place(self) -> ColdPlace | None:
        """Return the tenant's cold place, opened, or None if it has none.

        Raises:
            StoreCorrupt, StoreError, SpecError, MissingExtra: it cannot be opened.
        """
        ...

    def whole(self, keys: Collection[bytes]) -> list[tuple[bytes, int, bytes]]:
        """Return those of these texts that are stored here, not in pieces, in more than `MIN_ROW_BYTES` bytes: digest, codec,
        bytes."""
        ...

    def announce(self, names: Iterable[str]) -> None:
        """Record that these objects are being written."""
        ...

    def give_up(self, names: Iterable[str] | None = None) -> None:
        """Record that objects are to be deleted, whatever their state; if `names` is None, all announced objects, which may still
        be written."""
        ...

    def settle(self, coming: Sequence[Coming], place: ColdPlace) -> list[Coming]:
        """Let texts refer to the objects that were written for them to this place, if it is still the tenant's. Texts that have
        changed, and texts whose objects were given up, are left out: their objects are to be deleted.

        Returns:
            The texts that refer to their objects now.
        """
        ...

    def lying(self, keys: Collection[bytes] | None = None) -> list[Lying]:
        """Return those of these texts that are cold; all cold texts if `keys` is None."""
        ...

    def take(self, back: Sequence[Returning]) -> list[bytes]:
        """Store texts here again that are still in these objects, which are then to be deleted. Return their bytes."""
        ...

    def strays(self) -> Mapping[str, float]:
        """Return the objects that belong to no text, by name: 0 for an announced object, 1 for one to delete, and the time in
        seconds since the epoch for one that was given up and may still be written."""
        ...

    def gone(self, names: Iterable[str]) -> None:
        """Record that these objects are deleted."""
        ...


class ReadsRows(Protocol):
    """Calls a function with the rows in one snapshot."""

    def __call__(self, do: Callable[[ColdRows], T]) -> T:
        """Return what `do` returns."""
        ...


class ChangesRows(Protocol):
    """Calls a function with the rows in one write transaction."""

    def __call__(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        """Return what `do` returns.

        Args:
            wait: whether to wait for another writer.
        """
        ...


class OpenPlace:
    """Opens the cold place of a tenant once."""

    def __init__(self) -> None:
        self._known: tuple[str, ColdPlace] | None = None

    def of(self, setting: str) -> ColdPlace:
        """Return the place that a setting names.

        Raises:
            StoreCorrupt, StoreError, SpecError, MissingExtra: it cannot be opened.
        """
        if self._known is None or self._known[0] != setting:
            # Imported here because few tenants have a cold place.
            from kilburn.backends.cold import ColdPlace, parse_place

            place = parse_place(setting)
            assert place is not None
            self._known = setting, ColdPlace(place)
        return self._known[1]


def required(place: ColdPlace | None) -> ColdPlace:
    """Return the place of cold texts.

    Raises:
        StoreCorrupt: the store has none.
    """
    if place is None:
        raise StoreCorrupt(
            "a text is cold, and the setting of the cold place is missing", advice="set it again with `kilburn cold set`"
        )
    return place


class Chilling:
    """Moves texts; see `kilburn.backend.ContentStore`.

    Args:
        path: the name of the store in the log.
        read_rows, change: run a function in a transaction.
        sync: makes commits durable.
        put_off: whether no objects may be deleted now.
    """

    def __init__(
        self, path: str, read_rows: ReadsRows, change: ChangesRows, sync: Callable[[], object], put_off: Callable[[], bool]
    ) -> None:
        self._path, self._read, self._change, self._sync, self._put_off = path, read_rows, change, sync, put_off

    def chill(self, digests: Iterable[str]) -> Moved:
        """See `ContentStore`."""
        place = self._read(lambda rows: rows.place())
        if place is None:
            raise SpecError("this tenant has no cold place", advice="name one: `kilburn cold set PLACE`")
        texts = size = 0
        self._abandon()
        for keys in chunks(list(dict.fromkeys(digest_bytes(digest) for digest in digests)), MOVE_BATCH):
            settled = self._chill(place, keys)
            texts, size = texts + len(settled), size + sum(len(text.data) for text in settled)
        self.sweep()
        return Moved(texts=texts, bytes=size)

    def _chill(self, place: ColdPlace, keys: Sequence[bytes]) -> list[Coming]:
        whole = self._read(lambda rows: rows.whole(keys))
        coming = [Coming(key, codec, data, *place.made(bytes([codec]) + data, key)) for key, codec, data in whole]
        if not coming:
            return []
        self._change(lambda rows: rows.announce(text.name for text in coming))
        try:
            for text in coming:
                place.write(text.name, text.body)
            settled = self._change(lambda rows: rows.settle(coming, place))
        except BaseException:
            self._change(lambda rows: rows.give_up(text.name for text in coming))
            self.sweep()
            raise
        # Texts that were forgotten meanwhile: the program that forgot one may have looked before its object existed.
        for text in coming:
            if text not in settled:
                place.delete(text.name)
        return settled

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """See `ContentStore`."""
        texts = size = 0
        keys_requested = None if digests is None else [digest_bytes(digest) for digest in digests]
        cold = [text.key for text in self._read(lambda rows: rows.lying(keys_requested))]
        for keys in chunks(cold, MOVE_BATCH):
            returned = self._warm(keys)
            texts, size = texts + len(returned), size + sum(map(len, returned))
            self.sweep()
        return Moved(texts=texts, bytes=size)

    def _warm(self, keys: Sequence[bytes]) -> list[bytes]:
        place, lying = self._read(lambda rows: (required(rows.place()), rows.lying(keys)))
        back = []
        for text in lying:
            packed = self._held(place, text)
            if packed is not None:
                back.append(Returning(text.key, text.name, *packed))
        return self._change(lambda rows: rows.take(back))

    def _held(self, place: ColdPlace, lying: Lying) -> tuple[int, bytes] | None:
        """Return codec and bytes from the object of a text, verified; None if the text no longer refers to it.

        Raises:
            StoreCorrupt: the object is missing or altered.
        """
        try:
            packed = parted(place.get(lying.name, lying.key))
            unpack(*packed, lying.size, lying.key)
        except StoreCorrupt:
            if lying in self._read(lambda rows: rows.lying([lying.key])):
                raise
            return None
        return packed

    def cold(self) -> dict[str, int]:
        """See `ContentStore`."""
        return {text.key.hex(): text.size for text in self._read(lambda rows: rows.lying())}

    def scrub(self, *, repair: bool = False) -> list[str]:
        """See `ContentStore`."""
        if repair:
            self._abandon()
        problems = [problem for problem, _ in self.wrong(repair=repair, read_objects=True)]
        place = self._read(lambda rows: rows.place())
        if place is not None and not place.place.versions and place.keeps_versions():
            problems.append(f"{place.place.url} keeps versions now: deleted objects stay there as older versions")
        return problems

    def unreached(self) -> tuple[str, ...]:
        """See `ContentStore`."""
        strays = list(self._read(lambda rows: rows.strays()).values())
        places = []
        if late := strays.count(1):
            places.append(f"{late} objects in the cold place that could not be deleted yet: a later writer deletes them")
        if coming := sum(since > 1 for since in strays):
            places.append(
                f"{coming} objects that a program may be writing to the cold place: that program or a later writer deletes them"
            )
        try:
            place = self._read(lambda rows: rows.place())
        except KilburnError as error:
            return (*places, f"a cold place that cannot be opened: {error.what}")
        if place is not None and place.place.versions:
            places.append(f"older versions of objects in {place.place.url}, until they expire there")
        return tuple(places)

    def wrong(self, *, repair: bool, read_objects: bool) -> list[tuple[str, bool]]:
        """Return descriptions of what is wrong with the cold place, each with whether it concerns an object without a text.

        Args:
            repair: delete objects that belong to no text.
            read_objects: read every object and compare it with the digest of its text.
        """
        self.sweep()
        place = self._read(lambda rows: rows.place())
        if place is None:
            return []
        # Listed before the rows are read, so that new objects are not reported.
        names = set(place.names())
        lying, strays = self._read(lambda rows: (rows.lying(), rows.strays()))
        problems: list[tuple[str, bool]] = []
        for text in lying if read_objects else ():
            try:
                self._held(place, text)
            except StoreCorrupt as error:
                problems.append((error.what, False))
        late = [name for name, since in strays.items() if since == 1]
        problems += [(f"the object {name} is to be deleted, and may still be there", True) for name in late]
        for name in sorted(names - strays.keys() - {text.name for text in lying}):
            if repair:
                place.delete(name)
            else:
                problems.append((f"the object {name} belongs to no text", True))
        return problems

    def _abandon(self) -> None:
        """Give up the announced objects of other programs. A program that is still writing one will notice."""
        if not all(self._read(lambda rows: rows.strays()).values()):
            self._change(lambda rows: rows.give_up())
            self.sweep()

    def sweep(self) -> None:
        """Delete the objects that no text refers to. A later writer deletes those that cannot be deleted now."""
        if self._put_off():
            return
        try:
            going = {name: since for name, since in self._read(lambda rows: rows.strays()).items() if since}
            place = self._read(lambda rows: rows.place()) if going else None
            if place is None:
                return
            # A power cut must not bring back a row whose object is gone.
            self._sync()
            for name in going:
                place.delete(name)
            if over := [name for name, since in going.items() if since < time.time() - ABANDONED_SECONDS]:
                self._change(lambda rows: rows.gone(over), wait=False)
        except KilburnError as error:
            log.warning("%s: objects in the cold place may still have to be deleted: %s", self._path, error)


def chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the values in lists of this length; the last list may be shorter."""
    for at in range(0, len(values), size):
        yield values[at : at + size]
