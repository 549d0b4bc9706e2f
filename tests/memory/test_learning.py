"""Learning: facts and the cursor in one transaction, each message once, failures as outcomes, untrusted reads as proposals."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn import Store
from kilburn.backend import Passage, WordIndex
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.effect import Answer, Ask, Effect, Find, Note, Outcome
from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreFull, StoreReadOnly, Unavailable
from kilburn.event import Act
from kilburn.memory import memory_tools
from kilburn.memory.learning import Learned, Learning
from kilburn.memory.view import MemoryView
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.move import Add, Retire
from kilburn.page import Claim
from kilburn.search.choice import vectors_for
from kilburn.testing import Scripted
from kilburn.testing.faults import FaultVFS


def opened(path: Any = ":memory:", **options: Any) -> Store:
    return kilburn.open(path, window=4000, policy="fifo", tokenizer="chars/4", **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(name: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def tool(number: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": text}


def texts(store: Store, owner: str = "", **options: Any) -> list[str]:
    memory = store.memory(owner)
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(**options)]


@dataclass
class Verbatim:
    """Learns each text of the exchange as it is; keeps the views that it saw."""

    def __post_init__(self) -> None:
        self.views: list[MemoryView] = []

    def plan(self, view: MemoryView) -> Sequence[Add | Retire]:
        self.views.append(view)
        return [Add(text=said.text, cites=(said.cite,)) for said in view.new]


def test_what_it_stored_can_be_read_back_at_once() -> None:
    with opened() as store:
        store.session("a").append(user("Hi, I'm Ana and I live in Porto."), assistant("Welcome!"))
        learned = store.memory().learn("a")
        memory = store.memory()
        assert [str(memory.recall(address)) for address in learned.stored] == [
            "The user's name is Ana.",
            "The user lives in Porto.",
        ]
        assert learned.memory == memory.name
        page, _ = memory.collection.read(memory.collection.contents.resolve(learned.stored[1])[0])
        assert page.cites == ((1, 1),)
        assert page.trust is Trust.USER


def test_each_message_is_learned_from_once() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("ok"))
        assert store.memory().learn("a").stored == ("f1",)
        assert store.memory().learn("a") == Learned(memory="@memory")
        session.append(user("I love tea."))
        assert store.memory().learn(session).stored == ("f2",)
        assert texts(store) == ["The user lives in Porto.", "The user likes tea."]


def test_an_update_retires_its_predecessor_and_history_stays() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("ok"))
        store.memory().learn("a")
        session.append(user("I moved to Lisbon."), assistant("ok"))
        learned = store.memory().learn("a")
        assert (learned.stored, learned.retired) == (("f2",), ("f1",))
        assert texts(store) == ["The user lives in Lisbon."]
        assert texts(store, history=True) == ["The user lives in Porto.", "The user lives in Lisbon."]
        session.append(user("I live in Lisbon."), assistant("I know"))
        assert store.memory().learn("a") == Learned(memory="@memory", unchanged=1)


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with opened(path) as store:
        store.session("a").append(user("I live in Porto."), assistant("ok"))
        store.memory().learn("a")
    with opened(path) as store:
        store.session("a").append(user("I love tea."), assistant("ok"))
        assert store.memory().learn("a").stored == ("f2",)


def test_users_have_memories_of_their_own() -> None:
    with opened() as store:
        store.session("a", user="ana").append(user("I live in Porto."))
        store.session("b", user="bo").append(user("I live in Oslo."))
        assert store.memory("ana").learn("a").memory == "@memory/ana"
        store.memory("bo").learn("b")
        assert texts(store, "ana") == ["The user lives in Porto."]
        assert texts(store, "bo") == ["The user lives in Oslo."]


def test_a_view_has_an_exchange_and_what_was_said_before() -> None:
    policy = Verbatim()
    with opened() as store:
        session = store.session("a")
        for n in range(12):
            session.append(user(f"question {n}"), assistant(f"answer {n}"))
        store.memory().learn("a", policy)
    assert [[said.text for said in view.new] for view in policy.views] == [[f"question {n}", f"answer {n}"] for n in range(12)]
    assert [said.text for said in policy.views[-1].earlier][:2] == ["question 6", "answer 6"]
    assert [len(view.earlier) for view in policy.views] == [0, 2, 4, 6, 8, *[10] * 7]
    assert {view.taint for view in policy.views} == {Trust.AGENT}


def test_tools_and_system_prompts_are_not_learned_from() -> None:
    policy = Verbatim()
    with opened() as store:
        session = store.session("a")
        session.append({"role": "system", "content": "You are kind."}, user("look"), assistant("I read", call("read", "c1")))
        session.append(tool("c1", "the user lives in Rome"), assistant("It says Rome."), user("thanks"))
        learned = store.memory().learn("a", policy)
        assert [[said.text for said in view.new] for view in policy.views] == [["look", "I read"], ["It says Rome."], ["thanks"]]
        assert [view.taint for view in policy.views] == [Trust.AGENT, Trust.TOOL, Trust.USER]
        # What follows a read is proposed, the rest is not; the user's next word is his own.
        assert learned.proposed == ("f3",)
        assert learned.stored == ("f1", "f2", "f4")
        assert "It says Rome." not in texts(store)
        # Of texts before, an untainted exchange sees only untainted ones.
        assert [said.text for said in policy.views[2].earlier] == ["look", "I read"]
        store.memory().accept("f3")
        assert "It says Rome." in texts(store)


def test_what_was_recalled_is_never_learned_again() -> None:
    policy = Verbatim()
    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("ok"))
        part = Part(kind=Kind.TEXT, text="earlier you said: I live in Porto")
        session.append(Message(role=Role.USER, parts=(part,), sources=(1,)), assistant("You live in Porto."), user("right"))
        store.memory().learn("a", policy)
    assert [said.text for view in policy.views for said in view.new] == ["I live in Porto.", "ok", "right"]


def test_a_users_text_of_low_trust_is_data() -> None:
    policy = Verbatim()
    with opened() as store:
        part = Part(kind=Kind.TEXT, text="observation: I live in Rome")
        store.session("a").append(user("go"), Message(role=Role.USER, parts=(part,), trust=Trust.TOOL), assistant("seen"))
        learned = store.memory().learn("a", policy)
    assert [[said.text for said in view.new] for view in policy.views] == [["go"], ["seen"]]
    assert learned.proposed == ("f2",)


@dataclass
class Asking:
    """Asks once for each exchange, and learns the answer."""

    def plan(self, view: MemoryView) -> Any:
        answer = yield Ask(prompt=view.new[0].text, purpose="a fact")
        if not answer.ok:
            yield Note(outcome=answer.outcome, why="no fact came")
            return ()
        return (Add(text=answer.text, cites=(view.new[0].cite,)),)


def events(store: Store, act: Act) -> list[Any]:
    return [event for event in store.memory().collection.ledger.events() if event.act is act]


def test_a_failure_is_an_outcome_and_is_tried_again_at_the_next_call() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("one"), assistant("1"), user("two"), assistant("2"))
        model = Scripted([Unavailable("down"), "two is a number"])
        learned = store.memory().learn("a", Asking(), model)
        assert (learned.stored, learned.failed) == (("f1",), ("p1-p2",))
        assert "failed" in learned.why
        assert [event.data["outcome"] for event in events(store, Act.ASK)] == [Outcome.FAILED, Outcome.DONE]
        again = Scripted(["one is a number"])
        assert store.memory().learn("a", Asking(), again).stored == ("f2",)
        assert len(again.requests) == 1
        assert store.memory().learn("a", Asking(), Scripted([])).failed == ()
        assert texts(store) == ["two is a number", "one is a number"]


def test_what_waits_and_is_forgotten_in_part_is_learned_from_once() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("one"), assistant("1"), user("two"), assistant("2"))
        assert store.memory().learn("a", Asking(), Scripted([Unavailable("down"), Unavailable("down")])).failed == (
            "p1-p2",
            "p3-p4",
        )
        session.forget("p1")
        session.forget("p3-p4")
        assert store.memory().learn("a", Asking(), Scripted(["1 is a number"])).stored == ("f1",)
        assert store.memory().learn("a", Asking(), Scripted([])) == Learned(memory="@memory")


def test_after_three_failures_the_rest_waits() -> None:
    with opened() as store:
        for n in range(8):
            store.session("a").append(user(f"q{n}"), assistant(f"a{n}"))
        model = Scripted([])
        learned = store.memory().learn("a", Asking(), model)
        assert len(model.requests) == 3
        assert len(learned.failed) == 8
        model = Scripted([f"fact {n}" for n in range(8)])
        assert len(store.memory().learn("a", Asking(), model).stored) == 8
        assert sorted(texts(store)) == [f"fact {n}" for n in range(8)]


def test_without_a_model_a_policy_that_asks_is_an_error_and_nothing_moves() -> None:
    with opened() as store:
        store.session("a").append(user("one"))
        with pytest.raises(SpecError, match="asks a model"):
            store.memory().learn("a", Asking())
        assert store.memory().learn("a", Asking(), Scripted(["fact"])).stored == ("f1",)


@pytest.mark.parametrize(
    "plan",
    [
        lambda view: 1 / 0,
        lambda view: 7,
        lambda view: [object()],
        lambda view: [Retire((99,))],
        lambda view: [Add(text="no source")],
        lambda view: [Add(text="", cites=(view.new[0].cite,))],
        lambda view: [Add(text="x", cites=((99, 1),))],
        lambda view: [Add(text="x\ud800", cites=(view.new[0].cite,))],
        lambda view: [Add(text="x" * 1_000_000, cites=(view.new[0].cite,))],
        lambda view: (Find(query="x") for _ in itertools.count()),
        lambda view: (object() for _ in range(2)),
    ],
)
def test_a_policy_that_misbehaves_writes_nothing_and_is_asked_again(plan: Any) -> None:
    @dataclass
    class Bad:
        def plan(self, view: MemoryView) -> Any:
            return plan(view)

    with opened() as store:
        store.session("a").append(user("I live in Porto."))
        assert store.memory().learn("a", Bad()).failed == ("p1",)
        assert texts(store) == []
        assert store.memory().learn("a").stored == ("f1",)


class DamagedWords:
    """An index that cannot be searched for a while."""

    def __init__(self, words: WordIndex) -> None:
        self.whole, self.damaged = words, False
        self.newest, self.entries, self.passages = words.newest, words.entries, words.passages

    def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
        if self.damaged:
            raise StoreCorrupt("the text index is damaged")
        return self.whole.search(query, segments=segments, limit=limit)


class Damaged(Sqlite):
    def __init__(self) -> None:
        super().__init__(":memory:")
        self.words = DamagedWords(self.words)


def test_a_store_that_fails_under_a_policy_is_no_failure_of_the_policy() -> None:
    store = Damaged()

    @dataclass
    class Looking:
        def plan(self, view: MemoryView) -> Any:
            store.words.damaged = True
            yield Find(query="Porto")
            return ()

    with Store(store, Budget(4000), "fifo", tokenizer="chars/4") as levels:
        levels.session("a").append(user("I live in Porto."))
        with pytest.raises(StoreCorrupt):
            levels.memory().learn("a", Looking())
        assert events(levels, Act.NOTE) == []
        store.words.damaged = False
        assert levels.memory().learn("a").stored == ("f1",)


def test_what_an_assistant_said_does_not_retire_what_the_user_said() -> None:
    @dataclass
    class Replacing:
        def plan(self, view: MemoryView) -> Any:
            standing = view.about("user", "lives in")
            claim = Claim(subject="user", relation="lives in", object=view.new[-1].text)
            add = Add(text=f"lives in {claim.object}", claim=claim, cites=(view.new[-1].cite,))
            return [add, *(Retire((page.id,), refers=0) for page, _ in standing)]

    with opened() as store:
        session = store.session("a")
        session.append(user("Porto"))
        store.memory().learn("a", Replacing())
        session.append(assistant("Lisbon"))
        learned = store.memory().learn("a", Replacing())
        assert (learned.stored, learned.retired) == (("f2",), ())
        assert texts(store) == ["lives in Porto", "lives in Lisbon"]
        session.append(user("Braga"))
        assert store.memory().learn("a", Replacing()).retired == ("f2", "f1")


def test_two_learners_at_the_same_time_learn_each_message_once(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with opened(path) as one, opened(path) as two:
        session = one.session("a")
        for n in range(20):
            session.append(user(f"I love fruit{n}."), assistant("ok"))
        found: list[Learned] = []
        threads = [threading.Thread(target=lambda store=store: found.append(store.memory().learn("a"))) for store in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(texts(one)) == sorted(f"The user likes fruit{n}." for n in range(20))
        assert sum(len(each.stored) for each in found) == 20


def test_a_full_disk_writes_neither_facts_nor_cursor(tmp_path: Path) -> None:
    with opened(tmp_path / "s.db") as store:
        store.session("a").append(user("I live in Porto."), assistant("ok"))
        memory = store.memory().collection
        commit = memory._write

        def full(batch: Any) -> None:
            raise StoreFull("no space left")

        memory._write = full  # type: ignore[method-assign]
        with pytest.raises(StoreFull):
            store.memory().learn("a")
        memory._write = commit  # type: ignore[method-assign]
        assert texts(store) == []
        assert store.memory().learn("a").stored == ("f1",)


def test_on_a_disk_that_fails_each_message_is_learned_from_once(tmp_path: Path) -> None:
    failures = 0
    for seed in range(40):
        path = str(tmp_path / f"{seed}.db")
        with Store(Sqlite(path), Budget(4000), "fifo", tokenizer="chars/4") as store:
            for n in range(4):
                store.session("a").append(user(f"question {n}"), assistant(f"answer {n}"))
        vfs = FaultVFS(f"learning-{seed}", seed=seed)
        broken = Store(Sqlite(path, vfs=vfs.name), Budget(4000), "fifo", tokenizer="chars/4")
        try:
            broken.session("a")
            vfs.arm(1 + seed)
            broken.memory().learn("a", Verbatim())
        except StoreError:
            failures += 1
        finally:
            vfs.break_down()
            with suppress(StoreError):
                broken.close()
            vfs.lose_power()
            vfs.unregister()
        with Store(Sqlite(path), Budget(4000), "fifo", tokenizer="chars/4") as store:
            store.memory().learn("a", Verbatim())
            assert texts(store) == [text for n in range(4) for text in (f"question {n}", f"answer {n}")], seed
    assert failures > 20


def test_what_the_recall_tool_showed_is_not_learned_again() -> None:
    policy = Verbatim()
    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("ok"), user("where do I live?"))
        session.append(assistant("let me see", call("recall", "c1")))
        session.append(memory_tools.call(session, "recall", '{"address": "p1"}', "c1").message("c1"), assistant("In Porto."))
        session.append(user("I work at Galp."), assistant("Good."))
        learned = store.memory().learn("a", policy)
    assert [said.text for view in policy.views for said in view.new] == [
        *("I live in Porto.", "ok", "where do I live?", "let me see", "I work at Galp.", "Good.")
    ]
    assert not learned.failed


def test_what_a_person_forgets_while_a_model_is_asked_is_left_out_and_nothing_is_called_damaged() -> None:
    @dataclass
    class Slow(Verbatim):
        """Takes so long with the first exchange that a person forgets the second one."""

        def plan(self, view: MemoryView) -> Sequence[Add | Retire]:
            if not self.views:
                session.forget("p3-p4")
            return super().plan(view)

    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("Nice."), user("I am ill."), assistant("Oh."), user("I like tea."))
        store.memory().learn("a", policy=Slow())
        assert texts(store) == ["I live in Porto.", "Nice.", "I like tea."]


def test_forgetting_a_message_forgets_what_was_learned_from_it() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("I live in Porto."), assistant("ok"), user("I love tea."))
        store.memory().learn("a")
        session.forget("p1")
        assert texts(store) == ["The user likes tea."]
        assert store.memory().learn("a").stored == ()


class Held:
    """A model that answers when it is told to."""

    name, form, context, tokenizer = "held", "chat", None, "chars/4"

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def stream(self, request: Any) -> Iterator[Any]:
        self.asked.set()
        assert self.go_on.wait(600)
        yield from Scripted(["a fact"]).stream(request)


def test_learning_in_the_background_blocks_nobody() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("one"))
        model = Held()
        with Learning(store, "a", Asking(), model) as learning:
            assert model.asked.wait(600)
            assert not learning.done
            session.append(user("two"))
            assert len(session.render()) == 2
            store.memory().collection.add("a person's fact")
            with pytest.raises(TimeoutError):
                learning.result(0.01)
            model.go_on.set()
            assert learning.result(600).stored
        assert sorted(texts(store)) == ["a fact", "a person's fact"]


def test_closing_gives_up_and_writes_nothing() -> None:
    with opened() as store:
        store.session("a").append(user("one"))
        model = Held()
        learning = Learning(store, "a", Asking(), model)
        assert model.asked.wait(600)
        assert not learning.close(0.05)
        model.go_on.set()
        learning.close(30)
        assert texts(store) == []
        assert store.memory().learn("a", Asking(), Scripted(["a fact"])).stored == ("f1",)


def test_a_store_that_is_closed_while_learning_ends_it_with_an_error(tmp_path: Path) -> None:
    store = opened(tmp_path / "s.db")
    store.session("a").append(user("one"))
    model = Held()
    learning = Learning(store, "a", Asking(), model)
    assert model.asked.wait(600)
    store.close()
    model.go_on.set()
    with pytest.raises(StoreError):
        learning.result(600)
    with opened(tmp_path / "s.db") as again:
        assert texts(again) == []
        assert again.memory().learn("a", Asking(), Scripted(["a fact"])).stored == ("f1",)


def test_a_page_that_is_forgotten_while_the_model_is_asked_is_not_learned_from() -> None:
    with opened() as store:
        session = store.session("a")
        session.append(user("my secret"), assistant("ok"), user("one"))
        model = Held()
        learning = Learning(store, "a", Asking(), model)
        assert model.asked.wait(600)
        session.forget("p1")
        model.go_on.set()
        learning.result(600)
        assert len(texts(store)) == 2
        memory = store.memory()
        assert all((1, 1) not in page.cites for page, _ in memory.pages(history=True, proposed=True))


def test_a_policy_is_named_like_any_other() -> None:
    with opened() as store:
        store.session("a").append(user("I live in Porto."))
        with pytest.raises(SpecError):
            store.memory().learn("a", "no such policy")
        with pytest.raises(SpecError):
            store.memory().learn("a", 7)
        store.memory().learn("a", "plain")
        assert {event.policy for event in events(store, Act.ADMIT)} == {"plain"}


def test_what_is_not_there_is_an_error_and_makes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "s.db") as store:
        store.session("a").append(user("I live in Porto."))
        for session, owner in (("typo", ""), ("", ""), ("a", "nul\0"), ("@memory", ""), ("\ud800", ""), ("a", "x" * 600)):
            with pytest.raises(SpecError):
                store.memory(owner).learn(session)
        assert [info.name for info in store.sessions()] == ["a"]
    with opened(tmp_path / "s.db", readonly=True) as store, pytest.raises(StoreReadOnly):
        store.memory().learn("a")


def test_each_policy_has_a_cursor_of_its_own() -> None:
    with opened() as store:
        store.session("a").append(user("I live in Porto."))
        assert store.memory().learn("a").stored == ("f1",)
        assert store.memory().learn("a", Verbatim()).stored == ("f2",)
        assert store.memory().learn("a").stored == ()


def test_about_finds_what_is_in_force_among_many() -> None:
    found: list[int] = []

    @dataclass
    class Looking:
        def plan(self, view: MemoryView) -> Any:
            found.extend(page.id for page, _ in view.about("user", "lives in"))
            return ()

    with opened() as store:
        memory = store.memory().collection
        last = 0
        for n in range(150):
            claim = Claim(subject="user", relation="lives in", object=f"town{n}")
            (address,) = memory.apply(
                Add(text=f"The user lives in town{n}.", claim=claim), *([Retire((last,), refers=0)] if last else [])
            )
            last = memory.contents.resolve(address)[0]
            memory.add(f"The user visited the town{n} that another user lives in.")
        store.session("a").append(user("hm"))
        store.memory().learn("a", Looking())
        assert found == [last]


def test_what_an_assistant_repeats_in_a_later_exchange_is_still_only_proposed() -> None:
    with opened() as store:
        session = store.session("s")
        session.append(user("Read the page."), assistant("", call("read", "c1")), tool("c1", "Ana's account is X."))
        session.append(assistant("Read."), user("Sum up. I like tea."), assistant("Ana's account is X."))
        store.memory().learn("s", policy=Verbatim())
        assert "Ana's account is X." not in texts(store)
        assert "Ana's account is X." in texts(store, proposed=True)
        assert "Sum up. I like tea." in texts(store)


class _Bicycles:
    """An embedder to which all words of cycling are one."""

    name, dimensions = "bicycles", 2

    def embed(self, texts: Sequence[str]) -> Any:
        np = pytest.importorskip("numpy")
        rows = [[1.0, 0.0] if any(word in text for word in ("bicycle", "cycling", "bike")) else [0.0, 1.0] for text in texts]
        return np.array(rows, dtype=np.float32)


class _Looking:
    """A policy that looks for something, and keeps what it found."""

    def __init__(self, query: str, limit: int) -> None:
        self.query, self.limit = query, limit
        self.found: list[str] = []

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add]]:
        answer = yield Find(query=self.query, limit=self.limit)
        self.found = [hit.text for hit in answer.hits]
        return ()


def test_what_a_policy_looks_for_is_found_by_meaning_too() -> None:
    backend = Sqlite(":memory:")
    with Store(backend, Budget(4000), "fifo", tokenizer="chars/4", vectors=vectors_for(backend, _Bicycles())) as store:
        memory = store.memory()
        for text in ("Ana rides a red bicycle.", "Ana likes to go to work early.", "Ana is at work."):
            memory.remember(text)
        assert store.vectors is not None
        store.vectors.catch_up()  # type: ignore[attr-defined]
        store.session("s").append({"role": "user", "content": "Cycling to work is fun."})
        looking = _Looking("cycling to work", 2)
        memory.learn("s", policy=looking)
        assert looking.found[1:] == ["Ana rides a red bicycle."]
        assert "work" in looking.found[0]
