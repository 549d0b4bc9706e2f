"""Search by meaning over the passages of a store: their vectors, kept by the store, and scanned in memory or by the store itself.

What waits for a vector is embedded by `catch_up`, by a thread in the background, and, if it is little, by the search
itself, so that what was just stored is found. Where others wait for every search, as in a gateway, only the thread
embeds, and it works while nobody asks. The thread begins with the first search, or when the program has gone on for a
while: a short program that never searches pays nothing, and what it leaves is embedded by a later one. It waits for a moment
at which the program's other threads compute nothing, and asks the system to let others go first. Vectors are
derived: whatever happens to them, they are made again from the passages, and a search never gives one whose passage is
gone.

An embedder's name is a spec that makes it again. So after a change of embedder the old vectors serve, with the old
embedder for the queries, until the new ones are there; then the old ones are dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from kilburn.backend import Backend, Passage
from kilburn.errors import KilburnError, MissingExtra, ModelError, Overlong, Refused, SpecError, StoreCorrupt, StoreError
from kilburn.kernel.resolve import resolve
from kilburn.native import PATIENCE as COMPUTING
from kilburn.native import ending, inside
from kilburn.retrieval import Embedder
from kilburn.search.scan import Scan, pack, vector_bytes

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "embed") from error


log = logging.getLogger("kilburn")

SHORT, LETTERS = 32, 10_000
"""So many passages, with so many characters at most, are embedded within a search: half a second."""
BATCH, ASIDE, MEANWHILE = 64, 16, 2
"""Passages that are embedded at once: by `catch_up`, in the background, where the next search or the end may wait, and
beside others, who may want the processor."""
DAMAGED = "StoreCorrupt: see `kilburn fsck`"
"""Why a passage is left whose text is not what was written."""
READ_ROWS = 4096
"""Vectors that are read from the store at once."""
QUERIES = 64
"""Vectors of queries that are remembered: one search asks for the same one several times."""
GRACE = 30.0
"""Seconds that a program goes on before the thread begins, unless it searches."""
PAUSE, IDLE_PAUSE, LONGEST_PAUSE = 1.0, 20.0, 60.0
"""Seconds between two looks for what waits. They double while nothing waits, up to the second, and after failures, up to the
third; a search wakes a thread that found nothing."""
PATIENCE, GLANCE = 5.0, 0.05
"""Seconds for which the thread waits for others before each batch, and between two looks whether they are done."""
QUIET = 0.02
"""The share of such a look for which the program's other threads may compute in a quiet moment."""


def checked(embedder: Embedder, texts: Sequence[str]) -> Any:
    """The vectors of texts, of length 1 in float32.

    Raises:
        ModelError: what came is not one finite vector of the embedder's dimensions for each text; or what it raises.
        Unavailable: the program is ending.
    """
    # It may compute in any library.
    with inside(patience=0.0 if getattr(embedder, "elsewhere", False) else COMPUTING):
        vectors = np.asarray(embedder.embed(texts), np.float32)
    if vectors.shape != (len(texts), embedder.dimensions):
        message = (
            f"{embedder.name} gave an array of {vectors.shape} for {len(texts)} texts, with {embedder.dimensions} dimensions"
        )
        raise ModelError(message, advice="check its model and its dimensions")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise ModelError(f"{embedder.name} gave a vector without a direction", advice="check its model")
    return vectors / lengths


@runtime_checkable
class Nearby(Protocol):
    """A store that may look through vectors itself: what is stored is not read into the program's memory."""

    def near(
        self, embedder: str, vector: Sequence[float], limit: int, segments: Collection[int] | None = None
    ) -> list[tuple[int, bytes]] | None:
        """Stored vectors, with their entries, among which the `limit` nearest of these segments or of all are: exactly up to some
        number of vectors, and nearly always of more. None where the store does not look through those of this embedder."""
        ...

    def lookup(self, embedder: str, entries: Iterable[int]) -> list[tuple[int, bytes]]:
        """The stored vectors of these entries, of those that have one."""
        ...

    def tend(self) -> list[str]:
        """Prepare what later searches need, which may take minutes; returns what was done, in words."""
        ...


class _Kept:
    """The vectors of one embedder: as far as they were read from the store, or asked from one that looks through them itself."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self.scan = Scan(embedder.dimensions)
        """What was read; of a store that is asked, only what this program could not store."""
        self.last = 0
        self.asked: bool | None = None
        """Whether the store is asked; None before that was found out."""
        self.vector = lru_cache(QUERIES)(lambda text: checked(embedder, [text])[0])
        """The vector of a query."""

    def read(self, backend: Backend) -> bool:
        """Take some of what any writer has stored since; returns whether there may be more. Vectors of another length are
        not taken, and dropped."""
        if self.asked is None:
            self.asked = self._ask(backend, [0.0] * self.embedder.dimensions, 0, None) is not None
        if self.asked:
            return False
        rows = list(islice(backend.vectors.read(self.embedder.name, self.last), READ_ROWS))
        if any(len(row.data) != vector_bytes(self.embedder.dimensions) for row in rows):
            if not backend.readonly:
                backend.vectors.drop(self.embedder.name)
            return False
        if rows:
            self.scan.add([row.entry for row in rows], [row.data for row in rows])
            self.last = rows[-1].number
        return len(rows) == READ_ROWS

    def candidates(
        self, backend: Backend, vector: Any, limit: int, segments: Collection[int] | None
    ) -> list[tuple[int, float]] | None:
        """What a store that is asked finds, nearest first, with some to spare; None where it is not asked."""
        rows = self._ask(backend, vector.tolist(), limit, segments) if self.asked else None
        if rows is None:
            return None
        return self._build_scan(rows).nearest(vector, len(rows))

    def similar(self, backend: Backend, vector: Any, entries: Collection[int]) -> dict[int, float]:
        """The cosines of these entries to a vector, from a store that is asked."""
        if not (self.asked and entries and isinstance(backend.vectors, Nearby)):
            return {}
        return self._build_scan(backend.vectors.lookup(self.embedder.name, entries)).similar(vector, entries)

    def _build_scan(self, rows: Sequence[tuple[int, bytes]]) -> Scan:
        """Stored vectors in memory: they are put in order as those are that were read."""
        scan = Scan(self.embedder.dimensions)
        if rows:
            scan.add([entry for entry, _ in rows], [data for _, data in rows])
        return scan

    def _ask(
        self, backend: Backend, vector: Sequence[float], limit: int, segments: Collection[int] | None
    ) -> list[tuple[int, bytes]] | None:
        return backend.vectors.near(self.embedder.name, vector, limit, segments) if isinstance(backend.vectors, Nearby) else None


class Vectors:
    """The vectors of a store's passages. Any number of threads may use one object.

    Args:
        backend: its owner closes it, after `close`.
        embedder: an object, or a spec of kind `search.embedders`.

    Raises:
        SpecError: no embedder. MissingExtra, Unavailable: it cannot be made.
    """

    def __init__(self, backend: Backend, embedder: Any) -> None:
        self.backend = backend
        self.embedder: Embedder = resolve("search.embedders", embedder)
        self._kept = _Kept(self.embedder)
        self._old: _Kept | None = None
        self._looked = False
        # Held while vectors in memory are read or changed; never while something is embedded.
        self._lock = threading.RLock()
        self._embedding = threading.Lock()
        self._stop, self._wanted = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._busy: Callable[[], bool] | None = None
        self._turn: Callable[[], bool] = lambda: True
        # Segments with a damaged text that were said.
        self._said: set[int] = set()
        self.trouble = ""
        """Why the thread in the background embeds nothing at present, in words; "" if nothing is wrong."""

    def nearest(self, query: str, segments: Collection[int] | None, limit: int) -> list[tuple[Passage, float]]:
        """Return the passages of these segments, or of all, that are nearest in meaning, with their cosines, best first.

        Raises:
            ModelError, Unavailable: the embedder failed. StoreError: the store cannot be read.
        """
        if not query.strip() or limit < 1:
            return []
        self._wanted.set()
        serving = self._current()
        vector = serving.vector(query)
        stored_hits = serving.candidates(self.backend, vector, limit, segments)
        with self._lock:
            if stored_hits is not None:
                unstored = serving.scan.nearest(vector, limit, segments)
                return self._passages(sorted({*stored_hits, *unstored}, key=lambda hit: (-hit[1], hit[0])), limit)
            if serving.asked:
                # It was, and looks through them no more.
                serving.asked = False
                while serving.read(self.backend):
                    pass
            while True:
                nearest = serving.scan.nearest(vector, limit, segments)
                passages = self.backend.words.passages([entry for entry, _ in nearest])
                stale = [entry for entry, _ in nearest if entry not in passages]
                if not stale:
                    return [(passages[entry], cosine) for entry, cosine in nearest]
                serving.scan.remove(stale)

    def _passages(self, nearest: Sequence[tuple[int, float]], limit: int) -> list[tuple[Passage, float]]:
        """Return the first of these whose passages still exist."""
        passages: list[tuple[Passage, float]] = []
        while nearest and len(passages) < limit:
            batch, nearest = nearest[: limit - len(passages)], nearest[limit - len(passages) :]
            by_entry = self.backend.words.passages([entry for entry, _ in batch])
            passages += [(by_entry[entry], cosine) for entry, cosine in batch if entry in by_entry]
        return passages

    def similar(self, query: Any, entries: Iterable[int]) -> dict[int, float]:
        """Return the cosines of passages to a text, or to a vector of length 1, without passages that have no vector.

        Raises:
            ModelError, Unavailable: the embedder failed.
        """
        with self._lock:
            serving = self._old or self._kept
        vector = serving.vector(query) if isinstance(query, str) else np.asarray(query, np.float32)
        if vector.shape != (serving.embedder.dimensions,):
            message = f"a vector of {vector.shape} beside those of {serving.embedder.dimensions} dimensions"
            raise SpecError(message, advice=f"make it with {serving.embedder.name}")
        numbers = list(entries)
        cosines = serving.similar(self.backend, vector, numbers)
        with self._lock:
            return cosines | serving.scan.similar(vector, numbers)

    def behind(self, skipped: Collection[int] = ()) -> bool:
        """Whether passages wait for a vector, other than these, or vectors of another embedder are still there. One whose text is
        damaged counts: it is to be said.

        Raises:
            StoreError: the store cannot be read.
        """
        damaged: dict[int, StoreCorrupt] = {}
        waiting = self.backend.vectors.unembedded(self.embedder.name, len(skipped) + 1, damaged)
        has_others = any(name != self.embedder.name for name in self.backend.vectors.embedders())
        return has_others or any(entry not in skipped for entry in (*dict(waiting), *damaged))

    def catch_up(
        self,
        limit: int | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        batch: int = BATCH,
        skipped: dict[int, str] | None = None,
    ) -> int:
        """Embed what waits, at most `limit` passages, and drop the vectors of other embedders when nothing waits any more.

        Each batch is stored before the next one begins, so whatever ends it, the next call goes on there. `progress` gets
        the number so far. A passage whose text is damaged is passed over, and said in the log once.

        Args:
            skipped: passages that are left out, by entry. If it is given, a passage at which the embedder fails, and only at
                that, is added with the name of the error, and the others go on; one whose text is damaged is added, too.

        Returns:
            How many passages were embedded.

        Raises:
            ModelError, Unavailable: the embedder failed. StoreError: the store did.
        """
        embedded = 0
        while not self._stop.is_set() and not ending() and (limit is None or embedded < limit):
            with self._embedding:
                limit_now = batch if limit is None else min(batch, limit - embedded)
                damaged: dict[int, StoreCorrupt] = {}
                waiting = self.backend.vectors.unembedded(self.embedder.name, limit_now + len(skipped or ()), damaged)
                self._say_damaged(damaged)
                if skipped is not None:
                    skipped.update(dict.fromkeys(damaged, DAMAGED))
                    waiting = [passage for passage in waiting if passage[0] not in skipped][:limit_now]
                self._embed(waiting, skipped)
            if not waiting:
                # Of what is damaged, nothing more comes.
                if not set(skipped or ()) - damaged.keys():
                    self._drop_others()
                break
            embedded += sum(entry not in skipped for entry, _ in waiting) if skipped else len(waiting)
            if progress is not None:
                progress(embedded)
        return embedded

    def _say_damaged(self, damaged: Iterable[int]) -> None:
        for segment in sorted({entry >> 32 for entry in damaged} - self._said):
            self._said.add(segment)
            log.warning("a text of segment %d has no vector: it is damaged; see `kilburn fsck`", segment)

    def start(
        self, grace: float = GRACE, *, busy: Callable[[], bool] | None = None, turn: Callable[[], bool] = lambda: True
    ) -> None:
        """Embed what waits, in the background, until `close` or the end of the program. Does nothing for a store that is only
        read.

        Args:
            grace: seconds until it begins, unless a search comes before. Then it looks for what waits again and again.
            busy: whether somebody is being served, where the program knows. If given, searches leave all that waits to the
                thread. If not, the thread looks whether others compute. In both cases it lets them go first, for a few seconds
                before each small batch.
            turn: whether this process embeds now: of several over one store one is enough, and the others read what it stores.
        """
        if self._thread is None and not self.backend.readonly:
            self._busy, self._turn = busy, turn
            self._thread = threading.Thread(target=self._work, args=(grace,), name="kilburn-vectors", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread in the background, after its present batch; idempotent."""
        self._stop.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # However long the batch takes, the end of the program waits for it if need be.
            self._thread.join(5)

    def _work(self, grace: float) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        pause = first = min(grace, PAUSE)
        tended, max_pause = False, IDLE_PAUSE
        self._wanted.wait(grace)
        while not self._stop.is_set() and not ending():
            self._wanted.clear()
            embedded = 0
            try:
                self._read()
                if self._turn():
                    self._let_others()
                    embedded = self.catch_up(batch=ASIDE if self._busy is None else MEANWHILE, progress=self._let_others)
                    self._read()
                    if (embedded or not tended) and isinstance(self.backend.vectors, Nearby):
                        tended = True
                        self._tend(self.backend.vectors)
                self.trouble, max_pause = "", IDLE_PAUSE
            except Exception as error:  # noqa: BLE001 - an embedder may be anybody's, and this thread must go on
                if not isinstance(error, KilburnError):
                    # Its words may quote what was said.
                    log.error("embedding in the background failed: %s", type(error).__name__)
                self.trouble, max_pause = str(error) or type(error).__name__, LONGEST_PAUSE
            pause = first if embedded else min(2 * pause, max_pause)
            if not self._stop.wait(first):
                (self._stop if self.trouble else self._wanted).wait(pause - first)

    def _tend(self, vectors: Nearby) -> None:
        try:
            vectors.tend()
        except KilburnError as error:
            log.warning("searches by meaning go on as before, and may be slow: %s", error)

    def _let_others(self, embedded: int = 0) -> None:
        end, busy = time.monotonic() + PATIENCE, self._busy or self._others_compute
        while busy() and time.monotonic() < end and not self._stop.wait(GLANCE):
            pass

    def _others_compute(self) -> bool:
        """Whether the program's other threads compute now; it looks for a moment, in which this thread does nothing."""
        start = time.process_time()
        self._stop.wait(GLANCE)
        return time.process_time() - start > QUIET * GLANCE

    def _read(self) -> None:
        """Read what the store has, in steps between which others may search."""
        more = True
        while more:
            with self._lock:
                if not self._looked:
                    self._old, self._looked = self._predecessor(), True
                more = any(vectors.read(self.backend) for vectors in (self._kept, self._old) if vectors is not None)

    def _current(self) -> _Kept:
        """The vectors that serve now; unless the thread sees to it, with what other writers have added, and with what waits
        if it is little."""
        if self._busy is None:
            waiting = self._waiting()
            if waiting and self._embedding.acquire(timeout=1.0):
                try:
                    self._embed(waiting)
                finally:
                    self._embedding.release()
            with self._lock:
                if waiting is not None:
                    self._old, self._looked = None, True
                self._read()
        with self._lock:
            return self._old or self._kept

    def _waiting(self) -> list[tuple[int, str]] | None:
        """What waits for a vector, as far as a search may embed it; None if it is more than a few passages."""
        try:
            waiting = self.backend.vectors.unembedded(self.embedder.name, SHORT + 1)
        except StoreError:
            # A passage that cannot be read is told by whoever reads it, and must not end every search.
            return []
        if self.backend.readonly:
            with self._lock:
                is_known = self._kept.scan.holds([entry for entry, _ in waiting])
            waiting = [passage for passage, known_entry in zip(waiting, is_known, strict=True) if not known_entry]
        if len(waiting) > SHORT:
            return None
        room = LETTERS
        for count, (_, text) in enumerate(waiting):
            room -= len(text)
            if room < 0:
                return waiting[:count]
        return waiting

    def _embed(self, waiting: Sequence[tuple[int, str]], skipped: dict[int, str] | None = None) -> None:
        if not waiting:
            return
        texts = [text for _, text in waiting]
        try:
            vectors = checked(self.embedder, texts)
        except (Refused, Overlong):
            # One of them may be the reason, and must not hold up the others.
            vectors = np.stack([self._alone(text) for text in texts])
        except Exception as error:
            if skipped is None:
                raise
            self._embed_sound(waiting, skipped, error)
            return
        rows = list(zip([entry for entry, _ in waiting], pack(vectors), strict=True))
        if not self.backend.readonly:
            self.backend.vectors.add(self.embedder.name, rows)
            return
        with self._lock:
            self._kept.scan.add([entry for entry, _ in rows], [data for _, data in rows])

    def _embed_sound(self, waiting: Sequence[tuple[int, str]], skipped: dict[int, str], error: Exception) -> None:
        """Embed those at which the embedder does not fail; the others are left, unless it fails at everything."""
        checked(self.embedder, ["a"])
        if len(waiting) == 1:
            skipped[waiting[0][0]] = type(error).__name__
            return
        half = len(waiting) // 2
        self._embed(waiting[:half], skipped)
        self._embed(waiting[half:], skipped)

    def _alone(self, text: str) -> Any:
        """The vector of a text; zeros, near to nothing, if the embedder will not have it."""
        try:
            return checked(self.embedder, [text])[0]
        except (Refused, Overlong) as error:
            # An embedder that refuses every text is at fault, not the passage.
            checked(self.embedder, ["a"])
            log.warning("a passage has no vector: %s", type(error).__name__)
            return np.zeros(self.embedder.dimensions, np.float32)

    def _predecessor(self) -> _Kept | None:
        """The vectors of the embedder before this one, if they are still there and it can be made."""
        for name in self.backend.vectors.embedders():
            if name == self.embedder.name:
                continue
            try:
                return _Kept(resolve("search.embedders", name, foreign=False))
            except KilburnError as error:
                log.warning("vectors of %s cannot be used until they are made again: %s", name, error)
        return None

    def _drop_others(self) -> None:
        if self.backend.readonly:
            return
        with self._lock:
            self._old = None
        for name in self.backend.vectors.embedders():
            if name != self.embedder.name:
                self.backend.vectors.drop(name)
