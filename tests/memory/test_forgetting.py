"""Forgetting by page, session, user, document, tool and source: nothing of it is left in any file, and no route finds it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn import Store
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import Forgotten, KernelError, SpecError, StoreReadOnly, StoreStale
from kilburn.event import Act
from kilburn.memory.documents import ingest_text
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Add, Fold, Retire
from kilburn.page import Claim, Place

pytest.importorskip("semantic_text_splitter")

EMBEDDER = "hand-made"
VECTOR = b"canaryvector" * 8
CALL = {"id": "canarycall", "type": "function", "function": {"name": "canarytool", "arguments": '{"canaryargument": 1}'}}


def fill(store: Store) -> None:
    """One user's session, memory and document, with a canary in every field, and facts made from them elsewhere."""
    ana = store.session("canarysession", user="canaryuser")
    ana.append({"role": "user", "content": "canarytext I moved to Porto", "name": "canaryname"})
    ana.append({"role": "assistant", "content": "canaryreply", "tool_calls": [CALL]})
    ana.append({"role": "tool", "tool_call_id": "canarycall", "content": "canaryresult"})
    ana.append({"role": "user", "content": "canarylast"})
    ana.unpin("p1")
    ana.edits.apply(Fold(pages=(1,), text="canarysummary", why="canarywhy"))
    ana.search("canaryquery")
    ana.ledger.record(Act.NOTE, policy="learner", why="canarynote", canarykey="canarydata")
    number = ana.number
    memory, shared = store.memory("canaryuser"), store.memory()
    claim = Claim(subject="canarysubject", relation="canaryrelation", object="canaryobject")
    memory.collection.apply(
        Add(text="canaryentity", kind=Kind.ENTITY, why="canarywhy"),
        Add(text="canaryfact", claim=claim, cites=((number, 1),), refers=(0,), why="canarywhy"),
        policy="learner",
    )
    memory.collection.add("canarytold", claim=claim, importance=0.5, why="canarywhy")
    memory.collection.apply(
        Add(text="canarynewer", sources=(-1,), why="canarywhy"), Retire(pages=(-1,), refers=0, why="canarywhy")
    )
    memory.collection.ledger.record(Act.NOTE, outcome="canaryoutcome", why="canarywhy", figure="canaryfigure")
    shared.collection.apply(Add(text="canaryshared", cites=((number, 1), (number, -1)), why="canarywhy"))
    shared.collection.apply(Add(text="canaryfromtool", cites=((number, 4),), why="canarywhy"), policy="learner")
    ingest_text(store, "canarychunk one. " * 80, "canaryfolder/canaryfile.md", "canaryuser")
    document = store.document("canaryfolder/canaryfile.md").number
    shared.collection.apply(Add(text="canaryfromdocument", cites=((document, 1),), why="canarywhy"))
    waiting = [entry for entry, _ in store.backend.vectors.unembedded(EMBEDDER, 1000)]
    store.backend.vectors.add(EMBEDDER, [(entry, VECTOR) for entry in waiting[: len(waiting) // 2]])


def keep(store: Store) -> None:
    """What somebody else has, and must keep."""
    store.session("light").append({"role": "user", "content": "the lamp burns colza oil"})
    store.memory("bob").collection.add("Bob keeps the lamp")
    ingest_text(store, "A manual of lamps.", "manual")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    with kilburn.open(str(tmp_path / "store" / "agent.db"), tokenizer="chars/4", policy="fifo") as store:
        keep(store)
        fill(store)
        keep(store)
    return tmp_path / "store" / "agent.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with kilburn.open(str(path), tokenizer="chars/4", policy="fifo", embedder="hashing") as opened:
        yield opened


@pytest.fixture
def still(path: Path) -> Iterator[Store]:
    """The store without an embedder, which would make its vectors anew in the background."""
    with kilburn.open(str(path), tokenizer="chars/4", policy="fifo", embedder=None) as opened:
        yield opened


def canaries(path: Path) -> set[bytes]:
    """The canaries that any file of the store's folder has."""
    data = b"".join(file.read_bytes() for file in path.parent.iterdir())
    return set(re.findall(rb"canary[a-z]*", data))


def told(store: Store) -> str:
    """Everything that the store's verbs say of any segment."""
    found: list[Any] = []
    for info in store.backend.segments():
        found += [info, *store.backend.events(info.number), *store.backend.pages(info.number)]
    for collection in store.collections():
        for page, state in collection.pages(history=True, proposed=True):
            found += [page, state, collection.contents.text(page.id), collection.history(page.address)]
    found += store.backend.vectors.read(EMBEDDER)
    found += store.backend.vectors.unembedded(EMBEDDER, 1000)
    words = ("canarytext", "canaryfact", "canaryshared", "canarychunk", "canarytold", "canaryfromtool", "Porto")
    for word in words:
        recalled = store.search(word, 10_000, abstain=True)
        hits = [*recalled, *recalled.withheld, *store.search(word, 10_000), *store.search(word, 10_000, at=store.clock() - 0.01)]
        found += [(hit.session, hit.address, hit.text, hit.claim, hit.speaker) for hit in hits]
        found += store.backend.words.search(word)
    for info in store.sessions():
        found += [store.session(info.name).contents.messages(), list(store.session(info.name).ledger.events())]
    return repr(found)


def check_kept(store: Store) -> None:
    assert store.session("light").recall("p1") == "the lamp burns colza oil"
    assert store.memory("bob").collection.contents.text(1) == "Bob keeps the lamp"
    assert store.document("manual").contents.text(1) == "A manual of lamps."
    assert inspect_store(store.backend) == []  # type: ignore[attr-defined]


def test_of_a_user_no_byte_is_left_and_no_route_finds_one(path: Path, store: Store) -> None:
    assert len(canaries(path)) > 12
    assert "canary" in told(store)
    held = store.session("canarysession"), store.memory("canaryuser")
    before = store.forget(user="canaryuser", dry=True)
    assert "canaryshared" in told(store)
    receipt = store.forget(user="canaryuser", why="asked by her")
    assert (receipt.pages, receipt.places, receipt.whole) == (before.pages, before.places, before.whole)
    assert set(receipt.whole) == {"canarysession", "@memory/canaryuser", "@document/canaryfolder/canaryfile.md"}
    assert set(receipt.pages) == {*receipt.whole, "@memory"}
    assert receipt.places["folds"] == 1
    assert receipt.places["facts"] == 6
    assert receipt.places["index entries"] > 8
    assert "canary" not in told(store)
    for session in held:
        with pytest.raises(StoreStale):
            session.recall("p1")
    check_kept(store)
    store.close()
    assert canaries(path) == set()
    with kilburn.open(str(path), tokenizer="chars/4", policy="fifo") as again:
        assert "canary" not in told(again)
        check_kept(again)
        assert again.session("canarysession").append({"role": "user", "content": "new"}) == "p1"


def test_before_it_is_closed_no_byte_is_left_either(path: Path, store: Store) -> None:
    store.forget(user="canaryuser")
    assert canaries(path) == set()


@pytest.mark.parametrize(
    ("what", "whole", "others"),
    [
        ({"session": "canarysession"}, ["canarysession"], {"@memory", "@memory/canaryuser"}),
        ({"document": "canaryfolder/canaryfile.md"}, ["@document/canaryfolder/canaryfile.md"], {"@memory"}),
        ({"session": "@memory/canaryuser"}, ["@memory/canaryuser"], set()),
    ],
)
def test_a_whole_process_goes_with_all_that_was_made_from_it(
    path: Path, store: Store, what: dict[str, str], whole: list[str], others: set[str]
) -> None:
    receipt = store.forget(**what)
    assert list(receipt.whole) == whole
    assert set(receipt.pages) == {*whole, *others}
    assert not {info.name for info in store.backend.segments()} & set(whole)
    check_kept(store)
    left = told(store)
    for name in whole:
        assert name not in left


def test_of_a_session_a_document_and_the_facts_told_nothing_is_left(path: Path, store: Store) -> None:
    store.forget(session="canarysession")
    store.forget(document="canaryfolder/canaryfile.md")
    store.forget(session="@memory/canaryuser")
    assert "canary" not in told(store)
    store.close()
    assert canaries(path) == set()


def test_the_results_of_a_tool_go_and_what_was_made_from_them(store: Store) -> None:
    receipt = store.forget(tool="canarytool")
    assert receipt.pages == {"canarysession": ("p4",), "@memory": ("f2",)}
    assert receipt.whole == ()
    left = told(store)
    assert "canaryresult" not in left
    assert "canaryfromtool" not in left
    assert "canaryfact" in left
    assert store.forget(tool="canarytool").pages == {}
    assert store.forget(tool="no such tool").pages == {}


def test_what_was_learned_from_a_source_goes_and_the_source_stays(store: Store) -> None:
    receipt = store.forget(source="canarysession")
    assert set(receipt.pages) == {"@memory", "@memory/canaryuser"}
    assert store.session("canarysession").recall("p1") == "canarytext I moved to Porto"
    receipt = store.forget(source="canaryfolder/canaryfile.md")
    assert set(receipt.pages) == {"@memory"}
    assert store.document("canaryfolder/canaryfile.md").pages(limit=1)
    assert [page.address for page, _ in store.memory().pages(proposed=True)] == []


def test_a_page_goes_with_its_fold_and_facts(path: Path, store: Store) -> None:
    dry = store.forget(session="canarysession", address="p1", dry=True)
    receipt = store.forget(session="canarysession", address="p1")
    assert receipt.pages == dry.pages
    assert receipt.pages["canarysession"] == ("f1", "p1")
    assert receipt.asked == {"session": "canarysession", "address": "p1"}
    left = told(store)
    for gone in ("canarytext", "canarysummary", "canaryfact", "canaryshared", "canaryentity"):
        assert gone not in left, gone
        assert gone.encode() not in b"".join(file.read_bytes() for file in path.parent.iterdir()), gone
    with pytest.raises(Forgotten):
        store.forget(session="canarysession", address="p1")
    assert store.session("canarysession").recall("p4") == "canaryresult"


def test_a_fact_is_forgotten_by_its_address_too(store: Store) -> None:
    receipt = store.forget(session="@memory/canaryuser", address="f1")
    assert receipt.left == (("canarysession", "what goes was made from it"),)
    assert set(receipt.pages) == {"@memory/canaryuser"}
    assert "canarynewer" not in told(store)


def test_places_outside_the_store_are_told_and_named(store: Store) -> None:
    gone: list[int] = []
    store.session("canarysession").erasers["the shelf of spilled pages"] = gone.extend
    receipt = store.forget(session="canarysession")
    assert receipt.told == ("the shelf of spilled pages",)
    assert {1, 2, 3, 4} <= set(gone)
    assert receipt.unreached


@pytest.mark.parametrize("what", [{"session": "canarysession"}, {"session": "canarysession", "address": "p1"}])
def test_a_place_outside_that_fails_keeps_nothing_from_going(
    path: Path, store: Store, what: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def full(pages: Iterable[int]) -> None:
        raise OSError(f"cannot erase {pages}")

    session, gone = store.session("canarysession"), list[int]()
    # It was made from a page of the other one, so it goes first.
    text = (Part(kind=Kind.TEXT, text="canaryquote"),)
    quote = store.session("quotes")
    quote.append(Message(role=Role.USER, parts=text, cites=((session.number, 1),)))
    quote.erasers["full"] = full
    session.erasers["full"], session.erasers["shelf"] = full, gone.extend
    with pytest.raises(OSError, match="cannot erase"):
        store.forget(**what)
    assert 1 in gone
    assert all(f"session {each}: what was forgotten" in caplog.text for each in ("quotes", "canarysession"))
    left = told(store)
    for each in ("canarytext", "canaryquote", "canarysummary", "canaryfact"):
        assert each not in left, each
        assert each.encode() not in b"".join(file.read_bytes() for file in path.parent.iterdir()), each
    assert ("canarysession" in {info.name for info in store.sessions()}) == ("address" in what)


def test_exports_are_named_and_stay(store: Store) -> None:
    session = store.session("canarysession")
    with session.edits.batch() as kernel:
        kernel.record(Act.NOTE, policy="user", cause="user", export="/tmp/copy.jsonl", last=4)
    receipt = store.forget(user="canaryuser")
    assert [(export.session, export.to) for export in receipt.exports] == [("canarysession", "/tmp/copy.jsonl")]


BAD = [
    "",
    " ",
    "nobody",
    "canaryuse",
    "%",
    "canaryuser' OR '1'='1",
    '") or true or ("',
    "*",
    "canary*",
    "a\0b",
    "\ud800",
    "\u202e",
    "@forgotten/1",
]


def test_a_user_who_has_nothing_is_not_the_session_of_that_name(store: Store) -> None:
    for name in ("light", "@memory/bob", "@document/manual"):
        with pytest.raises(SpecError, match="no user"):
            store.forget(user=name)
    check_kept(store)


@pytest.mark.parametrize("what", ["user", "session", "document", "source"])
def test_a_name_that_is_nobodys_forgets_nothing(still: Store, what: str) -> None:
    before = told(still)
    for name in BAD:
        with pytest.raises(SpecError):
            still.forget(**{what: name})  # type: ignore[arg-type]
    assert told(still) == before


def test_a_tool_or_an_address_of_no_page_forgets_nothing(still: Store) -> None:
    before = told(still)
    with pytest.raises(SpecError, match="half characters"):
        still.forget(tool="\ud800")
    for name in BAD:
        assert name == "\ud800" or still.forget(tool=name).pages == {}
        with pytest.raises(KernelError):
            still.forget(session="canarysession", address=name)
    assert told(still) == before


@pytest.mark.parametrize("asked", [{}, {"user": "a", "session": "b"}, {"address": "p1"}, {"user": "a", "address": "p1"}])
def test_it_must_be_said_what(store: Store, asked: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="one of"):
        store.forget(**asked)  # type: ignore[arg-type]


def test_a_reader_forgets_nothing_and_may_ask_what_would_go(path: Path) -> None:
    with kilburn.open(str(path), readonly=True, tokenizer="chars/4", policy="fifo") as store:
        assert store.forget(user="canaryuser", dry=True).places["facts"] == 6
        with pytest.raises(StoreReadOnly):
            store.forget(user="canaryuser")


DYING = """
import os, sys
from contextlib import contextmanager
import kilburn
from kilburn.backends.sqlite import Sqlite

left = int(sys.argv[2])

class Dying(Sqlite):
    def commit(self, process, batch):
        super().commit(process, batch)
        self._count(bool(batch.erase))

    erased = False

    def erase(self, process):
        super().erase(process)
        self.erased = True

    @contextmanager
    def together(self, segments=()):
        with super().together(segments):
            yield
        if self.erased:
            self._count(True)

    def _count(self, erased):
        global left
        left -= erased
        if erased and left <= 0:
            os._exit(9)

from kilburn.budget import Budget
from kilburn import Store
store = Store(Dying(sys.argv[1]), Budget(8000), "fifo", tokenizer="chars/4")
store.forget(user="canaryuser")
os._exit(0)
"""


def test_after_a_crash_in_the_middle_nothing_dangles_and_asking_again_goes_on(path: Path) -> None:
    steps = 0
    while True:
        steps += 1
        done = subprocess.run([sys.executable, "-c", DYING, str(path), "1"], check=False, timeout=600)
        assert done.returncode in (0, 9, 1)
        with kilburn.open(str(path), tokenizer="chars/4", policy="fifo") as store:
            check_kept(store)
            left = [info for info in store.backend.segments() if info.user == "canaryuser"]
            for collection in store.collections():
                for page, _ in collection.pages(history=True, proposed=True):
                    assert len(store.backend.read(page.cites)) == len(page.cites)
                    assert all(state.at is not Place.DROPPED for _, state in store.backend.read(page.cites).values())
        if not left:
            break
    assert steps > 5
    assert canaries(path) == set()


@pytest.mark.parametrize("where", ["agent.db", ":memory:"])
def test_a_reason_that_quotes_what_superseded_a_fact_goes_with_it(tmp_path: Path, where: str) -> None:
    place = tmp_path / where if where == "agent.db" else where
    with kilburn.open(str(place), tokenizer="chars/4") as store:
        session, memory = store.session("s"), store.memory("ana")
        session.append({"role": "user", "content": "hello"})
        cites = ((session.number, 1),)
        memory.collection.add("old")
        moved = Add(text="canarynew", cites=cites)
        memory.collection.apply(moved, Retire((1,), refers=0, why="canaryreason"), policy="learner")
        memory.collection.apply(Retire((-1,), by=1, why="canaryheld"), policy="learner", tainted=True)
        memory.forget("f1")
        assert "canary" not in repr(list(memory.collection.ledger.events()))
    assert where == ":memory:" or not canaries(tmp_path / where)
