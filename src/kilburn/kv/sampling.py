"""How the next token is chosen from logits: greedy, or by chance with a seed.

Pure, except for the random generator that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn.errors import MissingExtra

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "kv") from error

__all__ = ["GREEDY", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """Which token comes next.

    Args:
        temperature: 0 for the most likely token, always; else the logits are divided by it.
        top_k: only so many most likely tokens; 0 for all.
        top_p: only the most likely tokens that together have this probability.
        seed: of the generator that `generator` makes.

    Raises:
        ValueError: a number that cannot be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"{self} is no way to choose: temperature >= 0, top_k >= 0, 0 < top_p <= 1")

    def generator(self, device: torch.device) -> torch.Generator:
        """A new random generator for the seed."""
        return torch.Generator(device=device).manual_seed(self.seed)

    def choose(self, logits: Tensor, chance: torch.Generator) -> Tensor:
        """The next token of each row: logits of shape [n, vocabulary], tokens of shape [n]."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        if self.top_p < 1:
            ordered, places = scaled.sort(dim=-1, descending=True, stable=True)
            odds = ordered.softmax(dim=-1)
            # A token stays while those before it have not reached the mass, so the first always stays.
            ordered = ordered.masked_fill(odds.cumsum(dim=-1) - odds >= self.top_p, float("-inf"))
            scaled = torch.empty_like(scaled).scatter_(-1, places, ordered)
        return torch.multinomial(scaled.softmax(dim=-1), 1, generator=chance)[:, 0]


GREEDY = Sampling()
"""The most likely token, always."""
