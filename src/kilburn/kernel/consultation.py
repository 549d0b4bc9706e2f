"""One consultation of a policy: its effects answered, its moves carried out or undone, its outcome noted.

Whatever the policy and its model do, it ends in one typed outcome in the ledger, and in a state that
the laws allow. It refuses to keep the budget: that is the planner's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from kilburn.effect import Answer, Ask, Effect, Find, Hit, Later, Note
from kilburn.errors import KernelError, LawBroken
from kilburn.event import Act
from kilburn.kernel.background import Background
from kilburn.kernel.breaker import Breaker
from kilburn.kernel.kernel import Kernel
from kilburn.move import Move
from kilburn.policy import Cause, Plan, View

__all__ = ["Consultation"]

SPARED = Answer(outcome="failed", detail="the model failed too often; it is asked again some turns later")


class _Course(msgspec.Struct):
    """What happened while a policy was at work."""

    cause: Cause
    asked: list[str] = []
    notes: list[Note] = []
    later: str = ""
    moves: int = 0
    broke: str = ""


class Consultation:
    """Asks one policy at one boundary, again and again.

    Args:
        name: the policy's name, for the ledger.
        depth: how deep its folds may be.
        rehearse: raises where what is about to become durable could not be made to fit.
    """

    def __init__(self, kernel: Kernel, name: str, depth: int, background: Background, rehearse: Callable[[], None]) -> None:
        self.kernel, self.name, self.depth, self.background = kernel, name, depth, background
        self._rehearse = rehearse
        self._breaker = Breaker()

    def hold(self, plan: Plan, view: View) -> Generator[Ask, Answer, None]:
        """Carry out a plan, or leave everything as it was."""
        course = _Course(view.cause)
        if view.deferred is not None and view.deferred.answer is not None:
            self._breaker.note(view.deferred.answer.outcome, view.turn)
            self._note_answer(course, view.deferred.answer, f"{self.background.purpose}, in the background")
        moves: Sequence[Move] = (yield from self._answers(plan, course)) if isinstance(plan, Generator) else plan
        before = self.kernel.use
        if moves:
            self._carry(moves, course)
        outcome = self._outcome(course, view, before)
        if outcome:
            self._note(course, outcome, before - self.kernel.use)

    def _carry(self, moves: Sequence[Move], course: _Course) -> None:
        point = self.kernel.savepoint()
        try:
            for move in moves:
                self.kernel.carry(move, policy=self.name, cause=course.cause, depth=self.depth)
            course.moves = len(moves)
        except KernelError as error:
            self.kernel.undo(point)
            course.broke = "no progress" if isinstance(error, LawBroken) and error.law == 2 else "illegal"
            self.kernel.note(Act.REFUSE, policy=self.name, cause=course.cause, why=str(error), moves=len(moves))

    def _outcome(self, course: _Course, view: View, before: int) -> str:
        """How it went in one word, or "" where nothing happened at all."""
        if course.broke:
            return course.broke
        if course.moves:
            return "no progress" if view.excess and self.kernel.use >= before else "done"
        noted = [note.outcome for note in course.notes if note.outcome]
        # Where no model is configured nothing was asked: a rule that found nothing to do is no compaction.
        asked = [outcome for outcome in course.asked if outcome != "none"]
        failed = [outcome for outcome in asked if outcome != "done"]
        if noted or course.later or failed:
            return noted[-1] if noted else course.later or failed[-1]
        return "no progress" if asked else ""

    def _note(self, course: _Course, outcome: str, freed: int) -> None:
        figures: dict[str, int] = {}
        for note in course.notes:
            for name, count in note.figures.items():
                figures[name] = figures.get(name, 0) + count
        data: dict[str, Any] = {**figures, "outcome": outcome, "freed": freed, "moves": course.moves}
        if course.asked:
            data["asked"] = course.asked
        why = "; ".join(note.why for note in course.notes if note.why)
        self.kernel.note(Act.COMPACT, policy=self.name, cause=course.cause, why=why[:300], **data)

    def _answers(
        self, plan: Generator[Effect, Answer, Sequence[Move]], course: _Course
    ) -> Generator[Ask, Answer, Sequence[Move]]:
        try:
            effect = next(plan)
            while True:
                if isinstance(effect, Ask):
                    effect = plan.send((yield from self._ask(effect, course)))
                else:
                    effect = plan.send(self._at_once(effect, course))
        except StopIteration as stop:
            moves: Sequence[Move] = stop.value or ()
            return moves
        finally:
            plan.close()

    def _at_once(self, effect: Find | Later | Note, course: _Course) -> Answer:
        """Answer what needs nobody outside."""
        if isinstance(effect, Find):
            return self._find(effect)
        if isinstance(effect, Note):
            course.notes.append(effect)
            return Answer(outcome="done")
        if self._breaker.is_open(self.kernel.tier.turn):
            return SPARED
        answer = self.background.start(effect)
        course.later = "" if answer.outcome == "none" else answer.outcome
        return answer

    def _ask(self, ask: Ask, course: _Course) -> Generator[Ask, Answer, Answer]:
        """Yield the question to whoever drives us; what was admitted is durable before the model speaks."""
        kernel = self.kernel
        if self._breaker.is_open(kernel.tier.turn):
            course.asked.append("failed")
            return SPARED
        self._rehearse()
        kernel.flush()
        # Other threads have their own batches while this one waits: what belongs to it is settled before.
        self.background.commit()
        kernel.lock.release()
        try:
            answer = yield ask
        finally:
            kernel.lock.acquire()
        self._breaker.note(answer.outcome, kernel.tier.turn)
        self._note_answer(course, answer, ask.purpose)
        return answer

    def _note_answer(self, course: _Course, answer: Answer, purpose: str) -> None:
        course.asked.append(answer.outcome)
        if answer.outcome == "none":
            return  # nobody is there to be asked
        self.kernel.note(
            Act.ASK, policy=self.name, cause=course.cause, why=purpose, outcome=answer.outcome, detail=answer.detail[:300]
        )

    def _find(self, find: Find) -> Answer:
        kernel, tier = self.kernel, self.kernel.tier
        passages = kernel.store.search(find.query, process=kernel.info.number, limit=4 * find.limit)
        wanted = [
            passage for passage in passages if passage.page in tier.pages and tier.at(passage.page) in ("out", "stub", "folded")
        ]
        kernel.contents.fetch(tier.pages[passage.page].digest for passage in wanted[: find.limit])
        hits = tuple(
            Hit(page=passage.page, span=passage.span, text=kernel.text(passage.page)[slice(*passage.span)], score=passage.score)
            for passage in wanted[: find.limit]
        )
        return Answer(outcome="done" if hits else "empty", hits=hits)
