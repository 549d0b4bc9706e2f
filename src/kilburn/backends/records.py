"""The stored form of pages and events: msgpack with long lists of page ids as stretches, under a seal.

A fold that is remade every few steps cites the whole session each time. With single numbers, the file would grow with the square
of the session's length.

A seal is a checksum of a row and its place, so that an altered, swapped or moved row is detected when it is read. It guards
against damage, and with a key against attackers: see `compute_seal`. A record that could not be decoded again is not written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any, cast

import msgspec

from kilburn.errors import StoreError
from kilburn.event import STATE, Act, Data, Event
from kilburn.message import Kind
from kilburn.page import Page, expanded, stretches

UNREADABLE = (msgspec.MsgspecError, UnicodeError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors of decoding a damaged record, and of encoding an impossible one."""

MAX_PLAIN_IDS = 32
"""Longer lists of ids are stored as stretches."""

LISTS = frozenset({"to", "cover", "uncover"})
"""Keys of an event's data whose values may be long lists of page ids."""

RUNS = "runs"
"""The key of the stretches that replace such a list."""

MAX_IDS = 10_000_000
"""Bound on the ids in a record: a damaged record must not fill the memory."""

MAX_TOKENS = 1 << 48
"""Bound on the tokens of one page: sums of them must fit SQLite's integers."""

_encode = msgspec.msgpack.Encoder().encode
_pages = msgspec.msgpack.Decoder(Page)
_events = msgspec.msgpack.Decoder(Event)


class _Runs(msgspec.Struct):
    """Replaces the ids of a record: first and last of each stretch, one after the other."""

    runs: tuple[int, ...] = ()


class _Page(Page, frozen=True, kw_only=True):
    runs: tuple[int, ...] = ()


class _Event(Event, frozen=True, kw_only=True, omit_defaults=True):
    runs: tuple[int, ...] = ()


_runs = msgspec.msgpack.Decoder(_Runs)


Memo = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Cache of stretches by the identity of a list: a fold's page and its event have the same list."""


_SEAL_KEY = blake2b(os.fsencode(os.environ["KILBURN_SEAL_KEY"])).digest() if os.environ.get("KILBURN_SEAL_KEY") else b""


def compute_seal(*values: object) -> bytes:
    """Return the checksum of a row's values, their order and types included. Texts are given as bytes.

    With `$KILBURN_SEAL_KEY` it is keyed: without the key nobody can change a row undetected.
    """
    return blake2b(_encode(values), digest_size=8, key=_SEAL_KEY).digest()


def record_of_page(page: Page, memo: Memo | None = None) -> bytes:
    """Return the stored bytes of a page.

    Raises:
        StoreError: they could not be decoded again.
    """
    try:
        runs = _stretches(page.sources, memo) if len(page.sources) > MAX_PLAIN_IDS else ()
        record = _encode(_Page(**{**_fields(page), "sources": (), "runs": runs}) if runs else page)
        decoded = _pages.decode(record)
    except UNREADABLE as error:
        raise StoreError(
            f"page {page.id} could not be read again: {error}", advice="give its fields the types of Page"
        ) from error
    same = (msgspec.structs.replace(decoded, sources=page.sources) if runs else decoded) == page
    if not same or not math.isfinite(page.time) or not 0 <= page.tokens <= MAX_TOKENS:
        raise StoreError(f"page {page.id} could not be read again as it is", advice="give its fields the types of Page")
    return record


def record_of_event(event: Event, memo: Memo | None = None) -> bytes:
    """Return the stored bytes of an event.

    Raises:
        StoreError: they could not be decoded again.
    """
    try:
        runs = _stretches(event.pages, memo) if len(event.pages) > MAX_PLAIN_IDS else ()
        data = event.data
        if event.act in STATE and not data.keys().isdisjoint(LISTS):
            data = cast(Data, {key: _as_stretches(value) if key in LISTS else value for key, value in data.items()})
        if runs:
            record = _encode(_Event(**{**_fields(event), "pages": (), "runs": runs, "data": data}))
        else:
            record = _encode(event if data is event.data else msgspec.structs.replace(event, data=data))
        decoded = _events.decode(record)
    except UNREADABLE as error:
        raise StoreError(
            f"event {event.number} could not be read again: {error}", advice="give its fields the types of Event"
        ) from error
    if not math.isfinite(decoded.time):
        raise StoreError(f"event {event.number} has the time {decoded.time}", advice="give seconds since the epoch")
    return record


def decode_page(record: bytes) -> Page:
    """Return the page of a record.

    Raises:
        msgspec.DecodeError: it is not a page.
    """
    page = _pages.decode(record)
    if page.depth and not page.sources and b"runs" in record:
        return msgspec.structs.replace(page, sources=_ids(record))
    return page


def decode_event(record: bytes) -> Event:
    """Return the event of a record.

    Raises:
        msgspec.DecodeError: it is not an event.
    """
    event = _events.decode(record)
    if event.act in STATE and not event.data.keys().isdisjoint(LISTS):
        data = {key: _as_ids(value) if key in LISTS else value for key, value in event.data.items()}
        event = msgspec.structs.replace(event, data=cast(Data, data))
    if not event.pages and b"runs" in record:
        return msgspec.structs.replace(event, pages=_ids(record))
    return event


def _fields(record: Page | Event) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _stretches(ids: tuple[int, ...], memo: Memo | None) -> tuple[int, ...]:
    """Return first and last id of each stretch of consecutive ids; empty if that would save little, or the ids are not in
    order."""
    cached = memo.get(id(ids)) if memo is not None else None
    if cached is None:
        cached = (ids, _find_stretches(ids))
        if memo is not None:
            memo[id(ids)] = cached
    return cached[1]


def _find_stretches(ids: Sequence[int]) -> tuple[int, ...]:
    runs = stretches(ids, len(ids) // 2)
    # The search assumes that the ids ascend.
    return tuple(runs) if 2 * len(runs) <= len(ids) and expanded(runs) == tuple(ids) else ()


def _ids(record: bytes) -> tuple[int, ...]:
    return _checked(_runs.decode(record).runs)


def _checked(runs: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of stored stretches.

    Raises:
        msgspec.ValidationError: they contradict themselves.
    """
    lengths = [last - first + 1 for first, last in zip(runs[::2], runs[1::2], strict=False)]
    if len(runs) % 2 or min(lengths, default=1) < 1 or sum(lengths) > MAX_IDS:
        raise msgspec.ValidationError("the stretches of page ids contradict themselves")
    return expanded(runs)


def _as_stretches(value: Any) -> Any:
    """Return a value of an event's data with stretches in place of its long lists of page ids."""
    if isinstance(value, dict):
        return {key: _as_stretches(ids) for key, ids in value.items()}
    if not isinstance(value, list | tuple) or len(value) <= MAX_PLAIN_IDS or set(map(type, value)) != {int}:
        return value
    runs = _find_stretches(value)
    return {RUNS: runs} if runs else value


def _as_ids(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return list(_checked(value[RUNS])) if RUNS in value else {key: _as_ids(ids) for key, ids in value.items()}


MIN_WORD_CHARS = 6
"""Minimum length of a word that identifies a page."""


def telling_words(page: Page) -> set[str]:
    """Return words by which an event's data might quote a page. Very short words would match other text too, and are left
    out."""
    return {word for word in (page.digest, page.extra, page.label, page.call) if word and len(word) >= MIN_WORD_CHARS}


class Quotations:
    """Finds telling words in texts, in time independent of their number."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words: dict[str, list[str]] = {}
        for word in words:
            self._words.setdefault(word[:MIN_WORD_CHARS], []).append(word)

    def are_in(self, text: str) -> bool:
        """Return whether a text contains one of the words."""
        beginnings = ((at, text[at : at + MIN_WORD_CHARS]) for at in range(len(text) - MIN_WORD_CHARS + 1))
        return any(text.startswith(word, at) for at, letters in beginnings for word in self._words.get(letters, ()))


def concerns(event: Event, pages: AbstractSet[int]) -> bool:
    """Whether an event may quote one of these pages: it is about the page, or names it as the successor of another."""
    by = event.data.get("by")
    return not pages.isdisjoint(event.pages) or (isinstance(by, int) and by in pages)


def scrub(event: Event, words: Quotations) -> Event:
    """Return the event without its reason, and without values in its data that contain one of these words. The keys are
    Kilburn's own and stay. The reason of a person who forgets stays too, unless it contains one of the words."""
    why = _blank(event.why, words) if event.act is Act.DROP else ""
    # Thousands of page ids contain no words.
    ids = LISTS if event.act in STATE else frozenset()
    data = {key: value if key in ids else _blank(value, words) for key, value in event.data.items()}
    return msgspec.structs.replace(event, why=why, data=data)


def _blank(value: object, words: Quotations) -> object:
    if isinstance(value, str):
        return "" if words.are_in(value) else value
    if isinstance(value, dict):
        return {key: _blank(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(item, words) for item in value]
    return value


OBSERVATIONS = frozenset(act.value.encode() for act in Act if act not in STATE)


def is_observation(act: bytes, body: bytes) -> bool:
    """Whether a damaged event changed no state, according to its column and, if readable, its record."""
    try:
        return act in OBSERVATIONS and decode_event(body).act not in STATE
    except UNREADABLE:
        return act in OBSERVATIONS


def act_name(act: object) -> str:
    """Return the act of a damaged event, for messages."""
    return act.decode("ascii", "replace") if isinstance(act, bytes) else "?"


def page_call_id(page: Page) -> str | None:
    """Return the call id of a page that is a call, or None."""
    return page.call if page.kind is Kind.CALL else None
