"""The result of a search: passages with their origin, age and cost.

Found text is data with an origin, never a bare string (law 7). Retired and forgotten pages are not among the hits,
and the token budget is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import msgspec

from kilburn.budget import Counter
from kilburn.errors import StoreCorrupt
from kilburn.kernel.kernel import Kernel
from kilburn.page import Place
from kilburn.store import Passage

__all__ = ["DamageWarning", "Found", "found"]


class DamageWarning(UserWarning):
    """A session or page was left out of a search because it is damaged; `kilburn fsck` says how."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One hit.

    Args:
        session: the process's name; `address` is the page there, `span` the characters of its text.
        text: the passage, exactly.
        score: how well it matched; higher is better, comparable within one search.
        age: seconds since it was admitted.
        origin: who said it: "system", "user", "assistant", or "tool NAME".
        where: IN (in the window now) or below (OUT, FOLDED, STUB).
        tokens: what the text costs.
    """

    session: str
    address: str
    span: tuple[int, int]
    text: str
    score: float
    age: float
    origin: str
    where: Place
    tokens: int


def found(passages: Sequence[Passage], kernels: Mapping[int, Kernel], counter: Counter, tokens: int, now: float) -> list[Found]:
    """The hits for passages, best first, as many as fit into `tokens`.

    Args:
        kernels: the kernels of the passages' processes, by their numbers in the store.
    """
    hits: list[Found] = []
    left = tokens
    for passage in passages:
        kernel = kernels[passage.process]
        page = kernel.window.pages.get(passage.page)
        if page is None or kernel.window.at(page.id) in (Place.DROPPED, Place.RETIRED):
            continue
        try:
            text = kernel.text(page.id)
        except StoreCorrupt as error:
            warnings.warn(
                f"not searched: {page.address} of session {kernel.info.name!r}: {error.what}", DamageWarning, stacklevel=3
            )
            continue
        if passage.span[1] > len(text):
            continue  # the index is damaged, which `fsck` reports
        text = text[slice(*passage.span)]
        cost = counter.count(text)
        if cost > left:
            continue
        left -= cost
        tool = kernel.window.pages[page.answers].name if page.answers else None
        hits.append(
            Found(
                session=kernel.info.name,
                address=page.address,
                span=passage.span,
                text=text,
                score=passage.score,
                age=max(0.0, now - page.time),
                origin=f"tool {tool}" if tool else str(page.role),
                where=kernel.window.at(page.id),
                tokens=cost,
            )
        )
    return hits
