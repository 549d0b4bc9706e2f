"""Runs the plan of a policy until it returns its moves: what it yields is checked, answered and counted.

A policy is foreign code. It may raise, return a number, yield effects without end, or try to end the program. Each of these is
a failure of the policy: it is logged and noted, and never raised to the caller. The caller answers the effects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from functools import partial
from types import UnionType
from typing import Any

import msgspec

from kilburn.effect import Answer, Ask, Effect, Find, Later, Note, Outcome
from kilburn.errors import SpecError

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


class PlanCourse(msgspec.Struct):
    """What happened while a policy was at work.

    Args:
        asked: how each question to a model ended.
        notes: what the policy noted.
        raised: the type of the error with which the policy failed, or "".
    """

    asked: list[Outcome] = []
    notes: list[Note] = []
    raised: str = ""

    @property
    def answered(self) -> list[Outcome]:
        """How the questions ended for which there was a model."""
        return [outcome for outcome in self.asked if outcome != Outcome.NO_MODEL]

    @property
    def noted(self) -> Outcome | None:
        """The last outcome that the policy noted."""
        return next((note.outcome for note in reversed(self.notes) if note.outcome), None)

    @property
    def figures(self) -> dict[str, int]:
        """The counts of all notes, added up."""
        figures: dict[str, int] = {}
        for note in self.notes:
            for name, count in note.figures.items():
                figures[name] = figures.get(name, 0) + count
        return figures


def moves_of(
    name: str,
    plan: Callable[[], Any],
    course: PlanCourse,
    ask: Callable[[Ask], Generator[Ask, Answer, Answer | None]],
    at_once: Callable[[Find | Later], Answer],
    *,
    kinds: type | UnionType = object,
    passes: type[Exception] | tuple[type[Exception], ...] = (),
) -> Generator[Ask, Answer, list[Any]]:
    """The moves that a policy wants; none if it fails, whatever it raises or returns.

    Args:
        name: the policy's, for the log.
        plan: calls the policy.
        course: what happens is noted here.
        ask: answers a question to a model, and notes how it ended; None ends the plan, without moves.
        at_once: answers any other effect but a note.
        kinds: of moves that it may return.
        passes: errors that are not the policy's: they are raised.
    """
    try:
        planned = _guarded(plan)
        moves = (yield from _answers(name, planned, course, ask, at_once)) if isinstance(planned, Generator) else planned
        if not isinstance(moves, list | tuple) or len(moves) > MOVES or not all(isinstance(move, kinds) for move in moves):
            raise SpecError(
                f"a plan gave {_named(moves)}", advice=f"return a list of at most {MOVES} of the moves that it may return"
            )
    except passes:
        raise
    except Exception as error:  # noqa: BLE001 -- it is told, and is an outcome
        # Its error may quote a page, which must not get into the ledger.
        _tell_failure(name, error)
        course.raised = type(error).__name__
        return []
    return list(moves)


def _answers(
    name: str,
    plan: Generator[Effect, Answer, Any],
    course: PlanCourse,
    ask: Callable[[Ask], Generator[Ask, Answer, Answer | None]],
    at_once: Callable[[Find | Later], Answer],
) -> Generator[Ask, Answer, Any]:
    began, waited = time.monotonic(), 0.0
    try:
        effect = _checked(_guarded(lambda: next(plan)))
        for _ in range(EFFECTS):
            if isinstance(effect, Ask):
                start = time.monotonic()
                answer = yield from ask(effect)
                waited += time.monotonic() - start
            elif isinstance(effect, Note):
                course.notes.append(effect)
                answer = Answer(outcome=Outcome.DONE)
            else:
                answer = at_once(effect)
            if answer is None:
                return ()
            if time.monotonic() - began - waited > SECONDS:
                raise SpecError(f"a plan took more than {SECONDS:g} seconds", advice="plan less at a time")
            effect = _checked(_guarded(partial(plan.send, answer)))
        raise SpecError(f"a plan yielded more than {EFFECTS} effects", advice="return its moves")
    except StopIteration as stop:
        return stop.value if stop.value is not None else ()
    finally:
        try:
            plan.close()
        except Exception:
            # The error that ends this consultation says more than a plan that does not end.
            log.exception("a plan of policy %s could not be closed", name)


def _tell_failure(name: str, error: Exception) -> None:
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


def _guarded(step: Callable[[], Any]) -> Any:
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


def _checked(effect: object) -> Effect:
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
