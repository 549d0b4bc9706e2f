"""Streams a recorded run through a window, and checks it independently of the kernel.

For overflow, the rendered prompt is counted again, message by message, as the provider would get it. For loss, every message, and
every page's bytes read from the store, are compared with what was appended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import msgspec

from kilburn.budget import Counter
from kilburn.kernel.ledger import Stats
from kilburn.kernel.session import Session
from kilburn.tokens.media import image_cost
from kilburn.wire.form import parse
from kilburn.wire.recording import RecordedRun


class Measured(msgspec.Struct, kw_only=True):
    """Figures of one run. Tokens are counted by the window's counter.

    Args:
        overflow: prompts that were larger than the window. It must be 0, like `lost`, the bytes that were not read back.
        peak: the largest rendered prompt.
    """

    name: str
    messages: int = 0
    pages: int = 0
    tokens_seen: int = 0
    prompts: int = 0
    tokens_shipped: int = 0
    tokens_reprefilled: int = 0
    evictions: int = 0
    folds: int = 0
    faults: int = 0
    asks: int = 0
    refused_moves: int = 0
    policy_failures: int = 0
    fallbacks: int = 0
    peak: int = 0
    overflow: int = 0
    lost: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures."""
        return msgspec.structs.asdict(self)


LEDGER_FIGURES = sorted({*Measured.__struct_fields__} & {*Stats.__struct_fields__} - {"peak", "overflow", "lost"})
"""Figures from the ledger; the three others are measured without it."""


class Total(Measured, kw_only=True):
    """The sum of all runs; `peak` is the largest."""

    runs: int = 0


def stream(
    session: Session, run: RecordedRun, form: str = "chat", progress: Callable[[int], object] = lambda completed: None
) -> Measured:
    """Append a run's messages one by one, and render a prompt before each message of the assistant and at the end.

    Args:
        progress: called with the number of messages so far.

    Raises:
        WireError: a message is invalid, or does not fit its place. The messages before it stay appended.
    """
    counter, capacity = session.counter, session.prompts.budget.capacity
    measured = Measured(name=run.name)
    start = time.perf_counter()
    for message in run.messages:
        if message.get("role") == "assistant" and measured.messages:
            _ship(session, form, counter, capacity, measured)
        session.append(message)
        measured.messages += 1
        progress(measured.messages)
    if measured.messages:
        _ship(session, form, counter, capacity, measured)
    measured.seconds = time.perf_counter() - start
    stats = session.stats()
    for name in LEDGER_FIGURES:
        setattr(measured, name, stats[name])
    return measured


def _ship(session: Session, form: str, counter: Counter, capacity: int, measured: Measured) -> None:
    prompt = session.render(form)
    tokens = recount(prompt, counter) + (recount([{"content": prompt.system}], counter) if prompt.system else 0)
    measured.peak = max(measured.peak, tokens)
    measured.overflow += tokens > capacity


def recount(prompt: Iterable[dict[str, Any]], counter: Counter) -> int:
    """Count the tokens of a prompt from its dicts: every text, name, id and argument, and an envelope for each message."""
    return sum(counter.envelope + sum(_texts(message, counter)) for message in prompt)


def _texts(message: dict[str, Any], counter: Counter) -> list[int]:
    costs = []
    content = message.get("content")
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        url = _image_url(block)
        costs.append(image_cost(counter, url) if url else sum(map(counter.count, _spoken(block))))
    for call in message.get("tool_calls") or ():
        costs.append(sum(map(counter.count, _spoken(call))))
    costs.append(counter.count(str(message.get("tool_call_id") or "")))
    return costs


def _spoken(block: Any) -> list[str]:
    """Return the texts of a block. The id and name of a call are one text, because the provider sends them together, and the
    halves of a text may count one token more than the whole."""
    inner = block.get(block.get("type"), block) if isinstance(block, dict) else {}
    if not (isinstance(inner, dict) and isinstance(block.get("id"), str) and isinstance(inner.get("name"), str)):
        return _strings(block)
    rest = {key: value for key, value in inner.items() if key not in ("id", "name")}
    return [f"{block['id']} {inner['name']}", *_strings(rest)]


def _image_url(block: Any) -> str:
    inner = block.get("image_url") if isinstance(block, dict) else None
    return str(inner.get("url", "")) if isinstance(inner, dict) else ""


def _strings(value: Any) -> list[str]:
    """Return every string of a block that the model would see. Keys and `type` are syntax of the provider."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("type", "cache_control") for text in _strings(item)]
    return []


def lost_bytes(session: Session, run: RecordedRun) -> int:
    """Return the number of bytes of a run that cannot be read back, as messages and as texts of pages.

    Pass a newly opened session, because the one that appended the run has cached texts.
    """
    lost = 0
    for original, stored_message in zip(run.messages, chain(session.contents.messages(), repeat(None)), strict=False):
        encoded = msgspec.json.encode(original)
        if stored_message is None or msgspec.json.encode(stored_message) != encoded:
            lost += len(encoded)
    parts = [part.text for message in run.messages for parsed in parse(message) for part in parsed.parts]
    recalled = session.recall(f"p1-p{session.window.last}").parts if parts else ()
    for text, recalled_text in zip(parts, chain(recalled, repeat(None)), strict=False):
        lost += 0 if recalled_text == text else len(text.encode("utf-8"))
    return lost


def add_up(runs: Iterable[Measured]) -> Total:
    """Add up runs."""
    total = Total(name="total")
    for run in runs:
        for key, value in run.figures().items():
            if key == "peak":
                total.peak = max(total.peak, value)
            elif key != "name":
                setattr(total, key, getattr(total, key) + value)
        total.runs += 1
    return total
