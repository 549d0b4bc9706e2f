"""Chooses the counter for a model's name.

An unknown name is not an error, since models have any: it gets a safe over-estimate. Only what a person gives as a
tokenizer's name has to be one.
"""

from __future__ import annotations

import re

from kilburn.budget import Counter
from kilburn.errors import SpecError
from kilburn.tokens.claude import Claude
from kilburn.tokens.encodings import Encoding, available
from kilburn.tokens.estimate import ANY_MODEL, OPEN, Characters, Estimate
from kilburn.tokens.families import family_estimate

RULER = re.compile(r"chars/(\d{1,6})")
O200K = re.compile(r"(chatgpt-4o|gpt-4o|gpt-4\.[15]|gpt-5|gpt-oss|codex-mini|computer-use|o[134](?![a-z0-9]))")
CL100K = re.compile(r"gpt-(4|3\.5|35)(?![\d.])")
SMALL_MODELS = re.compile(r"(gpt-4\.1|gpt-5[.\d]*)-(mini|nano)|o4-mini")
OPEN_FAMILIES = (
    "llama", "smollm", "qwen", "qwq", "mistral", "mixtral", "ministral", "magistral", "devstral", "phi", "deepseek", "granite",
    "yi", "falcon", "gpt",
)  # fmt: skip
OTHER_FAMILIES = (
    "chatgpt", "claude", "codex", "command", "computer-use", "gemini", "gemma", "glm", "grok", "kimi", "minimax", "nova", "o1",
    "o3", "o4",
)  # fmt: skip
OPEN_NAMES = re.compile(rf"(code|open)?({'|'.join(OPEN_FAMILIES)})")
FAMILIES = re.compile(rf"(?<![a-z])(code|open)?({'|'.join(OPEN_FAMILIES + OTHER_FAMILIES)})")


def counter_for(name: str | Counter) -> Counter:
    """Return the counter for a model's name; a counter is passed through.

    "auto" is an over-estimate for any model; "chars/4" counts four characters as one token. Providers' prefixes are
    understood ("openai/gpt-5", "eu.anthropic.claude-opus-4-8").

    Raises:
        SpecError: an empty name, something that is neither a name nor a counter, or "chars/0".
    """
    if not isinstance(name, str):
        if isinstance(name, Counter):
            return name
        raise SpecError(f"{name!r} counts no tokens", advice="give a model's name, or an object with name, envelope and count")
    if not name.strip():
        raise SpecError("an empty name for a tokenizer", advice='give "auto" or the model\'s name')
    if name == "auto":
        return Estimate()
    if name.startswith("chars/"):
        ruler = RULER.fullmatch(name)
        if ruler is None:
            raise SpecError(f"{name!r} is no ruler", advice='write "chars/4"')
        return Characters(int(ruler[1]))
    return _of_model(name)


def counter_of_model(name: str) -> Counter | None:
    """Return the counter for a model that a request names; None if nothing is known of the name."""
    return _of_model(name) if FAMILIES.search(_plain(name)) else None


def counter_named(name: str | Counter) -> Counter:
    """Return the same for a name that a person gives: one that is of no known family of models is refused.

    Raises:
        SpecError: see `counter_for`; or nothing is known of the name.
    """
    counter = counter_for(name)
    if isinstance(name, str) and name != "auto" and isinstance(counter, Estimate) and not FAMILIES.search(_plain(name)):
        families = ", ".join(sorted({*OPEN_FAMILIES, *OTHER_FAMILIES}))
        advice = f'give "auto", which is safe for any model, "chars/4", or a model\'s name: {families}'
        raise SpecError(f"no tokenizer named {name[:200]!r}", advice=advice)
    return counter


def _plain(name: str) -> str:
    return name.strip().lower().rpartition("/")[2].removeprefix("ft:")


def _of_model(name: str) -> Counter:
    model = _plain(name)
    if "claude" in model:
        return Claude(name) if available() else Estimate(name, ANY_MODEL)
    family = _image_rule(model)
    if O200K.match(model) and available():
        return Encoding(name, "o200k_base", family)
    if CL100K.match(model) and available():
        return Encoding(name, "cl100k_base", family)
    if model.startswith(("qwen3.5", "qwen3.6")) and available():
        return Encoding(name, "qwen3.5")
    if available() and (estimate := family_estimate(name, model)) is not None:
        return estimate
    return Estimate(name, OPEN if OPEN_NAMES.match(model) else ANY_MODEL)


def _image_rule(model: str) -> str:
    if model.startswith("gpt-4o-mini"):
        return "gpt-4o-mini"
    return "openai-small" if SMALL_MODELS.match(model) else "openai"
