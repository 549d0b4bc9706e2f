"""The list of forgotten pages of a store, which is applied to an older backup to forget them there again.

It is kept away from the store. It has numbers and times, and no word, no name and no digest of a forgotten page.
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
"""Segments by which a list is matched to its store, at most."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Is the forgotten part of a segment.

    Args:
        segment: the segment's number. pages: addresses, in ranges; empty if the whole segment is forgotten.
    """

    segment: int
    pages: tuple[str, ...] = ()


class ForgottenList(msgspec.Struct, frozen=True, kw_only=True):
    """Is the list of the forgotten pages of a tenant.

    Args:
        time: seconds since the epoch at which the list was made.
        gone: forgotten parts, in the order of the segments' numbers.
        made: creation times of segments that exist, by their numbers; they identify the store.
        check: the SHA-256 of the other fields, which shows damage; "" in a list that somebody changed on purpose.
    """

    time: float
    gone: tuple[Gone, ...]
    made: dict[int, float]
    check: str = ""


def _compute_check(forgotten_list: ForgottenList) -> str:
    return hashlib.sha256(
        msgspec.json.encode([forgotten_list.time, forgotten_list.gone, sorted(forgotten_list.made.items())])
    ).hexdigest()


def listed(backend: Backend, time: float) -> ForgottenList:
    """Return the list of a store's forgotten pages. Damaged segments are left out."""
    forgotten, creation_times = list[Gone](), dict[int, float]()
    for info in backend.segments():
        if info.kind is SegmentKind.FORGOTTEN:
            forgotten.append(Gone(segment=info.number))
        elif not info.damaged:
            pages = backend.forgotten(info.number)
            if pages:
                forgotten.append(Gone(segment=info.number, pages=ranges(pages)))
            if pages or len(creation_times) < WITNESSES:
                creation_times[info.number] = info.created
    forgotten_list = ForgottenList(time=time, gone=tuple(forgotten), made=creation_times)
    return msgspec.structs.replace(forgotten_list, check=_compute_check(forgotten_list))


def read_list(data: bytes) -> ForgottenList:
    """Read a list.

    Raises:
        SpecError: this is no list, or it was changed since it was written.
    """
    try:
        forgotten_list = msgspec.json.decode(data, type=ForgottenList)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpecError(f"this is no list of what is forgotten: {error}", advice="`kilburn forget --list` writes one") from error
    if forgotten_list.check not in ("", _compute_check(forgotten_list)):
        raise SpecError(
            "this list is not what was written: it is damaged, or somebody changed it",
            advice='give another copy; whoever took a line out on purpose takes out that of "check", too',
        )
    return forgotten_list


def to_forget_again(backend: Backend, forgotten_list: ForgottenList) -> tuple[dict[int, list[int]], list[SegmentInfo]]:
    """Return the pages of a list that are not forgotten here, by their segments, and such segments as a whole. A page or segment
    that is younger than the list has the number of a forgotten one by chance, and stays.

    Raises:
        SpecError: the list belongs to another store.
    """
    segments = {info.number: info for info in backend.segments() if info.kind is not SegmentKind.FORGOTTEN and not info.damaged}
    older = {number: info for number, info in segments.items() if info.created <= forgotten_list.time}
    agree = {number: older[number].created == created for number, created in forgotten_list.made.items() if number in older}
    roots, whole = dict[int, list[int]](), list[SegmentInfo]()
    for entry in forgotten_list.gone:
        info = older.get(entry.segment)
        if info is None:
            continue
        if not entry.pages:
            whole.append(info)
            continue
        page_ids = sorted(page.id for page, _ in backend.pages(info.number) if page.time <= forgotten_list.time)
        remaining = sorted(_among(page_ids, entry.pages) - set(backend.forgotten(info.number)))
        if remaining:
            roots[info.number] = remaining
    if not all(agree.values()) or ((roots or whole) and not agree):
        raise SpecError(
            "nothing says that this list is of this store" if not agree else "this list is of another store",
            advice="give the one that was written of it, and its --tenant; or forget by name",
        )
    return roots, whole


def _among(pages: Sequence[int], addresses: Sequence[str]) -> set[int]:
    """Return those of `pages`, which are sorted, that addresses name."""
    hits = set[int]()
    for address in addresses:
        first, last = parse_address(address)
        hits.update(pages[bisect_left(pages, first) : bisect_right(pages, last)])
    return hits
