"""What was just asked needs of what the window does not show: passages to bring, or none.

The search of the session finds and ranks them, and says whether any is likely to be an answer; here it is decided what the
search is asked for, how much of what it found fits, and when a copy leaves again. Nothing is brought twice: a passage that the
window shows already is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from itertools import islice, pairwise, takewhile

from kilburn.effect import Answer, Effect, Find
from kilburn.message import Kind, Role
from kilburn.move import Bring, Evict, Move
from kilburn.page import Page, Parts
from kilburn.policy import View
from kilburn.prices import Prices
from kilburn.retrieval import STOP
from kilburn.selection.excerpts import flow_of, said_of, shown_texts
from kilburn.selection.passages import lines_of, words_of
from kilburn.selection.selection import HEADING, MARK, PagePassage, candidates_of, joined, new_share

ASKED, HALF = 1000, 0.5
"""Characters of what was said that are searched for, and the weight that it must have: a long request has less, and so have
words before a short one."""

SHORT = 12
"""Words of a message that is taken as a question without its mark."""

SURE, TOLD = float(os.environ.get("SURE", ".9")), float(os.environ.get("TOLD", ".25"))
"""How likely an answer must be where nobody asked, and the share of the room that passages may take then."""

AGENT, AGENT_SURE = float(os.environ.get("AGENT", "1")), float(os.environ.get("ASURE", ".8"))

TRIM = float(os.environ.get("TRIM", ".5"))
ACUT = float(os.environ.get("ACUT", ".8"))
CUT = float(os.environ.get("CUT", ".5"))

_QUESTION = re.compile(r"[^.!?\n。！？؟]*[?？؟]")

HITS = 100
"""Passages at most."""

WHOLE, GRAIN = 800, int(os.environ.get("GRAIN", "300"))
"""Characters of a page up to which it is a passage, and of a passage of a longer one at most."""

NEW = 0.5
"""Share of a passage that the window must not show yet."""

LATELY = 12
"""Newest pages in which it is looked for whether the agent goes on after its own words."""

STILL = 0.5
"""Share of a copy, by characters, that must be wanted still so that it stays."""


def copies_of(view: View) -> list[Page]:
    """The copies that may leave."""
    return [view.page(number) for number in sorted(view.copies) if number not in view.pins]


def copy_moves(leaving: Sequence[Page], wanted: Sequence[PagePassage]) -> list[Move]:
    """The moves that take copies away and bring passages."""
    moves: list[Move] = [Evict(tuple([page.id for page in leaving]), why="not asked for any more")] if leaving else []
    parts = joined(wanted)
    return [*moves, Bring(parts, why=f"passages of {len(parts)} pages for what was asked")] if parts else moves


def unshown(wanted: Sequence[PagePassage], copies: Sequence[Page]) -> list[PagePassage]:
    """The passages that these copies do not show."""
    return [one for one in wanted if not any(_has(page.parts, one) for page in copies)]


def fitting(view: View, wanted: Sequence[PagePassage], room: int) -> list[PagePassage]:
    """The first of these passages, within `room` tokens as one copy."""
    room -= view.count(HEADING)
    mark = view.count(MARK) + 4
    fit: list[PagePassage] = []
    pages: set[int] = set()
    for one in wanted:
        room -= view.count(one.text[one.passage.start : one.passage.end]) + 3 + (0 if one.page in pages else mark)
        if room < 0:
            break
        pages.add(one.page)
        fit.append(one)
    return fit


def pays(own: int, behind: int, prompts: float, prices: Prices) -> bool:
    """Whether it pays to take a page out of the prompt. To keep it costs a cached read for each prompt. To take it out costs that
    all that stands behind it is written to the cache again, in place of a cached read.

    Args:
        own: its tokens.
        behind: tokens behind it that the provider has in its cache.
        prompts: in which it would stand otherwise.
    """
    return own * prompts * prices.cached > behind * max(0.0, prices.written - prices.cached)


def leaves(view: View, copy: Page, wanted: Sequence[PagePassage], prices: Prices) -> bool:
    """Whether a copy is not wanted any more, and it pays that it leaves now: it would leave anyway with the next edit in front,
    when the window is full."""
    if _overlap(copy.parts, wanted) >= STILL:
        return False
    new = set(view.wanted)
    behind = takewhile(lambda page: page.id != copy.id, reversed(view.pages))
    prompts = max(0, view.budget.capacity - view.use) / flow_of(view) / 2
    return pays(copy.tokens, sum([page.tokens for page in behind if page.id not in new]), prompts, prices)


def passages_asked(
    view: View, room: int, *, staying: Sequence[Page] | None = None, kept: Parts = ()
) -> Generator[Effect, Answer, list[PagePassage]]:
    """The passages that the search finds for what was just asked, or for what the agent is working on, best first; none where
    it finds no likely answer. What copies show may be among them.

    Args:
        room: tokens that they may take as one copy.
        staying: the pages that stay in the window, if others leave with the same plan; None if all stay.
        kept: what an excerpt of that plan keeps.
    """
    if any(page.role is not Role.TOOL and (page.role is Role.ASSISTANT) != _goes_on(view) for page in view.latest()):
        # The next prompt comes after somebody else's words.
        return []
    query, share, least = query_of(view)
    room = int(room * share) - view.count(HEADING)
    if not query.strip() or room <= 2 * view.handle:
        return []
    stays = view.pages if staying is None else staying
    shown = frozenset([page.id for page in stays if page.id > 0])
    answer = yield Find(query=query, limit=HITS, tokens=room, abstain=True, shown=shown)
    if answer.confidence < least:
        return []
    texts = shown_texts(view, (page for page in reversed(stays) if page.id not in view.copies))
    texts += [view.text(number)[slice(*span)] for number, spans in kept for span in spans]
    lines: set[str] = set().union(*map(lines_of, texts))
    mark = view.count(MARK) + 4
    words = words_of(query).keys() - STOP
    wanted: list[PagePassage] = []
    pages: set[int] = set()
    best = answer.hits[0].score if answer.hits else 0.0
    for hit in answer.hits:
        if hit.score < (CUT if is_chat(view) else ACUT) * best:
            break
        page = view.page(hit.page)
        if page.kind is Kind.FOLD or page.is_atomic:
            continue
        text = view.text(page.id)
        passages = candidates_of(text, page.id, page.message, str(page.role), len(text) if len(text) <= WHOLE else GRAIN, hit.span)
        matching = [len(words & one.passage.words.keys()) for one in passages]
        for one, many in zip(passages, matching, strict=True):
            cost = view.count(one.text[one.passage.start : one.passage.end]) + 3 + (0 if one.page in pages else mark)
            if cost <= room and many >= TRIM * max(matching) and new_share(one.passage, lines) >= NEW:
                room -= cost
                pages.add(one.page)
                lines.update(one.passage.lines)
                wanted.append(one)
    return wanted


def query_of(view: View) -> tuple[str, float, float]:
    """What is searched for, the share of the room that passages may take, and how likely an answer must be at least."""
    if is_told(view):
        said = view.task[-ASKED:]
        questions = _QUESTION.findall(said)
        asks = bool(questions) or len(said.split()) <= SHORT
        return " ".join(questions) or said, 1.0 if asks else TOLD, 0.0 if asks else SURE
    return "\n".join([text[-ASKED:] for text, weight in said_of(view) if weight >= HALF]), AGENT, AGENT_SURE


def is_told(view: View) -> bool:
    """Whether the newest message is the user's, and short or a question: no observation of an agent."""
    return any(page.id == view.task_page for page in view.latest()) and is_chat(view)


def is_chat(view: View) -> bool:
    """Whether people talk: the user's latest message is short or a question, and no tool works on it now."""
    return _is_short(view.task) and all(page.kind is Kind.TEXT for page in view.latest()) and not _goes_on(view)


def _is_short(text: str) -> bool:
    return len(text.split()) <= 80 or text.rstrip()[-1:] in "?？؟"


def _goes_on(view: View) -> bool:
    """Whether the agent lately said something after its own words, so that the next prompt may come after them."""
    said = [page for page in islice(reversed(view.pages), LATELY) if page.id not in view.copies]
    return any(one.role is other.role is Role.ASSISTANT and one.message != other.message for one, other in pairwise(said))


def _has(parts: Parts, one: PagePassage) -> bool:
    """Whether these spans show a passage."""
    return any(
        page == one.page and any(start <= one.passage.start and one.passage.end <= stop for start, stop in spans)
        for page, spans in parts
    )


def _overlap(parts: Parts, wanted: Sequence[PagePassage]) -> float:
    """The share of these spans, by characters, that is wanted."""
    whole = sum([stop - start for _, spans in parts for start, stop in spans])
    return sum([one.passage.end - one.passage.start for one in wanted if _has(parts, one)]) / max(1, whole)
