"""Every figure of `stats` against a count made here, by hand, from what was done."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import HitRateWarning, UnknownAddress
from kilburn.event import Act, Data
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.model import Tokens
from kilburn.move import Evict, Fold, Load, Retire


def opened(window: int = 1000, policy: str = "fifo") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def cost(session: Session, *texts: str) -> int:
    counter = session.counter
    return sum(counter.count(text) + counter.envelope for text in texts)


def test_a_new_process_has_zeros() -> None:
    stats = opened().stats()
    figures = {name: stats[name] for name in stats.keys() if name not in ("window", "warnings")}  # noqa: SIM118
    assert figures.pop("hit_rate") is None
    assert set(figures.values()) == {0}
    assert stats.warnings == []
    with pytest.raises(KeyError):
        stats["nope"]


def test_an_append_only_run_re_prefills_nothing() -> None:
    session = opened(10_000)
    shipped = 0
    for number in range(20):
        session.append(user(f"message {number} " + "w" * 50))
        shipped += session.render().tokens
    session.append(assistant(None, call_of("c", path="x")))
    session.append(tool("c", "y" * 100))
    shipped += session.render().tokens
    stats = session.stats()
    assert stats.tokens_reprefilled == 0
    assert stats.tokens_shipped == shipped
    assert stats.prompts == 21
    assert stats.turns == stats.pages == 22
    assert stats.tokens_seen == stats.tokens_in_window == stats.peak == session.prompts.use
    assert stats.utilisation == pytest.approx(shipped / 21 / 10_000)
    assert (stats.evictions, stats.folds, stats.overflow) == (0, 0, 0)


def test_an_eviction_in_the_middle_re_prefills_what_stands_behind() -> None:
    session = opened(10_000)
    texts = [f"message {number} " + "w" * 40 * number for number in range(6)]
    session.append(*map(user, texts))
    session.render()
    session.edits.apply(Evict((3,)))
    session.render()
    assert session.stats().tokens_reprefilled == cost(session, *texts[3:])
    session.render()
    assert session.stats().tokens_reprefilled == cost(session, *texts[3:]), "the same prompt again is cached whole"
    session.append(user("new"))
    session.render()
    assert session.stats().tokens_reprefilled == cost(session, *texts[3:])
    session.edits.apply(Load((3,)))
    session.render()
    assert session.stats().tokens_reprefilled == cost(session, *texts[3:]) + cost(session, *texts[2:], "new")


def test_moves_faults_and_refaults_are_counted() -> None:
    session = opened(10_000)
    session.append(*(user(f"text {number} " + "z" * 100) for number in range(8)))
    session.edits.apply(Evict((2, 3)))
    session.recall("p2")
    session.recall("p5")
    session.recall("p2-p4")
    session.edits.apply(Load((2,)))
    session.edits.apply(Fold((5, 6), text="in short"))
    session.edits.apply(Retire((7,)))
    session.search("text")
    session.recall("f1")
    with pytest.raises(UnknownAddress):
        session.recall("p99")
    session.forget("p8")
    stats = session.stats()
    assert (stats.evictions, stats.loads, stats.folds, stats.retired, stats.dropped) == (2, 1, 1, 1, 1)
    assert (stats.faults, stats.refaults) == (3, 3), "p2, then p2 and p3, all just evicted"
    assert stats.hits == 3, "p5, p4 and f1"
    assert stats.hit_rate == pytest.approx(3 / 6)
    assert stats.searches == 1
    for number in range(12):
        session.append(user(f"later {number}"))
    session.recall("p3")
    stats = session.stats()
    assert (stats.faults, stats.refaults) == (4, 3), "twelve turns later it is no refault"
    assert stats.fallbacks == 0


@pytest.mark.parametrize(("turns", "refaults"), [(10, 1), (11, 0)])
def test_a_refault_is_a_fault_within_ten_turns(turns: int, refaults: int) -> None:
    session = opened(10_000)
    session.append(user("task"), assistant("needed again"))
    session.edits.apply(Evict((2,)))
    for number in range(turns):
        session.append(user(f"later {number}"))
    session.recall("p2")
    assert (session.stats().faults, session.stats().refaults) == (1, refaults)


def test_a_prompt_that_fills_the_window_is_no_overflow() -> None:
    said = [f"{number} " + "w" * 94 for number in range(6)]
    session = opened(cost(opened(), *said))
    session.append(user(said[0]), *map(assistant, said[1:]))
    assert session.render().tokens == session.prompts.capacity
    stats = session.stats()
    assert (stats.utilisation, stats.overflow, stats.warnings) == (1.0, 0, [])


def test_the_kernels_own_evictions_and_refused_moves_are_counted() -> None:
    class Stubborn:
        def plan(self, view: Any) -> list[Any]:
            return [Evict((999,))]

    session = kilburn.open(":memory:", window=200, policy=Stubborn(), tokenizer="chars/4").session("a")
    for number in range(10):
        session.append(user(f"{number} " + "w" * 200))
    stats = session.stats()
    events = list(session.ledger.events())
    assert stats.refused_moves == sum(event.act is Act.REFUSE for event in events) > 0
    assert stats.fallbacks == sum(event.act is Act.EVICT and event.policy == "kernel" for event in events) > 0
    assert stats.evictions == sum(len(event.pages) for event in events if event.act is Act.EVICT)
    assert session.render().tokens <= 200


def test_a_low_hit_rate_warns_once_and_visibly() -> None:
    session = opened(300)
    for number in range(40):
        session.append(user(f"{number} " + "w" * 120))
    for number in range(1, 31):
        session.recall(f"p{number}")
    with pytest.warns(HitRateWarning, match="60%") as caught:
        stats = session.stats()
    assert len(caught) == 1
    assert stats.hit_rate is not None
    assert stats.hit_rate < 0.6
    assert "hit rate" in stats.warnings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert session.stats().warnings, "it stays in the figures, and is raised once"


def test_a_good_hit_rate_does_not_warn() -> None:
    session = opened(10_000)
    for number in range(30):
        session.append(user(f"{number}"))
        session.render()
        session.recall(f"p{number + 1}")
    stats = session.stats()
    assert stats.hit_rate == 1.0
    assert stats.warnings == []


def test_usage_shrinks_a_window_that_was_counted_too_low() -> None:
    with kilburn.open(":memory:", window=2000, policy="fifo") as store:
        session = store.session("a")
        for number in range(30):
            session.append(user(f"{number} " + "word " * 60))
        prompt = session.render()
        before = session.prompts.capacity
        session.prompts.observe(Tokens(prompt=prompt.tokens * 2), prompt.tokens)
        assert session.prompts.capacity <= before // 2
        assert session.render().tokens <= session.prompts.capacity
        assert session.stats().tokens_reported == prompt.tokens * 2


def test_events_are_numbered_without_holes_and_hold_no_text() -> None:
    session = opened(300)
    for number in range(30):
        session.append(user(f"canary{number} " + "w" * 120))
        session.render()
        session.recall("p1")
        session.search(f"canary{number}")
    session.forget("p3", why="asked")
    events = list(session.ledger.events())
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert "canary" not in repr(events)
    assert json.dumps([event.data for event in events])
    assert {event.act for event in events} >= {Act.ADMIT, Act.EVICT, Act.SHIP, Act.FAULT, Act.SEARCH, Act.DROP}


def test_a_fold_that_lists_what_it_covers_is_replayed_as_one_that_does_not() -> None:
    """The ledger said both what a fold uncovers and what it covers; what it cites says the same."""
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append(*(user(f"message {number} " + "word " * 30) for number in range(6)))
        session.edits.apply(Fold(pages=(2, 3), text="the first two in short"))
        session.edits.apply(Fold(pages=(2, 3, 4), text="all three in short"))
        kernel = session._kernel
        events = list(kernel.backend.events(kernel.info.number))
        spelt = list(events)
        for at, event in enumerate(events):
            if event.act is Act.FOLD:
                uncover = {"uncover": [2, 3]} if event.data["fold"] == -2 else {}
                spelt[at] = msgspec.structs.replace(event, data={**event.data, "cover": list(event.pages), **uncover})
        assert [event.data for event in spelt] != [event.data for event in events]
        pages = {page.id: page for page, _ in kernel.backend.pages(kernel.info.number)}
        old, new = WindowState(kernel.counter), WindowState(kernel.counter)
        for event in spelt:
            old.enact(event, pages)
        for event in events:
            new.enact(event, pages)
        assert old.states == new.states == kernel.window.states
        assert old.stand_ins == new.stand_ins == kernel.window.stand_ins == {2: -2, 3: -2, 4: -2}


def test_every_key_that_is_read_of_an_event_is_a_known_one() -> None:
    """The type checker refuses `data["misspelt"]`; of `data.get("misspelt")` and `"misspelt" in data` it says nothing."""
    unknown = []
    for path in sorted(Path(kilburn.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".data" in text else ():
            match node:
                case ast.Call(func=ast.Attribute(attr="get", value=held), args=[ast.Constant(value=str(key)), *_]):
                    pass
                case ast.Compare(left=ast.Constant(value=str(key)), comparators=[held]):
                    pass
                case _:
                    continue
            if isinstance(held, ast.Attribute) and held.attr == "data" and key not in Data.__annotations__:
                unknown.append(f"{path.name}:{node.lineno}: {key}")
    assert unknown == []
