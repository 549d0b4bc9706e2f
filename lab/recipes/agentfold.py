"""AgentFold (arXiv 2510.24699): the agent says at each step how to fold its past, learned from trajectories (SFT).

    python lab/recipes/agentfold.py --out trained/agentfold

A task asks for two keys. Steps come in pairs: a clue names a key and three values, and the outcome of the next step says which
of them is right. The text of a fold has room for the pairs that were asked for, and no more. The demonstrator of one arm folds
late: once the outcome is there, it puts all that came before into one item. That of the other arm folds at once, as soon as a
step has come back, so it must choose a value before it knows which is right. Both arms see as many examples.
"""

from __future__ import annotations

import math
import random
import sys
from statistics import fmean

import msgspec
from torch import Tensor

from kilburn.cli.shell import main
from kilburn.selection.directives import within
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.episode import Played, play
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, USER, WordTokenizer

ASKED, LONGEST = 2, 12
KEYS = [f"k{number}" for number in range(16)]
VALUES = [f"v{number}" for number in range(10)]
FILLERS = [f"w{number}" for number in range(8)]
PLACES = ["first", "second", "third"]
OPEN, COMMA, TEXT, CLOSE = '<compress>{"compress_range": [', ",", '], "compress_text": "', '"}</compress>'
NUMBERS = [str(number) for number in range(1, 2 * LONGEST + 2)]
SAID = ["ask", "clue", "outcome", "end", "none", "<answer>", "</answer>", "[Compressed Step", "to", "]"]
WORDS = WordTokenizer("agentfold", [*SAID, OPEN, COMMA, TEXT, CLOSE, *PLACES, *KEYS, *VALUES, *FILLERS, *NUMBERS], {"look": ()})
POLICY = "agentfold(trigger=100000, ask=False)"
LATE, ONCE = "late", "at once"


class Task(msgspec.Struct, frozen=True):
    """The keys that are asked for; the clues, each with its values and which of them is right; and what steps show."""

    asked: list[str]
    clues: list[tuple[str, list[str], int]]
    shown: list[str]

    @property
    def question(self) -> str:
        """What the user says."""
        return " ".join(["ask", *self.asked])

    def reward(self, reply: str) -> float:
        """The share of the keys that are answered exactly."""
        told = within(reply, "answer")
        words = told.split() if isinstance(told, str) else []
        given = list(zip(words[::2], words[1::2], strict=False)) if len(words) <= 2 * ASKED else []
        return sum((key, values[right]) in given for key, values, right in self.clues if key in self.asked) / ASKED


def draw(chance: random.Random, pairs: int) -> Task:
    """A task with so many clues, two of them of keys that are asked for."""
    keys = chance.sample(KEYS, pairs)
    clues = [(key, chance.choices(VALUES, k=3), chance.randrange(3)) for key in keys]
    shown: list[str] = []
    for key, values, right in clues:
        told = " ".join(word for pair in zip(PLACES, values, strict=True) for word in pair)
        shown.append(" ".join(["clue", key, told, *chance.choices(FILLERS, k=8)]))
        shown.append(" ".join(["outcome", PLACES[right], *chance.choices(FILLERS, k=8)]))
    return Task(chance.sample(keys, ASKED), clues, [*shown, "end"])


def prompt_of(task: Task, folded: tuple[int, str] | None, steps: list[tuple[str, str]]) -> list[int]:
    """What the kernel shows under the policy agentfold, as tokens: the question, the folded item, and whole steps. A test
    compares it with the kernel's own.

    Args:
        folded: the last step of the item, and its text. steps: reply and result of each whole step.
    """
    prompt = [USER, *WORDS.encode(task.question)]
    if folded is not None:
        last, text = folded
        head = f"[Compressed Step 1{f' to {last}' if last > 1 else ''}]"
        prompt += [USER, GAP, *WORDS.encode(f"{head} {text}"), GAP]
    for reply, result in steps:
        prompt += [AGENT, *WORDS.encode(reply), END, TOOL, *WORDS.encode(result)]
    return [*prompt, AGENT]


def demonstrated(task: Task, arm: str, chance: random.Random) -> list[Row]:
    """The replies of a demonstrator, each with what it was shown."""
    rows: list[Row] = []
    folded: tuple[int, str] | None = None
    steps: list[tuple[str, str]] = []
    known: dict[str, str] = {}
    for number, result in enumerate(["", *task.shown]):
        ready = number and (arm == ONCE or number % 2 == 0) and number <= 2 * len(task.clues)
        reply, text = "look", ""
        if ready:
            key, values, right = task.clues[(number - 1) // 2]
            if key in task.asked and (arm == LATE or number % 2):
                known[key] = values[right] if arm == LATE else chance.choice(values)
            text = " ".join(word for pair in known.items() for word in pair) or "none"
            reply = f"{OPEN} 1 {COMMA} {number} {TEXT} {text} {CLOSE} look"
        if result:
            steps[-1] = (steps[-1][0], result)
        if result == "end":
            reply = " ".join(["<answer>", *(word for pair in known.items() for word in pair), "</answer>"])
        rows.append((prompt_of(task, folded, steps), WORDS.reply(reply)))
        folded, steps = ((number, text), []) if ready else (folded, steps)
        steps.append((reply, ""))
    return rows


def supervised(arm: str) -> Step:
    """Steps on the demonstrator of an arm, at any of its turns."""

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        rows: list[Row] = []
        for _ in range(12):
            *turns, answer = demonstrated(draw(chance.worlds, chance.worlds.randrange(2, LONGEST + 1)), arm, chance.worlds)
            rows += [*chance.worlds.sample(turns, 3), answer]
        return sft_loss(model, rows), {}

    return step


def played(model: Toy, task: Task, blank: bool = False) -> Played:
    """The task through the product's agent, session and policy.

    Args:
        blank: whether the text of each fold is emptied before it is kept.
    """
    left = list(task.shown)

    def look() -> str:
        return left.pop(0) if left else "end"

    def emptied(reply: str) -> str:
        head, mark, tail = reply.partition(TEXT)
        return f"{head}{mark} none {CLOSE}{tail.partition(CLOSE)[2]}" if blank and mark else reply

    return play(model, task.question, [look], policy=POLICY, window=160, steps=len(task.shown) + 1, rewrite=emptied)


def measured(course: TrainingRun, arm: str, episodes: int, blank: bool = False) -> Figures:
    """Exact answers and the size of prompts after 6 and 24 steps, greedily."""
    model, found, label = Toy(str(course.checkpoint(arm))), {}, f"{arm}, texts blanked" if blank else arm
    peaks = {}
    for pairs in (3, LONGEST):
        chance = course.chance(f"measure/{pairs}").worlds
        runs = [(task, played(model, task, blank)) for task in (draw(chance, pairs) for _ in range(episodes))]
        found[label, f"exact, {2 * pairs} steps"] = fmean(task.reward(run.text) for task, run in runs)
        if not blank:
            peaks[pairs] = fmean(run.peak for _, run in runs)
            found[label, f"peak prompt, {2 * pairs} steps"] = peaks[pairs]
            found[label, f"transcript, {2 * pairs} steps"] = fmean(run.whole for _, run in runs)
    if not blank:
        found[label, "growth: log peak / log steps"] = math.log(peaks[LONGEST] / peaks[3]) / math.log(LONGEST / 3)
    return found


def train(course: TrainingRun) -> Figures:
    """Both arms, measured through the product; and the late one with blank texts."""
    found: Figures = {}
    for arm in (LATE, ONCE):
        course.train(arm, 120 if course.smoke else 600, supervised(arm), rate=4e-3)
        found |= measured(course, arm, 3 if course.smoke else 10)
    return found | measured(course, LATE, 3 if course.smoke else 10, blank=True)


RECIPE = Recipe(
    name="agentfold",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=160),
    reply=16,
    train=train,
    drawn={"loss": (LATE, ONCE)},
    note="exact: the share of right answers, through the product's agent and session; a guess among the clue's values is right "
    "one time in three. growth: 1 is linear, 0 is flat.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="agentfold.py"))
