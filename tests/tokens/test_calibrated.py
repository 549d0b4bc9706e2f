"""A calibration is never below what was seen lately, and can be rebuilt from numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.budget import Counter
from kilburn.tokens.calibrated import Calibrated
from kilburn.tokens.choice import counter_for

PROMPT = st.tuples(st.integers(256, 2_000_000), st.floats(0.3, 3.0)).map(lambda seen: (seen[0], max(256, int(seen[0] * seen[1]))))


def test_it_counts_as_the_inner_counter() -> None:
    inner = counter_for("gpt-4o")
    calibrated = Calibrated(inner)
    assert isinstance(calibrated, Counter)
    assert (calibrated.name, calibrated.envelope, calibrated.family) == ("gpt-4o", inner.envelope, "openai")
    calibrated.observe(1000, 2000)
    assert calibrated.count("hello world") == 2


@given(st.lists(PROMPT, min_size=1, max_size=80))
def test_the_factor_is_above_every_recent_ratio(seen: list[tuple[int, int]]) -> None:
    calibrated = Calibrated(counter_for("auto"))
    for at, (estimated, actual) in enumerate(seen):
        before = calibrated.factor
        assert calibrated.observe(estimated, actual) == calibrated.factor
        assert calibrated.factor >= max(real / counted for counted, real in seen[max(0, at - 31) : at + 1])
        assert calibrated.factor >= before * 0.949
        room = calibrated.room(actual)
        assert room * calibrated.factor <= actual + 1
        assert room <= estimated


def test_an_overestimate_shrinks_slowly_towards_the_truth_with_a_margin() -> None:
    calibrated = Calibrated(counter_for("auto"))
    factors = [calibrated.observe(10_000, 6_000) for _ in range(40)]
    assert factors[:3] == [1.0, 1.0, 1.0]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(0.63)
    assert calibrated.room(63_000) == pytest.approx(100_000, abs=1)


def test_an_undercount_is_corrected_at_once() -> None:
    calibrated = Calibrated(counter_for("chars/4"))
    assert calibrated.observe(10_000, 15_000) == pytest.approx(1.575)
    assert calibrated.room(15_750) == pytest.approx(10_000, abs=1)


@pytest.mark.parametrize(("estimated", "actual"), [(0, 0), (10, 5000), (5000, 3), (-1, 500), (255, 255)])
def test_tiny_prompts_teach_nothing(estimated: int, actual: int) -> None:
    calibrated = Calibrated(counter_for("auto"))
    assert calibrated.observe(estimated, actual) == 1.0
    assert calibrated.observe(1000, 2000) == pytest.approx(2.1)


@given(st.lists(PROMPT, max_size=50))
def test_the_same_observations_give_the_same_factor(seen: list[tuple[int, int]]) -> None:
    first, second = Calibrated(counter_for("auto")), Calibrated(counter_for("auto"))
    assert [first.observe(*each) for each in seen] == [second.observe(*each) for each in seen]
