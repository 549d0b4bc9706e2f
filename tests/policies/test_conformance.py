"""Every policy that ships, alone and composed, against the public kit; and what a spec string may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from effort import FULL
from kilburn.errors import SpecError
from kilburn.kernel.resolve import names, resolve
from kilburn.move import Evict
from kilburn.policies.chain import Chain
from kilburn.policies.fifo import Fifo
from kilburn.policies.mask import Mask
from kilburn.policy import Policy, View
from kilburn.testing import Scripted, check_policy

SHIPPED = [name for name in names("policies") if name != "chain"]
SPECS = [
    "fifo(spare=0)",
    "mask(keep=0, least=200)",
    "importance(nearness=0.0, half_life=60.0)",
    "tiered(core=0)",
    "summarize(keep=0, ask=False)",
    "chain(preprocess, mask(keep=3), fifo)",
    "chain(summarize, lru)",
    "chain(mask, summarize)",
    "chain(chain(mask(keep=1)), tiered)",
    "memento(pairs=True, to=30)",
    "chain(memento(pairs=True, keep_last_n_blocks=2, delimiters=False), hybrid)",
    "chain(clear_thinking, clear_tool_uses(keep=0, clear_tool_inputs=True), compact(trigger=None, keep=1))",
    "agentfold(trigger=500, to=40)",
    "mem1(cap=20)",
    "chain(mem1, fifo)",
    "free(every=90, least=0)",
    "chain(free(every=150), hybrid)",
    "comem(every=1)",
]


@pytest.mark.parametrize("spec", [*SHIPPED, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS)])
def test_shipped_policies_keep_the_contract(spec: str) -> None:
    check_policy(lambda: resolve("policies", spec), windows=(300, 1200) if FULL else (300,), seeds=(3,))


@pytest.mark.slow
def test_a_policy_that_asks_keeps_the_contract_whatever_it_is_told() -> None:
    check_policy(
        lambda: resolve("policies", "summarize"),
        windows=(700,),
        seeds=(4,),
        model=Scripted(["", "read src/m1.py", "no " * 99] * 500),
    )


def test_the_needed_names_are_there() -> None:
    assert {"fifo", "lru", "importance", "tiered", "hybrid", "mask", "summarize", "preprocess", "chain"} <= set(names("policies"))


def test_specs_become_equal_objects() -> None:
    assert resolve("policies", "fifo") == Fifo()
    assert resolve("policies", " mask( keep = 5 , exclude=['read'] ) ") == Mask(keep=5, exclude=["read"])
    assert resolve("policies", "chain(mask(keep=5), fifo)") == Chain(Mask(keep=5), Fifo())
    assert resolve("policies", "kilburn.policies.fifo:Fifo") == Fifo()
    assert resolve("policies", "kilburn.policies.fifo:Fifo(spare=3)") == Fifo(spare=3)
    own = Fifo(spare=9)
    assert resolve("policies", own) is own


@pytest.mark.parametrize(
    "spec",
    [
        "fifo(3, 4)",
        "mask(keep=-1)",
        "mask(keep)",
        "chain(fifo, 3 + 4)",
        "nope(1)",
        "fifo()()",
        "fifo.plan",
        "a:b:c",
        "chain(*[])",
        "chain(3)",
        "chain('fifo')",
        "cost(trigger=-1)",
        "cost(tail='all')",
        "hybrid(low=-1)",
        "summarize(keep='x')",
        "free(cleaner=3)",
        "belady(future=3)",
    ],
)
def test_bad_specs_say_what_there_is(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve("policies", spec)
    assert str(caught.value).startswith("resolve: ")
    assert "(" in str(caught.value)


class Forgetful:
    """Keeps a count, so it is no plan of the view alone."""

    seen = 0

    def plan(self, view: View) -> list[Evict]:
        Forgetful.seen += 1
        pages = [page for page in view.pages if not view.is_latest(page)]
        return [Evict(view.free(pages if Forgetful.seen % 7 else pages[::-1], view.excess + 1))] if view.excess and pages else []


class Outlaw:
    """Evicts pins."""

    def plan(self, view: View) -> list[Evict]:
        return [Evict(tuple(view.pins))] if view.excess else []


class Broken:
    """Raises at each plan."""

    def plan(self, view: View) -> list[Evict]:
        raise RuntimeError("a typing error")


class Bare:
    """Returns a move where a list of moves belongs."""

    def plan(self, view: View) -> Evict:
        return Evict((1,))


@pytest.mark.parametrize("made", [Forgetful, Outlaw, Broken, Bare])
def test_the_kit_finds_what_breaks_it(made: Callable[[], Policy]) -> None:
    with pytest.raises(AssertionError):
        check_policy(made, windows=(300,), seeds=(1, 2))
