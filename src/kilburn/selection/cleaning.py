"""What can be deleted by rule: superseded outputs, dead ends, repetition.

Three rules over exact text, each of which keeps what it points at: an output whose call was made again
with the same arguments goes for the newer one, a failed try goes down to its error line once the same
tool has succeeded, and a block of lines that stands further down again goes for that later copy. What is
said once stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kilburn.page import Span
from kilburn.selection.anchors import Exact, Scanned
from kilburn.selection.lines import complement, merge, skeleton, units

BLOCK = 3
"""Lines of which a repeated block has at least so many."""

MIN_BLOCK_CHARS = 60
"""Characters, white space left out, of those lines together: shorter ones repeat by chance."""

MIN_LINE_CHARS = 400
"""Characters from which on one line alone is a block."""

SAME = 0.5
"""Share of an output's lines, ignoring numbers, that the newer output of the same call must contain."""

_DEAD = re.compile(
    r"^(?:usage: |error: |.*\b(?:command not found|No such file or directory|not recognized as an internal|is a directory"
    r"|Permission denied|No module named|unrecognized arguments|invalid option|no matches found)\b"
    r"|(?:[A-Za-z_]\w*\.)*(?:SyntaxError|IndentationError|ModuleNotFoundError|ImportError|FileNotFoundError|NameError)\b)",
    re.IGNORECASE,
)
_FAILING = 30
"""Lines of a failed attempt at most; a longer output contains more than its failure."""


def redundant(scanned: Sequence[Scanned]) -> list[Exact]:
    """What the three rules delete of these pages, given in the order of the window.

    Deterministic, and complete after one pass: on the cleaned pages it returns nothing.
    """
    superseded = _superseded(scanned)
    cuts = [Exact(page.page, start, stop) for page in scanned if page.page in superseded for start, stop in page.spans]
    remaining = [page for page in scanned if page.page not in superseded]
    dead = _dead_ends(remaining)
    cuts += [Exact(page, start, stop) for page, spans in dead.items() for start, stop in spans]
    remaining = [replace(page, spans=complement(page.spans, dead.get(page.page, ()))) for page in remaining]
    return cuts + _repeated(remaining)


def _superseded(scanned: Sequence[Scanned]) -> set[int]:
    """Outputs of calls that were made again with the same arguments, and gave much the same.

    The same call may mean something else the next time ("scroll down"), hence the share.
    """
    newer: dict[str, list[frozenset[str]]] = {}
    old: set[int] = set()
    for page in reversed(scanned):
        if not page.key or _error_line(page) is not None:
            continue
        shapes = _shapes(page.text)
        if not page.fixed and any(
            len(shapes & newer_shapes) >= SAME * max(1, len(shapes)) for newer_shapes in newer.get(page.key, ())
        ):
            old.add(page.page)
        elif page.is_whole:
            newer.setdefault(page.key, []).append(shapes)
    return old


def _shapes(text: str) -> frozenset[str]:
    return frozenset(shape for line in text.splitlines() if (shape := skeleton(line)))


def _dead_ends(scanned: Sequence[Scanned]) -> dict[int, list[Span]]:
    """All but the error line of failed tries after which the same tool succeeded."""
    succeeded: set[str] = set()
    dead: dict[int, list[Span]] = {}
    for page in reversed(scanned):
        if not page.name:
            continue
        line = _error_line(page)
        if line is None:
            succeeded.add(page.name)
        elif page.name in succeeded and not page.fixed and page.is_whole:
            rest = [span for span in ((0, line[0]), (line[1], len(page.text))) if page.text[slice(*span)].strip()]
            if rest:
                dead[page.page] = rest
    return dead


def _error_line(page: Scanned) -> Span | None:
    """The line that says why an attempt failed, if the output has little else: its last line or its first."""
    lines = [span for span in _lines(page.text, (0, len(page.text))) if page.text[slice(*span)].strip()]
    if not lines or len(lines) > _FAILING:
        return None
    for span in (lines[-1], lines[0]):
        if _DEAD.match(page.text[slice(*span)].strip()):
            return span
    return None


def _lines(text: str, span: Span) -> list[Span]:
    """The lines of a span, however long they are."""
    return units(text, len(text), *span)


def _repeated(scanned: Sequence[Scanned]) -> list[Exact]:
    """Blocks that occur again further down, except their last copy.

    The text is read from the end, so a block is deleted only for a copy that stays. Therefore a second pass finds
    nothing.
    """
    blocks: set[tuple[str, ...]] = set()
    cuts: list[Exact] = []
    for page in reversed(scanned):
        repeats: list[Span] = []
        for span in reversed(page.spans):
            repeats += _repeats(page, _lines(page.text, span), blocks)
        cuts += [Exact(page.page, start, stop) for start, stop in merge(repeats)]
    return cuts


def _repeats(page: Scanned, spans: Sequence[Span], blocks: set[tuple[str, ...]]) -> list[Span]:
    """The lines of one stretch that are among the blocks; what stays of the stretch is added to it."""
    lines = [page.text[start:stop].rstrip("\r\n") for start, stop in spans]
    repeated = [False] * len(lines)
    # A block may be repeated until the reading is BLOCK lines further up: only then does it count as kept.
    for at in range(len(lines) - 1, -BLOCK - 1, -1):
        for size in (BLOCK, 1):
            block = tuple(lines[at : at + size]) if at >= 0 and not page.fixed else ()
            if _counts(block, size) and block in blocks:
                repeated[at : at + size] = [True] * size
        settled = at + BLOCK
        for size in (BLOCK, 1):
            block = tuple(lines[settled : settled + size])
            if _counts(block, size) and not any(repeated[settled : settled + size]):
                blocks.add(block)
    return [span for span, is_repeated in zip(spans, repeated, strict=True) if is_repeated]


def _counts(block: tuple[str, ...], size: int) -> bool:
    """Whether the lines are enough to be a block."""
    if len(block) != size:
        return False
    return sum(len("".join(line.split())) for line in block) >= (MIN_LINE_CHARS if size == 1 else MIN_BLOCK_CHARS)
