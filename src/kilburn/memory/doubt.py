"""Doubts: sentences that may make a fact untrue, where neither a rule nor a model decides.

A sentence with a sign of change ("moved", "not any more", "instead") that speaks of the same matter as a fact in force *doubts*
that fact. Nothing is retired. A page of the memory stores the sentence; it cites the message and has the fact as its source, so
it is forgotten with either. A search that finds the fact returns the newest doubt before it and marks the fact (`Found.doubted`).

A sentence may change a fact if it states another value of the same property, or if it has a sign of change and speaks of the same
matter. The patterns are for English.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache

import msgspec

from kilburn.claims import DOUBTS, SPEAKER, is_speaker
from kilburn.effect import Answer, Effect, Find
from kilburn.memory import english
from kilburn.memory.clauses import clauses
from kilburn.memory.view import MemoryView, Utterance
from kilburn.memory.words import BRINGS, ENDS, KIN, NEGATED, content_words, is_sign, proper_names, stem
from kilburn.message import Kind, Role
from kilburn.move import Add, Retire
from kilburn.page import Claim, Page, address_of
from kilburn.search.confidence import is_english
from kilburn.search.dates import grounded

MAX_DOUBTED_FACTS = 5
"""Maximum number of facts that one sentence can doubt; a sentence that would doubt more is too general."""


_ABOUT_OTHERS = re.compile(rf"(?:(?:my|our|the) {KIN}\b|(?:he|she|they)\b)(?!.*\b(?:i|me|we|us|i'm|i've|we've)\b)", re.IGNORECASE)
_DENIES = re.compile(r"\b(?:dislikes?|hates?|avoids?|allergic)\b", re.IGNORECASE)
_OWNED = re.compile(r"\b(?:my|our|the) (?=(\w+))", re.IGNORECASE)
_EVENT = re.compile(r"\b(?:meeting|appointment|interview|exam|flight|call|deadline|class|party|trip)\b", re.IGNORECASE)


@cache
def _matters() -> tuple[frozenset[str], ...]:
    return tuple(frozenset(map(stem, words.split())) for words in english.SECTIONS["doubt"]["matters"])


_SINGLE_VALUED = english.pattern("doubt.single_valued", re.IGNORECASE)
"""Relations with one object at a time, in a sentence that a person asked to remember."""


def rival_test(text: str) -> Callable[[str], bool]:
    """Return a test of whether a known sentence states another value of the same property: the same subject, and a relation that
    has one object at a time. Preferences count only if they are of one kind: dark mode and light mode."""
    match = _SINGLE_VALUED.search(text)
    if match is None:
        return lambda sentence: False
    subject, relation, new = text[: match.start()].strip().casefold(), _relation(match), _stems(text[match.end() :])
    preferred = match[0].lower().startswith("prefer")

    def rivals(sentence: str) -> bool:
        known_match = _SINGLE_VALUED.search(sentence)
        if (
            known_match is None
            or sentence[: known_match.start()].strip().casefold() != subject
            or _relation(known_match) != relation
        ):
            return False
        old = _stems(sentence[known_match.end() :])
        return bool(new and old) and not new <= old and not old <= new and (bool(new & old) or not preferred)

    return rivals


def _relation(match: re.Match[str]) -> set[str]:
    return set(map(stem, match[0].lower().split()))


def rival_words(text: str) -> tuple[str, str] | None:
    """Return index words for the search for rivals of a sentence: words that every rival has, and words of which a rival has at
    least one ("" if it need not). None if the sentence can have no rivals."""
    match = _SINGLE_VALUED.search(text)
    if match is None:
        return None
    return text[: match.end()], text[match.end() :] if match[0].lower().startswith("prefer") else ""


def has_change_sign(text: str) -> bool:
    """Return whether a sentence has a sign of change. Otherwise it cannot resemble a fact."""
    return ENDS.search(text) is not None or BRINGS.search(text) is not None


def doubt_link(olds: Sequence[int]) -> Add:
    """Return the page that records that the first `Add` of the same change doubts some facts."""
    claim = Claim(subject=SPEAKER, relation=DOUBTS, object=" ".join(map(address_of, olds)), confidence=0.5, many=True)
    text = "A later fact may have changed this one."
    return Add(text=text, kind=Kind.TEXT, claim=claim, sources=tuple(olds), refers=(0,), why="a later fact")


def doubted_facts(page: Page) -> set[int]:
    """Return the facts that a page doubts: those that its claim names, or all its sources if it names none."""
    addresses = page.claim.object.split() if page.claim is not None else []
    return {source for source in page.sources if not addresses or address_of(source) in addresses}


def resemblance_test(sentence: str) -> Callable[[str, Claim | None], bool]:
    """Return a test of whether a sentence with a sign of change concerns a fact: it ends the fact's object, or it has new
    information on the same matter about the same person."""
    negated, event = NEGATED.search(sentence) is not None, _EVENT.search(sentence) is not None
    about_others = _ABOUT_OTHERS.match(sentence) is not None
    ends, brings = ENDS.search(sentence) is not None, BRINGS.search(sentence) is not None
    stems = _stems(sentence)
    # "I lost my job", "we gave up the flat"
    owned = {stem(word.casefold()) for word in _OWNED.findall(sentence)} if ends else set[str]()
    # New information has a name or a number.
    fresh = {stem(name) for name in proper_names(f"- {sentence}")} | {word for word in stems if any(map(str.isdigit, word))}
    # The sentence's words for each matter.
    spoken = [(of, of & stems) for of in _matters() if not of.isdisjoint(stems)]

    def resembles(fact: str, claim: Claim | None) -> bool:
        subject = claim.subject if claim is not None else ""
        if claim is None or is_speaker(subject):
            if about_others:
                return False
        elif not _stems(subject.replace(SPEAKER, "")) & stems:
            return False
        if negated and (NEGATED.search(fact) or _DENIES.search(fact)):
            return False
        whole = _stems(fact)
        things = _stems(claim.object) if claim is not None else {stem(name) for name in proper_names(fact)}
        if things and things <= stems:
            return ends
        if ends and things & stems:
            return True
        matter = whole - things - _stems(subject) if subject else whole - things
        same = (matter & stems).union(*(mine for of, mine in spoken if not of.isdisjoint(matter) or not of.isdisjoint(things)))
        if not same or event is not bool(_EVENT.search(fact)):
            return False
        if not owned.isdisjoint(same):
            return True
        return brings and (bool(fresh - whole) or any(mine - whole for of, mine in spoken if not of.isdisjoint(things)))

    return resembles


def _stems(text: str) -> set[str]:
    return set(map(stem, content_words(text)))


MAX_DOUBTS_PER_FACT = 3
"""Doubts about the same facts that stay in force; older ones are retired."""

MAX_SENTENCE_CHARS = 400
"""Characters of a sentence; longer ones raise no doubt."""


def raise_doubts(
    view: MemoryView, utterance: Utterance, moves: Sequence[Add | Retire], excluded: Iterable[int] = ()
) -> Generator[Effect, Answer, list[Add | Retire]]:
    """Return the doubts that a message raises, and the retirement of the oldest doubts about the same facts.

    Args:
        moves: moves of the same plan so far. Facts that they add for earlier messages can be doubted; facts that they retire
            are not.
        excluded: facts that are not doubted, because the message repeats them.
    """
    changes: list[Add | Retire] = []
    if utterance.role is not Role.USER or not is_english(utterance.text):
        return changes
    settled = {page for move in moves if isinstance(move, Retire) for page in move.pages} | set(excluded)
    adds = [move for move in moves if isinstance(move, Add)]
    new = [at for at, add in enumerate(adds) if add.kind is Kind.FACT and add.cites and max(add.cites)[1] < utterance.page.id]
    for sentence in _sentences(utterance.text):
        answer = yield Find(query=sentence, limit=20)
        candidates = {hit.page: view.page(hit.page) for hit in answer.hits}
        candidates |= {page.id: page for page, _ in view.about(SPEAKER, "")}
        facts = [page for number, page in candidates.items() if page.kind is Kind.FACT and number not in settled]
        resembles = resemblance_test(sentence)
        pages = tuple(page.id for page in facts if resembles(view.text(page.id), page.claim))
        refers = tuple(at for at in new if resembles(adds[at].text, adds[at].claim))
        if not 0 < len(pages) + len(refers) <= MAX_DOUBTED_FACTS:
            continue
        changes.append(
            Add(
                text=f"The user said: {grounded(sentence, utterance.page.time)[0]}",
                kind=Kind.TEXT,
                claim=Claim(subject=SPEAKER, relation=DOUBTS, confidence=0.5, many=True),
                sources=pages,
                refers=refers,
                cites=(utterance.cite,),
                since=utterance.page.time,
                why="may have changed",
            )
        )
        # Some older doubts stay: if the newest is forgotten, a search shows the one before it.
        if older := sorted(find_doubts(view, pages))[: 1 - MAX_DOUBTS_PER_FACT]:
            changes.append(Retire(tuple(older), until=utterance.page.time, why="newer doubts"))
        settled.update(pages)
    return changes


def find_doubts(view: MemoryView, pages: Sequence[int]) -> tuple[int, ...]:
    """Return the doubts in force about some facts and no others."""
    facts = set(pages)
    return tuple(
        page.id
        for page in (view.made_from(pages) if pages else ())
        if page.claim is not None and page.claim.relation == DOUBTS and doubted_facts(page) <= facts
    )


def combine_moves(moves: Sequence[Add | Retire], more: Sequence[Add | Retire]) -> list[Add | Retire]:
    """Append moves to others so that no page is retired twice."""
    retired = {page for move in moves if isinstance(move, Retire) for page in move.pages}
    combined = list(moves)
    for move in more:
        if isinstance(move, Retire):
            remaining = tuple(page for page in move.pages if page not in retired)
            retired.update(remaining)
            if remaining:
                combined.append(msgspec.structs.replace(move, pages=remaining))
        else:
            combined.append(move)
    return combined


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences with a sign of change that somebody says in their own name."""
    previous = ""
    for clause in clauses(text):
        whole, rest = previous, clause.rest
        if whole.endswith(rest):
            continue  # the next clause of the same sentence
        previous = rest
        if len(rest) <= MAX_SENTENCE_CHARS and is_sign(rest):
            yield rest
