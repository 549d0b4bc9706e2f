"""Several policies at one boundary, in order: `chain(preprocess, mask(keep=3), fifo)`.

Each gets the same view. A move of a later policy is left out if it touches a page, or a group, that an earlier policy
moves. If the window is still over its capacity, all are asked again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain

from kilburn.effect import Answer, Effect
from kilburn.move import Move
from kilburn.page import Page
from kilburn.policy import Policy, View


class Chain:
    """Ask policies in order and join their moves.

    Args:
        policies: at least one.
    """

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise ValueError("a chain needs at least one policy")
        strange = next((policy for policy in policies if not isinstance(policy, Policy)), self)
        if strange is not self:
            raise ValueError(f"{strange!r} in a chain is no policy")
        self.policies = policies
        self.max_depth = max(int(getattr(policy, "max_depth", 1)) for policy in policies)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.policies == other.policies

    def __hash__(self) -> int:
        return hash(self.policies)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.policies))})"

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        """Return the moves of all policies, except those that would touch a page twice."""
        joined: list[Move] = []
        touched: set[int] = set()
        derived = [page for page in view.pages if page.depth]
        for policy in self.policies:
            plan = policy.plan(view)
            moves: Sequence[Move] = (yield from plan) if isinstance(plan, Generator) else plan
            policy_pages: set[int] = set()
            for move in moves:
                # Two moves share a group if one names a page of a group that the other touches. Moves of the same
                # policy may share one. They depend on each other, so if one is left out, those that need it are left
                # out too.
                standing = _standing_for(derived, move)
                together = chain.from_iterable(map(view.group, chain(move.pages, standing)))
                if not touched or touched.isdisjoint(together):
                    joined.append(move)
                    policy_pages.update(move.pages, standing)
                else:
                    touched.update(move.pages, standing)
            touched |= policy_pages
        return joined


def _standing_for(derived: Sequence[Page], move: Move) -> set[int]:
    """Resident derived pages that leave with their sources: a new fold takes the place of the old one."""
    if not derived:
        return set()
    sources = set(move.pages)
    return {page.id for page in derived if not sources.isdisjoint(page.sources)}
