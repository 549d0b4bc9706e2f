"""Reasoning Cache (arXiv 2602.03773): reasoning in rounds, where only a summary leads from one to the next; reward on reasoning.

    python lab/recipes/reasoning_cache.py --out trained/reasoning_cache

A problem is a chain of additions modulo ten. A round's trace has room for two steps of it, or for one and the answer. Then a
fixed rule writes the summary: the last step and where it led, or the answer. The next round sees the problem and that summary
alone. The demonstrator of the first stage is a poor one. It shows no chain, only rounds in the midst of one; it is wrong six
times in ten where a sum is ten, and takes back an answer four times in ten. The second stage pays the right answer after three
rounds, and learns from the reasoning's tokens only. Measured are twelve rounds, with chains up to four times as long.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

import msgspec
from torch import Tensor

import kilburn
from kilburn.cli.shell import main
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Model, Reply, Request
from kilburn_lab.reasoning_cache import Reasoning, ReasoningCache, RoundPrompts, Schedule
from kilburn_lab.training.course import Chance, TrainingRun
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, advantages, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate
from kilburn_lab.training.words import AGENT, USER, WordTokenizer

MODULUS, LONGEST, ROUNDS, LATER = 10, 24, 3, 12
"""The longest chain, in steps, of which the answer is one; rounds of a roll-out in training; rounds that are measured."""
TRACE, SUMMARY, GROUP, SLIP, DOUBT = 8, 3, 8, 0.6, 0.4
"""Tokens of a trace and of a summary at most; roll-outs of one problem; how often the demonstrator is wrong where a sum is ten,
and how often he takes back an answer."""
LABELS = [f"s{number}" for number in range(1, LONGEST + 1)]
ADDED = ["+1", "+2", "+3", "+4"]
WORDS = WordTokenizer("reasoning_cache", ["from", "end", "so", "\\boxed{", "}", *map(str, range(MODULUS)), *ADDED, *LABELS])
WARM = 0.7
PROMPTS = RoundPrompts(reason="{problem}", resume="{problem} {summary}", summarise="{problem}\n{summary}\n{trace}")


class Problem(msgspec.Struct, frozen=True):
    """A chain: where it begins, and what each step adds."""

    first: int
    added: tuple[int, ...]

    @property
    def text(self) -> str:
        """What is asked."""
        steps = [f"{label} +{added}" for label, added in zip(LABELS, self.added, strict=False)]
        return " ".join([f"from {self.first}", *steps, f"{LABELS[len(self.added)]} end"])

    @property
    def answer(self) -> str:
        """What comes out."""
        return str((self.first + sum(self.added)) % MODULUS)


def draw(chance: random.Random, steps: int) -> Problem:
    """A problem of so many steps, the answer included."""
    return Problem(chance.randrange(MODULUS), tuple(chance.randint(1, 4) for _ in range(steps - 1)))


def prompt_of(problem: Problem, summary: str) -> list[int]:
    """What the agent shows the model in a round, as tokens. A test compares it with the agent's own."""
    return [USER, *WORDS.encode(f"{problem.text} {summary}"), AGENT]


def answered(trace: str) -> str:
    """The answer of a trace, or ""."""
    words = trace.split()
    at = [number for number, word in enumerate(words) if word == "\\boxed{"]
    return words[at[-1] + 1] if at and words[at[-1] + 2 : at[-1] + 3] == ["}"] else ""


def summarised(summary: str, trace: str) -> str:
    """The fixed rule: the answer of the trace, else its last whole step and where that led, else the old summary."""
    if answer := answered(trace):
        return f"so {answer}"
    words = trace.split()
    for label, added, led in zip(words[-3::-1], words[-2::-1], words[::-1], strict=False):
        if label in LABELS and added in ADDED and led.isdigit():
            return f"{label} {led}"
    return summary


def reasoned(problem: Problem, summary: str, chance: random.Random | None = None) -> list[int]:
    """The trace of a round that begins with this summary, as tokens: of a poor demonstrator, or without a chance of one who is
    always right."""

    def slips(often: float) -> int:
        return int(chance is not None and chance.random() < often)

    known, _, value = summary.partition(" ")
    if known == "so":
        return WORDS.reply(f"\\boxed{{ {(int(value) + slips(DOUBT)) % MODULUS} }}")[:TRACE]
    at, now, said = LABELS.index(known) + 1 if known else 0, int(value) if known else problem.first, list[str]()
    for number in range(at, min(at + 2, len(problem.added) + 1)):
        if number == len(problem.added):
            said.append(f"{LABELS[number]} end \\boxed{{ {now} }}")
        else:
            now += problem.added[number]
            now = (now + (now == MODULUS and slips(SLIP))) % MODULUS
            said.append(f"{LABELS[number]} +{problem.added[number]} {now}")
    return WORDS.reply(" ".join(said))[:TRACE]


def flawless(problem: Problem, *, blank: bool = False) -> list[tuple[str, str]]:
    """The measured rounds of one who is always right: of each, the summary with which it begins, and its trace."""
    summary, made = "", list[tuple[str, str]]()
    for _ in range(LATER):
        made.append((summary, WORDS.decode(reasoned(problem, summary))))
        summary = "" if blank else summarised(*made[-1])
    return made


def midst(chance: random.Random) -> tuple[Problem, str]:
    """A problem of any length, and a summary from the midst of it, or with an answer."""
    steps = chance.randint(2, LONGEST)
    problem, at, value = draw(chance, steps), chance.randrange(steps), chance.randrange(MODULUS)
    return problem, f"so {value}" if chance.random() < 0.15 else f"{LABELS[at - 1]} {value}" if at else ""


def supervised(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on demonstrations: rounds in the midst of a chain."""
    rounds = [midst(chance.worlds) for _ in range(64)]
    return sft_loss(model, [(prompt_of(*one), reasoned(*one, chance.worlds)) for one in rounds]), {}


Rounds = Mapping[int, tuple[str, str]]
"""Of some problems, by their numbers: the summary with which a round began, and its trace."""


def ruled(rounds: Rounds) -> dict[int, str]:
    """What the fixed rule writes of rounds."""
    return {number: summarised(*each) for number, each in rounds.items()}


def drawn(chance: random.Random, groups: int) -> list[Problem]:
    """Problems for roll-outs, each as often as a group has them."""
    return [one for _ in range(groups) for one in [draw(chance, chance.randint(2, 2 * ROUNDS))] * GROUP]


def rolled(
    model: Transformer, problems: Sequence[Problem], chance: Chance, write: Callable[[Rounds], Mapping[int, str]] = ruled
) -> tuple[list[list[Row]], list[float]]:
    """The rounds of a roll-out of each problem, and whether its last answer is right.

    Args:
        write: writes the summaries of rounds; of a problem that it leaves out, the old one stays.
    """
    rows: list[list[Row]] = [[] for _ in problems]
    summaries, answers = [""] * len(problems), [""] * len(problems)
    for left in reversed(range(ROUNDS)):
        prompts = [prompt_of(*pair) for pair in zip(problems, summaries, strict=True)]
        traces = generate(model, prompts, TRACE, temperature=1.0, chance=chance.sampling)
        said: dict[int, tuple[str, str]] = {}
        for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
            rows[number].append((prompt, trace))
            if text := WORDS.decode(trace):
                answers[number] = answered(text) or answers[number]
                said[number] = summaries[number], text
        if left and said:
            for number, summary in write(said).items():
                summaries[number] = summary
    return rows, [float(answer == problem.answer) for answer, problem in zip(answers, problems, strict=True)]


def paid(model: Transformer, turns: Sequence[Sequence[Row]], rewards: Sequence[float]) -> Tensor:
    """The loss of roll-outs, of which those of one problem stand together: what was said, by what was paid at the end."""
    weighed = [(row, weight) for rows, weight in zip(turns, advantages(rewards, GROUP), strict=True) for row in rows if weight]
    told = [row for row, _ in weighed] or list(turns[0])
    return policy_loss(model, told, [weight for _, weight in weighed] or [0.0] * len(told))


def reinforced(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on what the model itself tried: groups of roll-outs of one problem, paid at their end. A summary is in prompts
    alone, so nothing of it is learned."""
    turns, rewards = rolled(model, drawn(chance.worlds, 24), chance)
    return paid(model, turns, rewards), {"reward": fmean(rewards)}


class Rule:
    """The fixed rule as a model of the product.

    Args:
        blank: whether it says nothing, for the ablation.
    """

    form, name, context, tokenizer = "chat", "rule", None, WORDS

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The summary, of a prompt that `PROMPTS` made."""
        _, summary, trace = str(request.messages[0]["content"]).split("\n")
        text = "" if self.blank else summarised(summary, trace)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)), finish=Finish.STOP)


def played(model: Model, summariser: Model, problem: Problem, warm: float = WARM, seed: int = 0) -> Reasoning:
    """The problem through the product's agent, its caps and its ledger."""
    with kilburn.open(":memory:", window=4000, tokenizer=WORDS, embedder=None) as store:
        schedule = Schedule(rounds=LATER, reason=TRACE, summary=SUMMARY, temperature=warm, seed=seed)
        session = store.session("rounds")
        return ReasoningCache(model, session, schedule, summariser=summariser, prompts=PROMPTS).run(problem.text)


def by_round(problem: Problem, made: Reasoning) -> list[bool]:
    """Whether the answer is right after each round: that of the latest round that has one."""
    answers = accumulate((one.answer for one in made.rounds), lambda before, after: after or before)
    return [answer == problem.answer for answer in answers]


def measured(
    course: TrainingRun, arm: str, model: Model, summariser: Model, lengths: Sequence[int], warm: float = WARM
) -> Figures:
    """Right answers after some numbers of rounds, for chains of these lengths; the curve over all rounds goes into a ledger."""
    chance = course.chance("measure").worlds
    runs = [
        (one, played(model, summariser, one, warm, chance.getrandbits(30))) for one in (draw(chance, each) for each in lengths)
    ]
    right = [fmean(found) for found in zip(*(by_round(*run) for run in runs), strict=True)]
    lines = [{"step": number, "right": share, "seconds": 0.0} for number, share in enumerate(right, 1)]
    course.ledger(f"{arm}, by round").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    found = {(arm, f"right by round {number}"): right[number - 1] for number in (1, ROUNDS, 6, 9, LATER)}
    return found | {(arm, "best less last"): max(right) - right[-1]}


def train(course: TrainingRun) -> Figures:
    """Demonstrations, then reward; a control that goes on with demonstrations, and one that begins with reward."""
    first, later = (60, 3) if course.smoke else (200, 60)
    course.train("demonstrations", first, supervised, rate=4e-3)
    course.train("demonstrations again", later, supervised, rate=1e-3, begin="demonstrations")
    course.train("reward", later, reinforced, rate=1e-3, begin="demonstrations")
    course.train("reward alone", later, reinforced, rate=1e-3)
    arms = ("demonstrations", "demonstrations again", "reward", "reward alone")
    models, rule = {arm: Toy(str(course.checkpoint(arm))) for arm in arms}, Rule()
    lengths = [2, 6, 24] if course.smoke else [*range(2, LONGEST + 1)] * 2
    found = {key: value for arm in arms for key, value in measured(course, arm, models[arm], rule, lengths).items()}
    for arm in ("demonstrations", "reward"):
        found |= measured(course, f"{arm}, greedy", models[arm], rule, lengths, warm=0.0)
    return found | measured(course, "reward, summary blanked", models["reward"], Rule(blank=True), lengths)


RECIPE = Recipe(
    name="reasoning_cache",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=80),
    reply=TRACE,
    train=train,
    drawn={
        "reward": ("reward", "reward alone"),
        "right": ("demonstrations, by round", "demonstrations again, by round", "reward, by round"),
    },
    note="right: the latest answer, through the product's agent, for chains of 2 to 24 steps; two steps fit into a round. Where "
    "all is right, the share by round 1, 3, 6, 9 and 12 is 0.043, 0.217, 0.478, 0.739 and 1. Traces are drawn at a "
    "temperature of 0.7, the agent's own, where nothing else is said. Of right.svg, a step is a round.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="reasoning_cache.py"))
