"""Standing orders of a session: the sentences of the user that stay in the window, as `kilburn.selection.orders` recognizes them.

Each message is classified once, when it is admitted. Orders have a separate budget of an eighth of the window and a hundred
messages. Within the budget, newer orders have priority over older ones, and short ones over long ones, so a large new text does
not displace an order of a few words. An order replaces an older one with the same topic. A short message stays whole; a longer
message is replaced by an excerpt with its orders when it is evicted. No policy can move orders, and the kernel removes them only
if pins and open calls take all the room. A person ends an order by evicting, retiring or forgetting its page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kilburn.page import Page, Span

if TYPE_CHECKING:
    from kilburn.kernel.window import WindowState

Standing = Mapping[int, tuple[Span, ...]]
"""Pages, oldest first, each with the spans of its orders."""

SHARE = 8
"""The share of the window that all orders may take: an eighth."""

MAX_PAGES = 100
"""Messages with orders that stay at most, so that a turn costs the same however much a user orders."""

SMALL = 64
"""Tokens up to which the orders of a message come before those of a message with more."""

FRAME = 24
"""Tokens of what stands around an excerpt."""

_COMMON = (
    "a an the to of in on at for and or but so do don t not no never always ever only please you must should shall may can could"
    " now again still from then is are be it s ok okay fine allowed longer use instead rather than i want rule note remember make"
    " sure that my your this all any yet anymore more forward going forget ignore drop disregard order about"
    " ab auf bitte darfst das dem den der die du ein eine immer jetzt kannst kein keine merk nicht nie niemals noch nun nur sie"
    " sofort stets und von wieder ahora al de el en favor la las los nuevo nunca otra partir por puedes recuerda siempre un una"
    " vez ya au aux désormais dorénavant du jamais l le les maintenant n ne nouveau pas peux plaît plus il te toujours tu à"
    " adesso agora d ora il já mai não per pode podes poi più puoi sempre altijd het je mag meer niet nooit vanaf voortaan"
    " weer больше в всегда можно на не никогда снова теперь"
)
_FUNCTION_WORDS = frozenset(_COMMON.split())
"""Words in which two orders about the same may differ."""

_ENDING = re.compile(r"(?<=\w{3})(?:ing|ed|[aeio]r|re|ть|[aeiosnrй])+$")
"""The endings of a word that vary between an order and its opposite: "borres" and "borrar"."""

_LANGUAGE = re.compile(
    r"alem[aáã]\w{1,2}|allemand|anglais|chin(?:ese|es|ês|ois|ese)|cinese|chinesisch|deutsch\w*|dutch|duits|engels|engli[sś]\w+"
    r"|espa[gñ]n?h?ol|fran[cç]ais|franc(?:és|ês|ese)|französisch|frans|french|german|hollandais|holandés|ingl(?:és|ês|ese)"
    r"|italian[oa]?|italien|italienisch|japanese|japanisch|japon(?:ais|és|ês)|nederlands|niederländisch|portugu\w+|russian|russe"
    r"|russisch|russo|spanish|spanisch|tedesco|английск\w+|англійськ\w+|немецк\w+|німецьк\w+|русск\w+|російськ\w+|українськ\w+"
)
"""Names of languages. An order to write in another one replaces the earlier."""

_NEGATIONS = {"don", "no", "not", "never", "nie", "niemals", "nicht", "kein", "keine", "nunca", "jamais", "ne", "non", "mai"}
_NEGATIONS |= {"não", "nooit", "niet", "не", "никогда"}
"""Words of a prohibition."""

_UNSPACED = re.compile(r"[请記记住以后後再要别不从現现在起可了，。！？\s]+")
"""Function words in Chinese, and punctuation."""


def update_standing(
    new: Sequence[tuple[Page, str, Sequence[Span]]],
    previous: Standing,
    pages: Mapping[int, Page],
    capacity: int,
    free: Iterable[int],
    text_of: Callable[[int], str],
) -> Standing:
    """Return the orders that stay once these pages are admitted.

    Args:
        new: new pages of the user, each with its text and the orders recognized in it. previous: the orders so far. pages: the
            pages of the session.
        free: pages that are excluded, because they are pinned or were removed.
        text_of: returns the text of an older page with orders.
    """
    unavailable = set(free)
    orders = {number: spans for number, spans in previous.items() if number not in unavailable}
    topics: list[tuple[_Topic, int, Span]] = []
    for page, text, spans in new:
        if page.id in unavailable:
            continue
        if spans and not topics:
            topics = [(_topic(text_of(number), span), number, span) for number in orders for span in orders[number]]
        for span in spans:
            topic = _topic(text, span)
            for rival in [rival for rival in topics if rival[0].is_same(topic)]:
                # The newer order with the same topic replaces it.
                _, number, older = rival
                orders[number] = tuple([order for order in orders[number] if order != older])
                topics.remove(rival)
            orders[page.id] = (*orders.get(page.id, ()), span)
            topics.append((topic, page.id, span))
    added = {page.id: page for page, _, _ in new}
    tokens = {number: (added.get(number) or pages[number]).tokens for number in orders}
    large = {number for number, spans in orders.items() if min(tokens[number], excerpt_tokens(spans)) > SMALL}
    room, chosen = capacity // SHARE, dict[int, tuple[Span, ...]]()
    for number in sorted(orders, key=lambda number: (number in large, -number)):
        spans = orders[number]
        while spans and min(tokens[number], excerpt_tokens(spans)) > room:
            spans = spans[:-1]
        if spans and len(chosen) < MAX_PAGES:
            room -= min(tokens[number], excerpt_tokens(spans))
            chosen[number] = spans
    return dict(sorted(chosen.items()))


class _Topic(NamedTuple):
    """The topic of an order.

    Args:
        stems: its content words without endings, except names; all words if it has no content words.
        words: the same with endings.
        others: its function words.
    """

    stems: frozenset[str]
    words: frozenset[str]
    others: frozenset[str]

    def is_same(self, other: _Topic) -> bool:
        """Return whether another order has the same topic. Endings may differ between an order and its opposite. Two orders with
        the same function words whose content words end differently ("core", "cors") have two topics, as have prohibitions of
        two languages."""
        if self.stems != other.stems:
            return False
        return (
            self.words == other.words
            or self.others != other.others
            or ("language" in self.stems and not self.others & _NEGATIONS)
        )


def _topic(text: str, span: Span) -> _Topic:
    """Return the topic of the order at this span of a text."""
    sentence = text[slice(*span)]
    every = re.findall(r"\w+", sentence)
    names = {word.lower() for word in every[1:] if word.istitle()}
    words = {word.lower() for word in every}
    others = words & _FUNCTION_WORDS
    content = words - others
    stems = {"language" if _LANGUAGE.fullmatch(word) else word if word in names else _ENDING.sub("", word) for word in content}
    if len(every) == 1 or not any(map(str.isascii, words)):
        stems = content = {part for stem in stems for part in _UNSPACED.split(stem) if part}
    return _Topic(frozenset(stems or words), frozenset(content or words), frozenset(others))


def excerpt_tokens(sentences: Sequence[Span]) -> int:
    """Estimate the tokens of an excerpt with these sentences."""
    return FRAME + sum(stop - start for start, stop in sentences) // 3


def stays_whole(page: Page, sentences: Sequence[Span]) -> bool:
    """Whether a page takes no more room than an excerpt of its orders."""
    return page.tokens <= excerpt_tokens(sentences)


def shows(page: Page, of: int, sentences: Sequence[Span]) -> bool:
    """Whether a page shows these sentences of page `of`: it is that page, or an excerpt with them."""
    if page.id == of:
        return True
    kept = page.spans if page.sources == (of,) else next((spans for source, spans in page.parts if source == of), ())
    return bool(sentences) and all(any(start <= first and last <= stop for start, stop in kept) for first, last in sentences)


def order_pages(window: WindowState) -> list[int]:
    """Return the pages in the prompt that show the standing orders. Of a long message that is an excerpt; the whole message may
    leave."""
    return [
        standing
        for page, sentences in window.orders.items()
        if (standing := window.stands_itself(page)) is not None
        and (standing < 0 or stays_whole(window.pages[page], sentences))
        and shows(window.pages[standing], page, sentences)
    ]


def reminder(window: WindowState) -> int | None:
    """Return the newest copy in the prompt whose sources are all pages with standing orders, or None."""
    copies = map(window.pages.__getitem__, sorted(window.copies()))
    return next((page.id for page in copies if all(source in window.orders for source in page.sources)), None)


def packed(standing: Standing) -> list[list[int]]:
    """As numbers: each page, and the ends of its sentences."""
    return [[page, *(end for sentence in sentences for end in sentence)] for page, sentences in standing.items()]


def unpacked(rows: Iterable[Sequence[int]]) -> Standing:
    """The same from numbers.

    Raises:
        ValueError, TypeError: they are none.
    """
    return {int(page): tuple(zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True)) for page, *ends in rows}
