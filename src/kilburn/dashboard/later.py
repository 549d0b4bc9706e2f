"""What takes longer than a page may: it is worked out by one thread, and kept. Who asks gets what is known by then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

from kilburn.errors import KilburnError

log = logging.getLogger("kilburn")

KEPT = 64
"""Results that are kept; those that were asked for last."""

WAITING = 8
"""Things that may wait to be worked out; what is asked for beyond that is not begun."""

Told = Callable[[float], None]
Work = Callable[[Told], Any]


class _Errand:
    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.share = 0.0
        self.found: Any = None
        self.over = threading.Event()

    def tell(self, share: float) -> None:
        self.share = share


class Errands:
    """Works things out one after the other, in the background."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Errand] = {}
        self._lock = threading.Lock()
        self._busy = False

    def ask(self, key: Hashable, work: Work) -> tuple[Any, float]:
        """What was found under this key, or None, and the share of the work that is done. The first one who asks begins it.

        Args:
            work: is given a function to say its share to; returns what is kept. It holds no word of a page.
        """
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                if sum(not one.over.is_set() for one in self._known.values()) >= WAITING:
                    return None, 0.0
                known = _Errand(work)
            self._known[key] = known
            for old in [other for other, one in self._known.items() if one.over.is_set()][: max(0, len(self._known) - KEPT)]:
                del self._known[old]
            if not known.over.is_set() and not self._busy:
                self._busy = True
                threading.Thread(target=self._run, name="kilburn-later", daemon=True).start()
        return known.found, known.share

    def found(self, key: Hashable) -> Any:
        """What was found under a key; None if nothing is known of it."""
        known = self._known.get(key)
        return known.found if known is not None else None

    def finish(self, key: Hashable, seconds: float) -> bool:
        """Wait until something is worked out; whether it is."""
        known = self._known.get(key)
        return known is not None and known.over.wait(seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                one = next((each for each in self._known.values() if not each.over.is_set()), None)
                if one is None:
                    self._busy = False
                    return
            try:
                if one.work is not None:
                    one.found = one.work(one.tell)
            except KilburnError as error:
                one.found = error
            except Exception as error:  # a damaged ledger, or a policy: the others go on
                log.exception("the dashboard could not work something out")
                one.found = KilburnError(f"it could not be worked out: {type(error).__name__}", advice="see the log")
            finally:
                one.work, one.share = None, 1.0
                one.over.set()
