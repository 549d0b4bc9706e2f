"""The names in a text that could be referred to later.

Found by patterns in any text, whatever its language. Code is not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kilburn.page import Span


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
_MAX_TOKEN_CHARS = 240
"""Longer tokens are data (base64, minified code), and would make the patterns below slow."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d$")


def identifiers(text: str) -> Iterator[Identifier]:
    """All mentions in order: paths, `path:line`, dotted and snake_case and CamelCase names, calls, error
    classes, hashes, numbers (with their unit) of two digits or with a point, unit or sign of percent."""
    for match in _TOKEN.finditer(text):
        token = match.group()
        if len(token) > _MAX_TOKEN_CHARS or (len(token) < 3 and not token[0].isdigit()):
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
