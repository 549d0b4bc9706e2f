"""Counting tokens: `counter_for` turns a model's name into a `kilburn.budget.Counter`.

Nothing heavy is imported before the first count. Counters return numbers only, never the tokens.
"""

from __future__ import annotations

from kilburn.submodules import attach
from kilburn.tokens.calibrated import Calibrated
from kilburn.tokens.characters import Characters
from kilburn.tokens.choice import counter_for
from kilburn.tokens.claude import Claude, Ctok
from kilburn.tokens.encodings import Encoding
from kilburn.tokens.estimate import Estimate
from kilburn.tokens.images import cost_of_image, image_size, image_tokens

__all__ = [
    "Calibrated",
    "Characters",
    "Claude",
    "Ctok",
    "Encoding",
    "Estimate",
    "cost_of_image",
    "counter_for",
    "image_size",
    "image_tokens",
]

attach(__name__)
