"""What a prompt shares with the one before it, and what a provider's cache makes of that."""

from __future__ import annotations

from contextlib import closing

import pytest

from kilburn_lab.evals.baselines import BASELINES, CHARACTERS
from kilburn_lab.evals.candidate import KilburnCandidate
from kilburn_lab.evals.cost import bills_of, rates_of
from kilburn_lab.evals.outcomes import Counted, PolicyCounts, Shipping
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.prefix import Block, blocks_of, common, text_of
from kilburn_lab.evals.providers import PROVIDERS, PromptCache, Provider, chain_of
from kilburn_lab.evals.sample import sample_of

LONG = 1100 * CHARACTERS
"""Characters that every cache takes."""


def said(*texts: str) -> list[Block]:
    """Blocks of a user and an assistant in turn, the user first."""
    return [Block(("user", "assistant")[at % 2], "", text) for at, text in enumerate(texts)]


def counted(*prompts: tuple[list[Block], list[str]], window: int = 1000) -> PolicyCounts:
    """A cell of one session's prompts, each with the texts that are new in it."""
    cell, shipping = PolicyCounts(policy="p", window=window), Shipping()
    for prompt, fresh in prompts:
        shipping.tell(*fresh)
        shipping.ship(prompt, cell)
    return cell


def test_the_prefix_is_equal_to_the_character_and_ends_at_another_role_or_id() -> None:
    assert common(said("one", "two"), said("one", "twain")) == (1, 5)
    assert common(said("one", "two"), said("one", "two", "three")) == (2, 6)
    assert common([Block("user", "", "one")], [Block("assistant", "", "one")]) == (0, 0)
    assert common([Block("tool", "call-1", "one")], [Block("tool", "call-2", "one")]) == (0, 0)
    assert common([], said("one")) == (0, 0)


def test_what_is_read_again_is_what_stands_behind_an_edit() -> None:
    first, more = (said("aaaa", "bbbb"), ["aaaa", "bbbb"]), (said("aaaa", "bbbb", "cccc"), ["cccc"])
    grown = counted(first, more)
    assert (grown.shipped, grown.later, grown.cached, grown.refilled, grown.edited) == (5, 3, 2, 0, 0)
    assert grown.kept == pytest.approx(2 / 3)
    edited = counted(first, more, (said("aaaa", "cccc", "dddd"), ["dddd"]))
    assert (edited.shipped, edited.cached, edited.refilled, edited.edited, edited.broken) == (8, 3, 1, 1, 1)
    assert counted(first).kept is None
    assert counted((said("x" * 41), ["x" * 41]), window=10).overflow == 1


def test_what_is_not_shown_of_a_new_output_does_not_pay_for_an_edit() -> None:
    """A new output of 400 characters of which one line is shown, while 40 old characters move."""
    old, output = "o" * 40, "telling line\n" + "x" * 400
    cell = counted((said("first", old), ["first", old]), (said("fold", old, "telling line\n"), [output]))
    # All of the fold but its first letter, and what moved.
    assert cell.refilled == (3 + 40) // 4


def test_a_prompt_is_read_as_it_is_rendered() -> None:
    call = {"id": "c1", "function": {"name": "shell", "arguments": '{"command": "ls", "in": "src"}'}}
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    ]
    blocks = list(blocks_of(prompt))
    assert [block.text for block in blocks] == ["Look.", "ls", "a.py"]
    other = [*prompt[:1], {**prompt[1], "tool_calls": [{**call, "id": "c2"}]}, {**prompt[2], "tool_call_id": "c2"}]
    assert common(blocks, list(blocks_of(other))) == (1, 5)


@pytest.mark.parametrize("policy", [*BASELINES, "fifo"])
def test_blocks_and_text_of_a_window_are_the_same(policy: str) -> None:
    [run] = sample_of(None, 1, seed=3).runs
    told = "\n".join(f"{step.thought}\n{step.action}\n{step.observation}" for step in run.steps)
    with closing(KilburnCandidate(100_000, "fifo")) as session:
        whole = session if policy == "fifo" else BASELINES[policy](100_000)
        for step in run.steps:
            whole.reply(step.thought, step.action)
            whole.observation(step.observation)
        assert text_of(whole.prompt()) == whole.prompt_text()
        assert whole.prompt_text() == told or policy in ("truncated", "last3")
    small = BASELINES.get(policy, BASELINES["tail"])(50)
    for step in run.steps:
        small.reply(step.thought, step.action)
        small.observation(step.observation)
        assert len(small.prompt_text()) <= 50 * CHARACTERS


def test_the_tail_is_cut_to_the_character() -> None:
    tail = BASELINES["tail"](2)
    for text in ("abc", "de", ""):
        tail.user(text)
        tail.thought("fgh")
    whole = "abc\nfgh\nde\nfgh\n\nfgh"
    for room in range(1, len(whole) + 3):
        tail.room = room  # type: ignore[attr-defined]
        assert tail.prompt_text() == whole[-room:]


def test_a_shown_window_keeps_its_prefix_while_it_only_grows() -> None:
    cell = PolicyCounts(policy="fifo", window=100_000)
    with closing(KilburnCandidate(100_000, "fifo")) as session:
        told = Counted(session, cell)
        for number in range(6):
            told.user(f"question {number} " + "x" * 100)
            told.prompt()
            told.thought("answer " + "y" * 50)
    assert (cell.edited, cell.broken, cell.refilled, cell.calls) == (0, 0, 0, 6)
    assert cell.kept is not None
    assert cell.kept > 0.5


def cache_of(name: str, *prompts: list[Block]) -> list[tuple[int, int]]:
    cache = PromptCache(PROVIDERS[name])
    return [cache.ship(prompt, chain_of(prompt)) for prompt in prompts]


def test_a_prompt_that_grows_is_read_by_every_provider_and_a_short_one_by_none_that_has_a_least_length() -> None:
    start, more = said("x" * LONG), said("x" * LONG, "reply", "next")
    for name in PROVIDERS:
        (read, written), (again, new) = cache_of(name, start, more)
        assert (read, written) == (0, 1100)
        assert again >= 1100
        assert again + new == -(-len("x" * LONG + "replynext") // CHARACTERS)
    short = said("x" * 1000 * CHARACTERS)
    assert cache_of("anthropic", short, short) == cache_of("openai", short, short) == [(0, 0)] * 2
    assert cache_of("deepseek", short, short) == [(0, 1000), (1000, 0)]


def test_a_passage_before_the_question_is_a_miss_unless_a_mark_stands_before_it() -> None:
    """Two prompts share a long beginning, and each has a passage of its own before its question."""
    first = said("x" * LONG, "reply", "passage one", "so", "question one")
    second = said("x" * LONG, "reply", "passage two", "so", "question two")
    assert cache_of("openai", first, second)[1][0] == 0
    assert cache_of("deepseek", first, second)[1][0] == 0
    # Anthropic's second mark stands on the user's message before the last one: here that is the passage itself.
    assert cache_of("anthropic", first, second)[1][0] == 0
    marked = [*said("x" * LONG), Block("assistant", "", "passage"), Block("user", "", "question")]
    other = [*said("x" * LONG), Block("assistant", "", "another"), Block("user", "", "question")]
    assert cache_of("anthropic", marked, other)[1][0] == 1100
    # A mark where the second prompt parted from the first is an entry for the third.
    later = said("x" * LONG, "reply", "passage three", "so", "question three")
    assert cache_of("anthropic-shared", first, second, later)[2][0] == (LONG + 5) // CHARACTERS
    assert cache_of("anthropic", first, second, later)[2][0] == 0
    # DeepSeek has noticed by the third prompt what all three share.
    assert cache_of("deepseek", first, second, later)[2][0] == (LONG + 5) // CHARACTERS


def test_an_entry_is_found_only_so_many_blocks_before_a_mark() -> None:
    start = [Block("assistant", "", "x" * LONG)]
    near, far = ([*start, *(Block("assistant", "", str(at)) for at in range(count))] for count in (20, 21))
    assert cache_of("anthropic", start, near)[1][0] == 1100
    assert cache_of("anthropic", start, far)[1][0] == 0
    assert cache_of("openai", start, far)[1][0] == 1100


def test_the_reply_is_read_where_the_provider_kept_it() -> None:
    start = said("x" * LONG)
    grown = said("x" * LONG, "reply" * 40, "next")
    assert cache_of("openai", start, grown)[1][0] == 1100
    assert cache_of("deepseek", start, grown)[1][0] == 1150


def test_a_copy_of_a_cache_goes_on_by_itself() -> None:
    cache, prompt = PromptCache(Provider(prices=PROVIDERS["openai"].prices)), said("x" * LONG)
    copy = cache.copy()
    copy.ship(prompt, chain_of(prompt))
    assert copy.ship(prompt, chain_of(prompt))[0] == 1100
    assert cache.ship(prompt, chain_of(prompt))[0] == 0


def test_a_bill_is_for_right_answers_and_says_what_the_others_cost() -> None:
    def cell(policy: str, read: int) -> PolicyCounts:
        shares = dict.fromkeys(PROVIDERS, read)
        left = dict.fromkeys(PROVIDERS, 900000 - read)
        return PolicyCounts(policy=policy, window=10, shipped=1_000_000, read=shares, written=left)

    bills = bills_of(
        [(cell("tail", 0), 10), (cell("cost", 800_000), 5), (cell("history", 900_000), 10), (cell("none", 800_000), 0)]
    )
    known = {(one.policy, one.provider): one for one in bills}
    tail, cost = known["tail", "anthropic"], known["cost", "anthropic"]
    assert tail.dollars == pytest.approx(0.9 * 3.75 + 0.1 * 3.0)
    assert cost.dollars == pytest.approx(0.8 * 0.3 + 0.1 * 3.75 + 0.1 * 3.0)
    assert tail.each == pytest.approx(100 * tail.dollars)
    assert cost.to_tail == pytest.approx(2 * cost.dollars / tail.dollars)
    assert cost.to_history == pytest.approx(2 * cost.dollars / known["history", "anthropic"].dollars)
    assert (tail.to_tail, known["history", "anthropic"].to_history) == (1.0, 1.0)
    assert (known["none", "openai"].each, known["none", "openai"].to_tail) == (None, None)
    late = bills_of([(cell("cost", 800_000), 5)], pause=301.0)
    spent = {one.provider: one.dollars for one in late}
    assert spent["anthropic"] == pytest.approx(0.9 * 3.75 + 0.1 * 3.0)
    assert spent["openai"] == pytest.approx(0.8 * 0.2 + 0.1 * 2.5 + 0.1 * 2.0)


def test_a_provider_is_a_price_of_its_own() -> None:
    report = evaluate(sample_of(None, 3), [2000], ["fifo"], rates=rates_of(["hosted", "anthropic", "deepseek"]))
    row = report.row("fifo", 2000)
    read, written = row.read["anthropic"], row.written["anthropic"]
    assert 0 < read < row.cached
    spent = (read * 0.3 + written * 3.75 + (row.shipped - read - written) * 3.0) / 1e6
    assert row.costs["anthropic"] == pytest.approx(spent / row.calls * 1000)
    assert row.costs["deepseek"] < row.costs["anthropic"]
