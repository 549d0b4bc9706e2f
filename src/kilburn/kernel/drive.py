"""Drives generators that yield effects: the one place where a policy's `Ask` meets a real model.

The kernel's operations are generators of `Ask`s. `run` answers them in this thread, `arun` in a
worker thread, so sync and async share every line above. A model's failure becomes an `Answer`; it
never raises into a policy. This module refuses to know what is asked, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from kilburn.effect import Answer, Ask
from kilburn.errors import ModelError, Refused
from kilburn.model import Model, Reply, Request, complete

__all__ = ["answerer", "arun", "run"]

Result = TypeVar("Result")
Answerer = Callable[[Ask], Answer]


def run(operation: Generator[Ask, Answer, Result], answer: Answerer) -> Result:
    """Run an operation to its end, answering its effects in this thread."""
    try:
        effect = next(operation)
        while True:
            effect = operation.send(answer(effect))
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        operation.close()


async def arun(operation: Generator[Ask, Answer, Result], answer: Answerer) -> Result:
    """The same for async callers: the model runs in a worker thread, the operation in this one."""
    import asyncio  # a third of the time that `import kilburn` would take

    try:
        effect = next(operation)
        while True:
            effect = operation.send(await asyncio.to_thread(answer, effect))
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        operation.close()


def answerer(model: Model | None, *, timeout: float = 120.0) -> Answerer:
    """Answers `Ask`s with a model; without one, every answer's outcome is "none".

    Args:
        timeout: seconds for one answer.
    """

    def answer(ask: Ask) -> Answer:
        if model is None:
            return Answer(outcome="none")
        try:
            return _judge(complete(model, _request(model, ask, timeout)))
        except Refused as error:
            return Answer(outcome="refused", detail=str(error))
        except ModelError as error:
            return Answer(outcome="failed", detail=f"{type(error).__name__}: {error}")

    return answer


def _request(model: Model, ask: Ask, timeout: float) -> Request:
    system = {"role": "system", "content": ask.system}
    user = {"role": "user", "content": ask.prompt}
    hoisted = model.form == "messages"
    return Request(
        messages=[user] if hoisted or not ask.system else [system, user],
        system=ask.system if hoisted and ask.system else None,
        max_tokens=ask.max_tokens,
        temperature=0.0,
        schema=ask.schema,
        timeout=timeout,
    )


def _judge(reply: Reply) -> Answer:
    if reply.finish == "refused":
        return Answer(outcome="refused", detail=reply.text[:200])
    if reply.calls:
        return Answer(outcome="failed", detail="the model called a tool instead of answering")
    if not reply.text.strip():
        return Answer(outcome="empty")
    return Answer(outcome="truncated" if reply.finish == "length" else "done", text=reply.text)
