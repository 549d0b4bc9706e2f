"""What a user said that is to stay: standing instructions ("never push to main") and corrections ("no, port 8081").

Users of every compactor plead for it: such words are said once, and hold until the end. A rule finds them when they are admitted,
by what sentences begin with, without a model, in ten languages. It errs on the side of finding too much, so it has a bound: of
what it finds the newest stays, a hundred messages at most, within an eighth of the window. A short message stays whole; of a
longer one its sentences stay, as an excerpt, once it leaves. No policy can move them, and the kernel removes them only if pins
and open calls leave no room. A person lets go of one by evicting it, retiring it or forgetting it.

What the rule does not find (another language, other words) is treated like all that the user said: pin it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, Span

Standing = Mapping[int, tuple[Span, ...]]
"""Pages, oldest first, each with its sentences that stay, or none if the whole page does."""

SHARE, WHOLE = 8, 16
"""The shares of the window that all of it may take, and up to which one message stays whole: an eighth, and a sixteenth."""

MOST = 100
"""Messages that stay at most, so that a turn costs the same however much a user orders, and however large the window is."""

LONG = 2000
"""Characters of a message from which on it may hold a text that is not the user's own: only its first and its last paragraph
are read, and so many characters of each."""

SENTENCE = 400
"""Characters of a sentence at most: a longer one is no instruction."""

FRAME = 24
"""Tokens of what stands around an excerpt."""

_OPENING = r"please|and|but|so|also|again|important|note|reminder|ok(?:ay)?|yes|well|one more thing|rule \d+"
_START = rf"^(?:[-*•] +)?(?:(?:{_OPENING})[,:!.]? +)*"
_BEGINNINGS = "|".join(
    (
        _START
        + r"(?:always|never|do not|don['’]?t|make sure|be sure|ensure|remember|keep in mind|avoid|prefer|stop \w+ing|no more"
        r"|only (?:ever )?(?:use|write|change|touch|edit|run|read|answer|call|make)|under no circumstances|i prefer"
        r"|i (?:want|need|expect) you to|i (?:told|asked) you|we (?:always|never)"
        r"|(?:use|take|make|put|call|name|write|run|set|send)\b.{1,80}\b(?:instead|rather than|not))\b",
        # German
        r"^(?:bitte )?(?:immer|nie|niemals)\b",
        r"^(?!ich|es|das|er|sie|wir|der|die|wer|was)\w+ (?:\w+ ){0,4}(?:immer|nie|niemals|nicht)\b",
        # French
        r"^(?:toujours|jamais|n(?:e |['’])\w+ (?:jamais|pas|plus))\b",
        # Spanish, Portuguese, Italian
        r"^(?:siempre|nunca|sempre|mai|no (?!es\b|sé\b|hay\b)\w+[eaon]s?\b (?:el|la|los|las|un|una|nunca|más)|não \w+|non \w+)\b",
    )
)
"""How a sentence begins that is to stay."""
_WORDS = "|".join(
    (
        r"(?:[,;:–—] |\b(?:and|but|please|you should|must|to) )(?:always|never|don['’]?t)\b",
        r"\b(?:from now on|from here on|going forward|for the rest of|in (?:the )?future|at all times|under no circumstances"
        r"|must ?n[o'’]t|you (?:must(?! have| be\b)|may not|are (?:not )?(?:to|allowed))"
        # German
        r"|ab jetzt|ab sofort|von nun an|in zukunft|künftig|merke? dir|denke? daran|vergiss nicht|achte darauf|auf keinen fall"
        r"|du (?:sollst|darfst|musst)|stattdessen|sondern"
        # French
        r"|désormais|dorénavant|à partir de maintenant|souviens-toi"
        r"|rappelle-toi|n['’]oublie pas|veille à|tu (?:ne )?dois|plutôt que|au lieu de"
        # Spanish, Portuguese, Italian
        r"|a partir de ahora|de ahora en adelante|recuerda|no olvides|asegúrate|en lugar de|en vez de|a partir de agora"
        r"|de agora em diante|lembre-se|não (?:se )?esqueça|certifique-se|d['’]ora in poi|da ora in poi|ricordati|ricorda"
        r"|non dimenticare|assicurati|invece di|em vez de)\b",
    )
)
"""What it has anywhere."""
_LETTERS = "|".join(
    (
        # Russian
        r"\b(?:всегда|никогда|отныне|впредь|запомни|помни|не забудь|не забывай|вместо)\b",
        # Chinese, Japanese, Korean
        r"总是|始终|永远|从现在起|从现在开始|记住|不要|别再|切勿|禁止|必须|务必|而不是",
        r"常に|必ず|決して|今後|これからは|覚えて|忘れない|しないで|ではなく",
        r"항상|절대|앞으로|기억해|잊지 마|하지 마|반드시",
    )
)
"""The same in other letters than Latin ones: these are not looked for in a sentence that has none."""
_CORRECTS = (
    r"^(?:(?:ok(?:ay)?|sorry|hm+|wait|oh)[,:!.]* +)*(?:no(?=[,.!:;—–-])|nope|not (?:quite|that|what)|wrong"
    r"|that(?:['’]s| is) (?:wrong|not)"
    r"|actually|i meant?\b|i said|correction|instead|"
    r"nein|falsch|eigentlich|doch nicht|ich meinte|das stimmt nicht|korrektur|"
    r"non(?=[,.!:])|en fait|je voulais dire|c['’]est faux|en realidad|quise decir|me refería|está mal|não(?=[,.!:])|na verdade"
    r"|eu quis dizer|está errado|in realtà|volevo dire|intendevo|sbagliato|"
    r"нет(?=[,.!:])|на самом деле|я имел|я имела|неправильно"
    r"|不(?=[，,。！])|不对|错了|我是说|其实|いいえ|違|いや|実は|아니|틀렸)"
)
_SENTENCE = r"[^\n]+?(?:[.!?](?=\s|$)|[。！？]|(?=\n)|$)"
_FOREIGN = r"\s{4}|\t|[>#|$`<]|//|/\*|\d+[:|]|\["
"""How a line begins that is a quotation, code, a numbered line, or the output of a program."""
_PLEASE = r"\b(?:please|can you|could you|will you|would you)\b"
"""What makes a question an order."""
_REMINDER = r"(?s:\s*<([\w-]+)>.*</\1>\s*)"
"""What a framework puts under the user's name."""


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """Compiled when a user first says something: an import takes no time for it."""
    return re.compile(text, re.IGNORECASE | re.MULTILINE)


def sentences_of(text: str) -> tuple[Span, ...]:
    """The sentences of a user's message that are to stay."""
    if _pattern(_REMINDER).fullmatch(text):
        return ()
    found: list[Span] = []
    first = True
    for start, stop in _sentences(text):
        said = text[start:stop]
        asks = said[-1] in "?？" and not _pattern(_PLEASE).search(said)
        stays = not asks and (_pattern(_BEGINNINGS).match(said) or _pattern(_WORDS).search(said))
        if not asks and not stays and not said.isascii():
            stays = _pattern(_LETTERS).search(said)
        if stays or (first and _pattern(_CORRECTS).match(said)):
            found.append((start, stop))
        first = False
    return tuple(found)


def _sentences(text: str) -> Iterator[Span]:
    """The sentences of what is likely the user's own words."""
    fenced = False
    for start, stop in _paragraphs(text):
        for line in re.finditer(r"[^\n]+", text[start:stop]):
            if line[0].lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and not _pattern(_FOREIGN).match(line[0]):
                for found in _pattern(_SENTENCE).finditer(line[0]):
                    said = found[0].strip()
                    if said and len(said) <= SENTENCE:
                        at = start + line.start() + found.start() + len(found[0]) - len(found[0].lstrip())
                        yield at, at + len(said)


def _paragraphs(text: str) -> Sequence[Span]:
    """All of a short text; of a long one the first and the last paragraph."""
    if len(text) <= LONG:
        return ((0, len(text)),)
    head = min(text.find("\n\n") % (len(text) + 1), LONG)
    tail = max(text.rstrip().rfind("\n\n") + 1, len(text) - LONG, head)
    return ((0, head), (tail, len(text)))


def standing_with(
    new: Sequence[tuple[Page, str]],
    before: Standing,
    pages: Mapping[int, Page],
    capacity: int,
    free: Iterable[int],
    text_of: Callable[[int], str],
) -> Standing:
    """What stays, once these pages are admitted.

    Args:
        new: the new pages, each with its text. before: what stayed so far. pages: those of the session.
        free: pages that are pinned, or cannot stay any more.
        text_of: the text of any other page that stayed so far.
    """
    gone, room = set(free), capacity // SHARE
    found = {page: sentences for page, sentences in before.items() if page not in gone}
    said: dict[tuple[str, ...], int] | None = None
    for page, text in new:
        if page.role is not Role.USER or page.kind is not Kind.TEXT or page.trust < Trust.USER:
            continue
        sentences = sentences_of(text)
        whole = page.tokens * WHOLE <= capacity
        while sentences and not whole and _tokens(sentences) * SHARE > capacity:
            sentences = sentences[:-1]
        if sentences and page.id not in gone:
            if said is None:
                said = {_said(text_of(old), found[old]): old for old in found}
            # What is said again is newer now.
            words = _said(text, sentences)
            found.pop(said.pop(words, 0), None)
            found[page.id] = () if whole else sentences
            said[words] = page.id
    stays: dict[int, tuple[Span, ...]] = {}
    tokens = {page.id: page.tokens for page, _ in new}
    for number in reversed(found):
        sentences = found[number]
        room -= _tokens(sentences) if sentences else tokens.get(number) or pages[number].tokens
        if room < 0 or len(stays) == MOST:
            break
        stays[number] = sentences
    return {number: stays[number] for number in reversed(stays)}


def _said(text: str, sentences: Sequence[Span]) -> tuple[str, ...]:
    """The words of the sentences that stay."""
    return tuple([text[start:stop].lower() for start, stop in sentences or sentences_of(text)])


def _tokens(sentences: Sequence[Span]) -> int:
    """Tokens of an excerpt with these sentences, by a rule of thumb."""
    return FRAME + sum(stop - start for start, stop in sentences) // 3


def shows(page: Page, of: int, sentences: Sequence[Span]) -> bool:
    """Whether a page shows these sentences of another one, or all of it: it is that page, or an excerpt with them."""
    if page.id == of:
        return True
    kept = page.spans if page.sources == (of,) else next((spans for source, spans in page.parts if source == of), ())
    return bool(sentences) and all(any(start <= first and last <= stop for start, stop in kept) for first, last in sentences)


def packed(standing: Standing) -> list[list[int]]:
    """As numbers: each page, and the ends of its sentences."""
    return [[page, *(end for sentence in sentences for end in sentence)] for page, sentences in standing.items()]


def unpacked(rows: Iterable[Sequence[int]]) -> Standing:
    """The same from numbers.

    Raises:
        ValueError, TypeError: they are none.
    """
    return {int(page): tuple(zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True)) for page, *ends in rows}
