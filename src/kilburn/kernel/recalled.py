"""Text that was read by its address."""

from __future__ import annotations

from typing import Any

from kilburn.page import Page

__all__ = ["Recalled"]


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages, and `process` the session that has them: a branch, for an
    address such as `b1/p17`.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]
    session: Any

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...], session: Any) -> Recalled:
        """Join the parts into the text."""
        made = super().__new__(cls, "".join(parts))
        made.pages, made.parts, made.session = pages, parts, session
        return made
