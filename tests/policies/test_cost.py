"""`cost` edits seldom: what stands in front stays as it is, and what is kept has to be worth its price."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise, takewhile
from statistics import mean
from typing import Any

import pytest

import kilburn
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.memory import memory_tools
from kilburn.message import Kind
from kilburn.policies.cost import Cost
from kilburn.prices import Prices
from kilburn.testing.clock import FakeClock


def work(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """An agent that looks at files: many lines that say little, and a name in every tenth."""
    rng = random.Random(seed)
    yield {"role": "user", "content": "Find the fault."}
    for step in range(steps):
        yield {"role": "assistant", "content": f"Look at module_{rng.randrange(40)}.py next."}
        lines = [
            f"{n}: def handler_{rng.randrange(10**6)}(): ..." if n % 10 == 0 else f"{n}:     value = value + {n}"
            for n in range(40)
        ]
        yield {"role": "user", "content": f"output {step}\n" + "\n".join(lines)}


def played(policy: Any, window: int = 2000, steps: int = 60) -> tuple[Session, list[list[str]], Any]:
    store = kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4")
    session = store.session("a")
    prompts = []
    for message in work(1, steps):
        session.append(message)
        prompts.append([str(shown["content"]) for shown in session.render()])
    return session, prompts, store


def excerpted(policy: Any) -> float:
    """Tokens of the excerpts in the window, on average."""
    with kilburn.open(":memory:", window=2000, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        sizes = []
        for message in work(1, 60):
            session.append(message)
            resident = [page for page, state in session.contents.pages() if state.at == "in"]
            sizes.append(sum(page.tokens for page in resident if page.kind is Kind.EXCERPT))
        return mean(sizes)


def test_most_edits_leave_the_excerpts_in_front_as_they_are() -> None:
    _, prompts, store = played("cost(miss=3000)", steps=90)
    with store:
        edited = extended = 0
        for before, after in pairwise(prompts):
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
            if same < len(before) - 1:  # a copy that leaves from the end is no edit in front
                edited += 1
                extended += any(text.startswith("[") and " in part: " in text[:40] for text in before[:same])
        assert edited > 10
        assert extended > edited / 2
        assert max(sum(" in part" in text[:40] for text in prompt) for prompt in prompts) > 1


@pytest.mark.parametrize("policy", ["cost", "hybrid"])
def test_it_reads_half_as_much_again_as_a_policy_that_only_evicts(policy: str) -> None:
    again = {}
    for each in (policy, "fifo"):
        session, _, store = played(each)
        with store:
            again[each] = session.stats().tokens_reprefilled
    assert again[policy] < again["fifo"] / 2


def test_a_miss_that_costs_more_keeps_more() -> None:
    cheap, usual, dear = (excerpted(Cost(miss=miss)) for miss in (500.0, 3000.0, 9000.0))
    assert cheap < usual < dear


def test_where_reading_the_cache_is_free_more_is_kept_than_where_it_costs() -> None:
    free, dear = (excerpted(Cost(prices=Prices(input=1.0, written=1.0, cached=cached), miss=5000.0)) for cached in (0.0, 1.0))
    assert dear < free


def test_after_the_cache_expired_an_edit_comes_before_the_window_is_full() -> None:
    """The provider writes the whole prompt to its cache again in any case."""
    sizes = {}
    for pause in (10.0, 400.0):
        clock = FakeClock(tick=0.0)
        with Store(Sqlite(":memory:"), Budget(2000), Cost(), tokenizer="chars/4", clock=clock) as store:
            session = store.session("a")
            sizes[pause] = 0
            for message in work(1, 60):
                clock.now += pause
                session.append(message)
                sizes[pause] += session.stats().tokens_in_window
    assert sizes[400.0] < 0.9 * sizes[10.0]


def test_pages_that_are_asked_back_make_it_keep_more() -> None:
    kept = {}
    for asks in (False, True):
        with kilburn.open(":memory:", window=2000, policy="cost(miss=500)", tokenizer="chars/4") as store:
            session = store.session("a")
            for message in work(1, 60):
                session.append(message)
                if asks and session.window.last > 8:
                    session.recall(f"p{session.window.last - 4}")
            kept[asks] = sum(page.tokens for page, _ in session.contents.pages() if page.kind is Kind.EXCERPT)
    assert kept[False] < kept[True]


def test_a_trigger_below_the_capacity_keeps_the_prompt_smaller() -> None:
    for policy, most in (("cost", 2000), ("cost(trigger=1200)", 1500)):
        _, prompts, store = played(policy)
        with store:
            sizes = [sum(len(text) for text in prompt) // 4 for prompt in prompts[40:]]
            assert max(sizes) <= most


def test_what_the_user_marked_stays_whole() -> None:
    with kilburn.open(":memory:", window=2000, policy="cost", tokenizer="chars/4") as store:
        session = store.session("a")
        for number, message in enumerate(work(2, 40)):
            session.append(message)
            if number == 3:
                session.rate("p2")
        assert session.window.at(2) == "in"


@pytest.mark.parametrize("spec", ["cost(miss=0)", "cost(miss=-1)", "cost(prices='nobody')", "cost(nothing=1)"])
def test_a_bad_parameter_is_refused_with_advice(spec: str) -> None:
    with pytest.raises(kilburn.KilburnError):
        resolve("policies", spec)


def test_a_table_without_a_price_of_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no price of input"):
        Cost(prices=Prices(cached=1.0))


@pytest.mark.parametrize("policy", ["cost", "hybrid", "summarize"])
def test_what_memory_brought_from_another_session_stays_whole(policy: str) -> None:
    with kilburn.open(":memory:", window=1000, policy=policy, tokenizer="chars/4") as store:
        session, other = store.session("a"), store.session("b")
        for number in range(12):
            other.append({"role": "user", "content": f"the zebra number {number} has {number * 7} stripes\n" * 4})
        for message in work(1, 8):
            session.append(message)
        asked = json.dumps({"query": "zebra stripes", "session": "b"})
        call = {"id": "c", "type": "function", "function": {"name": "search_memory", "arguments": asked}}
        session.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found = memory_tools.call(session, "search_memory", asked, "c", lambda kind, name: name == "b")
        session.append(found.message("c"))
        assert session.counter.count(found.text) > session.prompts.capacity // 2
        assert session.render()[-1]["content"] == found.text


@pytest.mark.parametrize("policy", ["cost", "hybrid"])
@pytest.mark.parametrize("lines", [1_000, 3_000])
def test_parallel_results_that_do_not_fit_together_are_shortened_alike(policy: str, lines: int) -> None:
    """The agent reads something of each, instead of an address where its whole exchange was."""
    session = Store(Sqlite(":memory:"), Budget(8000), policy, tokenizer="chars/4", clock=FakeClock()).session("a")
    session.append({"role": "user", "content": "Read the five files."})
    calls = ["a", "b", "c", "d", "e"]
    session.append(
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": call, "name": "read", "input": {"path": call}} for call in calls],
        }
    )
    results = ["\n".join(f"{call}{line} = compute({line * 7})" for line in range(lines)) for call in calls]
    session.append(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call, "content": result}
                for call, result in zip(calls, results, strict=True)
            ],
        }
    )
    prompt = session.render(format="messages")
    sizes = [len(block["content"]) // 4 for block in prompt[-1]["content"] if block["type"] == "tool_result"]
    assert len(sizes) == len(calls)
    assert min(sizes) > 800
    assert prompt.tokens <= 8000
