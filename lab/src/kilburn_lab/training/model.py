"""A trained checkpoint as a model of the product: it reads what the kernel rendered, and its replies go into the ledger.

kilburn.open(..., model="kilburn_lab.training.model:Toy('out/rl-0.safetensors')")
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import msgspec

from kilburn.errors import MissingExtra, Overlong, Refused
from kilburn.model import Delta, Finish, Reply, Request, Tokens
from kilburn_lab.training.adapter import load_adapter, merged
from kilburn_lab.training.transformer import generate, load
from kilburn_lab.training.words import END

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error

__all__ = ["Toy"]


class Toy:
    """The weights of a recipe, as a model.

    Args:
        path: the `.safetensors` that a recipe exported; its `.json` stands beside it.
        temperature: where a request names none; 0 for the likeliest token.
        seed: of what is drawn, where a request names none; the number of the reply is added to it.
        adapter: a `.safetensors` that is merged into the weights for each reply, and then unmerged.

    Raises:
        SpecError: no checkpoint there, or a damaged one; an adapter of other weights.
    """

    form = "chat"

    def __init__(self, path: str, temperature: float = 0.0, seed: int = 0, adapter: str = "") -> None:
        self._model, self.words, self.described = load(Path(path))
        self._added = load_adapter(Path(adapter), self._model) if adapter else {}
        self._alone = threading.Lock()
        self.name = f"toy:{self.described.recipe}-{self.described.arm}-{self.described.seed}" + "+adapter" * bool(adapter)
        self.context: int | None = self.described.shape.context
        self.tokenizer = self.words
        self._temperature, self._seed, self._replies = temperature, seed, 0

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights as they are now, by name."""
        return self._model.state_dict()

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply; a tool's name in it, with as many words behind it as the tool has arguments, is a call.

        Raises:
            Refused: a request without messages. Overlong: the prompt and the reply do not fit into the context.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        prompt = self.words.prompt(request.messages)
        most = min(request.max_tokens, self.described.reply)
        if len(prompt) + most > self.described.shape.context:
            raise Overlong(
                f"{len(prompt)} tokens and {most} to write", advice=f"a window of {self.described.shape.context - most} fits"
            )
        warm = self._temperature if request.temperature is None else request.temperature
        chance = torch.Generator().manual_seed(self._seed + self._replies if request.seed is None else request.seed)
        self._replies += 1
        with self._alone, merged(self._model, self._added) if self._added else nullcontext():
            [tokens] = generate(self._model, [prompt], most, temperature=warm, chance=chance)
        call = hashlib.sha256(f"{self.name}/{self._seed}/{self._replies}/{prompt}".encode()).hexdigest()[:12]
        reply = Reply(
            message=self.words.message(self.words.decode(tokens), f"call_{call}"),
            finish=Finish.STOP if tokens[-1] == END else Finish.LENGTH,
            usage=Tokens(prompt=len(prompt), reply=len(tokens)),
        )
        if reply.text:
            yield Delta(reply.text)
        yield msgspec.structs.replace(reply, finish=Finish.CALLS) if reply.calls else reply
