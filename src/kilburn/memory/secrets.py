"""Secrets in texts: found before they are stored, and before a model reads them.

The scanner is betterleaks (extra `secrets`); a few rules here find what it leaves out. Nothing of a secret goes into a
finding or an error: they say which rule matched, and where. A scanner finds secrets of known forms. A password that looks
like any other word stays unseen, and so does what was encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from kilburn.errors import MissingExtra, SecretFound, SpecError
from kilburn.native import inside, load
from kilburn.page import Span

__all__ = ["Secret", "Secrets", "find", "is_installed", "screen"]

Secrets = Literal["refuse", "redact"] | None
"""What to do with a secret: refuse the whole text, put a mark in its place, or do not look (None)."""

RULES = {
    "url-password": r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@]{0,100}:([^\s/@]{1,200})@",
    "api-key": r"\b(sk-[A-Za-z0-9_-]{20,})",
    "aws-access-key-id": r"\b((?:AKIA|ASIA)[A-Z2-7]{16})\b",
    "bearer-token": r"(?i)\bbearer\s{1,3}([A-Za-z0-9._~+/-]{20,}=*)",
    "huggingface-token": r"\b(hf_[A-Za-z0-9]{30,})",
    "spoken-password": r"(?i)\b(?:password|passwort|passphrase|passcode|pin)\s{1,3}(?:is|ist|lautet)\s{1,3}[\"'`]?"
    r"((?=\S{0,100}\d)\S{4,100})",
}
"""What betterleaks 2.0 does not find; the first group is the secret."""

_RULES = {rule: re.compile(pattern) for rule, pattern in RULES.items()}

_BLIND = re.compile(r"\0|[\ud800-\udfff]|(?<=leaks)\s*:(?=\s*allow)", re.IGNORECASE)
"""Where the scanner would stop or look away: the end of a string in C, what is no UTF-8, and the comment by which the
author of a text could say that there is nothing to see."""

_MARK = re.compile(r"\[secret: [a-z0-9-]+\]")

ROUNDS = 3
"""How often a redacted text is looked at again."""


class Secret(msgspec.Struct, frozen=True, order=True):
    """A secret that was found: where, in characters of the text, and by which rule."""

    span: Span
    rule: str


def is_installed() -> bool:
    """Whether the scanner is there."""
    return find_spec("betterleaks") is not None


def find(text: str) -> list[Secret]:
    """The secrets of a text, in order; those that overlap count as one.

    Raises:
        MissingExtra: betterleaks is not installed. SecretFound: there is one, and it cannot be said where.
    """
    blank = _BLIND.sub(lambda seen: " " * len(seen[0]), text)
    found = [Secret(match.span(1), rule) for rule, pattern in _RULES.items() for match in pattern.finditer(blank)]
    for rule, values in _scanned(blank):
        spans = [Secret(span, rule) for value in values for span in _spans(blank, value)]
        if not spans:
            raise SecretFound([rule], "it is encoded, so it cannot be said where")
        found += spans
    joined: list[Secret] = []
    for secret in sorted(found):
        if joined and secret.span[0] < joined[-1].span[1]:
            first = joined[-1]
            joined[-1] = Secret((first.span[0], max(first.span[1], secret.span[1])), first.rule)
        else:
            joined.append(secret)
    return joined


def screen(text: str, secrets: Secrets) -> tuple[str, list[Secret]]:
    """The text as it may be stored or shown to a model, and what was found in it.

    Args:
        secrets: "refuse" raises if there is one; "redact" puts `[secret: RULE]` in its place; None does not look.

    Raises:
        SecretFound: there is one, and it was to be refused, or cannot be cut out.
        MissingExtra: betterleaks is not installed. SpecError: none of the three.
    """
    if secrets is None:
        return text, []
    if secrets not in ("refuse", "redact"):
        raise SpecError(f"secrets={secrets!r}"[:80], advice='give "refuse", "redact" or None')
    first: list[Secret] = []
    for _ in range(ROUNDS):
        found = [secret for secret in find(text) if _MARK.sub("", text[slice(*secret.span)])]
        first = first or found
        if not found:
            return text, first
        if secrets == "refuse":
            break
        for secret in reversed(found):
            start, stop = secret.span
            text = f"{text[:start]}[secret: {secret.rule}]{text[stop:]}"
    raise SecretFound([secret.rule for secret in first])


def _scanned(text: str) -> Iterator[tuple[str, list[str]]]:
    """What betterleaks finds: a rule, and the strings that are secret."""
    try:
        betterleaks = load("betterleaks")
    except ImportError as error:
        raise MissingExtra("betterleaks", "secrets") from error
    with inside():
        findings = list(betterleaks.scan_string(text))
    for finding in findings:
        parts = [value for value in _values(finding.component_sets) if value]
        yield finding.rule_id, [finding.secret or finding.match.full, *parts]


def _values(parts: Any) -> Iterator[str]:
    """The secrets among the parts of a finding: the key that belongs to an account's name."""
    if isinstance(parts, dict):
        if isinstance(parts.get("value"), str):
            yield parts["value"]
        parts = list(parts.values())
    if isinstance(parts, list):
        for part in parts:
            yield from _values(part)


def _spans(text: str, value: str) -> Iterator[Span]:
    at = text.find(value) if value else -1
    while at >= 0:
        yield at, at + len(value)
        at = text.find(value, at + len(value))
