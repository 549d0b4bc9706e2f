"""RLM (arXiv 2512.24601): a root that reads a long text by code, from trajectories of a scripted root (SFT).

    python lab/recipes/rlm.py --out trained/rlm

The text has 10 to 20 records. What stands in one only another model can say, and that reads 24 at most. The scripted root of one
arm cuts the text by code into pieces of 8, asks about each, and puts the answers together. That of the other arm asks about the
whole text at once, which is as right as long as the text is short. The root's own prompt shows how the text begins, and never all
of it. Trained roots then get texts of 10 and 100 times the length, through the product's agent and its sandbox.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from statistics import fmean

import msgspec
from torch import Tensor

import kilburn
from kilburn.agents.loop import Limits
from kilburn.cli.shell import main
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.recursion.briefing import instructions
from kilburn.recursion.inquiry import RecursiveResult
from kilburn.recursion.rlm import RecursiveModel
from kilburn.recursion.variable import variable
from kilburn.wire.quotation import quote
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, conversation_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape
from kilburn_lab.training.words import AGENT, END, USER, WordTokenizer

SHORT, LONG, MOST, PIECE = (10, 20), (15, 150, 1500), 24, 8
"""Records of a text in training; in measuring; in a prompt of the other model; and in a piece."""
KEYS = [f"k{number}" for number in range(8)]
ASKED = ["count", "early", "late"]
MARKS = ["|", "#", "~"]
FIRST = 0.4
"""The share of the steps that is on the first cell alone."""
BEGIN, FINISH = "```repl\n", "\n```"
CALLED = ["context", "llm_query_batched", "llm_query", "split", "join", "len", "print", "range", "int", "sum", "next"]
CODE = [
    *CALLED,
    "asked",
    "mark",
    "parts",
    "answers",
    "answer",
    "for",
    "in",
    "at",
    "one",
    "if",
    "True",
    "0",
    "1",
    "8",
    "!=",
    *".,;:()[]*=+-",
]
STRINGS = ['"', "content", "ready", "none"]
WORDS = WordTokenizer("rlm", [*ASKED, *MARKS, *KEYS, *STRINGS, *CODE, BEGIN, FINISH], brief=True)
SAYS = ["a man came by", "it was a long day", "no word of it", "they went home", "what a pity", "all is well"]
PIECES, WHOLE = "pieces", "whole"
ENDS = {
    "count": "sum ( int ( one ) for one in answers )",
    "early": 'next ( one for one in answers if one != "none" )',
    "late": 'next ( one for one in answers [ : : - 1 ] if one != "none" )',
}


class Task(msgspec.Struct, frozen=True):
    """What is asked about which key, the mark between records, and the records: each a key, an unread number, and words."""

    kind: str
    key: str
    mark: str
    records: list[tuple[str, int, str]]

    @property
    def question(self) -> str:
        """What the user says."""
        return f"{self.kind} {self.key}"

    @property
    def text(self) -> str:
        """What the code reads."""
        return self.mark.join(f" {key} number {number} {says} " for key, number, says in self.records)

    @property
    def answer(self) -> str:
        """The right answer."""
        return found(self.kind, self.key, [f"{key} number {number}" for key, number, _ in self.records])


def found(kind: str, key: str, records: list[str]) -> str:
    """How many records there are of a key; or the number that the earliest or the latest of them has, or "none"."""
    numbers = [words[2] for words in map(str.split, records) if words[0] == key]
    if kind == "count":
        return str(len(numbers))
    return numbers[0 if kind == "early" else -1] if numbers else "none"


def draw(chance: random.Random, records: int) -> Task:
    """A task of so many records, one of which has the key."""
    key, at = chance.choice(KEYS), chance.randrange(records)
    made = [
        (key if number == at else chance.choice(KEYS), chance.randrange(10, 1000), " and ".join(chance.sample(SAYS, 3)))
        for number in range(records)
    ]
    return Task(chance.choice(ASKED), key, chance.choice(MARKS), made)


class Reader:
    """The model that the code asks. It stands for one that reads, in a window of 24 records; of a longer prompt it sees these."""

    name, form, tokenizer = "reader", "chat", "chars/4"
    context: int | None = None

    def stream(self, request: Request) -> Iterator[Reply]:
        """What it finds."""
        kind, key, *records = re.split(r"[|#~]", str(request.messages[-1]["content"]))
        said = found(kind, key, [record for record in records if record.strip()][:MOST])
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=said),)))


def cells(task: Task, arm: str) -> list[str]:
    """What the scripted root of an arm writes: it cuts, asks, and puts together."""
    cut = f"* parts [ at : at + {PIECE} ] ] ) for at in range ( 0 , len ( parts ) , {PIECE} ) ]"
    asks = (
        f"llm_query_batched ( [ mark . join ( [ * asked , {cut} )"
        if arm == PIECES
        else "[ llm_query ( mark . join ( [ * asked , * parts ] ) ) ]"
    )
    begin = f'asked = [ "{task.kind}" , "{task.key}" ] ; mark = "{task.mark}"'
    lines = [
        f"{begin} ; parts = context . split ( mark ) ; print ( len ( parts ) )",
        f"answers = {asks} ; print ( len ( answers ) )",
        f'answer [ "content" ] = {ENDS[task.kind]} ; answer [ "ready" ] = True',
    ]
    return [f"{BEGIN}{line}{FINISH}" for line in lines]


def printed(task: Task, arm: str) -> list[str]:
    """What the product shows of each cell but the last."""
    asked = -(-len(task.records) // PIECE) if arm == PIECES else 1
    return [str(len(task.records)), f"{asked}\n[{asked:,} sub-calls answered]"]


def demonstrated(task: Task, arm: str) -> list[Row]:
    """The replies of the scripted root, each with what it is shown; a test compares that with the product's own."""
    known = variable(task.text, WORDS.count)
    told = f"{known.describe()}\nIt begins:\n{quote('context', known.head)}"
    prompt = [USER, *WORDS.encode(instructions(1, ())), USER, *WORDS.encode(task.question), USER, *WORDS.encode(told)]
    rows: list[Row] = []
    for cell, output in zip(cells(task, arm), [*printed(task, arm), ""], strict=True):
        rows.append(([*prompt, AGENT], WORDS.reply(cell)))
        prompt += [AGENT, *WORDS.encode(cell), END, USER, *WORDS.encode(output)]
    return rows


def supervised(arm: str) -> Step:
    """Steps on the trajectories of an arm's root. What is to be copied stands in the first cell, so the first steps are on that,
    without the instructions, which are always the same; the others are on whole trajectories."""
    system = len(WORDS.encode(instructions(1, ()))) + 1

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        drawn = [draw(chance.worlds, chance.worlds.randint(*SHORT)) for _ in range(24 if done < FIRST else 6)]
        rows = [demonstrated(task, arm) for task in drawn]
        if done < FIRST:
            rows = [[(prompt[system:], reply) for prompt, reply in each[:1]] for each in rows]
        return conversation_loss(model, rows), {}

    return step


def asked(model: Toy, task: Task) -> RecursiveResult:
    """The task through the product's recursive model, in its sandbox."""
    with kilburn.open(":memory:", window=2000, policy="fifo", tokenizer=model.tokenizer, embedder=None) as store:
        limits = Limits(steps=4, calls=1000, reply=model.described.reply)
        agent = RecursiveModel(model, store.session("ask"), sub=Reader(), tools=False, limits=limits)
        return agent.ask(task.question, task.text)


def measured(course: TrainingRun, arm: str, episodes: int) -> Figures:
    """Right answers, sub-calls, and the largest prompt, for each length."""
    model, figures = Toy(str(course.checkpoint(arm))), dict[tuple[str, str], float]()
    for records in LONG:
        chance = course.chance(f"measure/{records}").worlds
        runs = [(task, asked(model, task)) for task in (draw(chance, records) for _ in range(episodes))]
        figures[arm, f"right, {records} records"] = fmean(str(run.content) == task.answer for task, run in runs)
        figures[arm, f"sub-calls, {records} records"] = fmean(run.calls for _, run in runs)
        figures[arm, f"largest prompt, {records} records"] = fmean(run.resident for _, run in runs)
    return figures


def train(course: TrainingRun) -> Figures:
    """Both arms, measured through the product."""
    figures: Figures = {}
    for arm in (PIECES, WHOLE):
        course.train(arm, 20 if course.smoke else 600, supervised(arm), rate=4e-3)
        figures |= measured(course, arm, 1 if course.smoke else 8)
    return figures


RECIPE = Recipe(
    name="rlm",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=384),
    reply=72,
    train=train,
    drawn={"loss": (PIECES, WHOLE)},
    note="right: exact answers through the product's agent and sandbox. largest prompt: of the root, in tokens.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="rlm.py"))
