"""The checks of a store, for every backend: each compares rows that the backend has read.

The checks change nothing, and never raise because of damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import apsw
import msgspec

from kilburn.backend import Finding
from kilburn.backends import citations
from kilburn.backends.chilling import Chilling
from kilburn.backends.passages import passages
from kilburn.backends.ranked import is_by_user
from kilburn.backends.records import UNREADABLE, act_name, compute_seal, is_observation, page_call_id
from kilburn.backends.sealed import PageRows, Seals, SegmentRow, shown
from kilburn.errors import KilburnError
from kilburn.page import Page, Place, Span


def gather(findings: list[Finding], kind: str, check: Iterator[Finding], segment: int = 0) -> None:
    """Add the findings of one check. A check that fails because of damage is a finding too."""
    try:
        findings.extend(check)
    except (KilburnError, apsw.Error, *UNREADABLE) as error:
        message = error.what if isinstance(error, KilburnError) else f"it cannot be checked: {type(error).__name__}: {error}"
        findings.append(Finding(kind=kind, what=message, segment=segment, derived=kind in ("index", "vector")))


def cold_findings(chilling: Chilling) -> list[Finding]:
    """Return what is wrong with the objects of the cold place, without reading them: the texts have been read already."""
    try:
        wrong = chilling.wrong(repair=False, read_objects=False)
    except (KilburnError, apsw.Error) as error:
        return [Finding(kind="cold", what=f"the cold place cannot be checked: {error}")]
    return [Finding(kind="cold", what=problem, derived=derived) for problem, derived in wrong]


def of_page(problem: str, pages: Sequence[Sequence[object]]) -> Finding:
    """Return the finding of a damaged text, with the first page that has it, given as segment and number."""
    segment, page = next(iter(pages), (0, 0))
    return Finding(kind="content", what=problem, segment=_id(segment), page=_id(page))


def wrong_segments(segments: Iterable[SegmentRow]) -> Iterator[Finding]:
    """Yield damaged rows of segments."""
    for segment in segments:
        if segment.damaged and not segment.quarantined:
            problem = f"session {segment.name!r}: {segment.damaged}"
            yield Finding(kind="session", what=problem, segment=segment.number, derived="counters" in segment.damaged)


def wrong_setting(tenant: int, name: bytes, value: bytes, seal: object) -> Iterator[Finding]:
    """Yield a damaged setting of a tenant."""
    if seal != compute_seal("setting", tenant, name, value):
        yield Finding(kind="session", what=f"the setting {name!r} is not what was written; set it again")


def wrong_pages(
    segment: SegmentRow,
    pages: PageRows,
    contents: Mapping[int, tuple[bytes | None, bytes | None]],
    has_text: Callable[[str], bool],
) -> Iterator[Finding]:
    """Yield what is wrong with a segment's pages, their states, and the texts that they name.

    Args:
        contents: the digests of text and extra that the store has for each page.
        has_text: whether the store has a text with a digest.
    """

    def wrong(page: int, problem: str, kind: str = "page", derived: bool = False) -> Finding:
        return Finding(kind=kind, what=f"{shown(page)}: {problem}", derived=derived, segment=segment.number, page=_id(page))

    count = 0
    strays: list[Finding] = []
    for number, page, state in pages:
        if isinstance(page, str):
            strays.append(wrong(number, page))
            continue
        count += 1
        if isinstance(state, str):
            yield wrong(number, state, "state", derived=True)
        for digest, stored_digest in zip((page.digest, page.extra), contents.get(number, (None, None)), strict=True):
            if digest != (stored_digest.hex() if stored_digest else ""):
                shown_digest = stored_digest.hex() if stored_digest else "none"
                mismatch = f"it names content {digest or 'none'}, the store has {shown_digest}"
                yield wrong(number, mismatch, derived=not digest or has_text(digest))
    if not segment.damaged and count == segment.pages:
        # All of the segment's own rows are present. These came from elsewhere, and a repair quarantines them.
        strays = [msgspec.structs.replace(finding, derived=True) for finding in strays]
    elif not segment.damaged and count + len(strays) != segment.pages:
        mismatch = f"{count + len(strays)} pages are here where {segment.pages} were written"
        yield Finding(kind="page", what=mismatch, segment=segment.number)
    yield from strays


def wrong_names(segment: SegmentRow, pages: PageRows) -> Iterator[Finding]:
    """Yield notes in force without a name, or with the name of another note in force."""
    numbers: dict[str | None, int] = {}
    for number, page, state in pages:
        if isinstance(page, str) or isinstance(state, str) or state.at is not Place.OUT:
            continue
        first = numbers.setdefault(page.name, number)
        if page.name is None or first != number:
            conflict = f"{shown(first)} and {shown(number)} are both in force as the note {page.name!r}"
            problem = f"{shown(number)} is in force without a name" if page.name is None else conflict
            yield Finding(kind="page", what=problem, segment=segment.number, page=_id(number))


def _id(page: object) -> int:
    """Return the id of a page for a finding; 0 if a damaged record has none."""
    return page if isinstance(page, int) else 0


def wrong_events(
    seals: Seals, segment: SegmentRow, events: Iterable[tuple[int, bytes, bytes, object]], is_fork: Callable[[int], bool]
) -> Iterator[Finding]:
    """Yield what is wrong with a ledger, given as number, act, body and seal of each event, in order.

    Args:
        is_fork: whether an event is a branch's note of the pages that it inherited.
    """

    def wrong(problem: str, derived: bool = False) -> Finding:
        return Finding(kind="ledger", what=problem, derived=derived, segment=segment.number)

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
    """Compares the index with the words of the pages, by a checksum of each entry's words.

    Args:
        words_of: returns the index words of a passage, given its text and whether it is the user's.
    """

    def __init__(self, words_of: Callable[[str, bool], Iterable[str | bytes]]) -> None:
        self._words_of = words_of
        # The expected checksum of each entry; -1 if it is unknown.
        self._wanted: dict[int, int] = {}

    def wrong_passages(
        self, segment: int, page: int, text: str | None, entries: Sequence[tuple[int, int, int, int]]
    ) -> Iterator[Finding]:
        """Yield a page whose passages do not fit its text.

        Args:
            text: None if it is damaged, which is reported as content.
            entries: number, page, start and stop of each, in reading order.
        """
        spans: list[tuple[int, Span]] | None = None if text is None else [(page, span) for span in passages(text)]
        if text is None or [(of, (start, stop)) for _, of, start, stop in entries] != spans:
            self._wanted.update({entry: -1 for entry, *_ in entries})
            if text is not None:
                problem = f"{shown(page)} does not have its passages"
                yield Finding(kind="index", what=problem, derived=True, segment=segment, page=page)
            return
        for entry, _, start, stop in entries:
            self._wanted[entry] = sum(hash(word) for word in self._words_of(text[start:stop], is_by_user(entry)))

    def wrong_entries(self, entries: Iterable[int], owners: AbstractSet[int]) -> Iterator[Finding]:
        """Yield stored passages that belong to no page."""
        for entry in entries:
            if entry not in self._wanted:
                problem = f"passage {entry & 0xFFFFFFFF} belongs to no page"
                yield Finding(kind="index", what=problem, derived=True, segment=entry >> 32 if entry >> 32 in owners else 0)

    def wrong_words(
        self, postings: Iterable[tuple[str | bytes, int]], quarantined: AbstractSet[int] = frozenset()
    ) -> Iterator[Finding]:
        """Yield entries whose words differ from their pages.

        Args:
            quarantined: segments to leave out.
        """
        checksums: dict[int, int] = {}
        for word, entry in postings:
            checksums[entry] = checksums.get(entry, 0) + hash(word)
        for entry in sorted(self._wanted.keys() | checksums.keys()):
            if self._wanted.get(entry, 0) not in (checksums.get(entry, 0), -1) and entry >> 32 not in quarantined:
                problem = f"the text index and the pages disagree about entry {entry & 0xFFFFFFFF}"
                yield Finding(kind="index", what=problem, derived=True, segment=entry >> 32)


def wrong_citations(
    expected: AbstractSet[citations.Citation],
    indexed: AbstractSet[citations.Citation],
    damaged: AbstractSet[int],
    content: Callable[[int, int], tuple[object] | None],
) -> Iterator[Finding]:
    """Yield differences between pages and index of citations, and citations of missing pages.

    Args:
        expected: the citations of the pages. indexed: those of the index.
        damaged: segments with unknown content.
        content: returns a page's content in a tuple, None for a forgotten page; None for a missing page.
    """
    for segment, page, by, citer in sorted(expected ^ indexed, key=repr):
        problem = f"the index of citations and {shown(citer)} disagree about {shown(page)} of segment {segment}"
        if (segment, page) == (by, citer):
            whose = f"segment {segment}" if page == citations.WHOLE else f"{shown(page)} of segment {segment}"
            problem = f"{whose} is being forgotten; if that was interrupted, forget it again"
        yield Finding(kind="index", what=problem, derived=True, segment=by, page=_id(citer))
    for segment, page, by, citer in sorted(expected):
        if by == segment or segment in damaged:
            continue
        cited = content(segment, page)
        if cited is None or cited[0] is None:
            problem = f"it cites {shown(page)} of segment {segment}, which is {'forgotten' if cited else 'not there'}"
            yield Finding(kind="citation", what=problem, segment=by, page=citer)


def wrong_mentions(segment: SegmentRow, different: Iterable[tuple[int, int]], unread: AbstractSet[int]) -> Iterator[Finding]:
    """Yield differences between ledger and index of mentions.

    Args:
        different: nodes and events that only one of them has.
        unread: events that cannot be read.
    """
    for number in sorted({event for _, event in different} - unread, key=repr):
        problem = f"the index of mentions and event {number} disagree"
        yield Finding(kind="index", what=problem, derived=True, segment=segment.number)


def wrong_replies(segment: SegmentRow, different: Iterable[Sequence[int | bytes]], unread: AbstractSet[int]) -> Iterator[Finding]:
    """Yield differences between ledger and rows of replies in the index of histories.

    Args:
        different: rows that only one of them has, each beginning with the negated number of the note.
        unread: events that cannot be read.
    """
    for number in sorted({-at for at, *_ in different if isinstance(at, int)} - unread):
        problem = f"the index of replies and event {number} disagree"
        yield Finding(kind="index", what=problem, derived=True, segment=segment.number)


def wrong_calls(segment: SegmentRow, pages: PageRows, calls: Mapping[object, object]) -> Iterator[Finding]:
    """Yield differences between pages and index of calls."""
    for number, page, _ in pages:
        if isinstance(page, Page) and calls.get(number) != page_call_id(page):
            problem = "the index of calls differs from it"
            yield Finding(kind="index", what=problem, derived=True, segment=segment.number, page=_id(number))


def wrong_checkpoints(segment: SegmentRow, checkpoints: Iterable[Sequence[object]]) -> Iterator[Finding]:
    """Yield damaged checkpoints, each given as last event, size, codec, data and seal."""
    for *values, seal in checkpoints:
        if seal != compute_seal("checkpoint", segment.number, *values):
            problem = f"the checkpoint of event {values[0]} is not what was written"
            yield Finding(kind="checkpoint", what=problem, derived=True, segment=segment.number)
