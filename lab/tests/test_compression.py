"""Codecs of vectors: what they keep, and what they say of too few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kilburn.errors import SpecError
from kilburn_lab.compression import Binary, Codec, Components, Int8, Quantised, codec_for, codecs
from kilburn_lab.evals.vectors import made_up

DATA = made_up(3000, 20, 1, dimensions=96)


def recall(codec: Codec, candidates: int = 100) -> float:
    vectors, found = DATA.vectors, 0
    codes = codec.encode(vectors)
    assert codes.dtype == np.uint8
    for query in DATA.queries:
        wanted = set(np.argsort(-(vectors @ query))[:10].tolist())
        scores = codec.scores(codes, query)
        assert scores.shape == (len(vectors),)
        best = np.argsort(-scores)[:candidates]
        found += len(wanted & set(best[np.argsort(-(vectors[best] @ query))[:10]].tolist()))
    return found / 10 / len(DATA.queries)


@pytest.mark.parametrize(
    ("codec", "size", "least"),
    [
        (Int8(), 100, 1.0),
        (Binary(), 16, 0.75),
        (Components(48), 48, 0.97),
        (Quantised(24), 24, 0.9),
        (Quantised(12, 2), 24, 0.9),
        (Quantised(1, 8), 8, 0.5),
    ],
)
def test_candidates_of_a_codec_hold_the_nearest(codec: Codec, size: int, least: float) -> None:
    codec.fit(DATA.vectors, seed=3)
    assert codec.encode(DATA.vectors[:5]).shape == (5, size)
    assert recall(codec) >= least


def test_scores_are_near_to_cosines() -> None:
    for codec in (Int8(), Components(90), Quantised(48), Quantised(24, 3)):
        codec.fit(DATA.vectors)
        scores = codec.scores(codec.encode(DATA.vectors), DATA.queries[0])
        assert np.abs(scores - DATA.vectors @ DATA.queries[0]).mean() < 0.06, codec.name


def test_the_same_seed_gives_the_same_bytes() -> None:
    one, two = Quantised(12), Quantised(12)
    one.fit(DATA.vectors, seed=5)
    two.fit(DATA.vectors, seed=5)
    assert (one.encode(DATA.vectors[:50]) == two.encode(DATA.vectors[:50])).all()


@pytest.mark.parametrize("count", [0, 1, 2, 255])
def test_too_few_vectors_are_said_and_int8_takes_the_place(count: int) -> None:
    few = DATA.vectors[:count]
    for codec in (Components(96), Quantised(96), Quantised(48, 2)):
        with pytest.raises(SpecError, match="learns from"):
            codec.fit(few)
        with pytest.raises(SpecError, match="not 96"):
            codec.encode(DATA.vectors)
        used, why = codec_for(codec, few)
        assert codec.name in why
        assert "int8 instead" in why
        assert used.encode(few).shape == (count, 100)
    assert codec_for(Binary(), few)[1] == ""


def test_a_codec_refuses_what_does_not_fit() -> None:
    with pytest.raises(SpecError, match="divides"):
        Quantised(7).fit(DATA.vectors)
    with pytest.raises(SpecError, match="dimensions"):
        Components(97).fit(DATA.vectors)
    codec = Int8()
    codec.fit(DATA.vectors)
    with pytest.raises(SpecError, match="96 dimensions, not 95"):
        codec.encode(DATA.vectors[:, :95])
    with pytest.raises(SpecError, match="components"):
        Components(0)
    with pytest.raises(SpecError, match="stages"):
        Quantised(8, 0)


def test_codecs_of_fifty_to_a_hundred_bytes() -> None:
    made: Any = made_up(1100, 1, 0)
    sizes = {}
    for codec in codecs():
        codec.fit(made.vectors)
        sizes[codec.name] = codec.encode(made.vectors[:1]).shape[1]
    assert sizes == {"int8": 388, "binary": 48, "pca(96)": 96, "pq(96)": 96, "rq(2x48)": 96}
