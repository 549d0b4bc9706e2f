"""Trajectories for training, out of a ledger: each call of the model, with the prompt as it was rendered.

A trainer that is given the transcript sees what the model did not: pages that had left, and not the folds that stood in their
place. Here each call is an example of its own, and its prompt is, byte for byte, what the model was shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kilburn.event import Act, Event
from kilburn.kernel.render import items, render, transcript
from kilburn.kernel.replay import steps
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.message import Message, Role
from kilburn.page import Page, Place
from kilburn.wire import chat

FORMS = ("prompt", "messages")
"""TRL's conversational forms: a prompt and a completion, or all messages together."""


class ModelCall(msgspec.Struct, frozen=True):
    """One call of the model: what it was shown, and what it said, as messages in the chat form."""

    session: str
    event: int
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]

    def example(self, form: str) -> dict[str, Any]:
        """A line for TRL, in one of `FORMS`."""
        if form == "messages":
            return {"messages": [*self.prompt, *self.completion]}
        return {"prompt": self.prompt, "completion": self.completion}


class LedgerCalls:
    """The calls of a session, in order; `left_out` counts those that cannot be told, after all have been read.

    A call is left out if a page that it was shown, or what it said, was forgotten since; or if a search had brought something
    beside its prompt, which no window holds.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left_out = 0

    def __iter__(self) -> Iterator[ModelCall]:
        session = self.session
        self.left_out = 0
        prompt: list[dict[str, Any]] | None = None
        gone = False
        head = sum(1 for _ in session.ledger.events())
        for event, window in steps(session.backend, session.info, session.counter, 0, head):
            if event.act is Act.SHIP:
                prompt = self._shown(window)
                gone = prompt is None
            elif event.act is Act.ADMIT and event.pages:
                said = self._said(event)
                if said and (prompt is not None or gone):
                    completion = self._told(said) if prompt is not None else None
                    if prompt is None or completion is None:
                        self.left_out += 1
                    else:
                        yield ModelCall(session.name, event.number, prompt, completion)
                prompt, gone = None, False

    def _said(self, event: Event) -> list[Page]:
        """The pages of the reply that an admission begins with; none if somebody else speaks."""
        pages = [self.session.window.pages[number] for number in event.pages]
        if pages[0].role is not Role.ASSISTANT:
            return []
        return [page for page in pages if page.message == pages[0].message]

    def _shown(self, window: WindowState) -> list[dict[str, Any]] | None:
        """What this window renders to; None where a page of it is forgotten."""
        there = items(window)
        if any(page is not None and not instead and self._forgotten(page) for _, page, instead in there):
            return None
        return list(render(transcript(there, self.session.contents.part, window), "chat", 0))

    def _told(self, said: list[Page]) -> list[dict[str, Any]] | None:
        """A reply as a message; None where it is forgotten, or was made of what stood beside the prompt."""
        if any(map(self._forgotten, said)) or any(page.cites or page.sources for page in said):
            return None
        parts, leftovers = zip(*map(self.session.contents.part, said), strict=True)
        return chat.render([Message(role=Role.ASSISTANT, parts=parts, extra=leftovers[0])])

    def _forgotten(self, page: Page) -> bool:
        return not page.digest or (page.id in self.session.window.pages and self.session.window.at(page.id) == Place.DROPPED)
