"""Drives generators that yield effects.

The kernel's operations are generators of `Ask`s. `run` answers them in this thread, `arun` in a worker thread, so
sync and async share every line above. What answers is made by `kilburn.answering`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from kilburn.effect import Answer, Ask

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
    import asyncio  # this import would add a third to the time of `import kilburn`

    try:
        effect = next(operation)
        while True:
            effect = operation.send(await asyncio.to_thread(answer, effect))
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        operation.close()


async def aside(work: Callable[[], Result]) -> Result:
    """What `work` returns, which may wait for a disk or a lock: done in a worker thread. If the wait is cancelled, the work is
    done all the same."""
    import asyncio  # as above

    return await asyncio.to_thread(work)
