"""One question of a policy that a model answers while the agent goes on.

A snapshot of pages is taken when it is asked; the answer is handed out once, if those pages are still
what they were. It moves nothing, waits for nobody, and has one question at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from kilburn.effect import Answer, Ask, Deferred, Later, Outcome
from kilburn.errors import KilburnError
from kilburn.kernel.kernel import Kernel

__all__ = ["Background"]

log = logging.getLogger("kilburn")


class _Errand:
    """One question on its way; its answer is set by the thread that asks, once."""

    def __init__(self, later: Later, turn: int) -> None:
        self.later, self.turn = later, turn
        self.answer: Answer | None = None


Aside = tuple[_Errand | None, _Errand | None]
"""What a batch was handed, and what it asked."""


class Background:
    """Asks at most one question at a time, beside the caller.

    Args:
        kernel: whose pages the question reads, each under its lock.
        answer: asks the model; None where there is none.
    """

    def __init__(self, kernel: Kernel, answer: Callable[[Ask], Answer] | None) -> None:
        self._kernel, self._answer = kernel, answer
        self._errand: _Errand | None = None
        # Of the batch that is being written: whose answer it was handed, and whether it asked the errand.
        self._handed: _Errand | None = None
        self._fresh = False

    @property
    def running(self) -> bool:
        """Whether a question has been asked whose answer was not handed out yet."""
        return self._errand is not None

    def start(self, later: Later) -> Answer:
        """Ask, unless there is no model or another question is still on its way."""
        if self._answer is None:
            return Answer(outcome=Outcome.NO_MODEL)
        if self._errand is not None:
            return Answer(outcome=Outcome.BUSY)
        self._errand = _Errand(later, self._kernel.window.turn)
        self._fresh = True
        return Answer(outcome=Outcome.STARTED)

    def _work(self, errand: _Errand, answer: Callable[[Ask], Answer]) -> None:
        later = errand.later
        try:
            ask = later.compose(self._text)
            said = answer(ask)
            reviewed = said if later.review is None else later.review(self._text, ask, said)
            errand.answer = msgspec.convert(msgspec.structs.asdict(reviewed), Answer)
        except KilburnError as error:  # a page was forgotten, or the store closed, meanwhile
            errand.answer = Answer(outcome=Outcome.FAILED, detail=f"{type(error).__name__}: {error}")
        except Exception as error:
            # The policy's own mistake, in a thread that nobody joins: it is logged here and becomes an answer.
            log.exception("a question in the background failed")
            errand.answer = Answer(outcome=Outcome.FAILED, detail=type(error).__name__)
        finally:
            # Whatever ends this thread (SystemExit is no Exception), the next question must not wait for ever.
            if errand.answer is None:
                errand.answer = Answer(outcome=Outcome.FAILED, detail="its thread ended without an answer")

    def _text(self, page: int) -> str:
        with self._kernel.lock:
            return self._kernel.text(page)

    def look(self) -> Deferred | None:
        """The question on its way, for a view; with its answer, once, as soon as there is one."""
        errand = self._errand
        if errand is None:
            return None
        answer = errand.answer
        if answer is not None:
            self._handed, self._errand = errand, None
            if not self._is_current(errand):
                answer = Answer(outcome=Outcome.FAILED, detail="pages that it was about are not what they were")
        return Deferred(pages=errand.later.pages, turn=errand.turn, answer=answer, key=errand.later.key)

    def _is_current(self, errand: _Errand) -> bool:
        # Pages never change; they are forgotten or retired.
        gone = self._kernel.window.gone
        return not gone or gone.isdisjoint(errand.later.pages)

    @property
    def purpose(self) -> str:
        """What the question is for whose answer was just handed out, or that is on its way."""
        errand = self._handed or self._errand
        return errand.later.purpose if errand is not None else ""

    def commit(self) -> None:
        """What was handed out in this batch is done with; what was asked in it is on its way from now on.

        Not before: a thread that computes would hold up the commit.
        """
        if self._fresh and self._errand is not None and self._answer is not None:
            work = (self._errand, self._answer)
            try:
                threading.Thread(target=self._work, args=work, name="kilburn-later", daemon=True).start()
            except RuntimeError as error:
                # No more threads here. The batch is written, so that nothing may be raised.
                log.warning("a question in the background could not be asked: %s", error)
                self._errand.answer = Answer(outcome=Outcome.FAILED, detail="no thread could be started")
        self._handed, self._fresh = None, False

    def undo(self) -> None:
        """The batch did not happen: an answer can be handed out again, a question of this batch was never asked."""
        if self._fresh:
            self._errand = None
        if self._handed is not None:
            self._errand = self._handed
        self._handed, self._fresh = None, False

    def set_aside(self) -> Aside:
        """Take what this batch was handed or asked out of sight; returns it for `take_up`."""
        aside = (self._handed, self._errand if self._fresh else None)
        self.undo()
        return aside

    def take_up(self, aside: Aside) -> bool:
        """Go on with what was set aside; False where another batch has it by now, or has asked a question of its own."""
        handed, asked = aside
        if (handed or asked) is not None and self._errand is not handed:
            return False
        if handed is not None:
            self._handed, self._errand = handed, None
        if asked is not None:
            self._errand, self._fresh = asked, True
        return True

    def abandon(self) -> str | None:
        """Let go of a question whose answer will come too late; returns what it was for, or None where there is none."""
        purpose = self.purpose if self.running else None
        self._errand = self._handed = None
        self._fresh = False
        return purpose
