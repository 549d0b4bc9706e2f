"""The part of a language model in the demo: a few folds, and a few answers from the hits of one search. There are few, because
a small model is slow on two cores. Its answer is printed next to the exact one."""

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
"""Calls of the explorer after which this part ends, even if nothing was folded."""

WORDS, SUMMARY, HITS = 40, 160, 800
"""Tokens of an answer, of a fold, and of the hits for a question."""

SYSTEM = "You answer questions about Python source code in one short sentence. Quote the code from the text exactly."


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """A fold that the model was asked for. `outcome` is "accepted", "completed" or "rejected"; `why` is the ledger's reason."""

    pages: str
    tokens: int
    outcome: str
    why: str
    seconds: float


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    """A model's answer. `holds` tells whether it contains the exact answer; `found`, whether the model's prompt does."""

    question: str
    exact: str
    said: str
    found: bool
    holds: bool
    seconds: float


def folds(model: Model, root: Path, db: str, *, window: int, number: int, report: Callable[[int, str], None]) -> list[Folded]:
    """Let the explorer work in another session until the model has been asked for `number` summaries.

    Args:
        report: called with the number of folds and a description of the current step.
    """
    policy = f"summarize(to={SUMMARY})"
    with kilburn.open(db, window=window, policy=policy, tokenizer=counter_for(model.tokenizer or "auto"), model=model) as store:
        session = store.session(f"folds by {model.name}")
        agent = Agent(Explorer(), Library(root).tools(), session, limits=Limits(steps=STEPS, reply=0), memory=False)
        began = time.monotonic()
        for event in agent.stream(TASK):
            if isinstance(event, Returned):
                count = session.stats().asks
                report(count, "asked for a summary")
                if count >= number:
                    break
        receipts = [receipt for receipt in session.ledger.receipts() if receipt.asked][:number]
        return [
            Folded(
                pages=" ".join(receipt.left),
                tokens=sum(page.tokens for address in receipt.left for page in session.recall(address).pages),
                outcome=_outcome(receipt.why),
                why=receipt.why,
                seconds=(time.monotonic() - began) / len(receipts),
            )
            for receipt in receipts
        ]


def _outcome(why: str) -> str:
    """Return what became of the model's summary, from the reasons of a receipt; see `kilburn.policies.summarize`."""
    reason = next((reason for reason in why.split("; ") if reason.startswith("model")), "")
    return "rejected" if not reason else "completed" if "," in reason else "accepted"


def phrase(model: Model, session: Session, question: str, exact: str) -> Phrase:
    """Return the model's answer to a question, given the hits of one search for the question."""
    began = time.monotonic()
    text = "\n".join(hit.text for hit in session.search(question, HITS))
    prompt = f"<text>\n{text}\n</text>\n{question}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    try:
        reply = complete(model, Request(messages=messages, max_tokens=WORDS, temperature=0.0, timeout=60.0)).text
    except ModelError as error:
        reply = f"({error})"
    reply = " ".join(reply.split())
    holds = " ".join(exact.split()) in reply
    return Phrase(question=question, exact=exact, said=reply, found=exact in text, holds=holds, seconds=time.monotonic() - began)
