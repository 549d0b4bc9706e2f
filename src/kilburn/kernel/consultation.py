"""One consultation of a policy: answers its effects, carries out or undoes its moves, and records the outcome.

Whatever the policy and its model do (raise, return nonsense, yield effects without end), it ends with one typed
outcome in the ledger, and in a state that the laws allow. While a model is asked, the batch is set aside: everyone
else sees the state before it. The planner keeps the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from kilburn.effect import Answer, Ask, Find, Hit, Later, Outcome
from kilburn.errors import KernelError, LawBroken, StoreStale
from kilburn.event import STATE, Act
from kilburn.kernel.background import Background
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.pending import Pending
from kilburn.kernel.plans import PlanCourse, moves_of
from kilburn.move import Move
from kilburn.page import parse_address
from kilburn.policy import Cause, Policy, View

log = logging.getLogger("kilburn")

SPARED = Answer(
    outcome=Outcome.FAILED,
    detail="the model failed too often, or freed nothing the last time; it is asked again some turns later",
)

HIT_TOKENS = 200
"""Tokens that a search for a policy reckons for each passage, where it names no number."""


class _Course(PlanCourse, kw_only=True):
    cause: Cause
    later: Outcome | None = None
    carried: int = 0
    broke: Outcome | None = None
    why: str = ""
    waits: bool = True
    heard: bool = False
    overtaken: bool = False


FAILURES = 3
"""Failures in a row after which the breaker opens."""

REST = 8
"""Turns for which the breaker stays open at first; doubled each time the next question fails too."""

VAIN = 2
"""Turns after a compaction that asked a model and freed nothing, until a model is asked again; doubled each time the next one
frees nothing either."""

MAX_DOUBLINGS = 6
"""Doublings at most."""


class Breaker:
    """Opens after some failures in a row, lets one question through after a rest."""

    def __init__(self) -> None:
        self._failed = self._vain = 0
        self._until = 0

    def is_open(self, turn: int) -> bool:
        """Whether to spare the model at this turn."""
        return turn < self._until

    def note(self, outcome: Outcome, turn: int) -> None:
        """Count the outcome of a question."""
        if outcome != Outcome.FAILED:
            self._failed = 0
            return
        self._failed += 1
        if self._failed >= FAILURES:
            self._until = max(self._until, turn + REST * 2 ** min(self._failed - FAILURES, MAX_DOUBLINGS))

    def note_freed(self, freed: int, turn: int) -> None:
        """Count what a compaction freed for which a model was asked."""
        if freed > 0:
            self._vain = 0
            return
        self._until = max(self._until, turn + VAIN * 2 ** min(self._vain, MAX_DOUBLINGS))
        self._vain += 1


class Consultation:
    """Asks one policy at one boundary.

    Args:
        name: the policy's name, for the ledger.
        depth: how deep its folds may be.
    """

    def __init__(self, kernel: Kernel, name: str, depth: int, background: Background) -> None:
        self.kernel, self.name, self.depth, self.background = kernel, name, depth, background
        self._breaker = Breaker()

    def hold(self, policy: Policy, view: View, *, waits: bool = True) -> Generator[Ask, Answer, bool]:
        """Carry out what a policy plans, or leave everything as it was.

        Args:
            waits: whether a model may be asked; otherwise each `Ask` is answered NO_MODEL at once.

        Returns:
            False if others changed the session while a model was asked. The batch is then undone, with everything in
            it.

        Raises:
            StoreStale: others changed the session, and have forgotten what the policy reads.
        """
        course = _Course(cause=view.cause, waits=waits)
        if view.deferred is not None and view.deferred.answer is not None:
            self._breaker.note(view.deferred.answer.outcome, view.turn)
            self._note_answer(course, view.deferred.answer, f"{self.background.purpose}, in the background")
        moves = yield from moves_of(
            self.name,
            lambda: policy.plan(view),
            course,
            partial(self._ask, course=course),
            partial(self._at_once, course=course),
            passes=StoreStale,
        )
        if course.raised:
            course.broke, course.why = Outcome.FAILED, f"the policy failed: {course.raised}"
        if course.overtaken:
            self._note(course, Outcome.LATE, 0)
            return False
        old_use = self.kernel.window.use
        if moves:
            self._carry(moves, course)
        outcome = self._outcome(course, view, old_use)
        if course.heard:
            self._breaker.note_freed(old_use - self.kernel.window.use, self.kernel.window.turn)
        if outcome:
            self._note(course, outcome, old_use - self.kernel.window.use)
        return True

    def _carry(self, moves: Sequence[Move], course: _Course) -> None:
        point = self.kernel.savepoint()
        try:
            for move in moves:
                self.kernel.carry(move, policy=self.name, cause=course.cause, depth=self.depth)
            course.carried = len(moves)
        except KernelError as error:
            self.kernel.undo(point)
            course.broke = Outcome.NO_PROGRESS if isinstance(error, LawBroken) and error.law == 2 else Outcome.ILLEGAL
            self.kernel.record(Act.REFUSE, policy=self.name, cause=course.cause, why=str(error), moves=len(moves))

    def _outcome(self, course: _Course, view: View, old_use: int) -> Outcome | None:
        """The outcome; None if nothing happened."""
        if course.broke:
            return course.broke
        if course.carried:
            return Outcome.NO_PROGRESS if view.excess and self.kernel.window.use >= old_use else Outcome.DONE
        # Without a model nothing was asked: a rule that found nothing to do is not a compaction.
        failed = [outcome for outcome in course.answered if outcome != Outcome.DONE]
        if course.noted or course.later or failed:
            return course.noted or course.later or failed[-1]
        return Outcome.NO_PROGRESS if course.answered else None

    def _note(self, course: _Course, outcome: Outcome, freed: int) -> None:
        data: dict[str, Any] = {**course.figures, "outcome": outcome, "freed": freed, "moves": course.carried}
        if course.asked:
            data["asked"] = course.asked
        if course.raised:
            data["raised"] = course.raised
        why = "; ".join(reason for reason in [course.why, *(note.why for note in course.notes)] if reason)
        self.kernel.record(Act.COMPACT, policy=self.name, cause=course.cause, why=why[:300], **data)

    def _at_once(self, effect: Find | Later, course: _Course) -> Answer:
        """Answer an effect that needs no model."""
        if isinstance(effect, Find):
            return self._find(effect)
        if self._breaker.is_open(self.kernel.window.turn):
            return SPARED
        answer = self.background.start(effect)
        course.later = None if answer.outcome == Outcome.NO_MODEL else answer.outcome
        return answer

    def _ask(self, ask: Ask, course: _Course) -> Generator[Ask, Answer, Answer | None]:
        """Yield the question to the driver, with the batch set aside; None if others changed the session meanwhile.

        If the wait is cancelled, the batch is undone.
        """
        kernel = self.kernel
        if not course.waits:
            return Answer(outcome=Outcome.NO_MODEL)
        if self._breaker.is_open(kernel.window.turn):
            course.asked.append(Outcome.FAILED)
            return SPARED
        changes = kernel.changes
        batch, errand = _set_aside(kernel), self.background.set_aside()
        # Until the batch is taken up again, any error means that it is undone.
        course.overtaken = True
        answered = False
        try:
            kernel.lock.release()
            answer = yield ask
            answered = True
        finally:
            kernel.lock.acquire()
            kernel.check_free()
            kernel.busy = True
            if not answered:
                kernel.pending.add(batch.observations)
        if kernel.changes == changes and self.background.take_up(errand):
            _take_up(kernel, batch)
            course.overtaken = False
        else:
            kernel.pending.add(batch.observations)
        self._breaker.note(answer.outcome, kernel.window.turn)
        self._note_answer(course, answer, ask.purpose)
        return None if course.overtaken else answer

    def _note_answer(self, course: _Course, answer: Answer, purpose: str) -> None:
        course.asked.append(answer.outcome)
        if answer.outcome == Outcome.NO_MODEL:
            return  # there is no model to ask
        course.heard |= answer.outcome != Outcome.FAILED
        self.kernel.record(
            Act.ASK, policy=self.name, cause=course.cause, why=purpose, outcome=answer.outcome, detail=answer.detail[:300]
        )

    def _find(self, find: Find) -> Answer:
        kernel, limit = self.kernel, max(0, find.limit)
        is_shown = None if find.shown is None else find.shown.__contains__
        searcher = kernel.searching(is_shown=is_shown, by_words=find.by_words, by_user=find.by_user)
        tokens = find.tokens or HIT_TOKENS * limit
        findings = searcher.findings(
            find.query, tokens, kernel.clock(), kernel.counter, limit=limit, at=None, abstain=find.abstain, unseen=True
        )
        ranked = sorted(findings, key=lambda hit: -hit.score)
        pages = [parse_address(hit.address)[0] for hit in ranked]
        hits = [
            Hit(page=page, span=hit.span, text=hit.text, score=hit.score - hit.why.get("session", 0.0))
            for page, hit in zip(pages, ranked, strict=True)
            if not searcher.is_shown((kernel.lineage.owner(page), page))
        ]
        return Answer(outcome=Outcome.DONE if hits else Outcome.EMPTY, hits=tuple(hits), confidence=findings.confidence)


def _set_aside(kernel: Kernel) -> Pending:
    """Set the batch aside while a model is asked: everyone else sees the state before it."""
    kernel.window.rollback()
    kernel.busy = False
    batch = kernel.pending.take()
    kernel.usage.forget(batch.new)
    return batch


def _take_up(kernel: Kernel, batch: Pending) -> None:
    """Continue a batch that was set aside; the state must be the same as then."""
    if batch.budget is not None:
        kernel.rebudget(batch.budget)
    pages = {page.id: page for page in batch.new}
    for digest, text in batch.texts.items():
        kernel.contents.keep(digest, text)
    for event in batch.events:
        kernel.window.enact(event, pages)
        if event.act in STATE:
            kernel.usage.learn(event, kernel.window.journal.append)
    kernel.pending.put(batch)
