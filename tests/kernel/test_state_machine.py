"""The ten laws under random policies, windows, traces, failures and reopenings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from effort import rounds
from kilburn import Store
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, InvalidBudget, KernelError, KilburnError, PinsExceedWindow, StoreFull
from kilburn.kernel.replay import rebuild
from kilburn.kernel.window import GONE
from kilburn.models.scripted import Scripted
from kilburn.move import Bring, Drop, Evict, Fold, Load, Move, Retire
from kilburn.page import parse_address
from kilburn.policy import View
from kilburn.testing.clock import FakeClock
from kilburn.testing.laws import check_laws

TEXTS = st.text(alphabet=st.sampled_from("abc é漢\n.\x00🙂_"), max_size=60)
LONG = st.integers(1, 400).map(lambda n: "\n".join(f"line {i} of {n}" for i in range(n)))
POLICIES = [
    "fifo",
    "lru",
    "importance",
    "tiered",
    "hybrid",
    "mask",
    "free(every=20, least=0)",
    "comem(every=1)",
    "summarize",
    "recursive",
    "memento(pairs=True, to=16)",
    "preprocess",
    "cost",
    "belady",
    "agentfold",
    "mem1",
    "chain(preprocess, mask, fifo)",
    "chain(clear_thinking, clear_tool_uses(trigger=50, keep=1, clear_tool_inputs=True), compact(trigger=None, keep=1))",
]


class Wild:
    """A policy that proposes whatever Hypothesis says, legal or not."""

    def __init__(self) -> None:
        self.moves: list[tuple[int, int, int]] = []

    def plan(self, view: View) -> Sequence[Move]:
        made: list[Move] = []
        for kind, index, size in self.moves:
            pages = [page.id for page in view.pages] or [1]
            chosen = tuple(dict.fromkeys(pages[index % len(pages) :][:size])) or (1,)
            made.append(_move(kind, chosen))
        self.moves = []
        return made


def _move(kind: int, pages: tuple[int, ...]) -> Move:
    return [
        Evict(pages),
        Fold(pages, text="short"),
        Fold(pages[:1], keep=((0, 3),)),
        Load(pages),
        Retire(pages),
        Fold(pages, text=" "),
        Bring(tuple((page, ((0, 3),)) for page in pages)),
        Evict((-1 - len(pages),)),
    ][kind % 8]


class Failing:
    """A store whose commits fail when told: a full disk."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.full = inner, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def commit(self, segment: int, batch: Batch) -> None:
        if self.full:
            raise StoreFull("no space left", advice="make room")
        self.inner.commit(segment, batch)


class Laws(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from([*POLICIES, "wild"]), window=st.sampled_from([60, 150, 500, 2000]), script=st.booleans())
    def start(self, policy: str, window: int, script: bool) -> None:
        self.wild = Wild()
        self.policy: Any = self.wild if policy == "wild" else policy
        self.window = window
        self.clock = FakeClock()
        self.store = Failing(self.backend())
        self.model = Scripted(["", "a summary", "no no no no no no no no no no", RuntimeErrorText] * 50) if script else None
        self.appended: list[dict[str, Any]] | None = []
        self.open: list[str] = []
        self.calls = 0
        self.retired: set[int] = set()
        self._open()

    def backend(self) -> Any:
        return Sqlite(":memory:")

    def _open(self) -> None:
        self.session = Store(
            self.store, Budget(self.window), self.policy, tokenizer="chars/4", model=self.model, clock=self.clock
        ).session("s")

    def _append(self, message: dict[str, Any]) -> bool:
        before = (dict(self.session.window.states), self.session.prompts.use)
        try:
            self.session.append(message)
        except PinsExceedWindow:
            assert (dict(self.session.window.states), self.session.prompts.use) == before
            return False
        if self.appended is not None:
            self.appended.append(message)
        return True

    @rule(role=st.sampled_from(["user", "assistant", "system", "developer"]), text=st.one_of(TEXTS, LONG))
    def say(self, role: str, text: str) -> None:
        self._append({"role": role, "content": text})

    @rule(count=st.integers(1, 3), text=TEXTS, long=st.booleans())
    def call(self, count: int, text: str, long: bool) -> None:
        made = []
        for _ in range(count):
            self.calls += 1
            arguments = json.dumps({"path": "x" * (500 if long else 5)})
            made.append({"id": f"c{self.calls}", "type": "function", "function": {"name": "read", "arguments": arguments}})
        if self._append({"role": "assistant", "content": text or None, "tool_calls": made}):
            self.open += [call["id"] for call in made]

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 5), text=st.one_of(TEXTS, LONG))
    def answer(self, index: int, text: str) -> None:
        call = self.open[index % len(self.open)]
        if self._append({"role": "tool", "tool_call_id": call, "content": text}):
            self.open.remove(call)

    @rule(index=st.integers(0, 50), what=st.sampled_from(["pin", "unpin", "rate"]))
    def mark(self, index: int, what: str) -> None:
        last = self.session.window.last
        if last:
            before = dict(self.session.window.states)
            try:
                getattr(self.session, what)(f"p{index % last + 1}")
            except (Forgotten, PinsExceedWindow, KernelError):
                assert dict(self.session.window.states) == before

    @rule(kind=st.integers(0, 7), index=st.integers(0, 50), size=st.integers(1, 6))
    def move(self, kind: int, index: int, size: int) -> None:
        tier = self.session.window
        if not tier.last:
            return
        first = index % tier.last + 1
        move = _move(kind, tuple(range(first, min(tier.last, first + size - 1) + 1)))
        before = (dict(tier.states), self.session.prompts.use, list(tier.gaps))
        try:
            self.session.edits.apply(move)
        except KilburnError:
            assert (dict(tier.states), self.session.prompts.use, list(tier.gaps)) == before

    @rule(moves=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(1, 5)), max_size=3))
    def scheme(self, moves: list[tuple[int, int, int]]) -> None:
        self.wild.moves = moves

    @rule(index=st.integers(0, 50), size=st.integers(0, 10))
    def recall(self, index: int, size: int) -> None:
        last = self.session.window.last
        if last:
            first = index % last + 1
            try:
                found = self.session.recall(f"p{first}-p{min(last, first + size)}")
            except Forgotten:
                return
            assert "".join(found.parts) == found

    @rule(index=st.integers(0, 50))
    def forget(self, index: int) -> None:
        tier = self.session.window
        if tier.last:
            number = index % tier.last + 1
            call = tier.pages[number].call
            try:
                gone = self.session.forget(f"p{number}")
            except KernelError:
                return
            assert f"p{number}" in gone
            with pytest.raises(Forgotten):
                self.session.recall(f"p{number}")
            self.appended = None
            if call in self.open and tier.pages[number].kind == "call":
                self.open.remove(call)

    @rule(window=st.sampled_from([60, 150, 500, 2000]))
    def resize(self, window: int) -> None:
        before = (dict(self.session.window.states), self.session.prompts.use)
        try:
            self.session.edits.resize(Budget(window))
            self.window = window
        except PinsExceedWindow:
            assert (dict(self.session.window.states), self.session.prompts.use) == before

    @rule(first=st.integers(0, 50), step=st.integers(2, 3), retire=st.booleans())
    def thin_out(self, first: int, step: int, retire: bool) -> None:
        """Pages here and there are gone: forgotten, or retired."""
        tier = self.session.window
        calls = {tier.pages[page].answers or page for page in range(1, tier.last + 1)} & tier.open.keys()
        chosen = [
            page
            for page in range(first % max(1, tier.last) + 1, tier.last + 1, step)
            if tier.at(page) not in GONE and page not in tier.pins and page not in calls
        ]
        for page in chosen:
            try:
                self.session.edits.apply((Retire if retire else Drop)((page,)))
            except KernelError:
                continue
            self.appended = self.appended if retire else None

    @rule()
    def reopen(self) -> None:
        before = (dict(self.session.window.states), self.session.prompts.use)
        self.session.stats()
        self._open()
        assert (dict(self.session.window.states), self.session.prompts.use) == before

    @rule(tokens=st.integers(0, 700))
    def preview(self, tokens: int) -> None:
        tier = self.session.window
        before = (
            dict(tier.states),
            self.session.prompts.use,
            list(tier.gaps),
            tier.last_derived,
            self.session.prompts.budget,
            self._ledger(),
        )
        with contextlib.suppress(PinsExceedWindow, InvalidBudget):
            found = self.session.edits.preview(tokens)
            assert found.use == self.session.prompts.use
            assert found.after + tokens <= found.capacity
            assert found.again <= found.after
        assert before == (
            dict(tier.states), self.session.prompts.use, list(tier.gaps), tier.last_derived,
            self.session.prompts.budget, self._ledger(),
        )  # fmt: skip

    def _ledger(self) -> list[tuple[int, str]]:
        return [(event.number, event.act) for event in self.session.ledger.events()]

    @rule()
    def undo(self) -> None:
        session = self.session
        before = (dict(session.window.states), session.prompts.use, list(session.window.gaps))
        try:
            receipt = session.edits.undo()
        except KernelError:
            assert (dict(session.window.states), session.prompts.use, list(session.window.gaps)) == before
            return
        was = rebuild(session.backend, session.info, session.counter, until=receipt.events[0] - 1).window
        if not session.window.gone - was.gone:
            # Nothing was forgotten since: what was in the prompt then stands in it again, and nothing else of that time but the
            # call of a result that came since.
            late = {
                page
                for page in session.window.shown
                if any(one > 0 and one not in was.states for one in session.window.group(page))
            }
            assert was.shown <= session.window.shown
            assert {page for page in session.window.shown if page in was.states} <= was.shown | late
            assert {page: was.stand_ins[page] for page in was.stand_ins if page not in late} == {
                page: fold for page, fold in session.window.stand_ins.items() if page in was.states and page not in late
            }

    @rule(index=st.integers(0, 50), size=st.integers(0, 4))
    def let_go(self, index: int, size: int) -> None:
        tier = self.session.window
        if tier.last:
            first = index % tier.last + 1
            before = (dict(tier.states), self.session.prompts.use, list(tier.gaps))
            try:
                left = self.session.edits.evict(f"p{first}-p{min(tier.last, first + size)}")
            except KernelError:
                assert (dict(tier.states), self.session.prompts.use, list(tier.gaps)) == before
                return
            assert left
            assert all(tier.at(parse_address(address)[0]) != "in" for address in left)

    @rule(text=LONG)
    def full_disk(self, text: str) -> None:
        tier = self.session.window
        before = (dict(tier.states), self.session.prompts.use, list(tier.gaps), tier.last)
        self.store.full = True
        try:
            with pytest.raises((StoreFull, PinsExceedWindow)):
                self.session.append({"role": "user", "content": text})
        finally:
            self.store.full = False
        assert (dict(tier.states), self.session.prompts.use, list(tier.gaps), tier.last) == before

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "session"):
            check_laws(self.session, self.appended)
            for page in self.session.window.pages:
                if self.session.window.at(page) == "retired":
                    assert all(hit.address != f"p{page}" for hit in self.session.search("line"))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


RuntimeErrorText = "I'm sorry, I can't help with that."

# A small window has a low hit rate, and saying so is right.
pytestmark = pytest.mark.filterwarnings("ignore:hit rate")
TestLaws = Laws.TestCase
TestLaws.settings = settings(
    max_examples=rounds(30, 150),
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
