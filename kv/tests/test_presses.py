"""Presses against references in plain loops over lists, and the rules that hold for all of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import BudgetTooSmall, InvalidRange, KVError, SpecError
from kilburn_kv.observation import CachedPage, Observation, Press
from kilburn_kv.presses import names, press
from kilburn_kv.presses.full import Full
from kilburn_kv.presses.h2o import H2o
from kilburn_kv.presses.keynorm import Keynorm
from kilburn_kv.presses.pages import Pages
from kilburn_kv.presses.snapkv import Snapkv
from kilburn_kv.presses.streaming import Streaming
from kilburn_kv.presses.window import Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Rows = list[list[list[float]]]
"""[layers][heads][n]"""


@dataclass
class Case:
    """One observation as lists: scores are small whole numbers, so that many are equal and no sum is rounded."""

    layers: int
    heads: int
    count: int
    queries: int
    attention: Rows
    recent: list[list[list[list[float]]]]
    keys: list[list[list[list[float]]]]
    seen: list[int]
    pages: tuple[CachedPage, ...] = ()
    positions: list[int] = field(default_factory=list)

    def observation(self) -> Observation:
        def tensor(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=DEVICE)

        return Observation(
            positions=torch.tensor(self.positions, device=DEVICE),
            end=self.positions[-1] + 1,
            keys=tensor(self.keys),
            attention=tensor(self.attention),
            queries=torch.tensor(self.seen, device=DEVICE),
            recent=tensor(self.recent),
            pages=self.pages,
        )


UNIT = 180
"""Scores are multiples of it: the means that presses take of up to 5 neighbours and 4 heads are then exact."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, heads, count = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.integers(2, 24))
    queries = draw(st.sampled_from([1, 2, 4]))
    random = draw(st.randoms(use_true_random=False))
    top = draw(st.integers(0, 3))

    def row() -> list[float]:
        return [float(UNIT * random.randint(0, top)) for _ in range(count)]

    def key() -> list[float]:
        return [float(random.randint(-2, 2)) for _ in range(4)]

    pages, at = [], random.randint(0, 2)
    while at < count and random.random() < 0.95:
        stop = min(count, at + random.randint(1, 7))
        distance = random.choice([None, None, 0.0, 8.0, 16.0])
        page = 0 if random.random() < 0.15 else len(pages) + 1
        marks = [random.random() < chance for chance in (0.15, 0.2, 0.2)]
        pages.append(CachedPage(page, at, stop, pinned=marks[0], folded=marks[1], stale=marks[2], distance=distance))
        at = stop + random.choice([0, 0, 0, 1])
    return Case(
        layers=layers,
        heads=heads,
        count=count,
        queries=queries,
        attention=[[row() for _ in range(heads)] for _ in range(layers)],
        recent=[[[row() for _ in range(queries)] for _ in range(heads)] for _ in range(layers)],
        keys=[
            [[[float(random.randint(-2, 2)) for _ in range(4)] for _ in range(count)] for _ in range(heads)]
            for _ in range(layers)
        ],
        seen=[random.choice([1, 2, 4]) for _ in range(count)],
        pages=tuple(pages),
        positions=sorted(random.sample(range(3 * count), count)),
    )


def best(scores: list[float], count: int) -> list[int]:
    """The reference for ties: take the best again and again, the first of equals."""
    left = list(range(len(scores)))
    taken = []
    for _ in range(count):
        winner = left[0]
        for index in left:
            if scores[index] > scores[winner]:
                winner = index
        left.remove(winner)
        taken.append(winner)
    return sorted(taken)


def pooled(scores: list[float], kernel: int, pool: str) -> list[float]:
    half, out = kernel // 2, []
    for index in range(len(scores)):
        near = scores[max(0, index - half) : index + half + 1]
        out.append(max(near) if pool == "max" else sum(near) / kernel)
    return out


def per_head(case: Case, choose: Callable[[int, int], list[int]]) -> list[list[list[int]]]:
    return [[choose(layer, head) for head in range(case.heads)] for layer in range(case.layers)]


@settings(max_examples=50)
@given(cases(), st.data())
def test_h2o_is_the_reference(case: Case, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, case.count - 1))
    share = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
    normalise = data.draw(st.booleans())
    heavy = math.floor(budget * share)
    start = case.count - (budget - heavy)

    def choose(layer: int, head: int) -> list[int]:
        received = case.attention[layer][head][:start]
        if normalise:
            received = [value / seen for value, seen in zip(received, case.seen, strict=False)]
        return best(received, heavy) + list(range(start, case.count))

    kept = H2o(heavy=share, normalise=normalise).keep(case.observation(), budget)
    assert kept.keep.tolist() == per_head(case, choose)


@settings(max_examples=50)
@given(cases(), st.data())
def test_snapkv_is_the_reference(case: Case, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, max(1, case.count - 1)))
    budget = data.draw(st.integers(min(window, case.count - 1), case.count - 1))
    kernel, pool = data.draw(st.sampled_from([1, 3, 5])), data.draw(st.sampled_from(["avg", "max"]))
    start = case.count - window

    def choose(layer: int, head: int) -> list[int]:
        votes = [0.0] * start
        for row in case.recent[layer][head][-window:]:
            votes = [total + value for total, value in zip(votes, row, strict=False)]
        return best(pooled(votes, kernel, pool), budget - window) + list(range(start, case.count))

    kept = Snapkv(window=window, kernel=kernel, pool=pool).keep(case.observation(), budget)
    assert kept.keep.tolist() == per_head(case, choose)


@settings(max_examples=50)
@given(cases(), st.data())
def test_keynorm_is_the_reference(case: Case, data: st.DataObject) -> None:
    window = data.draw(st.integers(0, case.count - 1))
    budget = data.draw(st.integers(max(1, window), case.count - 1))
    start = case.count - window

    def choose(layer: int, head: int) -> list[int]:
        long = [sum(value * value for value in key) for key in case.keys[layer][head][:start]]
        return best([-square for square in long], budget - window) + list(range(start, case.count))

    assert Keynorm(window=window).keep(case.observation(), budget).keep.tolist() == per_head(case, choose)


@settings(max_examples=40)
@given(cases(), st.data())
def test_window_and_streaming_are_the_reference(case: Case, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, case.count - 1))
    seen = case.observation()
    kept = Window().keep(seen, budget)
    assert (kept.keep.tolist(), kept.shift) == (list(range(case.count))[-budget:], None)
    sinks = data.draw(st.integers(0, budget - 1))
    kept = Streaming(sinks=sinks).keep(seen, budget)
    wanted = [*range(sinks), *range(case.count - budget + sinks, case.count)]
    assert kept.keep.tolist() == wanted
    assert kept.shift is not None
    at = [case.positions[index] + shift for index, shift in zip(wanted, kept.shift.tolist(), strict=True)]
    assert at == list(range(seen.end - budget, seen.end))
    assert Streaming(sinks=sinks, rotate=False).keep(seen, budget).shift is None


def page_reference(case: Case, policy: Pages, budget: int) -> list[int]:
    """What `Pages` documents, token by token."""
    count, start = case.count, case.count - policy.window
    owner: list[CachedPage | None] = [None] * count
    for page in case.pages:
        for index in range(page.start, page.stop):
            owner[index] = page
    if not case.pages:
        owner = [CachedPage(1 + index // policy.unit, 0, 0) for index in range(count)]
    free = []
    for index in range(count):
        page = owner[index]
        if page is not None and page.page != 0 and not page.pinned and policy.sinks <= index < start:
            free.append(index)
    kept = [index for index in range(count) if index not in free]
    if len(kept) > budget:
        raise BudgetTooSmall("as expected")

    merge = {"max": max, "mean": lambda values: sum(values) / len(values)}

    def scores(contrast: float) -> list[float]:
        lines = []
        for layer in range(case.layers):
            for head in range(case.heads):
                rows = case.recent[layer][head][-policy.window :]
                line = [0.0] * count
                for index in free:
                    usual = case.attention[layer][head][index] / case.seen[index]
                    line[index] = max(0.0, sum(row[index] for row in rows) / len(rows) - contrast * usual)
                lines.append(pooled(line, policy.kernel, policy.pool))
        return [merge[policy.heads]([line[index] for line in lines]) for index in range(count)]

    score, plainly = scores(policy.contrast), scores(0.0)

    groups: dict[int, list[int]] = {}
    for index in free:
        page = owner[index]
        assert page is not None
        groups.setdefault(page.page, []).append(index)
    ranked = []
    for order, (_, tokens) in enumerate(groups.items()):
        page = owner[tokens[0]]
        assert page is not None
        likely = (policy.folded if page.folded else 1.0) * (policy.stale if page.stale else 1.0)
        likely *= 0.5 ** (page.distance / policy.halflife) if page.distance is not None else 1.0
        for first in range(0, len(tokens), policy.span):
            span = tokens[first : first + policy.span]
            worth = []
            for kind in (score, plainly):
                page, own = (merge[policy.page]([kind[index] for index in part]) for part in (tokens, span))
                worth.append(likely * ((1 - policy.weight) * own + policy.weight * page))
            asked, votes = (merge[policy.page]([kind[index] for index in span]) for kind in (score, plainly))
            ranked.append((-worth[0], -worth[1], -likely, order, -asked, -votes, span))
    asked_for = budget - int(policy.unasked * (budget - len(kept)))
    for *_, span in sorted(ranked):
        room = asked_for - len(kept)
        stretches = [span[at : at + room] for at in range(len(span) - room + 1)] if room < len(span) else [span]
        totals = [tuple(sum(kind[index] for index in stretch) for kind in (score, plainly)) for stretch in stretches]
        kept += stretches[totals.index(max(totals))]
        if len(kept) == asked_for:
            break
    return sorted(kept + unasked_reference(case, policy, groups, owner, kept, budget))


def unasked_reference(
    case: Case, policy: Pages, groups: dict[int, list[int]], owner: list[CachedPage | None], kept: list[int], budget: int
) -> list[int]:
    """The rest of what `Pages` documents: tokens with short keys, and their neighbours, in what is left of the budget."""
    free = [index for tokens in groups.values() for index in tokens]
    short = dict.fromkeys(free, 0.0)
    for layer in case.keys:
        for head in layer:
            norms = {index: math.sqrt(sum(number * number for number in head[index])) for index in free}
            mean = sum(norms.values()) / len(free)
            deviation = math.sqrt(sum((norm - mean) ** 2 for norm in norms.values()) / len(free)) or 1e-12
            for index in free:
                short[index] += (mean - norms[index]) / deviation
    least, most = min(short.values(), default=0.0), max(short.values(), default=0.0)
    ranked = []
    for tokens in groups.values():
        for index in tokens:
            page = owner[index]
            assert page is not None
            likely = (policy.folded if page.folded else 1.0) * (policy.stale if page.stale else 1.0)
            likely *= 0.5 ** (page.distance / policy.halflife) if page.distance is not None else 1.0
            ranked.append((-likely * (short[index] - least) / ((most - least) or 1.0), -likely, index, tokens))
    more: list[int] = []
    for _, _, index, tokens in sorted(ranked):
        if index not in kept + more:
            near = [other for other in tokens if abs(other - index) <= policy.around and other not in kept + more]
            more += sorted(near, key=lambda other: (abs(other - index), other))[: budget - len(kept) - len(more)]
    return more


@settings(max_examples=120)
@given(cases(), st.booleans(), st.data())
def test_pages_is_the_reference(case: Case, known: bool, data: st.DataObject) -> None:
    if not known:
        case.pages = ()
    policy = Pages(
        window=data.draw(st.integers(1, max(1, case.count // 3))),
        sinks=data.draw(st.integers(0, 2)),
        span=data.draw(st.sampled_from([1, 2, 4])),
        weight=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        kernel=data.draw(st.sampled_from([1, 3, 5])),
        pool=data.draw(st.sampled_from(["avg", "max"])),
        heads=data.draw(st.sampled_from(["mean", "max"])),
        page=data.draw(st.sampled_from(["mean", "max"])),
        contrast=data.draw(st.sampled_from([0.0, 0.5])),
        # No factor turns one whole norm into another, nor are norms of several heads added: what is equal is equal exactly.
        folded=data.draw(st.sampled_from([0.0, 0.45])),
        stale=0.3,
        halflife=7.0,
        unasked=data.draw(st.sampled_from([0.0, 0.3, 1.0])) if case.layers * case.heads == 1 else 0.0,
        around=data.draw(st.sampled_from([0, 1, 3])),
        unit=data.draw(st.sampled_from([4, 8])),
    )
    budget = data.draw(st.integers(1, case.count - 1))
    try:
        wanted = page_reference(case, policy, budget)
    except BudgetTooSmall:
        with pytest.raises(BudgetTooSmall):
            policy.keep(case.observation(), budget)
        return
    kept = policy.keep(case.observation(), budget)
    assert (kept.keep.tolist(), kept.shift) == (wanted, None)
    assert len(wanted) == budget


SMALL = [
    Window(),
    Streaming(sinks=2),
    H2o(),
    Snapkv(window=2, kernel=3),
    Keynorm(window=1),
    Pages(window=2, sinks=1, span=2, kernel=3),
]


@pytest.mark.parametrize("policy", [Full(), *SMALL], ids=repr)
@settings(max_examples=25)
@given(case=cases(), more=st.integers(0, 3))
def test_where_all_fits_all_stays_as_it_is(policy: Press, case: Case, more: int) -> None:
    seen = case.observation()
    kept = policy.keep(seen, case.count + more)
    assert kept.keep.tolist() == list(range(case.count))
    assert kept.keep.dtype == torch.int64
    assert kept.shift is None


@pytest.mark.parametrize("policy", SMALL, ids=repr)
@settings(max_examples=25)
@given(case=cases(), data=st.data())
def test_the_shape_of_a_selection(policy: Press, case: Case, data: st.DataObject) -> None:
    case.pages = ()
    if case.count < 5:
        return
    budget = data.draw(st.integers(4, case.count - 1))
    seen = case.observation()
    before = [value.clone() for value in (seen.positions, seen.attention, seen.recent, seen.keys) if value is not None]
    kept = policy.keep(seen, budget)
    shared = isinstance(policy, Window | Streaming | Pages)
    assert tuple(kept.keep.shape) == ((budget,) if shared else (case.layers, case.heads, budget))
    assert kept.keep.dtype == torch.int64
    assert kept.keep.device.type == DEVICE.type
    assert bool((kept.keep.diff(dim=-1) > 0).all())
    assert int(kept.keep.min()) >= 0
    assert int(kept.keep.max()) < case.count
    if kept.shift is not None:
        assert (kept.shift.shape, kept.shift.dtype) == ((budget,), torch.int64)
    again = policy.keep(seen, budget)
    assert torch.equal(kept.keep, again.keep)
    after = [value for value in (seen.positions, seen.attention, seen.recent, seen.keys) if value is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def plain(count: int, pages: tuple[CachedPage, ...] = (), recent: list[float] | None = None) -> Observation:
    """One layer, one head, one query; nothing stands out unless `recent` says so."""
    return Observation(
        positions=torch.arange(count, device=DEVICE),
        end=count,
        keys=torch.ones(1, 1, count, 4, device=DEVICE),
        attention=torch.ones(1, 1, count, device=DEVICE),
        queries=torch.arange(count, 0, -1, device=DEVICE),
        recent=torch.tensor(recent or [1.0] * count, device=DEVICE).view(1, 1, 1, count),
        pages=pages,
    )


@pytest.mark.parametrize(
    ("policy", "budget", "numbers"),
    [
        (Streaming(sinks=4), 4, "must keep 5 (4 sinks, 1 recent token)"),
        (Snapkv(window=8), 7, "must keep 8 (8 in the window)"),
        (Keynorm(window=8), 7, "must keep 8 (8 in the window)"),
        (Pages(window=4, sinks=2), 5, "must keep 6 (2 sinks, 4 in the window)"),
    ],
    ids=repr,
)
def test_a_budget_below_what_must_stay_says_the_numbers(policy: Press, budget: int, numbers: str) -> None:
    seen = plain(20)
    with pytest.raises(BudgetTooSmall, match=re.escape(f"cannot keep {budget} tokens: it {numbers}")):
        policy.keep(seen, budget)
    assert policy.keep(seen, budget + 1).keep.shape[-1] == budget + 1


@pytest.mark.parametrize("policy", [Full(), *SMALL], ids=repr)
@pytest.mark.parametrize("budget", [0, -3])
def test_no_budget_at_all_is_too_small(policy: Press, budget: int) -> None:
    with pytest.raises(BudgetTooSmall, match=f"cannot keep {budget} tokens"):
        policy.keep(plain(20), budget)


def test_full_is_bound_by_no_budget() -> None:
    assert Full().keep(plain(20), 1).keep.tolist() == list(range(20))


def test_equal_scores_keep_the_earlier_tokens_in_every_head() -> None:
    seen = dataclasses.replace(plain(4000), attention=torch.ones(3, 2, 4000, device=DEVICE))
    kept = H2o(heavy=1.0).keep(seen, 1000).keep
    assert torch.equal(kept, torch.arange(1000, device=DEVICE).expand(3, 2, 1000))


def test_what_was_not_observed_or_is_no_number_is_an_error() -> None:
    bare = Observation(positions=torch.arange(9), end=9)
    for policy, name in ((H2o(), "attention"), (Snapkv(window=2), "recent"), (Keynorm(), "keys"), (Pages(window=2), "recent")):
        with pytest.raises(KVError, match=f"needs {name}, and the observation has none"):
            policy.keep(bare, 7)
    broken = dataclasses.replace(plain(9), attention=torch.full((1, 1, 9), float("nan")))
    with pytest.raises(KVError, match="not a number"):
        H2o().keep(broken, 7)
    with pytest.raises(KVError, match="not a number"):
        Pages(window=2).keep(plain(9, recent=[float("nan")] * 9), 8)


def test_a_single_token_budget_keeps_the_last() -> None:
    assert Window().keep(plain(5), 1).keep.tolist() == [4]
    assert H2o().keep(plain(5), 1).keep.tolist() == [[[4]]]


PAGES = Pages(window=2, sinks=1, span=2, kernel=1, weight=1.0, contrast=0.0, unasked=0.0)
BOOK = (CachedPage(0, 0, 2), CachedPage(1, 2, 8), CachedPage(2, 8, 14), CachedPage(3, 14, 18))
"""A template, three pages, and two tokens behind them that are the window."""


def test_pages_keeps_a_whole_page_before_parts_of_others() -> None:
    asked = [0.0] * 20
    asked[10], asked[3] = 0.5, 0.4
    assert PAGES.keep(plain(20, BOOK, asked), 10).keep.tolist() == [0, 1, *range(8, 14), 18, 19]
    tokens = dataclasses.replace(PAGES, weight=0.0)
    assert tokens.keep(plain(20, BOOK, asked), 8).keep.tolist() == [0, 1, 2, 3, 10, 11, 18, 19]


def test_pages_keeps_the_best_stretch_of_what_fits_in_part() -> None:
    asked = [0.0] * 20
    asked[9], asked[12], asked[13] = 0.4, 0.2, 0.5
    wide = dataclasses.replace(PAGES, span=6)
    assert wide.keep(plain(20, BOOK, asked), 6).keep.tolist() == [0, 1, 12, 13, 18, 19]


def test_pages_lets_folded_pages_go_first_then_stale_ones_then_those_of_a_late_reuse() -> None:
    asked = [0.5] * 20
    said = {1: {"folded": True}, 2: {"stale": True}, 3: {"distance": 4.0}}
    book = (BOOK[0], *(dataclasses.replace(page, **said[page.page]) for page in BOOK[1:]))
    kept = [PAGES.keep(plain(20, book, asked), budget).keep.tolist() for budget in (8, 14)]
    assert kept == [[0, 1, *range(14, 20)], [0, 1, *range(8, 20)]]


def test_pages_never_lets_go_of_pins_and_what_is_nobodys() -> None:
    book = (CachedPage(1, 2, 8, pinned=True), CachedPage(2, 8, 14), CachedPage(3, 14, 17))
    asked = [0.0] * 8 + [1.0] * 9 + [0.0] * 3
    assert PAGES.keep(plain(20, book, asked), 11).keep.tolist() == [*range(8), 17, 18, 19]
    with pytest.raises(BudgetTooSmall, match=r"must keep 11 \(1 sinks, 2 in the window, 8 pinned or of no page\)"):
        PAGES.keep(plain(20, book, asked), 10)


def test_pages_finds_what_was_asked_where_everybody_looks_at_something_else() -> None:
    asked = [0.0] * 20
    asked[4], asked[10] = 0.5, 0.3
    usual = torch.zeros(1, 1, 20, device=DEVICE)
    usual[0, 0, 4] = 0.5 * 16
    seen = dataclasses.replace(plain(20, BOOK, asked), attention=usual)
    assert PAGES.keep(seen, 10).keep.tolist() == [*range(8), 18, 19]
    assert dataclasses.replace(PAGES, contrast=1.0).keep(seen, 10).keep.tolist() == [0, 1, *range(8, 14), 18, 19]


def test_pages_keeps_some_of_what_nobody_asked_for_where_keys_are_short() -> None:
    asked = [0.0] * 20
    asked[10] = 0.5
    keys = torch.ones(1, 1, 20, 4, device=DEVICE)
    keys[0, 0, 4] = 0.1
    seen = dataclasses.replace(plain(20, BOOK, asked), keys=keys)
    some = dataclasses.replace(PAGES, unasked=0.5, around=1)
    assert some.keep(seen, 10).keep.tolist() == [0, 1, 3, 4, 5, 8, 10, 11, 18, 19]
    seen = dataclasses.replace(seen, pages=tuple(dataclasses.replace(page, folded=page.page == 1) for page in BOOK))
    assert not {3, 4, 5} & set(some.keep(seen, 10).keep.tolist())


@pytest.mark.parametrize("pages", [(CachedPage(1, 4, 9), CachedPage(2, 8, 12)), (CachedPage(1, 4, 30),), (CachedPage(1, 9, 4),)])
def test_pages_that_overlap_or_reach_too_far_are_refused(pages: tuple[CachedPage, ...]) -> None:
    with pytest.raises(InvalidRange, match="of 20 cached tokens"):
        PAGES.keep(plain(20, pages), 10)


def test_names_resolve_and_their_parameters_too() -> None:
    assert names() == ["full", "h2o", "keynorm", "pages", "snapkv", "streaming", "window"]
    assert press("snapkv(window=16, pool='max')") == Snapkv(window=16, pool="max")
    assert press("kilburn_kv.presses.streaming:Streaming(sinks=8)") == Streaming(sinks=8)
    own = H2o(heavy=0.3)
    assert press(own) is own
    assert press("pages(contrast=0, unasked=0)").needs == {"recent"}
    assert (press("pages(window=7)").recent, press("pages").needs) == (7, {"recent", "attention", "keys"})
    assert [press(name).recent for name in ("full", "window", "streaming", "h2o", "keynorm")] == [0] * 5
    assert [set(press(name).needs) for name in ("full", "h2o", "snapkv", "keynorm")] == [
        set(),
        {"attention"},
        {"recent"},
        {"keys"},
    ]


@pytest.mark.parametrize(
    "spec",
    [
        "nosuch",
        "choice",
        "snapkv(",
        "snapkv(widow=3)",
        "snapkv(window=0)",
        "snapkv(window=2.5)",
        "snapkv(window=True)",
        "snapkv(kernel=4)",
        "snapkv(pool='sum')",
        "streaming(sinks=-1)",
        "streaming(rotate=3)",
        "h2o(heavy=1.5)",
        "h2o(heavy='half')",
        "h2o(normalise=2)",
        "keynorm(window=-1)",
        "pages(heads='median')",
        "pages(weight=2)",
        "pages(span=0)",
        "pages(halflife=0)",
        "fractions:Fraction(3)",
        "no.such.module:Press",
    ],
)
def test_a_spec_that_makes_no_press_is_a_spec_error(spec: str) -> None:
    with pytest.raises(SpecError):
        press(spec)
