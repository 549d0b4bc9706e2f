"""The segments of a tenant as they were last read, so that reading one does not cost what reading all of them does.

There may be very many. All are read once; after a write of this connection, only what it wrote to is read again. Whatever else
changes the file, all are read again: another connection's write, and every write that does not say which segments it was to.
So this never knows less than the file says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import apsw
import msgspec

from kilburn.backend import Scope, SegmentInfo, SegmentKind
from kilburn.backends.connection import rows_of_each
from kilburn.backends.ranked import Extents
from kilburn.backends.sealed import SealedRows, SegmentRow

FileState = tuple[object, int]
"""Changes whenever anybody writes to the file."""

MAX_SINGLE_READS = 200
"""Segments that are read one by one; of more, all of the tenant's are read at once."""

SCOPES = 16
"""Filters whose segments are known at a time, and choices of segments whose extents are."""

Filter = tuple[frozenset[SegmentKind], str | None]


class _Known(msgspec.Struct):
    """What is known of a state of the file."""

    rows: dict[int, SegmentRow | None] = {}
    """Segments that were read; None where there is none."""
    infos: dict[int, SegmentInfo] | None = None
    """All of them, oldest first."""
    behind: set[int] = set()
    """Segments of which `infos` and `scopes` have an older row."""
    scopes: dict[Filter, dict[int, SegmentInfo]] = {}
    damaged: dict[int, SegmentInfo] = {}
    """Those of `infos` that cannot be read."""
    extents: Extents | None = None
    """Of all segments."""
    some: list[tuple[list[int], frozenset[int], Extents]] = []
    """Of those that were last asked for by themselves, the last first."""
    moved: set[int] = set()
    """Segments of which `extents` and `some` have older counters."""
    idle: dict[str, set[int]] = {}
    """By embedder of which no passage waited, the segments that were written to since."""


class Directory:
    """The segments of one tenant. Its owner holds a lock, and a transaction while it reads here."""

    def __init__(self, db: apsw.Connection, sealed: SealedRows, tenant: int) -> None:
        self._db, self._sealed, self._tenant = db, sealed, tenant
        self._state: FileState | None = None
        self._of = _Known()

    def known(self) -> _Known:
        """What is known of the state that the file is in now."""
        state = self._db.pragma("data_version"), self._db.total_changes()
        if state != self._state:
            self._of, self._state = _Known(), state
        return self._of

    def begins(self) -> None:
        """A write begins: what this connection has written before is known, or all is forgotten."""
        if self._state is not None and self._state[1] != self._db.total_changes():
            self.clear()

    def wrote(self, segments: Iterable[int]) -> None:
        """The write is committed, and has changed the rows of these segments and no others."""
        if self._state is None:
            return
        # If others have written meanwhile, the file's version says so when it is next looked at.
        of, self._state = self._of, (self._state[0], self._db.total_changes())
        for number in segments:
            of.rows.pop(number, None)
            of.behind.add(number)
            of.moved.add(number)
            for waiting in of.idle.values():
                waiting.add(number)

    def clear(self) -> None:
        """Forget all: what was read may have been undone."""
        self._state = None

    def numbered(self, segments: Iterable[int]) -> dict[int, SegmentRow]:
        """The rows of these numbers, by number; one that is no segment of this tenant is left out."""
        cached, rows = self.known().rows, {}
        for number in segments:
            if number not in cached:
                cached[number] = self._sealed.segment(self._tenant, number)
            if (row := cached[number]) is not None:
                rows[number] = row
        return rows

    def infos(self) -> Mapping[int, SegmentInfo]:
        """All segments, oldest first."""
        of = self.known()
        if of.infos is None:
            every = {row.number: row for row in self._sealed.segments(self._tenant)}
            of.rows.update(every)
            of.infos = {number: row.info for number, row in every.items()}
            of.damaged = {number: row for number, row in of.infos.items() if row.damaged}
        for number, row in self.numbered(sorted(of.behind)).items():
            if row.damaged or (number not in of.infos and number < next(reversed(of.infos), 0)):
                self.clear()
                return self.infos()
            # Whoever searches at this moment may look at these, too: nothing is ever taken out of them.
            of.infos[number] = info = row.info
            for key, scope in of.scopes.items():
                if _is_in(info, key):
                    scope[number] = info
        of.behind.clear()
        return of.infos

    def scope(self, kinds: Collection[SegmentKind], user: str | None) -> Scope:
        """See `Backend`."""
        infos, of, key = self.infos(), self._of, (frozenset(kinds), user)
        infos_in_scope = of.scopes.get(key)
        if infos_in_scope is None:
            infos_in_scope = {number: info for number, info in infos.items() if _is_in(info, key)}
            if len(of.scopes) >= SCOPES:
                of.scopes.pop(next(iter(of.scopes)))
            of.scopes[key] = infos_in_scope
        damaged = tuple(info for info in of.damaged.values() if _is_wanted(info, key))
        return Scope(infos=infos_in_scope, damaged=damaged, everything=len(infos_in_scope) + len(damaged) == len(infos))

    def extents(self) -> Extents:
        """How much there is to look through in all segments."""
        of = self.known()
        if of.extents is None:
            # Damaged counters spoil the order of the hits a little, and nothing else; each hit's segment is verified.
            select = "SELECT id, passages, characters FROM segment NOT INDEXED WHERE tenant = ? AND NOT quarantined ORDER BY id"
            of.extents = Extents(self._counted(rows_of_each(self._db, select, [(self._tenant,)])))
        self._move(of)
        return of.extents

    def extents_of(self, segments: Sequence[int]) -> Extents:
        """How much there is to look through in some segments that are whole."""
        of = self.known()
        self._move(of)
        same = next((entry for entry in of.some if entry[0] == segments), None)
        if same is None:
            numbers = frozenset(segments)
            if len(numbers) > MAX_SINGLE_READS:
                self.infos()
            whole = [entry for entry in self.numbered(sorted(numbers)).values() if not entry.damaged]
            same = list(segments), numbers, Extents((entry.number, entry.passages, entry.characters) for entry in whole)
            del of.some[SCOPES - 1 :]
            of.some.insert(0, same)
        return same[2]

    def _counted(self, counters: Iterable[tuple[object, ...]]) -> Iterable[tuple[int, int, int]]:
        for number, passages, characters in counters:
            if isinstance(number, int) and isinstance(passages, int) and isinstance(characters, int):
                yield number, passages, characters

    def _move(self, of: _Known) -> None:
        """Bring the extents that are known up to date."""
        if not of.moved:
            return
        for number, row in self.numbered(of.moved).items():
            if row.damaged:
                continue
            if of.extents is not None:
                of.extents.put(number, row.passages, row.characters)
            for _, numbers, extents in of.some:
                if number in numbers:
                    extents.put(number, row.passages, row.characters)
        of.moved.clear()

    def waits_in(self, embedder: str) -> Collection[int] | None:
        """The segments in which a passage may wait for a vector of this embedder; None if that may be in any."""
        return self.known().idle.get(embedder)

    def nothing_waits(self, embedder: str) -> None:
        """No passage waits for a vector of this embedder."""
        self.known().idle[embedder] = set()


def _is_wanted(info: SegmentInfo, filter_: Filter) -> bool:
    kinds, user = filter_
    return info.kind in kinds and (user is None or info.user in ("", user))


def _is_in(info: SegmentInfo, filter_: Filter) -> bool:
    return not info.damaged and _is_wanted(info, filter_)
