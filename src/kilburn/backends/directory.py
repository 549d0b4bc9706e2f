"""A cache of the segments of a tenant: reading one does not cost as much as reading all.

There may be very many. All are read once. After a write of this connection, only the segments that it changed are read again.
After any other change of the file, by another connection or by a write that does not name its segments, all are read again. So
the cache is never behind the file.
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
"""A value that changes with every write to the file."""

MAX_SINGLE_READS = 200
"""Segments that are read singly, at most; for more, all segments of the tenant are read at once."""

MAX_SCOPES = 16
"""Cached scopes, and cached extents of selections of segments, at most."""

Filter = tuple[frozenset[SegmentKind], str | None]


class _Known(msgspec.Struct):
    """What was read of one state of the file."""

    rows: dict[int, SegmentRow | None] = {}
    """Segments that were read; None for a missing one."""
    infos: dict[int, SegmentInfo] | None = None
    """All segments, oldest first."""
    behind: set[int] = set()
    """Segments whose rows in `infos` and `scopes` are outdated."""
    scopes: dict[Filter, dict[int, SegmentInfo]] = {}
    damaged: dict[int, SegmentInfo] = {}
    """The damaged ones of `infos`."""
    extents: Extents | None = None
    """The extents of all segments."""
    recent_extents: list[tuple[list[int], frozenset[int], Extents]] = []
    """The extents of recent selections of segments, latest first: selection, its numbers, extents."""
    outdated: set[int] = set()
    """Segments whose counters in the extents are outdated."""
    idle: dict[str, set[int]] = {}
    """By embedder without waiting passages, the segments that were written to since."""


class Directory:
    """The segments of one tenant. The caller holds a lock, and for reading a transaction."""

    def __init__(self, db: apsw.Connection, sealed: SealedRows, tenant: int) -> None:
        self._db, self._sealed, self._tenant = db, sealed, tenant
        self._state: FileState | None = None
        self._of = _Known()

    def known(self) -> _Known:
        """Return what was read of the present state of the file."""
        state = self._db.pragma("data_version"), self._db.total_changes()
        if state != self._state:
            self._of, self._state = _Known(), state
        return self._of

    def begins(self) -> None:
        """Note the beginning of a write. The cache is cleared unless it reflects all earlier writes of this connection."""
        if self._state is not None and self._state[1] != self._db.total_changes():
            self.clear()

    def wrote(self, segments: Iterable[int]) -> None:
        """Note that a write was committed that changed the rows of these segments only."""
        if self._state is None:
            return
        # If others have written meanwhile, the file's version will differ at the next read.
        of, self._state = self._of, (self._state[0], self._db.total_changes())
        for number in segments:
            of.rows.pop(number, None)
            of.behind.add(number)
            of.outdated.add(number)
            for waiting in of.idle.values():
                waiting.add(number)

    def clear(self) -> None:
        """Clear the cache, because what was read may be undone."""
        self._state = None

    def numbered(self, segments: Iterable[int]) -> dict[int, SegmentRow]:
        """Return the rows of these numbers. Those that are not segments of this tenant are left out."""
        cached, rows = self.known().rows, {}
        for number in segments:
            if number not in cached:
                cached[number] = self._sealed.segment(self._tenant, number)
            if (row := cached[number]) is not None:
                rows[number] = row
        return rows

    def infos(self) -> Mapping[int, SegmentInfo]:
        """Return all segments, oldest first."""
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
            # A concurrent search may use these mappings, so no entry is ever removed from them.
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
            if len(of.scopes) >= MAX_SCOPES:
                of.scopes.pop(next(iter(of.scopes)))
            of.scopes[key] = infos_in_scope
        damaged = tuple(info for info in of.damaged.values() if _is_wanted(info, key))
        return Scope(infos=infos_in_scope, damaged=damaged, everything=len(infos_in_scope) + len(damaged) == len(infos))

    def extents(self) -> Extents:
        """Return the extents of all segments."""
        of = self.known()
        if of.extents is None:
            # Damaged counters only affect the order of the hits slightly; each hit's segment is verified.
            select = "SELECT id, passages, characters FROM segment NOT INDEXED WHERE tenant = ? AND NOT quarantined ORDER BY id"
            of.extents = Extents(self._counted(rows_of_each(self._db, select, [(self._tenant,)])))
        self._move(of)
        return of.extents

    def segment_extents(self, segments: Sequence[int]) -> Extents:
        """Return the extents of the undamaged ones of these segments."""
        of = self.known()
        self._move(of)
        same = next((entry for entry in of.recent_extents if entry[0] == segments), None)
        if same is None:
            numbers = frozenset(segments)
            if len(numbers) > MAX_SINGLE_READS:
                self.infos()
            whole = [entry for entry in self.numbered(sorted(numbers)).values() if not entry.damaged]
            same = list(segments), numbers, Extents((entry.number, entry.passages, entry.characters) for entry in whole)
            del of.recent_extents[MAX_SCOPES - 1 :]
            of.recent_extents.insert(0, same)
        return same[2]

    def _counted(self, counters: Iterable[tuple[object, ...]]) -> Iterable[tuple[int, int, int]]:
        for number, passages, characters in counters:
            if isinstance(number, int) and isinstance(passages, int) and isinstance(characters, int):
                yield number, passages, characters

    def _move(self, of: _Known) -> None:
        """Update the cached extents."""
        if not of.outdated:
            return
        for number, row in self.numbered(of.outdated).items():
            if row.damaged:
                continue
            if of.extents is not None:
                of.extents.put(number, row.passages, row.characters)
            for _, numbers, extents in of.recent_extents:
                if number in numbers:
                    extents.put(number, row.passages, row.characters)
        of.outdated.clear()

    def waits_in(self, embedder: str) -> Collection[int] | None:
        """Return the segments that may have passages without a vector of this embedder; None for any."""
        return self.known().idle.get(embedder)

    def nothing_waits(self, embedder: str) -> None:
        """Note that no passage waits for a vector of this embedder."""
        self.known().idle[embedder] = set()


def _is_wanted(info: SegmentInfo, filter_: Filter) -> bool:
    kinds, user = filter_
    return info.kind in kinds and (user is None or info.user in ("", user))


def _is_in(info: SegmentInfo, filter_: Filter) -> bool:
    return not info.damaged and _is_wanted(info, filter_)
