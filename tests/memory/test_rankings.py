"""The rankings: pure, named terms that sum to the score, and each can be switched off."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.backend import SegmentKind, State
from kilburn.kernel.resolve import names, resolve
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page
from kilburn.retrieval import Candidate, Query


def candidate(page: int, **fields: Any) -> Candidate:
    made = Page(
        id=page, digest="0" * 64, kind=Kind.TEXT, role=Role.USER, message=1, tokens=fields.pop("tokens", 10), trust=Trust.USER,
        time=fields.pop("time", float(page)), speaker=fields.pop("speaker", None),
    )  # fmt: skip
    state = State(importance=fields.pop("importance", 0.0))
    return Candidate(
        segment=fields.pop("segment", 1),
        kind=fields.pop("kind", SegmentKind.SESSION),
        page=made,
        state=state,
        span=(0, 1),
        **fields,
    )


def order(spec: str, query: Query, *candidates: Candidate) -> list[int]:
    return [candidates[one.index].page.id for one in resolve("search.rankings", spec).rank(query, candidates)]


QUERY = Query(text="what", now=0.0)


def test_all_are_known() -> None:
    assert names("search.rankings") == ["blend", "meaning", "words"]


def test_words_and_meaning_alone() -> None:
    pages = candidate(1, words=2.0, meaning=0.1), candidate(2, words=3.0), candidate(3, meaning=0.9)
    assert order("words", QUERY, *pages) == [2, 1]
    assert order("meaning", QUERY, *pages) == [3, 1]


@pytest.mark.parametrize(
    ("better", "worse", "term", "query"),
    [
        ({"speaker": "Ana"}, {"speaker": "Bo"}, "speaker", Query(text="what", now=0.0, speakers=frozenset({"Ana"}))),
        ({"tokens": 50}, {"tokens": 5000}, "length", QUERY),
        ({"importance": 1.0}, {}, "importance", QUERY),
        ({"time": 1688688000.0}, {"time": 1600000000.0}, "time", Query(text="on 7 July 2023", now=1.7e9)),
    ],
)
def test_each_term_decides_and_can_be_switched_off(
    better: dict[str, Any], worse: dict[str, Any], term: str, query: Query
) -> None:
    pages = candidate(1, words=1.0, **better), candidate(9, words=1.05, **worse)
    assert order("blend", query, *pages) == [1, 9]
    assert order(f"blend({term}=0)", query, *pages) == [9, 1]


def test_neighbours_and_sessions_count() -> None:
    pages = candidate(1, words=2.0), candidate(2, words=1.0), candidate(20, words=1.01)
    assert order("blend", QUERY, *pages) == [1, 2, 20]
    assert order("blend(near=0)", QUERY, *pages) == [1, 20, 2]
    apart = candidate(1, words=2.0), candidate(2, words=1.0), candidate(9, segment=2, words=1.2)
    assert order("blend(near=0)", QUERY, *apart) == [1, 2, 9]
    assert order("blend(near=0, session=0)", QUERY, *apart) == [1, 9, 2]


@given(
    st.lists(
        st.builds(
            candidate,
            st.integers(1, 12),
            segment=st.integers(1, 3),
            kind=st.sampled_from(list(SegmentKind)),
            words=st.floats(0, 50),
            meaning=st.none() | st.floats(-1, 1),
            tokens=st.integers(0, 100_000),
            importance=st.floats(0, 1),
        ),
        unique_by=lambda one: (one.segment, one.page.id),
        max_size=12,
    ),
    st.sampled_from(["blend", "words", "meaning"]),
)
def test_terms_sum_to_the_score_and_order_is_by_score(candidates: list[Candidate], spec: str) -> None:
    ranking = resolve("search.rankings", spec)
    scored = ranking.rank(QUERY, candidates)
    assert all(sum(one.terms.values()) == pytest.approx(one.score) for one in scored)
    assert all(left.score >= right.score for left, right in pairwise(scored))
    assert len({one.index for one in scored}) == len(scored)
    assert [msgspec.structs.asdict(one) for one in ranking.rank(QUERY, candidates)] == [
        msgspec.structs.asdict(one) for one in scored
    ]
