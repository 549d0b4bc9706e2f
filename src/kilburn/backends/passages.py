"""Splits a text into passages for search, and adds words by which each can be found.

Passages follow lines, so that hits are readable. Only lines longer than a passage are split, at a blank if there is one.

The text index splits a text into words itself, by SQLite's `unicode61` rules (fixed at Unicode 6.1, so that a
deletion years later finds the same words) with `_` as a letter. This alone would find `foo_bar`, but
not its parts. So these words are appended to the text, both before indexing and before searching:

- the parts of `snake_case`, `CamelCase` and `mixed2numbers`: `getUserName` by `user`;
- paths and dotted names as one word, joined by `_`, whole and their last two parts: `src/kilburn/backend.py` as
  `src_kilburn_store_py` and `store_py`, so that the whole identifier is one rare word, not four common ones;
- pairs of neighbours in Chinese, Japanese and Korean writing, which puts no blanks between words.

These words depend only on the text, not on the version of Python. A change here needs a migration that rebuilds every
index, because an entry is deleted by naming its exact words.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kilburn.page import Span

SIZE = 800
"""Maximum characters of a passage: about 200 tokens, so that five hits fit a recall of 1,000 tokens."""

BY_USER = "\ue000"
"""The index word of passages of the user. No text contains it: see `add_name_parts`."""

TOKENIZER = ("porter", "unicode61", "remove_diacritics", "2", "tokenchars", "_")

MAX_NAME_CHARS = 200
"""A longer run of letters, points and slashes is data, not a name."""

_COMPOUND = re.compile(
    r"\b[A-Za-z0-9_]*(?:_[A-Za-z0-9]|[a-z0-9][A-Z]|[A-Za-z][0-9]|[A-Za-z0-9_][./\\:-]{1,2}[A-Za-z0-9_])[A-Za-z0-9_./\\:-]*",
    re.ASCII,
)
_RUN = re.compile(r"[A-Za-z0-9_./\\:-]{2,}")
_LONG_RUN = re.compile(r"[A-Za-z0-9+/_-]{60}")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{60,76}\r?\n){4,}[A-Za-z0-9+/]*={0,2}|[A-Za-z0-9+/_-]{256,}={0,2}")
_JOINTS = "./\\:-"
JOINT = re.compile(r"[./\\:-]+")
_PIECE = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_WITHOUT_BLANKS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_UNSPACED = re.compile(f"[{_WITHOUT_BLANKS}]{{2,}}")
# In a query, any letters, except scripts without blanks: there a whole sentence would be a path.
PATH = re.compile(rf"(?:[^\W{_WITHOUT_BLANKS}]|[./\\:-]){{2,}}")


def passages(text: str, size: int = SIZE) -> list[Span]:
    """Return spans of at most `size` characters, in order, that cover `text` except blank stretches and long runs of base64.
    Nobody searches for base64, and each run has many unique words."""
    spans: list[Span] = []
    for start, end in _without_base64(text) if _LONG_RUN.search(text) is not None else ((0, len(text)),):
        while start < end:
            stop = min(start + size, end)
            if stop < end:
                # Shorter passages would make single lines around a long one into hits.
                cut = text.rfind("\n", start + size // 2, stop)
                if cut < 0:
                    cut = text.rfind(" ", start + size // 2, stop)
                if cut >= 0:
                    stop = cut + 1
            if not text[start:stop].isspace():
                spans.append((start, stop))
            start = stop
    return spans


def _without_base64(text: str) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for run in _BASE64.finditer(text):
        if all(re.search(letters, run[0]) for letters in ("[A-Z]", "[a-z]", "[0-9]")):
            spans.append((start, run.start()))
            start = run.end()
    return [*spans, (start, len(text))]


def add_name_parts(text: str, by_user: bool = False) -> str:
    """Return the index text of a passage: the text, the parts of its compound names, the character pairs of scripts without
    spaces, and `BY_USER` if the text is the user's."""
    more: list[str] = []
    # A compound lies within a run of such characters, and most runs repeat.
    for run in dict.fromkeys(_RUN.findall(text)):
        word = run.strip(_JOINTS)
        if word.isalpha() and word[1:].islower():
            # A plain word has no parts.
            continue
        more.extend(_compounds(run) if len(run) <= MAX_NAME_CHARS else _compounds.__wrapped__(run))
    if not text.isascii():
        for match in _UNSPACED.finditer(text):
            run = match.group()
            more.extend(run[at : at + 2] for at in range(len(run) - 1))
    if more:
        text = f"{text}\n{' '.join(more)}"
    # FTS5 treats NUL as the end of a text in some code paths.
    words = text.replace("\0", " ").replace(BY_USER, " ")
    return f"{words} {BY_USER}" if by_user else words


@lru_cache(maxsize=20_000)
def _compounds(run: str) -> tuple[str, ...]:
    words = (match.group() for match in _COMPOUND.finditer(run))
    return tuple(part for word in words if len(word) <= MAX_NAME_CHARS for part in _parts(word))


def _parts(word: str) -> tuple[str, ...]:
    more: list[str] = []
    names = [name for name in JOINT.split(word) if name]
    for name in names:
        pieces = _PIECE.findall(name)
        if len(pieces) > 1 or (pieces and len(pieces[0]) < len(name)):
            more.extend(piece for piece in pieces if len(piece) > 1)
            if "_" in name:
                more.extend(part for part in name.split("_") if len(part) > 1 and part not in pieces)
    if len(names) > 1:
        more.append("_".join(names))
        if len(names) > 2:
            more.append("_".join(names[-2:]))
    return tuple(more)


def shorten(query: str) -> str:
    """Return the query, or beginning and end of a longer one."""
    return query if len(query) <= 16_000 else f"{query[:8_000]} {query[-8_000:]}"
