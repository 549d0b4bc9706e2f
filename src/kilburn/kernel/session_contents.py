"""The contents of a session: its pages and their exact texts, read without a trace in the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kilburn.arguments import checked
from kilburn.backend import State
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.render import Item, items, part_of
from kilburn.kernel.segment import SegmentContents
from kilburn.message import Message, Part
from kilburn.page import Page, Place

if TYPE_CHECKING:
    from kilburn.kernel.session import Session

__all__ = ["SessionContents"]

CHUNK_PAGES = 500
"""Pages whose texts are read at a time."""

PAGE_BYTES = 2000
"""Bytes that a page takes in memory, about, with its state and its line in the prompt, and without its text."""


@checked
class SessionContents(SegmentContents):
    """The pages of a session, those that it inherited included, and its transcript."""

    _segment: Session

    def owner(self, page: int) -> int:
        """Return the number of the session that made a page, because a branch inherits pages. `cites` takes both numbers."""
        return self._segment._kernel.lineage.owner(page)

    def fetch(self, pages: Iterable[Page]) -> None:
        """Cache the texts of pages in one read of the store; forgotten pages have none."""
        with self._segment.lock:
            self._segment._kernel.contents.fetch(digest for page in pages for digest in (page.digest, page.extra))

    def readable_text(self, page: int) -> str:
        """Return what a policy or a model can read of a page as text, by its id.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        with self._segment.lock:
            return self._segment._kernel.readable_text(page)

    def part(self, page: Page) -> tuple[Part, str | None]:
        """Return the message part of a page, and for the first part of a message also the leftovers of the message.

        Raises:
            StoreCorrupt.
        """
        contents = self._segment._kernel.contents
        with self._segment.lock:
            return part_of(page, contents.get(page.digest), contents.get(page.extra))

    def shown(self) -> list[Item]:
        """Everything in the prompt, in order: pages, and handles."""
        with self._segment.lock:
            return items(self._segment.window)

    def pages(self) -> list[tuple[Page, State]]:
        """Return all pages with their states, as this session last saw them: originals in order, then derived ones."""
        with self._segment._kernel.lock:
            pages, states = self._segment.window.pages, self._segment.window.states
            return [(pages[page], states[page]) for page in sorted(pages, key=lambda page: (page < 0, abs(page)))]

    def messages(self) -> list[dict[str, Any]]:
        """Return the whole transcript exactly as it was appended.

        Forgotten pages are missing. The rest of a message with forgotten pages is in the chat form.
        """
        return capabilities.forms.dump(self.originals())

    def originals(self, placeholder: str | None = None) -> list[Message]:
        """Return the whole transcript as messages with their sources, as `append` takes them; see `messages`.

        Args:
            placeholder: stands in the place of each page that is forgotten; None leaves these out.
        """
        messages: dict[int, Message] = {}
        with self._segment._current() as kernel:
            window = kernel.window
            pages = window.pages.originals()
            if placeholder is None:
                pages = [page for page in pages if window.at(page.id) != Place.DROPPED]
            for at, page in enumerate(pages):
                if at % CHUNK_PAGES == 0:
                    self.fetch(pages[at : at + CHUNK_PAGES])
                if placeholder is not None and window.at(page.id) == Place.DROPPED:
                    call = window.pages[page.answers].call if page.answers else None
                    part, leftovers = Part(kind=page.kind, text=placeholder, call=call), None
                else:
                    part, leftovers = self.part(page)
                message = messages.get(page.message)
                if message is None:
                    messages[page.message] = Message(
                        role=page.role, parts=(part,), extra=leftovers, sources=page.sources, cites=page.cites
                    )
                else:
                    messages[page.message] = msgspec.structs.replace(message, parts=(*message.parts, part))
            damaged = {page.message for page in window.pages.originals() if window.at(page.id) == Place.DROPPED}
        return list(_without_form(messages, damaged).values() if damaged else messages.values())

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        kernel = self._segment._kernel
        return PAGE_BYTES * kernel.window.pages.held + kernel.contents.size


def _without_form(messages: dict[int, Message], damaged: set[int]) -> dict[int, Message]:
    """Remove the original dict from messages that lost a part, and from those that came in the same dict."""
    chain: list[int] = []
    for number in sorted(messages.keys() | damaged):
        chain.append(number)
        message = messages.get(number)
        more = message is not None and message.extra is not None and '"more":true' in message.extra
        if not more:
            if damaged & set(chain):
                messages.update(
                    {member: msgspec.structs.replace(messages[member], extra=None) for member in chain if member in messages}
                )
            chain = []
    return messages
