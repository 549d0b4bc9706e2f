"""A text in chunks of about equal size, for the search index.

The chunks cover the text exactly, without overlap. The module refuses to know what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kilburn.page import Span

__all__ = ["passages"]

_LAST_LINE = re.compile(r"(?s:.*)(?:\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029])")
_LAST_SPACE = re.compile(r"(?s:.*)[\s,;>}\])]")


def passages(text: str, size: int = 800) -> Iterator[Span]:
    """Spans of at most `size` characters that cover the text in order; linear time.

    Each ends behind a line end if one lies in its second half, else behind a blank or bracket there,
    else hard. `\\r\\n` is never split.

    Raises:
        ValueError: a size below 2.
    """
    if size < 2:
        raise ValueError(f"a passage needs at least 2 characters, not {size}")
    at, length = 0, len(text)
    while length - at > size:
        stop = at + size
        # one that would end between \r and \n ends before both
        if text[stop - 1] == "\r" and text[stop] == "\n":
            stop -= 1
        half = at + size // 2
        found = _LAST_LINE.match(text, half, stop) or _LAST_SPACE.match(text, half, stop)
        stop = found.end() if found else stop
        yield at, stop
        at = stop
    if at < length:
        yield at, length
