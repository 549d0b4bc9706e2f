"""Text that was read by its address."""

from __future__ import annotations

from kilburn.page import Page

__all__ = ["Recalled"]


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...]) -> Recalled:
        """Join the parts into the text."""
        made = super().__new__(cls, "".join(parts))
        made.pages, made.parts = pages, parts
        return made
