"""CoMem (arXiv 2605.30842): a small summariser, paid when a frozen agent does from its memory what it does from the whole log.

    python lab/recipes/comem.py --out trained/comem

A log has six readings, and a memory has room for two. The agent is trained first, and then frozen: on "now" it acts on the two
readings of a kind that it cares about, and nothing in the log says which kind that is. The summariser learns from memories that
hold any two readings, by likelihood. One arm goes on by reward: its memory takes the log's place, and it is paid for each part of
the agent's action that stays the same. The control goes on by likelihood for as many steps. All memories have the same length.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from statistics import fmean

import msgspec
from torch import Tensor

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.cli.shell import main
from kilburn.page import Place
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, advantages, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, UNKNOWN, USER, WordTokenizer

MINDED = ["lamp", "door", "pump", "gate", "bell", "vane"]
OTHERS = ["rain", "wind", "dust", "snow", "hail", "mist"]
VALUES = ["red", "blue", "green", "gold", "pink", "grey", "black", "white"]
WORDS = WordTokenizer("comem", ["begin", "act", "now", "quiet", *MINDED, *OTHERS, *VALUES], {"look": ()}, brief=True)
STEPS, ROOM, GROUP = 3, 2, 8
POLICY = f"comem(every={STEPS})"
AGAIN, PAID = "likelihood again", "equivalence"
Readings = list[tuple[str, str]]


class Log(msgspec.Struct, frozen=True):
    """Six readings, two a step; two of them are of what the agent minds."""

    readings: Readings

    @property
    def pages(self) -> list[str]:
        """What the agent sees, step by step."""
        return [told(self.readings[at : at + 2]) for at in range(0, 2 * STEPS, 2)] + ["quiet", "now"]

    @property
    def action(self) -> str:
        """What it does."""
        return acted(self.readings)


def told(readings: Readings) -> str:
    """Readings as text."""
    return " ".join(word for pair in readings for word in pair)


def acted(readings: Readings) -> str:
    """What the agent is taught to do, if it knows these readings."""
    return f"act {told([pair for pair in readings if pair[0] in MINDED])}".strip()


def draw(chance: random.Random) -> Log:
    """A log."""
    named = [*chance.sample(MINDED, ROOM), *chance.sample(OTHERS, 2 * STEPS - ROOM)]
    chance.shuffle(named)
    return Log([(name, chance.choice(VALUES)) for name in named])


def looked(page: str) -> list[int]:
    """A step of the agent, as tokens."""
    return [AGENT, *WORDS.encode("look"), END, TOOL, *WORDS.encode(page)]


def prompt_of(log: Log, memory: str | None, steps: int = STEPS + 2) -> list[int]:
    """What the kernel shows the agent after so many steps: all of them, or a memory in place of the readings. A test compares it
    with the kernel's own."""
    begin = [USER, *WORDS.encode("begin")]
    if memory is not None:
        begin += [USER, GAP, UNKNOWN, *WORDS.encode(memory), GAP]
    pages = log.pages[STEPS if memory is not None else 0 : steps]
    return [*begin, *(token for page in pages for token in looked(page)), AGENT]


def asking_of(log: Log) -> list[int]:
    """What the policy asks the summariser, as tokens; what is said in English is unknown to it."""
    return [
        USER,
        UNKNOWN,
        USER,
        UNKNOWN,
        *(token for page in log.pages[:STEPS] for token in (*WORDS.encode(page), UNKNOWN)),
        AGENT,
    ]


def grounded(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step of the agent: what to do, from the log or from a memory of any two readings; and looking."""
    world, rows = chance.worlds, list[Row]()
    for _ in range(24):
        log = draw(world)
        some = chosen(log, world) if world.random() < 0.6 else [pair for pair in log.readings if pair[0] in MINDED]
        rows.append((prompt_of(log, None), WORDS.reply(log.action)))
        rows.append((prompt_of(log, told(some)), WORDS.reply(acted(some))))
        rows.append((prompt_of(log, None, world.randrange(STEPS + 2)), WORDS.reply("look")))
    return sft_loss(model, rows), {}


def chosen(log: Log, chance: random.Random) -> Readings:
    """As many readings as a memory has room for, in their order."""
    return [log.readings[at] for at in sorted(chance.sample(range(2 * STEPS), ROOM))]


def supervised(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step of the summariser by likelihood."""
    logs = [draw(chance.worlds) for _ in range(32)]
    return sft_loss(model, [(asking_of(log), WORDS.reply(told(chosen(log, chance.worlds)))) for log in logs]), {}


def same(action: str, other: str) -> float:
    """The share of the parts of an action that the other has, too; 0 where that has parts of its own."""
    parts, others = ({*zip(words[1::2], words[2::2], strict=False)} for words in (action.split(), other.split()))
    return len(parts & others) / len(parts) if parts and others <= parts else 0.0


def reinforced(agent: Transformer) -> Step:
    """Steps of the summariser, paid by what the frozen agent does from its memories."""

    def acts(prompts: Sequence[list[int]]) -> list[str]:
        return [WORDS.decode(reply) for reply in generate(agent, prompts, RECIPE.reply)]

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        logs = [log for _ in range(16) for log in [draw(chance.worlds)] * GROUP]
        prompts = [asking_of(log) for log in logs]
        memories = generate(model, prompts, RECIPE.reply, temperature=1.0, chance=chance.sampling)
        whole = [act for act in acts([prompt_of(log, None) for log in logs[::GROUP]]) for _ in range(GROUP)]
        short = acts([prompt_of(log, WORDS.decode(memory)) for log, memory in zip(logs, memories, strict=True)])
        fits = [memory[-1] == END and len(memory) == 2 * ROOM + 1 for memory in memories]  # one of another length is paid nothing
        rewards = [same(*pair) * fit for *pair, fit in zip(whole, short, fits, strict=True)]
        loss = policy_loss(model, list(zip(prompts, memories, strict=True)), advantages(rewards, GROUP))
        return loss, {"reward": fmean(rewards)}

    return step


def played(agent: Toy, summariser: Toy | None, log: Log) -> tuple[str, str]:
    """The log through the product's agent, under the policy comem where there is a summariser: its action, and the memory."""
    left = list(log.pages)
    policy = "fifo" if summariser is None else POLICY
    with kilburn.open(":memory:", window=600, policy=policy, tokenizer=WORDS, model=summariser, embedder=None) as store:
        session = store.session("log")

        def look() -> str:
            if len(left) == 1:  # the agent's last thought takes longer than the memory
                for thread in threading.enumerate():
                    if thread.name == "kilburn-later":
                        thread.join()
            return left.pop(0) if left else "quiet"

        limits = Limits(steps=STEPS + 4, reply=agent.described.reply)
        action = Agent(agent, [look], session, limits=limits, memory=False).run("begin").text
        folds = [
            session.contents.text(page.id) for page, state in session.contents.pages() if page.id < 0 and state.at is Place.IN
        ]
        return action, folds[-1].splitlines()[-2] if folds else ""


def measured(course: TrainingRun, arms: Sequence[str], episodes: int) -> Figures:
    """How often the agent does the same from the memory of each arm, and the words of those memories."""
    agent, figures = Toy(str(course.checkpoint("agent"))), dict[tuple[str, str], float]()
    chance = course.chance("measure").worlds
    logs = [draw(chance) for _ in range(episodes)]
    whole = [played(agent, None, log)[0] for log in logs]
    figures["whole log", "right action"] = fmean(act == log.action for log, act in zip(logs, whole, strict=True))
    for arm in arms:
        summariser = Toy(str(course.checkpoint(arm)))
        # Where the policy rejects a memory, the whole log stays, and the same action says nothing.
        pairs = list(zip([played(agent, summariser, log) for log in logs], whole, strict=True))
        figures[arm, "same action"] = fmean(act == action and memory != "" for (action, memory), act in pairs)
        figures[arm, "same parts"] = fmean(same(act, action) * (memory != "") for (action, memory), act in pairs)
        figures[arm, "memory, words"] = fmean(len(memory.split()) for (_, memory), _ in pairs)
    return figures


def train(course: TrainingRun) -> Figures:
    """The agent, then the summariser; measured through the product."""
    agent = course.train("agent", 60 if course.smoke else 160, grounded, rate=4e-3)
    course.train("likelihood", 60 if course.smoke else 150, supervised, rate=4e-3)
    steps = 3 if course.smoke else 160
    course.train(AGAIN, steps, supervised, rate=2e-3, begin="likelihood")
    course.train(PAID, steps, reinforced(agent.requires_grad_(False)), rate=2e-3, begin="likelihood")
    return measured(course, ("likelihood", AGAIN, PAID), 3 if course.smoke else 40)


RECIPE = Recipe(
    name="comem",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=48, heads=4, context=72),
    reply=6,
    train=train,
    drawn={"reward": (PAID,), "loss": ("agent", "likelihood", AGAIN)},
    note="same action: as with the whole log, through the product's agent, session and policy. Two readings of six are the right "
    "ones one time in 15; one of the two is one time in three on average.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="comem.py"))
