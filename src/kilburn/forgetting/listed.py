"""The list of what a store has forgotten, with which it is forgotten again in a backup that is older.

It is kept where the store is not. It has numbers and times, and no word, no name and no digest of what was forgotten.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.errors import SpecError
from kilburn.kernel.receipts import ranges
from kilburn.page import parse_address

WITNESSES = 1000
"""Segments that tell a list of this store from that of another, at most."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is forgotten of one segment.

    Args:
        segment: its number. pages: their addresses, in ranges; none if all of it is forgotten.
    """

    segment: int
    pages: tuple[str, ...] = ()


class ForgottenList(msgspec.Struct, frozen=True, kw_only=True):
    """What is forgotten in a tenant's store.

    Args:
        time: when it was listed, in seconds since the epoch.
        gone: by the numbers of the segments.
        made: segments that are still there, by their numbers, and when each was made: by these the store is known.
        check: the SHA-256 of the others, by which damage is noticed; "" in a list that somebody changed on purpose.
    """

    time: float
    gone: tuple[Gone, ...]
    made: dict[int, float]
    check: str = ""


def _check_of(known: ForgottenList) -> str:
    return hashlib.sha256(msgspec.json.encode([known.time, known.gone, sorted(known.made.items())])).hexdigest()


def listed(backend: Backend, time: float) -> ForgottenList:
    """What is forgotten in a store by now. Segments that are damaged are left out."""
    gone, made = list[Gone](), dict[int, float]()
    for info in backend.segments():
        if info.kind is SegmentKind.FORGOTTEN:
            gone.append(Gone(segment=info.number))
        elif not info.damaged:
            pages = backend.forgotten(info.number)
            if pages:
                gone.append(Gone(segment=info.number, pages=ranges(pages)))
            if pages or len(made) < WITNESSES:
                made[info.number] = info.created
    known = ForgottenList(time=time, gone=tuple(gone), made=made)
    return msgspec.structs.replace(known, check=_check_of(known))


def read_list(data: bytes) -> ForgottenList:
    """A list as it was written.

    Raises:
        SpecError: it is none, or it is not what was written.
    """
    try:
        known = msgspec.json.decode(data, type=ForgottenList)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpecError(f"this is no list of what is forgotten: {error}", advice="`kilburn forget --list` writes one") from error
    if known.check not in ("", _check_of(known)):
        raise SpecError(
            "this list is not what was written: it is damaged, or somebody changed it",
            advice='give another copy; whoever took a line out on purpose takes out that of "check", too',
        )
    return known


def to_forget_again(backend: Backend, known: ForgottenList) -> tuple[dict[int, list[int]], list[SegmentInfo]]:
    """What of a list is not forgotten here: pages, by their segments, and segments as a whole. What is younger than the list is
    something else under the same number, and stays.

    Raises:
        SpecError: the list is of another store.
    """
    here = {info.number: info for info in backend.segments() if info.kind is not SegmentKind.FORGOTTEN and not info.damaged}
    older = {number: info for number, info in here.items() if info.created <= known.time}
    agree = {number: older[number].created == made for number, made in known.made.items() if number in older}
    roots, whole = dict[int, list[int]](), list[SegmentInfo]()
    for each in known.gone:
        info = older.get(each.segment)
        if info is None:
            continue
        if not each.pages:
            whole.append(info)
            continue
        there = sorted(page.id for page, _ in backend.pages(info.number) if page.time <= known.time)
        left = sorted(_among(there, each.pages) - set(backend.forgotten(info.number)))
        if left:
            roots[info.number] = left
    if not all(agree.values()) or ((roots or whole) and not agree):
        raise SpecError(
            "nothing says that this list is of this store" if not agree else "this list is of another store",
            advice="give the one that was written of it, and its --tenant; or forget by name",
        )
    return roots, whole


def _among(pages: Sequence[int], addresses: Sequence[str]) -> set[int]:
    """Those of some pages, in order, that addresses name."""
    found = set[int]()
    for address in addresses:
        first, last = parse_address(address)
        found.update(pages[bisect_left(pages, first) : bisect_right(pages, last)])
    return found
