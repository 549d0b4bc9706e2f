"""Weights that answer in a fixed form: JSON with one key of a few, and one text.

A grammar this small needs no library: what the form settles is appended, the key is the likeliest of those that are allowed,
and the text ends at its quote. Prompts that begin alike share what was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kilburn.errors import SpecError
from kilburn_kv.engine import Engine
from kilburn_kv.generation import generate
from kilburn_kv.weights import Weights, load

ROOM = 16_384
"""Tokens of all prompts that are kept, the one that is read included."""


class EngineWriter:
    """Continues a conversation greedily. Not safe for several threads.

    Args:
        weights: with a tokenizer that has a chat template.
        name: which weights these are.

    Raises:
        SpecError: there is no chat template.
    """

    def __init__(self, weights: Weights, name: str) -> None:
        if not getattr(weights.tokenizer, "chat_template", None):
            raise SpecError(f"{name} has no chat template", advice="give weights of a model that answers")
        self.name = name
        self._weights = weights
        self._engine = Engine(weights, ROOM)
        self._quotes = {token for text, token in weights.tokenizer.get_vocab().items() if '"' in text} | weights.stops

    def write(self, system: str, asked: str, verbs: Sequence[str], length: int) -> tuple[str, str]:
        """The key and the text of the reply.

        Args:
            verbs: allowed keys, whose first tokens differ.
            length: tokens of the text, after which it is cut.

        Raises:
            OutOfBlocks: the prompt is too long.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        prompt = self._weights.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sequence = self._engine.open(self._weights.tokens(prompt + '{"'))
        try:
            firsts = {self._weights.tokens(verb)[0]: verb for verb in verbs}
            logits = self._engine.refresh(sequence)
            verb = firsts[max(firsts, key=lambda token: float(logits[token]))]
            self._engine.prefill(sequence, self._weights.tokens(f'{verb}": "'))
            [made] = generate(self._engine, [sequence], length, stops=self._quotes)
        finally:
            self._engine.free(sequence)
        return verb, self._weights.text(made).partition('"')[0]


def load_writer(path: str | Path, dtype: str = "bfloat16") -> EngineWriter:
    """The writer of weights in a file or folder; see `kilburn_kv.weights.load`.

    Raises:
        Unavailable, SpecError, UnsupportedModel, MissingExtra: as `load`.
    """
    return EngineWriter(load(path, dtype=dtype), f"{Path(path).name}, {dtype}")
