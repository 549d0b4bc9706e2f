"""The conformance kit of stores: `check_store(make)` holds any implementation to the contract.

Only the verbs of `kilburn.store.Store` are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from kilburn.errors import KilburnError, SpecError, StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Data, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Claim, Page, Place, digest_of
from kilburn.store import Batch, Digests, ProcessKind, Said, State, Store


def page_of(number: int, text: str, *, extra: str = "", label: str = "", call: str | None = None) -> Page:
    """A page with this id and text, otherwise plain."""
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
    """Data under keys that are not Kilburn's."""
    return cast(Data, words)


def batch_of(
    head: int,
    texts: Mapping[int, str],
    *,
    index: Iterable[int] | None = None,
    states: Mapping[int, State] | None = None,
    events: int = 1,
) -> Batch:
    """A batch that admits pages with these texts by id, with `events` events after `head`, the
    first of which names the pages; all pages are indexed unless `index` says which."""
    made = [page_of(number, text) for number, text in texts.items()]
    return Batch(
        head=head,
        events=[
            Event(number=head + 1 + at, act=Act.ADMIT, time=float(head + 1 + at), pages=pages, data=_others(at=at))
            for at, pages in enumerate([tuple(texts)] + [()] * (events - 1) if events else [])
        ],
        pages=made,
        texts={page.digest: text for page, text in zip(made, texts.values(), strict=True)},
        states=states or {},
        index=list(texts if index is None else index),
    )


def check_store(make: Callable[[], Store]) -> None:
    """Run every check, each on a fresh, empty store from `make`.

    Raises:
        AssertionError: a promise that the store does not keep, with the check's name.
    """
    for check in CHECKS:
        store = make()
        try:
            check(store)
        except AssertionError as error:
            error.add_note(f"check_store: {check.__name__}: {(check.__doc__ or '').strip()}")
            raise
        finally:
            store.close()


def start(store: Store, name: str = "session") -> int:
    """A new process; its number."""
    info = store.process(name, time=1.0)
    assert info is not None
    return info.number


def raises(kind: type[KilburnError], do: Callable[[], object]) -> None:
    """That `do` raises this error and no other."""
    try:
        do()
    except kind:
        return
    raise AssertionError(f"nothing raised {kind.__name__}")


def snapshot(store: Store, process: int) -> tuple[object, ...]:
    """All of a process that a caller can see."""
    return (
        list(store.pages(process)),
        list(store.events(process)),
        [info for info in store.processes() if info.number == process],
    )


def found(store: Store, query: str, process: int | None = None) -> set[int]:
    """The pages that a search finds."""
    return {hit.page for hit in store.search(query, processes=None if process is None else [process], limit=1000)}


def check_is_store(store: Store) -> None:
    """It has the verbs."""
    assert isinstance(store, Store)


def check_processes(store: Store) -> None:
    """A process is made once, found by name, listed oldest first, and never made unasked."""
    assert store.process("one", time=5.0, create=False) is None
    first = store.process("one", time=5.0)
    second = store.process("two", time=6.0)
    assert first is not None
    assert second is not None
    assert (first.name, first.created, first.head, first.pages) == ("one", 5.0, 0, 0)
    assert store.process("one", time=9.0) == first
    assert list(store.processes()) == [first, second]
    for name in ("one/b2", "one0", "one/", "one/b1/b1", "ones/b1", "one-b1", "On\u00e9/x"):
        store.process(name, time=7.0)
    assert [info.name for info in store.processes("one")] == ["one/b2", "one/", "one/b1/b1"]
    assert [info.name for info in store.processes("On\u00e9")] == ["On\u00e9/x"]
    assert not store.processes("two")


def check_round_trip(store: Store) -> None:
    """Pages, states, events and texts come back equal; originals first."""
    process = start(store)
    texts = {1: "alpha", 2: "", 3: "NUL \0 and \x07, é, 日本, \U0001f600\r\n", 10: "x" * 100_000, -1: "fold one", -2: "fold two"}
    states = {1: State(Place.IN, True, 0.25), -1: State(Place.FOLDED, False, -3.5)}
    batch = batch_of(0, texts, states=states, events=3)
    store.commit(process, batch)
    pages = list(store.pages(process))
    assert [page.id for page, _ in pages] == [1, 2, 3, 10, -1, -2]
    assert {page.id: page for page, _ in pages} == {page.id: page for page in batch.pages}
    assert {page.id: state for page, state in pages} == {number: states.get(number, State()) for number in texts}
    assert list(store.events(process)) == list(batch.events)
    assert list(store.events(process, 2)) == list(batch.events[2:])
    assert list(store.events(process, 3)) == []
    assert store.texts(page.digest for page in batch.pages) == dict(batch.texts)
    info = store.process("session", time=0.0, create=False)
    assert info is not None
    assert (info.head, info.pages, info.tokens, info.used) == (3, 6, sum(page.tokens for page in batch.pages), 3.0)


def check_states(store: Store) -> None:
    """A later batch moves pages, in or out, and leaves the others."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "a", 2: "b"}, states={1: State(Place.IN)}))
    store.commit(process, Batch(head=1, states={1: State(Place.OUT), 2: State(Place.IN, True, 2.0)}))
    assert [state for _, state in store.pages(process)] == [State(Place.OUT), State(Place.IN, True, 2.0)]


def check_stale(store: Store) -> None:
    """A writer that does not know the last event is refused, and nothing changes."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "a"}))
    before = snapshot(store, process)
    raises(StoreStale, lambda: store.commit(process, batch_of(0, {2: "b"})))
    raises(StoreStale, lambda: store.commit(process, batch_of(7, {2: "b"})))
    assert snapshot(store, process) == before
    assert found(store, "b") == set()


def check_all_or_nothing(store: Store) -> None:
    """A batch that contradicts itself raises StoreError and leaves no part of itself."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "first"}))
    before = snapshot(store, process)
    other = batch_of(1, {2: "second word"})
    bad: Sequence[Batch] = (
        Batch(head=1, pages=other.pages),
        Batch(head=1, pages=other.pages, texts={other.pages[0].digest: "something else"}),
        Batch(head=1, pages=[page_of(1, "first")], texts={digest_of("first"): "first"}),
        Batch(head=1, pages=other.pages, texts=other.texts, index=[2], states={99: State(Place.IN)}),
        Batch(head=1, pages=other.pages, texts=other.texts, index=[2, 98]),
        Batch(head=1, pages=other.pages, texts=other.texts, index=[2], erase=[97]),
        Batch(head=1, pages=other.pages, texts=other.texts, index=[2], events=batch_of(5, {}).events),
    )
    for batch in bad:
        raises(StoreError, lambda batch=batch: store.commit(process, batch))  # type: ignore[misc]
        assert snapshot(store, process) == before
        assert found(store, "second") == set()
    raises(StoreError, lambda: store.commit(process + 1000, batch_of(0, {1: "a"})))
    raises(StoreCorrupt, lambda: store.texts([digest_of("second word")]))
    store.commit(process, other)
    assert found(store, "second") == {2}


def check_only_what_can_be_read(store: Store) -> None:
    """A page or event that could not be read again, by type or by size, is refused, and nothing changes."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "first"}))
    before = snapshot(store, process)
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
        raises(StoreError, lambda batch=batch: store.commit(process, batch))  # type: ignore[misc]
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
        raises(StoreError, lambda batch=batch: store.commit(process, batch))  # type: ignore[misc]
    assert snapshot(store, process) == before
    store.commit(process, fine)


def check_head(store: Store) -> None:
    """A reader sees by its head that a process has moved on, whoever did it; nothing is listed as damaged."""
    process = start(store)
    assert [info.damaged for info in store.processes()] == [""]
    for head in range(3):
        info = store.process("session", time=9.0, create=False)
        assert info is not None
        assert (info.number, info.head, info.damaged) == (process, head, "")
        store.commit(process, batch_of(head, {head + 1: f"text {head}"}))
    # Without another writer it makes no difference whether this one would wait.
    store.commit(process, msgspec.structs.replace(batch_of(3, {9: "at once"}), wait=False))


def check_search(store: Store) -> None:
    """Indexed pages are found by whole names and by their parts; spans hold the words."""
    process = start(store)
    filler = "\n".join(f"line {number} of nothing in particular" for number in range(200))
    texts = {
        1: "def foo_bar(baz): return getUserName(baz)",
        2: "see src/kilburn/store.py for the contract",
        3: f"{filler}\nthe needle lies here\n{filler}",
        4: "never indexed zebra",
    }
    store.commit(process, batch_of(0, texts, index=[1, 2, 3]))
    for query, page in (("foo_bar", 1), ("bar", 1), ("user", 1), ("getUserName", 1), ("src/kilburn/store.py", 2), ("kilburn", 2)):
        assert page in found(store, query), query
    assert found(store, "zebra") == set()
    (hit, *_) = store.search("needle")
    assert (hit.process, hit.page) == (process, 3)
    assert "needle" in texts[3][hit.span[0] : hit.span[1]]
    assert len(store.search("line nothing", limit=3)) == 3
    assert store.search("needle", limit=0) == []


def check_search_order(store: Store) -> None:
    """The passage with more and rarer words of the query comes first."""
    process = start(store)
    texts = {number: f"the common word and item{number}" for number in range(1, 30)}
    texts[30] = "the common word and the rareword"
    texts[31] = "nothing else"
    store.commit(process, batch_of(0, texts))
    hits = store.search("common rareword", limit=5)
    assert hits[0].page == 30
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def check_query_is_data(store: Store) -> None:
    """No query is syntax: none raises, and its words are still found."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "the needle and NEAR OR AND NOT"}))
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
        store.search(noise)
        assert found(store, f"{noise} needle") == {1}, noise[:20]
    assert store.search("") == []
    assert store.search("   \n") == []


def check_unindex(store: Store) -> None:
    """An unindexed page is no longer found, and still there."""
    process = start(store)
    store.commit(process, batch_of(0, {1: "needle one", 2: "needle two"}))
    store.commit(process, Batch(head=1, unindex=[1]))
    assert found(store, "needle") == {2}
    assert store.texts([digest_of("needle one")]) == {digest_of("needle one"): "needle one"}
    store.commit(process, Batch(head=1, unindex=[1]))
    store.commit(process, Batch(head=1, index=[1]))
    assert found(store, "needle") == {1, 2}


def check_erase(store: Store) -> None:
    """An erased page keeps its number and nothing else; its content goes with its last page."""
    process = start(store)
    page = page_of(1, "canary one", extra="canary two", label="canary label", call="canary-call")
    texts = {digest_of(text): text for text in ("canary one", "canary two", "shared")}
    event = Event(
        number=1, act=Act.ADMIT, time=1.0, pages=(1,), why="canary label said so", data=_others(call="canary-call", n=3)
    )
    store.commit(
        process,
        Batch(head=0, events=[event], pages=[page, page_of(2, "shared"), page_of(3, "shared")], texts=texts, index=[1, 2, 3]),
    )
    store.commit(process, Batch(head=1, erase=[1, 2]))
    (erased, state), (second, _), (third, _) = store.pages(process)
    assert (erased.id, erased.digest, erased.extra, erased.label, erased.name, erased.call) == (1, "", "", "", None, None)
    assert state.at == Place.DROPPED
    assert (second.digest, third.digest) == ("", digest_of("shared"))
    assert "canary" not in repr(list(store.events(process)))
    assert [event.number for event in store.events(process)] == [1]
    assert found(store, "canary") == set()
    assert found(store, "shared") == {3}
    raises(StoreCorrupt, lambda: store.texts([digest_of("canary one")]))
    raises(StoreCorrupt, lambda: store.texts([digest_of("canary two")]))
    assert store.texts([digest_of("shared")]) == {digest_of("shared"): "shared"}
    store.commit(process, Batch(head=1, erase=[1]))


def check_histories(store: Store) -> None:
    """What a session has said is found by its digests, as far as they are kept; those of a forgotten text go with it."""
    one, fork, other = start(store, "talk"), start(store, "talk~2"), start(store, "talk~2 more")
    for process in (one, fork, other):
        store.commit(process, batch_of(0, {1: f"first {process}", 2: f"second {process}"}))
    assert set(store.unkept("talk", "", 9)) == {"talk", "talk~2"}
    assert len(store.unkept("talk", "", 1)) == 1
    assert store.unkept("talk", "somebody", 9) == []
    assert not store.keep_history(one, [b"a"], after=0, page=1), "another page is its last one"
    assert store.keep_history(one, [b"a", b"b"], after=0, page=2)
    assert store.keep_history(fork, [b"a", b"b", b"c"], after=0, page=2)
    assert store.unkept("talk", "", 9) == []
    assert store.said_by(b"none", 9) == []
    assert store.said_by(b"b", 9) == [Said(name="talk", at=2, count=2), Said(name="talk~2", at=2, count=3)]
    assert store.said_by(b"a", 1) == [Said(name="talk~2", at=1, count=3)]
    store.commit(one, batch_of(1, {3: "third"}))
    assert store.unkept("talk", "", 9) == ["talk"]
    assert not store.keep_history(one, [b"d"], after=1, page=3), "two are kept"
    assert store.keep_history(one, [b"d"], after=2, page=3)
    assert store.said_by(b"d", 9) == [Said(name="talk", at=3, count=3)]
    store.commit(one, _with_said(batch_of(2, {4: "fourth"}), 3, b"e"))
    assert store.said_by(b"e", 9) == [Said(name="talk", at=4, count=4)]
    store.commit(one, _with_said(batch_of(3, {5: "fifth"}), 4))
    assert store.unkept("talk", "", 9) == [], "a page that says nothing"
    store.commit(one, batch_of(4, {6: "sixth"}))
    store.commit(one, _with_said(batch_of(5, {7: "seventh"}), 4, b"f"))
    assert store.said_by(b"f", 9) == [], "what was said before it is not kept"
    store.commit(one, _with_said(batch_of(6, {8: "eighth"}), 0, b"a", b"g"))
    assert store.said_by(b"g", 9) == [Said(name="talk", at=2, count=2)]
    assert store.said_by(b"d", 9) == [], "all are kept anew"
    raises(StoreStale, lambda: store.commit(one, _with_said(batch_of(6, {9: "late"}), 2, b"h")))
    assert store.said_by(b"h", 9) == []
    assert store.unkept("talk", "", 9) == []
    store.commit(one, Batch(head=7, erase=[3]))
    assert (store.said_by(b"g", 9), store.said_by(b"b", 9)) == ([], [Said(name="talk~2", at=2, count=3)])
    assert not store.keep_history(one, [b"a"], after=0, page=8), "something of it is forgotten"
    store.commit(one, _with_said(batch_of(7, {9: "ninth"}), 0, b"i"))
    assert store.said_by(b"i", 9) == [], "something of it is forgotten"
    assert store.unkept("talk", "", 9) == ["talk"]


def _with_said(batch: Batch, after: int, *added: bytes) -> Batch:
    return msgspec.structs.replace(batch, said=Digests(after, added))


def check_inherited(store: Store) -> None:
    """When a page that a branch inherited is erased, no event of the branch quotes it any more; the page itself stays."""
    one, branch = start(store, "one"), start(store, "branch")
    page = page_of(1, "canary one", label="canary label", call="canary-call")
    store.commit(one, Batch(head=0, pages=[page], texts={page.digest: "canary one"}, index=[1]))
    quotes = _others(call="canary-call", text=page.digest, n=3)
    events = [Event(number=1, act=Act.NOTE, time=1.0, pages=(1,), why="canary label said so", data=quotes)]
    store.commit(branch, Batch(head=0, events=events))
    store.commit(branch, Batch(head=1, inherited=[page]))
    told = repr(list(store.events(branch)))
    assert "canary" not in told
    assert page.digest not in told
    assert [kept for kept, _ in store.pages(one)] == [page]
    assert found(store, "canary", one) == {1}


def check_above(store: Store) -> None:
    """A branch begins only where the process that it forks from is as its writer saw it."""
    one, branch = start(store, "one"), start(store, "one/b1")
    store.commit(one, batch_of(0, {1: "first"}))
    begins = msgspec.structs.replace(batch_of(0, {2: "second"}), above=(one, 1))
    store.commit(one, batch_of(1, {3: "third"}))
    before = snapshot(store, branch)
    raises(StoreStale, lambda: store.commit(branch, begins))
    assert snapshot(store, branch) == before
    store.commit(branch, msgspec.structs.replace(begins, above=(one, 2)))
    store.commit(one, Batch(head=2, erase=[1, 3]))
    store.erase(one)
    late = start(store, "one/b2")
    raises(StoreStale, lambda: store.commit(late, msgspec.structs.replace(begins, above=(one, 2))))


def check_begin(store: Store) -> None:
    """A session is created with its first batch, or not at all."""
    one = start(store, "one")
    store.commit(one, batch_of(0, {1: "first"}))
    batch = msgspec.structs.replace(batch_of(0, {2: "canary"}, index=[2]), above=(one, 1))
    stale = msgspec.structs.replace(batch, above=(one, 7))
    raises(StoreStale, lambda: store.begin("one", batch, time=2.0))
    raises(StoreStale, lambda: store.begin("one/b1", stale, time=2.0))
    raises(StoreError, lambda: store.begin("one/b1", msgspec.structs.replace(batch, texts={}), time=2.0))
    raises(SpecError, lambda: store.begin("one/b1", batch, time=2.0, user="\n"))
    assert store.process("one/b1", time=2.0, create=False) is None
    assert not found(store, "canary")
    made = store.begin("one/b1", batch, time=2.0, user="ana")
    assert made == store.process("one/b1", time=9.0, create=False)
    assert (made.name, made.created, made.head, made.pages, made.user) == ("one/b1", 2.0, 1, 1, "ana")
    assert list(store.events(made.number)) == batch.events
    assert found(store, "canary", made.number) == {2}
    raises(StoreStale, lambda: store.begin("one/b1", batch, time=3.0))


def check_together(store: Store) -> None:
    """Several commits are one transaction: all of them or none, and one that is refused among them is no part of it."""
    one = start(store, "one")
    store.commit(one, batch_of(0, {1: "first"}))
    before = snapshot(store, one), store.processes()

    def write(fails: bool) -> None:
        with store.together():
            store.commit(one, batch_of(1, {2: "canary"}))
            raises(StoreStale, lambda: store.commit(one, batch_of(1, {3: "stale"})))
            two = store.begin("two", batch_of(0, {1: "canary"}), time=2.0)
            with store.together():
                store.commit(two.number, msgspec.structs.replace(batch_of(1, {2: "another"}), erase=[1]))
            assert found(store, "canary") == {2}, "what is written can be read"
            assert [info.name for info in store.processes()] == ["one", "two"]
            if fails:
                raise StoreError("it failed")

    raises(StoreError, lambda: write(fails=True))
    assert (snapshot(store, one), store.processes()) == before
    assert not found(store, "canary")
    write(fails=False)
    assert found(store, "canary") == {2}
    assert [(info.name, info.head) for info in store.processes()] == [("one", 2), ("two", 2)]
    assert not found(store, "stale")


def check_erase_process(store: Store) -> None:
    """A process of which every page is forgotten can be erased: nothing is left but its number, which stays taken."""
    known = store.process("canary name", time=1.0, user="canary user")
    assert known is not None
    event = Event(number=1, act=Act.NOTE, time=1.0, why="canary why", data=_others(canary="canary"))
    texts = {digest_of("canary one"): "canary one"}
    store.commit(known.number, Batch(head=0, events=[event], pages=[page_of(1, "canary one")], texts=texts, index=[1]))
    raises(StoreError, lambda: store.erase(known.number))
    raises(StoreError, lambda: store.erase(known.number + 1))
    store.commit(known.number, Batch(head=1, erase=[1]))
    store.erase(known.number)
    assert "canary" not in repr([store.processes(), list(store.events(known.number)), list(store.pages(known.number))])
    assert [info.kind for info in store.processes()] == [ProcessKind.FORGOTTEN]
    assert store.process("canary name", time=1.0, create=False) is None
    raises(StoreStale, lambda: store.commit(known.number, batch_of(0, {1: "written to nothing"})))
    store.erase(known.number)
    again = store.process("canary name", time=2.0)
    assert again is not None
    assert again.number != known.number
    assert store.read([(known.number, 1)]) == {}


def check_separate_processes(store: Store) -> None:
    """Processes share content and nothing else."""
    one, two = start(store, "one"), start(store, "two")
    store.commit(one, batch_of(0, {1: "needle same"}))
    store.commit(two, batch_of(0, {1: "needle same", 2: "needle other"}))
    assert found(store, "needle", one) == {1}
    assert found(store, "needle", two) == {1, 2}
    assert {(hit.process, hit.page) for hit in store.search("needle")} == {(one, 1), (two, 1), (two, 2)}
    store.commit(one, Batch(head=1, erase=[1]))
    assert store.texts([digest_of("needle same")])
    assert found(store, "needle", two) == {1, 2}


def check_kinds(store: Store) -> None:
    """A process has the kind and the user with which it was made, whatever is asked for later."""
    made = store.process("@memory/ana", time=1.0, kind=ProcessKind.MEMORY, user="ana")
    assert made is not None
    assert (made.kind, made.user) == (ProcessKind.MEMORY, "ana")
    assert store.process("@memory/ana", time=2.0, kind=ProcessKind.DOCUMENT, user="bob") == made
    plain = store.process("s", time=1.0)
    assert plain is not None
    assert (plain.kind, plain.user) == (ProcessKind.SESSION, "")
    assert list(store.processes()) == [made, plain]
    for name in ("\0", "   ", "x" * 1000, "\ud800"):
        raises(SpecError, lambda name=name: store.process("other", time=1.0, user=name))  # type: ignore[misc]
    assert len(store.processes()) == 2


def check_read(store: Store) -> None:
    """Single pages come back with their states, the end of their validity too; what does not exist is left out."""
    one, two = start(store, "one"), start(store, "two")
    claim = Claim(subject="Ana", relation="lives in", object="Porto", confidence=0.5, correction=True)
    fact = msgspec.structs.replace(page_of(1, "Ana lives in Porto"), kind=Kind.FACT, since=5.0, until=9.5, claim=claim)
    store.commit(one, Batch(head=0, pages=[fact], texts={fact.digest: "Ana lives in Porto"}, states={1: State(until=7.5)}))
    store.commit(two, batch_of(0, {1: "b", -1: "c"}, states={-1: State(Place.PROPOSED)}))
    found = store.read([(two, -1), (one, 1), (one, 2), (two, 7), (two + 9, 1)])
    assert found.keys() == {(one, 1), (two, -1)}
    assert found[one, 1] == (fact, State(until=7.5)) == next(iter(store.pages(one)))
    assert found[two, -1][1] == State(Place.PROPOSED)
    store.commit(one, Batch(head=0, states={1: State(Place.RETIRED, until=-0.5)}))
    assert store.read([(one, 1)])[one, 1] == (fact, State(Place.RETIRED, until=-0.5))
    assert store.read([]) == {}


def cited_batch(head: int, number: int, text: str, **fields: object) -> Batch:
    """A batch with one page that has these fields."""
    batch = batch_of(head, {number: text})
    batch.pages = [msgspec.structs.replace(batch.pages[0], **fields)]
    return batch


def check_citations(store: Store) -> None:
    """Who cites a page is known, in every process; nothing that is cited can go, and nothing that is gone can be cited."""
    talk = start(store, "talk")
    info = store.process("@memory", time=1.0, kind=ProcessKind.MEMORY)
    assert info is not None
    memory = info.number
    store.commit(talk, batch_of(0, {1: "I moved to Porto", 2: "in May", 3: "a summary"}))
    store.commit(memory, cited_batch(0, -1, "Ana lives in Porto", cites=((talk, 1), (talk, 2)), depth=1))
    store.commit(memory, cited_batch(1, -2, "Ana", sources=(-1,), depth=2))
    store.commit(talk, cited_batch(1, -1, "recalled", sources=(3,), cites=((memory, -2),), depth=1))
    assert store.citing(talk, [1]) == [(memory, -1)]
    assert store.citing(talk, [1, 2]) == [(memory, -1)]
    assert store.citing(memory, [-1]) == [(memory, -2)]
    assert store.citing(memory, [-1, -2]) == sorted([(memory, -2), (talk, -1)])
    assert store.citing(talk, [3]) == [(talk, -1)]
    assert store.citing(talk, []) == store.citing(talk + 99, [1]) == []
    before = snapshot(store, talk), snapshot(store, memory)
    raises(StoreStale, lambda: store.commit(talk, Batch(head=2, erase=[1])))
    raises(StoreStale, lambda: store.commit(memory, Batch(head=2, erase=[-1, -2])))
    raises(StoreError, lambda: store.commit(memory, cited_batch(2, -3, "invented", cites=((talk, 99),))))
    raises(StoreError, lambda: store.commit(memory, cited_batch(2, -3, "invented", cites=((talk + 99, 1),))))
    assert (snapshot(store, talk), snapshot(store, memory)) == before
    assert found(store, "invented") == set()
    store.commit(talk, Batch(head=2, erase=[-1]))
    assert store.citing(memory, [-2]) == []
    store.commit(memory, Batch(head=2, erase=[-2, -1]))
    assert store.citing(talk, [1, 2]) == store.citing(memory, [-1]) == []
    store.commit(talk, Batch(head=2, erase=[1]))
    raises(StoreStale, lambda: store.commit(memory, cited_batch(2, -3, "too late", cites=((talk, 1),))))
    assert found(store, "late") == set()


def check_search_within(store: Store) -> None:
    """A search of some processes finds what they have, however much more others have of it."""
    few = [start(store, "first")]
    many = start(store, "many")
    few.append(start(store, "last"))
    store.commit(many, batch_of(0, {number: f"the needle number{number}" for number in range(1, 300)}))
    for process in few:
        store.commit(process, batch_of(0, {1: f"a needle of {process}, among much other hay that makes it long " * 9}))
    for process in few:
        assert found(store, "needle", process) == {1}
        assert [hit.process for hit in store.search("the needle", processes=[process], limit=5)] == [process]
    assert {hit.process for hit in store.search("needle", processes=set(few), limit=5)} == set(few)
    assert store.search("needle", processes=[]) == []
    assert store.search("needle", processes=[many + 99]) == []
    assert {hit.process for hit in store.search("number7 needle", processes=[many, few[0]], limit=400)} == {many, few[0]}


def check_entries(store: Store) -> None:
    """Passages are known by their numbers and by their pages, as long as they exist; a number is never given again."""
    process = start(store)
    long = "\n".join(f"line {number} of nothing in particular" for number in range(200))
    store.commit(process, batch_of(0, {1: long, 2: "short needle", 3: "hidden"}, index=[1, 2]))
    of_page = store.entries([(process, 1), (process, 2), (process, 3), (process, 9), (process + 9, 1)])
    assert of_page.keys() == {(process, 1), (process, 2)}
    assert [hit.span for hit in of_page[process, 1]] == sorted(hit.span for hit in of_page[process, 1])
    assert (of_page[process, 1][0].span[0], of_page[process, 1][-1].span[1]) == (0, len(long))
    (hit,) = store.search("needle")
    assert [msgspec.structs.replace(hit, score=0.0)] == of_page[process, 2]
    numbers = [hit.entry for hits in of_page.values() for hit in hits]
    assert len(set(numbers)) == len(numbers) > 5
    assert store.passages([*numbers, 0, numbers[0] ^ 1 << 20]) == {hit.entry: hit for hits in of_page.values() for hit in hits}
    store.commit(process, Batch(head=1, unindex=[1], erase=[2]))
    assert store.passages(numbers) == {}
    assert store.entries([(process, 1), (process, 2)]) == {}
    store.commit(process, Batch(head=1, index=[1]))
    assert not {hit.entry for hit in store.entries([(process, 1)])[process, 1]} & set(numbers)


def check_vectors(store: Store) -> None:
    """Passages wait for a vector of each embedder until they have one; a vector goes with its passage."""
    one, two = start(store, "one"), start(store, "two")
    store.commit(one, batch_of(0, {1: "alpha", 2: "beta", 3: "gamma"}))
    store.commit(two, batch_of(0, {1: "delta"}))
    waiting = store.unembedded("hash", 10)
    assert [text for _, text in waiting] == ["delta", "alpha", "beta", "gamma"]
    assert store.unembedded("hash", 2) == waiting[:2]
    store.keep_vectors("hash", [(entry, text.encode()[:4]) for entry, text in waiting if text != "beta"])
    assert store.unembedded("hash", 10) == [one for one in waiting if one[1] == "beta"]
    assert store.unembedded("other", 10) == waiting
    kept = list(store.vectors("hash"))
    assert [(vector.entry, vector.data) for vector in kept] == [
        (entry, text.encode()[:4]) for entry, text in waiting if text != "beta"
    ]
    assert [vector.number for vector in kept] == sorted({vector.number for vector in kept})
    assert list(store.vectors("hash", kept[0].number)) == kept[1:]
    assert list(store.vectors("other")) == []
    for rows in ([(waiting[2][0], b"longer")], [(waiting[2][0], b"beta"), (waiting[0][0], b"")]):
        raises(StoreError, lambda rows=rows: store.keep_vectors("hash", rows))  # type: ignore[misc]
    raises(SpecError, lambda: store.keep_vectors(" ", []))
    store.commit(one, Batch(head=1, erase=[1], unindex=[3]))
    store.commit(one, batch_of(1, {4: "epsilon"}))
    gone = {entry for entry, text in waiting if text in ("alpha", "gamma")}
    store.keep_vectors("hash", [(entry, b"late") for entry in gone] + [(waiting[2][0], b"beta")])
    assert {vector.entry for vector in store.vectors("hash")} == {entry for entry, _ in waiting} - gone
    assert [text for _, text in store.unembedded("hash", 10)] == ["epsilon"]
    store.keep_vectors("hash", [(waiting[2][0], b"BETA")])
    (*_, last) = store.vectors("hash")
    assert (last.entry, last.data) == (waiting[2][0], b"BETA")
    assert last.number > kept[-1].number
    store.keep_vectors("another", [(waiting[2][0], b"one")])
    assert store.embedders() == ["hash", "another"]
    store.drop_vectors("hash")
    store.drop_vectors("never there")
    assert store.embedders() == ["another"]
    assert list(store.vectors("hash")) == []
    assert len(store.unembedded("hash", 10)) == 3
    store.keep_vectors("hash", [(waiting[2][0], b"of another length")])


def check_threads(store: Store) -> None:
    """Several threads may use one object; of two with the same head one is refused."""
    process = start(store)
    refused: list[int] = []

    def write(number: int) -> None:
        try:
            store.commit(process, batch_of(0, {number: f"text {number}"}))
        except StoreStale:
            refused.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert len(list(store.pages(process))) == 1


def check_close(store: Store) -> None:
    """Closing twice is fine; using a closed store is a StoreError."""
    process = start(store)
    store.close()
    store.close()
    raises(StoreError, lambda: store.commit(process, batch_of(0, {1: "a"})))
    raises(StoreError, store.processes)


CHECKS: tuple[Callable[[Store], None], ...] = (
    check_is_store,
    check_processes,
    check_round_trip,
    check_states,
    check_stale,
    check_all_or_nothing,
    check_only_what_can_be_read,
    check_head,
    check_search,
    check_search_order,
    check_query_is_data,
    check_unindex,
    check_erase,
    check_histories,
    check_inherited,
    check_above,
    check_begin,
    check_together,
    check_erase_process,
    check_separate_processes,
    check_kinds,
    check_read,
    check_citations,
    check_search_within,
    check_entries,
    check_vectors,
    check_threads,
    check_close,
)
"""Each takes a fresh, empty store."""
