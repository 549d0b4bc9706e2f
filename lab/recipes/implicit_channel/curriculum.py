"""A toy that learns to keep what its mementos do not say: its task, its masks, its training.

Each block states one fact, a key and a value of ten, in one token. The memento behind it names the key and never the
value. Later a question names a key, and the value is the answer. The toy is a LLaMA of 0.8 million parameters, the
size that Memento (Microsoft, github.com/microsoft/memento) used to look at its implicit channel; the task here is
ours. A stage of training shows the whole text (full attention), or masks a block once its memento is complete, or
also masks older mementos, so that each has to hand on what the one before it knew. `implicit_channel.measurement`
measures them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from implicit_channel.slices import additive
from kilburn.errors import MissingExtra, SpecError

try:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging as chatter
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "torch") from error


VALUES = 10
"""How many answers there are: one in ten is chance."""

FULL, ALL = -1, 0
"""What later tokens see: everything; or all mementos and no finished block. A number from 1 on: so many of the newest
mementos."""

_TAGS = ("<bos>", "<|block_start|>", "<|block_end|>", "<|summary_start|>", "<|summary_end|>", "note", "what")
_BOS, _OPEN, _CLOSE, _START, _END, _NOTE, _WHAT = range(len(_TAGS))
_VALUE = len(_TAGS)
_KEY = _VALUE + VALUES
_MEMENTO = 4
_QUESTION = 3


class Span(msgspec.Struct, frozen=True):
    """Where a block begins, where it ends and its memento begins, where that ends."""

    start: int
    memento: int
    stop: int


class Batch(msgspec.Struct, frozen=True):
    """Sequences of one form, and which block each of their questions asks for, both [rows, ...]."""

    ids: Tensor
    asked: Tensor


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the toy.

    Raises:
        SpecError: heads that do not divide.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    inner: int = 392

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.inner) < 1:
            raise SpecError(f"a toy of the shape {self}", advice="give sizes of 1 or more")
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise SpecError(
                f"{self.hidden} dimensions, {self.heads} heads, {self.kv_heads} of keys and values",
                advice="give an even number of dimensions a head, and heads that the key heads divide",
            )


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the toy.

    Args:
        blocks: in one sequence. content: tokens in a block; one of them is its fact, the others mean nothing.
        keys: from which those of one sequence are drawn without repetition. fillers: tokens without a meaning.

    Raises:
        SpecError: numbers that make no task.
    """

    blocks: int = 4
    content: int = 6
    keys: int = 8
    fillers: int = 8

    def __post_init__(self) -> None:
        if not (1 <= self.blocks <= self.keys) or self.content < 1 or self.fillers < 1:
            raise SpecError(
                f"{self.blocks} blocks of {self.content} tokens, {self.keys} keys, {self.fillers} fillers",
                advice="give 1 block or more, a key for each, 1 token of content and 1 filler, or more",
            )

    @property
    def words(self) -> list[str]:
        """The vocabulary, by token."""
        known = [*_TAGS, *(f"v{number}" for number in range(VALUES)), *(f"k{number}" for number in range(self.keys))]
        known += [f"w{number}" for number in range(self.fillers)]
        return known + [f"k{key}=v{value}" for key in range(self.keys) for value in range(VALUES)]

    @property
    def facts(self) -> int:
        """The first of the tokens that state a fact: by key, and of one key by value."""
        return _KEY + self.keys + self.fillers

    @property
    def answer(self) -> slice:
        """Which tokens are values."""
        return slice(_VALUE, _VALUE + VALUES)

    @property
    def spans(self) -> list[Span]:
        """Where the blocks and their mementos stand, in order."""
        block = self.content + 2
        starts = range(1, self.questions, block + _MEMENTO)
        return [Span(at, at + block, at + block + _MEMENTO) for at in starts]

    @property
    def questions(self) -> int:
        """Where the questions begin."""
        return 1 + self.blocks * (self.content + 2 + _MEMENTO)

    def answers(self, count: int) -> Tensor:
        """Where the answers of so many questions stand; each is told by the logits of the token before it."""
        return self.questions + _QUESTION - 1 + _QUESTION * torch.arange(count)

    def told(self) -> Tensor:
        """Where the tokens of the mementos stand, which the blocks determine."""
        return torch.cat([torch.arange(span.memento, span.stop) for span in self.spans])

    def draw(self, rows: int, chance: torch.Generator, questions: int = 1) -> Batch:
        """So many sequences, each with so many questions for different blocks.

        Raises:
            SpecError: no rows, or not 1 to `blocks` questions.
        """
        if rows < 1 or not 1 <= questions <= self.blocks:
            raise SpecError(f"{rows} rows of {questions} questions", advice=f"give 1 row or more, 1 to {self.blocks} questions")
        keys = _KEY + torch.rand(rows, self.keys, generator=chance).argsort(1)[:, : self.blocks]
        values = _VALUE + torch.randint(VALUES, (rows, self.blocks), generator=chance)
        asked = torch.rand(rows, self.blocks, generator=chance).argsort(1)[:, :questions]
        parts = [_same(rows, _BOS)]
        for block in range(self.blocks):
            content = _KEY + self.keys + torch.randint(self.fillers, (rows, self.content), generator=chance)
            at = torch.randint(self.content, (rows, 1), generator=chance)
            key, value = keys[:, block : block + 1], values[:, block : block + 1]
            content.scatter_(1, at, self.facts + VALUES * (key - _KEY) + value - _VALUE)
            parts += [_same(rows, _OPEN), content, _same(rows, _CLOSE)]
            parts += [_same(rows, _START), key, _same(rows, _NOTE), _same(rows, _END)]
        for question in range(questions):
            which = asked[:, question : question + 1]
            parts += [_same(rows, _WHAT), keys.gather(1, which), values.gather(1, which)]
        return Batch(torch.cat(parts, 1), asked)

    def seen(self, keep: int, questions: int = 1) -> Tensor:
        """What each token sees [tokens, tokens], under `FULL`, `ALL`, or with so many newest mementos.

        A block is masked once its memento is complete; a memento, once so many more are complete. Questions do not
        see each other; otherwise the toy learns to exclude the answers already given.

        Raises:
            SpecError: less than -1.
        """
        if keep < FULL:
            raise SpecError(f"{keep} mementos to keep", advice="give -1 for all text, 0 for all mementos, or a number of them")
        size = self.questions + _QUESTION * questions
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        if keep != FULL:
            for leaving, at in self.leaving(keep):
                mask[at:, leaving[0] : leaving[1]] = False
        for first in range(self.questions + _QUESTION, size, _QUESTION):
            mask[first:, self.questions : first] = False
        return mask

    def positions(self, questions: int = 1) -> Tensor:
        """The position of each token; all questions stand at the same ones, behind the last memento."""
        later = torch.arange(self.questions, self.questions + _QUESTION)
        return torch.cat([torch.arange(self.questions), later.repeat(questions)])

    def leaving(self, keep: int) -> list[tuple[tuple[int, int], int]]:
        """The ranges that leave, each with the position of the first token that does not see it."""
        spans = self.spans
        found = [((span.start, span.memento), span.stop) for span in spans]
        if keep > 0:
            pairs = zip(spans, spans[keep:], strict=False)
            found += [((old.memento, old.stop), new.stop) for old, new in pairs]
        return sorted(found, key=lambda one: one[1])


def _same(rows: int, token: int) -> Tensor:
    return torch.full((rows, 1), token)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the training.

    Args:
        keep: what later tokens see; see `FULL` and `ALL`.
        steps: of the optimiser. rows: sequences a step. rate: the highest learning rate.

    Raises:
        SpecError: a number below what means something.
    """

    keep: int
    steps: int
    rows: int = 32
    rate: float = 3e-3

    def __post_init__(self) -> None:
        if self.keep < FULL or self.steps < 1 or self.rows < 1 or not 0 < self.rate < math.inf:
            raise SpecError(
                f"{self.steps} steps of {self.rows} rows at {self.rate}, {self.keep} mementos kept",
                advice="give 1 step or more, 1 row or more, a rate above 0, and -1 or more mementos to keep",
            )


def build(task: Task, shape: Shape, seed: int) -> Any:
    """A toy that has learned nothing yet: a LlamaForCausalLM of this shape, its weights drawn by the seed."""
    config = LlamaConfig(
        vocab_size=len(task.words),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        max_position_embeddings=1024,
        # The default of 0.02 suits width 768 and up; here it takes hundreds of steps to grow out of.
        initializer_range=shape.hidden**-0.5,
        tie_word_embeddings=True,
        bos_token_id=_BOS,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
        return model.eval()


def train(
    model: Any, task: Task, stage: Stage, chance: torch.Generator, heard: Callable[[int, float, float], None] | None = None
) -> None:
    """Train the toy in place: cross entropy of the answers, and of the mementos' tokens at half the weight.

    Steps with 1 to all blocks take turns: with few blocks it is learned sooner that values belong to keys.

    Args:
        heard: called with the steps done, their loss, and the share of right answers with all blocks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    tasks = [msgspec.structs.replace(task, blocks=blocks) for blocks in range(task.blocks, 0, -1)]
    masks = [additive(each.seen(stage.keep, each.blocks), model.dtype) for each in tasks]
    model.train()
    for step in range(stage.steps):
        each, mask = tasks[step % len(tasks)], masks[step % len(tasks)]
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * _warmth(step, stage.steps)
        batch = each.draw(stage.rows, chance, each.blocks)
        positions = each.positions(each.blocks).expand(stage.rows, -1)
        logits = model(batch.ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        answers = each.answers(each.blocks)
        loss: Any = _loss(logits, batch.ids, answers) + 0.5 * _loss(logits, batch.ids, each.told())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if heard is not None and each.blocks == task.blocks:
            right = logits[:, answers - 1].argmax(-1) == batch.ids[:, answers]
            heard(step + 1, loss.item(), float(right.float().mean()))
    model.eval()


def _loss(logits: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, at - 1].flatten(0, 1), ids[:, at].flatten())


def _warmth(step: int, steps: int) -> float:
    """Of the learning rate: up over a twentieth of the steps, at least 20, then down along a cosine to a tenth."""
    return min(1.0, (step + 1) / max(20, steps / 20)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def save(model: Any, task: Task, folder: Path) -> None:
    """Write the toy as a folder that transformers loads, with a tokenizer whose words stand between spaces.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(task.words)}, unk_token="note"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # A bar for one small file would stand between the lines of the recipe.
    bars: Any = chatter
    bars.disable_progress_bar()
    model.save_pretrained(folder)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, bos_token=_TAGS[_BOS]).save_pretrained(folder)
