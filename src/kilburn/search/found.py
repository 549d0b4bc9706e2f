"""The result of a search: passages with their origin, age, validity and cost, and why they were found.

Found text is data with an origin, never a bare string (law 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kilburn.errors import DamageWarning
from kilburn.message import Trust
from kilburn.page import Claim, Place

__all__ = ["DamageWarning", "Findings", "Found"]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One hit.

    Args:
        session: the session's name; `address` is the page there, `span` the characters of its text.
        text: the passage, exactly.
        score: how well it matched; higher is better, comparable within one search.
        age: seconds since it was admitted, at the time that the search asks about.
        origin: who said it: "system", "user", "assistant", or "tool NAME".
        where: IN (in the window now) or below (OUT, FOLDED, STUB).
        tokens: what the text costs.
        speaker: the name of who said it, if it is known.
        time: when it was admitted, in seconds since the epoch.
        trust: how far it may be believed.
        since, until: when what it says is true, as far as that is known; `until` is None as long as it is.
        why: what its score is the sum of, by the names of the ranking's terms.
        claim: what a fact says, in parts; None for any other page.
        contested: facts that are true at the same time and contradict it, by their references; also those that did not fit.
        doubted: what was said since, after which a fact may be untrue, by its references; it comes before the fact if it fits.
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
    speaker: str | None = None
    time: float = 0.0
    trust: Trust = Trust.TOOL
    since: float | None = None
    until: float | None = None
    why: Mapping[str, float] = {}
    claim: Claim | None = None
    contested: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The address with the name of the session, as it is written for pages of other segments: `session-1 p17`."""
        return f"{self.session} {self.address}"


class Findings(list[Found]):
    """What a search found, best first; of one that may abstain, in reading order: as it was said, and facts best first.

    Where such a search found nothing that is likely to be an answer, it is empty and `abstained` is set: a plausible wrong
    passage is worse than none.

    Args:
        confidence: how likely it is that an answer is among the hits, 0 to 1, by a model of few figures that was fitted
            on questions with and without an answer; a guide, not a promise.
        withheld: the hits of which none is likely enough, in case a person wants to see them.
    """

    def __init__(self, hits: Iterable[Found], confidence: float, withheld: Iterable[Found] = ()) -> None:
        super().__init__(hits)
        self.confidence = confidence
        self.withheld = tuple(withheld)

    @property
    def abstained(self) -> bool:
        """Whether it withholds what it found."""
        return bool(self.withheld)

    @property
    def tokens(self) -> int:
        """What its texts cost."""
        return sum(hit.tokens for hit in self)

    def __repr__(self) -> str:
        """No text of a hit is in it."""
        return f"Findings({len(self)} hits, confidence={self.confidence:.2f}, abstained={self.abstained})"
