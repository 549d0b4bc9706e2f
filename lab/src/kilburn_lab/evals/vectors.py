"""Codecs of vectors: how many of the ten nearest each finds, in how many bytes and how much time, from thousands to a million.

The vectors are those of real passages where a file is given. A number that the file does not reach is made up of them:
each made vector is a mixture of two real ones with some noise, so that it lies where real ones lie. The neighbours of
such vectors are closer together than those of real ones, so a million of them is a harder case than a million passages.

    report = evaluate(counts=[10_000])
    print(report.table())
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import MissingExtra, SpecError
from kilburn.kernel.resolve import resolve
from kilburn.opening import Store
from kilburn.retrieval import Embedder
from kilburn.search.scan import Scan, pack, vector_bytes
from kilburn.search.vectors import checked
from kilburn.wire.recording import read_as
from kilburn_lab.compression import Codec, codec_for, codecs
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.vectors_report import FactShares, VectorRow, VectorsReport

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "embed") from error


Array = np.ndarray[Any, Any]

COUNTS = (10_000,)
NEAREST, CANDIDATES = 10, 100
ROWS = 1 << 16
"""Vectors that are made, encoded and compared at once."""
LEARNED = 10_000
"""Vectors that a codec learns from, at most."""
SAMPLE = 2000
"""Passages of a file that are embedded, unless more are wanted."""
NOISE = 0.25
"""Length of the noise in a made vector, before it gets the length 1."""
SCAN = "scan"
"""What search uses: signs and int8 in memory, candidates by signs, exact products of these."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors and queries of length 1 in rows, and what they are in words."""

    vectors: Any
    queries: Any
    words: str


class _Text(msgspec.Struct):
    text: str


class _Line(msgspec.Struct):
    text: str = ""
    docs: list[_Text] = []
    queries: list[_Text] = []


def read(path: Path, embedder: Embedder, sample: int, queries: int, seed: int) -> Source:
    """The vectors of a file: `.npy` holds them in rows; JSON lines (`.gz` too) hold passages, as `text` or in `docs`, and
    maybe `queries`, which are embedded.

    Raises:
        SpecError: an array that cannot be read or used, or too few vectors. InvalidMessage: a file of JSON lines that
            cannot be read, or a line that is none; the message names the line. ModelError, Unavailable: the embedder failed.
    """
    dice = np.random.default_rng(seed)
    texts: list[str] = []
    asked: list[str] = []
    vectors = np.empty((0, embedder.dimensions), np.float32)
    try:
        if path.suffix == ".npy":
            vectors = np.asarray(np.load(path, allow_pickle=False), np.float32)
        else:
            texts, asked = _texts(path)
    except (OSError, EOFError, ValueError) as error:
        raise SpecError(f"{path}: {error}", advice="give .npy, or JSON lines with `text` or `docs`") from error
    if vectors.ndim != 2:
        raise SpecError(f"{path}: an array of {vectors.shape}", advice="give one vector a row")
    words = f"{len(vectors):,} vectors of {path.name}"
    if path.suffix != ".npy":
        texts = [texts[at] for at in dice.permutation(len(texts))[:sample]]
        asked = [asked[at] for at in dice.permutation(len(asked))[:queries]]
        vectors = _embedded(embedder, texts)
        words = f"{len(texts):,} passages of {path.name} by {embedder.name}"
    if len(vectors) < 2 * NEAREST:
        raise SpecError(f"{path}: {len(vectors)} vectors", advice="give a file with more")
    vectors = _unit(vectors[dice.permutation(len(vectors))])
    if asked:
        return Source(vectors=vectors, queries=_embedded(embedder, asked), words=f"{words}, its queries")
    held = min(queries, len(vectors) // 4)
    return Source(vectors=vectors[held:], queries=vectors[:held], words=f"{words}, {held} held out as queries")


def _texts(path: Path) -> tuple[list[str], list[str]]:
    """The passages and the queries of JSON lines."""
    passages, asked = [], []
    for _, found in read_as(path, _Line, "each line is {text}, or {docs: [{text}], queries: [{text}]}"):
        passages += [one.text for one in found.docs] + ([found.text] if found.text else [])
        asked += [one.text for one in found.queries]
    return passages, asked


def made_up(count: int, queries: int, seed: int, dimensions: int = 384) -> Source:
    """Vectors around random topics, which differ most in few directions, as those of texts do."""
    dice = np.random.default_rng(seed)
    reach = (np.arange(1, dimensions + 1) ** -0.5).astype(np.float32)
    topics = dice.normal(size=(max(8, count // 50), dimensions)).astype(np.float32) * reach
    which = dice.integers(len(topics), size=count + queries)
    found = _unit(topics[which] + 0.6 * dice.normal(size=(len(which), dimensions)).astype(np.float32) * reach)
    return Source(vectors=found[queries:], queries=found[:queries], words="made-up vectors")


def evaluate(
    data: Path | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    only: Sequence[str] = (),
    embedder: Any = None,
    sample: int = SAMPLE,
    queries: int = 50,
    seed: int = 0,
    progress: Progress = unwatched,
) -> VectorsReport:
    """Measure all codecs.

    Args:
        data: see `read`; None for made-up vectors.
        counts: of vectors.
        only: names of codecs; all where empty.
        embedder: a spec or an object; it embeds the passages of `data`, and the facts.
        sample: passages of `data` that are embedded.
        progress: gets the steps done and the steps in all.

    Raises:
        SpecError: counts or data that cannot be. MissingExtra, Unavailable: the embedder cannot be made.
    """
    if any(count < 2 * NEAREST for count in counts) or not counts or queries < 1:
        raise SpecError(f"counts {list(counts)}, {queries} queries", advice=f"give {2 * NEAREST} vectors or more, and a query")
    known = [SCAN, *(codec.name for codec in codecs())]
    if set(only) - set(known):
        raise SpecError(f"no codec {sorted(set(only) - set(known))}", advice=f"known: {', '.join(known)}")
    steps = len(counts) * len(only or known)
    progress(0, steps)
    begun = time.perf_counter()
    made: Embedder | None = None if embedder is None else resolve("search.embedders", embedder)
    if data is None:
        source = made_up(min(max(counts), 20_000), queries, seed)
    elif made is None and data.suffix != ".npy":
        source = read(data, resolve("search.embedders", "minilm"), sample, queries, seed)
    else:
        source = read(data, made or resolve("search.embedders", "hashing"), sample, queries, seed)
    rows: list[VectorRow] = []
    for count in counts:
        originals = np.concatenate([part.astype(np.float16) for part in _vectors(source.vectors, count, seed)])
        truth = _truth(originals, source.queries)
        chosen = {codec.name: codec for codec in codecs()}
        for name in known:
            if name not in (only or known):
                continue
            if name == SCAN:
                rows.append(_scanned(originals, source.queries, truth))
            else:
                rows.append(_row(chosen[name], originals, source, truth, seed))
            progress(len(rows), steps)
    if max(counts) > len(source.vectors):
        words = f"{source.words}; more than these are mixtures of two with noise"
        source = msgspec.structs.replace(source, words=words)
    return VectorsReport(
        data=source.words,
        dimensions=source.vectors.shape[1],
        queries=len(source.queries),
        candidates=CANDIDATES,
        seed=seed,
        seconds=time.perf_counter() - begun,
        rows=rows,
        facts=_facts(made, seed),
    )


def _vectors(real: Array, count: int, seed: int) -> Iterator[Array]:
    """The first `count` vectors: the real ones, then made ones."""
    dice = np.random.default_rng((seed, count))
    yield real[:count]
    done = min(count, len(real))
    while done < count:
        size = min(ROWS, count - done)
        one, two = dice.integers(len(real), size=(2, size))
        share = dice.uniform(0, 0.5, (size, 1)).astype(np.float32)
        noise = dice.normal(size=(size, real.shape[1])).astype(np.float32) * np.float32(NOISE / np.sqrt(real.shape[1]))
        yield _unit((1 - share) * real[one] + share * real[two] + noise)
        done += size


def _truth(originals: Array, queries: Array) -> list[set[int]]:
    """The ten nearest of each query, exactly."""
    best = np.full((len(queries), 0), 0.0, np.float32), np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(originals), ROWS):
        cosines = queries @ originals[start : start + ROWS].astype(np.float32).T
        kept = np.argpartition(-cosines, min(NEAREST, cosines.shape[1]) - 1, axis=1)[:, :NEAREST]
        both = np.concatenate([best[0], np.take_along_axis(cosines, kept, 1)], 1), np.concatenate([best[1], kept + start], 1)
        order = np.argsort(-both[0], axis=1)[:, :NEAREST]
        best = np.take_along_axis(both[0], order, 1), np.take_along_axis(both[1], order, 1)
    return [set(row.tolist()) for row in best[1]]


def _row(codec: Codec, originals: Array, source: Source, truth: list[set[int]], seed: int) -> VectorRow:
    dice = np.random.default_rng(seed)
    some = originals if len(originals) <= LEARNED else originals[np.sort(dice.permutation(len(originals))[:LEARNED])]
    begun = time.perf_counter()
    used, note = codec_for(codec, some.astype(np.float32), seed)
    fitted = time.perf_counter()
    codes = [used.encode(originals[start : start + ROWS].astype(np.float32)) for start in range(0, len(originals), ROWS)]
    encoded = time.perf_counter()
    alone = rescored = 0
    times = []
    for query, wanted in zip(source.queries, truth, strict=True):
        start = time.perf_counter()
        scores = np.concatenate([used.scores(part, query) for part in codes])
        best = np.argpartition(-scores, min(CANDIDATES, len(scores)) - 1)[:CANDIDATES]
        exact = originals[best].astype(np.float32) @ query
        found = best[np.argsort(-exact)[:NEAREST]]
        times.append(time.perf_counter() - start)
        rescored += len(wanted & set(found.tolist()))
        alone += len(wanted & set(best[np.argsort(-scores[best], kind="stable")[:NEAREST]].tolist()))
    return VectorRow(
        count=len(originals),
        codec=codec.name,
        bytes=codes[0].shape[1],
        alone=alone / NEAREST / len(truth),
        rescored=rescored / NEAREST / len(truth),
        ms=1000 * float(np.median(times)),
        ms_95=1000 * float(np.quantile(times, 0.95)),
        fit=fitted - begun,
        encoded=len(originals) / max(encoded - fitted, 1e-9),
        note=note,
    )


def _scanned(originals: Array, queries: Array, truth: list[set[int]]) -> VectorRow:
    """What search does, with what search keeps: no originals, and no fit."""
    scan = Scan(originals.shape[1])
    begun = time.perf_counter()
    for start in range(0, len(originals), ROWS):
        part = originals[start : start + ROWS].astype(np.float32)
        scan.add(range(start + 1, start + 1 + len(part)), pack(part))
    encoded = time.perf_counter() - begun
    found, times = 0, []
    for query, wanted in zip(queries, truth, strict=True):
        start_time = time.perf_counter()
        nearest = scan.nearest(query, NEAREST)
        times.append(time.perf_counter() - start_time)
        found += len(wanted & {entry - 1 for entry, _ in nearest})
    recall = found / NEAREST / len(truth)
    return VectorRow(
        count=len(originals),
        codec=SCAN,
        bytes=vector_bytes(originals.shape[1]) + originals.shape[1] // 8,
        alone=recall,
        rescored=recall,
        ms=1000 * float(np.median(times)),
        ms_95=1000 * float(np.quantile(times, 0.95)),
        fit=0.0,
        encoded=len(originals) / encoded,
    )


def _facts(embedder: Embedder | None, seed: int, count: int = 200) -> FactShares:
    """Facts that one word tells apart are found by that word."""
    dice = random.Random(seed)
    numbers = dice.sample(range(10_000, 100_000), count)
    names = [f"{dice.choice('ABCDEFGH')}{dice.choice('JKLMN')}-{number}" for number in numbers]
    texts = [f"The deposit for order {name} is {dice.randrange(100, 1000)} euros, due in March." for name in names]
    with Store(Sqlite(":memory:"), Budget(8000), "fifo", tokenizer="chars/4") as store:
        session = store.session("facts")
        for text in texts:
            session.append({"role": "user", "content": text})
        hits = [store.backend.words.search(f"deposit for order {name}", limit=1) for name in names]
    words = sum(bool(hit) and hit[0].page == number for number, hit in enumerate(hits, 1)) / len(names)
    if embedder is None:
        return FactShares(facts=len(names), words=words, meaning=None, meaning_10=None)
    cosines = _embedded(embedder, [f"deposit for order {name}" for name in names]) @ _embedded(embedder, texts).T
    order = np.argsort(-cosines, axis=1)[:, :NEAREST]
    first = sum(int(row[0] == at) for at, row in enumerate(order)) / len(names)
    ten = sum(int(at in row) for at, row in enumerate(order)) / len(names)
    return FactShares(facts=len(names), words=words, meaning=first, meaning_10=ten)


def _embedded(embedder: Embedder, texts: Sequence[str]) -> Array:
    return np.concatenate(
        [checked(embedder, texts[start : start + 64]) for start in range(0, len(texts), 64)]
        or [np.empty((0, embedder.dimensions), np.float32)]
    )


def _unit(vectors: Array) -> Array:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise SpecError("vectors without a direction", advice="leave out rows that are zero or not finite")
    found: Array = (vectors / lengths).astype(np.float32)
    return found
