"""What a real language model does in the demo: a few folds, and a few answers from what one search brings.

Both are few, because a small model is slow on two cores. Its answer is shown beside the exact one, never instead of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits, Returned
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.library import Library
from kilburn.errors import ModelError
from kilburn.kernel.session import Session
from kilburn.model import Model, Request, complete
from kilburn.tokens.choice import counter_for

STEPS = 200
"""Calls of the explorer after which the stage ends, whether or not anything was folded."""

WORDS, SUMMARY, HITS = 40, 160, 800
"""Tokens of a phrased answer, of a fold, and of what is found for a question."""

SYSTEM = "You answer questions about Python source code in one short sentence. Quote the code from the text exactly."


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """One fold that a model was asked for. `outcome` is "accepted", "completed" or "rejected"; `why` the ledger's words."""

    pages: str
    tokens: int
    outcome: str
    why: str
    seconds: float


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in the model's words, and whether the exact answer stands in it; `found`: whether it stands in what the
    model was given."""

    question: str
    exact: str
    said: str
    found: bool
    holds: bool
    seconds: float


def folds(model: Model, root: Path, db: str, *, window: int, number: int, told: Callable[[int, str], None]) -> list[Folded]:
    """Let the explorer work in a session of its own until the model has been asked for `number` summaries.

    Args:
        told: called with the folds so far and a line on what happens.
    """
    policy = f"summarize(to={SUMMARY})"
    with kilburn.open(db, window=window, policy=policy, tokenizer=counter_for(model.tokenizer or "auto"), model=model) as store:
        session = store.session(f"folds by {model.name}")
        agent = Agent(Explorer(), Library(root).tools(), session, limits=Limits(steps=STEPS, reply=0), memory=False)
        began = time.monotonic()
        for event in agent.stream(TASK):
            if isinstance(event, Returned):
                asked = session.stats().asks
                told(asked, "asked for a summary")
                if asked >= number:
                    break
        receipts = [receipt for receipt in session.ledger.receipts() if receipt.asked][:number]
        return [
            Folded(
                pages=" ".join(receipt.left),
                tokens=sum(page.tokens for address in receipt.left for page in session.recall(address).pages),
                outcome="rejected" if not receipt.why.startswith("model") else "completed" if "," in receipt.why else "accepted",
                why=receipt.why,
                seconds=(time.monotonic() - began) / len(receipts),
            )
            for receipt in receipts
        ]


def phrase(model: Model, session: Session, question: str, exact: str) -> Phrase:
    """The model's answer to a question, given what one search for the question brings."""
    began = time.monotonic()
    text = "\n".join(hit.text for hit in session.search(question, HITS))
    asked = f"<text>\n{text}\n</text>\n{question}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    try:
        said = complete(model, Request(messages=messages, max_tokens=WORDS, temperature=0.0, timeout=60.0)).text
    except ModelError as error:
        said = f"({error})"
    said = " ".join(said.split())
    holds = " ".join(exact.split()) in said
    return Phrase(question=question, exact=exact, said=said, found=exact in text, holds=holds, seconds=time.monotonic() - began)
