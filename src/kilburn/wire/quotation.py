"""Text that is data, between marks that nothing in it can write.

A mark that is known can be closed by the text that it should hold. So each quotation has a nonce of its own, chosen from the
text's digest so that it does not occur in the text: the same text gives the same quotation, and no text can end its own.
It refuses to say what the text is for.
"""

from __future__ import annotations

import hashlib

__all__ = ["nonce_of", "quoted"]

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
