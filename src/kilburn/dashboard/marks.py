"""Checkpoints of long sessions, which the dashboard makes and keeps in memory.

The store has only the newest checkpoint of a session, from which an agent goes on. To show an earlier window, the dashboard
replays the ledger once in a thread, and keeps checkpoints along the way.
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

MAX_SESSIONS = 4
"""Sessions whose checkpoints are kept."""

MIN_EVENTS, MIN_PAGES = 1_500, 2_000
"""Events between two checkpoints, or pages that they moved."""

MAX_CHECKPOINTS = 40
"""Checkpoints of one session, for either measure."""

REPLAY_DELAY = 0.5
"""Seconds before a replay begins, so that the page that needs it is sent first."""


SOURCES_PER_PAGE = 50
"""Sources of a fold whose replay takes as long as one moved page, because they are only named."""


def weight(event: Event) -> int:
    """Return the cost of replaying an event, in moved pages. A search moves none of the pages that it names."""
    if event.act is Act.SEARCH:
        return 0
    return len(event.pages) // (SOURCES_PER_PAGE if event.act is Act.FOLD else 1)


class TooFar(KilburnError):
    """Raised if a window cannot be shown before a replay has finished; `share` of it is done."""

    def __init__(self, share: float) -> None:
        super().__init__(f"the ledger is being replayed: {share:.0%}", advice="look again in a moment")
        self.share = share


class _Replay:
    """The replay of one session up to the event `until`, and its checkpoints by event."""

    def __init__(self, until: int) -> None:
        self.checkpoints: dict[int, bytes] = {}
        self.until, self.position = until, 0
        self.finished = threading.Event()


class Marks:
    """Caches checkpoints of the sessions that were requested last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._replays: dict[int, _Replay] = {}
        self._lock = threading.Lock()
        self._replaying = threading.Lock()

    def near(self, number: int, event: int) -> tuple[int, bytes] | None:
        """Return the last checkpoint of a session at or before an event, with the number of its event."""
        replay = self._replays.get(number)
        events = [at for at in list(replay.checkpoints) if at <= event] if replay is not None else []
        return (max(events), replay.checkpoints[max(events)]) if replay is not None and events else None

    def work(self, session: Session, until: int) -> float:
        """Start making checkpoints of a session up to an event, unless they exist; return the share that is done."""
        number = session.number
        with self._lock:
            replay = self._replays.pop(number, None)
            if replay is None or (replay.finished.is_set() and replay.until < until):
                replay = _Replay(session.ledger.head)
                threading.Thread(target=self._run, args=(session, replay), name="kilburn-replay", daemon=True).start()
            self._replays[number] = replay
            while len(self._replays) > MAX_SESSIONS:
                self._replays.pop(next(iter(self._replays)))
        return self.progress(number)

    def progress(self, number: int) -> float:
        """Return the share of a session's replay that is done, 0 to 1."""
        replay = self._replays.get(number)
        return 0.0 if replay is None else 1.0 if replay.finished.is_set() else replay.position / max(1, replay.until)

    def finish(self, number: int, seconds: float) -> bool:
        """Wait until a session is replayed; return whether it is."""
        replay = self._replays.get(number)
        return replay is not None and replay.finished.wait(seconds)

    def _run(self, session: Session, replay: _Replay) -> None:
        """Replay a ledger. Only one session is replayed at a time, as a replay occupies a processor."""
        replay.finished.wait(REPLAY_DELAY)
        max_events = max(MIN_EVENTS, replay.until // MAX_CHECKPOINTS)
        max_pages = max(MIN_PAGES, session.window.last // MAX_CHECKPOINTS)
        last = pages = 0
        try:
            with self._replaying:
                for event, window in steps(self._backend, session.info, session.counter, 0, replay.until):
                    replay.position = event.number
                    pages += weight(event)
                    if event.number - last >= max_events or pages >= max_pages:
                        last, pages = event.number, 0
                        replay.checkpoints[event.number] = checkpoint_of(window, Ledger(), Usage(session.counter))
        except KilburnError as error:
            log.warning("the windows of %s cannot be shown: %s", session.name, error)
        finally:
            replay.finished.set()
