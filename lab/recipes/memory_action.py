"""Memory as action: the model itself adds, updates, deletes and reads notes on a stream with contradictions, by reward alone.

    python lab/recipes/memory_action.py --out trained/memory_action

Each message of the stream is a session of its own, so only the agent's notes (`store.notes`) lead from one to the next. A message
tells a value, tells another one later, takes a key back, or is hearsay. Some keys are chat that nobody asks about, and there is
room for as many notes as keys will be asked for. The demonstrator of the first stage is a poor one: it knows what to do three
times in ten, and else acts at random. Then arms differ in what is paid: right answers at the end alone; besides, reads that made
an answer right (counterfactual), writes that are used later, or the form, which fades; and, as a warning, every read that finds
something.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from statistics import fmean

import msgspec
from torch import Tensor

import kilburn
from kilburn.cli.shell import main
from kilburn.memory.notes import Notes
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.episode import play
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, advantages, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate, load
from kilburn_lab.training.words import AGENT, END, TOOL, USER, WordTokenizer

KEYS = [f"k{number}" for number in range(8)]
VALUES = [f"v{number}" for number in range(10)]
ASKED = ROOM = 2
STEPS, GROUP = 3, 8
TOOLS = {"read": ("key",), "add": ("key", "value"), "update": ("key", "value"), "delete": ("key",)}
WORDS = WordTokenizer(
    "memory", ["work", "chat", "told", "heard", "gone", "ask", "none", "done", "ok", "full", *KEYS, *VALUES], TOOLS
)
ARMS = ("outcome", "reads", "writes", "form", "paid reads")
Held = MutableMapping[str, str]
"""Notes by name; a note has values, in an order that does not say which is newer."""


class Task(msgspec.Struct, frozen=True):
    """What is said, message by message, each about a key; and each key that is asked for at the end, with all its values, of
    which the last holds."""

    said: list[tuple[str, str]]
    values: dict[str, list[str]]

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Every message, with its key; the questions stand last."""
        return [*self.said, *((f"ask {key}", key) for key in self.values)]


def draw(chance: random.Random) -> Task:
    """A stream of three work keys, one of which is taken back before the next is told, and of two that are chat."""
    first, second, gone, *idle = chance.sample(KEYS, 5)
    values = {key: chance.sample(VALUES, chance.choice((1, 2, 2))) for key in (first, second)}
    told = {key: [(f"work told {key} {value}", key) for value in known] for key, known in values.items()}
    for key in told:
        if chance.random() < 0.5:
            told[key].insert(chance.randrange(1, len(told[key]) + 1), (f"work heard {key} {chance.choice(VALUES)}", key))
    over = [(f"work told {gone} {chance.choice(VALUES)}", gone), (f"work gone {gone}", gone)]
    left = [told[first], [*over, *told[second]], *([(f"chat told {key} {chance.choice(VALUES)}", key)] for key in idle)]
    said = []
    while left := [lines for lines in left if lines]:
        said.append(chance.choice(left).pop(0))
    return Task(said, values)


def carried_out(held: Held, tool: str, key: str, value: str = "") -> str:
    """What a call does to the notes, and its result."""
    known = held.get(key, "")
    if tool == "read":
        return known or "none"
    if tool == "add":
        values = {*known.split(), value}
        if len(held) + (not known) > ROOM or len(values) > 3:
            return "full"
        held[key] = " ".join(sorted(values))
        return "ok"
    if not known:
        return "none"
    if tool == "update":
        held[key] = value
    else:
        del held[key]
    return "ok"


class Turn(msgspec.Struct):
    """A reply: to which message and what, what it called, and the extra that it is paid by an arm."""

    at: int
    row: Row
    call: list[str]
    result: str
    extra: float = 0.0

    @property
    def wrote(self) -> bool:
        """Whether it changed the notes."""
        return self.result == "ok"


def called(reply: str) -> list[str]:
    """The words of a reply that is a call, or nothing."""
    text, tool, given = WORDS.split(reply)
    return [tool, *msgspec.json.decode(given, type=dict[str, str]).values()] if tool and not text else []


def is_formed(task: Task, turn: Turn) -> bool:
    """Whether a reply has the right form: a call, an answer to a question, or else that it is done."""
    reply = WORDS.decode(turn.row[1])
    return bool(turn.call) or (reply in (*VALUES, "none") if turn.at >= len(task.said) else reply == "done")


class Trial(msgspec.Struct):
    """A roll-out: its turns, its notes, and the answer to each question."""

    task: Task
    turns: list[Turn] = []
    held: dict[str, str] = {}
    answers: dict[str, str] = {}

    def right(self, key: str) -> bool:
        """Whether the answer for a key is the value that holds."""
        return self.answers.get(key) == self.task.values.get(key, [""])[-1]

    @property
    def reward(self) -> float:
        """The share of right answers."""
        return fmean(self.right(key) for key in self.task.values)


Says = Callable[[list[list[int]]], list[list[int]]]
"""Replies to prompts."""


def rolled(tasks: Sequence[Task], says: Says, blind: bool = False) -> list[Trial]:
    """A roll-out of each stream.

    Args:
        blind: whether reading finds nothing, ever.
    """
    trials = [Trial(task, [], {}, {}) for task in tasks]
    for at in range(max(len(task.messages) for task in tasks)):
        going = [(trial, [USER, *WORDS.encode(trial.task.messages[at][0])]) for trial in trials if at < len(trial.task.messages)]
        for _ in range(STEPS):
            if not going:
                break
            replies, left = says([[*shown, AGENT] for _, shown in going]), []
            for (trial, shown), reply in zip(going, replies, strict=True):
                said = WORDS.decode(reply)
                call = called(said)
                result = "" if not call else "none" if blind and call[0] == "read" else carried_out(trial.held, *call)
                trial.turns.append(Turn(at, ([*shown, AGENT], reply), call, result))
                if call:
                    left.append((trial, [*shown, AGENT, *WORDS.encode(said), END, TOOL, *WORDS.encode(result)]))
                elif at >= len(trial.task.said):
                    trial.answers[trial.task.messages[at][1]] = said
            going = left
    return trials


def guesses(chance: random.Random) -> Says:
    """The demonstrator: it knows the form, and what to do three times in ten; else it acts at random."""

    def reply(prompt: list[int]) -> list[int]:
        words = WORDS.decode(prompt).split()
        key, value = next(word for word in words if word in KEYS), next((word for word in words if word in VALUES), "v0")
        begun, knows = "<tool>" in words, chance.random() < 0.3
        shown = words[words.index("<tool>") + 1 : -1] if begun else []
        if "ask" in words:
            return WORDS.reply(
                chance.choice(shown or VALUES) if begun or (not knows and chance.random() < 0.5) else f"read {key}"
            )
        if shown[:1] in (["ok"], ["full"]) or words[-2] in ("ok", "full"):
            return WORDS.reply("done")
        right = "done" if words[1] == "chat" or words[2] == "heard" else "delete" if words[2] == "gone" else "read"
        if begun and right == "read":
            right = "add" if shown == ["none"] else "update"
        act = right if knows else chance.choice(["read", "add", "update", "delete", "done"][begun:])
        return WORDS.reply(" ".join([act, *[key, value][: len(TOOLS.get(act, ()))]]))

    return lambda prompts: [reply(prompt) for prompt in prompts]


def supervised(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on demonstrations."""
    trials = rolled([draw(chance.worlds) for _ in range(16)], guesses(chance.worlds))
    rows = [turn.row for trial in trials for turn in trial.turns]
    return sft_loss(model, chance.worlds.sample(rows, 128)), {}


def pay_reads(model: Transformer, trials: Sequence[Trial], chance: Chance) -> None:
    """Pay each read before an answer by what it changed: whether the answer is right, less whether one without it would be."""
    found = []
    for trial in trials:
        for turn in trial.turns:
            if turn.at >= len(trial.task.said) and turn.call[:1] == ["read"]:
                found.append((trial, turn))
    blind = [[*turn.row[0], *turn.row[1], TOOL, WORDS.ids["none"], AGENT] for _, turn in found]
    if not blind:
        return
    for (trial, turn), reply in zip(found, generate(model, blind, 4, temperature=1.0, chance=chance.sampling), strict=True):
        key = trial.task.messages[turn.at][1]
        turn.extra += trial.right(key) - (WORDS.decode(reply) == trial.task.values[key][-1])


def pay_writes(trials: Sequence[Trial]) -> None:
    """Pay the last turn about a message by what became of it: 1 if it was a write that a right answer used, less than 0 if it
    was any other write; less the mean of the group. Trials of one group stand together."""
    for begin in range(0, len(trials), GROUP):
        group = trials[begin : begin + GROUP]
        for at in range(len(group[0].task.said)):
            key = group[0].task.messages[at][1]
            acts = [[turn for turn in trial.turns if turn.at == at] for trial in group]
            paid = [
                (1.0 if trial.right(key) else -0.25) if any(turn.wrote for turn in turns) else 0.0
                for trial, turns in zip(group, acts, strict=True)
            ]
            for turns, each in zip(acts, paid, strict=True):
                for turn in turns:
                    turn.extra += each - fmean(paid)


def reinforced(arm: str) -> Step:
    """Steps on what the model itself tried, paid as the arm says."""

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        tasks = [task for _ in range(12) for task in [draw(chance.worlds)] * GROUP]
        trials = rolled(tasks, lambda prompts: generate(model, prompts, RECIPE.reply, temperature=1.0, chance=chance.sampling))
        paid = [trial.reward for trial in trials]
        if arm == "form":
            formed = [fmean(is_formed(trial.task, turn) for turn in trial.turns) for trial in trials]
            paid = [each + 0.5 * (1 - done) * share for each, share in zip(paid, formed, strict=True)]
        if arm == "paid reads":
            finds = [sum(turn.call[:1] == ["read"] and turn.result != "none" for turn in trial.turns) for trial in trials]
            paid = [each + 0.1 * many for each, many in zip(paid, finds, strict=True)]
        if arm == "reads":
            pay_reads(model, trials, chance)
        if arm == "writes":
            pay_writes(trials)
        worth = advantages(paid, GROUP)
        weighed = [(turn.row, each + turn.extra) for trial, each in zip(trials, worth, strict=True) for turn in trial.turns]
        weighed = chance.worlds.sample(weighed, min(len(weighed), 512))
        loss = policy_loss(model, [row for row, _ in weighed], [weight for _, weight in weighed])
        return loss, {"right": fmean(trial.reward for trial in trials), "paid": fmean(paid)}

    return step


class Noted(MutableMapping[str, str]):
    """The same over the product's notes, where each version stays."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __getitem__(self, name: str) -> str:
        if name not in list(self):
            raise KeyError(name)
        return self.notes.read(name).text

    def __setitem__(self, name: str, text: str) -> None:
        self.notes.write(name, text, policy="agent")

    def __delitem__(self, name: str) -> None:
        self.notes.delete(name, policy="agent")

    def __iter__(self) -> Iterator[str]:
        return iter([note.name for note in self.notes.list()])

    def __len__(self) -> int:
        return len(self.notes.list())


def played(model: Toy, task: Task) -> dict[str, str]:
    """The answers to a stream through the product: an agent in a session for each message, and its notes."""
    answers = {}
    with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer=model.tokenizer, embedder=None) as store:
        held = Noted(store.notes("agent"))

        def read(key: str) -> str:
            return carried_out(held, "read", key)

        def add(key: str, value: str) -> str:
            return carried_out(held, "add", key, value)

        def update(key: str, value: str) -> str:
            return carried_out(held, "update", key, value)

        def delete(key: str) -> str:
            return carried_out(held, "delete", key)

        for at, (text, key) in enumerate(task.messages):
            run = play(
                model, text, [read, add, update, delete], policy="fifo", window=1000, steps=STEPS, store=store, name=f"s{at}"
            )
            if at >= len(task.said):
                answers[key] = run.text if run.finish == "stop" else ""
    return answers


def measured(course: TrainingRun, arm: str, streams: int, blind: bool = False) -> Figures:
    """Right and stale answers, and reads. Replies are drawn, as in training: what a model does most often is right long before it
    does it often. Streams are rolled out together, and some of them through the product."""
    model, chance = Toy(str(course.checkpoint(arm)), temperature=1.0, seed=course.seed), course.chance("measure")
    weights = load(course.checkpoint(arm))[0]
    tasks = [draw(chance.worlds) for _ in range(streams)]
    trials = rolled(tasks, lambda shown: generate(weights, shown, RECIPE.reply, temperature=1.0, chance=chance.sampling), blind)
    changed = [(trial, key) for trial in trials for key, values in trial.task.values.items() if len(values) > 1]
    told = [
        (trial.answers[key], values) for trial, key in changed if trial.answers.get(key) in (values := trial.task.values[key])
    ]
    reads = [sum(turn.call[:1] == ["read"] for turn in trial.turns) / len(trial.task.messages) for trial in trials]
    label = f"{arm}, reads blanked" if blind else arm
    figures = {
        (label, "right"): fmean(trial.reward for trial in trials),
        (label, "stale"): fmean(trial.answers.get(key) == trial.task.values[key][0] for trial, key in changed),
        (label, "stale, of values told"): fmean(said == values[0] for said, values in told) if told else 0.0,
        (label, "reads a message"): fmean(reads),
    }
    if blind:
        return figures
    answers = [(task, played(model, task)) for task in tasks[: max(1, streams // 32)]]
    right = [given[key] == values[-1] for task, given in answers for key, values in task.values.items()]
    return figures | {(label, "right, through the product"): fmean(right)}


def train(course: TrainingRun) -> Figures:
    """Demonstrations, then each reward; measured through the product."""
    streams = 4 if course.smoke else 128
    course.train("sft", 40 if course.smoke else 150, supervised, rate=6e-3)
    found = measured(course, "sft", streams)
    for arm in ARMS:
        course.train(arm, 2 if course.smoke else 80, reinforced(arm), rate=2e-3, begin="sft", decay=0.5)
        found |= measured(course, arm, streams)
    return found | measured(course, "writes", streams, blind=True)


RECIPE = Recipe(
    name="memory_action",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=1, width=48, heads=4, context=48),
    reply=4,
    train=train,
    drawn={"right": ARMS, "paid": ARMS},
    note="right: the share of right answers; chance is 0.1. stale: of the keys that changed, the share that is answered by what "
    "held first; of values told: among those that are answered by one of their values. The same through the product's agent, "
    "sessions and notes for a few streams.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="memory_action.py"))
