"""What was just asked needs of what the window does not show: passages to bring, or none.

A passage is worth the share of the asked words that it has, each by how rare it is among the candidates; a word that the
window shows somewhere counts less. So a question about nothing old brings nothing. Nothing is brought twice: a line that is
shown counts nothing, and a word that a better passage has counts less. The index finds the candidates, so this takes as long
in a session of a million pages as in a short one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, islice, pairwise, takewhile
from typing import NamedTuple

from kilburn.effect import Answer, Effect, Find
from kilburn.message import Kind, Role
from kilburn.move import Bring, Evict, Move
from kilburn.page import Page, Parts, Span
from kilburn.policy import View
from kilburn.prices import Prices
from kilburn.retrieval import STOP
from kilburn.selection.excerpts import ANSWERS, flow_of, said_of, shown_texts
from kilburn.selection.passages import lines_of, runs_of, words_of
from kilburn.selection.selection import HEADING, MARK, TALK, PagePassage, candidates_of, joined, new_share

HITS = 24
"""Passages that the index is asked for."""

YOUNG = 8000
"""Tokens of leaving pages, newest first, whose passages are candidates too: the index may not have them yet."""

GRAIN = 300
"""Characters of a passage at most."""

ASKED, HALF = 1000, 0.5
"""Characters of what was said that are searched for, and the weight that it must have: a long request has less, and so have
words before a short one."""

LEAST, MUCH = 0.28, 1.5
"""Worth of the best passage, at least, if anything is brought: a share of what was said, or so many words that no other
passage has, if that is less. In a small window, which shows less, down to seven tenths of it."""

MANY = 150
"""Passages of which the candidates are taken to be the best, for how rare a word is."""

REST = 0.3
"""Worth of each further passage, at least, as a share of that."""

KNOWN = 0.4
"""What a word counts that the window shows somewhere; TOLD: that a chosen passage has, once for each."""
TOLD = 0.4

OFTEN = 0.6
"""BM25's k: how much more a word counts that a passage has often."""

LATELY = 12
"""Newest pages in which it is looked for whether the agent goes on after its own words."""

STILL = 0.5
"""Share of a copy, by characters, that must be wanted still so that it stays."""

# It begins where such characters begin: a run of thousands without a slash (base64, Chinese) would be read from each of them.
_PATH = re.compile(r"(?<![\w.@-])[\w.@-]*+(?:/[\w.@-]++)++")

Terms = Mapping[frozenset[str], float]
"""What is asked about, each with its weight: a word, or all words of a path, which counts by the rarest that a passage has. Else
whoever only names a file would outrank what stands in it."""


class _Wanted(NamedTuple):
    """A passage that has asked words, and what each of these counts in it, by its place in the terms."""

    one: PagePassage
    told: Mapping[int, float]


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
    costs = accumulate(_costs(wanted, view.count(MARK), view.count), initial=view.count(HEADING))
    return [one for one, cost in zip(wanted, islice(costs, 1, None), strict=True) if cost <= room]


def _costs(wanted: Iterable[PagePassage], mark: int, count: Callable[[str], int]) -> Iterator[int]:
    pages: set[int] = set()
    for one in wanted:
        yield count(one.text[one.passage.start : one.passage.end]) + 3 + (0 if one.page in pages else mark + 4)
        pages.add(one.page)


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
    """The passages that are worth most for what was just asked, or for what the agent is working on; none if none is worth
    enough. What copies show may be among them.

    Args:
        room: tokens that they may take as one copy.
        staying: the pages that stay in the window, if others leave with the same plan; None if all stay.
        kept: what an excerpt of that plan keeps.
    """
    if any(page.role is Role.ASSISTANT for page in view.latest()) and not _goes_on(view):
        # The next prompt comes after somebody else's words.
        return []
    said = [(text, weight) for text, weight in said_of(view) if weight >= HALF]
    terms = terms_of(said)
    if not terms or room <= 2 * view.handle:
        return []
    answer = yield Find(query="\n".join([text[-ASKED:] for text, _ in said]), limit=HITS, words=True)
    spans: list[tuple[int, Span | None]] = [(hit.page, hit.span) for hit in answer.hits]
    if staying is not None:
        stays = {page.id for page in staying}
        left = YOUNG
        for page in reversed(view.pages):
            if page.id > 0 and page.id not in stays and left > 0:
                left -= page.tokens
                spans.append((page.id, None))
    found: dict[tuple[int, int], PagePassage] = {}
    for number, span in spans:
        page = view.page(number)
        if page.kind is Kind.FOLD or page.is_atomic:
            continue
        # Where the request alone is left, the agent has said nothing since, and is at work on an answer.
        talk = ANSWERS if len(said) == 1 and said[0][0] is view.task else TALK
        for one in candidates_of(view.text(number), number, page.message, str(page.role), GRAIN, span, talk=talk):
            found[number, one.passage.start] = one
    newest = reversed(view.pages if staying is None else staying)
    shown = shown_texts(view, (page for page in newest if page.id not in view.copies))
    shown += [view.text(number)[slice(*span)] for number, spans in kept for span in spans]
    candidates = [found[key] for key in sorted(found)]
    least = LEAST * min(1.0, 0.7 + view.budget.capacity / 27_000)
    return chosen_of(candidates, shown, terms, least, room - view.count(HEADING), view.count(MARK), view.count)


def terms_of(said: Iterable[tuple[str, float]]) -> Terms:
    """What some texts with weights are about; the commonest words are left out."""
    found: dict[frozenset[str], float] = {}
    for text, weight in said:
        text = text[-4000:]
        paths = [frozenset(word for word in words_of(path) if len(word) > 1) for path in _PATH.findall(text)]
        words = (frozenset((word,)) for word in words_of(_PATH.sub(" ", text)) if word not in STOP and len(word) > 1)
        for term in (*paths, *words):
            if term:
                found[term] = max(found.get(term, 0.0), weight)
    return found


def chosen_of(
    candidates: Sequence[PagePassage],
    shown: Sequence[str],
    terms: Terms,
    least: float,
    room: int,
    mark: int,
    count: Callable[[str], int],
) -> list[PagePassage]:
    """The passages that are worth most together, within `room` tokens; none if the best is worth less than `least`."""
    told, whole = _told(candidates, terms, set[str]().union(*map(runs_of, shown)))
    if not whole:
        return []
    least = min(least, MUCH * math.log(1 + MANY) / whole)
    usable = [_Wanted(one, its) for one, its in zip(candidates, told, strict=True) if math.fsum(its.values()) >= REST * least]
    lines: set[str] = set().union(*map(lines_of, shown)) if usable else set()
    chosen: list[PagePassage] = []
    pages: set[int] = set()
    counts = [1.0] * len(terms)
    while usable:
        values = [_value(one, counts, lines) for one in usable]
        best = max(range(len(usable)), key=lambda at: (values[at], at))
        if values[best] < (REST * least if chosen else least):
            break
        one, its = usable.pop(best)
        cost = count(one.text[one.passage.start : one.passage.end]) + 3 + (0 if one.page in pages else mark + 4)
        if cost > room:
            continue
        room -= cost
        chosen.append(one)
        pages.add(one.page)
        lines.update(one.passage.lines)
        for at in its:
            counts[at] *= TOLD
    return chosen


def _goes_on(view: View) -> bool:
    """Whether the agent lately said something after its own words, so that the next prompt may come after them."""
    said = [page for page in islice(reversed(view.pages), LATELY) if page.id not in view.copies]
    return any(one.role is other.role is Role.ASSISTANT and one.message != other.message for one, other in pairwise(said))


def _told(candidates: Sequence[PagePassage], terms: Terms, shown: Set[str]) -> tuple[list[dict[int, float]], float]:
    """What each term counts in each passage that has it, by its place, as a share of what all terms count; and that."""
    places: dict[str, list[int]] = {}
    for at, term in enumerate(terms):
        for word in term:
            places.setdefault(word, []).append(at)
    words = places.keys()
    having = [words & one.passage.words.keys() for one in candidates]
    times = Counter(chain.from_iterable(having))
    many = max(MANY, len(candidates))
    joined_runs = "\n".join(shown)
    rarity = {
        word: math.log(1 + (many - times[word] + 0.5) / (times[word] + 0.5))
        * (KNOWN if word in shown or word in joined_runs else 1.0)
        for word in words
    }
    weights = list(terms.values())
    whole = math.fsum([weight * max([rarity[word] for word in term]) for term, weight in terms.items()])
    told: list[dict[int, float]] = []
    for one, there in zip(candidates, having, strict=True):
        its: dict[int, float] = {}
        share = min(1.0, one.weight) * (1 + OFTEN) / (whole or 1.0)
        for word in there:
            known = one.passage.words[word]
            counts = rarity[word] * known / (known + OFTEN) * share
            for at in places[word]:
                its[at] = max(its.get(at, 0.0), weights[at] * counts)
        told.append(its)
    return told, whole


def _value(wanted: _Wanted, counts: Sequence[float], lines: Set[str]) -> float:
    worth = math.fsum([amount * counts[at] for at, amount in wanted.told.items()])
    return worth * new_share(wanted.one.passage, lines)


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
