"""Collections beside sessions against a dict: random changes, two writers, crashes, undo, and forgetting across sessions."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from effort import rounds
from kilburn import Store
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.collections.collection import Collection
from kilburn.errors import Forgotten, KernelError, StoreFull
from kilburn.message import Trust
from kilburn.move import Add, Retire
from kilburn.page import Place, address_of, parse_address
from kilburn.testing.clock import FakeClock
from kilburn.testing.laws import check_collection, check_laws

USERS = ("", "ana")
WRITERS = st.integers(0, 1)
PICK = st.integers(0, 1000)
Key = tuple[str, int]


class Fact:
    """What the model knows of one page."""

    def __init__(self, text: str, since: float, made_from: set[Key], trust: Trust) -> None:
        self.text, self.since, self.made_from, self.trust = text, since, made_from, trust
        self.place = Place.OUT
        self.until: float | None = None


class Failing(Sqlite):
    """A store whose commits fail when told: a full disk."""

    full = False

    def commit(self, segment: int, batch: Batch) -> None:
        if self.full:
            raise StoreFull("no space left", advice="make room")
        super().commit(segment, batch)


class Memories(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.clock = FakeClock()
        self.said = 0
        self.model: dict[Key, Fact] = {}
        self.writers = [self._open(), self._open()]
        self.lost: list[Store] = []
        for user in USERS:
            self.writers[0].memory(user)
        self.writers[0].session("s")

    def teardown(self) -> None:
        for writer in (*getattr(self, "writers", ()), *getattr(self, "lost", ())):
            writer.close()
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def _open(self) -> Store:
        store = Failing(str(Path(self.folder) / "m.db"), synchronous="OFF")
        return Store(store, Budget(2000), "fifo", tokenizer="chars/4", clock=self.clock)

    def _some(self, places: tuple[Place, ...], pick: int, session: str | None = None) -> Key | None:
        keys = sorted(key for key, fact in self.model.items() if fact.place in places and session in (None, key[0]))
        return keys[pick % len(keys)] if keys else None

    def _text(self) -> str:
        self.said += 1
        return f"word{self.said}"

    def _number(self, name: str) -> int:
        info = self.writers[0].backend.segment(name, time=0.0, create=False)
        assert info is not None
        return info.number

    # What happens

    @rule(writer=WRITERS, trusted=st.booleans())
    def say(self, writer: int, trusted: bool) -> None:
        text, session = self._text(), self.writers[writer].session("s")
        session.ledger.refresh()
        message: dict[str, Any] = {"role": "user" if trusted else "assistant", "content": text}
        address = session.append(message)
        trust = Trust.USER if trusted else Trust.AGENT
        self.model["s", parse_address(address)[0]] = Fact(text, 0.0, set(), trust)

    @rule(writer=WRITERS)
    def read_the_web(self, writer: int) -> None:
        text, session = self._text(), self.writers[writer].session("s")
        session.ledger.refresh()
        call = {"id": text, "type": "function", "function": {"name": "web", "arguments": "{}"}}
        address = session.append(
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
        )
        first, last = parse_address(address)
        self.model["s", first] = Fact("{}", 0.0, set(), Trust.AGENT)
        self.model["s", last] = Fact(text, 0.0, set(), Trust.TOOL)

    @rule(
        writer=WRITERS,
        user=st.sampled_from(USERS),
        picks=st.lists(PICK, max_size=2),
        update=st.none() | PICK,
        policy=st.sampled_from(["user", "facts"]),
        tainted=st.booleans(),
        full=st.booleans(),
    )
    def learn(self, writer: int, user: str, picks: list[int], update: int | None, policy: str, tainted: bool, full: bool) -> None:
        memory = self.writers[writer].memory(user).collection
        made_from = {key for pick in picks if (key := self._some((Place.OUT, Place.IN), pick)) is not None}
        own = {key for key in made_from if key[0] == memory.name}
        cites = tuple((self._number(name), page) for name, page in sorted(made_from - own))
        text = self._text()
        add = Add(text=text, sources=tuple(page for _, page in sorted(own)), cites=cites)
        old = None if update is None else self._some((Place.OUT,), update, memory.name)
        retires = [] if old is None else [Retire((old[1],), refers=0)]
        if policy != "user" and not made_from:
            with pytest.raises(KernelError):
                memory.apply(add, *retires, policy=policy)
            return
        if full:
            memory.backend.full = True  # type: ignore[attr-defined]
            with pytest.raises(StoreFull):
                memory.apply(add, *retires, policy=policy, tainted=tainted)
            memory.backend.full = False  # type: ignore[attr-defined]
            return
        (address,) = memory.apply(add, *retires, policy=policy, tainted=tainted)
        page, _ = memory.read(parse_address(address)[0])
        trust = min((self.model[key].trust for key in made_from), default=Trust.USER)
        fact = Fact(text, page.time, made_from, trust)
        waits = policy != "user" and (tainted or trust is Trust.TOOL)
        fact.place = Place.PROPOSED if waits else Place.OUT
        self.model[memory.name, page.id] = fact
        assert page.trust is trust
        if old is not None and not waits:
            self.model[old].place, self.model[old].until = Place.RETIRED, page.time

    @rule(writer=WRITERS, pick=PICK, user=st.sampled_from(USERS))
    def retire(self, writer: int, pick: int, user: str) -> None:
        memory = self.writers[writer].memory(user).collection
        key = self._some((Place.OUT,), pick, memory.name)
        if key is not None:
            memory.apply(Retire((key[1],)), policy="facts")
            fact = self.model[key]
            fact.place, fact.until = Place.RETIRED, memory.read(key[1])[1].until

    @rule(writer=WRITERS, pick=PICK, user=st.sampled_from(USERS))
    def accept(self, writer: int, pick: int, user: str) -> None:
        memory = self.writers[writer].memory(user).collection
        key = self._some((Place.PROPOSED,), pick, memory.name)
        if key is not None:
            memory.accept(address_of(key[1]))
            self._look(memory)
            assert self.model[key].place is Place.OUT

    @rule(writer=WRITERS, pick=PICK, user=st.sampled_from(USERS))
    def undo_twice(self, writer: int, pick: int, user: str) -> None:
        memory = self.writers[writer].memory(user).collection
        key = self._some((Place.OUT, Place.RETIRED), pick, memory.name)
        if key is None:
            return
        address, before = address_of(key[1]), self._in_force(memory)
        memory.undo(address)
        if memory.read(key[1])[1].at is Place.PROPOSED:
            self._look(memory)
            return
        assert (key[1] in self._in_force(memory)) is not (key[1] in before)
        memory.undo(address)
        assert (key[1] in self._in_force(memory)) is (key[1] in before)
        self._look(memory)

    def _in_force(self, memory: Collection) -> set[int]:
        return {page.id for page, state in memory.pages(history=True) if state.at is Place.OUT}

    def _look(self, memory: Collection) -> None:
        """Take over what an undo or an acceptance made of the states; that the ledger says the same is a law."""
        for page, state in memory.pages(history=True, proposed=True):
            self.model[memory.name, page.id].place = state.at
            self.model[memory.name, page.id].until = state.until

    @rule(writer=WRITERS, pick=PICK)
    def forget(self, writer: int, pick: int) -> None:
        places = (Place.OUT, Place.RETIRED, Place.PROPOSED)
        key = self._some(places, pick)
        if key is None:
            return
        gone, grown = {key}, True
        while grown:
            more = {one for one, fact in self.model.items() if fact.made_from & gone and fact.place is not Place.DROPPED} - gone
            gone |= more
            grown = bool(more)
        store = self.writers[writer]
        holder = store.session("s") if key[0] == "s" else store.memory(key[0].partition("/")[2]).collection
        shown = holder.forget(address_of(key[1]))
        assert len(shown) == len(gone)
        for one in gone:
            self.model[one].place = Place.DROPPED

    @rule(writer=WRITERS, pick=PICK, user=st.sampled_from(USERS))
    def read(self, writer: int, pick: int, user: str) -> None:
        memory = self.writers[writer].memory(user).collection
        key = self._some((Place.OUT, Place.RETIRED, Place.PROPOSED), pick, memory.name)
        if key is not None:
            assert memory.recall(address_of(key[1])) == self.model[key].text
        gone = self._some((Place.DROPPED,), pick, memory.name)
        if gone is not None:
            with pytest.raises(Forgotten):
                memory.recall(address_of(gone[1]))

    @rule(writer=WRITERS)
    def crash(self, writer: int) -> None:
        self.lost.append(self.writers[writer])
        self.writers[writer] = self._open()

    @rule(writer=WRITERS)
    def reopen(self, writer: int) -> None:
        self.writers[writer].close()
        self.writers[writer] = self._open()

    # What holds

    @invariant()
    def the_model_agrees(self) -> None:
        for writer in getattr(self, "writers", ())[1:]:
            for user in USERS:
                memory = writer.memory(user).collection
                mine = {page: fact for (name, page), fact in self.model.items() if name == memory.name}
                kept = {page.id: state for page, state in memory.pages(history=True, proposed=True)}
                assert {page: (state.at, state.until) for page, state in kept.items()} == {
                    page: (fact.place, fact.until) for page, fact in mine.items() if fact.place is not Place.DROPPED
                }
                for then in (self.clock.now, self.clock.now - 7, self.clock.now - 40):
                    assert {page.id for page, _ in memory.pages(then)} == {
                        page
                        for page, fact in mine.items()
                        if fact.place in (Place.OUT, Place.RETIRED)
                        and fact.since <= then
                        and (fact.until is None or then < fact.until)
                    }
                check_collection(memory)

    @precondition(lambda self: len(self.model) > 0)
    @invariant()
    def nothing_forgotten_is_found(self) -> None:
        backend = self.writers[0].backend
        for (name, page), fact in self.model.items():
            hits = {(hit.segment, hit.page) for hit in backend.words.search(fact.text)}
            if fact.place in (Place.DROPPED, Place.PROPOSED):
                assert (self._number(name), page) not in hits
            elif name != "s":
                assert (self._number(name), page) in hits

    @invariant()
    def the_session_keeps_its_laws(self) -> None:
        if getattr(self, "writers", None):
            session = self.writers[0].session("s")
            session.ledger.refresh()
            check_laws(session)


Memories.TestCase.settings = settings(
    max_examples=rounds(20, 30), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMemories = Memories.TestCase
