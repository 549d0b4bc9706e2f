"""Free() (arXiv 2602.08030): an adapter that names what to delete, trained on deletions that did no harm.

    python lab/recipes/free.py --out trained/free

A task asks for one key; pages of pairs come, one a look, and the key stands on one of them. The base is trained on a few pages,
so it errs among many. It also knows the form of a deletion, and names stretches at random. For training, every deletion of a
page is tried: it is kept if the base, with the page pruned, is right wherever it is right with all of it. A low-rank adapter is
trained on the largest that was kept; that of another arm on the largest of all. For a pass the adapter is merged into the
weights, and then taken out.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from torch import Tensor

from kilburn.cli.shell import main
from kilburn.policies.free import Free, Prompted
from kilburn.selection.directives import within
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.episode import Played, play
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, log_probabilities, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, load
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, UNKNOWN, USER, WordTokenizer

PAIRS, FEW, MANY = 6, 4, 16
KEYS = [f"k{number}" for number in range(24)]
VALUES = [f"v{number}" for number in range(10)]
OPEN, TO, NEXT, CLOSE, NOTHING = '{"delete": [{"prefix": "', '", "suffix": "', '"}, {"prefix": "', '"}]}', '{"delete": []}'
WORDS = WordTokenizer(
    "free", ["ask", "end", "<answer>", "</answer>", OPEN, TO, NEXT, CLOSE, NOTHING, *KEYS, *VALUES], {"look": ()}, brief=True
)
STEP = 2 * PAIRS + 6
"""Tokens that a look adds to a session: the call, 4, and the page."""
Page = list[tuple[str, str]]
Cuts = list[tuple[int, int]]
"""Stretches of a page, as the first pair and the one behind the last; in order, and not touching."""


class Task(msgspec.Struct, frozen=True):
    """The key that is asked for, its value, and the pages; no key stands on two pages where it is asked for."""

    key: str
    value: str
    pages: list[Page]

    @property
    def question(self) -> str:
        """What the user says."""
        return f"ask {self.key}"

    @property
    def answer(self) -> str:
        """The right reply."""
        return f"<answer> {self.key} {self.value} </answer>"


def draw(chance: random.Random, pages: int) -> Task:
    """A task of so many pages."""
    key, value, at = chance.choice(KEYS), chance.choice(VALUES), chance.randrange(pages)
    others, made = [other for other in KEYS if other != key], []
    for number in range(pages):
        page = [(other, chance.choice(VALUES)) for other in chance.sample(others, PAIRS)]
        if number == at:
            page[chance.randrange(PAIRS)] = key, value
        made.append(page)
    return Task(key, value, made)


def told(page: Page) -> str:
    """The text of a page."""
    return " ".join(word for pair in page for word in pair)


EDGES = range(PAIRS + 1)
EVERY: list[Cuts] = [[(start, stop)] for start, stop in combinations(EDGES, 2)]
EVERY += [[(start, stop), (again, end)] for start, stop, again, end in combinations(EDGES, 4)]
"""Every deletion of a page: one stretch, or two."""


def proposed(chance: random.Random) -> Cuts:
    """One of them."""
    return chance.choice(EVERY)


def directive(page: Page, cuts: Cuts) -> str:
    """The deletion of some stretches as the cleaner writes it."""
    parts = [f"{told(page[start : start + 1])} {TO} {told(page[stop - 1 : stop])}" for start, stop in cuts]
    return " ".join([OPEN, f" {NEXT} ".join(parts), CLOSE]) if parts else NOTHING


def shown(page: Page, cuts: Cuts) -> list[int]:
    """A page as the kernel shows it after its deletion: an excerpt, or a handle where nothing is left. A single pair stays: its
    heading would cost as much."""
    if sum(stop - start for start, stop in cuts) < 2:
        return WORDS.encode(told(page))
    if cuts == [(0, PAIRS)]:
        return [GAP]
    found, at = [GAP], 0
    for start, stop in [*cuts, (PAIRS, PAIRS)]:
        if start > at:
            found += WORDS.encode(told(page[at:start]))
        found += [UNKNOWN] * (start < PAIRS)
        at = stop
    return found


def prompt_of(task: Task, cuts: Sequence[Cuts]) -> list[int]:
    """What the kernel shows the agent when it has looked at so many pages and some are cut; after all of them, the end. A test
    compares it with the kernel's own."""
    prompt = [USER, *WORDS.encode(task.question)]
    for number, each in enumerate(cuts):
        seen = shown(task.pages[number], each) if number < len(task.pages) else WORDS.encode("end")
        prompt += [AGENT, *WORDS.encode("look"), END, TOOL, *seen]
    return [*prompt, AGENT]


def cleaning_of(task: Task, page: Page) -> list[int]:
    """What the policy asks the cleaner about one page, as tokens; what is said in English is unknown to it."""
    example = [*WORDS.encode(OPEN), UNKNOWN, *WORDS.encode(TO), UNKNOWN, *WORDS.encode(CLOSE)]
    return [
        *(USER, UNKNOWN, *example, UNKNOWN),
        *(USER, UNKNOWN, *WORDS.encode(task.question), UNKNOWN, *WORDS.encode(told(page)), UNKNOWN, AGENT),
    ]


def grounded(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step of the base: answers among few pages, some of them cut; looks; and the form of a deletion, at random."""
    world, rows = chance.worlds, list[Row]()
    for _ in range(24):
        task = draw(world, world.randrange(1, FEW + 1))
        cuts: list[Cuts] = [spared(task, page, proposed(world)) if world.random() < 0.3 else [] for page in task.pages]
        rows.append((prompt_of(task, [*cuts, []]), WORDS.reply(task.answer)))
        if world.random() < 0.3:
            rows.append((prompt_of(task, cuts[: world.randrange(len(cuts) + 1)]), WORDS.reply("look")))
        page = world.choice(task.pages)
        if world.random() < 0.6:
            rows.append((cleaning_of(task, page), WORDS.reply(directive(page, proposed(world)))))
    return sft_loss(model, rows), {}


def spared(task: Task, page: Page, cuts: Cuts) -> Cuts:
    """The stretches that do not have the key."""
    return [(start, stop) for start, stop in cuts if all(key != task.key for key, _ in page[start:stop])]


def right(base: Transformer, rows: Sequence[Row]) -> Tensor:
    """Whether each reply, as a whole, is likelier than all others together."""
    with torch.no_grad():
        known, owners = log_probabilities(base, rows)
    return torch.zeros(len(rows)).index_add(0, owners, known).exp() > 0.5


def adapted(base: Transformer, tried: bool) -> Step:
    """Steps of the adapter on the largest deletion of each page, of those that were kept or of all.

    Args:
        tried: whether a deletion is thrown away if the right answer is lost by it.
    """

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        world, rows, tasks = chance.worlds, list[Row](), []
        for _ in range(8):
            task = draw(world, FEW)
            keyed = next(number for number, page in enumerate(task.pages) if task.key in dict(page))
            tasks.append((task, keyed if world.random() < 0.5 else world.randrange(FEW), [[], *EVERY]))
        answers = [
            (prompt_of(task, [*(option if number == at else [] for number in range(FEW)), []]), WORDS.reply(task.answer))
            for task, at, options in tasks
            for option in options
        ]
        found = right(base, answers).view(len(tasks), -1).tolist() if tried else [[True] * (1 + len(EVERY))] * len(tasks)
        sizes, kept = [], []
        for (task, at, options), values in zip(tasks, found, strict=True):
            good = [option for option, value in zip(options, values, strict=True) if value >= values[0]]
            best = max(good, key=lambda cuts: sum(stop - start for start, stop in cuts))
            rows.append((cleaning_of(task, task.pages[at]), WORDS.reply(directive(task.pages[at], best))))
            sizes.append(sum(stop - start for start, stop in best) / PAIRS)
            kept.append((len(good) - 1) / len(EVERY))
        return sft_loss(model, rows), {"kept": fmean(kept), "deleted": fmean(sizes)}

    return step


def played(base: Toy, task: Task, cleaner: Toy | None) -> Played:
    """The task through the product's agent and session; under the policy free where there is a cleaner."""
    left = [told(page) for page in task.pages]

    def look() -> str:
        return left.pop(0) if left else "end"

    policy = Free(every=STEP, cleaner=Prompted(most=1.0, tokens=RECIPE.reply), reach=2 * STEP - 4, least=1)
    window = 40 + STEP * (len(task.pages) + 2)
    return play(
        base, task.question, [look], policy="fifo" if cleaner is None else policy, window=window, steps=MANY + 3, second=cleaner
    )


def measured(course: TrainingRun, label: str, episodes: int, adapter: Path | None, cleans: bool = True) -> Figures:
    """Right answers among few and many pages, and the prompt's share that is left."""
    place = str(course.checkpoint("base"))
    base, found = Toy(place), dict[tuple[str, str], float]()
    cleaner = Toy(place, adapter=str(adapter) if adapter else "") if cleans else None
    for pages in (FEW, MANY):
        chance = course.chance(f"measure/{pages}").worlds
        runs = [(task, played(base, task, cleaner)) for task in (draw(chance, pages) for _ in range(episodes))]
        found[label, f"right, {pages} pages"] = fmean(task.answer.split()[1:3] == answered(run.text) for task, run in runs)
        found[label, f"kept, {pages} pages"] = fmean(
            run.sizes[-1] / len(prompt_of(task, [[]] * (pages + 1))) for task, run in runs
        )
    if cleaner is not None and adapter is not None:
        held, other = cleaner.weights, load(Path(place))[0].state_dict()
        found[label, "weights that changed"] = float(sum(not torch.equal(held[name], part) for name, part in other.items()))
    return found


def answered(reply: str) -> list[str]:
    """The words of an answer."""
    said = within(reply, "answer")
    return said.split() if isinstance(said, str) else []


def train(course: TrainingRun) -> Figures:
    """The base, then both adapters; measured through the product."""
    base = course.train("base", 40 if course.smoke else 320, grounded, rate=4e-3)
    episodes = 2 if course.smoke else 16
    found = measured(course, "all pages", episodes, None, cleans=False) | measured(course, "base cleans", episodes, None)
    for arm, tried in (("kept", True), ("all", False)):
        course.train(arm, 5 if course.smoke else 200, adapted(base, tried), rate=4e-3, begin="base", rank=8)
        found |= measured(course, f"adapter, {arm}", episodes, course.checkpoint(arm))
    return found


RECIPE = Recipe(
    name="free",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=STEP * (MANY + 2) + 40),
    reply=16,
    train=train,
    drawn={"loss": ("kept", "all"), "deleted": ("kept", "all")},
    note="right: exact answers through the product's agent, session and policy; a guess is right one time in ten or less. kept: "
    "the last prompt as a share of what it would be with nothing deleted. weights that changed: tensors, after all passes.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="free.py"))
