"""A reasoning trace to training data: cut into blocks, each with a memento, as one tagged text.

It joins the cut (`segmentation`) and the mementos (`compression`) and, like them, yields questions and does
no I/O. No letter of the trace is changed: the blocks joined are the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import msgspec

from kilburn.effect import Answer, Ask
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START, TAGS
from traces.compression import compress
from traces.segmentation import blocks_of, score_borders, sentences

LEAST_MEMENTO = 32
"""Tokens that a memento may always have."""


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """One block: its exact text, its memento, what both cost, and the memento's worth of 10.

    `outcome` and `tries` are those of `compression.Compressed`.
    """

    text: str
    memento: str
    tokens: int
    memento_tokens: int
    score: float
    outcome: str
    tries: int = 0


class Annotated(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trace: its blocks, whose texts joined are the trace, and the tagged text to train on."""

    blocks: tuple[Noted, ...]
    completion: str
    tokens: int
    memento_tokens: int


def annotate(
    trace: str, count: Callable[[str], int], *, least: int = 200, share: float = 0.2, judged: bool = False
) -> Generator[Ask, Answer, Annotated]:
    """Blocks and mementos of a trace.

    Args:
        count: tokens of a text.
        least: tokens of a block, at least.
        share: of a block's tokens that its memento may have, 32 tokens at least.
        judged: whether the model that writes grades too.

    Raises:
        ValueError: the trace holds tags of blocks already, or a share that is none.
    """
    if any(tag in trace for tag in TAGS):
        raise ValueError("the trace holds tags of blocks already")
    if not 0 < share <= 1 or least < 1:
        raise ValueError(f"share={share}, least={least}; give a share of (0, 1] and 1 token or more")
    scores = yield from score_borders(trace, sentences(trace))
    made: list[Noted] = []
    for start, end in blocks_of(trace, count, scores, least):
        text = trace[start:end]
        tokens = count(text)
        found = yield from compress(text, tokens=max(LEAST_MEMENTO, int(share * tokens)), count=count, judged=judged)
        made.append(
            Noted(
                text=text,
                memento=found.memento,
                tokens=tokens,
                memento_tokens=count(found.memento),
                score=round(found.grade.total, 2),
                outcome=found.outcome,
                tries=found.tries,
            )
        )
    return Annotated(
        blocks=tuple(made),
        completion=tagged(made),
        tokens=sum(block.tokens for block in made),
        memento_tokens=sum(block.memento_tokens for block in made),
    )


def tagged(blocks: Iterable[Noted]) -> str:
    """Blocks as one text with tags; a block without a memento stays without tags."""
    return "".join(
        f"{BLOCK_START}{block.text}{BLOCK_END}{SUMMARY_START}{block.memento}{SUMMARY_END}\n" if block.memento else block.text
        for block in blocks
    )
