"""The anchor of a store: the last events of its ledgers, in a file outside the store, which detects that an older copy of the
store replaced it.

Each commit appends a line to the file: the segment, the number and the time of its last event. `$KILBURN_ANCHOR` names the file.
Lines are sealed like rows: with `$KILBURN_SEAL_KEY` nobody can write them without the key. The line follows the commit: a store
that was killed between the two is ahead of its anchor, which is not a finding.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO

import msgspec

from kilburn.backend import Backend, Batch, Finding, SegmentInfo, SegmentKind
from kilburn.backends.records import compute_seal
from kilburn.errors import StoreCorrupt, StoreError

log = logging.getLogger(__name__)

SPARE_LINES = 10_000
"""Outdated lines of an anchor, at most; an opening removes more."""

UNKNOWN = 0.0
"""The time of an event that is older than the anchor."""

Head = tuple[int, float]
"""The number and the time of the last event of a ledger."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    store: str
    segment: int
    head: int
    time: float
    seal: str


_lines = msgspec.json.Decoder(_Line)


class Anchor:
    """The anchor of one tenant's store. Without a file it does nothing.

    Args:
        file: its path. Several stores may share one file.
        place, tenant: the store, with the place as `canonical_name` returns it.
    """

    def __init__(self, file: str = "", place: str = "", tenant: str = "") -> None:
        self.file, self._store = file, compute_seal("store", place, tenant).hex()
        self._thread = threading.local()

    def check(self, backend: Backend) -> None:
        """Check that an opened store is not older than its anchor. An empty file becomes the anchor of the present store.

        Raises:
            StoreCorrupt: the store is older, or a line is altered. StoreError: the file is missing, or cannot be read or written.
        """
        # In this order, because others write meanwhile, and a line follows its commit.
        heads = self._heads()
        infos = backend.segments()
        if wrong := [finding.what for finding in _older(heads, infos)]:
            advice = "restore a newer copy; if you restored this one on purpose, empty the anchor file"
            raise StoreCorrupt(f"the store is older than its anchor {self.file}: {wrong[0]}", advice=advice)
        if not backend.readonly:
            try:
                with self._locked() as file:
                    self._compact(file)
                    if not heads:
                        self._append(file, {info.number: (info.head, UNKNOWN) for info in infos if info.number})
            except OSError as error:
                raise StoreError(f"the anchor {self.file} cannot be written: {error}", advice="give another one") from error

    def findings(self, backend: Backend) -> list[Finding]:
        """Return where a store is older than its anchor, or has another history, after examining all of it."""
        try:
            heads = self._heads()
        except StoreError as error:
            return [Finding(kind="anchor", what=error.what)]
        infos = backend.segments()
        whole = {info.number for info in infos if not info.damaged and info.kind is not SegmentKind.FORGOTTEN}
        findings = [*_older(heads, infos)]
        for number in sorted(heads.keys() & whole - {finding.segment for finding in findings}):
            head, time = heads[number]
            event = next(iter(backend.events(number, head - 1)), None) if head else None
            if event is not None and time not in (event.time, UNKNOWN):
                findings.append(Finding(kind="anchor", what=f"event {head} differs from the one in the anchor", segment=number))
        return findings

    def note(self, segment: int, batch: Batch) -> None:
        """Record a committed batch; within `held`, at the end of that block."""
        if batch.events:
            heads = {segment: (batch.head + len(batch.events), batch.events[-1].time)}
            if (waiting := self._waiting()) is not None:
                waiting.update(heads)
            else:
                self._write(heads)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Record the batches of this thread in the block at its end, or none of them if it raises."""
        if self._waiting() is not None:
            yield
            return
        self._thread.waiting = heads = dict[int, Head]()
        try:
            yield
        finally:
            self._thread.waiting = None
        if heads:
            self._write(heads)

    def _waiting(self) -> dict[int, Head] | None:
        return getattr(self._thread, "waiting", None)

    def _write(self, heads: Mapping[int, Head]) -> None:
        try:
            with self._locked() as file:
                self._append(file, heads)
        except OSError as error:
            # The commit is done; the anchor is behind it until the segment's next commit.
            log.warning("the anchor %s cannot be written: %s", self.file, error)

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        with open(self.file, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _append(self, file: FileIO, heads: Mapping[int, Head]) -> None:
        file.seek(0, os.SEEK_END)
        # Each line starts with a line break, in case a killed writer has left a partial line.
        file.write(b"".join(b"\n" + msgspec.json.encode(self._line(number, *head)) + b"\n" for number, head in heads.items()))

    def _line(self, segment: int, head: int, time: float) -> _Line:
        return _Line(self._store, segment, head, time, compute_seal("anchor", self._store, segment, head, time).hex())

    def _compact(self, file: FileIO) -> None:
        lines = [*_read_lines(file.read())]
        last = {(line.store, line.segment): line for line in sorted(lines, key=_head)}
        if len(lines) > len(last) + SPARE_LINES:
            file.seek(0)
            file.truncate()
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in last.values()))

    def _heads(self) -> dict[int, Head]:
        try:
            with open(self.file, "rb") as file:
                lines = [line for line in _read_lines(file.read()) if line.store == self._store]
        except OSError as error:
            advice = "create an empty file there if you trust the present store"
            raise StoreError(f"the anchor {self.file} cannot be read: {error}", advice=advice) from error
        if any(line != self._line(line.segment, line.head, line.time) for line in lines):
            raise StoreCorrupt(f"a line of the anchor {self.file} is altered", advice="compare it with a backup")
        return {line.segment: (line.head, line.time) for line in sorted(lines, key=_head)}


def _head(line: _Line) -> int:
    return line.head


def _read_lines(data: bytes) -> Iterator[_Line]:
    """Yield the lines of an anchor, without partial lines of killed writers."""
    for raw in data.split(b"\n"):
        try:
            yield _lines.decode(raw)
        except msgspec.MsgspecError:
            continue


def _older(heads: Mapping[int, Head], infos: Sequence[SegmentInfo]) -> Iterator[Finding]:
    """Yield the segments that have fewer events than an anchor has seen."""
    infos_by_number = {info.number: info for info in infos}
    for number, (head, _) in heads.items():
        info = infos_by_number.get(number)
        if info is None:
            yield Finding(kind="anchor", what=f"segment {number} is missing, and the anchor has it", segment=number)
        elif info.head < head and not info.damaged and info.kind is not SegmentKind.FORGOTTEN:
            message = f"{info.name!r} has {info.head} events, and the anchor has {head}"
            yield Finding(kind="anchor", what=message, segment=number)
