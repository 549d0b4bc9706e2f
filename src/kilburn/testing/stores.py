"""The conformance kit of stores: `check_store(make)` holds any implementation to the contract.

It uses only the methods of `kilburn.backend.Backend` and its parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from kilburn.backend import Backend, Batch, Digests, HistoryOwner, SegmentInfo, SegmentKind, State
from kilburn.errors import Forgotten, KilburnError, SpecError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale
from kilburn.event import Act, Data, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Claim, Page, Place, digest_of


def page_of(number: int, text: str, *, extra: str = "", label: str = "", call: str | None = None) -> Page:
    """Return a plain page with this id and text."""
    return Page(
        id=number,
        digest=digest_of(text),
        extra=digest_of(extra) if extra else "",
        kind=Kind.TEXT,
        role=Role.USER,
        message=abs(number),
        tokens=1 + len(text) // 4,
        time=float(abs(number)),
        trust=Trust.USER,
        order=(abs(number), 0),
        label=label,
        call=call,
    )


def _others(**words: Any) -> Data:
    """Return event data under foreign keys."""
    return cast(Data, words)


def batch_of(
    head: int,
    texts: Mapping[int, str],
    *,
    index: Iterable[int] | None = None,
    states: Mapping[int, State] | None = None,
    events: int = 1,
) -> Batch:
    """Return a batch that admits pages with these texts by id, with `events` events after `head`, the first of which names the
    pages. All pages are indexed unless `index` lists some."""
    new_pages = [page_of(number, text) for number, text in texts.items()]
    return Batch(
        head=head,
        events=[
            Event(number=head + 1 + at, act=Act.ADMIT, time=float(head + 1 + at), pages=pages, data=_others(at=at))
            for at, pages in enumerate([tuple(texts)] + [()] * (events - 1) if events else [])
        ],
        pages=new_pages,
        texts={page.digest: text for page, text in zip(new_pages, texts.values(), strict=True)},
        states=states or {},
        index=list(texts if index is None else index),
    )


def check_store(make: Callable[[], Backend]) -> None:
    """Run every check, each on a fresh, empty store from `make`.

    Raises:
        AssertionError: the store breaks a promise; a note has the check's name.
    """
    for check in CHECKS:
        backend = make()
        try:
            check(backend)
        except AssertionError as error:
            error.add_note(f"check_store: {check.__name__}: {(check.__doc__ or '').strip()}")
            raise
        finally:
            backend.close()


def segment_info(backend: Backend, name: str = "session", **fields: Any) -> SegmentInfo:
    """Return the segment of a name, which is created if needed, at second 1."""
    info = backend.segment(name, **{"time": 1.0, **fields})
    assert info is not None
    return info


def start(backend: Backend, name: str = "session") -> int:
    """Create a segment and return its number."""
    return segment_info(backend, name).number


def raises(kind: type[KilburnError], do: Callable[[], object]) -> None:
    """Assert that `do` raises this error."""
    try:
        do()
    except kind:
        return
    raise AssertionError(f"nothing raised {kind.__name__}")


def snapshot(backend: Backend, segment: int) -> tuple[object, ...]:
    """Return the visible state of a segment."""
    return (
        list(backend.pages(segment)),
        list(backend.events(segment)),
        [info for info in backend.segments() if info.number == segment],
    )


def found(backend: Backend, query: str, segment: int | None = None) -> set[int]:
    """Return the pages that a search finds."""
    return {hit.page for hit in backend.words.search(query, segments=None if segment is None else [segment], limit=1000)}


def check_is_store(backend: Backend) -> None:
    """The store has the methods and parts of the protocol."""
    assert isinstance(backend, Backend)


def check_segments(backend: Backend) -> None:
    """A segment is created once and only on request, found by name, and listed oldest first."""
    assert backend.segment("one", time=5.0, create=False) is None
    first = segment_info(backend, "one", time=5.0)
    second = backend.segment("two", time=6.0)
    assert (first.name, first.created, first.head, first.pages) == ("one", 5.0, 0, 0)
    assert backend.segment("one", time=9.0) == first
    assert list(backend.segments()) == [first, second]
    for name in ("one/b2", "one0", "one/", "one/b1/b1", "ones/b1", "one-b1", "On\u00e9/x"):
        backend.segment(name, time=7.0)
    assert [info.name for info in backend.segments("one")] == ["one/b2", "one/", "one/b1/b1"]
    assert [info.name for info in backend.segments("On\u00e9")] == ["On\u00e9/x"]
    assert not backend.segments("two")


def check_scopes(backend: Backend) -> None:
    """A scope has the current segments of some kinds that belong to a user or to all users."""
    for number, (name, kind, user) in enumerate(
        [
            ("one", SegmentKind.SESSION, ""),
            ("ana's", SegmentKind.SESSION, "ana"),
            ("ben's", SegmentKind.SESSION, "ben"),
            ("known", SegmentKind.MEMORY, "ana"),
        ]
    ):
        backend.segment(name, time=float(number), kind=kind, user=user)
    every = backend.scope(tuple(SegmentKind))
    assert ([info.name for info in every.infos.values()], every.everything) == (["one", "ana's", "ben's", "known"], True)
    hers = backend.scope([SegmentKind.SESSION], "ana")
    assert ([info.name for info in hers.infos.values()], hers.everything) == (["one", "ana's"], False)
    (segment, *_) = backend.segments()
    backend.commit(segment.number, batch_of(0, {1: "alpha"}))
    later = segment_info(backend, "later", time=9.0)
    hers = backend.scope([SegmentKind.SESSION], "ana")
    assert [info.name for info in hers.infos.values()] == ["one", "ana's", "later"]
    assert (hers.infos[segment.number].head, hers.infos[later.number], hers.damaged) == (1, later, ())


def check_round_trip(backend: Backend) -> None:
    """Pages, states, events and texts are read as written; originals first."""
    segment = start(backend)
    texts = {1: "alpha", 2: "", 3: "NUL \0 and \x07, é, 日本, \U0001f600\r\n", 10: "x" * 100_000, -1: "fold one", -2: "fold two"}
    states = {1: State(Place.IN, True, 0.25), -1: State(Place.FOLDED, False, -3.5)}
    batch = batch_of(0, texts, states=states, events=3)
    backend.commit(segment, batch)
    pages = list(backend.pages(segment))
    assert [page.id for page, _ in pages] == [1, 2, 3, 10, -1, -2]
    assert {page.id: page for page, _ in pages} == {page.id: page for page in batch.pages}
    assert {page.id: state for page, state in pages} == {number: states.get(number, State()) for number in texts}
    assert list(backend.events(segment)) == list(batch.events)
    assert list(backend.events(segment, 2)) == list(batch.events[2:])
    assert list(backend.events(segment, 3)) == []
    assert backend.contents.texts(page.digest for page in batch.pages) == dict(batch.texts)
    info = segment_info(backend, "session", time=0.0, create=False)
    assert (info.head, info.pages, info.tokens, info.used) == (3, 6, sum(page.tokens for page in batch.pages), 3.0)


def check_states(backend: Backend) -> None:
    """A later batch changes states of pages, and leaves other states."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "a", 2: "b"}, states={1: State(Place.IN)}))
    backend.commit(segment, Batch(head=1, states={1: State(Place.OUT), 2: State(Place.IN, True, 2.0)}))
    assert [state for _, state in backend.pages(segment)] == [State(Place.OUT), State(Place.IN, True, 2.0)]


def check_stale(backend: Backend) -> None:
    """A writer that does not know the last event, or knows another one with its number, is refused, and nothing changes."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "a"}))
    state = snapshot(backend, segment)
    raises(StoreStale, lambda: backend.commit(segment, batch_of(0, {2: "b"})))
    raises(StoreStale, lambda: backend.commit(segment, batch_of(7, {2: "b"})))
    batch = msgspec.structs.replace(batch_of(1, {2: "b"}), used=7.0)
    raises(StoreStale, lambda: backend.commit(segment, batch))
    assert snapshot(backend, segment) == state
    assert found(backend, "b") == set()
    info = segment_info(backend, "session", time=0.0, create=False)
    backend.commit(segment, msgspec.structs.replace(batch, used=info.used))
    assert snapshot(backend, segment) != state


def check_all_or_nothing(backend: Backend) -> None:
    """A batch that contradicts itself raises StoreError and changes nothing."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "first"}))
    state = snapshot(backend, segment)
    valid = batch_of(1, {2: "second word"})
    bad: Sequence[Batch] = (
        Batch(head=1, pages=valid.pages),
        Batch(head=1, pages=valid.pages, texts={valid.pages[0].digest: "something else"}),
        Batch(head=1, pages=[page_of(1, "first")], texts={digest_of("first"): "first"}),
        Batch(head=1, pages=valid.pages, texts=valid.texts, index=[2], states={99: State(Place.IN)}),
        Batch(head=1, pages=valid.pages, texts=valid.texts, index=[2, 98]),
        Batch(head=1, pages=valid.pages, texts=valid.texts, index=[2], erase=[97]),
        Batch(head=1, pages=valid.pages, texts=valid.texts, index=[2], events=batch_of(5, {}).events),
    )
    for batch in bad:
        raises(StoreError, lambda batch=batch: backend.commit(segment, batch))  # type: ignore[misc]
        assert snapshot(backend, segment) == state
        assert found(backend, "second") == set()
    raises(StoreError, lambda: backend.commit(segment + 1000, batch_of(0, {1: "a"})))
    raises(StoreCorrupt, lambda: backend.contents.texts([digest_of("second word")]))
    backend.commit(segment, valid)
    assert found(backend, "second") == {2}


def check_only_what_can_be_read(backend: Backend) -> None:
    """A page or event that could not be decoded again, by type or size, is refused, and nothing changes."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "first"}))
    state = snapshot(backend, segment)
    fine = batch_of(1, {2: "second"})
    pages: Sequence[dict[str, object]] = (
        {"time": True},
        {"time": float("nan")},
        {"time": 10**400},
        {"tokens": 2**70},
        {"label": "\ud800"},
    )
    for change in pages:
        batch = msgspec.structs.replace(fine, pages=[msgspec.structs.replace(fine.pages[0], **change)])
        raises(StoreError, lambda batch=batch: backend.commit(segment, batch))  # type: ignore[misc]
    events: Sequence[dict[str, object]] = (
        {"time": True},
        {"time": float("inf")},
        {"why": "\ud800"},
        {"data": {"prompt": 2**70}},
        {"data": {1: "one"}},
        {"data": {"what": object()}},
    )
    for change in events:
        batch = msgspec.structs.replace(fine, events=[msgspec.structs.replace(fine.events[0], **change)])
        raises(StoreError, lambda batch=batch: backend.commit(segment, batch))  # type: ignore[misc]
    assert snapshot(backend, segment) == state
    backend.commit(segment, fine)


def check_head(backend: Backend) -> None:
    """The head of a segment shows each commit; nothing is listed as damaged."""
    segment = start(backend)
    assert [info.damaged for info in backend.segments()] == [""]
    for head in range(3):
        info = segment_info(backend, "session", time=9.0, create=False)
        assert (info.number, info.head, info.damaged) == (segment, head, "")
        backend.commit(segment, batch_of(head, {head + 1: f"text {head}"}))
    # Without another writer `wait` makes no difference.
    backend.commit(segment, msgspec.structs.replace(batch_of(3, {9: "at once"}), wait=False))


def check_search(backend: Backend) -> None:
    """Indexed pages are found by whole names and by parts of names; the spans contain the words."""
    segment = start(backend)
    filler = "\n".join(f"line {number} of nothing in particular" for number in range(200))
    texts = {
        1: "def foo_bar(baz): return getUserName(baz)",
        2: "see src/kilburn/backend.py for the contract",
        3: f"{filler}\nthe needle lies here\n{filler}",
        4: "never indexed zebra",
    }
    backend.commit(segment, batch_of(0, texts, index=[1, 2, 3]))
    for query, page in (
        ("foo_bar", 1),
        ("bar", 1),
        ("user", 1),
        ("getUserName", 1),
        ("src/kilburn/backend.py", 2),
        ("kilburn", 2),
    ):
        assert page in found(backend, query), query
    assert found(backend, "zebra") == set()
    (hit, *_) = backend.words.search("needle")
    assert (hit.segment, hit.page) == (segment, 3)
    assert "needle" in texts[3][hit.span[0] : hit.span[1]]
    assert len(backend.words.search("line nothing", limit=3)) == 3
    assert backend.words.search("needle", limit=0) == []


def check_searchable_words(backend: Backend) -> None:
    """A page whose extra has searchable words is found by these and not by its text, until it is forgotten."""
    segment = start(backend)
    extra = msgspec.json.encode({"message": '{"words":"said"}', "words": "the atlas of rivers"}).decode()
    beside = msgspec.json.encode({"message": '{"words":"said"}'}).decode()
    pages = [page_of(1, "aGVsbG8 base64", extra=extra), page_of(2, "a plain text", extra=beside)]
    texts = {page.digest: text for page, text in zip(pages, ["aGVsbG8 base64", "a plain text"], strict=True)}
    texts |= {pages[0].extra: extra, pages[1].extra: beside}
    backend.commit(segment, Batch(head=0, events=batch_of(0, {1: "x"}).events, pages=pages, texts=texts, index=[1]))
    backend.commit(segment, Batch(head=1, index=[2]))
    assert found(backend, "rivers") == {1}
    assert found(backend, "plain") == {2}
    assert found(backend, "base64") == found(backend, "said") == set()
    assert {text for _, text in backend.vectors.unembedded("e", 9)} == {"the atlas of rivers", "a plain text"}
    assert [hit.span for hit in backend.words.search("atlas")] == [(0, len("the atlas of rivers"))]
    backend.commit(segment, Batch(head=1, unindex=[1]))
    assert found(backend, "rivers") == set()
    backend.commit(segment, Batch(head=1, index=[1]))
    assert found(backend, "rivers") == {1}
    backend.commit(segment, Batch(head=1, erase=[1]))
    assert found(backend, "rivers") == set()
    assert {text for _, text in backend.vectors.unembedded("e", 9)} == {"a plain text"}


def check_search_order(backend: Backend) -> None:
    """The passage with more and rarer words of the query comes first."""
    segment = start(backend)
    texts = {number: f"the common word and item{number}" for number in range(1, 30)}
    texts[30] = "the common word and the rareword"
    texts[31] = "nothing else"
    backend.commit(segment, batch_of(0, texts))
    hits = backend.words.search("common rareword", limit=5)
    assert hits[0].page == 30
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def check_query_is_data(backend: Backend) -> None:
    """A query is never interpreted as syntax: none raises, and its words are found."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "the needle and NEAR OR AND NOT"}))
    for noise in (
        '"',
        "*",
        "NEAR(",
        "-",
        ":",
        "^",
        "(((",
        "words:",
        "{a b}:",
        "' OR 1=1 --",
        "\0",
        "\U0001f600",
        "\\",
        "x" * 1_000_000,
    ):
        backend.words.search(noise)
        assert found(backend, f"{noise} needle") == {1}, noise[:20]
    assert backend.words.search("") == []
    assert backend.words.search("   \n") == []


def check_unindex(backend: Backend) -> None:
    """An unindexed page is no longer found, but still stored."""
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "needle one", 2: "needle two"}))
    backend.commit(segment, Batch(head=1, unindex=[1]))
    assert found(backend, "needle") == {2}
    assert backend.contents.texts([digest_of("needle one")]) == {digest_of("needle one"): "needle one"}
    backend.commit(segment, Batch(head=1, unindex=[1]))
    backend.commit(segment, Batch(head=1, index=[1]))
    assert found(backend, "needle") == {1, 2}


def check_erase(backend: Backend) -> None:
    """An erased page keeps only its number; a content is erased with its last page."""
    segment = start(backend)
    page = page_of(1, "canary one", extra="canary two", label="canary label", call="canary-call")
    texts = {digest_of(text): text for text in ("canary one", "canary two", "shared")}
    event = Event(
        number=1, act=Act.ADMIT, time=1.0, pages=(1,), why="canary label said so", data=_others(call="canary-call", n=3)
    )
    backend.commit(
        segment,
        Batch(head=0, events=[event], pages=[page, page_of(2, "shared"), page_of(3, "shared")], texts=texts, index=[1, 2, 3]),
    )
    backend.commit(segment, Batch(head=1, erase=[1, 2]))
    (erased, state), (second, _), (third, _) = backend.pages(segment)
    assert (erased.id, erased.digest, erased.extra, erased.label, erased.name, erased.call) == (1, "", "", "", None, None)
    assert state.at == Place.DROPPED
    assert (second.digest, third.digest) == ("", digest_of("shared"))
    assert "canary" not in repr(list(backend.events(segment)))
    assert [event.number for event in backend.events(segment)] == [1]
    assert found(backend, "canary") == set()
    assert found(backend, "shared") == {3}
    raises(StoreCorrupt, lambda: backend.contents.texts([digest_of("canary one")]))
    raises(StoreCorrupt, lambda: backend.contents.texts([digest_of("canary two")]))
    assert backend.contents.texts([digest_of("shared")]) == {digest_of("shared"): "shared"}
    backend.commit(segment, Batch(head=1, erase=[1]))
    # A batch may take back what it brings.
    at_once = batch_of(1, {4: "canary four", 5: "stays"})
    at_once.erase = [4]
    backend.commit(segment, at_once)
    assert (found(backend, "canary"), found(backend, "stays")) == (set(), {5})
    assert [page.digest for page, _ in backend.pages(segment)][3:] == ["", digest_of("stays")]


def check_histories(backend: Backend) -> None:
    """Sessions are found by the stored digests of their messages; forgetting a page erases the session's digests."""
    first, fork, second = start(backend, "talk"), start(backend, "talk~2"), start(backend, "talk~2 more")
    for segment in (first, fork, second):
        backend.commit(segment, batch_of(0, {1: f"first {segment}", 2: f"second {segment}"}))
    assert set(backend.histories.missing("talk", "", 9)) == {"talk", "talk~2"}
    assert len(backend.histories.missing("talk", "", 1)) == 1
    assert backend.histories.missing("talk", "somebody", 9) == []
    assert not backend.histories.put(first, Digests(0, (b"a",)), page=1), "another page is its last one"
    assert backend.histories.put(first, Digests(0, (b"a", b"b")), page=2)
    assert backend.histories.put(fork, Digests(0, (b"a", b"b", b"c")), page=2)
    assert backend.histories.missing("talk", "", 9) == []
    assert backend.histories.owners(b"none", 9) == []
    assert backend.histories.owners(b"b", 9) == [
        HistoryOwner(name="talk", at=2, count=2),
        HistoryOwner(name="talk~2", at=2, count=3),
    ]
    assert backend.histories.owners(b"a", 1) == [HistoryOwner(name="talk~2", at=1, count=3)]
    backend.commit(first, batch_of(1, {3: "third"}))
    assert backend.histories.missing("talk", "", 9) == ["talk"]
    assert not backend.histories.put(first, Digests(1, (b"d",)), page=3), "two are kept"
    assert backend.histories.put(first, Digests(2, (b"d",)), page=3)
    assert backend.histories.owners(b"d", 9) == [HistoryOwner(name="talk", at=3, count=3)]
    backend.commit(first, _with_said(batch_of(2, {4: "fourth"}), 3, b"e"))
    assert backend.histories.owners(b"e", 9) == [HistoryOwner(name="talk", at=4, count=4)]
    backend.commit(first, _with_said(batch_of(3, {5: "fifth"}), 4))
    assert backend.histories.missing("talk", "", 9) == [], "a page that says nothing"
    backend.commit(first, batch_of(4, {6: "sixth"}))
    backend.commit(first, _with_said(batch_of(5, {7: "seventh"}), 4, b"f"))
    assert backend.histories.owners(b"f", 9) == [], "what was said before it is not kept"
    backend.commit(first, _with_said(batch_of(6, {8: "eighth"}), 0, b"a", b"g"))
    assert backend.histories.owners(b"g", 9) == [HistoryOwner(name="talk", at=2, count=2)]
    assert backend.histories.owners(b"d", 9) == [], "all are kept anew"
    assert backend.histories.put(first, Digests(2, (b"x", b"y"), (None, b"tail")), page=8)
    assert backend.histories.put(first, Digests(4, (b"z",), (b"tail",)), page=8)
    assert [(owner.at, owner.count) for owner in backend.histories.owners(b"tail", 9, tail=True)] == [(5, 5), (4, 5)]
    assert (backend.histories.owners(b"tail", 9), backend.histories.owners(b"y", 9, tail=True)) == ([], [])
    assert backend.histories.put(first, Digests(0, (b"a", b"g")), page=8)
    assert backend.histories.owners(b"tail", 9, tail=True) == []
    raises(StoreStale, lambda: backend.commit(first, _with_said(batch_of(6, {9: "late"}), 2, b"h")))
    assert backend.histories.owners(b"h", 9) == []
    assert backend.histories.missing("talk", "", 9) == []
    backend.commit(first, Batch(head=7, erase=[3]))
    assert (backend.histories.owners(b"g", 9), backend.histories.owners(b"b", 9)) == (
        [],
        [HistoryOwner(name="talk~2", at=2, count=3)],
    )
    assert not backend.histories.put(first, Digests(0, (b"a",)), page=8), "something of it is forgotten"
    backend.commit(first, _with_said(batch_of(7, {9: "ninth"}), 0, b"i"))
    assert backend.histories.owners(b"i", 9) == [], "something of it is forgotten"
    assert backend.histories.missing("talk", "", 9) == ["talk"]
    branch = start(backend, "talk/b1")
    digests = Digests(2, (b"q",), inherits=True)
    backend.commit(branch, msgspec.structs.replace(batch_of(0, {1: "its own"}), digests=digests))
    assert backend.histories.owners(b"q", 9) == [HistoryOwner(name="talk/b1", at=3, count=3)]
    inherited = [page for page, _ in backend.pages(fork)][:1]
    backend.commit(branch, Batch(head=1, inherited=inherited))
    assert backend.histories.owners(b"q", 9) == [], "something that it inherited is forgotten"
    assert set(backend.histories.missing("talk", "", 9)) == {"talk", "talk/b1"}


def check_replies(backend: Backend) -> None:
    """A session is found by the key of a reply that its ledger notes, until it is forgotten."""
    first, key, second_key = start(backend, "chain"), "k" * 24, "o" * 24
    noted: list[Any] = [{"reply": key, "turn": 1, "calls": []}, {"reply": second_key}, {"reply": 24}, {"reply": "short"}]
    events = [Event(number=at, act=Act.NOTE, time=1.0, data=data) for at, data in enumerate(noted, 2)]
    batch = batch_of(0, {1: "first", 2: "second"})
    backend.commit(first, msgspec.structs.replace(batch, events=[*batch.events, *events]))
    assert backend.histories.owners(key.encode(), 9) == [HistoryOwner(name="chain", at=-2, count=-2)]
    assert [owner.at for owner in backend.histories.owners(second_key.encode(), 9)] == [-3]
    assert (backend.histories.owners(b"short", 9), backend.histories.owners(b"none", 9)) == ([], [])
    assert backend.histories.missing("chain", "", 9) == ["chain"], "where a reply is says nothing"
    assert backend.histories.put(first, Digests(0, (b"a",)), page=2)
    assert backend.histories.put(first, Digests(0, (b"a", b"b")), page=2)
    assert [owner.at for owner in backend.histories.owners(key.encode(), 9)] == [-2]
    (notes,) = [event for event in backend.events(first, 1, Act.NOTE) if event.number == 2]
    assert notes.data == noted[0]
    backend.commit(first, Batch(head=5, erase=[1]))
    assert backend.histories.owners(b"b", 9) == []
    assert [owner.at for owner in backend.histories.owners(key.encode(), 9)] == [-2], "a key has no words"
    backend.commit(first, Batch(head=5, erase=[2]))
    backend.erase(first)
    assert backend.histories.owners(key.encode(), 9) == []


def _with_said(batch: Batch, count: int, *added: bytes) -> Batch:
    return msgspec.structs.replace(batch, digests=Digests(count, added))


def check_inherited(backend: Backend) -> None:
    """When a page that a branch inherited is forgotten, no event of the branch quotes it any more."""
    segment, branch = start(backend, "one"), start(backend, "branch")
    page = page_of(1, "canary one", label="canary label", call="canary-call")
    backend.commit(segment, Batch(head=0, pages=[page], texts={page.digest: "canary one"}, index=[1]))
    quotes = _others(call="canary-call", text=page.digest, n=3)
    events = [Event(number=1, act=Act.NOTE, time=1.0, pages=(1,), why="canary label said so", data=quotes)]
    backend.commit(branch, Batch(head=0, events=events))
    backend.commit(branch, Batch(head=1, inherited=[page]))
    event_list = repr(list(backend.events(branch)))
    assert "canary" not in event_list
    assert page.digest not in event_list
    assert [event for event, _ in backend.pages(segment)] == [page]
    assert found(backend, "canary", segment) == {1}


def check_above(backend: Backend) -> None:
    """A branch is created only if its parent is still at the event that the writer knows."""
    parent, branch = start(backend, "one"), start(backend, "one/b1")
    backend.commit(parent, batch_of(0, {1: "first"}))
    begins = msgspec.structs.replace(batch_of(0, {2: "second"}), above=(parent, 1))
    backend.commit(parent, batch_of(1, {3: "third"}))
    state = snapshot(backend, branch)
    raises(StoreStale, lambda: backend.commit(branch, begins))
    assert snapshot(backend, branch) == state
    backend.commit(branch, msgspec.structs.replace(begins, above=(parent, 2)))
    backend.commit(parent, Batch(head=2, erase=[1, 3]))
    backend.erase(parent)
    late = start(backend, "one/b2")
    raises(StoreStale, lambda: backend.commit(late, msgspec.structs.replace(begins, above=(parent, 2))))


def check_begin(backend: Backend) -> None:
    """A session is created together with its first batch, or not at all."""
    first = start(backend, "one")
    backend.commit(first, batch_of(0, {1: "first"}))
    batch = msgspec.structs.replace(batch_of(0, {2: "canary"}, index=[2]), above=(first, 1))
    stale = msgspec.structs.replace(batch, above=(first, 7))
    raises(StoreStale, lambda: backend.begin("one", batch, time=2.0))
    raises(StoreStale, lambda: backend.begin("one/b1", stale, time=2.0))
    raises(StoreError, lambda: backend.begin("one/b1", msgspec.structs.replace(batch, texts={}), time=2.0))
    raises(SpecError, lambda: backend.begin("one/b1", batch, time=2.0, user="\n"))
    assert backend.segment("one/b1", time=2.0, create=False) is None
    assert not found(backend, "canary")
    info = backend.begin("one/b1", batch, time=2.0, user="ana")
    assert info == backend.segment("one/b1", time=9.0, create=False)
    assert (info.name, info.created, info.head, info.pages, info.user) == ("one/b1", 2.0, 1, 1, "ana")
    assert list(backend.events(info.number)) == batch.events
    assert found(backend, "canary", info.number) == {2}
    raises(StoreStale, lambda: backend.begin("one/b1", batch, time=3.0))


def check_together(backend: Backend) -> None:
    """Several commits are one transaction, which succeeds or fails as a whole; a refused commit is not part of it."""
    first = start(backend, "one")
    backend.commit(first, batch_of(0, {1: "first"}))
    state = snapshot(backend, first), backend.segments()

    def write(fails: bool) -> None:
        with backend.together():
            backend.commit(first, batch_of(1, {2: "canary"}))
            raises(StoreStale, lambda: backend.commit(first, batch_of(1, {3: "stale"})))
            two = backend.begin("two", batch_of(0, {1: "canary"}), time=2.0)
            with backend.together():
                backend.commit(two.number, msgspec.structs.replace(batch_of(1, {2: "another"}), erase=[1]))
            assert found(backend, "canary") == {2}, "what is written can be read"
            assert [info.name for info in backend.segments()] == ["one", "two"]
            if fails:
                raise StoreError("it failed")

    raises(StoreError, lambda: write(fails=True))
    assert (snapshot(backend, first), backend.segments()) == state
    assert not found(backend, "canary")
    write(fails=False)
    assert found(backend, "canary") == {2}
    assert [(info.name, info.head) for info in backend.segments()] == [("one", 2), ("two", 2)]
    assert not found(backend, "stale")


def check_erase_segment(backend: Backend) -> None:
    """A segment whose pages are all forgotten can be erased; its number is not reused."""
    stored_info = segment_info(backend, "canary name", user="canary user")
    event = Event(number=1, act=Act.NOTE, time=1.0, why="canary why", data=_others(canary="canary"))
    texts = {digest_of("canary one"): "canary one"}
    backend.commit(stored_info.number, Batch(head=0, events=[event], pages=[page_of(1, "canary one")], texts=texts, index=[1]))
    raises(StoreError, lambda: backend.erase(stored_info.number))
    raises(StoreError, lambda: backend.erase(stored_info.number + 1))
    backend.commit(stored_info.number, Batch(head=1, erase=[1]))
    backend.erase(stored_info.number)
    assert "canary" not in repr(
        [backend.segments(), list(backend.events(stored_info.number)), list(backend.pages(stored_info.number))]
    )
    assert [info.kind for info in backend.segments()] == [SegmentKind.FORGOTTEN]
    assert backend.segment("canary name", time=1.0, create=False) is None
    raises(StoreStale, lambda: backend.commit(stored_info.number, batch_of(0, {1: "written to nothing"})))
    backend.erase(stored_info.number)
    reopened = segment_info(backend, "canary name", time=2.0)
    assert reopened.number != stored_info.number
    assert backend.read([(stored_info.number, 1)]) == {}
    # One that never had a page goes without its bytes.
    backend.erase(reopened.number, wipe=False)
    assert backend.segment("canary name", time=3.0, create=False) is None


def check_separate_segments(backend: Backend) -> None:
    """Segments share only content."""
    first, two = start(backend, "one"), start(backend, "two")
    backend.commit(first, batch_of(0, {1: "needle same"}))
    backend.commit(two, batch_of(0, {1: "needle same", 2: "needle other"}))
    assert found(backend, "needle", first) == {1}
    assert found(backend, "needle", two) == {1, 2}
    assert {(hit.segment, hit.page) for hit in backend.words.search("needle")} == {(first, 1), (two, 1), (two, 2)}
    backend.commit(first, Batch(head=1, erase=[1]))
    assert backend.contents.texts([digest_of("needle same")])
    assert found(backend, "needle", two) == {1, 2}


def check_kinds(backend: Backend) -> None:
    """A segment keeps the kind and user with which it was created."""
    info = segment_info(backend, "@memory/ana", kind=SegmentKind.MEMORY, user="ana")
    assert (info.kind, info.user) == (SegmentKind.MEMORY, "ana")
    assert backend.segment("@memory/ana", time=2.0, kind=SegmentKind.DOCUMENT, user="bob") == info
    plain = segment_info(backend, "s")
    assert (plain.kind, plain.user) == (SegmentKind.SESSION, "")
    assert list(backend.segments()) == [info, plain]
    for name in ("\0", "   ", "x" * 1000, "\ud800"):
        raises(SpecError, lambda name=name: backend.segment("other", time=1.0, user=name))  # type: ignore[misc]
    assert len(backend.segments()) == 2


def check_read(backend: Backend) -> None:
    """Single pages are read with their states, including the end of validity; missing pages are left out."""
    first, two = start(backend, "one"), start(backend, "two")
    claim = Claim(subject="Ana", relation="lives in", object="Porto", confidence=0.5, correction=True)
    fact = msgspec.structs.replace(page_of(1, "Ana lives in Porto"), kind=Kind.FACT, since=5.0, until=9.5, claim=claim)
    backend.commit(first, Batch(head=0, pages=[fact], texts={fact.digest: "Ana lives in Porto"}, states={1: State(until=7.5)}))
    backend.commit(two, batch_of(0, {1: "b", -1: "c"}, states={-1: State(Place.PROPOSED)}))
    keys = [(two, -1), (first, 1), (first, 2), (two, 7), (two + 9, 1)]
    pages = backend.read(keys)
    assert pages.keys() == {(first, 1), (two, -1)}
    assert backend.skim(keys) == pages
    assert pages[first, 1] == (fact, State(until=7.5)) == next(iter(backend.pages(first)))
    assert pages[two, -1][1] == State(Place.PROPOSED)
    backend.commit(first, Batch(head=0, states={1: State(Place.RETIRED, until=-0.5)}))
    assert backend.read([(first, 1)])[first, 1] == (fact, State(Place.RETIRED, until=-0.5))
    assert backend.read([]) == {}


def check_naming(backend: Backend) -> None:
    """Exactly the events that concern a page are found, also for distant ids."""
    session = start(backend)
    backend.commit(session, batch_of(0, {number: f"page {number}" for number in range(1, 301)}))
    moves = [
        Event(number=2, act=Act.EVICT, time=2.0, pages=(7, 8, 290), data=_others(to={"out": [7, 8, 290]})),
        Event(number=3, act=Act.SHIP, time=3.0),
        Event(number=4, act=Act.FAULT, time=4.0, pages=(8,)),
    ]
    backend.commit(session, Batch(head=1, events=moves))
    numbers = {page: [event.number for event in backend.naming(session, [page])] for page in (1, 7, 8, 290, 301, -1)}
    assert numbers == {1: [1], 7: [1, 2], 8: [1, 2, 4], 290: [1, 2], 301: [], -1: []}
    assert [event.number for event in backend.naming(session, [1, 8])] == [1, 2, 4]
    assert backend.naming(session, [7])[1] == moves[0]
    assert backend.naming(session, []) == backend.naming(session + 9, [7]) == []


def cited_batch(head: int, number: int, text: str, **fields: object) -> Batch:
    """Return a batch with one page with these fields."""
    batch = batch_of(head, {number: text})
    batch.pages = [msgspec.structs.replace(batch.pages[0], **fields)]
    return batch


def check_citations(backend: Backend) -> None:
    """Citations are known across segments: a cited page cannot be erased, and an erased page cannot be cited."""
    talk = start(backend, "talk")
    info = segment_info(backend, "@memory", kind=SegmentKind.MEMORY)
    memory = info.number
    backend.commit(talk, batch_of(0, {1: "I moved to Porto", 2: "in May", 3: "a summary"}))
    backend.commit(memory, cited_batch(0, -1, "Ana lives in Porto", cites=((talk, 1), (talk, 2)), depth=1))
    backend.commit(memory, cited_batch(1, -2, "Ana", sources=(-1,), depth=2))
    backend.commit(talk, cited_batch(1, -1, "recalled", sources=(3,), cites=((memory, -2),), depth=1))
    assert backend.citing(talk, [1]) == [(memory, -1)]
    assert backend.citing(talk, [1, 2]) == [(memory, -1)]
    assert backend.citing(memory, [-1]) == [(memory, -2)]
    assert backend.citing(memory, [-1, -2]) == sorted([(memory, -2), (talk, -1)])
    assert backend.citing(talk, [3]) == [(talk, -1)]
    assert backend.citing(talk, []) == backend.citing(talk + 99, [1]) == []
    citers = snapshot(backend, talk), snapshot(backend, memory)
    raises(StoreStale, lambda: backend.commit(talk, Batch(head=2, erase=[1])))
    raises(StoreStale, lambda: backend.commit(memory, Batch(head=2, erase=[-1, -2])))
    raises(StoreError, lambda: backend.commit(memory, cited_batch(2, -3, "invented", cites=((talk, 99),))))
    raises(StoreError, lambda: backend.commit(memory, cited_batch(2, -3, "invented", cites=((talk + 99, 1),))))
    assert (snapshot(backend, talk), snapshot(backend, memory)) == citers
    assert found(backend, "invented") == set()
    backend.commit(talk, Batch(head=2, erase=[-1]))
    assert backend.citing(memory, [-2]) == []
    with backend.leaving([(memory, -2), (talk, 1), (talk, 99), (talk + 99, 1)]):
        raises(Forgotten, lambda: backend.commit(memory, cited_batch(2, -3, "too late", cites=((talk, 2), (talk, 1)))))
        # Also the one that cites what is leaving.
        for page in (-2, -1):
            late = cited_batch(2, -2, "too late", cites=((memory, page),))
            raises(Forgotten, partial(backend.commit, talk, late))
        assert backend.citing(memory, [-2]) == []
        backend.commit(memory, Batch(head=2, erase=[-2, -1]))
    assert backend.citing(talk, [1, 2]) == backend.citing(memory, [-1]) == []
    backend.commit(memory, cited_batch(2, -3, "in time", cites=((talk, 1),)))
    backend.commit(memory, Batch(head=3, erase=[-3]))
    with backend.leaving([(talk, 0)]):
        raises(Forgotten, lambda: backend.commit(memory, cited_batch(3, -4, "too late", cites=((talk, 1),))))
    with backend.leaving([(talk, 1)]):
        backend.commit(talk, Batch(head=2, erase=[1]))
    raises(StoreStale, lambda: backend.commit(memory, cited_batch(3, -4, "too late", cites=((talk, 1),))))
    backend.commit(talk, Batch(head=2, erase=[2, 3]))
    backend.erase(talk)
    # What is gone as a whole is not what never was.
    raises(StoreStale, lambda: backend.commit(memory, cited_batch(3, -4, "too late", cites=((talk, 1),))))
    assert found(backend, "late") == set()


def check_search_within(backend: Backend) -> None:
    """A search of some segments finds their passages, however many others have the same words."""
    small = [start(backend, "first")]
    large = start(backend, "many")
    small.append(start(backend, "last"))
    backend.commit(large, batch_of(0, {number: f"the needle number{number}" for number in range(1, 300)}))
    for segment in small:
        backend.commit(segment, batch_of(0, {1: f"a needle of {segment}, among much other hay that makes it long " * 9}))
    for segment in small:
        assert found(backend, "needle", segment) == {1}
        assert [hit.segment for hit in backend.words.search("the needle", segments=[segment], limit=5)] == [segment]
    assert {hit.segment for hit in backend.words.search("needle", segments=set(small), limit=5)} == set(small)
    assert backend.words.search("needle", segments=[]) == []
    assert backend.words.search("needle", segments=[large + 99]) == []
    assert {hit.segment for hit in backend.words.search("number7 needle", segments=[large, small[0]], limit=400)} == {
        large,
        small[0],
    }


def check_entries(backend: Backend) -> None:
    """Passages are found by number and by page while they exist; a number is never reused."""
    segment = start(backend)
    long = "\n".join(f"line {number} of nothing in particular" for number in range(200))
    backend.commit(segment, batch_of(0, {1: long, 2: "short needle", 3: "hidden"}, index=[1, 2]))
    of_page = backend.words.entries([(segment, 1), (segment, 2), (segment, 3), (segment, 9), (segment + 9, 1)])
    assert of_page.keys() == {(segment, 1), (segment, 2)}
    assert [hit.span for hit in of_page[segment, 1]] == sorted(hit.span for hit in of_page[segment, 1])
    assert (of_page[segment, 1][0].span[0], of_page[segment, 1][-1].span[1]) == (0, len(long))
    (hit,) = backend.words.search("needle")
    assert [msgspec.structs.replace(hit, score=0.0)] == of_page[segment, 2]
    numbers = [hit.entry for hits in of_page.values() for hit in hits]
    assert len(set(numbers)) == len(numbers) > 5
    assert backend.words.passages([*numbers, 0, numbers[0] ^ 1 << 20]) == {
        hit.entry: hit for hits in of_page.values() for hit in hits
    }
    backend.commit(segment, Batch(head=1, unindex=[1], erase=[2]))
    assert backend.words.passages(numbers) == {}
    assert backend.words.entries([(segment, 1), (segment, 2)]) == {}
    backend.commit(segment, Batch(head=1, index=[1]))
    assert not {hit.entry for hit in backend.words.entries([(segment, 1)])[segment, 1]} & set(numbers)


def check_vectors(backend: Backend) -> None:
    """Passages wait for a vector of each embedder until they have one; a vector is removed with its passage."""
    row, two = start(backend, "one"), start(backend, "two")
    backend.commit(row, batch_of(0, {1: "alpha", 2: "beta", 3: "gamma"}))
    backend.commit(two, batch_of(0, {1: "delta"}))
    waiting = backend.vectors.unembedded("hash", 10)
    assert [text for _, text in waiting] == ["delta", "alpha", "beta", "gamma"]
    assert backend.vectors.unembedded("hash", 2) == waiting[:2]
    backend.vectors.add("hash", [(entry, text.encode()[:4]) for entry, text in waiting if text != "beta"])
    assert backend.vectors.unembedded("hash", 10) == [row for row in waiting if row[1] == "beta"]
    assert backend.vectors.unembedded("other", 10) == waiting
    vectors = list(backend.vectors.read("hash"))
    assert [(vector.entry, vector.data) for vector in vectors] == [
        (entry, text.encode()[:4]) for entry, text in waiting if text != "beta"
    ]
    assert [vector.number for vector in vectors] == sorted({vector.number for vector in vectors})
    assert list(backend.vectors.read("hash", vectors[0].number)) == vectors[1:]
    assert list(backend.vectors.read("other")) == []
    for rows in ([(waiting[2][0], b"longer")], [(waiting[2][0], b"beta"), (waiting[0][0], b"")]):
        raises(StoreError, lambda rows=rows: backend.vectors.add("hash", rows))  # type: ignore[misc]
    raises(SpecError, lambda: backend.vectors.add(" ", []))
    backend.commit(row, Batch(head=1, erase=[1], unindex=[3]))
    backend.commit(row, batch_of(1, {4: "epsilon"}))
    erased = {entry for entry, text in waiting if text in ("alpha", "gamma")}
    backend.vectors.add("hash", [(entry, b"late") for entry in erased] + [(waiting[2][0], b"beta")])
    assert {vector.entry for vector in backend.vectors.read("hash")} == {entry for entry, _ in waiting} - erased
    assert [text for _, text in backend.vectors.unembedded("hash", 10)] == ["epsilon"]
    backend.vectors.add("hash", [(waiting[2][0], b"BETA")])
    (*_, last) = backend.vectors.read("hash")
    assert (last.entry, last.data) == (waiting[2][0], b"BETA")
    assert last.number > vectors[-1].number
    backend.vectors.add("another", [(waiting[2][0], b"one")])
    assert backend.vectors.embedders() == ["hash", "another"]
    backend.vectors.drop("hash")
    backend.vectors.drop("never there")
    assert backend.vectors.embedders() == ["another"]
    assert list(backend.vectors.read("hash")) == []
    assert len(backend.vectors.unembedded("hash", 10)) == 3
    backend.vectors.add("hash", [(waiting[2][0], b"of another length")])


def check_settings(backend: Backend) -> None:
    """A setting has the value that was stored last, until it is removed."""
    assert backend.settings.all() == {}
    backend.settings.put("one", "1")
    backend.settings.put("two", "Zwei \u00e9")
    backend.settings.put("one", "again")
    assert backend.settings.all() == {"one": "again", "two": "Zwei \u00e9"}
    backend.settings.put("one", None)
    backend.settings.put("none", None)
    assert backend.settings.all() == {"two": "Zwei \u00e9"}
    assert backend.settings.replace("two", expected=None, value="2") is False
    assert backend.settings.replace("two", "Zwei \u00e9", "2") is True
    assert backend.settings.replace("two", "Zwei \u00e9", None) is False
    assert backend.settings.replace("four", "4", "5") is False
    assert backend.settings.replace("four", None, "4") is True
    assert backend.settings.all() == {"four": "4", "two": "2"}
    assert backend.settings.replace("four", "4", None) is True
    for name, value in (("odd\ud800", "1"), ("odd", "\udfff")):
        raises(StoreError, partial(backend.settings.put, name, value))
        raises(StoreError, partial(backend.settings.replace, name, None, value))
    assert backend.settings.all() == {"two": "2"}
    backend.settings.put("two", "Zwei \u00e9")
    assert abs(backend.now() - time.time()) < 86_400.0
    try:
        with backend.together():
            backend.settings.put("three", "3")
            raise RuntimeError
    except RuntimeError:
        pass
    assert backend.settings.all() == {"two": "Zwei \u00e9"}


def check_copied(backend: Backend) -> None:
    """A batch of a copy may contain forgotten pages, cite later pages, erase cited pages, and replace events."""
    first, two = start(backend, "one"), start(backend, "two")
    tombstone = msgspec.structs.replace(page_of(1, "gone", label="gone"), digest="", label="")
    raises(StoreError, lambda: backend.commit(first, Batch(head=0, pages=[tombstone])))
    batch = cited_batch(0, 2, "cites what comes", cites=((two, 1),))
    raises(StoreError, lambda: backend.commit(first, batch))
    batch.copied, batch.pages = True, [tombstone, *batch.pages]
    batch.states = {1: State(at=Place.DROPPED)}
    backend.commit(first, batch)
    backend.commit(two, batch_of(0, {1: "what is cited"}))
    assert backend.citing(two, [1]) == [(first, 2)]
    assert backend.forgotten(first) == [1]
    assert found(backend, "gone") == set()
    (event,) = backend.events(first)
    replaced = msgspec.structs.replace(event, why="as it is now")
    backend.commit(first, Batch(head=1, replaced=[replaced], copied=True))
    assert list(backend.events(first)) == [replaced]
    lost = msgspec.structs.replace(event, number=2)
    raises(StoreError, lambda: backend.commit(first, Batch(head=1, replaced=[lost], copied=True)))
    raises(StoreStale, lambda: backend.commit(two, Batch(head=1, erase=[1])))
    backend.commit(two, Batch(head=1, erase=[1], copied=True))
    assert backend.citing(two, [1]) == [(first, 2)]
    backend.commit(first, Batch(head=1, erase=[2]))


def check_snapshot(backend: Backend) -> None:
    """In a snapshot everything can be read and nothing written; afterwards it can."""
    segment = start(backend, "one")
    backend.commit(segment, batch_of(0, {1: "first"}))
    state = snapshot(backend, segment)
    with backend.snapshot(), backend.snapshot():
        assert snapshot(backend, segment) == state
        assert found(backend, "first") == {1}
        assert [info.head for info in backend.segments()] == [1]
    with backend.snapshot():
        raises(StoreReadOnly, lambda: backend.commit(segment, batch_of(1, {2: "second"})))
    backend.commit(segment, batch_of(1, {2: "second"}))
    assert found(backend, "second") == {2}


def check_threads(backend: Backend) -> None:
    """Several threads may use one object; of two commits with the same head one is refused."""
    segment = start(backend)
    refused: list[int] = []

    def write(number: int) -> None:
        try:
            backend.commit(segment, batch_of(0, {number: f"text {number}"}))
        except StoreStale:
            refused.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert len(list(backend.pages(segment))) == 1


def check_close(backend: Backend) -> None:
    """Closing twice is allowed; using a closed store raises StoreError."""
    segment = start(backend)
    backend.close()
    backend.close()
    raises(StoreError, lambda: backend.commit(segment, batch_of(0, {1: "a"})))
    raises(StoreError, backend.segments)


CHECKS: tuple[Callable[[Backend], None], ...] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_") and check is not check_store
)
"""The checks; each takes a fresh, empty store."""
