"""The window as tokens, line by line: what a sequence should hold, in order.

A line is one item of the prompt: a page, a fold, or a handle. Each line is tokenised separately, so that its keys and
values can leave and come back separately. Text of pages is data: a template marker inside it is encoded as ordinary
text.
"""

from __future__ import annotations

from typing import NamedTuple

from kilburn.kernel.session import Session
from kilburn.message import Kind, Role
from kilburn.page import Page
from kilburn_kv.weights import Weights


class WindowLine(NamedTuple):
    """One line of the window.

    Args:
        key: its place: lines are in the order of their keys.
        page: the id of the page that it shows whole; 0 for handles.
        tokens: the line as tokens.
    """

    key: tuple[int, int, int]
    page: int
    tokens: tuple[int, ...]


_Name = tuple[str, str, str, str | None]
"""Everything that determines a page's line, because pages of a branch may have the same numbers as others."""


class Template:
    """How lines become tokens: ChatML if the tokenizer has its markers, else `role: text` on lines.

    Args:
        weights: with a tokenizer.

    Raises:
        SpecError: they have none.
    """

    def __init__(self, weights: Weights) -> None:
        self._tokenizer = weights.words
        known = self._tokenizer.get_vocab()
        self._markers = (known["<|im_start|>"], known["<|im_end|>"]) if {"<|im_start|>", "<|im_end|>"} <= known.keys() else None
        self._kept: dict[_Name, tuple[int, ...]] = {}

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a reply in this template."""
        return frozenset(self._markers[1:]) if self._markers is not None else frozenset()

    def opening(self, role: str = "assistant") -> tuple[int, ...]:
        """The tokens before a line's text."""
        if self._markers is None:
            return self._plain(f"{role}: ")
        return (self._markers[0], *self._plain(f"{role}\n"))

    def closing(self) -> tuple[int, ...]:
        """The tokens after a line's text."""
        return self._plain("\n") if self._markers is None else (self._markers[1], *self._plain("\n"))

    def line(self, role: str, text: str) -> tuple[int, ...]:
        """The tokens of a line."""
        return (*self.opening(role), *self._plain(text), *self.closing())

    def lines(self, session: Session) -> list[WindowLine]:
        """All lines of a session's window."""
        with session.lock:
            shown = session.contents.shown()
            fresh = [page for _, page, instead in shown if page is not None and not instead]
            session.contents.fetch(page for page in fresh if _name(page) not in self._kept)
            made = []
            kept: dict[_Name, tuple[int, ...]] = {}
            for key, page, instead in shown:
                if page is None or instead:
                    if page is None or page.kind is Kind.RESULT:
                        role = Role.USER if page is None else page.role
                        made.append(WindowLine(key, 0, self.line(role, instead)))
                    continue
                name = _name(page)
                kept[name] = self._kept.get(name) or self.line(page.role, self._text(page, session.contents.text(page.id)))
                made.append(WindowLine(key, page.id, kept[name]))
            self._kept = kept
        return made

    @staticmethod
    def _text(page: Page, text: str) -> str:
        return f"{page.name}({text})" if page.kind is Kind.CALL else text

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def _name(page: Page) -> _Name:
    return page.digest, page.role, page.kind, page.name
