"""MEM1: one internal state that the agent rewrites every turn; what came before it leaves.

Each reply contains `<IS>...</IS>`, which is everything that the agent has to remember, and its next action. When the
reply is appended, everything older leaves the window, except pins and the task. So the next prompt consists of
question, state, action and observation, however long the session is. What left stays in the store, exactly, under its
address. After a reply without a state nothing leaves. From MEM1, arXiv 2506.15841.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from kilburn.effect import Answer, Effect, Note, Outcome
from kilburn.message import Kind, Role
from kilburn.move import Evict, Move
from kilburn.page import Page, digest_of
from kilburn.policy import View
from kilburn.selection.directives import Malformed, parse_state
from kilburn.selection.steps import assistant_texts, last_original, latest_reply, new_messages

__all__ = ["INSTRUCTIONS"]

INSTRUCTIONS = (
    "Begin every reply with <IS>...</IS>: rewrite there all that you must still know, what you found so far, what is open "
    "and what you will do next. Everything before this reply leaves your view once it is sent, apart from the task and what "
    "is pinned; what the state does not say is gone, unless you fetch it by its address. Then act."
)
"""Text for the agent's system prompt, whatever its actions are."""


NEAR = 64
"""Pages at the start of the window in which the last state is looked for."""


@dataclass(frozen=True)
class Mem1:
    """Evict everything older than the last reply with an internal state, except pins and the task.

    The task is everything before the agent's first words, and the latest user message. A state that is not well
    formed, or longer than `cap`, is rejected: nothing leaves. If the window is over its capacity, the oldest pages
    leave, and the last state and the task last.

    Args:
        cap: tokens of a state, at most; None for no bound.
    """

    cap: int | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and (isinstance(self.cap, bool) or self.cap < 1):
            raise ValueError(f"cap={self.cap!r} leaves no state; give 1 token or more, or None")

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        """One eviction, or nothing if the latest reply has no state and there is room."""
        fresh = new_messages(view)
        if not fresh and not view.excess:
            return []
        last = last_original(view)
        reply = latest_reply(view, last)
        since, outcome, why = self._since(view, reply)
        if not since and any(page.message in fresh for page in reply):
            yield Note(outcome=outcome, why=why)
        if since:
            old = self._older(view, since, last)
            if old:
                return [Evict(pages=old, why="before the last internal state")]
        return self._relieve(view, last) if view.excess else []

    def _since(self, view: View, reply: Sequence[Page]) -> tuple[int, Outcome | None, str]:
        """Return the first page of the message with the state, or 0 and the outcome that says what is wrong."""
        outcome, why = Outcome.EMPTY, "the reply holds no internal state"
        for page in reversed(reply):
            for words in assistant_texts(view, [page]):
                state = parse_state(words)
                if isinstance(state, Malformed):
                    return 0, Outcome.REJECTED, state.why
                if state is not None and state.strip():
                    tokens = view.count(state) if self.cap is not None else 0
                    if self.cap is not None and tokens > self.cap:
                        return 0, Outcome.REJECTED, f"a state of {tokens} tokens where {self.cap} are allowed"
                    return next(reply_page.id for reply_page in reply if reply_page.message == page.message), None, ""
                if state is not None:
                    why = "the internal state is empty"
        return 0, outcome, why

    def _older(self, view: View, since: int, last: int) -> tuple[int, ...]:
        """The pages before a page that may leave: whole groups, nothing pinned, nothing of the task."""
        is_task = _task(view, last)
        old = view.movable([page for page in view.pages if page.order[0] < since and not is_task(page)])
        return tuple(page.id for page in old)

    @staticmethod
    def _relieve(view: View, last: int) -> list[Move]:
        """Evict the oldest, an eighth of the capacity more than must be; the last reply with a state, and after it the task,
        only if nothing else is left."""
        is_task, state = _task(view, last), _last_state(view)

        def ranked() -> Iterator[Page]:
            yield from (page for page in view.pages if page.message != state and not is_task(page))
            yield from (page for page in view.pages if page.message == state)
            yield from view.pages

        older = [page for page in view.pages if page.message != state and not is_task(page) and not view.is_latest(page)]
        leaving = view.free(older, view.excess + view.budget.capacity // 8)
        leaving_ids = set(leaving)
        if sum([page.tokens for page in older if page.id in leaving_ids]) < view.excess:
            leaving = view.free((page for page in ranked() if not view.is_latest(page)), view.excess)
        return [Evict(pages=leaving, why="over capacity")] if leaving else []


def _task(view: View, last: int) -> Callable[[Page], bool]:
    """Whether a page belongs to the task: everything before the agent's first words, or the latest user message."""
    first = 1
    while first <= last and view.page(first).role is not Role.ASSISTANT:
        first += 1
    latest = digest_of(view.task) if view.task else ""

    def is_task(page: Page) -> bool:
        if page.id > 0:
            return page.id < first or (page.role is Role.USER and page.digest == latest)
        return page.depth > 0 and any(source > 0 and is_task(view.page(source)) for source in page.sources)

    return is_task


def _last_state(view: View) -> int:
    """The message with the last state; -1 for none. Everything older has left, so it is near the start."""
    for page in view.pages[:NEAR]:
        if page.role is Role.ASSISTANT and page.kind is Kind.TEXT:
            state = parse_state(view.text(page.id))
            if isinstance(state, str) and state.strip():
                return page.message
    return -1
