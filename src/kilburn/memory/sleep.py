"""Sleep time: runs memory policies beside a conversation: after some turns, after a silence, and when unread messages were
evicted.

Each step of a policy is one transaction with its cursor, so a kill between two steps loses nothing and repeats nothing. Due work
is read from the store, so it is still due after a restart. The conversation never waits.

    sleep = SleepTime(session, "consolidate('core/human')", model="qwen", turns=5, idle=60)
    agent = Agent(model, [], session, notes=["core/human"], recall=500, learn=sleep)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from kilburn.arguments import checked
from kilburn.effect import Outcome
from kilburn.errors import SpecError
from kilburn.kernel.consultation import Breaker
from kilburn.kernel.drive import run
from kilburn.kernel.session import Session
from kilburn.memory.learning import Learned, LearningJob, make_answerer
from kilburn.memory.secrets import Secrets
from kilburn.native import ending

__all__ = ["SleepTime"]

log = logging.getLogger("kilburn")

MAX_RESULTS = 1000
"""Results that `SleepTime.learned` keeps."""


@checked
class SleepTime:
    """Runs memory policies over a session in a thread of its own. Use it as a context manager, or close it.

    Args:
        session: the session that they read.
        policies: specs such as "plain" or "consolidate('core/human')", or objects; one after the other.
        model: answers what they ask: a spec or a model; None for that of the store.
        turns: messages of the user after which they run; 0 for no such trigger.
        idle: seconds without a turn after which they run; 0 for no such trigger.
        compaction: whether they run when messages that they have not read were evicted.
        secrets: see `UserMemory.learn`.

    Raises:
        SpecError: no such policy or model, or an invalid time.
    """

    def __init__(
        self,
        session: Session,
        *policies: Any,
        model: Any = None,
        turns: int = 5,
        idle: float = 60.0,
        compaction: bool = True,
        secrets: Secrets = None,
    ) -> None:
        if not policies or turns < 0 or idle < 0:
            raise SpecError("sleep time without a policy, or with a time below 0", advice="give a policy, turns=5, idle=60")
        self.session, self.policies = session, policies
        self.turns, self.idle, self.compaction, self._secrets = turns, idle, compaction, secrets
        self.learned: deque[Learned] = deque(maxlen=MAX_RESULTS)
        """Results of the last runs of the policies."""
        self._answer = make_answerer(session.store, model)
        for policy in policies:
            self._job(policy)  # so that an invalid spec is reported now
        self._changed = threading.Condition()
        self._woken, self._worked, self._closed, self._failed = 0, 0, False, ""
        # A model that keeps failing is left alone for a while: the silence may last all night.
        self._looks, self._spares = 0, [Breaker() for _ in policies]
        self._thread = threading.Thread(target=self._watch, name="kilburn-sleep", daemon=True)
        self._thread.start()

    def due(self, *, idle: bool = False) -> str:
        """Return why work is due: "turns", "compaction" or "idle"; "" if it is not.

        Args:
            idle: whether the silence has lasted long enough.
        """
        return self._due(range(len(self.policies)), idle=idle)

    def _due(self, places: Iterable[int], *, idle: bool) -> str:
        for place in places:
            turns, evicted = self._job(self.policies[place]).waiting()
            if self.turns and turns >= self.turns:
                return "turns"
            if self.compaction and evicted:
                return "compaction"
            if idle and turns:
                return "idle"
        return ""

    def work(self) -> list[Learned]:
        """Run the policies now, in this thread; return the result of each.

        Raises:
            Whatever `UserMemory.learn` raises.
        """
        return [self._work(place) for place in range(len(self.policies))]

    def _work(self, place: int) -> Learned:
        outcome = Outcome.FAILED
        try:
            learned = run(self._job(self.policies[place]).learn(), self._answer)
            outcome = Outcome.FAILED if learned.failed else Outcome.DONE
        finally:
            self._spares[place].note(outcome, self._looks)
        return learned

    def wake(self) -> None:
        """Note that a turn has ended, so that the thread checks whether work is due. Returns at once."""
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def rest(self, timeout: float | None = None) -> bool:
        """Wait until the thread has handled the turns so far, or is closed; return whether it has. Failures are logged, and are
        due again."""
        with self._changed:
            target = self._woken
            self._changed.wait_for(lambda: self._worked >= target or self._closed, timeout)
            return self._worked >= target

    def close(self, timeout: float = 5.0) -> bool:
        """Stop, and wait so many seconds for the thread; return whether it has ended. Unfinished work is done the next time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> SleepTime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _job(self, policy: Any) -> LearningJob:
        return LearningJob(self.session.store, self.session, policy, None, self._secrets, stopped=self._is_over)

    def _is_over(self) -> bool:
        return self._closed or ending()

    def _watch(self) -> None:
        handled = 0
        while True:
            with self._changed:
                if self._woken == handled and not self._closed:
                    self._changed.wait(self.idle or None)
                spoke, handled = self._woken > handled, self._woken
            if self._is_over():
                return
            self._once(idle=not spoke)
            with self._changed:
                self._worked = handled
                self._changed.notify_all()

    def _once(self, *, idle: bool) -> None:
        self._looks += 1
        try:
            awake = [place for place, spares in enumerate(self._spares) if not spares.is_open(self._looks)]
            if self._due(awake, idle=idle):
                self.learned += [self._work(place) for place in awake]
            self._failed = ""
        except Exception as error:  # noqa: BLE001 - it is nobody's turn that failed; what was not done is due again
            previous, self._failed = self._failed, type(error).__name__
            log.log(
                logging.DEBUG if previous == self._failed else logging.WARNING,
                "session %s: sleep time ended with %s",
                self.session.name,
                type(error).__name__,
            )
