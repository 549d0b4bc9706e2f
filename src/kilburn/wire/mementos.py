"""Reads blocks of reasoning and their mementos from tags in a text: a whole text, or a stream in pieces of any size.

    <|block_start|>reasoning<|block_end|><|summary_start|>what stays<|summary_end|>

The reader returns spans of the text, so that whatever is kept of it is byte-identical. It is strict: if one tag is
out of place, the text counts as malformed, and the caller rejects it whole. `Grammar` knows in which order tags may
come; the KV level uses it for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kilburn.page import Span
from kilburn.remembered import remembered

BLOCK_START = "<|block_start|>"
BLOCK_END = "<|block_end|>"
SUMMARY_START = "<|summary_start|>"
SUMMARY_END = "<|summary_end|>"
TAGS = (BLOCK_START, BLOCK_END, SUMMARY_START, SUMMARY_END)
MAX_TAG_CHARS = max(map(len, TAGS))


class Tag(StrEnum):
    """The tags that open and close blocks and mementos."""

    BLOCK_START = "block_start"
    BLOCK_END = "block_end"
    SUMMARY_START = "summary_start"
    SUMMARY_END = "summary_end"


class Where(StrEnum):
    """What the next character or token belongs to."""

    OUTSIDE = "outside"
    BLOCK = "block"
    BETWEEN = "between"
    """After a block's end, before its memento: only white space may be there."""
    MEMENTO = "memento"
    ANSWER = "answer"
    """After the end of thinking, where tags have no meaning. For tokens only."""


@dataclass(frozen=True, slots=True)
class ThoughtBlock:
    """A block whose memento is complete.

    Args:
        content: its span, tags not included; `memento` likewise.
        start: of the whole, including tags; `end`: its end.
        forced_end: whether the reader forced the end of the block, and `forced_summary` that of its memento.
    """

    content: Span
    memento: Span
    start: int
    end: int
    forced_end: bool = False
    forced_summary: bool = False


class Fault(NamedTuple):
    """A tag out of place: the problem, and after how many characters or tokens."""

    problem: str
    at: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a whole text, in order, and its faults. With any fault, nothing of it may be folded."""

    blocks: tuple[ThoughtBlock, ...] = ()
    faults: tuple[Fault, ...] = ()


_NEXT = {
    Tag.BLOCK_START: (Where.OUTSIDE, Where.BLOCK),
    Tag.BLOCK_END: (Where.BLOCK, Where.BETWEEN),
    Tag.SUMMARY_START: (Where.BETWEEN, Where.MEMENTO),
    Tag.SUMMARY_END: (Where.MEMENTO, Where.OUTSIDE),
}
"""For each tag: where it may be, and what comes after it."""

PLACES = {
    Where.OUTSIDE: "outside of a block",
    Where.BLOCK: "inside a block",
    Where.BETWEEN: "before a memento",
    Where.MEMENTO: "inside a memento",
}


class Grammar:
    """Checks the order of tags. Positions may count characters or tokens. A tag out of place is a fault.

    Attributes:
        where: what the next character or token belongs to.
        blocks: blocks closed so far.
        faults: faults found so far.
        opened: the end of the tag that opened what is open now.
    """

    def __init__(self) -> None:
        self.where = Where.OUTSIDE
        self.blocks: list[ThoughtBlock] = []
        self.faults: list[Fault] = []
        self.opened = 0
        self._start = 0
        self._content: Span = (0, 0)
        self._forced_end = False

    def turn(self, tag: Tag, start: int, stop: int, *, forced: bool = False) -> bool:
        """Read a tag at `start` to `stop`; False if it is out of place, which is recorded and otherwise ignored."""
        required, following = _NEXT[tag]
        if self.where is not required:
            self.faults.append(Fault(f"{tag} {PLACES[self.where]}", start))
            return False
        if tag is Tag.BLOCK_START:
            self._start = start
        elif tag is Tag.BLOCK_END:
            self._content, self._forced_end = (self.opened, start), forced
        elif tag is Tag.SUMMARY_END:
            self.blocks.append(ThoughtBlock(self._content, (self.opened, start), self._start, stop, self._forced_end, forced))
        self.where, self.opened = following, stop
        return True


class Parser(Grammar):
    """Reads tags from a text that comes in pieces; it does not matter how the text is split.

    Attributes:
        read: characters that are decided; the beginning of a possible tag waits for the next piece.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self._held = ""
        self._blank = True

    def feed(self, piece: str) -> list[str]:
        """Take the next piece; returns the tags that ended in it, in order."""
        tags: list[str] = []
        text = self._held + piece
        at = 0
        while at < len(text):
            mark = text.find("<|", at)
            if mark < 0:
                mark = len(text) - 1 if text.endswith("<") else len(text)
            self._pass(text[at:mark])
            at = mark
            rest = text[mark : mark + MAX_TAG_CHARS]
            tag = next((tag for tag in TAGS if rest.startswith(tag)), None)
            if tag is not None:
                self._take(tag)
                tags.append(tag)
                at += len(tag)
            elif rest and any(tag.startswith(rest) for tag in TAGS):
                break
            elif rest:
                self._pass(rest[0])
                at += 1
        self._held = text[at:]
        return tags

    def close(self) -> Blocks:
        """End the text: return its blocks, with a fault if a block is still open."""
        rest, self._held = self._held, ""
        self._pass(rest)
        open_ones = {
            Where.BLOCK: "a block that never ends",
            Where.BETWEEN: "a block without a memento",
            Where.MEMENTO: "a memento that never ends",
        }
        if self.where in open_ones:
            self.faults.append(Fault(open_ones[self.where], self.opened))
            self.where = Where.OUTSIDE
        return Blocks(tuple(self.blocks), tuple(self.faults))

    def _pass(self, text: str) -> None:
        """Read characters that are not a tag."""
        blank = not text.strip()
        if self.where is Where.BETWEEN and self._blank and not blank:
            self.faults.append(Fault("text between a block and its memento", self.read + len(text) - len(text.lstrip())))
        self._blank = self._blank and blank
        self.read += len(text)

    def _take(self, tag: str) -> None:
        start, self.read = self.read, self.read + len(tag)
        blank = self._blank and self.where is Where.MEMENTO
        if self.turn(Tag(tag.strip("<|>")), start, self.read):
            if blank:
                self.faults.append(Fault("an empty memento", self.read))
            self._blank = True


def parse(text: str) -> Blocks:
    """Return the blocks of a whole text."""
    return _parsed(text) if any(tag in text for tag in TAGS) else Blocks()


@remembered(lambda parsed: 300 * (len(parsed.blocks) + len(parsed.faults)))
def _parsed(text: str) -> Blocks:
    parser = Parser()
    parser.feed(text)
    return parser.close()
