"""An agent's steps in a view: where they begin, what is new, and what the agent has just said.

A step is what the assistant says, its calls included, with all that comes back before it speaks
again; steps are numbered from 1, what stands before the first is the head. Everything is derived from
pages' roles and numbers, so the numbers stay what they are, whatever is folded, evicted or forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kilburn.message import Kind, Role
from kilburn.page import Page
from kilburn.policy import Cause, View


def last_original(view: View) -> int:
    """Id of the last original that was admitted, as far as the window shows; 0 if there is none."""
    last = view.pages[-1].order[0] if view.pages else 0
    return max(last, *view.wanted, *view.stubs) if view.wanted or view.stubs else last


def beginnings(view: View, last: int) -> list[int]:
    """The first page of each step, in order."""
    roles = {page.id: page.role for page in view.pages}
    replies = [number for number in range(1, last + 1) if (roles.get(number) or view.page(number).role) is Role.ASSISTANT]
    return [number for number, previous in zip(replies, [0, *replies], strict=False) if number > previous + 1 or not previous]


def latest_reply(view: View, last: int) -> list[Page]:
    """The originals of the assistant's latest words and calls, in order: of one message, or of several in a row."""
    number = last
    while number > 0 and view.page(number).role is not Role.ASSISTANT:
        number -= 1
    pages: list[Page] = []
    while number > 0 and (page := view.page(number)).role is Role.ASSISTANT:
        pages.append(page)
        number -= 1
    return pages[::-1]


def arrived(view: View) -> range:
    """Ids of the originals from the first page that is new at this admission, or whose call had to wait, to the last one;
    empty for any other cause."""
    if view.cause is not Cause.ADMIT or not view.wanted:
        return range(0)
    at = min(view.wanted)
    low = min(_opening(view, page) for page in view.wanted)
    while at > low:
        at -= 1
        low = min(low, _opening(view, at))
    return range(low, max(view.wanted) + 1)


def new_messages(view: View) -> set[int]:
    """The messages that are new at this admission, and those whose calls they answer: while a call waits for its result, the
    policy is not asked. Empty for any other cause.

    After some messages the policy is asked although a call waits. So the messages between a call and its late result are
    not new.
    """
    if view.cause is not Cause.ADMIT:
        return set()
    pages = [view.page(number) for number in view.wanted]
    return {page.message for page in pages} | {view.page(page.answers).message for page in pages if page.answers}


def latest_step(view: View) -> int:
    """The first original of the step that the newest message is part of: results go with their calls' message."""
    last = max(view.wanted)
    return min(_opening(view, page) for page in range(_first(view, last), last + 1))


def _opening(view: View, page: int) -> int:
    """The first page of the message that a page's call was made in, or of its own."""
    return _first(view, view.page(page).answers or page)


def _first(view: View, page: int) -> int:
    """The first page of a page's message."""
    message = view.page(page).message
    while page > 1 and view.page(page - 1).message == message:
        page -= 1
    return page


def assistant_texts(view: View, pages: Iterable[Page]) -> Sequence[str]:
    """Return what the assistant wrote as plain text, without forgotten or retired pages."""
    texts = [page.id for page in pages if page.kind is Kind.TEXT and page.role is Role.ASSISTANT]
    return [view.text(page) for page in texts if not view.gone(page)]
