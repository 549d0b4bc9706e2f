"""Claims compared: what speaks of the same thing, what says the same, and what contradicts.

All of it is pure and on the claims' own words, so that a search, a policy and a person's command judge alike. A
paraphrase ("works at", "is employed by") is another relation here: a contradiction that is missed is only returned
unmarked, one that is invented would retire something true.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from kilburn.page import Claim

Topic = tuple[str, str, str]
"""What a claim speaks of: whose memory, if its subject is the speaker, else ""; its subject; its relation."""

SPEAKER = "user"
"""The subject of a claim about whoever speaks; in each user's memory it is somebody else."""

DOUBTS = "may have changed"
"""The relation of a page that doubts the facts that it is made from: somebody said something after which they may be untrue."""

_SPEAKER = frozenset({SPEAKER, "i", "me", "my", "myself", "speaker"})
_ARTICLE = re.compile(r"^(?:the|an?)\s+(?=\S)")
_POSSESSIVE = re.compile(r"['\N{RIGHT SINGLE QUOTATION MARK}]s\b")
_BREAK = re.compile(r"[\s_\-\N{EN DASH}\N{EM DASH}/]+")


def plain_name(name: str) -> str:
    """A name as names are compared: without case, outer punctuation, a leading article, and "'s"; spaces, underscores
    and dashes are one space. "C++" and "C#" keep their signs, and so does a number with a point."""
    text = unicodedata.normalize("NFKC", name).casefold()
    text = _BREAK.sub(" ", _POSSESSIVE.sub("", text))
    words = [_bare(word) for word in text.split()]
    text = " ".join(word for word in words if word)
    return _ARTICLE.sub("", text) or " ".join(name.casefold().split())


def _bare(word: str) -> str:
    """A word without punctuation at its ends; signs that belong to a name stay."""
    first, last = 0, len(word)
    while first < last and unicodedata.category(word[first])[0] in "PZC" and word[first] not in "#@":
        first += 1
    while last > first and unicodedata.category(word[last - 1])[0] in "PZC" and word[last - 1] not in "#%":
        last -= 1
    return word[first:last]


def is_speaker(subject: str) -> bool:
    """Whether a subject means whoever speaks."""
    return plain_name(subject) in _SPEAKER


def subject_key(name: str) -> str:
    """Return the form of a name in which names are compared. All names of the speaker have the same form."""
    return SPEAKER if is_speaker(name) else plain_name(name)


def topic(claim: Claim, memory: object = "") -> Topic:
    """What a claim speaks of. `memory` is the number or name of its collection: in each, the speaker is another."""
    subject = subject_key(claim.subject)
    return str(memory) if subject == SPEAKER else "", subject, plain_name(claim.relation)


def same_claim(first: Claim, second: Claim) -> bool:
    """Whether two claims of the same memory say the same."""
    return topic(first) == topic(second) and plain_name(first.object) == plain_name(second.object)


def contradict(first: Claim, second: Claim) -> bool:
    """Whether two claims of the same memory, if both are true at one time, contradict each other: the same subject and
    relation, another object, and neither is of a relation that may have several objects."""
    if not first.relation or first.many or second.many:
        return False
    return topic(first) == topic(second) and plain_name(first.object) != plain_name(second.object)


def contested(claims: Iterable[tuple[object, Claim | None]]) -> list[tuple[int, ...]]:
    """Return for each claim the places of the other claims that contradict it.

    Args:
        claims: (its collection, its claim or None); all of them true at the time that is asked about.
    """
    listed = list(claims)
    by_topic: defaultdict[Topic, list[int]] = defaultdict(list)
    for at, (memory, claim) in enumerate(listed):
        if claim is not None and claim.relation and not claim.many:
            by_topic[topic(claim, memory)].append(at)
    rivals: list[tuple[int, ...]] = [()] * len(listed)
    for places in by_topic.values():
        if len(places) > 1:
            objects = [plain_name(claim.object) for at in places if (claim := listed[at][1]) is not None]
            for at, value in zip(places, objects, strict=True):
                rivals[at] = tuple(rival for rival, theirs in zip(places, objects, strict=True) if theirs != value)
    return rivals


def together(rivals: Sequence[tuple[int, ...]]) -> list[int]:
    """Return all places in order, each followed at once by those that contradict it (see `contested`), so that the end of a
    budget seldom separates contradicting claims."""
    order: dict[int, None] = {}
    for at, opponents in enumerate(rivals):
        order.update(dict.fromkeys((at, *opponents)))
    return list(order)
