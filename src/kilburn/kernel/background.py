"""A question of a policy that a model answers while the agent goes on.

The question is about a snapshot of pages. The answer is handed out once, if these pages have not changed. Nothing
waits here, and there is one question at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context

import msgspec

from kilburn.effect import Answer, Ask, Deferred, Later, Outcome
from kilburn.errors import KilburnError
from kilburn.kernel.kernel import Kernel

log = logging.getLogger("kilburn")


class _Errand:
    """A running question; the thread that asks sets its answer, once."""

    def __init__(self, later: Later, turn: int) -> None:
        self.later, self.turn = later, turn
        self.answer: Answer | None = None


Aside = tuple[_Errand | None, _Errand | None]
"""The answer that a batch got, and the question that it asked."""


class Background:
    """Asks at most one question at a time, in another thread.

    Args:
        kernel: whose pages the question reads, each under its lock.
        answer: asks the model; None if there is no model.
    """

    def __init__(self, kernel: Kernel, answer: Callable[[Ask], Answer] | None) -> None:
        self._kernel, self._answer = kernel, answer
        self._errand: _Errand | None = None
        # Of the current batch: whose answer it got, and whether it asked the question.
        self._handed: _Errand | None = None
        self._fresh = False

    @property
    def running(self) -> bool:
        """Whether a question was asked and its answer was not handed out yet."""
        return self._errand is not None

    def start(self, later: Later) -> Answer:
        """Ask, unless there is no model or another question is running."""
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
            reply = answer(ask)
            reviewed = reply if later.review is None else later.review(self._text, ask, reply)
            errand.answer = msgspec.convert(msgspec.structs.asdict(reviewed), Answer)
        except KilburnError as error:  # a page was forgotten, or the store was closed, in the meantime
            errand.answer = Answer(outcome=Outcome.FAILED, detail=f"{type(error).__name__}: {error}")
        except Exception as error:
            # An error of the policy, in a thread that is never joined: it is logged here and becomes an answer.
            log.exception("a question in the background failed")
            errand.answer = Answer(outcome=Outcome.FAILED, detail=type(error).__name__)
        finally:
            # Whatever ends this thread (SystemExit is not an Exception), the next question must not wait for ever.
            if errand.answer is None:
                errand.answer = Answer(outcome=Outcome.FAILED, detail="its thread ended without an answer")

    def _text(self, page: int) -> str:
        with self._kernel.lock:
            return self._kernel.readable_text(page)

    def look(self) -> Deferred | None:
        """The running question, for a view; with its answer, once, when it is there."""
        errand = self._errand
        if errand is None:
            return None
        answer = errand.answer
        if answer is not None:
            self._handed, self._errand = errand, None
            # Pages never change; they are forgotten or retired.
            if not self._kernel.window.gone.isdisjoint(errand.later.pages):
                answer = Answer(outcome=Outcome.FAILED, detail="pages that it was about are not what they were")
        return Deferred(pages=errand.later.pages, turn=errand.turn, answer=answer, key=errand.later.key)

    @property
    def purpose(self) -> str:
        """The purpose of the question whose answer was just handed out, or that is running."""
        errand = self._handed or self._errand
        return errand.later.purpose if errand is not None else ""

    def commit(self) -> None:
        """The batch is committed: forget an answer that was handed out, and start a question that was asked.

        It is not started before, because a computing thread would delay the commit.
        """
        if self._fresh and self._errand is not None and self._answer is not None:
            work = (self._work, self._errand, self._answer)
            try:
                threading.Thread(target=copy_context().run, args=work, name="kilburn-later", daemon=True).start()
            except RuntimeError as error:
                # No thread can be started any more. The batch is written, so nothing may be raised.
                log.warning("a question in the background could not be asked: %s", error)
                self._errand.answer = Answer(outcome=Outcome.FAILED, detail="no thread could be started")
        self._handed, self._fresh = None, False

    def undo(self) -> None:
        """The batch was undone: its answer can be handed out again, and its question was never asked."""
        if self._fresh:
            self._errand = None
        if self._handed is not None:
            self._errand = self._handed
        self._handed, self._fresh = None, False

    def set_aside(self) -> Aside:
        """Hide the answer and question of this batch; returns them for `take_up`."""
        aside = (self._handed, self._errand if self._fresh else None)
        self.undo()
        return aside

    def take_up(self, aside: Aside) -> bool:
        """Continue with what was set aside; False if another batch has taken the answer, or has asked another question."""
        handed, question = aside
        if (handed or question) is not None and self._errand is not handed:
            return False
        if handed is not None:
            self._handed, self._errand = handed, None
        if question is not None:
            self._errand, self._fresh = question, True
        return True

    def abandon(self) -> str | None:
        """Give up a question whose answer will come too late; returns its purpose, or None if there is none."""
        purpose = self.purpose if self.running else None
        self._errand = self._handed = None
        self._fresh = False
        return purpose
