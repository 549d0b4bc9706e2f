"""Both sides: who writes the summaries and who reasons from them, trained alone, by turns or together, with equal updates.

    python lab/recipes/both_sides.py --out trained/both_sides

The world is that of the recipe Reasoning Cache, but its rule is replaced by a summariser of its own weights, as in CoMem. Both
are demonstrated poorly: the reasoner slips and takes answers back, and the summariser puts the label of the last step beside the
value of the step before it, six times in ten. Roll-outs of three rounds are then paid for the right answer. One arm trains the
reasoner beside the frozen summariser, one the summariser beside the frozen reasoner, one both by turns, and one both at once. An
update is a step of one side: so the last arm has half as many steps, and a control has as many steps as the others.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from torch import Tensor

from kilburn.cli.shell import main
from kilburn_lab.training.course import Chance, StepTogether, TrainingRun
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate
from kilburn_lab.training.words import AGENT, USER
from reasoning_cache import (
    LONGEST,
    PROMPTS,
    SUMMARY,
    TRACE,
    WORDS,
    Problem,
    Rounds,
    drawn,
    measured,
    midst,
    paid,
    reasoned,
    rolled,
    summarised,
    supervised,
)

MIXED, TURN = 0.6, 2
"""How often the poor summariser mixes two steps; steps until it is the other side's turn."""
REASONER, SUMMARISER = "reasoner", "summariser"


def asking_of(problem: Problem, summary: str, trace: str) -> list[int]:
    """What the agent asks the summariser, as tokens. A test compares it with the agent's own."""
    asked = PROMPTS.summarise.format(problem=problem.text, summary=summary, trace=trace)
    return [USER, *WORDS.encode(asked), AGENT]


def mixed(summary: str, trace: str, chance: random.Random) -> str:
    """What the poor summariser writes: the rule's summary, but of two steps often the earlier one's value."""
    ruled, values = summarised(summary, trace), [word for word in trace.split() if word.isdigit()]
    steps = len(values) == 2 and not ruled.startswith("so")
    return f"{ruled.split()[0]} {values[0]}" if steps and chance.random() < MIXED else ruled


def summarising(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step of the summariser on demonstrations, of traces from the midst of a chain."""
    rows, world = list[Row](), chance.worlds
    for _ in range(64):
        problem, summary = midst(world)
        trace = WORDS.decode(reasoned(problem, summary, world))
        rows.append((asking_of(problem, summary, trace), WORDS.reply(mixed(summary, trace, world))))
    return sft_loss(model, rows), {}


Turns = list[list[Row]]


def both_rolled(
    models: Mapping[str, Transformer], problems: Sequence[Problem], chance: Chance
) -> tuple[dict[str, Turns], list[float]]:
    """What each side was asked and said in a roll-out of each problem, and whether its last answer is right."""
    summed: Turns = [[] for _ in problems]

    def write(rounds: Rounds) -> dict[int, str]:
        asked = {number: asking_of(problems[number], *each) for number, each in rounds.items()}
        replies = generate(models[SUMMARISER], list(asked.values()), SUMMARY, temperature=1.0, chance=chance.sampling)
        for (number, prompt), reply in zip(asked.items(), replies, strict=True):
            summed[number].append((prompt, reply))
        return {number: text for number, reply in zip(asked, replies, strict=True) if (text := WORDS.decode(reply))}

    traced, rewards = rolled(models[REASONER], problems, chance, write)
    return {REASONER: traced, SUMMARISER: summed}, rewards


def reinforced(learners: Callable[[float], Sequence[str]]) -> StepTogether:
    """Steps on what both sides tried, paid at the end of a roll-out.

    Args:
        learners: who learns at a step, by how much of the arm is done; a side that does not is left alone.
    """

    def step(models: Mapping[str, Transformer], chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        turns, rewards = both_rolled(models, drawn(chance.worlds, 12), chance)
        first, *rest = (paid(models[name], turns[name], rewards) for name in learners(done))
        return sum(rest, first), {"reward": fmean(rewards)}

    return step


def train(course: TrainingRun) -> Figures:
    """Both demonstrated; then each arm."""
    updates, lengths = (4, [2, 6, 24]) if course.smoke else (40, [*range(2, LONGEST + 1, 2)])
    course.train(REASONER, 30 if course.smoke else 200, supervised, rate=4e-3)
    course.train(SUMMARISER, 30 if course.smoke else 80, summarising, rate=4e-3)

    def by_turns(done: float) -> Sequence[str]:
        return [(REASONER, SUMMARISER)[round(done * updates) // TURN % 2]]

    arms: dict[str, tuple[int, Callable[[float], Sequence[str]]]] = {
        "reasoner alone": (updates, lambda done: [REASONER]),
        "summariser alone": (updates, lambda done: [SUMMARISER]),
        "by turns": (updates, by_turns),
        "together": (updates // 2, lambda done: [REASONER, SUMMARISER]),
        "together, twice the updates": (updates, lambda done: [REASONER, SUMMARISER]),
    }

    def sides(before: str = "") -> list[Toy]:
        return [Toy(str(course.checkpoint(f"{before}{name}"))) for name in (REASONER, SUMMARISER)]

    found = measured(course, "neither", *sides(), lengths)
    for arm, (steps, learners) in arms.items():
        begins = {REASONER: REASONER, SUMMARISER: SUMMARISER}
        course.train_together(arm, begins, steps, reinforced(learners), rate=1e-3)
        found |= measured(course, arm, *sides(f"{arm}, "), lengths)
        found[arm, "reward, last ten steps"] = fmean(line["reward"] for line in course.lines(arm)[-10:])
    return found


ARMS = ("reasoner alone", "summariser alone", "by turns", "together", "together, twice the updates")
RECIPE = Recipe(
    name="both_sides",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=80),
    reply=TRACE,
    train=train,
    drawn={"reward": ARMS, "right": tuple(f"{arm}, by round" for arm in ("neither", *ARMS))},
    note="right: the latest answer, through the product's agent, for chains of 2, 4 to 24 steps; two fit into a round. "
    "Where all is right, the share by round 1, 3, 6, 9 and 12 is 0.083, 0.25, 0.5, 0.75 and 1. Of right.svg, a step is a round.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="both_sides.py"))
