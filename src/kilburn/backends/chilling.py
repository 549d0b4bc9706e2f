"""How texts go to the cold place and come back, whatever keeps the rows that say where each is.

An object is announced before it is written, in a transaction of its own; the text's row then takes its name, in another one.
So an object that nobody knows never is one that a text needs, whatever is killed in between. A row that is removed, or takes its
text back, leaves the name of its object behind in the same transaction, to be deleted afterwards. Objects are read and written
while no transaction is open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kilburn.backend import Moved
from kilburn.backends.codec import key_of, parted, unpack
from kilburn.errors import KilburnError, SpecError, StoreCorrupt

if TYPE_CHECKING:
    from kilburn.backends.cold import ColdPlace

T = TypeVar("T")

log = logging.getLogger("kilburn")

SETTING = "cold"
"""The setting of a tenant that says where its cold place is."""

SMALL = 200
"""Bytes of a row; a smaller one is not worth an object."""

LATE = 3600.0
"""Seconds for which somebody may still write an object that was given up: it is deleted again and again."""

OBJECTS = 64
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
    """What a store says of the cold texts of a tenant, within one transaction of its caller."""

    def place(self) -> ColdPlace | None:
        """The tenant's cold place, opened; None where it has none.

        Raises:
            StoreCorrupt, StoreError, SpecError, MissingExtra: it cannot be opened.
        """
        ...

    def whole(self, keys: Collection[bytes]) -> list[tuple[bytes, int, bytes]]:
        """Those of these texts that are stored whole here in more than `SMALL` bytes: digest, codec, bytes."""
        ...

    def announce(self, names: Iterable[str]) -> None:
        """Say that these objects are being written."""
        ...

    def give_up(self, names: Iterable[str] | None = None) -> None:
        """Say that objects are to be deleted, whatever was said of them before; or all that were announced, and may still be
        written."""
        ...

    def settle(self, coming: Sequence[Coming], place: ColdPlace) -> list[Coming]:
        """Let the texts take the objects that were written for them into this place, if it still is the tenant's: those that are
        still what they were, and whose objects nobody has given up meanwhile. The other objects are to be deleted."""
        ...

    def lying(self, keys: Collection[bytes] | None = None) -> list[Lying]:
        """Those of these texts that are cold; all that are, if none are named."""
        ...

    def take(self, back: Sequence[Returning]) -> list[bytes]:
        """Store texts here again that are still in these objects, which are then to be deleted; returns their bytes."""
        ...

    def strays(self) -> Mapping[str, float]:
        """The objects that are no text's: 0 for one that is announced, and 1 for one that is to be deleted. For one that was
        given up and may still be written: when that was, in seconds since the epoch."""
        ...

    def gone(self, names: Iterable[str]) -> None:
        """Say that these objects are deleted."""
        ...


class ReadsRows(Protocol):
    """Does something with the rows in one snapshot."""

    def __call__(self, do: Callable[[ColdRows], T]) -> T:
        """Return what `do` returns."""
        ...


class ChangesRows(Protocol):
    """Does something with the rows in one write transaction."""

    def __call__(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        """Return what `do` returns.

        Args:
            wait: whether to wait for another writer.
        """
        ...


class OpenPlace:
    """The cold place of a tenant, opened once."""

    def __init__(self) -> None:
        self._known: tuple[str, ColdPlace] | None = None

    def of(self, setting: str) -> ColdPlace:
        """The place that a setting names.

        Raises:
            StoreCorrupt, StoreError, SpecError, MissingExtra: it cannot be opened.
        """
        if self._known is None or self._known[0] != setting:
            # Only who has a cold place pays for it.
            from kilburn.backends.cold import ColdPlace, place_of

            place = place_of(setting)
            assert place is not None
            self._known = setting, ColdPlace(place)
        return self._known[1]


def required(place: ColdPlace | None) -> ColdPlace:
    """The place of texts that are cold.

    Raises:
        StoreCorrupt: the store does not say where it is.
    """
    if place is None:
        raise StoreCorrupt("a text is cold, and the store does not say where", advice="`kilburn cold set` says where")
    return place


class Chilling:
    """The verbs of a store that move texts, see `Backend`.

    Args:
        path: what the store is called in the log.
        sync: makes durable what was committed.
        put_off: whether objects are not to be deleted now.
    """

    def __init__(
        self, path: str, read_rows: ReadsRows, change: ChangesRows, sync: Callable[[], object], put_off: Callable[[], bool]
    ) -> None:
        self._path, self._read, self._change, self._sync, self._put_off = path, read_rows, change, sync, put_off

    def chill(self, digests: Iterable[str]) -> Moved:
        """See `Backend`."""
        place = self._read(lambda rows: rows.place())
        if place is None:
            raise SpecError("this tenant has no cold place", advice="name one: `kilburn cold set PLACE`")
        texts = size = 0
        self._abandon()
        for keys in chunks(list(dict.fromkeys(key_of(digest) for digest in digests)), OBJECTS):
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
        # What was forgotten meanwhile: whoever forgot it may have looked before it was there.
        for text in coming:
            if text not in settled:
                place.delete(text.name)
        return settled

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """See `Backend`."""
        texts = size = 0
        keys_requested = None if digests is None else [key_of(digest) for digest in digests]
        cold = [text.key for text in self._read(lambda rows: rows.lying(keys_requested))]
        for keys in chunks(cold, OBJECTS):
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
        """Codec and bytes that the object of a text holds, verified; None if the text is not there any more.

        Raises:
            StoreCorrupt: it is missing, or not what was written.
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
        """See `Backend`."""
        return {text.key.hex(): text.size for text in self._read(lambda rows: rows.lying())}

    def scrub(self, *, repair: bool = False) -> list[str]:
        """See `Backend`."""
        if repair:
            self._abandon()
        problems = [problem for problem, _ in self.wrong(repair=repair, read_objects=True)]
        place = self._read(lambda rows: rows.place())
        if place is not None and not place.place.versions and place.keeps_versions():
            problems.append(f"{place.place.url} keeps versions by now: what is deleted there stays as an older one")
        return problems

    def unreached(self) -> tuple[str, ...]:
        """What of erased texts may still be in the cold place, as far as it is known."""
        strays = list(self._read(lambda rows: rows.strays()).values())
        places = []
        if late := strays.count(1):
            places.append(f"{late} objects in the cold place that could not be deleted yet: a later writer does it")
        if coming := sum(since > 1 for since in strays):
            places.append(f"{coming} objects that a program may be writing to the cold place: it deletes them, or a later writer")
        try:
            place = self._read(lambda rows: rows.place())
        except KilburnError as error:
            return (*places, f"a cold place that cannot be opened: {error.what}")
        if place is not None and place.place.versions:
            places.append(f"older versions of objects in {place.place.url}, until they expire there")
        return tuple(places)

    def wrong(self, *, repair: bool, read_objects: bool) -> list[tuple[str, bool]]:
        """What is wrong with the cold place, in words, each with whether it is of no text.

        Args:
            repair: delete what belongs to no text.
            read_objects: whether every object is read, and compared with the digest of its text.
        """
        self.sweep()
        place = self._read(lambda rows: rows.place())
        if place is None:
            return []
        # Listed before the rows are read: what comes meanwhile is not among these.
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
        """Give up the objects that somebody began to write: a program that was killed, or one that is at it and will find out."""
        if not all(self._read(lambda rows: rows.strays()).values()):
            self._change(lambda rows: rows.give_up())
            self.sweep()

    def sweep(self) -> None:
        """Delete the objects that no text has any more. One that cannot be deleted now is deleted by a later writer."""
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
            if over := [name for name, since in going.items() if since < time.time() - LATE]:
                self._change(lambda rows: rows.gone(over), wait=False)
        except KilburnError as error:
            log.warning("%s: objects in the cold place may still have to be deleted: %s", self._path, error)


def chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The values in lists of this length; the last one may be shorter."""
    for at in range(0, len(values), size):
        yield values[at : at + size]
