"""The part that a real language model takes in the demo: a few folds, and a few answers in its own words.

Both are bounded in number, because on two cores a small model is slow. What it says is shown beside
the exact answer and never instead of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits, Returned
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.workshop import Workshop
from kilburn.errors import MissingExtra, ModelError
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.model import Model, Request, complete
from kilburn.models import weights
from kilburn.models.local import Local
from kilburn.page import span_of

__all__ = ["Folded", "Phrase", "folds", "phrase", "speaker"]

STEPS = 200
"""Calls of the explorer after which the stage ends, whether or not anything was folded."""

WORDS = 40
SUMMARY = 160
"""Tokens of a phrased answer, and of a fold."""

SYSTEM = "You answer questions about Python source code in one short sentence. Quote the code from the text exactly."


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """One fold that a model was asked for. `outcome` is "accepted", "completed" or "rejected"; `why` the ledger's words."""

    pages: str
    tokens: int
    outcome: str
    why: str
    seconds: float


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in the model's words, and whether the exact answer stands in it."""

    question: str
    exact: str
    said: str
    holds: bool
    seconds: float


def speaker(spec: str, progress: weights.Progress | None = None) -> tuple[Any, str]:
    """The model of a spec and "", or None and why it cannot be had.

    A name of the catalogue, an `hf:` name or a GGUF file is brought here first; anything else is a
    spec such as `chat("gpt-5")`.

    Raises:
        SpecError: the spec names nothing.
    """
    if spec == "none":
        return None, ""
    try:
        known = {entry.name for entry in weights.catalogue()}
        if spec in known or spec.startswith("hf:") or spec.endswith(".gguf"):
            weights.pull(spec, progress=progress)
            return Local(spec), ""
        return resolve("models", spec), ""
    except (ModelError, MissingExtra) as error:
        return None, str(error)


def folds(model: Model, root: Path, db: str, *, window: int, number: int, told: Callable[[int, str], None]) -> list[Folded]:
    """Let the explorer work in a session of its own until the model has been asked for `number` summaries.

    Args:
        told: called with the folds so far and a line on what happens.
    """
    made: list[Folded] = []
    with kilburn.open(
        db, window=window, policy=f"summarize(to={SUMMARY})", tokenizer=model.tokenizer or "auto", model=model
    ) as store:
        process = store.process(f"folds by {model.name}")
        work = Agent(Explorer(errands=False), Workshop(root).tools(), process, limits=Limits(steps=STEPS, reply=0), memory=False)
        events = work.stream(TASK)
        began = time.monotonic()
        for event in events:
            if isinstance(event, Returned):
                asked = process.stats().asks
                told(asked, f"asked {asked} times for a summary")
                if asked >= number:
                    break
        events.close()  # type: ignore[attr-defined]
        seconds = time.monotonic() - began
        ledger = list(process.events())
        asks = sum(entry.act is Act.ASK for entry in ledger)
        written = [entry for entry in ledger if entry.act is Act.FOLD and entry.policy != "kernel"]
        sizes = {page.id: page.tokens for page, _ in process.pages()}
    for entry in written[:number]:
        tokens = sum(sizes[page] for page in entry.pages)
        pages = span_of(min(entry.pages), max(entry.pages))
        made.append(
            Folded(pages=pages, tokens=tokens, outcome=_outcome(entry.why), why=entry.why, seconds=seconds / max(1, asks))
        )
    return made


def _outcome(why: str) -> str:
    if why.startswith("model, completed"):
        return "completed"
    return "accepted" if why.startswith("model") else "rejected"


def phrase(model: Model, question: str, context: str, exact: str) -> Phrase:
    """The model's answer to a question, given the recalled text that holds it."""
    began = time.monotonic()
    asked = f"<text>\n{context[:1500]}\n</text>\n{question}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    try:
        said = complete(model, Request(messages=messages, max_tokens=WORDS, temperature=0.0, timeout=60.0)).text
    except ModelError as error:
        said = f"({error})"
    said = " ".join(said.split())
    return Phrase(
        question=question, exact=exact, said=said, holds=" ".join(exact.split()) in said, seconds=time.monotonic() - began
    )
