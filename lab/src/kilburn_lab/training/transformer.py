"""A small transformer in plain PyTorch: pre-norm, rotary positions, tied embeddings; and decoding in batches.

The weights are the only state. They are read and written as safetensors, with what they mean as JSON beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn_lab.training.words import END, PAD, WordTokenizer

try:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load as read_tensors
    from safetensors.torch import save as tensors_of
    from torch import Tensor, nn
    from torch.nn import functional
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error


EPSILON = 1e-6


class TransformerShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a transformer.

    Args:
        context: tokens of prompt and reply together, at most.
        smears: whether each head's key is mixed with the one before it, by a learned share. A head then finds what stood
            behind a word ("smeared keys", transformer-circuits.pub, 2021), which such small weights learn in a tenth of the
            steps. Without, the weights are a LLaMA's.

    Raises:
        SpecError: a size below 1, or a width that the heads do not divide into even parts.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 256
    smears: bool = True

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1 or self.width % (2 * self.heads):
            raise SpecError(f"a transformer of the shape {self}", advice="give 1 or more, and a width of 2 a head or more")


class _Block(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width, inner = shape.width, shape.width * 5 // 2
        self.heads, self.smears = shape.heads, shape.smears
        self.before, self.between = nn.RMSNorm(width, eps=EPSILON), nn.RMSNorm(width, eps=EPSILON)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        if shape.smears:
            self.smear = nn.Parameter(torch.zeros(shape.heads, 1, 1))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], later: Tensor, mask: Tensor | None, cache: _Cache | None) -> Tensor:
        rows, size, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, size, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.smears:
            first = torch.zeros_like(k[:, :, :1]) if cache is None or cache.last is None else cache.last
            if cache is not None:
                cache.last = k[:, :, -1:]
            share = self.smear.sigmoid()
            k = share * k + (1 - share) * torch.cat((first, k[:, :, :-1]), 2) * later
        q, k = _rotated(q, *turn), _rotated(k, *turn)
        if cache is not None:
            k, v = cache.take(k, v)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, size, width))
        gate, up = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class _Cache:
    """Keys and values of one layer, in room for so many tokens; and the last key before it was smeared."""

    def __init__(self, rows: int, shape: TransformerShape, room: int) -> None:
        self.keys, self.values = (torch.zeros(rows, shape.heads, room, shape.width // shape.heads) for _ in range(2))
        self.last: Tensor | None = None
        self.at = 0

    def take(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.at + k.shape[2]
        self.keys[:, :, self.at : end], self.values[:, :, self.at : end] = k, v
        self.at = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Transformer(nn.Module):
    """Weights that tell the next token.

    Args:
        size: of the vocabulary.
        seed: of the weights that it begins with.
    """

    def __init__(self, size: int, shape: TransformerShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(size, shape.width)
            self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
            self.last = nn.RMSNorm(shape.width, eps=EPSILON)
            nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        half = shape.width // shape.heads // 2
        angles = torch.arange(shape.context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: Sequence[_Cache] = ()
    ) -> Tensor:
        """What stands before the last projection; causal where no mask is given."""
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        turn = self.cos[positions][:, None], self.sin[positions][:, None]  # type: ignore[index]
        later = (positions > 0)[:, None, :, None]
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, turn, later, mask, cache[number] if cache else None)
        return self.last(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all words."""
        return hidden @ self.embedding.weight.T

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(part.numel() for part in self.parameters())


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    limit: int,
    *,
    temperature: float = 0.0,
    chance: torch.Generator | None = None,
) -> list[list[int]]:
    """The replies to some prompts, each up to its `<end>`, which belongs to it, or cut after `limit` tokens.

    Raises:
        SpecError: a prompt that leaves no room for `limit` tokens.
    """
    rows, longest = len(prompts), max(map(len, prompts))
    shape = model.shape
    if longest + limit > shape.context:
        raise SpecError(f"{longest} tokens and {limit} to write", advice=f"the weights take {shape.context} together")
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    first = torch.tensor([longest - len(prompt) for prompt in prompts])
    room = longest + limit
    there = torch.arange(room)[None] >= first[:, None]
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    # What pads a short prompt sees itself, so that no row of the mask is empty.
    mask = (there[:, None, None, :longest] & causal) | torch.eye(longest, dtype=torch.bool)
    cache = [_Cache(rows, shape, room) for _ in range(shape.layers)]
    positions = (torch.arange(longest)[None] - first[:, None]).clamp(min=0)
    hidden = model.hidden(ids, positions, mask, cache)[:, -1]
    replies: list[list[int]] = [[] for _ in prompts]
    going = list(range(rows))
    for step in range(limit):
        scores = model.logits(hidden)
        if temperature:
            token = torch.multinomial((scores / temperature).softmax(-1), 1, generator=chance)[:, 0]
        else:
            token = scores.argmax(-1)
        said = token.tolist()
        for row in going:
            replies[row].append(said[row])
        going = [row for row in going if said[row] != END]
        if not going or step + 1 == limit:
            break
        at = longest + step
        hidden = model.hidden(token[:, None], (at - first)[:, None], there[:, None, None, : at + 1], cache)[:, -1]
    return replies


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the weights: what they were trained for, and how they read and write.

    Args:
        tools, brief: see `WordTokenizer`. reply: tokens of a reply, at most.
    """

    recipe: str
    arm: str
    seed: int
    world: str
    words: tuple[str, ...]
    tools: dict[str, tuple[str, ...]]
    shape: TransformerShape
    reply: int
    brief: bool = False


def save(path: Path, model: Transformer, words: WordTokenizer, *, recipe: str, arm: str, seed: int, reply: int) -> None:
    """Write weights as safetensors, and what they mean as JSON beside them."""
    described = Checkpoint(
        recipe=recipe,
        arm=arm,
        seed=seed,
        world=words.world,
        words=words.words,
        tools=words.tools,
        shape=model.shape,
        reply=reply,
        brief=words.brief,
    )
    with write_file(path, force=True) as file:
        file.write(tensors_of({name: part.contiguous() for name, part in model.state_dict().items()}))
    with write_file(path.with_suffix(".json"), force=True) as file:
        file.write(msgspec.json.format(msgspec.json.encode(described), indent=1))


def load(path: Path) -> tuple[Transformer, WordTokenizer, Checkpoint]:
    """The weights of a checkpoint, its words, and what it says of itself.

    Raises:
        SpecError: there is none, or it is damaged.
    """
    try:
        described = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Checkpoint)
        words = WordTokenizer(described.world, described.words, described.tools, brief=described.brief)
        model = Transformer(len(words), described.shape)
        model.load_state_dict(read_tensors(path.read_bytes()))
    except (OSError, msgspec.MsgspecError, SafetensorError, RuntimeError, ValueError) as error:
        raise SpecError(f"no checkpoint at {path}: {str(error)[:200]}", advice="give the .safetensors of a recipe") from error
    return model.eval(), words, described
