"""The losses of the recipes: cross entropy on replies, and REINFORCE with advantages within a group.

Both look at replies only: what a prompt holds is read, never learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kilburn.errors import MissingExtra, SpecError
from kilburn_lab.training.transformer import Transformer
from kilburn_lab.training.words import PAD

try:
    import torch
    from torch import Tensor
    from torch.nn import functional
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error

Row = tuple[Sequence[int], Sequence[int]]
"""A prompt and the reply to it, as tokens. Each is a call of the model, so it is what the model was shown."""


def log_probabilities(model: Transformer, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The log probability of each token of the replies, [tokens], and the row that each belongs to."""
    return _log_probabilities(model, [[row] for row in rows])


def _log_probabilities(model: Transformer, conversations: Sequence[Sequence[Row]]) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) + len(reply) for rows in conversations for prompt, reply in rows)
    ids = torch.full((len(conversations), longest), PAD)
    told = torch.zeros(len(conversations), longest, dtype=torch.bool)
    for number, rows in enumerate(conversations):
        for prompt, reply in rows:
            end = len(prompt) + len(reply)
            ids[number, :end] = torch.tensor([*prompt, *reply])
            told[number, len(prompt) : end] = True
    hidden = model.hidden(ids[:, :-1])[told[:, 1:]]
    found = -functional.cross_entropy(model.logits(hidden), ids[told], reduction="none")
    return found, told.nonzero()[:, 0]


def sft_loss(model: Transformer, rows: Sequence[Row]) -> Tensor:
    """Supervised: the mean cross entropy of the replies' tokens."""
    return -log_probabilities(model, rows)[0].mean()


def conversation_loss(model: Transformer, conversations: Sequence[Sequence[Row]]) -> Tensor:
    """The same for conversations in which nothing ever left: each is read once, and teaches all its replies.

    Raises:
        SpecError: a prompt that does not begin with the prompt and the reply before it.
    """
    for rows in conversations:
        for (prompt, reply), (after, _) in pairwise(rows):
            before = [*prompt, *reply]
            if [*after[: len(before)]] != before:
                raise SpecError("a conversation in which something left", advice="give its calls as rows of their own")
    return -_log_probabilities(model, conversations)[0].mean()


def advantages(rewards: Sequence[float], group: int) -> list[float]:
    """Each reward less the mean of its group, in standard deviations of the group (GRPO, arXiv 2402.03300); rewards of one
    group stand together. A group in which all are equal teaches nothing."""
    values = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    spread = values.std(1, keepdim=True, correction=0)
    found: list[float] = ((values - values.mean(1, keepdim=True)) / (spread + 1e-6)).flatten().tolist()
    return found


def policy_loss(model: Transformer, rows: Sequence[Row], weights: Sequence[float]) -> Tensor:
    """REINFORCE on what the model itself has just written: the mean over all tokens of a reply's weight times its log
    probability, negated. There is one step for each roll-out, so nothing is to be clipped, and no reference to stay near."""
    known, owners = log_probabilities(model, rows)
    return -(torch.tensor(weights, dtype=known.dtype)[owners] * known).mean()
