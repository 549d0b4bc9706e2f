"""How likely it is that what was found contains an answer.

A logistic model of few figures. It counts which words of the question occur in what was found, and not how rare they are, so a
store of one fact is judged as a store of a million. A question about somebody or something by name, or about one of a family
("my brother"), is answered only by what names it, or stands beside what does: of another person the same words are no answer. It
was fitted on half of LoCoMo's conversations and half of the made-up talk of `kilburn lab change`: questions asked as they are, of
another conversation, and of another person. It knows nothing else of what a text says: a passage that is about the same person
and matter and answers something else passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from kilburn.retrieval import STOP
from kilburn.search.found import Found

ENOUGH = 0.25
"""Below this a search that may abstain does."""

HITS = 10
"""Hits that are looked at, the best first."""

SHARE_WEIGHT, WORDS_WEIGHT, COSINE_WEIGHT, LOST_WEIGHT, BIAS = 4.58, -0.34, 5.97, -5.46, -1.74
"""Weights of the share of the query's words in the hits that fit, of the number of its words (8 at most), of the best cosine of
these hits, and of whom it asks about if no hit names them."""

ALONE_SAID, ALONE_WORDS, ALONE_LOST, ALONE_BASE = 6.48, -0.17, -5.74, -2.16
"""The same without vectors."""

STEM = 5
"""Letters by which words are the same: endings change."""

SHORT = 3
"""Letters of a word that counts; shorter ones, and the commonest, count where a query has no other."""

BESIDE = 4
"""How far away a turn is that still speaks of the same person."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""A word; of scripts without blanks, a sign."""

_NAME = re.compile(r"(?<![\w/.`])[^\W\d_][^\W_]*(?P<own>['’]s?)?(?![\w'’])")
_CODE = re.compile(r"[a-z][A-Z]")
"""In a name of a program, such as `RecursionError`, which is a word like any other."""

_BEGINS = re.compile(r"(?:\A|[.!?:\n])[\s\"'(]*\Z")
_NO_NAME = re.compile(r"I\Z|\w+day\Z|(?:Jan|Febr)uary\Z|March\Z|April\Z|May\Z|June\Z|July\Z|August\Z|\w+ember\Z|October\Z")

_FAMILY = (
    "wife husband spouse partner girlfriend boyfriend fiance fiancee",
    "mother mom mum mama",
    "father dad papa",
    "sister sis",
    "brother bro",
    "son daughter kid kids child children",
    "grandmother grandma granny",
    "grandfather grandpa",
    "aunt auntie",
    "uncle",
    "cousin",
    "niece",
    "nephew",
    "boss manager supervisor",
)
"""Words for the same person of a family, or at work."""


def confidence(
    query: str, hits: Sequence[Found], cosines: Sequence[float | None], turns: Sequence[tuple[int, int] | None]
) -> float:
    """The probability, 0 to 1, that an answer is among these hits; 0 where there is none.

    Args:
        query: without the names of those who spoke.
        hits: best first.
        cosines: of each hit to the query; None without a vector.
        turns: of each hit, the segment and the page by whose number it is known what was said beside it; None where the pages of
            a segment do not belong together.
    """
    if not hits:
        return 0.0
    words = _stems(query) - _NOBODY
    query_words = {word for word in words if word not in COMMON and (len(word) >= SHORT or not word.isascii())} or words
    if not query_words:
        return 0.0
    about = _about(query)
    # A name may stand in any of them.
    hit_words = [_stems(hit.text) | _stems(hit.speaker or "") for hit in (hits if about else hits[:HITS])]
    has_name = [not about or any(of & word_set for of in about) for word_set in hit_words]
    named_turns = {turn for turn, names in zip(turns, has_name, strict=False) if names and turn is not None}
    fits = [
        names or (turn is not None and any((turn[0], turn[1] + step) in named_turns for step in range(-BESIDE, BESIDE + 1)))
        for names, turn in zip(has_name[:HITS], turns, strict=False)
    ]
    core = query_words.difference(*about)
    common = set[str]().union(*(word_set for word_set, fit in zip(hit_words, fits, strict=False) if fit))
    share = len(core & common) / len(core) if core else float(any(fits))
    everything = set[str]().union(*hit_words)
    lost = any(not of & everything for of in about)
    number = min(len(query_words), 8)
    if all(cosine is None for cosine in cosines[:HITS]):
        total = ALONE_SAID * share + ALONE_WORDS * number + ALONE_LOST * lost + ALONE_BASE
    else:
        best = max((cosine or 0.0 for cosine, fit in zip(cosines, fits, strict=False) if fit), default=0.0)
        total = SHARE_WEIGHT * share + WORDS_WEIGHT * number + COSINE_WEIGHT * best + LOST_WEIGHT * lost + BIAS
    return 1 / (1 + math.exp(-total))


def _about(query: str) -> list[frozenset[str]]:
    """Whom or what a query asks about: of each the words by which it may be called. The names in it; without any, the words for
    somebody of a family. In languages that are not known here other words have capitals: of those, nobody."""
    if not is_english(query):
        return []
    names_found = [match for match in _NAME.finditer(query) if match[0][0].isupper() and not _CODE.search(match[0])]
    if len(names_found) * 2 > len(_NAME.findall(query)) > 3:
        names_found = []  # a heading
    names = [
        frozenset(_stems(match[0].removesuffix(match["own"] or "")))
        for match in names_found
        if (match["own"] or not _BEGINS.search(query[: match.start()])) and not _NO_NAME.match(match[0])
    ]
    return names or [FAMILY[word] for word in sorted(_stems(query) & FAMILY.keys())]


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in set(_WORD.findall(text.casefold()))}


def _stem(word: str) -> str:
    return word.rstrip("s")[:STEM]


COMMON = {_stem(word) for word in STOP}
_NOBODY = {_stem("user")}
"""Who is asked about where a question says "the user"."""
FAMILY: Mapping[str, frozenset[str]] = {
    _stem(word): frozenset(map(_stem, words.split())) for words in _FAMILY for word in words.split()
}


_ENGLISH = (
    "the my and that this it you with have for from to at they she your our are been just what when how us because until who "
    "there then his her i'm i've i'd don't didn't can't it's is was were not but all a an on in no so be do should would every "
    "of me we i more out over than had did got get into as by too after before if or about will back off up"
)
_FOREIGN = (
    "der die das und ich wir nicht mit bei nach ein eine den dem ist bin habe hat zu im je tu il elle nous vous le la les un une "
    "des du et est suis ai chez pas de que qui en el los las y no soy tengo con mi una ho sono abito ci siamo di che non per del "
    "della il lo gli ik wij het een niet ben doe aan van met jag är och inte har med på det en em na os uma eu não moro para "
    "meu minha jeg og ikke er til ja nie jest mam w z się na do"
)
_ONLY_ENGLISH = frozenset(_ENGLISH.split()) - frozenset(_FOREIGN.split())
"""Words of English that are none of other languages of Europe."""
_ONLY_FOREIGN = frozenset(_FOREIGN.split()) - frozenset(_ENGLISH.split())


def is_english(text: str) -> bool:
    """Whether a text is in the language whose words are known here, as far as its small words tell; one that has none of them
    is not, unless it is very short."""
    words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text.casefold().replace("’", "'"))
    english, foreign = ([word for word in words if word in listed] for listed in (_ONLY_ENGLISH, _ONLY_FOREIGN))
    if sum(not word.isascii() for word in words) * 2 > len(words) or len(foreign) > len(english):
        return False
    return len(words) < 3 or bool(english)
