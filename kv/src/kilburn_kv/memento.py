"""Memento for a cache: which tokens leave when a memento is complete, and which tokens are forced.

Pure: token ids come in one at a time, and after each the reader says what the engine has to do. A block's keys and
values leave, and the memento's stay. These were computed while the block could be seen, so they may contain more than
the memento's words. From Memento (Microsoft, microsoft/memento). `kilburn_kv.reasoning` applies this to an engine;
the order of the markers is that of the tags in a text (`kilburn.wire.mementos`).

    <|block_start|>reasoning<|block_end|><|summary_start|>memento<|summary_end|> ... </think>answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilburn.wire.mementos import PLACES, Fault, Grammar, Tag, ThoughtBlock, Where

__all__ = ["Markers", "MementoRules"]

OFF = -1
"""`keep_last_n_blocks` of a run in which nothing leaves."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Markers:
    """The tokens that open and close blocks and mementos: one token each for a model that was trained with them, else
    several.

    Args:
        think_end: the tokens that end all thinking; empty if there are none.

    Raises:
        ValueError: one is empty, or is part of another, so that they could not be told apart.
    """

    block_start: tuple[int, ...]
    block_end: tuple[int, ...]
    summary_start: tuple[int, ...]
    summary_end: tuple[int, ...]
    think_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        named = {name: tuple(getattr(self, name)) for name in _NAMES}
        for name, tokens in named.items():
            object.__setattr__(self, name, tokens)
            if not tokens and name != "think_end":
                raise ValueError(f"the marker {name} has no tokens")
            for other, longer in named.items():
                if tokens and other != name and _within(tokens, longer):
                    raise ValueError(f"the marker {name} is part of {other}; give each tokens of its own")

    @classmethod
    def of(
        cls,
        encode: Callable[[str], Sequence[int]],
        *,
        block_start: str = "<|block_start|>",
        block_end: str = "<|block_end|>",
        summary_start: str = "<|summary_start|>",
        summary_end: str = "<|summary_end|>",
        think_end: str = "</think>",
    ) -> Markers:
        """From their texts, e.g. `Markers.of(weights.tokens)`; a `think_end` of "" means none.

        If a tokenizer has no special tokens for them, a model may write a marker with other tokens, and it is then
        not recognised. Forced markers are always exact.
        """
        texts = (block_start, block_end, summary_start, summary_end, think_end)
        return cls(*(tuple(encode(text)) if text else () for text in texts))


@dataclass(frozen=True)
class MementoRules:
    """How a run treats its blocks.

    Args:
        keep_last_n_blocks: newest blocks that stay whole; 0 for none, -1 for a run in which nothing leaves.
        keep_last_block_for_answer: the newest block stays until the next one opens, so that an answer sees it.
        delimiters: whether the markers stay; else those around a block and its memento leave with the block.
        restart_mode: instead of evicting the block, drop everything after the prompt, and compute again what stays.
            For comparison: the same words without the implicit channel.
        max_block_tokens: a longer block is closed by force; 0 for no bound. The paper used 7,000 in training.
        max_summary_tokens: a longer memento is closed by force; 0 for no bound.
        force_start: whether a block is opened by force whenever none is open, for a model that does not open any.

    Raises:
        ValueError: an impossible number.
    """

    markers: Markers
    keep_last_n_blocks: int = 0
    keep_last_block_for_answer: bool = False
    delimiters: bool = True
    restart_mode: bool = False
    max_block_tokens: int = 0
    max_summary_tokens: int = 0
    force_start: bool = False

    def __post_init__(self) -> None:
        if self.keep_last_n_blocks < OFF:
            raise ValueError(f"keep_last_n_blocks={self.keep_last_n_blocks}; give -1 for off, 0 for none, or a number")
        for name in ("max_block_tokens", "max_summary_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; give 0 for no bound, or a number")

    def reader(self, start: int = 0) -> BlockReader:
        """A reader of one generation that begins at this logical position."""
        return BlockReader(self, start)


@dataclass(frozen=True)
class DroppedRange:
    """Generated tokens `start` to `stop` left when `at` tokens had been generated."""

    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class Instruction:
    """What the engine has to do now, in this order; usually `NOTHING`.

    Args:
        evict: logical positions to drop from the cache.
        restart: tokens to compute after the prompt, once everything after it was dropped; None for no restart.
        force: the tokens that come next, instead of the model's.
    """

    evict: tuple[Range, ...] = ()
    restart: tuple[int, ...] | None = None
    force: tuple[int, ...] = ()

    @property
    def drops(self) -> bool:
        """Whether the cache changes."""
        return bool(self.evict) or self.restart is not None


NOTHING = Instruction()


class BlockReader(Grammar):
    """Reads one generation, token by token: `begin` first, then `feed` with each token, forced ones too.

    A marker out of place (nested blocks, a memento without a block) is reported in `faults`, counts as plain tokens,
    and changes nothing. The same holds for an empty memento; its block then stays.

    Attributes:
        drops: what left, in order.
        tokens: all generated tokens, including those that left.
    """

    def __init__(self, memento: MementoRules, start: int = 0) -> None:
        super().__init__()
        self.memento = memento
        self.drops: list[DroppedRange] = []
        self.tokens: list[int] = []
        self._offset = start
        # Blocks that are complete and whole, oldest first.
        self._whole: list[ThoughtBlock] = []
        # The end of the last marker: a token belongs to one marker only.
        self._read = 0
        self._forcing = ""
        self._pending: tuple[int, ...] = ()
        self._done = 0
        markers = memento.markers
        self._marks = [(name, found, len(found)) for name in _NAMES if (found := getattr(markers, name))]

    def begin(self) -> Instruction:
        """What to do before the first token."""
        return self._open() if not self.tokens else NOTHING

    def feed(self, token: int) -> Instruction:
        """Read the next cached token; returns what to do before the one after it."""
        self.tokens.append(token)
        if self.where is Where.ANSWER:
            return NOTHING
        if self._pending:
            # A forced marker is always a marker, even if its tokens, with those before, could be read differently.
            if token == self._pending[self._done]:
                self._done += 1
                if self._done < len(self._pending):
                    return NOTHING
                name, self._pending = self._forcing, ()
                return self._take(name, forced=True)
            self._pending = ()
        room = len(self.tokens) - self._read
        for name, mark, count in self._marks:
            if count <= room and mark[-1] == token and tuple(self.tokens[-count:]) == mark:
                return self._take(name)
        return self._cap()

    def _take(self, name: str, forced: bool = False) -> Instruction:
        """A marker is complete: go to the next place, or report a fault."""
        end = self._read = len(self.tokens)
        at = end - len(getattr(self.memento.markers, name))
        if name == "think_end":
            if self.where is not Where.OUTSIDE:
                self.faults.append(Fault(f"think_end {PLACES[self.where]}", at))
            self.where = Where.ANSWER
        elif not self.turn(Tag(name), at, end, forced=forced):
            return self._cap()
        elif name == Tag.BLOCK_START:
            return self._drop(self.memento.keep_last_n_blocks)
        elif name == Tag.BLOCK_END:
            return self._force(Tag.SUMMARY_START)
        elif name == Tag.SUMMARY_END:
            return self._close(self.blocks[-1])
        return NOTHING

    def _close(self, block: ThoughtBlock) -> Instruction:
        """A memento is complete."""
        memento = self.memento
        if block.memento[0] == block.memento[1]:
            self.faults.append(Fault("an empty memento", block.memento[0]))
        else:
            self._whole.append(block)
        keep = memento.keep_last_n_blocks
        done = self._drop(max(keep, 1) if memento.keep_last_block_for_answer and keep != OFF else keep)
        return Instruction(done.evict, done.restart, self._open().force)

    def _open(self) -> Instruction:
        return self._force(Tag.BLOCK_START) if self.memento.force_start else NOTHING

    def _force(self, name: str, done: int = 0) -> Instruction:
        """Ask for the rest of a marker, of which so many tokens are already there."""
        self._forcing, self._done = name, 0
        self._pending = getattr(self.memento.markers, name)[done:]
        return Instruction(force=self._pending)

    def _cap(self) -> Instruction:
        """Close a block or memento that is too long; if its end marker has begun, only the rest of it is forced."""
        if self.where is Where.BLOCK:
            name, most = Tag.BLOCK_END, self.memento.max_block_tokens
        elif self.where is Where.MEMENTO:
            name, most = Tag.SUMMARY_END, self.memento.max_summary_tokens
        else:
            return NOTHING
        if not most or len(self.tokens) - self.opened < most:
            return NOTHING
        mark = getattr(self.memento.markers, name)
        room = min(len(mark) - 1, len(self.tokens) - max(self.opened, self._read))
        done = next((count for count in range(room, 0, -1) if tuple(self.tokens[-count:]) == mark[:count]), 0)
        return self._force(name, done)

    def _drop(self, keep: int) -> Instruction:
        """What leaves if so many blocks stay whole."""
        if keep == OFF or len(self._whole) <= keep:
            return NOTHING
        leaving = self._whole[: len(self._whole) - keep]
        del self._whole[: len(leaving)]
        inner = [(block.content,) for block in leaving]
        around = [((block.start, block.memento[0]), (block.memento[1], block.end)) for block in leaving]
        ranges = [
            (start, stop) for pair in (inner if self.memento.delimiters else around) for start, stop in pair if start < stop
        ]
        if not ranges:
            return NOTHING
        self.drops += [DroppedRange(len(self.tokens), start, stop) for start, stop in ranges]
        if not self.memento.restart_mode:
            return Instruction(evict=tuple((self._offset + start, self._offset + stop) for start, stop in ranges))
        return Instruction(restart=tuple(self.left))

    @property
    def left(self) -> list[int]:
        """The generated tokens that did not leave."""
        edges = [0, *(edge for drop in self.drops for edge in (drop.start, drop.stop)), len(self.tokens)]
        return [token for start, stop in zip(edges[::2], edges[1::2], strict=True) for token in self.tokens[start:stop]]


_NAMES = (*Tag, "think_end")


def _within(part: Sequence[int], whole: Sequence[int]) -> bool:
    return any(tuple(whole[at : at + len(part)]) == tuple(part) for at in range(len(whole) - len(part) + 1))
