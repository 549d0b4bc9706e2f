"""Checkpoints of long sessions that the dashboard makes for itself, in memory.

The store keeps the newest checkpoint of a session, for whoever goes on with it. Who looks back needs older ones. A thread replays
the ledger once, and keeps one now and then.
"""

from __future__ import annotations

import logging
import threading

from kilburn.backend import Backend
from kilburn.errors import KilburnError
from kilburn.event import Act, Event
from kilburn.kernel.checkpoint import checkpoint_of
from kilburn.kernel.ledger import Ledger, Usage
from kilburn.kernel.replay import steps
from kilburn.kernel.session import Session

log = logging.getLogger("kilburn")

SESSIONS = 4
"""Sessions whose checkpoints are kept."""

LEAST, PAGES, MOST = 1_500, 2_000, 40
"""Events between two checkpoints, at least, or pages that they moved; and checkpoints of one session for either, at most."""

LATER = 0.5
"""Seconds after which a replay begins: the page that asked for it comes first."""


SOURCES = 50
"""Sources of a fold that take as long as a page that comes or goes: they are named, and none is read."""


def weight(event: Event) -> int:
    """What it takes to replay an event, in pages that come or go. A search moves nothing that it names."""
    if event.act is Act.SEARCH:
        return 0
    return len(event.pages) // (SOURCES if event.act is Act.FOLD else 1)


class TooFar(KilburnError):
    """A window that cannot be worked out at once; `share` of the work is done."""

    def __init__(self, share: float) -> None:
        super().__init__(f"the ledger is being replayed: {share:.0%}", advice="look again in a moment")
        self.share = share


class _Work:
    def __init__(self, until: int) -> None:
        self.kept: dict[int, bytes] = {}
        self.until, self.done = until, 0
        self.over = threading.Event()


class Marks:
    """Keeps checkpoints of the sessions that were asked for last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[int, _Work] = {}
        self._lock = threading.Lock()
        self._one = threading.Lock()

    def near(self, number: int, event: int) -> tuple[int, bytes] | None:
        """The last checkpoint of a session at or before an event, with the number of its event."""
        known = self._known.get(number)
        found = [at for at in list(known.kept) if at <= event] if known is not None else []
        return (max(found), known.kept[max(found)]) if known is not None and found else None

    def work(self, session: Session, until: int) -> float:
        """Begin to make checkpoints of a session up to an event, if that is not done yet; returns how much of it is."""
        number = session.number
        with self._lock:
            known = self._known.pop(number, None)
            if known is None or (known.over.is_set() and known.until < until):
                known = _Work(session.ledger.head)
                threading.Thread(target=self._make, args=(session, known), name="kilburn-replay", daemon=True).start()
            self._known[number] = known
            while len(self._known) > SESSIONS:
                self._known.pop(next(iter(self._known)))
        return self.progress(number)

    def progress(self, number: int) -> float:
        """How much of the work for a session is done, 0 to 1."""
        known = self._known.get(number)
        return 0.0 if known is None else 1.0 if known.over.is_set() else known.done / max(1, known.until)

    def finish(self, number: int, seconds: float) -> bool:
        """Wait until the checkpoints of a session are made; whether they are."""
        known = self._known.get(number)
        return known is not None and known.over.wait(seconds)

    def _make(self, session: Session, work: _Work) -> None:
        """Replay a ledger, one session at a time: it is work for one processor."""
        work.over.wait(LATER)
        every, many = max(LEAST, work.until // MOST), max(PAGES, session.window.last // MOST)
        since = moved = 0
        try:
            with self._one:
                for event, window in steps(self._backend, session.info, session.counter, 0, work.until):
                    work.done = event.number
                    moved += weight(event)
                    if event.number - since >= every or moved >= many:
                        since, moved = event.number, 0
                        work.kept[event.number] = checkpoint_of(window, Ledger(), Usage(session.counter))
        except KilburnError as error:
            log.warning("the windows of %s cannot be shown: %s", session.name, error)
        finally:
            work.over.set()
