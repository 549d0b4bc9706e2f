"""Compares texts of a memory by their words: stems, negations, and tense.

The stemmer is that of the text index, so words that a search treats as one are one here too. The patterns are for English; of
texts in other languages only names and numbers are compared.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from functools import lru_cache

import apsw

from kilburn.memory import english
from kilburn.search.confidence import is_english
from kilburn.search.dates import dates

_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""Letters of scripts without spaces between words, or between a word and its particles; two in a row count as a word."""
_WORD = re.compile(rf"(?=([{_UNSPACED}]{{2}}))[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_PLAIN = re.compile(r"\w+", re.ASCII)
"""The same for ASCII texts."""
_COMMON = frozenset(english.text("words.common").split("|"))
_COUNTED = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = _COUNTED.split()

KIN = english.text("words.kin")
"""A relative, friend, colleague or pet of the speaker, as a pattern."""

NEGATED = english.pattern("words.negated", re.IGNORECASE)
"""Words of a negation or an end."""

BRINGS = english.pattern("words.brings", re.IGNORECASE)
"""Words that announce something new, or a correction."""

ENDS = english.pattern("words.ends", re.IGNORECASE)
"""Words that say that something has ended, or was wrong."""

RECURRING = english.pattern("words.recurring", re.IGNORECASE)
"""Words of a recurring event: with one of them, "on Monday" is no single day."""

_TIMES = (
    ("wish", re.compile(r"\b(?:wants?|wish(?:es)?|hopes?|would|might|may|could|should|considers?|thinking of)\b", re.IGNORECASE)),
    ("to come", re.compile(r"\b(?:will|plans?|going to|intends?|is about to|'ll|won't)\b", re.IGNORECASE)),
    ("past", re.compile(r"\b(?:was|were|had|used to|formerly|once)\b", re.IGNORECASE)),
)


def stated_end(text: str, said_at: float) -> float | None:
    """Return until when a statement says that it is true ("until March 2030"), in seconds since the epoch; None if it does not
    say."""
    ends = [dated.end for dated in dates(text, said_at) if _UNTIL.search(text[: dated.span[0]])]
    return min(ends) if ends and min(ends) > said_at else None


_UNTIL = re.compile(r"\b(?:until|till|through|up to)\s+(?:the\s+(?:end\s+of\s+)?)?\Z", re.IGNORECASE)


def content_words(text: str) -> set[str]:
    """Return the content words of a text, in lower case."""
    folded = text.casefold()
    words = set(_PLAIN.findall(folded)) if folded.isascii() else {match[1] or match[0] for match in _WORD.finditer(folded)}
    return {word for word in words - _COMMON if len(word) > 1 or word.isdigit()}


_lock = threading.Lock()
_stemmer = apsw.Connection(":memory:").fts5_tokenizer("porter", ["unicode61", "remove_diacritics", "0"])


@lru_cache(16_384)
def stem(word: str) -> str:
    """Return the stem of a word in lower case: "lives", "living" and "lived" have the same; a number becomes its digits."""
    if word in _NUMBERS:
        return str(_NUMBERS.index(word))
    if not word.isalpha() or not word.isascii():
        return word
    if word.endswith("oes"):
        return word[:-2]
    with _lock:
        tokens = list(_stemmer(word.encode(), apsw.FTS5_TOKENIZE_DOCUMENT, None, include_offsets=False))
    first = tokens[0] if tokens else (word,)
    return str(first[0]) if isinstance(first, tuple) else first


def match_words(words: Iterable[str], candidates: Iterable[str]) -> set[str]:
    """Return the words that are among others, whatever their endings."""
    stems = {stem(candidate) for candidate in candidates}
    return {word for word in words if stem(word) in stems}


def coverage(text: str, source: str) -> float:
    """Return the share of a text's content words that another text has, 0 to 1."""
    words = content_words(text)
    return len(match_words(words, content_words(source))) / len(words) if words else 0.0


def agreement(first: str, second: str) -> float:
    """Return the share of common content words of two texts, by the text that has fewer."""
    return coverage(*sorted((first, second), key=lambda text: (len(content_words(text)), text)))


def is_said(text: str, message: str) -> bool:
    """Return whether a message supports a sentence, in whatever words: it has all names and numbers and most words of the
    sentence, and a sign of change if the sentence denies something."""
    words = content_words(text)
    unsaid = words - match_words(words, content_words(message))
    if not words or unsaid & proper_names(text) or any(stem(word).isdigit() for word in unsaid) or len(unsaid) > len(words) / 2:
        return False
    return NEGATED.search(text) is None or is_sign(message)


def proper_names(text: str) -> set[str]:
    """Return the names in a sentence, in lower case: words with a capital that do not begin it."""
    hits: set[str] = set()
    between = 0
    for match in _WORD.finditer(text):
        word, start = match[1] or match[0], match.start()
        capital = not word.islower() and word != "I" and any(map(str.isupper, word))
        # Punctuation before the first word ends no sentence.
        if capital and start and (not between or _STOPS.search(text[between:start]) is None):
            hits.add(word.casefold())
        between = start + len(word)
    return hits


_STOPS = re.compile(r"[.!?]\s")
"""The end of a sentence."""


def is_sign(text: str) -> bool:
    """Return whether a message has a sign that something changed, ended or was wrong. A message in an unknown language may have
    one."""
    return any(words.search(text) for words in (NEGATED, ENDS, BRINGS)) or not is_english(text)


def is_known(text: str, known_text: str, alike: float) -> bool:
    """Return whether another text says all that this one says: its words and numbers, its names in the same order ("Tom gave Ana
    50" is not "Ana gave Tom 50"), the same tense, and the same negation."""
    if (NEGATED.search(text) is None) is not (NEGATED.search(known_text) is None) or _time(text) != _time(known_text):
        return False
    numbers = {stem(word) for word in content_words(text) if stem(word).isdigit()}
    if not numbers <= {stem(word) for word in content_words(known_text)} or coverage(text, known_text) < alike:
        return False
    people, known_people = _people(text), _people(known_text)
    common = set(people) & set(known_people)
    return [name for name in people if name in common] == [name for name in known_people if name in common]


def _people(text: str) -> list[str]:
    """Return the words with a capital, in order, each once, without the days and months, which may stand anywhere."""
    words = (match[0].casefold() for match in _WORD.finditer(text) if match[0][:1].isupper())
    return [word for word in dict.fromkeys(words) if word not in _COMMON and not _CALENDAR.match(word)]


_CALENDAR = re.compile(r"(?:\w+day|january|february|march|april|may|june|july|august|september|october|november|december)\Z")


def _time(text: str) -> frozenset[str]:
    return frozenset(name for name, words in _TIMES if words.search(text))
