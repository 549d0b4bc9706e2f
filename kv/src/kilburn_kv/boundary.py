"""The kv boundary: a budget of cached tokens for one window, and a policy that sees pages there.

The same policies as at the window's boundary decide. A page that they evict here loses only its keys and values. It
stays in the window, and can be computed again. Folds are refused here, because they change the window. If a policy
does not free enough, the oldest pages are evicted.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kilburn.budget import Budget
from kilburn.effect import Answer, Effect, Note, Outcome
from kilburn.errors import BudgetTooSmall, SpecError
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.move import Evict, Move
from kilburn.policy import Cause, Policy, View
from kilburn_kv.table import Table

ROUNDS = 4
"""Times a policy is asked for one shortage, at most."""

EFFECTS = 64
"""Effects that a policy may yield for one plan. No effect is answered here, so a policy that repeats them would never
end."""


class Relief(msgspec.Struct, frozen=True):
    """Pages whose keys and values have to leave, which policy chose them, and why; `refused` says which of its moves
    were refused."""

    pages: tuple[int, ...]
    policy: str
    why: str = ""
    refused: str = ""


class Boundary:
    """A policy at the kv boundary of one session.

    Args:
        tokens: that may be cached.
        policy: a spec or an object with `plan`.

    Raises:
        SpecError: no such policy, or a budget below 1.
    """

    def __init__(self, tokens: int, policy: Any = "lru") -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise SpecError(f"a KV budget of {tokens} tokens holds nothing", advice="give a whole number, 1 or more")
        self.tokens = tokens
        self.name = policy if isinstance(policy, str) else type(policy).__name__.lower()
        self.policy: Policy = resolve("policies", policy)

    def relief(self, session: Session, table: Table, need: int) -> list[Relief]:
        """The pages that have to leave so that `need` more tokens fit; none if they fit already.

        Raises:
            BudgetTooSmall: the pages that must stay leave no room for them.
        """
        use, room = len(table), self.tokens - need
        if use <= room:
            return []
        seen = session.edits.view(Cause.PRESSURE)
        cached = {page: table.count(*borders) for page, borders in table.pages.items().items()}
        whole = {page.id: page for page in seen.pages}
        view = replace(
            seen,
            pages=tuple(msgspec.structs.replace(whole[page], tokens=count) for page, count in cached.items() if page in whole),
            boundary="kv",
            stubs=frozenset(),
            group=lambda page: (page,),
            handle=0,
            deferred=None,
        )
        made: list[Relief] = []
        for _ in range(ROUNDS):
            if use <= room or room < 1:
                break
            relief = self._ask_policy(replace(view, budget=Budget(room), use=use))
            made.append(relief)
            if not relief.pages:
                break
            use -= sum(cached[page] for page in relief.pages)
            view = replace(view, pages=tuple(page for page in view.pages if page.id not in relief.pages))
        if use > room:
            made.append(self._evict_oldest(view, use, room, need))
        return made

    def _ask_policy(self, view: View) -> Relief:
        plan = self.policy.plan(view)
        moves: Sequence[Move] | None = _run_plan(plan) if isinstance(plan, Generator) else plan or ()
        if moves is None:
            return Relief((), self.name, refused=f"more than {EFFECTS} questions: the cache waits for no model")
        held, there = view.held(), {page.id for page in view.pages}
        wanted: dict[int, None] = {}
        why = ""
        for move in moves:
            if not isinstance(move, Evict):
                return Relief((), self.name, refused=f"{type(move).__name__.lower()}: only pages can leave the cache")
            if lost := [page for page in move.pages if page not in there or page in held]:
                return Relief((), self.name, refused=f"page {lost[0]} is not cached, or has to stay")
            wanted.update(dict.fromkeys(move.pages))
            why = why or move.why
        return Relief(tuple(wanted), self.name, why)

    def _evict_oldest(self, view: View, use: int, room: int, need: int) -> Relief:
        held = view.held()
        chosen: list[int] = []
        for page in view.pages:
            if use <= room:
                break
            if page.id not in held:
                chosen.append(page.id)
                use -= page.tokens
        if use > room:
            raise BudgetTooSmall(
                f"{need} tokens more do not fit a KV budget of {self.tokens}: {use} cannot leave it",
                advice="give more, unpin something, or keep less in the window",
            )
        return Relief(tuple(chosen), "kernel", "the policy left too much")


def _run_plan(plan: Generator[Effect, Answer, Sequence[Move]]) -> Sequence[Move] | None:
    """Run a plan. Its questions get the outcome "none", because the cache does not wait for a model; None if it goes on
    asking."""
    try:
        effect = next(plan)
        for _ in range(EFFECTS):
            effect = plan.send(Answer(outcome=Outcome.DONE if isinstance(effect, Note) else Outcome.NO_MODEL))
        return None
    except StopIteration as stop:
        moves: Sequence[Move] = stop.value or ()
        return moves
    finally:
        plan.close()
