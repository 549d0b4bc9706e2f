"""The cut of a trace: sentences whole, the best cut exactly, as brute force finds it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.effect import Answer
from kilburn.kernel.drive import run
from traces.segmentation import blocks_of, border_scores, score_borders, segment, sentences


def value(sizes: Sequence[int], scores: Sequence[float], cuts: Sequence[int], weight: float = 0.5) -> float:
    edges = [0, *cuts, len(sizes)]
    blocks = [sum(sizes[start:end]) for start, end in itertools.pairwise(edges)]
    if len(blocks) == 1:
        return 0.0
    mean = sum(blocks) / len(blocks)
    variation = math.sqrt(sum((block - mean) ** 2 for block in blocks) / len(blocks)) / mean
    return sum(scores[cut - 1] for cut in cuts) / len(cuts) - weight * variation


def brute(sizes: Sequence[int], scores: Sequence[float], least: int, weight: float = 0.5) -> float:
    best = 0.0
    for count in range(1, len(sizes)):
        for cuts in itertools.combinations(range(1, len(sizes)), count):
            edges = [0, *cuts, len(sizes)]
            if all(sum(sizes[start:end]) >= least for start, end in itertools.pairwise(edges)):
                best = max(best, value(sizes, scores, cuts, weight))
    return best


@settings(max_examples=300)
@given(st.data())
def test_the_cut_is_the_best_there_is(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=9))
    grades = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.25, 1.375])
    scores = data.draw(st.lists(grades, min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    least = data.draw(st.integers(1, 80))
    weight = data.draw(st.sampled_from([0.5, 0.5, 0.0, 2.0, 10.0]))
    found = segment(sizes, scores, least=least, weight=weight)
    assert found.value == pytest.approx(brute(sizes, scores, least, weight), abs=1e-9)
    assert found.value == pytest.approx(value(sizes, scores, found.cuts, weight), abs=1e-9)
    edges = [0, *found.cuts, len(sizes)]
    assert not found.cuts or all(sum(sizes[start:end]) >= least for start, end in itertools.pairwise(edges))


def greedy_prefix(sizes: Sequence[int], scores: Sequence[float], least: int) -> float:
    """What a programme finds that keeps one best prefix for each end and number of blocks."""
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    for end in range(1, len(sizes) + 1):
        if sum(sizes[:end]) >= least:
            best[end, 1] = (0.0, ())
        for count in range(2, end + 1):
            options = [
                (value(sizes[:end], scores[: end - 1], (*cuts, begin)), (*cuts, begin))
                for (begin, blocks), (_, cuts) in best.items()
                if blocks == count - 1 and begin < end and sum(sizes[begin:end]) >= least
            ]
            if options:
                best[end, count] = max(options)
    return max((found for (end, _), (found, _) in best.items() if end == len(sizes)), default=0.0)


def test_one_best_prefix_is_not_enough() -> None:
    sizes = [9, 30, 4, 4, 20, 17, 20, 18, 18, 5, 25, 11, 27]
    scores = [1.5, 1.5, 1.0, 1.0, 1.25, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5]
    exact = segment(sizes, scores, least=20).value
    assert exact == pytest.approx(brute(sizes, scores, 20))
    assert exact > greedy_prefix(sizes, scores, 20) + 0.02


def test_a_long_trace_is_cut_in_seconds() -> None:
    rng = random.Random(2)
    sizes = [rng.randint(10, 90) for _ in range(400)]
    scores = [rng.choice([0.0, 0.0, 1.0, 1.0, 2.0, 3.0]) for _ in range(399)]
    found = segment(sizes, scores, least=200)
    assert found.mean == 3.0
    assert found.variation < 0.4


@pytest.mark.parametrize(("sizes", "scores"), [([], []), ([5], []), ([100, 50], [3.0]), ([0, 0, 0], [3.0, 3.0])])
def test_too_little_for_two_blocks_is_one(sizes: list[int], scores: list[float]) -> None:
    assert segment(sizes, scores, least=100).cuts == ()


@pytest.mark.parametrize(("sizes", "scores"), [([1, 2], []), ([1], [1.0]), ([-1, 300, 300], [1.0, 1.0])])
def test_what_does_not_fit_is_refused(sizes: list[int], scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"units|size"):
        segment(sizes, scores)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One. ", "Two! ", "Three? ", "Four"]),
        ("Pi is 3.14 and e is 2.718. Good.", ["Pi is 3.14 and e is 2.718. ", "Good."]),
        ("See e.g. Fig. 3 of Dr. Smith. Next.", ["See e.g. Fig. 3 of Dr. Smith. ", "Next."]),
        ("Let $x = 1. y$ hold. So $$a.\n b! c$$ holds.\nDone.", ["Let $x = 1. y$ hold. ", "So $$a.\n b! c$$ holds.\n", "Done."]),
        (r"We get \[ x. y \] and \( a! b \). Yes.", [r"We get \[ x. y \] and \( a! b \). ", "Yes."]),
        ("Run:\n```py\nx = 1.\ny = f(x). z\n```\nThen stop.", ["Run:\n", "```py\nx = 1.\ny = f(x). z\n```\n", "Then stop."]),
        ("Call `a. b` now. End.", ["Call `a. b` now. ", "End."]),
        ("It costs $5. Then $6. End.", ["It costs $5. ", "Then $6. ", "End."]),
        ("1. First item\n2. Second item\n", ["1. First item\n", "2. Second item\n"]),
        ("He said 'no.' Then left.", ["He said 'no.' ", "Then left."]),
        ("Wait... that is x_1. So.", ["Wait... ", "that is x_1. ", "So."]),
        ("对。好！", ["对。", "好！"]),
        ("\\begin{align}a. b\\end{align} ok. x", ["\\begin{align}a. b\\end{align} ok. ", "x"]),
        ("```\nnever closed. at all. ", ["```\nnever closed. at all. "]),
        ("", []),
        ("  \n ", ["  \n "]),
    ],
)
def test_sentences_are_not_split_inside(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == expected


@given(st.text(alphabet=st.sampled_from("ab. $`\\[](){}\n!?1"), max_size=80))
def test_sentences_cover_the_text(text: str) -> None:
    assert "".join(text[start:end] for start, end in sentences(text)) == text
    assert "".join(text[start:end] for start, end in blocks_of(text, len, least=5)) == text


TRACE = (
    "We need the sum. It is 4 + 5 = 9. Therefore the sum is 9.\n\nNow let me check the product. It is 20, and so on. "
    "Thus both are known.\n\nFinally, I write the answer, which is both of them in the order in which they came."
)


def test_signs_find_the_borders() -> None:
    spans = sentences(TRACE)
    scores = border_scores(TRACE, spans)
    best = {TRACE[spans[at + 1][0] :].split(" ", 1)[0] for at, score in enumerate(scores) if score >= 3}
    assert best == {"Now", "Finally,"}
    blocks = [TRACE[start:end] for start, end in blocks_of(TRACE, len, least=20)]
    assert [block[:4] for block in blocks] == ["We n", "Now ", "Fina"]


def test_a_model_may_score_and_what_it_does_not_say_is_by_signs() -> None:
    spans = sentences(TRACE)
    own = border_scores(TRACE, spans)
    said = iter(
        [
            Answer(outcome="done", text=json.dumps({"scores": [3, 0, 1]})),
            Answer(outcome="done", text=json.dumps({"scores": [9, 9, 9]})),
            Answer(outcome="done", text="no JSON"),
        ]
    )
    scores = run(score_borders(TRACE, spans, batch=3), lambda ask: next(said, Answer(outcome="failed")))
    assert scores[:3] == [3, 0, 1]
    assert scores[3:] == own[3:]
    assert len(scores) == len(own)
