"""One consultation of a policy: answers its effects, carries out or undoes its moves, and records the outcome.

Whatever the policy and its model do (raise, return nonsense, yield effects without end), it ends with one typed
outcome in the ledger, and in a state that the laws allow. While a model is asked, the batch is set aside: everyone
else sees the state before it. The planner keeps the budget.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import msgspec

from kilburn.effect import Answer, Ask, Effect, Find, Hit, Later, Note, Outcome
from kilburn.errors import KernelError, LawBroken, SpecError
from kilburn.event import Act
from kilburn.kernel.background import Background
from kilburn.kernel.breaker import Breaker
from kilburn.kernel.kernel import Kernel
from kilburn.move import Move
from kilburn.page import Page, Place
from kilburn.policy import Cause, Policy, View
from kilburn.store import State

log = logging.getLogger("kilburn")

EFFECTS = 1000
"""Effects that one plan may yield."""

SECONDS = 30.0
"""Seconds that one plan may compute in all, without the time for which a model is asked. It is checked when the plan yields;
a plan that never yields cannot be stopped."""

MOVES = 10_000
"""Moves that one plan may return."""

FAILURES = 1000
"""Distinct failures of policies that are remembered, so that each is told once."""

_told: set[tuple[str, str, str, int]] = set()

SPARED = Answer(outcome=Outcome.FAILED, detail="the model failed too often; it is asked again some turns later")


FOUND = 200
"""Tokens of a passage that a search finds, roughly."""


class _Course(msgspec.Struct):
    """What happened while a policy was at work."""

    cause: Cause
    asked: list[Outcome] = []
    notes: list[Note] = []
    later: Outcome | None = None
    moves: int = 0
    broke: Outcome | None = None
    raised: str = ""
    why: str = ""
    waits: bool = True
    overtaken: bool = False
    waited: float = 0.0


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
            False if others changed the process while a model was asked. The batch is then undone, with everything in
            it.
        """
        course = _Course(view.cause, waits=waits)
        if view.deferred is not None and view.deferred.answer is not None:
            self._breaker.note(view.deferred.answer.outcome, view.turn)
            self._note_answer(course, view.deferred.answer, f"{self.background.purpose}, in the background")
        moves = yield from self._moves(policy, view, course)
        if course.overtaken:
            self._note(course, Outcome.LATE, 0)
            return False
        before = self.kernel.use
        if moves:
            self._carry(moves, course)
        outcome = self._outcome(course, view, before)
        if outcome:
            self._note(course, outcome, before - self.kernel.use)
        return True

    def _moves(self, policy: Policy, view: View, course: _Course) -> Generator[Ask, Answer, Sequence[Move]]:
        """The moves that a policy wants; none if it fails, whatever it raises or returns."""
        try:
            plan = guarded(lambda: policy.plan(view))
            moves = (yield from self._answers(plan, course)) if isinstance(plan, Generator) else plan
            if not isinstance(moves, list | tuple) or len(moves) > MOVES:
                raise SpecError(f"a plan gave {_named(moves)}", advice=f"return a list of at most {MOVES} moves")
            moves = list(moves)
        except Exception as error:  # noqa: BLE001 -- it is told, and is an outcome
            # A policy is foreign code. Its error may quote a page, which must not get into the ledger.
            tell_failure(self.name, error)
            course.raised = type(error).__name__
            course.broke, course.why = Outcome.FAILED, f"the policy failed: {course.raised}"
            return ()
        return moves

    def _carry(self, moves: Sequence[Move], course: _Course) -> None:
        point = self.kernel.savepoint()
        try:
            for move in moves:
                self.kernel.carry(move, policy=self.name, cause=course.cause, depth=self.depth)
            course.moves = len(moves)
        except KernelError as error:
            self.kernel.undo(point)
            course.broke = Outcome.NO_PROGRESS if isinstance(error, LawBroken) and error.law == 2 else Outcome.ILLEGAL
            self.kernel.record(Act.REFUSE, policy=self.name, cause=course.cause, why=str(error), moves=len(moves))

    def _outcome(self, course: _Course, view: View, before: int) -> Outcome | None:
        """The outcome; None if nothing happened."""
        if course.broke:
            return course.broke
        if course.moves:
            return Outcome.NO_PROGRESS if view.excess and self.kernel.use >= before else Outcome.DONE
        noted = [note.outcome for note in course.notes if note.outcome]
        # Without a model nothing was asked: a rule that found nothing to do is not a compaction.
        asked = [outcome for outcome in course.asked if outcome != Outcome.NO_MODEL]
        failed = [outcome for outcome in asked if outcome != Outcome.DONE]
        if noted or course.later or failed:
            return noted[-1] if noted else course.later or failed[-1]
        return Outcome.NO_PROGRESS if asked else None

    def _note(self, course: _Course, outcome: Outcome, freed: int) -> None:
        figures: dict[str, int] = {}
        for note in course.notes:
            for name, count in note.figures.items():
                figures[name] = figures.get(name, 0) + count
        data: dict[str, Any] = {**figures, "outcome": outcome, "freed": freed, "moves": course.moves}
        if course.asked:
            data["asked"] = course.asked
        if course.raised:
            data["raised"] = course.raised
        why = "; ".join(reason for reason in [course.why, *(note.why for note in course.notes)] if reason)
        self.kernel.record(Act.COMPACT, policy=self.name, cause=course.cause, why=why[:300], **data)

    def _answers(
        self, plan: Generator[Effect, Answer, Sequence[Move]], course: _Course
    ) -> Generator[Ask, Answer, Sequence[Move]]:
        began = time.monotonic()
        try:
            effect = checked(guarded(lambda: next(plan)))
            for _ in range(EFFECTS):
                if isinstance(effect, Ask):
                    answer = yield from self._ask(effect, course)
                    if course.overtaken:
                        return ()
                else:
                    answer = self._at_once(effect, course)
                if time.monotonic() - began - course.waited > SECONDS:
                    raise SpecError(f"a plan took more than {SECONDS:g} seconds", advice="plan less at a time")
                effect = checked(guarded(partial(plan.send, answer)))
            raise SpecError(f"a plan yielded more than {EFFECTS} effects", advice="return its moves")
        except StopIteration as stop:
            moves: Sequence[Move] = stop.value if stop.value is not None else ()
            return moves
        finally:
            try:
                plan.close()
            except Exception:
                # The error that ends this consultation says more than a plan that does not end.
                log.exception("a plan of policy %s could not be closed", self.name)

    def _at_once(self, effect: Find | Later | Note, course: _Course) -> Answer:
        """Answer an effect that needs no model."""
        if isinstance(effect, Find):
            return self._find(effect)
        if isinstance(effect, Note):
            course.notes.append(effect)
            return Answer(outcome=Outcome.DONE)
        if self._breaker.is_open(self.kernel.window.turn):
            return SPARED
        answer = self.background.start(effect)
        course.later = None if answer.outcome == Outcome.NO_MODEL else answer.outcome
        return answer

    def _ask(self, ask: Ask, course: _Course) -> Generator[Ask, Answer, Answer]:
        """Yield the question to the driver, with the batch set aside.

        If the wait is cancelled, the batch is undone.
        """
        kernel = self.kernel
        if not course.waits:
            return Answer(outcome=Outcome.NO_MODEL)
        if self._breaker.is_open(kernel.window.turn):
            course.asked.append(Outcome.FAILED)
            return SPARED
        before, began = kernel.changes, time.monotonic()
        batch, errand = kernel.set_aside(), self.background.set_aside()
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
            kernel.begin()
            if not answered:
                kernel.give_up(batch)
        course.waited += time.monotonic() - began
        if kernel.changes == before and self.background.take_up(errand):
            kernel.take_up(batch)
            course.overtaken = False
        else:
            kernel.give_up(batch)
        self._breaker.note(answer.outcome, kernel.window.turn)
        self._note_answer(course, answer, ask.purpose)
        return answer

    def _note_answer(self, course: _Course, answer: Answer, purpose: str) -> None:
        course.asked.append(answer.outcome)
        if answer.outcome == Outcome.NO_MODEL:
            return  # there is no model to ask
        self.kernel.record(
            Act.ASK, policy=self.name, cause=course.cause, why=purpose, outcome=answer.outcome, detail=answer.detail[:300]
        )

    def _find(self, find: Find) -> Answer:
        kernel = self.kernel

        def is_below(page: Page, state: State) -> bool:
            return state.at in (Place.OUT, Place.STUB, Place.FOLDED)

        room = FOUND * max(0, find.limit)
        best = kernel.searching().ranked(find.query, kernel.clock(), room, wanted=is_below)[: max(0, find.limit)]
        kernel.contents.fetch(one.candidate.page.digest for one in best)
        hits = tuple(
            Hit(page=page.id, span=span, text=kernel.text(page.id)[slice(*span)], score=one.scored.score)
            for one in best
            for page, span in [(one.candidate.page, one.candidate.span)]
        )
        return Answer(outcome=Outcome.DONE if hits else Outcome.EMPTY, hits=hits)


def tell_failure(name: str, error: Exception) -> None:
    """Log that a policy failed: with the traceback where it failed so for the first time in this program, else without."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    key = (name, type(error).__name__, place.tb_frame.f_code.co_filename if place else "", place.tb_lineno if place else 0)
    if key in _told:
        log.debug("policy %s failed again: %s", name, type(error).__name__)
        return
    if len(_told) >= FAILURES:
        _told.clear()
    _told.add(key)
    log.error("policy %s failed; where it fails so again, this is not repeated", name, exc_info=error)


def guarded(step: Callable[[], Any]) -> Any:
    """Guard one step of a policy: it may not end the program, or look like a cancelled wait.

    Raises:
        SpecError: it tried. Whatever else it raises, a Ctrl-C among it.
    """
    try:
        return step()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise SpecError(f"a plan raised {type(error).__name__}", advice="return moves, or raise an Exception") from error


def checked(effect: object) -> Effect:
    """The effect, with the types of its fields checked.

    Raises:
        SpecError: it is not an effect, or a field has a wrong value.
    """
    try:
        if isinstance(effect, Later):
            fields = (effect.pages, effect.purpose, effect.key)
            msgspec.convert(fields, tuple[tuple[int, ...], str, str])
            if callable(effect.compose) and (effect.review is None or callable(effect.review)):
                return effect
        elif isinstance(effect, Ask | Find | Note):
            return msgspec.convert(msgspec.structs.asdict(effect), type(effect))
    except (msgspec.ValidationError, RecursionError) as error:
        raise SpecError(f"a plan yielded an odd {_named(effect)}: {error}", advice="see kilburn.effect") from None
    raise SpecError(f"a plan yielded {_named(effect)}", advice="yield Ask, Find, Later or Note")


def _named(value: object) -> str:
    return f"a {type(value).__name__}"
