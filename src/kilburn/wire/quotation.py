"""Text that is data, between marks that nothing in it can write.

A fixed mark could be closed by the text that it encloses. So each quotation has a nonce, made from the text's digest,
that does not occur in the text. The same text gives the same quotation, and no text can end its own. If several pages
are quoted one after the other, each heading begins with a nonce that occurs in none of them, so no page can write a
heading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_DIGITS = 6


def nonce_of(text: str) -> str:
    """Hex digits, usually six, that do not occur in the text; the same text gives the same digits."""
    digest = text.encode("utf-8", "surrogatepass")
    digits = _DIGITS
    while True:
        digest = hashlib.sha256(b"kilburn quotation:" + digest).digest()
        nonce = digest.hex()[:digits]
        if nonce not in text:
            return nonce
        # Each further attempt is longer, because a text may contain every short one.
        digits += 1


def quote(name: str, text: str) -> str:
    """Return the text between `<name-NONCE>` and `</name-NONCE>`, each on a line of its own."""
    mark = f"{name}-{nonce_of(text)}"
    return f"<{mark}>\n{text}\n</{mark}>"


def with_headings(parts: Iterable[tuple[str, str]]) -> str:
    """Return each text under its heading, `NONCE who:`. The nonce occurs in none of the texts, so none of them can write a
    heading.

    Args:
        parts: who speaks, on one line, and the text.
    """
    sections = [(speaker, text if not text or text.endswith("\n") else f"{text}\n") for speaker, text in parts]
    nonce = nonce_of("".join(text for _, text in sections))
    return "".join(f"{nonce} {speaker}:\n{text}" for speaker, text in sections)
