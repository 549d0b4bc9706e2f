"""Reads an agent's steps out of a view: where they begin, and what the agent has just said.

A step is what the assistant says, its calls included, with all that comes back before it speaks
again; steps are numbered from 1, what stands before the first is the head. Everything is derived from
pages' roles and numbers, so the numbers stay what they are, whatever is folded, evicted or forgotten.
It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kilburn.message import Kind, Role
from kilburn.page import Page
from kilburn.policy import Cause, View

__all__ = ["beginnings", "fresh_messages", "last_original", "latest_reply", "words_of"]


def last_original(view: View) -> int:
    """Id of the last original that was admitted, as far as the window tells; 0 where there is none."""
    shown = view.pages[-1].order[0] if view.pages else 0
    return max(shown, *view.wanted, *view.stubs) if view.wanted or view.stubs else shown


def beginnings(view: View, last: int) -> list[int]:
    """The first page of each step, in order."""
    said = [page.id for page in map(view.page, range(1, last + 1)) if page.role is Role.ASSISTANT]
    return [number for number, before in zip(said, [0, *said], strict=False) if number > before + 1 or not before]


def latest_reply(view: View, last: int) -> list[Page]:
    """The originals of the assistant's latest words and calls, in order: of one message, or of several in a row."""
    number = last
    while number > 0 and view.page(number).role is not Role.ASSISTANT:
        number -= 1
    found: list[Page] = []
    while number > 0 and (page := view.page(number)).role is Role.ASSISTANT:
        found.append(page)
        number -= 1
    return found[::-1]


def fresh_messages(view: View) -> set[int]:
    """The messages that a policy could not see at any earlier admission: the new ones, and those whose
    calls they answer, since no policy is asked to plan an admission while a call waits."""
    if view.cause is not Cause.ADMIT:
        return set()
    wanted = [view.page(number) for number in view.wanted]
    return {page.message for page in wanted} | {view.page(page.answers).message for page in wanted if page.answers}


def words_of(view: View, pages: Iterable[Page]) -> Sequence[str]:
    """What the assistant wrote as plain text; a forgotten page has no words."""
    return [view.text(page.id) for page in pages if page.kind is Kind.TEXT and page.role is Role.ASSISTANT and page.digest]
