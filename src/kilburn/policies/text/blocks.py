"""Blocks of reasoning and their mementos, as tags in a text: read whole, or as they stream, in pieces of any size.

    <|block_start|>reasoning<|block_end|><|summary_start|>what stays<|summary_end|>

The reader gives spans of the text, so that whatever is kept of it is byte-identical. It is strict:
one tag out of place and the text counts as malformed, which is for the caller to reject whole. It
refuses to guess at what was meant, and to decide what leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from kilburn.page import Span

__all__ = [
    "BLOCK_END",
    "BLOCK_START",
    "SUMMARY_END",
    "SUMMARY_START",
    "TAGS",
    "Block",
    "Blocks",
    "Fault",
    "Parser",
    "Where",
    "parse",
]

BLOCK_START = "<|block_start|>"
BLOCK_END = "<|block_end|>"
SUMMARY_START = "<|summary_start|>"
SUMMARY_END = "<|summary_end|>"
TAGS = (BLOCK_START, BLOCK_END, SUMMARY_START, SUMMARY_END)
LONGEST = max(map(len, TAGS))


class Where(StrEnum):
    """What the next letter of the text belongs to."""

    OUTSIDE = "outside"
    BLOCK = "block"
    BETWEEN = "between"
    """Behind a block's end, before its memento: only white space may stand there."""
    MEMENTO = "memento"


@dataclass(frozen=True, slots=True)
class Block:
    """One closed block: the span of its content and that of its memento, tags not included.

    `start` and `end` are the span of all of it, tags included.
    """

    content: Span
    memento: Span
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A tag out of place: what is wrong, and at which character."""

    what: str
    at: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a whole text holds: its blocks in order, and its faults. With any fault, nothing of it is to be folded."""

    blocks: tuple[Block, ...] = ()
    faults: tuple[Fault, ...] = ()


class Parser:
    """Reads tags from a text that comes in pieces; how it is cut makes no difference.

    Attributes:
        where: what the next letter belongs to, as far as is known.
        blocks: closed so far.
        faults: found so far.
        opened: behind the tag that opened what is open now, in characters from the start of the text.
        read: characters that are decided; what may become a tag is held back until it is one or is not.
    """

    def __init__(self) -> None:
        self.where = Where.OUTSIDE
        self.blocks: list[Block] = []
        self.faults: list[Fault] = []
        self.opened = 0
        self.read = 0
        self._held = ""
        self._start = 0
        self._content: Span = (0, 0)
        self._blank = True

    def feed(self, piece: str) -> list[str]:
        """Take the next piece; returns the tags that ended in it, in order."""
        found: list[str] = []
        text = self._held + piece
        at = 0
        while at < len(text):
            mark = text.find("<|", at)
            if mark < 0:
                mark = len(text) - 1 if text.endswith("<") else len(text)
            self._pass(text[at:mark])
            at = mark
            rest = text[mark : mark + LONGEST]
            tag = next((tag for tag in TAGS if rest.startswith(tag)), None)
            if tag is not None:
                self._turn(tag)
                found.append(tag)
                at += len(tag)
            elif rest and any(tag.startswith(rest) for tag in TAGS):
                break
            elif rest:
                self._pass(rest[0])
                at += 1
        self._held = text[at:]
        return found

    def close(self) -> Blocks:
        """The text is over: what was found, with a fault where something is still open."""
        held, self._held = self._held, ""
        self._pass(held)
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
        """Letters that are no tag."""
        blank = not text.strip()
        if self.where is Where.BETWEEN and self._blank and not blank:
            self._fault("text between a block and its memento", self.read + len(text) - len(text.lstrip()))
        self._blank = self._blank and blank
        self.read += len(text)

    def _turn(self, tag: str) -> None:
        """A tag: the way from one place to the next, or a fault that leaves the place as it is."""
        at, self.read = self.read, self.read + len(tag)
        before = self.where
        if tag == BLOCK_START and before is Where.OUTSIDE:
            self._start, self.where = at, Where.BLOCK
        elif tag == BLOCK_END and before is Where.BLOCK:
            self._content, self.where = (self.opened, at), Where.BETWEEN
        elif tag == SUMMARY_START and before is Where.BETWEEN:
            self.where = Where.MEMENTO
        elif tag == SUMMARY_END and before is Where.MEMENTO:
            if self._blank:
                self._fault("an empty memento")
            self.blocks.append(Block(self._content, (self.opened, at), self._start, self.read))
            self.where = Where.OUTSIDE
        else:
            self._fault(f"{tag.strip('<|>')} {_PLACES[before]}", at)
            return
        self.opened, self._blank = self.read, True

    def _fault(self, what: str, at: int | None = None) -> None:
        self.faults.append(Fault(what, self.read if at is None else at))


_PLACES = {
    Where.OUTSIDE: "outside of a block",
    Where.BLOCK: "inside a block",
    Where.BETWEEN: "before a memento",
    Where.MEMENTO: "inside a memento",
}


def parse(text: str) -> Blocks:
    """The blocks of a whole text."""
    return _parsed(text) if any(tag in text for tag in TAGS) else _NONE


_NONE = Blocks()


@lru_cache(maxsize=512)
def _parsed(text: str) -> Blocks:
    parser = Parser()
    parser.feed(text)
    return parser.close()
