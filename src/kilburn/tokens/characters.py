"""A counter for comparisons: a fixed number of characters is one token, whatever the model is.

Use it in evaluations, where every system must be measured alike. Do not size a real window with it: a real tokenizer
may need more tokens.
"""

from __future__ import annotations

from kilburn.errors import SpecError


class Characters:
    """ceil(characters / `per_token`) tokens, and nothing for a message's envelope.

    Splitting a text costs at most one token: count(a) + count(b) - 1 <= count(a + b) <= count(a) + count(b).

    Args:
        per_token: characters (code points) in a token, 1 or more.

    Raises:
        SpecError: `per_token` below 1.
    """

    family = ""

    def __init__(self, per_token: int = 4) -> None:
        if per_token < 1:
            raise SpecError(f"chars/{per_token} is no ruler", advice="give 1 or more characters a token, as in chars/4")
        self.per_token = per_token
        self.name = f"chars/{per_token}"
        self.envelope = 0

    def __repr__(self) -> str:
        return f"Characters({self.per_token})"

    def count(self, text: str) -> int:
        """Return the tokens of `text`: its characters divided by `per_token`, rounded up."""
        return -(-len(text) // self.per_token)
