"""What a check of a store finds, and what it compares: the same for every backend, which reads the rows.

Nothing here changes anything, and nothing raises for damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import apsw
import msgspec

from kilburn.backends import citations
from kilburn.backends.chilling import Chilling
from kilburn.backends.passages import passages
from kilburn.backends.records import UNREADABLE, act_name, call_of, is_observation, seal_of
from kilburn.backends.sealed import PageRows, Seals, SegmentRow, shown
from kilburn.errors import KilburnError
from kilburn.page import Page, Place, Span


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Args:
        kind: "file" (SQLite's own check), "content" (missing or altered), "session" (its row), "page" (its row
            and its content disagree), "state" (of a page), "ledger" (holes, altered events or a wrong head),
            "index" (search would find too much or too little; who cites a page is not known; nor what names it, nor
            where a reply is), "checkpoint" (it
            is not what was written, or not what the ledger says), "citation" (of a page that
            is not there), "vector" (damaged, or of no passage), "cold" (an object of the cold place), "anchor" (the store is
            older than its anchor), or "orphan" (stored but used by nothing).
        what: in words, with the digest or address.
        derived: whether `repair` can put it right.
        segment: the segment's number, or 0. page: the page's id, or 0.
    """

    kind: str
    what: str
    derived: bool = False
    segment: int = 0
    page: int = 0


def gather(found: list[Finding], kind: str, check: Iterator[Finding], segment: int = 0) -> None:
    """Add what one check finds. If a check fails because of damage, that is a finding too."""
    try:
        found.extend(check)
    except (KilburnError, apsw.Error, *UNREADABLE) as error:
        what = error.what if isinstance(error, KilburnError) else f"it cannot be checked: {type(error).__name__}: {error}"
        found.append(Finding(kind=kind, what=what, segment=segment, derived=kind in ("index", "vector")))


def cold_findings(chilling: Chilling) -> list[Finding]:
    """Return what is wrong with the objects of the cold place, without reading them: the texts have been read already."""
    try:
        wrong = chilling.wrong(repair=False, read=False)
    except (KilburnError, apsw.Error) as error:
        return [Finding(kind="cold", what=f"the cold place cannot be checked: {error}")]
    return [Finding(kind="cold", what=what, derived=derived) for what, derived in wrong]


def of_page(what: str, pages: Sequence[Sequence[object]]) -> Finding:
    """A text that is damaged, with the first page that has it: its segment and its number."""
    segment, page = next(iter(pages), (0, 0))
    return Finding(kind="content", what=what, segment=_id(segment), page=_id(page))


def wrong_segments(segments: Iterable[SegmentRow]) -> Iterator[Finding]:
    """Their own rows."""
    for segment in segments:
        if segment.damaged and not segment.quarantined:
            what = f"session {segment.name!r}: {segment.damaged}"
            yield Finding(kind="session", what=what, segment=segment.number, derived="counters" in segment.damaged)


def wrong_setting(tenant: int, name: bytes, value: bytes, seal: object) -> Iterator[Finding]:
    """What is kept for a tenant as a whole."""
    if seal != seal_of("setting", tenant, name, value):
        yield Finding(kind="session", what=f"the setting {name!r} is not what was written; set it again")


def wrong_pages(
    segment: SegmentRow, each: PageRows, contents: Mapping[int, tuple[bytes | None, bytes | None]], there: Callable[[str], bool]
) -> Iterator[Finding]:
    """A session's pages, their states and the texts that they name.

    Args:
        contents: the digests of text and extra that the store has for each page.
        there: whether the store has a text of this digest.
    """

    def wrong(page: int, what: str, kind: str = "page", derived: bool = False) -> Finding:
        return Finding(kind=kind, what=f"{shown(page)}: {what}", derived=derived, segment=segment.number, page=_id(page))

    count = 0
    strays: list[Finding] = []
    for number, page, state in each:
        if isinstance(page, str):
            strays.append(wrong(number, page))
            continue
        count += 1
        if isinstance(state, str):
            yield wrong(number, state, "state", derived=True)
        for digest, found in zip((page.digest, page.extra), contents.get(number, (None, None)), strict=True):
            if digest != (found.hex() if found else ""):
                stored = found.hex() if found else "none"
                what = f"it names content {digest or 'none'}, the store has {stored}"
                yield wrong(number, what, derived=not digest or there(digest))
    if not segment.damaged and count == segment.pages:
        # All of the session's own rows are here. These came from elsewhere, and `repair` quarantines them.
        strays = [msgspec.structs.replace(one, derived=True) for one in strays]
    elif not segment.damaged and count + len(strays) != segment.pages:
        what = f"{count + len(strays)} pages are here where {segment.pages} were written"
        yield Finding(kind="page", what=what, segment=segment.number)
    yield from strays


def wrong_names(segment: SegmentRow, each: PageRows) -> Iterator[Finding]:
    """Of each name of a note, one page is in force."""
    named: dict[str | None, int] = {}
    for number, page, state in each:
        if isinstance(page, str) or isinstance(state, str) or state.at is not Place.OUT:
            continue
        first = named.setdefault(page.name, number)
        if page.name is None or first != number:
            both = f"{shown(first)} and {shown(number)} are both in force as the note {page.name!r}"
            what = f"{shown(number)} is in force without a name" if page.name is None else both
            yield Finding(kind="page", what=what, segment=segment.number, page=_id(number))


def _id(page: object) -> int:
    """The number of a page as a finding gives it: 0 where a damaged record gives none."""
    return page if isinstance(page, int) else 0


def wrong_events(
    seals: Seals, segment: SegmentRow, events: Iterable[tuple[int, bytes, bytes, object]], is_fork: Callable[[int], bool]
) -> Iterator[Finding]:
    """A session's ledger, given as number, act, body and seal of each event, in order.

    Args:
        is_fork: whether an event is the note of a branch that says which pages it inherited.
    """

    def wrong(what: str, derived: bool = False) -> Finding:
        return Finding(kind="ledger", what=what, derived=derived, segment=segment.number)

    expected = 1
    for number, act, body, seal in events:
        if not isinstance(number, int) or (not segment.damaged and number > segment.head):
            yield wrong(f"event {number!r} is behind the last one, {segment.head}", derived=True)
            continue
        if number != expected:
            yield wrong(
                f"event {expected} is missing" if number == expected + 1 else f"events {expected}-{number - 1} are missing"
            )
        expected = number + 1
        event = seals.event(segment.number, number, act, body, seal)
        if isinstance(event, str):
            yield wrong(f"event {number} ({act_name(act)}): {event}", derived=is_observation(act, body) and not is_fork(number))
    if not segment.damaged and expected <= segment.head:
        yield wrong(f"events {expected}-{segment.head} are missing")


class IndexedWords:
    """Compares the words in the index with those of the pages, by a checksum over each entry's words.

    Args:
        words_of: the words by which a passage with this text is found.
    """

    def __init__(self, words_of: Callable[[str], Iterable[str | bytes]]) -> None:
        self._words_of = words_of
        # The checksum of each entry; -1 where nobody knows.
        self._wanted: dict[int, int] = {}

    def wrong_passages(
        self, segment: int, page: int, text: str | None, entries: Sequence[tuple[int, int, int, int]]
    ) -> Iterator[Finding]:
        """The passages of a page.

        Args:
            text: None where it is damaged, which is reported as content.
            entries: number, page, start and stop of each, in reading order.
        """
        spans: list[tuple[int, Span]] | None = None if text is None else [(page, span) for span in passages(text)]
        if text is None or [(of, (start, stop)) for _, of, start, stop in entries] != spans:
            self._wanted.update({entry: -1 for entry, *_ in entries})
            if text is not None:
                what = f"{shown(page)} has not its passages"
                yield Finding(kind="index", what=what, derived=True, segment=segment, page=page)
            return
        for entry, _, start, stop in entries:
            self._wanted[entry] = sum(hash(word) for word in self._words_of(text[start:stop]))

    def wrong_entries(self, entries: Iterable[int], owners: AbstractSet[int]) -> Iterator[Finding]:
        """The passages that are there: each belongs to a page."""
        for entry in entries:
            if entry not in self._wanted:
                what = f"passage {entry & 0xFFFFFFFF} belongs to no page"
                yield Finding(kind="index", what=what, derived=True, segment=entry >> 32 if entry >> 32 in owners else 0)

    def wrong_words(
        self, postings: Iterable[tuple[str | bytes, int]], quarantined: AbstractSet[int] = frozenset()
    ) -> Iterator[Finding]:
        """The words of all entries.

        Args:
            quarantined: segments of which nothing is compared.
        """
        found: dict[int, int] = {}
        for word, entry in postings:
            found[entry] = found.get(entry, 0) + hash(word)
        for entry in sorted(self._wanted.keys() | found.keys()):
            if self._wanted.get(entry, 0) not in (found.get(entry, 0), -1) and entry >> 32 not in quarantined:
                what = f"the text index and the pages disagree about entry {entry & 0xFFFFFFFF}"
                yield Finding(kind="index", what=what, derived=True, segment=entry >> 32)


def wrong_citations(
    wanted: AbstractSet[citations.Citation],
    there: AbstractSet[citations.Citation],
    damaged: AbstractSet[int],
    content: Callable[[int, int], tuple[object] | None],
) -> Iterator[Finding]:
    """The index of citations, and what is cited.

    Args:
        wanted: what the pages cite. there: what the index says.
        damaged: segments of which nobody knows what they hold.
        content: what a page has for its text, None for nothing; None where there is no such page.
    """
    for segment, page, by, citer in sorted(wanted ^ there, key=repr):
        what = f"the index of citations and {shown(citer)} disagree about {shown(page)} of segment {segment}"
        if (segment, page) == (by, citer):
            whose = f"segment {segment}" if page == citations.WHOLE else f"{shown(page)} of segment {segment}"
            what = f"{whose} is being forgotten; if that has broken off, forget it again"
        yield Finding(kind="index", what=what, derived=True, segment=by, page=_id(citer))
    for segment, page, by, citer in sorted(wanted):
        if by == segment or segment in damaged:
            continue
        found = content(segment, page)
        if found is None or found[0] is None:
            what = f"it cites {shown(page)} of segment {segment}, which is {'forgotten' if found else 'not there'}"
            yield Finding(kind="citation", what=what, segment=by, page=citer)


def wrong_mentions(segment: SegmentRow, different: Iterable[tuple[int, int]], unread: AbstractSet[int]) -> Iterator[Finding]:
    """The index of mentions.

    Args:
        different: nodes and events that only one of ledger and index has.
        unread: events that cannot be read.
    """
    for number in sorted({event for _, event in different} - unread, key=repr):
        what = f"the index of mentions and event {number} disagree"
        yield Finding(kind="index", what=what, derived=True, segment=segment.number)


def wrong_replies(segment: SegmentRow, different: Iterable[Sequence[int | bytes]], unread: AbstractSet[int]) -> Iterator[Finding]:
    """The rows of replies in the index of histories.

    Args:
        different: rows that only one of ledger and index has: first the number of the note, below 0.
        unread: events that cannot be read.
    """
    for number in sorted({-at for at, *_ in different if isinstance(at, int)} - unread):
        what = f"the index of replies and event {number} disagree"
        yield Finding(kind="index", what=what, derived=True, segment=segment.number)


def wrong_calls(segment: SegmentRow, each: PageRows, calls: Mapping[object, object]) -> Iterator[Finding]:
    """The index of calls, by page."""
    for number, page, _ in each:
        if isinstance(page, Page) and calls.get(number) != call_of(page):
            what = "the index of calls does not have it as it is"
            yield Finding(kind="index", what=what, derived=True, segment=segment.number, page=_id(number))


def wrong_checkpoints(segment: SegmentRow, found: Iterable[Sequence[object]]) -> Iterator[Finding]:
    """A session's checkpoints, given as their last event, size, codec, data and seal."""
    for *values, seal in found:
        if seal != seal_of("checkpoint", segment.number, *values):
            what = f"the checkpoint of event {values[0]} is not what was written"
            yield Finding(kind="checkpoint", what=what, derived=True, segment=segment.number)
