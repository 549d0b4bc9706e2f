"""An engine as a model: replies token by token, each of which may be left at any token and go on later.

While a reply is left, its keys and values may leave the cache in favour of others. They come back bit for bit from a
spill, or are computed again from their tokens. Either way the reply goes on with the token that would have come next.
Which reply leaves is decided by an order of eviction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kilburn.errors import OutOfBlocks, Overlong, Refused, SpillFailed, ToolsRefused, Unavailable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request, Tokens
from kilburn.native import inside
from kilburn.wire.form import parse
from kilburn_kv.engine import Engine
from kilburn_kv.eviction import EvictionOrder, LruK, PromptUse
from kilburn_kv.generation import Sampling
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.spill import Spill, Spilled
from kilburn_kv.template import Template
from kilburn_kv.tensors import torch

__all__ = ["EngineModel"]

HISTORY = 1000
"""Replies whose uses the order knows after they left."""


class EngineCounter:
    """Counts tokens as the engine's tokenizer does."""

    exact = True

    def __init__(self, template: Template, name: str, engine: Engine) -> None:
        self.name = name
        self._tokens = engine.weights.tokens
        self.envelope = len(template.line("user", ""))
        self.overhead = len(template.opening())

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokens(text))


@dataclass
class _Draft:
    """A reply that is being made; `sequence` is None while it is out of the cache."""

    number: int
    prompt: list[int]
    made: list[int]
    sampling: Sampling
    chance: torch.Generator
    sequence: CachedSequence | None = None
    spilled: Spilled | None = None


class EngineModel:
    """A model over an `Engine`: plain text, no tools.

    Safe to use from several threads, if nobody else uses the engine: one token is made at a time.

    Args:
        name: in errors and counters.
        spill: where keys and values go if others need their blocks; None to compute them again.
        order: which reply leaves first; None for LRU-2.

    Attributes:
        interruptible: True: a stream may be left between two pieces, and others may run.
        departures: how often a reply had to leave the cache before it was complete.
        restored: how often one came back bit for bit.

    Raises:
        SpecError: the engine's weights have no tokenizer.
    """

    form = "chat"
    interruptible = True
    takes_tools = False

    def __init__(
        self, engine: Engine, *, name: str = "engine", spill: Spill | None = None, order: EvictionOrder | None = None
    ) -> None:
        self.engine, self.name, self.spill = engine, name, spill
        self.order = LruK(2, HISTORY) if order is None else order
        self.departures = self.restored = 0
        self._template = Template(engine.weights)
        self.tokenizer: Any = EngineCounter(self._template, f"kv:{name}", engine)
        most = getattr(engine.weights.model.config, "max_position_embeddings", None)
        held = engine.pool.capacity * engine.pool.size
        self.context: int | None = held if most is None else min(held, most)
        self._stops = engine.weights.stops | self._template.stops
        self._lock = threading.Lock()
        self._drafts: dict[int, _Draft] = {}
        self._numbers = 0
        self._newest = -1

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply, a token a piece (several where they make one character).

        Raises:
            Refused: no messages, or a schema, which it cannot follow. ToolsRefused: tools.
            Overlong: it does not fit the engine.
            Unavailable: the time was up, or others hold the engine's blocks.
        """
        prompt = self._prompt(request)
        began = time.monotonic()
        draft = self._open(prompt, request)
        said, finish = "", Finish.LENGTH
        try:
            for _ in range(request.max_tokens):
                if request.timeout is not None and time.monotonic() - began >= request.timeout:
                    raise Unavailable(f"{self.name} was not done after {request.timeout:g} seconds", advice="give it more time")
                with self._lock, inside():
                    token = self._next(draft)
                if token in self._stops:
                    finish = Finish.STOP
                    break
                text = self.engine.weights.text(draft.made)
                if not text.endswith("\ufffd"):  # a character may take several tokens
                    piece, said = text[len(said) :], text
                    if piece:
                        yield Delta(piece)
        finally:
            with self._lock:
                self._close(draft, finish)
        whole = self.engine.weights.text(draft.made[:-1] if finish is Finish.STOP else draft.made)
        if whole != said:
            yield Delta(whole[len(said) :])
        usage = Tokens(prompt=len(prompt), reply=len(draft.made))
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=whole),)), finish=finish, usage=usage)

    def _prompt(self, request: Request) -> list[int]:
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        if request.tools:
            raise ToolsRefused(f"{self.name} writes plain text only", advice="ask without tools")
        if request.schema is not None:
            raise Refused(f"{self.name} writes plain text only", advice="ask without a schema")
        lines = [(str(message.role), part.text) for message in parse(list(request.messages)) for part in message.parts]
        tokens = [token for role, text in lines for token in self._template.line(role, text)] + [*self._template.opening()]
        if self.context is not None and len(tokens) + request.max_tokens > self.context:
            raise Overlong(
                f"a prompt of {len(tokens)} tokens and a reply of {request.max_tokens} do not fit {self.context}",
                advice="send a shorter prompt, lower max_tokens, or open a larger engine",
            )
        return tokens

    def _open(self, prompt: list[int], request: Request) -> _Draft:
        sampling = Sampling(request.temperature or 0.0, seed=request.seed or 0)
        chance = sampling.generator(self.engine.weights.device)
        with self._lock:
            self._numbers += 1
            draft = self._drafts[self._numbers] = _Draft(self._numbers, prompt, [], sampling, chance)
        return draft

    def _next(self, draft: _Draft) -> int:
        """Make one token, in the cache."""
        if draft.number != self._newest:  # its tokens in a row are one use
            self.order.used([draft.number], PromptUse(time.monotonic()))
            self._newest = draft.number
        try:
            sequence = self._bring_in(draft)
            logits = self.engine.refresh(sequence)
            token = int(draft.sampling.choose(logits[None], draft.chance)[0])
            self._make_room(draft, sequence.table.need(1))
            self.engine.step([(sequence, [token])])
        except OutOfBlocks as error:
            raise Unavailable(f"{self.name}: {error.what}", advice="others hold the engine's blocks; free them") from error
        draft.made.append(token)
        return token

    def _bring_in(self, draft: _Draft) -> CachedSequence:
        """Its sequence, restored or computed again where it is not cached."""
        if draft.sequence is not None and draft.sequence.is_live:
            return draft.sequence
        self._drop_sequence(draft)
        tokens = draft.prompt + draft.made
        self._make_room(draft, -(-len(tokens) // self.engine.pool.size) + 1)
        if draft.spilled is not None and self.spill is not None:
            found = self.spill.restore(self.engine, draft.spilled)
            self._drop_spilled(draft)
            if isinstance(found, CachedSequence):
                draft.sequence = found
                self.restored += 1
                return found
        draft.sequence = self.engine.open(tokens)
        return draft.sequence

    def _make_room(self, draft: _Draft, blocks: int) -> None:
        """Let others leave the cache until so many blocks are free, or none is left to leave."""
        while self.engine.pool.free < blocks:
            gone = self.order.evict(1, {draft.number})
            if not gone:
                return
            self._put_out(self._drafts[gone[0]])

    def _put_out(self, draft: _Draft) -> None:
        """Take a draft out of the cache; where the disk does not take it, it will be computed again."""
        if self.spill is not None and draft.sequence is not None and draft.sequence.is_live:
            try:
                draft.spilled = self.spill.save(self.engine, draft.sequence, pin=True)
            except SpillFailed:
                draft.spilled = None
        self._drop_sequence(draft)
        self.departures += 1

    def _close(self, draft: _Draft, why: str) -> None:
        del self._drafts[draft.number]
        self.order.forget([draft.number])
        self._drop_sequence(draft, why)
        self._drop_spilled(draft)

    def _drop_sequence(self, draft: _Draft, why: str = "preempted") -> None:
        if draft.sequence is not None:
            self.engine.free(draft.sequence, why)
            draft.sequence = None

    def _drop_spilled(self, draft: _Draft) -> None:
        if draft.spilled is not None and self.spill is not None and not self.spill.shelf.unpin(draft.spilled.address):
            self.spill.shelf.drop(draft.spilled.address)
        draft.spilled = None
