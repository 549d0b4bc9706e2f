"""LangGraph's store over Kilburn's memory does what LangGraph's own does, and keeps what was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.testing.clock import FakeClock

pytest.importorskip("langgraph.store.base", reason="LangGraph is not installed: pip install '.[langgraph]' in the checkout")

from langgraph.store.base import GetOp, InvalidNamespaceError, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from kilburn.adapters.history import Recollections
from kilburn.adapters.langgraph_store import KilburnStore

ANA, RUI = ("memories", "ana"), ("memories", "rui")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Iterator[kilburn.Store]:
    with kilburn.Store(Sqlite(":memory:"), Budget(8000), tokenizer="chars/4", clock=clock) as store:
        yield store


def told(value: Any) -> Any:
    """A result without its times, which no two stores share."""
    if isinstance(value, list):
        return [told(each) for each in value]
    return (value.namespace, value.key, value.value) if hasattr(value, "created_at") else value


def put(namespace: tuple[str, ...], key: str, value: Any, **options: Any) -> PutOp:
    return PutOp(namespace, key, value, **options)


def listed(**options: Any) -> ListNamespacesOp:
    return ListNamespacesOp(**options)


STEPS: list[list[Any]] = [
    [put(ANA, "tea", {"sort": "green", "cups": 2}), put(ANA, "town", {"name": "Porto", "at": {"since": 2019}})],
    [put(RUI, "tea", {"sort": "black", "cups": 5, "with": ["milk", "sugar"]}), GetOp(RUI, "tea")],
    [GetOp(ANA, "tea"), GetOp(ANA, "none")],
    [put(ANA, "tea", {"sort": "white", "cups": 3}), put(ANA, "tea", {"sort": "mint", "cups": 1})],
    [GetOp(ANA, "tea"), SearchOp(("memories",)), SearchOp(ANA), SearchOp(())],
    [SearchOp(("memories",), limit=2, offset=1), SearchOp(("memo",)), SearchOp(("memories",), limit=0)],
    [SearchOp(("memories",), {"sort": "mint"}), SearchOp(RUI, {"cups": {"$gte": 1, "$lt": 6}, "sort": {"$ne": "x"}})],
    [SearchOp((), {"at": {"since": 2019}}), SearchOp((), {"with": ["milk", "sugar"]}), SearchOp((), {"at": None, "cups": 5})],
    [put(("papers",), "p", {"title": "Atlas"}), put(("papers", "old", "x"), "p", {"title": "Titan"}), listed()],
    [listed(), listed(max_depth=1), listed(limit=2, offset=1), listed(max_depth=2, limit=2)],
    [listed(match_conditions=(MatchCondition("prefix", ("*", "ana")),))],
    [listed(match_conditions=(MatchCondition("prefix", ("papers",)), MatchCondition("suffix", ("old", "*"))))],
    [put(ANA, "town", None), put(ANA, "never", None)],
    [SearchOp(ANA), put(ANA, "town", {"name": "Braga"}), SearchOp(ANA)],
    [SearchOp(ANA), put(("empty",), "key with spaces/and.dots é", {}), put(("empty",), "", {"a": None, "b": [1.5, True, "x\n"]})],
    [SearchOp(("empty",)), GetOp(("empty",), "")],
]


def test_it_does_what_langgraphs_own_store_does(store: kilburn.Store) -> None:
    ours, theirs = KilburnStore(store), InMemoryStore()
    for step in STEPS:
        expected = theirs.batch(step)
        assert told(ours.batch(step)) == told(expected), step
        assert told(KilburnStore(store).batch([SearchOp(())])) == told(ours.batch([SearchOp(())])), "as after a restart"


async def test_the_verbs(store: kilburn.Store) -> None:
    kept = KilburnStore(store)
    await kept.aput(ANA, "tea", {"sort": "green"})
    kept.put(ANA, "tea", {"sort": "mint"})
    item = await kept.aget(ANA, "tea")
    assert item is not None
    assert item.value == {"sort": "mint"}
    assert item.created_at < item.updated_at
    assert item.created_at.tzinfo is not None
    assert [found.key for found in await kept.asearch(("memories",))] == ["tea"]
    assert await kept.alist_namespaces(prefix=("memories",)) == [ANA]
    await kept.adelete(ANA, "tea")
    await kept.adelete(RUI, "tea")
    assert kept.get(("nobody",), "tea") is None
    assert [each.info.user for each in store.collections()] == ["memories.ana"], "what only reads makes no memory"
    assert kept.get(ANA, "tea") is None
    assert kept.list_namespaces() == []
    kept.put(ANA, "tea", {"sort": "black"})
    again = kept.get(ANA, "tea")
    assert again is not None
    assert again.created_at == again.updated_at, "it began anew"


def test_a_search_ranks_and_fills_up(store: kilburn.Store) -> None:
    kept = KilburnStore(store)
    for number in range(30):
        kept.put(ANA, f"shelf{number}", {"text": f"Shelf {number} holds {('screws', 'paint', 'rope')[number % 3]}."})
    kept.put(ANA, "tea", {"text": "She drinks her tea without sugar."})
    kept.put(ANA, "secret", {"text": "Tea and sugar, but not for searches."}, index=False)
    kept.put(RUI, "tea", {"text": "Rui drinks his tea with much sugar."})
    store.memory("memories.ana").remember("A fact about sugar in tea that is no item.")
    found = kept.search(ANA, query="sugar in the tea", limit=3)
    assert [item.key for item in found] == ["tea", "shelf0", "shelf1"]
    assert found[0].score is not None
    assert found[1].score is None, "it does not match"
    both = kept.search(("memories",), query="sugar in the tea", limit=2)
    assert {item.namespace for item in both} == {ANA, RUI}
    assert [item.key for item in kept.search(ANA, query="shelf paint", filter={"text": "Shelf 4 holds paint."})] == ["shelf4"]
    assert kept.search(ANA, filter={"cups": {"$gt": 1}}) == [], "LangGraph's own raises a TypeError"
    assert [item.key for item in kept.search(ANA, query="tea", limit=1, offset=1)] == ["shelf0"]
    kept.delete(ANA, "tea")
    assert kept.search(ANA, query="sugar in the tea", limit=1)[0].score is None


def test_items_are_pages_of_the_memory(store: kilburn.Store, clock: FakeClock) -> None:
    kept = KilburnStore(store)
    kept.put(("ana",), "home", {"town": "Porto, near the river"})
    then = clock()
    kept.put(("ana",), "home", {"town": "Braga, near the river"})
    (now,) = store.search("Which town near the river?", user="ana", abstain=True)
    assert "Braga" in now.text
    (before,) = store.search("Which town near the river?", user="ana", at=then, abstain=True)
    assert "Porto" in before.text
    message = Recollections(store, user="ana").about("Which town near the river?")
    assert message is not None
    assert "Braga" in message.parts[0].text
    memory = store.memory("ana")
    assert [version.page.address for version in memory.history("p2")] == ["p1", "p2"]
    memory.undo("p2")
    item = kept.get(("ana",), "home")
    assert item is not None
    assert item.value == {"town": "Porto, near the river"}
    kept.put(("ana",), "home", {"town": "Faro"})
    store.forget(user="ana")
    assert kept.get(("ana",), "home") is None
    assert kept.list_namespaces() == []
    kept.put(("ana",), "home", {"town": "Evora"})
    assert [item.value for item in kept.search(("ana",))] == [{"town": "Evora"}]


def test_a_time_to_live(store: kilburn.Store, clock: FakeClock) -> None:
    kept = KilburnStore(store)
    kept.put(ANA, "code", {"text": "The door's code is 4711."}, ttl=5)
    kept.put(ANA, "name", {"text": "The door is green."}, ttl=None)
    clock.advance(200)
    assert kept.get(ANA, "code") is not None
    clock.advance(200)
    assert kept.get(ANA, "code") is None
    assert [item.key for item in kept.search(ANA, query="door code")] == ["name"]
    kept.put(ANA, "code", {"text": "The door's code is 4712."})
    assert [item.key for item in kept.search(ANA)] == ["name", "code"]


@pytest.mark.parametrize(
    "wrong",
    [{"at": object()}, {"x": float("nan")}, {"x": {1, 2}}, {"x": "\ud800"}, {"x": "long" * 300_000}],
    ids=["object", "nan", "set", "surrogate", "long"],
)
def test_what_cannot_be_kept_is_refused_and_nothing_is_written(store: kilburn.Store, wrong: Any) -> None:
    kept = KilburnStore(store)
    with pytest.raises(kilburn.KilburnError):
        kept.batch([put(ANA, "good", {"x": 1}), put(RUI, "wrong", wrong)])
    assert kept.list_namespaces() == []
    with pytest.raises(InvalidNamespaceError):
        kept.batch([put(("a.b",), "good", {"x": 1})])
    with pytest.raises(kilburn.KilburnError):
        kept.put(ANA, "k" * 2000, {"x": 1})
    with pytest.raises(kilburn.KilburnError):
        kept.search((), filter={"x": {"$like": 1}}) if not kept.put(ANA, "good", {"x": 1}) else None
    long = {"x": "words " * 10_000}
    kept.put(ANA, "long", long)
    item = kept.get(ANA, "long")
    assert item is not None
    assert item.value == long


def test_two_programs_and_many_threads(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, embedder=None) as one, kilburn.open(path, embedder=None) as other:
        stores = [KilburnStore(one), KilburnStore(other)]

        def work(thread: int) -> None:
            for number in range(8):
                stores[thread % 2].put(ANA, "shared", {"by": thread})
                stores[thread % 2].put(ANA, f"t{thread}-{number}", {"n": number})

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        items = [store.search(ANA, limit=100) for store in stores]
        assert told(items[0]) == told(items[1])
        assert len(items[0]) == 33, "one of them is shared"
        pages = [page for page, _ in one.memory("memories.ana").pages() if page.claim and page.claim.subject == "shared"]
        assert len(pages) == 1, "no two pages of one key are true at once"


async def test_tasks_that_are_cancelled(store: kilburn.Store) -> None:
    kept = KilburnStore(store)
    tasks = [asyncio.create_task(kept.aput(ANA, "key", {"n": number})) for number in range(10)]
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await kept.aput(ANA, "key", {"n": 10})
    assert [item.value for item in await kept.asearch(ANA)] == [{"n": 10}]


def test_a_graph_with_the_store(store: kilburn.Store) -> None:
    from langgraph.graph import END, START, StateGraph
    from langgraph.runtime import Runtime
    from typing_extensions import TypedDict

    class Told(TypedDict):
        said: str

    def note(state: Told, runtime: Runtime[None]) -> Told:
        assert runtime.store is not None
        runtime.store.put(ANA, "last", {"said": state["said"]})
        return state

    builder = StateGraph(Told)
    builder.add_node("note", note)
    builder.add_edge(START, "note")
    builder.add_edge("note", END)
    builder.compile(store=KilburnStore(store)).invoke({"said": "The pump is K-4711."})
    assert "K-4711" in store.search("pump", where="facts")[0].text


def test_a_search_by_meaning(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), embedder="hashing(64)") as store:
        kept = KilburnStore(store)
        for number in range(5):
            kept.put(ANA, f"k{number}", {"text": f"The harbour of town {number} is deep."})
        found = kept.search(ANA, query="harbours in towns")
        assert len(found) == 5
        assert found[0].score is not None
