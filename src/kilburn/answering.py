"""Answers a policy's questions by a model, in a thread and within a time-out.

A model is foreign code: a failure becomes an `Answer`, and never raises into a policy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context

from kilburn.effect import Answer, Ask, Outcome
from kilburn.errors import ModelError, Refused, Unavailable
from kilburn.event import encodable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Model, Reply, Request, build_request, stream_pieces
from kilburn.native import ending, inside

log = logging.getLogger("kilburn")

PATIENCE = 3600.0
"""The longest time-out of a question, in seconds."""

STEP = 3.0
"""Seconds for which the end of a program waits at most for the next piece of a model that may compute here."""

SPACIOUS = 64
"""Characters of a reply for each token of its cap; a longer reply is cut."""


def answerer(model: Model | None, stopped: Callable[[], bool] = lambda: False) -> Callable[[Ask], Answer]:
    """Answers `Ask`s with a model; without one, every answer's outcome is NO_MODEL.

    A model is foreign code. Any error, and no answer within the question's time-out, is the outcome FAILED. A model
    that hangs is left behind in its thread; one that goes on and on is ended at its next piece.

    Args:
        stopped: whether no answer is wanted any more.
    """

    def answer(ask: Ask) -> Answer:
        if model is None:
            return Answer(outcome=Outcome.NO_MODEL)
        answers: list[Answer] = []
        late = threading.Event()

        def is_over() -> bool:
            return late.is_set() or stopped()

        # It works for whoever asks: a span, or an account, that is current here is so there.
        run, work = copy_context().run, lambda: answers.append(_ask(model, ask, is_over))
        worker = threading.Thread(target=run, args=(work,), name="kilburn-ask", daemon=True)
        worker.start()
        # The model has the same time-out, and its own error says more. This is for a model that ignores it.
        timeout = ask.timeout if 0 < ask.timeout < PATIENCE else PATIENCE
        worker.join(timeout + min(1.0, timeout / 4))
        if answers:
            return answers[0]
        late.set()
        why = f"no answer within {timeout:g} s" if worker.is_alive() else "its thread ended without an answer"
        return Answer(outcome=Outcome.FAILED, detail=why)

    return answer


def _ask(model: Model, ask: Ask, is_over: Callable[[], bool]) -> Answer:
    max_chars = SPACIOUS * max(1024, ask.max_tokens)
    try:
        return _judge(_complete(model, _request(model, ask), max_chars, is_over), max_chars)
    except ModelError as error:
        # As below: a provider's message may quote the prompt. The advice is ours.
        log.info("model %s: %s", model.name, error)
        detail = f"{type(error).__name__}: {error.advice}" if error.advice else type(error).__name__
        return Answer(outcome=Outcome.REFUSED if isinstance(error, Refused) else Outcome.FAILED, detail=detail)
    except Exception as error:
        # Its message may quote the prompt, which must not get into the ledger.
        log.exception("model %s raised", model.name)
        return Answer(outcome=Outcome.FAILED, detail=type(error).__name__)


def _complete(model: Model, request: Request, max_chars: int, is_over: Callable[[], bool]) -> Reply:
    """Return the whole reply. If the model says more than `max_chars` characters, return what it said until then. A program that
    ends waits only for the next piece, and not even for that if the model is on another machine."""
    texts, size = list[str](), 0
    with inside(patience=0.0 if getattr(model, "elsewhere", False) else STEP):
        pieces = stream_pieces(model, request)
        try:
            for piece in pieces:
                if ending():
                    raise Unavailable("the program is ending", advice="ask before")
                if isinstance(piece, Reply):
                    return piece
                if not piece.reasoning:
                    texts.append(piece.text)
                    size += len(piece.text)
                if size > max_chars:
                    part = Part(kind=Kind.TEXT, text="".join(texts))
                    return Reply(message=Message(role=Role.ASSISTANT, parts=(part,)), finish=Finish.LENGTH)
                if is_over():
                    raise Unavailable("no answer is wanted any more", advice="ask again")
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
    raise AssertionError(f"model {model.name} ended its stream without a reply")


def _request(model: Model, ask: Ask) -> Request:
    return build_request(
        model,
        ask.prompt,
        ask.system,
        max_tokens=ask.max_tokens,
        temperature=0.0,
        schema=ask.schema,
        timeout=ask.timeout,
    )


def _judge(reply: Reply, max_chars: int) -> Answer:
    if reply.finish == Finish.REFUSED:
        return Answer(outcome=Outcome.REFUSED, detail="the model declined")
    if reply.calls:
        return Answer(outcome=Outcome.FAILED, detail="the model called a tool instead of answering")
    text = encodable(reply.text[:max_chars])
    if not text.strip():
        return Answer(outcome=Outcome.EMPTY)
    cut = reply.finish == Finish.LENGTH or len(reply.text) > max_chars
    return Answer(outcome=Outcome.TRUNCATED if cut else Outcome.DONE, text=text)
