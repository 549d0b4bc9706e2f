"""The shape of a text: how many words, long words, digits, marks and bytes of each script it has.

Everything is one `bytes.translate` into an alphabet of classes and some `bytes.count` over it, so it runs at C speed
and in linear time. The weights for these counts are in `weights.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

Patterns = tuple[tuple[bytes, int], ...]

SLICE = 1 << 18
"""Characters that are counted at a time, so that a huge message needs little memory."""


class PatternWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Hundredths of a token for each occurrence of a pattern.

    Runs are counted without overlap, so `aaaaa` stands for every full five letters of a word.

    Args:
        start: for any text that is not empty.
        shape: over the classes ` ` space, `n` line break or tab, `^` other control, `0` digit, `A` and
            `a` ASCII letters, `.` other ASCII, and the first byte of what is not ASCII: `l` Latin,
            `g` Greek and Cyrillic, `h` Armenian to Arabic, `i` Indic and Thai, `j` Georgian to
            Ethiopic, `s` symbols, `k` kana, `c` Han, `o` Hangul, `p` private use and wide forms,
            `e` emoji and other four-byte characters.
        word: over ` ` and `a` (any ASCII letter), with a space before the text: ` a` is a word's start.
        sound: over ` `, `v` (vowel) and `c` (consonant): a word that cannot be pronounced is not a common one.
    """

    start: int
    shape: dict[str, int]
    word: dict[str, int]
    sound: dict[str, int]
    _patterns: tuple[Patterns, Patterns, Patterns] = ((), (), ())
    _plain: Patterns = ()

    def __post_init__(self) -> None:
        views = tuple(
            tuple((pattern.encode(), weight) for pattern, weight in view.items()) for view in (self.shape, self.word, self.sound)
        )
        msgspec.structs.force_setattr(self, "_patterns", views)
        # Most pages are ASCII text, which has none of the other classes.
        plain = tuple((pattern, weight) for pattern, weight in views[0] if _ASCII.issuperset(pattern))
        msgspec.structs.force_setattr(self, "_plain", plain)

    @property
    def seam(self) -> int:
        """Tokens that joining two texts may add to the sum of their weights, at most."""
        joined = sum(w for view in (self.shape, self.word, self.sound) for p, w in view.items() if len(p) > 1)
        return -(-joined // 100) + 1


def _byte_class(byte: int) -> str:
    char = chr(byte)
    if byte >= 0x80:
        lead = (
            (0xC0, "-"),
            (0xCC, "l"),
            (0xD4, "g"),
            (0xE0, "h"),
            (0xE1, "i"),
            (0xE2, "j"),
            (0xE3, "s"),
            (0xE4, "k"),
            (0xEA, "c"),
        )
        return next((name for end, name in (*lead, (0xEE, "o"), (0xF0, "p")) if byte < end), "e")
    if char in "\n\r\t":
        return "n"
    if char == " ":
        return " "
    if not char.isprintable():
        return "^"
    if char.isalpha():
        return "a" if char.islower() else "A"
    return "0" if char.isdigit() else "."


class Bound(msgspec.Struct, frozen=True):
    """A sum that is not below the count of a family's tokenizer.

    Args:
        shares: hundredths of a token for each token of an encoding, by its name; see `kilburn.tokens.encodings`.
        weights: of the text's shape.
    """

    shares: dict[str, int]
    weights: PatternWeights


class _Weights(msgspec.Struct, frozen=True):
    """The weights of all counters, as `weights.json` has them.

    Args:
        any_model: they cover o200k, cl100k, Qwen 3.5, SmolLM2, Mistral's Tekken and 32k SentencePiece, and Claude's tokenizers of
            both generations as `ctok` 1.3 rebuilds them.
        open_models: the same without Claude's tokenizers, so closer for English and code.
        claude_old, claude_new: see `kilburn.tokens.claude`.
        families: the bounds of each family; see `kilburn.tokens.families`.
    """

    any_model: PatternWeights
    open_models: PatternWeights
    claude_old: PatternWeights
    claude_new: PatternWeights
    families: dict[str, tuple[Bound, ...]]


_CLASSES = [_byte_class(byte) for byte in range(256)]
_ASCII = frozenset("".join(_CLASSES[:0x80]).encode())
_SHAPE = "".join(_CLASSES).encode()
_WORD = "".join("a" if name in "aA" and byte < 0x80 else " " for byte, name in enumerate(_CLASSES)).encode()
_SOUND = "".join(" " if _WORD[byte] == 0x20 else "v" if chr(byte) in "aeiouyAEIOUY" else "c" for byte in range(256)).encode()


with open(os.path.join(os.path.dirname(__file__), "weights.json"), "rb") as _file:
    WEIGHTS = msgspec.json.decode(_file.read(), type=_Weights)


def _slices(text: str) -> Iterator[str]:
    return (text[at : at + SLICE] for at in range(0, len(text), SLICE))


def _total(view: bytes, patterns: Patterns) -> int:
    total = 0
    for pattern, weight in patterns:
        total += view.count(pattern) * weight
    return total


def weigh(text: str, weights: PatternWeights) -> int:
    """Return the weight of a text in hundredths of a token, 0 for the empty text. Never raises, in time
    linear in the text; a longer text never weighs less than its beginning."""
    if not text:
        return 0
    total = weights.start
    shape, word, sound = weights._patterns
    if text.isascii():
        shape = weights._plain
    for piece in (text,) if len(text) <= SLICE else _slices(text):
        data = piece.encode("utf-8", "surrogatepass")
        total += _total(data.translate(_SHAPE), shape)
        total += _total(b" " + data.translate(_WORD), word)
        total += _total(data.translate(_SOUND), sound)
    return total
