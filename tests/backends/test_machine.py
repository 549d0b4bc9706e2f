"""Any sequence of batches and reopenings: the store shows what a plain model of it shows, whose search compares every word."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from effort import rounds
from kilburn.backend import Batch, SegmentInfo, State
from kilburn.backends.passages import add_name_parts, passages
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import StoreError, StoreStale
from kilburn.event import Event
from kilburn.page import Page, Place, Span, digest_of, make_tombstone
from kilburn.testing.stores import batch_of

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(["alpha", "beta", "foo_bar", "getUser", "src/a.py", "\n", "日本語", "\0"]), max_size=400).map(
        " ".join
    ),
)
STATES = st.builds(State, st.sampled_from(["in", "stub", "out", "folded", "retired"]), st.booleans(), st.floats(-1e6, 1e6))
IDS = st.integers(-6, 12)

Row = tuple[Page, State]


class Model:
    """What a segment of a store must show after its batches, in plain dicts."""

    def __init__(self, number: int, name: str) -> None:
        self.info = SegmentInfo(number=number, name=name, created=1.0, used=1.0)
        self.rows: dict[int, Row] = {}
        self.events: list[Event] = []
        self.texts: dict[int, str] = {}
        self.indexed: set[int] = set()

    def pages(self) -> list[Row]:
        return [self.rows[number] for number in sorted(self.rows, key=lambda number: (number < 0, abs(number)))]

    def commit(self, batch: Batch) -> None:
        if batch.head != self.info.head:
            raise StoreStale("the ledger has moved on")
        new = {page.id for page in batch.pages}
        named = {*batch.states, *batch.index, *batch.unindex, *batch.erase}
        if new & self.rows.keys() or named - new - self.rows.keys() or set(batch.index) & self.rows.keys() - self.texts.keys():
            raise StoreError("the batch contradicts itself")
        for page in batch.pages:
            self.rows[page.id] = page, State()
            self.texts[page.id] = batch.texts[page.digest]
        for number, state in batch.states.items():
            self.rows[number] = self.rows[number][0], state
        self.indexed = (self.indexed | set(batch.index)) - {*batch.unindex, *batch.erase}
        for number in batch.erase:
            self.rows[number] = make_tombstone(self.rows[number][0]), State(Place.DROPPED)
            self.texts.pop(number, None)
        self.events += batch.events
        self.info = msgspec.structs.replace(
            self.info,
            head=len(self.events),
            pages=len(self.rows),
            tokens=self.info.tokens + sum(page.tokens for page in batch.pages),
            used=max([self.info.used, *(event.time for event in batch.events)]),
        )

    def having(self, word: str) -> set[tuple[int, int, Span]]:
        return {
            (self.info.number, number, span)
            for number in self.indexed
            for span in passages(self.texts[number])
            if word in re.findall(r"\w+", add_name_parts(self.texts[number][slice(*span)]).lower())
        }


def outcome(do: Callable[[], None]) -> type[StoreError] | None:
    try:
        do()
    except StoreError as error:
        return type(error)
    return None


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sqlite = self.opened()
        self.models = Model(1, "one"), Model(2, "two")
        for model in self.models:
            assert self.sqlite.segment(model.info.name, time=1.0) == model.info

    @rule(
        segment=st.integers(1, 3),
        late=st.sampled_from([0, 0, 0, 0, 1]),
        texts=st.dictionaries(IDS.filter(bool), TEXTS, max_size=3),
        states=st.dictionaries(IDS, STATES, max_size=2),
        events=st.integers(0, 3),
        others=st.tuples(*[st.lists(IDS, max_size=1)] * 3),
    )
    def commit(
        self,
        segment: int,
        late: int,
        texts: dict[int, str],
        states: dict[int, State],
        events: int,
        others: tuple[list[int], list[int], list[int]],
    ) -> None:
        head = self.models[segment - 1].info.head + late if segment < 3 else 0
        batch = batch_of(head, texts, states=states, events=events)
        batch.index = [*batch.index, *others[0]]
        batch.unindex, batch.erase = others[1:]
        self.both(segment, batch)

    @rule(segment=st.integers(1, 2), data=st.data())
    def move(self, segment: int, data: st.DataObject) -> None:
        """A batch that only names pages that exist, so that most are accepted."""
        ids = [page.id for page, _ in self.models[segment - 1].pages()]
        some = st.lists(st.sampled_from(ids), max_size=3, unique=True) if ids else st.just([])
        batch = Batch(head=self.models[segment - 1].info.head)
        batch.states = dict.fromkeys(data.draw(some), data.draw(STATES))
        batch.unindex = data.draw(some)
        batch.erase = data.draw(some)
        self.both(segment, batch)

    def both(self, segment: int, batch: Batch) -> None:
        wanted = outcome(lambda: self.models[segment - 1].commit(batch)) if segment < 3 else StoreError
        assert outcome(lambda: self.sqlite.commit(segment, batch)) == wanted

    @rule()
    def reopen(self) -> None:
        self.sqlite.close()
        self.sqlite = self.opened()

    @rule(query=st.one_of(TEXTS, st.sampled_from(["alpha", "foo", "user", "a.py", "日本"])))
    def search(self, query: str) -> None:
        self.sqlite.words.search(query)
        for word in ("alpha", "beta", "foo", "user"):
            hits = {(hit.segment, hit.page, hit.span) for hit in self.sqlite.words.search(word, limit=10_000)}
            assert hits == set().union(*(model.having(word) for model in self.models))

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "sqlite"):
            return
        assert self.sqlite.segments() == [model.info for model in self.models]
        for model in self.models:
            pages = model.pages()
            assert list(self.sqlite.pages(model.info.number)) == pages
            assert list(self.sqlite.events(model.info.number)) == model.events
            texts = self.sqlite.contents.texts(page.digest for page, _ in pages if page.digest)
            assert texts == {digest_of(text): text for text in model.texts.values()}

    def opened(self) -> Any:
        return Sqlite(self.folder / "k.db", synchronous="OFF")

    def check(self) -> None:
        assert inspect_store(self.sqlite) == []

    def teardown(self) -> None:
        if hasattr(self, "sqlite"):
            self.check()
            self.sqlite.close()
            shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=rounds(30, 80), stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase
