"""The contents of a session: its pages and their exact texts, read without a trace in the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kilburn.arguments import checked
from kilburn.backend import State
from kilburn.kernel.render import Item, items, part_of
from kilburn.kernel.segment import SegmentContents
from kilburn.message import Message, Part
from kilburn.page import Page, Place
from kilburn.wire.form import dump

if TYPE_CHECKING:
    from kilburn.kernel.session import Session

READ = 500
"""Pages whose texts are read at a time."""


@checked
class SessionContents(SegmentContents):
    """The pages of a session, those that it inherited included, and its transcript."""

    _segment: Session

    def owner(self, page: int) -> int:
        """The number of the session in which a page was made: a branch inherits pages. `cites` takes both numbers."""
        return self._segment._kernel.lineage.owner(page)

    def fetch(self, pages: Iterable[Page]) -> None:
        """Cache the texts of pages in one read of the store; forgotten pages have none."""
        with self._segment.lock:
            self._segment._kernel.contents.fetch(digest for page in pages for digest in (page.digest, page.extra))

    def part(self, page: Page) -> tuple[Part, str | None]:
        """The message part that a page came from; with the first part, also the leftovers of its message.

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
        """All pages with where they are, as this session last saw them: originals in order, then derived ones."""
        with self._segment._kernel.lock:
            pages, states = self._segment.window.pages, self._segment.window.states
            return [(pages[page], states[page]) for page in sorted(pages, key=lambda page: (page < 0, abs(page)))]

    def messages(self) -> list[dict[str, Any]]:
        """The whole transcript as it was appended, exactly.

        Forgotten pages are missing. The rest of a message with forgotten pages is in the chat form.
        """
        return dump(self.originals())

    def originals(self, gone: str | None = None) -> list[Message]:
        """The whole transcript as messages with their sources, as `append` takes them; see `messages`.

        Args:
            gone: stands in the place of each page that is forgotten; None leaves these out.
        """
        made: dict[int, Message] = {}
        with self._segment._current() as kernel:
            window = kernel.window
            kept = window.pages.originals()
            if gone is None:
                kept = [page for page in kept if window.at(page.id) != Place.DROPPED]
            for at, page in enumerate(kept):
                if at % READ == 0:
                    self.fetch(kept[at : at + READ])
                if gone is not None and window.at(page.id) == Place.DROPPED:
                    call = window.pages[page.answers].call if page.answers else None
                    part, leftovers = Part(kind=page.kind, text=gone, call=call), None
                else:
                    part, leftovers = self.part(page)
                known = made.get(page.message)
                if known is None:
                    made[page.message] = Message(
                        role=page.role, parts=(part,), extra=leftovers, sources=page.sources, cites=page.cites
                    )
                else:
                    made[page.message] = msgspec.structs.replace(known, parts=(*known.parts, part))
            damaged = {page.message for page in window.pages.originals() if window.at(page.id) == Place.DROPPED}
        return list(_without_form(made, damaged).values() if damaged else made.values())

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        return self._segment._kernel.size


def _without_form(made: dict[int, Message], damaged: set[int]) -> dict[int, Message]:
    """Remove the original dict from messages that lost a part, and from those that came in the same dict."""
    chain: list[int] = []
    for number in sorted(made.keys() | damaged):
        chain.append(number)
        known = made.get(number)
        more = known is not None and known.extra is not None and '"more":true' in known.extra
        if not more:
            if damaged & set(chain):
                made.update({each: msgspec.structs.replace(made[each], extra=None) for each in chain if each in made})
            chain = []
    return made
