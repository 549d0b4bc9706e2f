"""Any sequence of batches and reopenings: the SQLite store shows what the memory store shows."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kilburn.errors import StoreError
from kilburn.page import digest_of
from kilburn.store import Batch, State
from kilburn.stores.memory import Memory
from kilburn.stores.sqlite import Sqlite
from kilburn.testing.stores import batch_of

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(["alpha", "beta", "foo_bar", "getUser", "src/a.py", "\n", "日本語", "\0"]), max_size=400).map(
        " ".join
    ),
)
STATES = st.builds(State, st.sampled_from(["in", "stub", "out", "folded", "retired"]), st.booleans(), st.floats(-1e6, 1e6))
IDS = st.integers(-6, 12)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sqlite = Sqlite(self.folder / "k.db", synchronous="OFF")
        self.memory = Memory()
        for name in ("one", "two"):
            assert self.sqlite.process(name, time=1.0) == self.memory.process(name, time=1.0)

    @rule(
        process=st.integers(1, 3),
        late=st.sampled_from([0, 0, 0, 0, 1]),
        texts=st.dictionaries(IDS.filter(bool), TEXTS, max_size=3),
        states=st.dictionaries(IDS, STATES, max_size=2),
        events=st.integers(0, 3),
        others=st.tuples(*[st.lists(IDS, max_size=1)] * 3),
    )
    def commit(
        self,
        process: int,
        late: int,
        texts: dict[int, str],
        states: dict[int, State],
        events: int,
        others: tuple[list[int], list[int], list[int]],
    ) -> None:
        head = self.memory.processes()[process - 1].head + late if process < 3 else 0
        batch = batch_of(head, texts, states=states, events=events)
        batch.index = [*batch.index, *others[0]]
        batch.unindex, batch.erase = others[1:]
        self.both(process, batch)

    @rule(process=st.integers(1, 2), data=st.data())
    def move(self, process: int, data: st.DataObject) -> None:
        """A batch that only names pages that exist, so that most are accepted."""
        ids = [page.id for page, _ in self.memory.pages(process)]
        some = st.lists(st.sampled_from(ids), max_size=3, unique=True) if ids else st.just([])
        batch = Batch(head=self.memory.processes()[process - 1].head)
        batch.states = dict.fromkeys(data.draw(some), data.draw(STATES))
        batch.unindex = data.draw(some)
        batch.erase = data.draw(some)
        self.both(process, batch)

    def both(self, process: int, batch: Batch) -> None:
        outcomes: list[type[StoreError] | None] = []
        for store in (self.memory, self.sqlite):
            try:
                store.commit(process, batch)
                outcomes.append(None)
            except StoreError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]

    @rule()
    def reopen(self) -> None:
        self.sqlite.close()
        self.sqlite = Sqlite(self.folder / "k.db", synchronous="OFF")

    @rule(query=st.one_of(TEXTS, st.sampled_from(["alpha", "foo", "user", "a.py", "日本"])))
    def search(self, query: str) -> None:
        self.sqlite.search(query)
        for word in ("alpha", "beta", "foo", "user"):
            hits = [
                {(hit.process, hit.page, hit.span) for hit in store.search(word, limit=10_000)}
                for store in (self.sqlite, self.memory)
            ]
            assert hits[0] == hits[1]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "sqlite"):
            return
        assert self.sqlite.processes() == self.memory.processes()
        for process in (1, 2):
            pages = list(self.memory.pages(process))
            assert list(self.sqlite.pages(process)) == pages
            assert list(self.sqlite.events(process)) == list(self.memory.events(process))
            digests = [page.digest for page, _ in pages if page.digest]
            texts = self.sqlite.texts(digests)
            assert texts == self.memory.texts(digests)
            assert all(digest_of(text) == digest for digest, text in texts.items())

    def teardown(self) -> None:
        if hasattr(self, "sqlite"):
            assert self.sqlite.findings() == []
            self.sqlite.close()
            shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase
