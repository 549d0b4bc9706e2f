"""A safe over-estimate for models whose tokenizer is not known or not installed.

The weights are upper-quantile fits (linear programming, then 3 % on top) to what real tokenizers count on code, logs,
JSON, prose, 33 languages, digits, hex, base64 and emoji; scripts that fall back to bytes cost three tokens a
character. What a provider reports corrects it (see `kilburn.tokens.calibrated`).
"""

from __future__ import annotations

from kilburn.errors import SpecError
from kilburn.tokens.shape import WEIGHTS, PatternWeights, weigh

ANY_MODEL, OPEN = WEIGHTS.any_model, WEIGHTS.open_models


class Estimate:
    """An over-estimate from the text's shape alone.

    Of 467 unseen pages of code, HTML and agent trajectories 99 in 100 were at or above the largest count of any
    covered tokenizer, by 1.4 on average; of 348 pages in 29 unseen languages, 93 in 100, by 1.2. Counted over a whole
    window, every kind of text was at or above it, except Welsh, Uzbek and Swahili (up to 3 % short). It is no bound
    against hostile text: pages of nothing but one pair of marks (`^ ^ ^ `) were up to 3.6 times short. Always
    count(a) <= count(a + b) <= count(a) + count(b) + `seam`.

    Args:
        name: what `counter_for` takes for it.
        weights: `ANY_MODEL` or `OPEN`.
    """

    family = ""

    def __init__(self, name: str = "auto", weights: PatternWeights = ANY_MODEL) -> None:
        self.name = name
        self.weights = weights
        self.envelope = 5
        self.seam = weights.seam

    def __repr__(self) -> str:
        return f"Estimate({self.name!r})"

    def count(self, text: str) -> int:
        """Return the tokens that `text` costs at most, in all likelihood; never raises."""
        return -(-weigh(text, self.weights) // 100)


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
        """Tokens of `text`: its characters divided by `per_token`, rounded up."""
        return -(-len(text) // self.per_token)
