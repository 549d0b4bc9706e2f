"""An engine as a model: a reply that others interrupt is the reply that nobody interrupts, token for token and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import Overlong, Refused
from kilburn.model import Delta, Reply, Request, complete
from kilburn.models.scheduler import Scheduler
from kilburn.testing import check_model
from kilburn_kv.engine import Engine
from kilburn_kv.eviction import LruOrder
from kilburn_kv.model import EngineModel
from kilburn_kv.spill import Spill
from kilburn_kv.weights import Weights

SLOTS = 64
WORDS = ("harbour", "light", "tide", "pilot", "wind")


def ask(number: int, tokens: int = 32, **more: float) -> Request:
    text = f"{number}: " + " ".join(WORDS[(number + place) % 5] for place in range(20))
    return Request(messages=[{"role": "user", "content": text}], max_tokens=tokens, **more)  # type: ignore[arg-type]


def alone(weights: Weights, request: Request) -> Reply:
    return complete(EngineModel(Engine(weights, 2048, share=False)), request)


def interrupted(model: EngineModel, requests: list[Request]) -> list[Reply]:
    """The replies, each interrupted by the others after each of its pieces."""
    with ExitStack() as stack:
        streams = [model.stream(request) for request in requests]
        for stream in streams:
            stack.callback(stream.close)  # type: ignore[attr-defined]
        rounds = [*zip_longest(*streams)]
    return [next(piece for piece in column if isinstance(piece, Reply)) for column in zip(*rounds, strict=True)]


@pytest.mark.parametrize("spilled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_that_interrupt_each_other_are_the_same_tokens(
    speaker: Weights, tmp_path: Path, spilled: bool, temperature: float
) -> None:
    requests = [ask(number, 32 - 5 * number, temperature=temperature) for number in range(5)]
    # A prompt has 31 tokens, and there are 64 slots: one reply fits, so each piece drives another out.
    engine = Engine(speaker, SLOTS, share=False)
    model = EngineModel(engine, spill=Spill(tmp_path) if spilled else None)
    replies = interrupted(model, requests)
    assert replies == [alone(speaker, request) for request in requests]
    assert model.departures > 50
    # Who left behind its last token has not come back.
    assert model.departures - 5 <= model.restored <= model.departures if spilled else model.restored == 0
    assert engine.used == 0
    assert [*tmp_path.rglob("*")] == [path for path in tmp_path.rglob("*") if not path.name.endswith(".kv")]
    assert not engine.sequences


def test_the_logits_are_the_same_bits(speaker: Weights, tmp_path: Path) -> None:
    def logits(model: EngineModel, stream: Iterator[Delta | Reply]) -> Iterator[torch.Tensor]:
        for piece in stream:
            if isinstance(piece, Delta):
                (own,) = [
                    sequence
                    for sequence in model.engine.sequences.values()
                    if "0: " in speaker.text(sequence.table.tokens.tolist())
                ]
                assert own.logits is not None
                yield own.logits.clone()

    calm = EngineModel(Engine(speaker, SLOTS, share=False))
    busy = EngineModel(Engine(speaker, SLOTS, share=False), spill=Spill(tmp_path))
    other = busy.stream(ask(1))
    here, there = logits(calm, calm.stream(ask(0))), logits(busy, busy.stream(ask(0)))
    compared = 0
    for left in here:
        assert torch.equal(left, next(there))
        next(other)
        compared += 1
    assert compared > 20
    assert busy.restored > 30


def test_a_damaged_file_is_computed_again(speaker: Weights, tmp_path: Path) -> None:
    model = EngineModel(Engine(speaker, SLOTS, share=False), spill=Spill(tmp_path))
    first, second = model.stream(ask(0)), model.stream(ask(1))
    pieces = [next(first) for _ in range(5)]
    next(second)
    assert model.departures == 1
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    pieces += first
    assert model.restored == 0
    assert pieces[-1] == alone(speaker, ask(0))


def test_a_reply_that_is_not_read_to_its_end_leaves_nothing(speaker: Weights, tmp_path: Path) -> None:
    model = EngineModel(Engine(speaker, SLOTS, share=False), spill=Spill(tmp_path), order=LruOrder())
    first, second = model.stream(ask(0)), model.stream(ask(1))
    next(first), next(second)
    assert model.departures == 1
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]
    assert not model.engine.sequences
    assert model.engine.used == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert complete(model, ask(2)) == alone(speaker, ask(2))


def test_it_is_a_model(speaker: Weights) -> None:
    check_model(lambda: EngineModel(Engine(speaker, 512)))


def test_what_it_cannot_do_is_refused(speaker: Weights) -> None:
    model = EngineModel(Engine(speaker, 128))
    with pytest.raises(Overlong):
        complete(model, ask(0, 500))
    with pytest.raises(Refused, match="plain text"):
        complete(model, Request(messages=[{"role": "user", "content": "x"}], schema={"type": "object"}))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("spec", ["round_robin(slice=1)", "round_robin(slice=7)", "fair_share(slice=5)"])
def test_agents_on_smollm_say_what_they_say_alone(smollm: Weights, tmp_path: Path, spec: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    questions = ["What is a tide?", "Name three colours.", "Where do pilots work?"]

    def said(model: EngineModel | Scheduler, number: int) -> str:
        with kilburn.open(":memory:", window=400, tokenizer="chars/4") as store:
            speaks = model.model(f"agent{number}", tenant=f"t{number}") if isinstance(model, Scheduler) else model
            agent = Agent(speaks, [], store.session("s"), memory=False, limits=Limits(reply=24))
            return agent.run(questions[number]).text

    expected = [said(EngineModel(Engine(smollm, 128, share=False)), number) for number in range(3)]
    busy = EngineModel(Engine(smollm, 48, share=False), spill=Spill(tmp_path))
    scheduler = Scheduler(busy, spec)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda number: said(scheduler, number), range(3))] == expected
    assert busy.restored > 3
