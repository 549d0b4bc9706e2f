"""The names in a text that could be referred to later, and the words worth searching for.

Found by patterns in any text, whatever its language. Code is not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kilburn.page import Span

__all__ = ["Identifier", "identifiers", "rare_words"]


class Identifier(NamedTuple):
    """One mention: its kind ("path", "line", "dotted", "call", "error", "name", "hash", "number"), the
    text as it stands there, and where."""

    kind: str
    text: str
    span: Span


# One pass: each token of word characters joined by . / : - @ :: is found once and sorted afterwards,
# which is several times faster than one alternation per kind.
_TOKEN = re.compile(r"(?:~?/|\.{1,2}/)?[A-Za-z_\d][\w]*(?:(?:[./\\@+-]|::)/?[\w]+)*(?::\d+(?::\d+)?)?/?(?:%|(?=\())?")
_EXTENSION = re.compile(
    r"\.(?:py[ix]?|pyx|txt|md|rst|toml|ya?ml|json[lc]?|cfg|ini|conf|c|h|cc|cpp|cxx|hpp|hh|rs|go|java|kt|js|jsx|mjs|cjs|tsx?|css|scss|html?|xml|svg|png|jpe?g"
    r"|sh|bash|zsh|sql|db|sqlite3?|csv|tsv|log|lock|gz|zip|tar|whl|so|dll|exe|ipynb|rb|php|swift|scala|lua|pl|r|R|vue|proto|env|bat|ps1|gguf|parquet|patch|diff)"
    r"(?::\d+(?::\d+)?)?$"
)
_NUMBER = re.compile(r"[-+]?\d[\d_]*(?:\.\d+)*(?:[eE][-+]?\d+)?(%|[a-zA-Z]{1,5})?$")
_HASH = re.compile(r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}$")
_CAMEL = re.compile(r"[A-Z][a-z0-9]+[A-Z]|[a-z][a-z0-9]*[A-Z][a-z]|[A-Z]{2,}[a-z]|[A-Z]{2,}_|[A-Z]+\d")
_ERROR = re.compile(r"[A-Z]\w*(?:Error|Exception|Warning)$")
_LONGEST = 240
"""Longer tokens are data (base64, minified code), and would make the patterns below slow."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d$")


def identifiers(text: str) -> Iterator[Identifier]:
    """All mentions in order: paths, `path:line`, dotted and snake_case and CamelCase names, calls, error
    classes, hashes, numbers (with their unit) of two digits or with a point, unit or sign of percent."""
    for match in _TOKEN.finditer(text):
        token = match.group()
        if len(token) > _LONGEST or (len(token) < 3 and not token[0].isdigit()):
            continue
        kind = _kind(token, text, match.end())
        if kind:
            start = match.start()
            yield Identifier(kind, token, (start, start + len(token)))


def _kind(token: str, text: str, end: int) -> str:
    """The kind of a token, or "" for an ordinary word."""
    if token.isalpha() and not (_mixed := not (token.islower() or token.istitle())):
        return "call" if text[end : end + 1] == "(" else ("error" if token.endswith("Error") else "")
    first = token[0]
    if first.isdigit():
        if _NUMBER.match(token):
            return "number" if len(token) > 1 else ""
        if _HASH.match(token):
            return "hash"
        if _DATE.match(token):
            return "number"
    if "/" in token or "\\" in token:
        return _path(token)
    if ":" in token and "::" not in token:
        return "line" if _EXTENSION.search(token) else "name"
    if _EXTENSION.search(token):
        return "path"
    if _ERROR.search(token):
        return "error"
    if "." in token or "::" in token:
        return "dotted"
    if text[end : end + 1] == "(":
        return "call"
    if "_" in token.strip("_") or (first == "_" and len(token) > 3):
        return "name"
    if _HASH.match(token):
        return "hash"
    return "name" if _CAMEL.search(token) else ""


def _path(token: str) -> str:
    """ "path" where a token with slashes is one; "" for `and/or`."""
    if token[0] in "/~." or _EXTENSION.search(token) or token.count("/") > 1 or "_" in token:
        return "line" if re.search(r":\d+$", token) else "path"
    return "path" if token.endswith("/") else ""


_WORD = re.compile(r"[^\W_](?:[\w]|[.'/:-](?=\w))*", re.UNICODE)
_STOPS = (
    "a about above after again against all also am an and any anything are around as at back be because been before "
    "being below between both but by can cannot could did do does doing done down during each either else even every "
    "everything few file files find first following for from function further get gets getting give given go goes going "
    "good had has have having he help her here hers him his how however i i'll i'm i've if in indeed instead into is "
    "isn't it it's its itself just keep know last let let's like line lines look looking make makes many may me might "
    "mine more most much must my need needs new next no nor not now of off on once one only open or other our out over "
    "own part please point put rather really right run running same say see seems set shall she should show since so "
    "some something still such take than that that's the their them then there there's these they thing things this "
    "those through thus time to together too try trying two under until up upon us use used using very want was way we "
    "we'll we're we've were what when where whether which while who whom whose why will with within without would yes "
    "yet you your yours "
)
_STOP = frozenset(_STOPS.split())


def rare_words(text: str, most: int = 24) -> list[str]:
    """Search terms of a text, the most specific first: names before long words before short ones.

    Stop words and single characters are dropped, each term comes once (case is folded for that only).
    Looks at the first and last 20,000 characters of a longer text.
    """
    if len(text) > 40_000:
        text = f"{text[:20_000]}\n{text[-20_000:]}"
    scores: dict[str, tuple[float, int, str]] = {}
    kinds = {found.text: found.kind for found in identifiers(text)}
    for place, token in enumerate([*kinds, *(found.group().rstrip(".:/-'") for found in _WORD.finditer(text))]):
        key = token.lower()
        if len(key) < 2 or key in _STOP:
            continue
        kind = kinds.get(token, "")
        score = {"": 0.0, "number": 2.0}.get(kind, 10.0) + min(len(token), 24) / 4
        if not kind and token[0].isupper():
            score += 1.5
        old = scores.get(key)
        if old is None:
            scores[key] = (score, place, token)
        elif old[1] < place:
            scores[key] = (max(old[0], score) + 0.5, old[1], old[2])
    ranked = sorted(scores.values(), key=lambda entry: (-entry[0], entry[1]))
    return [token for _, _, token in ranked[:most]]
