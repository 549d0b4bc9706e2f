"""Presses on a real model: what it still answers, and how well it goes on, when its cache holds a part of the context.

Contexts of pages with planted facts (`press_curves.needles`) are prefilled once. Each press then makes
each budget of a fork of that very cache, and the same tokens are read behind all of them: how the last
page goes on, and a question with its answer. The question is asked twice: of a cache that was pressed
before it was known, and of one that was pressed when it stood at the end, as SnapKV has it. An answer is
right where each of its tokens is the most probable one, which is what greedy decoding says.
No press is told where the answer stands.

    report = evaluate(load(find("smollm2")), library(), Setting(cases=8))
    print(report.table())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kilburn.errors import BudgetTooSmall, MissingExtra, SpecError
from kilburn_kv.compression import compress
from kilburn_kv.engine import Engine
from kilburn_kv.observation import Press
from kilburn_kv.presses import press as press_of
from kilburn_kv.sequence import CachedSequence as Cached
from kilburn_kv.weights import Weights
from press_curves.needles import Case, Passage, case_of, excerpts, frame_of, summary
from press_curves.report import FULL, OURS, TEXTS, WHENS, Pressed, PressResult

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "torch") from error


RESTARTS: dict[str, Callable[[Case, int, Weights, str], str]] = dict(zip(TEXTS, (summary, excerpts), strict=True))
"""What stands in place of the context after a restart, by the text that is written."""

UNTOLD = "untold"
"""The page-aware press that is told of no page's state."""

PRESSES = (FULL, "window", "streaming", "h2o", "snapkv", "keynorm(window=32)", *RESTARTS, UNTOLD, OURS)
BUDGETS = (1.0, 0.5, 0.25, 0.125)

TAIL = 32
"""Last tokens that a restart keeps word for word behind its summary, as many as the presses' windows have."""

LATER, FIRST = WHENS


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How it is measured.

    Args:
        cases: contexts, with one question each.
        seed: for what they are made of.
        budgets: shares of the tokens that are cached when the press acts.
        presses: specs of presses, or one of `RESTARTS`, or "untold"; the full cache is always measured.
        tokens: of a context, about.
        rest: tokens that the last page goes on with; all but the first are scored.

    Raises:
        SpecError: a number that means nothing, or no such press.
    """

    cases: int = 48
    seed: int = 0
    budgets: Sequence[float] = BUDGETS
    presses: Sequence[str] = PRESSES
    tokens: int = 1024
    rest: int = 64

    def __post_init__(self) -> None:
        if self.cases < 1 or self.tokens < 1 or self.rest < 2:
            raise SpecError(f"{self.cases} cases of {self.tokens} tokens, {self.rest} held out", advice="give 1, 1 and 2 or more")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise SpecError(f"a budget of {budget:g}", advice="give shares of the context, above 0 and up to 1")
        if not self.budgets or not self.presses:
            raise SpecError("no budget, or no press, to measure")
        for name in self.presses:
            _way(name)


@dataclass(frozen=True)
class _Way:
    """What makes a smaller cache: a press, or a restart where there is none."""

    name: str
    press: Press | None
    told: bool = True


def _way(name: str) -> _Way:
    if name in RESTARTS:
        return _Way(name, None)
    return _Way(name, press_of(OURS), told=False) if name == UNTOLD else _Way(name, press_of(name))


def evaluate(
    weights: Weights,
    documents: Sequence[Sequence[Passage]],
    setting: Setting | None = None,
    *,
    name: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Pressed:
    """Measure each press at each budget.

    Args:
        documents: the real text, e.g. `library()`.
        name: of the model, for the report.
        progress: called with how many cases are done, and of how many.

    Raises:
        SpecError: no tokenizer, or one that makes one token of an answer; documents with too little text.
        BudgetTooSmall: a budget that does not hold what a press must keep.
    """
    chosen = setting or Setting()
    ways = [_way(each) for each in dict.fromkeys(chosen.presses) if each != FULL]
    budgets = sorted(set(chosen.budgets), reverse=True)
    frame = frame_of(weights.tokenizer)
    # The context twice, and a cache of each way at a time, with what is read behind it and copied while it is pressed.
    share = max((budget for budget in budgets if budget < 1), default=0.0) + 0.5
    engine = Engine(weights, round((chosen.tokens + chosen.rest + 800) * (3 + share * len(ways))), share=False)
    outcomes: list[PressResult] = []
    for number in range(chosen.cases):
        case = case_of(documents, weights, frame, number, tokens=chosen.tokens, rest=chosen.rest, seed=chosen.seed)
        outcomes += _Trial(engine, case, ways, number).outcomes(budgets)
        if progress is not None:
            progress(number + 1, chosen.cases)
    names = [FULL, *(way.name for way in ways)]
    return Pressed.of(outcomes, names, budgets, model=name, cases=chosen.cases, tokens=chosen.tokens, seed=chosen.seed)


class _Trial:
    """One case: its context is prefilled once, its question once behind that; all else is forked from there."""

    def __init__(self, engine: Engine, case: Case, ways: Sequence[_Way], number: int) -> None:
        if len(case.answer) < 2:
            raise SpecError("this tokenizer makes one token of an answer", advice="use a model that reads digits apart")
        self.engine, self.case, self.ways, self.number = engine, case, ways, number
        presses = [way.press for way in ways if way.press is not None]
        needs = frozenset[str]().union(*(press.needs for press in presses))
        rows = max((press.recent for press in presses if "recent" in press.needs), default=0)
        self.base = engine.open(case.prompt, needs=needs, recent=rows)
        for page, start, stop in case.ranges:
            self.base.table.label(page, start, stop)
        self.asked = engine.fork(self.base)
        engine.prefill(self.asked, case.question)

    def outcomes(self, budgets: Sequence[float]) -> Iterator[PressResult]:
        """Of the full cache, and then of all ways at each budget."""
        full = {when: self._scored(when, [(FULL, 1.0, self._copy(when))])[0] for when in WHENS}
        yield from full.values()
        for budget in budgets:
            for when in WHENS:
                smaller = []
                for way in self.ways:
                    made = self._made(way, budget, when)
                    if made is None:
                        # Nothing left: it is the full cache.
                        yield msgspec.structs.replace(full[when], way=way.name, budget=budget)
                    else:
                        smaller.append((way.name, budget, made))
                yield from self._scored(when, smaller)
        self.engine.free(self.base)
        self.engine.free(self.asked)

    def _copy(self, when: str) -> Cached:
        return self.engine.fork(self.base if when == LATER else self.asked)

    def _made(self, way: _Way, budget: float, when: str) -> Cached | None:
        """The cache that a way leaves, or None where it left all of it."""
        tokens = int(budget * len(self.base if when == LATER else self.asked))
        if way.press is None:
            return self._restarted(way.name, tokens, when) if budget < 1 else None
        copy = self._copy(when)
        if compress(self.engine, copy, way.press, tokens, self.case.facts if way.told else {}):
            return copy
        self.engine.free(copy)
        return None

    def _restarted(self, name: str, budget: int, when: str) -> Cached:
        """A new sequence: the pinned page, a summary of the others, the last tokens; and the question where it is known."""
        case, weights = self.case, self.engine.weights
        first, last = list(case.leaves[0].tokens), case.prompt[-TAIL:]
        if when == FIRST:
            last += case.question
        room = budget - len(first) - len(last)
        if room < 1:
            raise BudgetTooSmall(
                f"{name} cannot keep {budget} tokens: it must keep {len(first) + len(last) + 1}", advice="raise the budget"
            )
        text = RESTARTS[name](case, room, weights, case.asked if when == FIRST else "")
        return self.engine.open([*first, *weights.tokens(text)[:room], *last])

    def _scored(self, when: str, made: Sequence[tuple[str, float, Cached]]) -> list[PressResult]:
        """Read the answer behind each cache, in one batch; before the question also how the text goes on. They are freed."""
        if not made:
            return []
        engine, case = self.engine, self.case
        caches = [cache for _, _, cache in made]
        for cache in caches:
            # It is not pressed again, and attention that is not observed runs several times faster.
            cache.watch = None
        rest: list[float | None] = [None] * len(caches)
        if when == LATER:
            ends = [cache.end for cache in caches]
            rest = [-float(row.logs.mean()) for row in _read(engine, caches, case.rest, len(case.rest) - 1)]
            for cache, end in zip(caches, ends, strict=True):
                engine.truncate(cache, end)
            rows = _read(engine, caches, (*case.question, *case.answer), len(case.answer))
        else:
            begun = [_judged(engine.refresh(cache)[None], case.answer[:1]) for cache in caches]
            rows = [
                _Read(torch.cat((head.logs, row.logs)), head.right and row.right)
                for head, row in zip(begun, _read(engine, caches, case.answer, len(case.answer) - 1), strict=True)
            ]
        for cache in caches:
            engine.free(cache)
        return [
            PressResult(
                case=self.number,
                kind=case.kind,
                when=when,
                way=way,
                budget=budget,
                right=row.right,
                logprob=float(row.logs.mean()),
                rest=nats,
            )
            for (way, budget, _), row, nats in zip(made, rows, rest, strict=True)
        ]


class _Read(NamedTuple):
    """Log-probabilities of tokens, in nats, and whether each of them was the most probable one."""

    logs: Tensor
    right: bool


def _judged(logits: Tensor, tokens: Sequence[int]) -> _Read:
    wanted = torch.tensor(tokens, device=logits.device)
    logs = logits.float().log_softmax(-1)
    return _Read(logs.gather(1, wanted[:, None])[:, 0], bool((logs.argmax(-1) == wanted).all()))


def _read(engine: Engine, caches: Sequence[Cached], tokens: Sequence[int], scored: int) -> list[_Read]:
    """Take the tokens behind each cache, in one pass, and judge the last `scored`; the last token itself is not taken.

    A step gives the logits of the next token alone, so the decoder's last states are caught on their way to the head.
    """
    model = engine.weights.model
    caught: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda module, given, made: caught.append(made[0][0]))
    try:
        engine.step([(cache, tokens[:-1]) for cache in caches])
    finally:
        hook.remove()
    with torch.inference_mode():
        states = caught[0].view(len(caches), len(tokens) - 1, -1)[:, -scored:]
        return [_judged(model.get_output_embeddings()(row), tokens[-scored:]) for row in states]
