"""Finds secrets in texts before they are stored, and before a model reads them.

The scanner is betterleaks (extra `secrets`); a few rules here find what it misses. Findings and errors contain no part of a
secret, only the rule and the place. A scanner finds secrets of known forms: passwords that look like ordinary words are not
found, nor are encoded secrets, or secrets that are split over lines or messages. The time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from kilburn.errors import MissingExtra, SecretFound, SpecError
from kilburn.native import inside, load
from kilburn.page import Span

Secrets = Literal["refuse", "redact"] | None
"""What to do with a secret: refuse the whole text, replace the secret by a mark, or do not look for secrets (None)."""

RULES = {
    "url-password": r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@]{0,100}:([^\s/@]{1,200})@",
    "api-key": r"\b(sk-[A-Za-z0-9_-]{20,})",
    "aws-access-key-id": r"\b((?:AKIA|ASIA)[A-Z2-7]{16})\b",
    "bearer-token": r"(?i)\bbearer\s{1,3}([A-Za-z0-9._~+/-]{20,}=*)",
    "huggingface-token": r"\b(hf_[A-Za-z0-9]{30,})",
    "spoken-password": r"(?i)\b(?:password|passwort|passphrase|passcode|pin)\s{1,3}(?:is|ist|lautet)\s{1,3}[\"'`]?"
    r"((?=\S{0,100}\d)\S{4,100})",
}
"""Secrets that betterleaks 2.0 does not find; the first group is the secret."""

_CARD = re.compile(
    r"(?<![\d.,-])(?:(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d)([ -]?)\d{4}\1\d{4}\1\d{4}|3[47]\d\d([ -]?)\d{6}\2\d{5})(?![\d.,-]?\d)"
)
"""The number of a payment card: Visa and Mastercard in groups of 4 digits, American Express in 4, 6 and 5, separated by blanks,
hyphens or nothing. A part of a longer number does not count, nor does a number with a wrong check digit."""

_RULES = {rule: re.compile(pattern) for rule, pattern in RULES.items()}

_BLIND = re.compile(r"\0|[\ud800-\udfff]|(?<=leaks)\s*:(?=\s*allow)", re.IGNORECASE)
"""Text at which the scanner would stop or look away: the end of a string in C, lone surrogates, and the comment by which an
author can suppress findings."""

_MARK = re.compile(r"\[secret: [a-z0-9-]+\]")

HEAD_CHARS = 8
"""Characters by which the places of secrets are looked up."""

PIECE_CHARS, OVERLAP_CHARS = 24_000, 8_000
"""Characters of a piece for the scanner, and of its overlap with the next: more than a private key has."""

MAX_ROUNDS = 3
"""How often a redacted text is scanned again."""


class Secret(msgspec.Struct, frozen=True, order=True):
    """A secret in a text: its place in characters, and the rule that found it."""

    span: Span
    rule: str


def is_installed() -> bool:
    """Return whether the scanner is there."""
    return find_spec("betterleaks") is not None


def by_rule(text: str) -> list[Secret]:
    """Return the secrets of a text that the rules here find, without the scanner; they may overlap."""
    hits = [Secret(match.span(1), rule) for rule, pattern in _RULES.items() for match in pattern.finditer(text)]
    return hits + [Secret(match.span(), "card-number") for match in _CARD.finditer(text) if _is_card(match[0])]


def find(text: str) -> list[Secret]:
    """Return the secrets of a text, in order; those that overlap count as one.

    Raises:
        MissingExtra: betterleaks is not installed. SecretFound: there is a secret, and its place is unknown.
    """
    blank = _BLIND.sub(lambda match: " " * len(match[0]), text)
    hits = by_rule(blank)
    scanned = _scan(blank)
    rules = {value: rule for rule, values in reversed(scanned) for value in values if value}
    places = list(find_values(rules, blank))
    met = {value for _, value in places}
    for rule, values in scanned:
        if met.isdisjoint(values):
            raise SecretFound([rule], "it is encoded, so it cannot be said where")
    hits += [Secret(span, rules[value]) for span, value in places]
    joined: list[Secret] = []
    for secret in sorted(hits):
        if joined and secret.span[0] < joined[-1].span[1]:
            first = joined[-1]
            joined[-1] = Secret((first.span[0], max(first.span[1], secret.span[1])), first.rule)
        else:
            joined.append(secret)
    return joined


def find_values(values: Iterable[str], text: str) -> Iterator[tuple[Span, str]]:
    """Yield the places of any of these values in a text, in one pass however many values there are: a search for each value would
    take time in proportion to their product."""
    needles = set(values)
    if not needles:
        return
    head = min(HEAD_CHARS, *map(len, needles))
    lengths: dict[str, set[int]] = {}
    for value in needles:
        lengths.setdefault(value[:head], set()).add(len(value))
    for at in range(len(text) - head + 1):
        for length in lengths.get(text[at : at + head], ()):
            value = text[at : at + length]
            if value in needles:
                yield (at, at + length), value


def _is_card(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others (Luhn)."""
    numbers = [int(digit) for digit in reversed(digits) if digit.isdigit()]
    doubled = (2 * number - 9 * (number > 4) for number in numbers[1::2])
    return (sum(numbers[::2]) + sum(doubled)) % 10 == 0


def screen(text: str, secrets: Secrets) -> tuple[str, list[Secret]]:
    """Return the text as it may be stored or shown to a model, and the secrets in it.

    Args:
        secrets: "refuse" raises if there is one; "redact" puts `[secret: RULE]` in its place; None does not look.

    Raises:
        SecretFound: there is a secret, and it is to be refused, or cannot be cut out.
        MissingExtra: betterleaks is not installed. SpecError: another value of `secrets`.
    """
    if secrets is None:
        return text, []
    if secrets not in ("refuse", "redact"):
        raise SpecError(f"secrets={secrets!r}"[:80], advice='give "refuse", "redact" or None')
    first: list[Secret] = []
    for _ in range(MAX_ROUNDS):
        hits = [secret for secret in find(text) if _MARK.sub("", text[slice(*secret.span)])]
        first = first or hits
        if not hits:
            return text, first
        if secrets == "refuse":
            break
        edges = [0, *(secret.span[1] for secret in hits)]
        marks = [f"{text[at : secret.span[0]]}[secret: {secret.rule}]" for at, secret in zip(edges, hits, strict=False)]
        text = "".join(marks) + text[edges[-1] :]
    raise SecretFound([secret.rule for secret in first])


def _scan(text: str) -> list[tuple[str, list[str]]]:
    """Return what betterleaks finds: each rule with the secret strings."""
    try:
        betterleaks = load("betterleaks")
    except ImportError as error:
        raise MissingExtra("betterleaks", "secrets") from error
    hits: dict[tuple[str, ...], None] = {}
    for start, stop in overlapping_pieces(text):
        with inside():
            findings = list(betterleaks.scan_string(text[start:stop]))
        for finding in findings:
            values = filter(None, _values(finding.component_sets))
            hits[(finding.rule_id, finding.secret or finding.match.full, *values)] = None
    return [(rule, values) for rule, *values in hits]


def overlapping_pieces(text: str) -> list[Span]:
    """Return a long text in pieces that overlap, cut at blanks where there are any: with what it finds in one line, the scanner's
    time grows as the square."""
    pieces = [(0, min(PIECE_CHARS, len(text)))]
    while pieces[-1][1] < len(text):
        last = pieces[-1][1]
        start, stop = (
            _blank_before(text, at) for at in (last - OVERLAP_CHARS, min(last - OVERLAP_CHARS + PIECE_CHARS, len(text)))
        )
        pieces.append((start, stop))
    return pieces


def _blank_before(text: str, at: int) -> int:
    """Return the place behind the last blank a little before a place, or that place."""
    return at if at == len(text) else max(text.rfind(blank, at - HEAD_CHARS * HEAD_CHARS, at) for blank in " \n") + 1 or at


def _values(parts: Any) -> Iterator[str]:
    """Yield the secrets among the parts of a finding: the key that belongs to an account's name."""
    if isinstance(parts, dict):
        if isinstance(parts.get("value"), str):
            yield parts["value"]
        parts = list(parts.values())
    if isinstance(parts, list):
        for part in parts:
            yield from _values(part)
