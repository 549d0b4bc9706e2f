"""MEM1 (arXiv 2506.15841): an internal state that is rewritten every turn, trained by a sparse reward on exact answers.

    python lab/recipes/mem1.py --out trained/mem1

A task asks for the values of 2 to 8 keys. Then notes come, one a turn, half of them of keys that nobody asked for, and no note
is seen twice. The agent's state holds as many pairs as there are questions, and everything else leaves the prompt. So what to
keep must be decided when it is seen. The demonstrator of the first stage is a poor one: when its state is full, it mostly drops
any pair. Only the second stage's reward, the share of exact answers at the end, can teach what to drop.

    python lab/recipes/mem1.py --model smollm2

tunes a small language model on the same world in place of the toy, by TRL and PEFT: on the demonstrator's calls, as the kernel
shows them, and then by reward on the last call of each task.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from kilburn.cli.shell import main
from kilburn.selection.directives import parse_state, within
from kilburn_lab.training.calls import ModelCall
from kilburn_lab.training.course import Chance, TrainingRun
from kilburn_lab.training.episode import Played, PromptCounter, TrainedModel, demonstrated_calls, play
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, advantages, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, USER, WordTokenizer

if TYPE_CHECKING:
    from kilburn_lab.training.tuning import Tuning

KEYS = [f"k{number}" for number in range(16)]
VALUES = [f"v{number}" for number in range(10)]
FILLERS = [f"w{number}" for number in range(8)]
SAID = ["ask", "note", "end", "<IS>", "</IS>", "<answer>", "</answer>"]
WORDS = WordTokenizer("mem1", [*SAID, *KEYS, *VALUES, *FILLERS], {"next": ()})
GROUP = 16
ROOM = 1000
"""Tokens of the window for a language model: more than it ever needs, because the policy lets go of all but the state."""
Pairs = list[tuple[str, str]]


class Task(msgspec.Struct, frozen=True):
    """The keys that are asked for, and the notes in the order in which they come."""

    asked: list[str]
    notes: list[tuple[str, str, str]]

    @property
    def question(self) -> str:
        """What the user says."""
        return " ".join(["ask", *self.asked])

    @property
    def answers(self) -> Pairs:
        """Each key that is asked for, with its value."""
        return [(key, value) for key, value, _ in self.notes if key in self.asked]

    def reward(self, reply: str) -> float:
        """The share of the keys that are answered exactly."""
        told = within(reply, "answer")
        words = told.split() if isinstance(told, str) else []
        given = set(pairwise(words))
        return sum(pair in given for pair in self.answers) / len(self.asked) if len(words) <= 2 * len(self.asked) else 0.0


def draw(chance: random.Random, asked: int) -> Task:
    """A task with twice as many notes as keys that are asked for."""
    keys = chance.sample(KEYS, 2 * asked)
    notes = []
    for key in keys:
        value, fillers, at = chance.choice(VALUES), chance.choices(FILLERS, k=2), chance.randrange(3)
        notes.append((key, value, " ".join(["note", *fillers[:at], key, value, *fillers[at:]])))
    chance.shuffle(notes)
    return Task(keys[:asked], notes)


def prompt_of(task: Task, turn: int, state: str) -> list[int]:
    """What the kernel shows at a turn under the policy mem1, as tokens: the question, a handle for all that left, the last
    reply, and the newest note. A test compares it with the kernel's own."""
    question = [USER, *WORDS.encode(task.question)]
    if not turn:
        return [*question, AGENT]
    seen = task.notes[turn - 1][2] if turn <= len(task.notes) else "end"
    gap = [USER, GAP] if turn > 1 else []
    return [*question, *gap, AGENT, *WORDS.encode(state), END, TOOL, *WORDS.encode(seen), AGENT]


def said(pairs: Pairs) -> str:
    """A reply that keeps these pairs and asks for the next note."""
    return " ".join(["<IS>", *(word for pair in pairs for word in pair), "</IS>", "next"])


def demonstrated(task: Task, chance: random.Random) -> list[Row]:
    """The turns of the demonstrator. When its state is full it drops a pair: one time in four one that nobody asked for, else
    any. At the end its answer is its state."""
    rows: list[Row] = []
    pairs: Pairs = []
    state = ""
    for turn in range(len(task.notes) + 1):
        if turn:
            pairs = [*pairs, task.notes[turn - 1][:2]]
            if len(pairs) > len(task.asked):
                spare = [pair for pair in pairs if pair[0] not in task.asked] if chance.random() < 0.25 else pairs
                pairs.remove(chance.choice(spare))
        reply = said(pairs)
        rows.append((prompt_of(task, turn, state), WORDS.reply(reply)))
        state = reply
    answer = " ".join(["<answer>", *(word for pair in pairs for word in pair), "</answer>"])
    return [*rows, (prompt_of(task, len(task.notes) + 1, state), WORDS.reply(answer))]


def valid(reply: str, most: int) -> bool:
    """Whether a reply has a state of so many pairs at most, and asks for the next note."""
    state = parse_state(reply)
    words = state.split() if isinstance(state, str) else []
    return reply.endswith("</IS> next") and len(words) <= 2 * most and reply.startswith("<IS>")


def rolled(model: Transformer, tasks: Sequence[Task], chance: Chance) -> tuple[list[list[Row]], list[float]]:
    """The turns of a roll-out of each task, and its reward; all tasks ask for the same number of keys."""
    rows: list[list[Row]] = [[] for _ in tasks]
    rewards, states = [0.0] * len(tasks), [""] * len(tasks)
    going = list(range(len(tasks)))
    last = len(tasks[0].notes) + 1
    for turn in range(last + 1):
        if not going:
            break
        prompts = [prompt_of(tasks[row], turn, states[row]) for row in going]
        replies = generate(model, prompts, RECIPE.reply, temperature=1.0, chance=chance.sampling)
        for row, prompt, reply in zip(going, prompts, replies, strict=True):
            rows[row].append((prompt, reply))
            states[row] = WORDS.decode(reply)
            if turn == last:
                rewards[row] = tasks[row].reward(states[row])
        going = [row for row in going if valid(states[row], len(tasks[row].asked))]
    return rows, rewards


def supervised(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on demonstrations."""
    count = chance.worlds.choice((2, 3, 4, 6, 8))
    rows = [row for _ in range(16) for row in demonstrated(draw(chance.worlds, count), chance.worlds)]
    return sft_loss(model, chance.worlds.sample(rows, 64)), {}


def reinforced(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on what the model itself tried: groups of roll-outs of one task, paid at their end."""
    count = chance.worlds.choice((2, 3, 4))
    tasks = [task for _ in range(8) for task in [draw(chance.worlds, count)] * GROUP]
    rows, rewards = rolled(model, tasks, chance)
    paid = zip(rows, advantages(rewards, GROUP), strict=True)
    weighed = [(row, weight) for turns, weight in paid if weight for row in turns]
    weighed = chance.worlds.sample(weighed, min(len(weighed), 512))
    loss = policy_loss(model, [row for row, _ in weighed], [weight for _, weight in weighed])
    return loss, {"reward": fmean(rewards)}


def tool_of(task: Task) -> Callable[[], str]:
    """The agent's tool: each call brings the next note."""
    left = [note for _, _, note in task.notes]

    def next() -> str:
        return left.pop(0) if left else "end"

    return next


def played(model: TrainedModel, task: Task, blank: bool = False, window: int = 0) -> Played:
    """The task through the product's agent, session and policy.

    Args:
        blank: whether each state is emptied before it is kept.
        window: 0 for what the states need and no more.
    """

    def emptied(reply: str) -> str:
        return "<IS> </IS>" if blank and reply.startswith("<IS>") else reply

    # Question, handle, the last state, and what is new; while a reply is admitted, the one before it is there too.
    room, steps = window or 100 + 5 * len(task.asked), len(task.notes) + 2
    return play(model, task.question, [tool_of(task)], policy="mem1", window=room, steps=steps, rewrite=emptied)


def measured(course: TrainingRun, arm: str, episodes: int, blank: bool = False) -> Figures:
    """Exact answers and the size of prompts, for 2, 4 and 8 questions, greedily."""
    model, found, label = Toy(str(course.checkpoint(arm))), {}, f"{arm}, state blanked" if blank else arm
    for count in (2, 4, 8):
        chance = course.chance(f"measure/{count}").worlds
        runs = [(task, played(model, task, blank)) for task in (draw(chance, count) for _ in range(episodes))]
        found[label, f"exact, {count} questions"] = fmean(task.reward(run.text) for task, run in runs)
        if arm == "rl" and not blank:
            found[label, f"peak prompt, {count} questions"] = fmean(run.peak for _, run in runs)
            found[label, f"transcript, {count} questions"] = fmean(run.whole for _, run in runs)
    return found


def train(course: TrainingRun) -> Figures:
    """Demonstrations, then reward; measured through the product."""
    course.train("sft", 120 if course.smoke else 400, supervised, rate=4e-3)
    course.train("rl", 3 if course.smoke else 160, reinforced, rate=1e-3, begin="sft", decay=0.5)
    episodes = 4 if course.smoke else 20
    return measured(course, "sft", episodes) | measured(course, "rl", episodes) | measured(course, "rl", episodes, blank=True)


def spoken(task: Task, chance: random.Random, counter: PromptCounter) -> list[ModelCall]:
    """The demonstrator's turns for a language model: as the kernel shows them, in words."""
    replies = [WORDS.decode(reply) for _, reply in demonstrated(task, chance)]
    return demonstrated_calls(replies, WORDS, task.question, [tool_of(task)], policy="mem1", window=ROOM, counter=counter)


def worth(task: Task, turn: int, before: str, reply: str) -> float:
    """What a reply at a turn would be paid if the task ended with it: the share of the asked pairs that the state before it, or
    the newest note, has, and that it keeps. At the end it is the reward of the answer."""
    if turn > len(task.notes):
        return task.reward(reply)
    if not valid(reply, len(task.asked)):
        return 0.0
    there = {*kept(before), *(note[:2] for note in task.notes[turn - 1 : turn])}
    wanted = there.intersection(task.answers)
    return len(wanted.intersection(kept(reply))) / len(wanted) if wanted else 1.0


def kept(reply: str) -> Pairs:
    """The pairs of a reply's state."""
    state = parse_state(reply)
    words = state.split() if isinstance(state, str) else []
    return list(zip(words[::2], words[1::2], strict=False))


def tune(tuning: Tuning) -> Figures:
    """The same with a small language model: demonstrations; then reward, which TRL pays for one reply, so for what could be
    answered after it; measured through the product. A step on a GPU is larger."""
    chance, many = tuning.chance("demonstrations").worlds, 4 if tuning.smoke else max(32, 3 * tuning.steps)
    tasks = [draw(chance, chance.choice((2,) if tuning.smoke else (2, 3, 4, 6, 8))) for _ in range(many)]
    turns = [(task, turn, call) for task in tasks for turn, call in enumerate(spoken(task, chance, tuning.counter))]
    large = tuning.gpu and not tuning.smoke
    tuning.sft("sft", [call for _, _, call in turns], tuning.steps, rate=1e-3, batch=32 if large else 2 if tuning.smoke else 8)
    # Only those are paid at which something has to be left out, or the answer is given.
    full = [each for each in turns if each[1] > len(each[0].asked)]
    tuning.grpo(
        "grpo",
        [call.prompt for _, _, call in full],
        lambda number, said: worth(*full[number][:2], shown_of(full[number][2]), said),
        tuning.steps,
        rate=3e-4,
        group=2 if tuning.smoke else 8,
        batch=16 if large else 1,
        ahead=8 if large else 1,
        begin="sft",
    )
    return said_figures(tuning, "sft", (False,)) | said_figures(tuning, "grpo", (False, True))


def shown_of(call: ModelCall) -> str:
    """The state that a call was shown."""
    return next((str(each["content"]) for each in reversed(call.prompt) if each["role"] == "assistant"), "")


def said_figures(tuning: Tuning, arm: str, blanks: Sequence[bool]) -> Figures:
    """The figures of a small language model, with states as they are or blanked. All episodes are played at the same time, so
    their replies are written together."""
    model, counts, many = tuning.model(arm), (2,) if tuning.smoke else (2, 4, 8), 1 if tuning.smoke else 20
    chances = {count: tuning.chance(f"measure/{count}").worlds for count in counts}
    tasks = [(count, draw(chances[count], count)) for count in counts for _ in range(many)]
    episodes = [(blank, count, task) for blank in blanks for count, task in tasks]
    with ThreadPoolExecutor(len(episodes)) as threads:
        runs = list(threads.map(lambda each: played(model, each[2], each[0], window=ROOM), episodes))
    found: Figures = {}
    for blank in blanks:
        label = f"{arm}, state blanked" if blank else arm
        for count in counts:
            some = [(each[2], run) for each, run in zip(episodes, runs, strict=True) if each[:2] == (blank, count)]
            found[label, f"exact, {count} questions"] = fmean(task.reward(run.text) for task, run in some)
            if not blank:
                found[label, f"calls, {count} questions"] = fmean(len(run.sizes) for _, run in some)
                found[label, f"peak prompt, {count} questions"] = fmean(run.peak for _, run in some)
                found[label, f"transcript, {count} questions"] = fmean(run.whole for _, run in some)
    return found


RECIPE = Recipe(
    name="mem1",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=160),
    reply=20,
    train=train,
    drawn={"reward": ("rl",)},
    note="exact: the share of answers that match, through the product's agent and session; chance is 0.1.",
    tune=tune,
    spoken=64,
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="mem1.py"))
