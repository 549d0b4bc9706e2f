"""Text that is data, between marks that nothing in it can write.

A mark that is known can be closed by the text that it should hold. So each quotation has a nonce of its own, chosen from the
text's digest so that it does not occur in the text: the same text gives the same quotation, and no text can end its own.
Where several pages are told one after the other, each heading begins with one nonce that none of them holds: no page
can write a heading.
It refuses to say what the text is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["headed", "nonce_of", "quoted"]

_DIGITS = 6


def nonce_of(text: str) -> str:
    """Hex digits, six as a rule, that do not occur in the text, whatever it is; the same text gives the same ones."""
    digest = text.encode("utf-8", "surrogatepass")
    digits = _DIGITS
    while True:
        digest = hashlib.sha256(b"kilburn quotation:" + digest).digest()
        nonce = digest.hex()[:digits]
        if nonce not in text:
            return nonce
        # Each further one is longer: a text may hold every short one there is.
        digits += 1


def quoted(name: str, text: str) -> str:
    """The text between `<name-NONCE>` and `</name-NONCE>`, each on a line of its own."""
    mark = f"{name}-{nonce_of(text)}"
    return f"<{mark}>\n{text}\n</{mark}>"


def headed(parts: Iterable[tuple[str, str]]) -> str:
    """Each text under a heading of its own, `NONCE who:`; the nonce stands in none of the texts, so none can write a heading.

    Args:
        parts: who speaks, on one line, and the text.
    """
    known = [(who, text if not text or text.endswith("\n") else f"{text}\n") for who, text in parts]
    nonce = nonce_of("".join(text for _, text in known))
    return "".join(f"{nonce} {who}:\n{text}" for who, text in known)
