"""How likely a model finds a text after a prompt, token by token.

Keys and values of the beginning that a prompt shares with the prompt before it are not computed again, so ask in an
order in which neighbours share much.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kilburn.errors import SpecError
from kilburn_kv.decoder import twin
from kilburn_kv.tensors import Tensor, torch
from kilburn_kv.weights import Weights, load

NAME = "kilburn_rows"

ROWS = 128
"""Queries whose attention is computed at a time."""


class TokenLoss(NamedTuple):
    """One token of a text: its characters (half-open), and its negative log-likelihood in nats."""

    start: int
    stop: int
    nats: float


class Likelihood:
    """Reads texts with one model. Not safe for several threads.

    Args:
        weights: with a tokenizer; see `kilburn_kv.weights.load`. What bfloat16 rounds is small against what a prompt changes.

    Attributes:
        name: tells these weights from others: their digest and dtype.
        context: tokens that the model was trained for.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._tokenizer = weights, weights.words
        _register()
        self._model = twin(weights.model, NAME)
        key = weights.key()
        self.name = f"{key.model} {key.dtype}"
        self.context: int = weights.model.config.get_text_config(decoder=True).max_position_embeddings
        self._read: list[int] = []
        self._cache: Any = None

    def count(self, text: str) -> int:
        """Tokens of a text; a marker of a template counts as the plain text that it is."""
        return len(self._encode(text)[0])

    def losses(self, prompt: str, text: str) -> list[TokenLoss]:
        """The tokens of the text, each given the prompt and the tokens before it. Prompt and text are tokenised apart, so
        that the text has the same tokens after every prompt.

        Raises:
            SpecError: the prompt is empty, or both together do not fit the model.
        """
        before, _ = self._encode(prompt)
        tokens, places = self._encode(text)
        whole = before + tokens
        if not before or len(whole) > self.context:
            raise SpecError(f"{len(before)} + {len(tokens)} tokens", advice=f"give a prompt, and {self.context} tokens at most")
        if not tokens:
            return []
        with torch.inference_mode():
            past, shared = self._past(before, whole)
            out = self._model(
                input_ids=torch.tensor([whole[shared:-1]], device=self._weights.device),
                cache=past,
                use_cache=True,
                logits_to_keep=len(tokens),
            )
            logits = out.logits[0].float().log_softmax(-1)
            found = -logits[torch.arange(len(tokens)), torch.tensor(tokens, device=logits.device)]
        self._read, self._cache = whole[:-1], past
        return [TokenLoss(*place, nats) for place, nats in zip(places, found.tolist(), strict=True)]

    def _past(self, before: list[int], whole: list[int]) -> tuple[Any, int]:
        """A cache of the beginning that was read before, and its length; the token before the text is always read anew."""
        from transformers import DynamicCache

        pairs = zip(self._read, before[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        cache: Any = self._cache
        self._read, self._cache = [], None
        if not shared:
            return DynamicCache(config=self._weights.model.config), 0
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., :shared, :], layer.values[..., :shared, :]
        return cache, shared

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        made = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return made["input_ids"], made["offset_mapping"]


def _register() -> None:
    """Make the attention known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: object, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None = None, **others: object
) -> tuple[Tensor, None]:
    """Plain causal attention, some rows at a time. Where a prefix is cached, transformers' own computes the masked parts
    too, which on a CPU takes up to twice as long. `load` has refused weights that need anything else."""
    _, heads, count, dim = query.shape
    shared, length = key.shape[1:3]
    scale = dim**-0.5 if scaling is None else scaling
    keys, made = key[0].transpose(1, 2), torch.empty_like(query)
    for start in range(0, count, ROWS):
        stop = min(count, start + ROWS)
        rows, seen = stop - start, length - count + stop
        # The query heads of a group as rows of one product.
        scores = torch.matmul((query[0, :, start:stop] * scale).reshape(shared, -1, dim), keys[:, :, :seen]).view(
            heads, rows, seen
        )
        later = torch.ones((rows, rows), dtype=torch.bool, device=query.device).triu(1)
        scores[:, :, seen - rows :].masked_fill_(later, -torch.inf)
        grouped = torch.softmax(scores, dim=2).view(shared, -1, seen)
        made[0, :, start:stop] = torch.matmul(grouped, value[0, :, :seen]).view(heads, rows, dim)
    return made.transpose(1, 2), None


def load_likelihood(path: str | Path, dtype: str = "bfloat16") -> Likelihood:
    """A likelihood by the weights of a file or a folder.

    Raises:
        Unavailable, SpecError, UnsupportedModel, MissingExtra: as `kilburn_kv.weights.load`.
    """
    return Likelihood(load(path, dtype=dtype))
