"""Forgetting while others write: somebody is faster at every step of it, and it ends all the same."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

import kilburn
from kilburn import Store
from kilburn.backend import Batch, SegmentInfo, State
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.budget import Budget
from kilburn.collections.collection import Collection as Memory
from kilburn.errors import Forgotten, KilburnError, StoreBusy, StoreFull, StoreStale
from kilburn.event import Act
from kilburn.kernel.segment import FREE
from kilburn.kernel.session import Session
from kilburn.memory.brought import keep
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Add, Move
from kilburn.page import Page, Place
from kilburn.policy import Acts, View
from kilburn.testing.laws import check_collection, check_laws
from kilburn.testing.stores import batch_of

TOLD = {"role": "user", "content": "I am Ana, and I live in Porto."}


class Overtaken(Sqlite):
    """Before each commit that erases, and before a segment is erased, somebody else does something."""

    do: Callable[[], Any] | None = None
    before_alone: Callable[[], Any] | None = None
    before_read: Callable[[list[tuple[int, int]]], Any] | None = None
    after_read: Callable[[], Any] | None = None
    before_pages: Callable[[int], Any] | None = None
    after_name: Callable[[str], Any] | None = None
    done = 0
    full = False
    alone: list[Collection[int]]

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.alone = []
        self._reads = Counter[tuple[int, int]]()

    def commit(self, segment: int, batch: Batch) -> None:
        if batch.erase:
            self.be_overtaken()
        super().commit(segment, batch)

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        self.be_overtaken()
        super().erase(segment, wipe=wipe)

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        wanted = list(keys)
        self._reads.update(wanted)
        if self.before_read is not None:
            self.before_read(wanted)
        rows = super().read(wanted)
        if self.after_read is not None and rows:
            self.after_read()
        return rows

    def pages(self, segment: int) -> Iterator[tuple[Page, State]]:
        if self.before_pages is not None:
            self.before_pages(segment)
        return super().pages(segment)

    def segment(self, name: str, **options: Any) -> SegmentInfo | None:
        found = super().segment(name, **options)
        if self.after_name is not None:
            self.after_name(name)
        return found

    def reads(self, key: tuple[int, int]) -> int:
        """How often a page was read."""
        return self._reads[key]

    def be_overtaken(self) -> None:
        if self.do is not None:
            self.done += 1
            try:
                self.do()
            except StoreBusy:
                self.alone.append(())

    @contextmanager
    def together(self, segments: Collection[int] = ()) -> Iterator[None]:
        self.alone.append(segments)
        if self.before_alone is not None:
            self.before_alone()
        with super().together(segments):
            yield
            if self.full:
                raise StoreFull("no space left", advice="make room")


class Two:
    """One program that forgets, and another that is faster."""

    def __init__(self, path: str) -> None:
        self.disk = Overtaken(path)
        self.store = Store(self.disk, Budget(8000), tokenizer="chars/4")
        # It does not wait when the first one is alone.
        self.other = Store(Sqlite(path, busy_timeout=0.0), Budget(8000), tokenizer="chars/4")
        self.session = self.store.session("s")
        self.session.append(TOLD)
        self.memory = self.store.memory().collection

    def append(self) -> None:
        session = self.other.session("s")
        session.ledger.refresh()
        session.append({"role": "user", "content": "and more"})

    def close(self) -> None:
        self.disk.do = self.disk.before_alone = self.disk.before_read = self.disk.before_pages = self.disk.after_name = None
        self.disk.after_read = None
        self.other.close()
        self.store.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(str(tmp_path / "m.db"))
    try:
        yield made
    finally:
        made.close()


def left(memory: Memory) -> list[str]:
    return [memory.contents.text(page.id) for page, _ in memory.pages(history=True, proposed=True)]


def once(do: Callable[[], Any]) -> Callable[[], None]:
    """Does it the first time only."""
    todo: list[Callable[[], Any]] = [do]

    def call() -> None:
        while todo:
            todo.pop()()

    return call


def test_what_was_just_made_from_a_fact_goes_with_it(two: Two) -> None:
    two.memory.apply(Add(text="Ana lives in Porto.", cites=((two.session.number, 1),)))
    of_it = Add(text="Ana may like fish.", sources=(-1,))
    two.disk.do = once(lambda: two.other.memory().collection.apply(of_it, Add(text="Ana likes cod.", sources=(-1,), refers=(0,))))
    assert two.session.forget("p1") == ["p1", "@memory f1", "@memory f2", "@memory f3"]
    assert left(two.memory) == []
    check_collection(two.memory)


def test_a_name_stays_that_something_else_has_just_taken_up(two: Two) -> None:
    fact = Add(text="Ana likes Rome.", refers=(0,), cites=((two.session.number, 1),))
    two.memory.apply(Add(text="Rome", kind=Kind.ENTITY), fact, policy="facts")
    two.disk.do = once(lambda: two.other.memory().collection.apply(Add(text="Rome is old.", sources=(1,))))
    assert two.session.forget("p1") == ["p1", "@memory f1"]
    assert left(two.memory) == ["Rome", "Rome is old."]
    check_collection(two.memory)


def test_a_session_forgets_while_somebody_always_goes_on_with_it(two: Two) -> None:
    two.disk.do = two.append
    session = two.session
    assert session.forget("p1") == ["p1"]
    assert two.disk.done == FREE + 1
    two.disk.do = None
    assert two.store.session("s") is session
    session.append({"role": "user", "content": "the same object goes on"})
    assert session.window.turn == FREE + 2
    check_laws(session)


def test_a_session_goes_as_a_whole_while_somebody_always_goes_on_with_it(two: Two) -> None:
    two.disk.do = two.append
    receipt = two.store.forget(session="s")
    assert receipt.whole == ("s",)
    assert (two.store.sessions(), inspect_store(two.disk)) == ([], [])
    with pytest.raises(KilburnError):
        two.append()


def test_of_a_session_that_goes_as_a_whole_nothing_new_is_made(two: Two) -> None:
    """Somebody goes on with it, and somebody makes a fact of what is new, always just before it would go."""
    refused: list[KilburnError] = []

    def go_on() -> None:
        two.append()
        page = two.other.session("s").window.last
        try:
            two.other.memory().collection.add("a fact", cites=((two.session.number, page),))
        except Forgotten as error:
            refused.append(error)

    two.disk.before_alone = go_on
    assert two.store.forget(session="s").whole == ("s",)
    # It came in time once.
    assert (len(two.disk.alone), len(refused)) == (2, 1)
    assert (left(two.memory), two.store.sessions(), inspect_store(two.disk)) == ([], [], [])


def test_a_chain_of_facts_does_not_grow_while_it_is_forgotten(two: Two) -> None:
    """Each cites the one before, in turns in two memories: whoever looks where it ends is late."""
    refused: list[KilburnError] = []
    tip = (two.session.number, 1)

    def add() -> None:
        nonlocal tip
        memory = two.other.memory("ana" if tip[0] == two.memory.number else "").collection
        try:
            address = memory.apply(Add(text="and so on", cites=(tip,)), policy="facts")[0]
            tip = memory.number, -int(address[1:])
        except Forgotten as error:
            refused.append(error)

    for _ in range(3):
        add()
    two.disk.do = add
    assert len(two.session.forget("p1")) == 5
    # It was added to once: from then on it could not be.
    assert len(refused) == two.disk.done - 1
    assert left(two.memory) == left(two.store.memory("ana").collection) == []
    assert inspect_store(two.disk) == []


def test_a_transaction_that_cannot_be_ended_leaves_everything_as_it_was(two: Two) -> None:
    """The disk is full when it is committed."""
    two.session.append({"role": "user", "content": "nobody cites this"})
    two.memory.apply(Add(text="Ana lives in Porto.", cites=((two.session.number, 1),)))

    def drop(segment: Session | Memory, page: int) -> None:
        with segment.contents.alone():
            assert segment.contents.drop([page]) == [page]

    for segment, page in ((two.memory, -1), (two.session, 2)):
        segment.ledger.record(Act.NOTE, why="waits")
        two.disk.full = True
        with pytest.raises(StoreFull):
            drop(segment, page)
        two.disk.full = False
        assert [event.why for event in segment.ledger.events(act=Act.NOTE)].count("waits") == 1
    assert (left(two.memory), two.session.recall("p1-p2")) == (["Ana lives in Porto."], f"{TOLD['content']}nobody cites this")
    two.session.append({"role": "user", "content": "it goes on"})
    assert two.session.forget("p1") == ["p1", "@memory f1"]
    check_laws(two.session)
    check_collection(two.memory)


def test_what_a_change_cites_is_held_with_it(two: Two) -> None:
    """In the order of their numbers, as everybody does: so no two wait for each other."""

    class Beaten(Overtaken):
        def commit(self, segment: int, batch: Batch) -> None:
            self.be_overtaken()
            super().commit(segment, batch)

    with Store(disk := Beaten(two.disk.path), Budget(8000), tokenizer="chars/4") as store:
        memory = store.memory().collection
        disk.do = lambda: two.other.memory().collection.add("faster")
        memory.apply(Add(text="Ana lives in Porto.", cites=((two.session.number, 1),)))
        disk.do = None
        assert disk.done == FREE + 1
        assert sorted(disk.alone[0]) == [two.session.number, memory.number]
        assert left(memory).count("faster") == FREE


def test_a_session_is_opened_while_somebody_goes_on_with_it(two: Two) -> None:
    """Opening it in a smaller window is a change, and another program is faster."""
    two.session.append([{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "word " * 400}])

    class Beaten(Sqlite):
        done = 0

        def commit(self, segment: int, batch: Batch) -> None:
            if not self.done:
                self.done += 1
                two.append()
            super().commit(segment, batch)

    with Store(disk := Beaten(two.disk.path), Budget(900, 100), tokenizer="chars/4") as store:
        session = store.session("s")
        assert disk.done == 1
        assert session.window.turn == 4
        session.append({"role": "user", "content": "and here"})
        check_laws(session)


def test_what_has_the_name_of_a_forgotten_session_is_another_one(two: Two) -> None:
    """Whoever has opened it, and looks for the new one by its number, finds the new one."""
    old = two.session
    two.other.forget(session="s")
    new: Session = two.other.session("s")
    new.append(TOLD)
    assert two.store.segment(new.number).number == new.number != old.number
    assert new.forget("p1") == ["p1"]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("kind", ["session", "document"])
def test_what_goes_as_a_whole_meanwhile_does_not_come_back_and_nothing_goes_that_has_its_name(
    kind: str, anew: bool, tmp_path: Path
) -> None:
    """Another program forgets what cites, and maybe begins another one of that name, at each step at which the name is read."""
    for step in itertools.count(1):
        two = Two(str(tmp_path / f"{step}.db"))
        two.session.append({"role": "assistant", "content": "Porto is old."})

        def write(two: Two, cited: int, text: str) -> None:
            cites = ((two.session.number, cited),)
            if kind == "session":
                two.other.session("Ana").append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=text),), cites=cites))
            else:
                two.other.document("Ana").add(text, cites=cites)

        def overtake(named: str, two: Two = two, left: list[int] = [*range(step)]) -> None:  # noqa: B006 - one for each step
            if named.endswith("Ana") and left and not left.pop():
                two.disk.done = 1
                two.other.forget(session="Ana") if kind == "session" else two.other.forget(document="Ana")
                if anew:
                    write(two, 2, "it is new")

        write(two, 1, "Ana lives in Porto.")
        two.disk.after_name = overtake
        assert "p1" in two.session.forget("p1")
        reached, findings = two.disk.done, inspect_store(two.disk)
        there = [two.disk.pages(info.number) for info in two.disk.segments() if info.name.endswith("Ana")]
        states = [[state.at for _, state in pages] for pages in there]
        two.close()
        if not reached:
            break
        assert [Place.DROPPED in some for some in states] == [False] * anew
        assert findings == []
    assert step > 2


def test_a_session_that_goes_as_a_whole_while_it_is_read_is_not_called_damaged(two: Two) -> None:
    quote = Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="A quotation."),), cites=((two.session.number, 1),))
    two.other.session("t").append(quote)
    number = two.other.session("t").number
    two.disk.before_pages = lambda segment: two.other.forget(session="t") if segment == number else None
    assert two.session.forget("p1") == ["p1"]
    assert [info.name for info in two.store.sessions()] == ["s"]
    two.disk.before_pages = None
    assert inspect_store(two.disk) == []


def test_a_branch_that_begins_while_its_session_goes_as_a_whole_goes_with_it(two: Two) -> None:
    def fork() -> None:
        session = two.other.session("s")
        session.append({"role": "user", "content": "and more"})
        session.fork("look there")

    two.disk.before_alone = once(fork)
    receipt = two.store.forget(session="s")
    assert receipt.whole
    assert [info.name for info in two.disk.segments() if "@" not in info.name] == []
    assert inspect_store(two.disk) == []


def test_an_answer_is_kept_without_what_is_being_forgotten_and_then_forgotten(two: Two) -> None:
    two.memory.add("the heron of Ana")
    fact = (two.memory.number, 1)
    answer = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="A heron."),))
    with two.other.backend.leaving([fact]):
        keep(two.session, answer, [fact, (two.session.number, 1)])
    assert [message["content"] for message in two.session.contents.messages()] == [TOLD["content"]]
    keep(two.session, answer, [fact])
    assert two.session.contents.messages()[-1]["content"] == "A heron."
    check_laws(two.session)


def test_an_answer_whose_fact_goes_while_it_is_kept_is_forgotten_too(two: Two) -> None:
    two.memory.add("the heron of Ana")
    fact = (two.memory.number, 1)
    two.disk.before_read = lambda keys: two.other.memory().forget("p1") if fact in keys and two.disk.reads(fact) == 2 else None
    keep(two.session, Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="A heron."),)), [fact])
    assert two.disk.reads(fact) > 2
    assert [message["content"] for message in two.session.contents.messages()] == [TOLD["content"]]


def test_a_fact_that_goes_while_what_cites_it_is_written_is_no_other_writer(two: Two) -> None:
    """A policy may ask a model in between. The message is refused as if the fact had been gone before, and an answer is kept and
    then forgotten."""

    class Beaten(Overtaken):
        def commit(self, segment: int, batch: Batch) -> None:
            if any(page.cites for page in batch.pages):
                self.be_overtaken()
            super().commit(segment, batch)

    with Store(disk := Beaten(two.disk.path), Budget(8000), tokenizer="chars/4") as store:
        session, memory = store.session("s"), store.memory()
        answer = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="A heron."),))
        for _ in range(2):
            memory.collection.add("the heron of Ana")
        disk.do = once(lambda: two.other.memory().forget("p1"))
        with pytest.raises(Forgotten):
            session.append(msgspec.structs.replace(answer, cites=((memory.collection.number, 1),)))
        disk.do = once(lambda: two.other.memory().forget("p2"))
        keep(session, answer, [(memory.collection.number, 2)])
        assert store.session("s") is session
        assert [message["content"] for message in session.contents.messages()] == [TOLD["content"]]
        check_laws(session)


def test_what_was_recalled_of_a_document_that_goes_as_a_whole_is_forgotten(two: Two) -> None:
    document = two.store.document("book")
    document.add("The heron of the book.")
    quote = Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="A heron."),), cites=((document.number, 1),))
    two.store.forget(document="book")
    with pytest.raises(Forgotten, match="as a whole"):
        two.session.append(quote)
    check_laws(two.session)


def test_a_mark_that_could_not_be_taken_away_goes_with_the_next_write_that_stays(two: Two, tmp_path: Path) -> None:
    with Sqlite(str(tmp_path / "m.db"), busy_timeout=0.0) as disk:
        busy = apsw.Connection(str(tmp_path / "m.db"))
        for write in ("commit", "begin"):
            with disk.leaving([(two.session.number, 1)]):
                busy.execute("BEGIN IMMEDIATE")
            busy.execute("ROLLBACK")
            assert len(inspect_store(disk)) == 1
            with suppress(RuntimeError), disk.together():
                disk.commit(two.session.number, Batch(head=two.session.ledger.head))
                raise RuntimeError
            assert len(inspect_store(disk)) == 1, "what is undone has taken nothing away"
            if write == "commit":
                disk.commit(two.session.number, Batch(head=two.session.ledger.head))
            else:
                disk.begin("new", batch_of(0, {1: "hello"}), time=1.0)
            assert inspect_store(disk) == []
        busy.close()


def test_who_reads_does_not_wait_while_somebody_waits_to_be_alone(two: Two, tmp_path: Path) -> None:
    with Sqlite(str(tmp_path / "m.db"), busy_timeout=60.0) as disk:
        busy = apsw.Connection(str(tmp_path / "m.db"))
        busy.execute("BEGIN IMMEDIATE")
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            with disk.together():
                pass

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            assert begun.wait(600)
            for _ in range(20):
                assert disk.read([(two.session.number, 1)])
            assert waiting.is_alive()
        finally:
            busy.execute("ROLLBACK")
            waiting.join()
            busy.close()


class Reader:
    """A policy that reads a page that is not in the window; `before` is called before that."""

    acts = Acts.ALWAYS

    def __init__(self) -> None:
        self.before: Callable[[], object] = bool

    def plan(self, view: View) -> list[Move]:
        if not view.gone(2):
            self.before()
            view.text(2)
        return []


def test_what_another_writer_forgot_is_neither_damaged_nor_a_fault_of_the_policy_that_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, policy = str(tmp_path / "a.db"), Reader()
    with (
        kilburn.open(place, tokenizer="chars/4", embedder=None) as store,
        kilburn.open(place, policy=policy, tokenizer="chars/4", embedder=None) as other,
    ):
        session = store.session("a")
        session.append(TOLD, {"role": "assistant", "content": "Hello, Ana."}, {"role": "user", "content": "Go on."})
        session.edits.evict("p2")
        policy.before = lambda: session.forget("p2")
        with pytest.raises(StoreStale):
            other.session("a").append({"role": "assistant", "content": "On it goes."})
        assert caplog.records == []
        other.session("a").append({"role": "assistant", "content": "On it goes."})
        assert caplog.records == []
        check_laws(other.session("a"))


def test_a_search_leaves_out_what_is_forgotten_while_it_searches(two: Two) -> None:
    two.session.append({"role": "user", "content": "The harbour is closed."})
    assert [hit.address for hit in two.store.search("harbour")] == ["p2"]
    two.disk.after_read = lambda: two.other.session("s").forget("p2")
    assert two.store.search("harbour") == []
