"""Pages, the immutable units that all levels move, and their addresses.

A page says what it is and what it costs. Where it is, the window knows; its text is in the store. So ten thousand
pages fit in a few megabytes.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from kilburn.errors import UnknownAddress
from kilburn.message import Kind, Role, Trust

__all__ = ["Claim", "Page"]

Span = tuple[int, int]
"""Half-open range of characters of a page's text."""


Parts = tuple[tuple[int, tuple[Span, ...]], ...]
"""Kept spans of several pages: (page id, its spans), in order."""

OMITTED = "…"
"""Stands where text was left out between kept spans, on a line of its own."""


class Place(StrEnum):
    """Where a page is."""

    IN = "in"
    """Resident: in the window, whole."""
    STUB = "stub"
    """Below; a handle stands in its place, because its call is in the window."""
    OUT = "out"
    """Below, behind the handle of a gap."""
    FOLDED = "folded"
    """Below; a fold that is in the window stands for it."""
    RETIRED = "retired"
    """Below and superseded: readable by address, not found by search."""
    PROPOSED = "proposed"
    """Below, in quarantine: written after an untrusted text was read. No search finds it until a person accepts it."""
    DROPPED = "dropped"
    """Forgotten; only its number is left."""


ATOMIC = frozenset({Kind.IMAGE, Kind.OPAQUE})
"""Kinds of pages that are in the prompt whole or not at all."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a fact says, in three parts: "Ana", "lives in", "Porto". Of an entity: its name as `subject`, the rest empty.

    Two facts with the same subject and relation speak of the same thing, so they may contradict each other.

    Args:
        confidence: of whoever extracted it, 0 to 1.
        correction: whether the speaker explicitly corrected an earlier statement.
        many: whether the relation may have several objects at a time ("likes"); else a new object supersedes the old one.
    """

    subject: str
    relation: str = ""
    object: str = ""
    confidence: float = 1.0
    correction: bool = False
    many: bool = False


class Page(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One immutable unit of context: one message part, or something derived from parts.

    `id` counts originals up from 1 (address `p1`) and derived pages down from -1 (address `f1`), so a range `p17-p42`
    is always a stretch of the transcript, whatever was folded since.

    Args:
        digest: SHA-256 of the text in UTF-8, hex.
        extra: SHA-256 of the wire form's leftovers (see `Part.extra`), or "".
        message: number of the message within its session, from 1; parts of one message share it.
        answers: for a result, and for what is attached to it, the id of the call's page; else 0.
        group: pages that move together share it (a call and its result); 0 for none.
        name: of a call, its tool; of a note, what it is called; else None.
        tokens: what it costs when it is resident and whole, with its share of the message's envelope.
        time: seconds since the epoch, from the kernel's clock.
        sources: ids of the pages that it was made from; empty for originals, but for those that quote recalled pages.
        spans: for an EXCERPT of one source, its kept spans.
        parts: for an EXCERPT of several sources, the kept spans of each source that has any.
        depth: 0 for originals, 1 for what is made from originals, and so on.
        order: where it stands in the window: (id of an original, rank). Originals are (id, 0).
        label: one line on what it is, for handles; at most 60 characters (`kernel.admission.LABEL`).
        cites: sources in other segments of the tenant: (number of the segment, page id).
        since: from when what it says is true, in seconds since the epoch; None for `time`.
        until: when it stops being true, if that was known when it was written; `State.until` may close it earlier.
        claim: what a fact or an entity says, in parts; None for any other page.
        speaker: the name of who said it, if its message gave one (`name` in OpenAI's form); else None.
    """

    id: int
    digest: str
    kind: Kind
    role: Role
    message: int
    tokens: int
    time: float
    trust: Trust
    extra: str = ""
    group: int = 0
    answers: int = 0
    call: str | None = None
    name: str | None = None
    sources: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    parts: Parts = ()
    depth: int = 0
    order: tuple[int, int] = (0, 0)
    label: str = ""
    cites: tuple[tuple[int, int], ...] = ()
    since: float | None = None
    until: float | None = None
    claim: Claim | None = None
    speaker: str | None = None

    @property
    def address(self) -> str:
        """`p17` for an original, `f3` for a derived page."""
        return address_of(self.id)

    @property
    def is_atomic(self) -> bool:
        """Whether it is in the prompt whole or not at all: an image, or a provider's block such as a document or a ciphertext."""
        return self.kind in ATOMIC

    @property
    def is_by_user(self) -> bool:
        """Whether this is a text of the user."""
        return self.role is Role.USER and self.kind is Kind.TEXT and self.trust >= Trust.USER

    @property
    def is_blank(self) -> bool:
        """Whether it is a text without a visible character; also of a forgotten page."""
        return self.kind is Kind.TEXT and (self.label == BLANK if not self.digest else not self.label)


BLANK = " "
"""Label of a blank text that is forgotten; any other forgotten page has none."""


def make_tombstone(page: Page) -> Page:
    """Return the remains of a forgotten page: its number, place and cost, and whether it was blank; none of its text."""
    label = BLANK if page.is_blank else ""
    return msgspec.structs.replace(
        page,
        digest="",
        extra="",
        call=None,
        name=None,
        label=label,
        spans=(),
        parts=(),
        cites=(),
        since=None,
        until=None,
        claim=None,
        speaker=None,
    )


def searchable(text: str, extra: str) -> str:
    """Return what a page is found by: its text, or the words that its leftovers hold in place of a text with media in it.

    Args:
        extra: the leftovers, as stored; "" for none.
    """
    return searchable_words(extra) if '"words":' in extra else text


def searchable_words(extra: str) -> str:
    """Return the words in a page's leftovers, or "". Only a provider's block has them: its label, its text, that of its PDFs."""
    # In the leftovers of a message, which are JSON in JSON, the quotation marks are escaped.
    return str(msgspec.json.decode(extra)["words"]) if '"words":' in extra else ""


def digest_of(text: str) -> str:
    """SHA-256 of the text in UTF-8, as hex: the content's name in every store and export."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def address_of(page: int) -> str:
    """The short address of a page id: 17 is `p17`, -3 is `f3`."""
    return f"p{page}" if page > 0 else f"f{-page}"


def span_of(first: int, last: int) -> str:
    """The address of a stretch of originals: `p17`, or `p17-p42`."""
    return f"p{first}" if first == last else f"p{first}-p{last}"


def stretches(ids: Sequence[int], limit: int | None = None) -> list[int]:
    """First and last of each stretch of consecutive ids, one after the other. The ids ascend.

    Args:
        limit: numbers that the result may have; with more it is cut off.
    """
    runs: list[int] = []
    start = 0
    while start < len(ids) and (limit is None or len(runs) <= limit):
        offset = ids[start] - start
        end = bisect_right(range(len(ids)), offset, lo=start, key=lambda at: ids[at] - at)
        runs += (ids[start], ids[end - 1])
        start = end
    return runs


def expanded(runs: Sequence[int]) -> tuple[int, ...]:
    """The ids of `stretches`."""
    return tuple(chain.from_iterable(range(first, last + 1) for first, last in zip(runs[::2], runs[1::2], strict=True)))


_ADDRESS = re.compile(
    r"\s*(?:p([1-9]\d{0,17})(?:\s*(?:-|\.\.|–)\s*p?([1-9]\d{0,17}))?|f([1-9]\d{0,17}))\s*\Z", re.ASCII | re.IGNORECASE
)


def parse_address(address: str) -> tuple[int, int]:
    """First and last page id of an address: `p17` is (17, 17), `p17-p42` (17, 42), `f3` (-3, -3).

    Raises:
        UnknownAddress: not an address, or a range that runs backwards.
    """
    match = _ADDRESS.match(address) if isinstance(address, str) else None
    if match is None:
        raise UnknownAddress(f"{str(address)[:80]!r} is not an address", advice="use p17, a range p17-p42, or f3")
    first, last, fold = match.groups()
    if fold is not None:
        return -int(fold), -int(fold)
    low, high = int(first), int(last or first)
    if high < low:
        raise UnknownAddress(f"the range {address!r} runs backwards", advice=f"use p{high}-p{low}")
    return low, high
