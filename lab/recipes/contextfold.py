"""ContextFold (arXiv 2510.11967): an agent that hands look-ups to branches, trained by an outcome alone or by FoldGRPO as well.

    python lab/recipes/contextfold.py --out trained/contextfold

A task asks for the values of three keys. A look-up of a key gives a long observation, one word of which is the value, and the
window keeps one observation. So at most one key can be looked up in the main line; the others need a branch, whose steps are
folded into the value that it returns. The demonstrator of the first stage is a poor one: it branches half of the time, looks up
what its branch was not asked for, and branches within a branch, which is refused. Then arms differ in what is paid: right
answers alone, and each process reward of FoldGRPO (main line too long, branch out of its scope, failed call) by itself and
together. One arm is trained on the same demonstrations with nothing folded, and used folded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import msgspec
from torch import Tensor

import kilburn
from kilburn.agents.branch import Branching, SubAgent, branch_prompt
from kilburn.agents.loop import Limits
from kilburn.cli.shell import main
from kilburn_lab.training.course import Chance, Step, TrainingRun
from kilburn_lab.training.episode import Shown, TrainedModel
from kilburn_lab.training.model import Toy
from kilburn_lab.training.recipe import Figures, Recipe, command
from kilburn_lab.training.steps import Row, conversation_loss, policy_loss, sft_loss
from kilburn_lab.training.transformer import Transformer, TransformerShape, generate
from kilburn_lab.training.words import AGENT, END, GAP, TOOL, USER, WordTokenizer

ASKED, STEPS, WITHIN, LONG, GROUP = 3, 5, 4, 20, 8
"""Keys of a task; most steps of the main line, and of a branch; words of an observation besides the pair; roll-outs of a task."""
WINDOW, POLICY = 124, 'mask(keep=1, trigger=0, exclude=["branch", "return"])'
MOST = WINDOW // 4
"""Tokens of the main line above which FoldGRPO calls it unfolded."""
KEYS = [f"k{number}" for number in range(8)]
VALUES = [f"v{number}" for number in range(10)]
FILLERS = [f"w{number}" for number in range(8)]
INSIDE, BRANCHED, NOWHERE = (
    "[you are in the branch now]",
    "error: tool: a branch here cannot branch again (do it here, or return)",
    "error: tool: this is no branch: there is nothing to return to (answer the user in your own words)",
)
MARK = branch_prompt("").strip()
WORDS = WordTokenizer(
    "contextfold",
    ["find", "answer", INSIDE, BRANCHED, NOWHERE, MARK, *KEYS, *VALUES, *FILLERS],
    {"look": ("key",), "branch": ("description", "prompt"), "return": ("message",)},
    brief=True,
)
PENALTIES = ("unfolded", "scope", "failure")
ARMS = {"outcome": (), "FoldGRPO": PENALTIES, **{f"{name} alone": (name,) for name in PENALTIES}}


class Task(msgspec.Struct, frozen=True):
    """The value of each key that is asked for, and the observation that holds it."""

    values: dict[str, str]
    observed: dict[str, str]

    @property
    def question(self) -> str:
        """What the user says."""
        return " ".join(["find", *self.values])

    def look(self, key: str) -> str:
        """What a look-up gives."""
        return self.observed.get(key, " ".join(FILLERS * 4))

    def right(self, answer: str) -> float:
        """The share of the keys that are answered exactly."""
        words = answer.split()
        given = list(zip(words[1::2], words[2::2], strict=False)) if is_formed(answer) else []
        return fmean(pair in given for pair in self.values.items())


def is_formed(answer: str) -> bool:
    """Whether an answer has a value for each key, and no more."""
    words = answer.split()
    return words[:1] == ["answer"] and len(words) == 2 * ASKED + 1 and set(words[2::2]) <= set(VALUES)


def draw(chance: random.Random) -> Task:
    """A task."""
    values, observed = {key: chance.choice(VALUES) for key in chance.sample(KEYS, ASKED)}, dict[str, str]()
    for key, value in values.items():
        words, at = chance.choices(FILLERS, k=LONG), chance.randrange(LONG + 1)
        observed[key] = " ".join([*words[:at], key, value, *words[at:]])
    return Task(values, observed)


class Said(NamedTuple):
    """A message of a line."""

    role: int
    text: str
    observed: bool = False


class Turn(msgspec.Struct):
    """A reply with what it was shown, and with all that was said until then; and what FoldGRPO looks at: whose it is (0 for the
    main line, else the number of the branch), the tool that it called, and whether the call failed."""

    row: Row
    whole: Row
    branch: int
    tool: str
    failed: bool = False


class Trial:
    """A roll-out: what the kernel shows at each turn under the policy, with branches, as tokens. A test compares it with the
    kernel's own."""

    def __init__(self, task: Task) -> None:
        self.task, self.turns, self.answer, self.ended = task, list[Turn](), "", False
        self.shown, self.whole = [Said(USER, task.question)], [Said(USER, task.question)]
        self.fork, self.branches, self.asked = 0, 0, list[str]()
        self.strayed = set[int]()

    @property
    def prompt(self) -> list[int]:
        """What is shown now: the newest observation alone."""
        return tokens_of(self.shown, newest=True)

    @property
    def right(self) -> float:
        """The share of right answers."""
        return self.task.right(self.answer)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of the main line."""
        return max(len(turn.row[0]) for turn in self.turns if not turn.branch)

    def take(self, reply: list[int]) -> None:
        """Go on with a reply."""
        said = WORDS.decode(reply)
        text, tool, given = WORDS.split(said)
        words = list(msgspec.json.decode(given, type=dict[str, str]).values()) if tool else []
        turn = Turn((self.prompt, reply), (tokens_of(self.whole), reply), self.branches if self.fork else 0, tool)
        self.turns.append(turn)
        self._add(Said(AGENT, said))
        if tool == "look":
            self._add(Said(TOOL, self.task.look(words[0]), observed=True))
            if self.fork and words[0] != self.asked[-1]:
                self.strayed.add(self.branches)
        elif tool == "branch" and not self.fork:
            self.fork, self.branches = len(self.shown), self.branches + 1
            self.asked.append(words[1])
            self._add(Said(TOOL, INSIDE), Said(USER, branch_prompt(words[1])))
        elif self.fork and tool != "branch":
            del self.shown[self.fork :]
            self._add(Said(TOOL, f"{words[0] if tool else text}\n[b{self.branches}: all of it]"))
            self.fork = 0
        elif tool:
            turn.failed = True
            self._add(Said(TOOL, BRANCHED if self.fork else NOWHERE))
        else:
            self.answer, self.ended = said, True
        own = sum(turn.branch == (self.branches if self.fork else 0) for turn in self.turns)
        self.ended |= own >= (WITHIN if self.fork else STEPS)

    def _add(self, *said: Said) -> None:
        self.shown += said
        self.whole += said

    def penalty(self, turn: Turn, heeded: Sequence[str]) -> float:
        """The process reward of a turn, 0 or less, as the paper has it."""
        if "failure" in heeded and turn.failed:
            return -1.0
        if "scope" in heeded and turn.branch in self.strayed:
            return -0.2
        long = "unfolded" in heeded and not turn.branch and turn.tool != "branch" and self.longest > MOST
        return -1.0 if long else 0.0


def tokens_of(line: Sequence[Said], newest: bool = False) -> list[int]:
    """A line as a prompt.

    Args:
        newest: whether a handle stands in the place of each observation but the last.
    """
    last = max((at for at, said in enumerate(line) if said.observed), default=0)
    found: list[int] = []
    for at, said in enumerate(line):
        found.append(said.role)
        found += [GAP] if newest and said.observed and at != last else WORDS.encode(said.text)
        if said.role == AGENT:
            found.append(END)
    return [*found, AGENT]


def rolled(tasks: Sequence[Task], says: Callable[[list[Trial]], list[list[int]]]) -> list[Trial]:
    """A roll-out of each task."""
    trials = [Trial(task) for task in tasks]
    while going := [trial for trial in trials if not trial.ended]:
        for trial, reply in zip(going, says(going), strict=True):
            trial.take(reply)
    return trials


def demonstrator(chance: random.Random, folds: float = 0.5, strays: float = 0.3, fails: float = 0.2) -> Callable[[Trial], str]:
    """Somebody who knows the forms. It looks the keys up one after the other, and answers what it sees, or guesses.

    Args:
        folds: how often it looks a key up in a branch. strays, fails: how often a branch begins with another key, or a branch.
    """

    def says(trial: Trial) -> str:
        task, keys = trial.task, list(trial.task.values)
        done = sum(not turn.branch and turn.tool in ("look", "branch") for turn in trial.turns)
        if trial.fork:
            key, own = trial.asked[-1], [turn for turn in trial.turns if turn.branch == trial.branches]
            if trial.shown[-1].text == task.observed[key]:
                return f"return {task.values[key]}"
            if not own and chance.random() < fails:
                return f"branch {key} {key}"
            return f"look {chance.choice(keys) if not own and chance.random() < strays else key}"
        if done < ASKED:
            return f"branch {keys[done]} {keys[done]}" if chance.random() < folds else f"look {keys[done]}"
        told = [keys[at] for at, turn in enumerate(turn for turn in trial.turns if not turn.branch) if turn.tool == "branch"]
        known = {*told, *(key for key in keys if trial.shown[-1].text == task.observed[key])}
        return " ".join(["answer", *(f"{key} {task.values[key] if key in known else chance.choice(VALUES)}" for key in keys)])

    return says


def supervised(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on demonstrations, mostly on what has to be copied: returns and answers."""
    says = demonstrator(chance.worlds)
    trials = rolled([draw(chance.worlds) for _ in range(24)], lambda trials: [WORDS.reply(says(trial)) for trial in trials])
    turns = [turn for trial in trials for turn in trial.turns]
    found = [turn.row for turn in turns if turn.tool in ("return", "")]
    others = [turn.row for turn in turns if turn.tool in ("look", "branch")]
    return sft_loss(model, [*found, *chance.worlds.sample(others, 24)]), {}


def unfolded(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
    """A step on the same demonstrations, each as one transcript in which nothing ever left."""
    says = demonstrator(chance.worlds)
    trials = rolled([draw(chance.worlds) for _ in range(24)], lambda trials: [WORDS.reply(says(trial)) for trial in trials])
    return conversation_loss(model, [[turn.whole for turn in trial.turns] for trial in trials]), {}


def weights_of(trials: Sequence[Trial], heeded: Sequence[str]) -> list[float]:
    """The advantage of each turn: the outcome with its penalty, cut to 0 to 1, less the mean outcome of the group, in standard
    deviations of the group. Trials of one group stand together. A spread below a quarter counts as that: where all are right, a
    penalty would have no measure."""
    found = []
    for begin in range(0, len(trials), GROUP):
        group = trials[begin : begin + GROUP]
        paid = [trial.right for trial in group]
        middle, spread = fmean(paid), max(pstdev(paid), 0.25)
        for trial in group:
            found += [(min(1.0, max(0.0, trial.right + trial.penalty(turn, heeded))) - middle) / spread for turn in trial.turns]
    return found


def speaking(model: Transformer, chance: Chance, whole: bool = False) -> Callable[[list[Trial]], list[list[int]]]:
    """Replies that a model draws, where it is shown what the kernel shows, or the whole transcript."""

    def says(going: list[Trial]) -> list[list[int]]:
        prompts = [tokens_of(trial.whole) if whole else trial.prompt for trial in going]
        return generate(model, prompts, RECIPE.reply, temperature=1.0, chance=chance.sampling)

    return says


def reinforced(arm: str) -> Step:
    """Steps on what the model itself tried, in the contexts in which it tried it, paid as the arm says."""

    def step(model: Transformer, chance: Chance, done: float) -> tuple[Tensor, dict[str, float]]:
        trials = rolled([task for _ in range(6) for task in [draw(chance.worlds)] * GROUP], speaking(model, chance))
        turns = [turn.row for trial in trials for turn in trial.turns]
        weighed = list(zip(turns, weights_of(trials, ARMS[arm]), strict=True))
        weighed = chance.worlds.sample(weighed, min(len(weighed), 240))
        loss = policy_loss(model, [row for row, _ in weighed], [weight for _, weight in weighed])
        return loss, {"right": fmean(trial.right for trial in trials), "main": fmean(trial.longest for trial in trials)}

    return step


class Run(NamedTuple):
    """How an episode went: its last answer, the replies to the task, and the tokens of the longest prompt of the main line."""

    answer: str
    replies: list[str]
    longest: int


def played(model: TrainedModel, task: Task, branches: int = 10) -> Run:
    """The task through the product's agent that branches, its session, policy and window.

    Args:
        branches: at most.
    """

    def look(key: str) -> str:
        return task.look(key)

    shown = Shown(model)
    with kilburn.open(":memory:", window=WINDOW, policy=POLICY, tokenizer=model.tokenizer, embedder=None) as store:
        limits = Limits(steps=STEPS, reply=model.described.reply)
        within = SubAgent(limits=Limits(steps=WITHIN, reply=model.described.reply))
        agent = Branching(shown, [look], store.session("s"), agents=[within], max_branches=branches, limits=limits, memory=False)
        result = agent.run(task.question)
    main = [
        size for size, prompt in zip(shown.sizes, shown.prompts, strict=True) if not any(MARK in str(each) for each in prompt)
    ]
    return Run(result.text if result.finish == "stop" else "", [*map(WORDS.said, shown.said)], max(main))


def measured(course: TrainingRun, arm: str, episodes: int, branches: int = 10) -> Figures:
    """What comes of it through the product. Replies are drawn, as in training."""
    model, chance = Toy(str(course.checkpoint(arm)), temperature=1.0, seed=course.seed), course.chance("measure").worlds
    tasks = [draw(chance) for _ in range(episodes)]
    runs = [(task, played(model, task, branches)) for task in tasks]
    label = arm if branches else f"{arm}, no branches"
    figures = {
        (label, "right"): fmean(task.right(run.answer) for task, run in runs),
        (label, "finished"): fmean(is_formed(run.answer) for _, run in runs),
        (label, "longest main prompt"): fmean(run.longest for _, run in runs),
    }
    if not branches:
        return figures
    trials = [replayed(task, run.replies) for task, run in runs]
    turns, begun = [turn for trial in trials for turn in trial.turns], sum(trial.branches for trial in trials)
    looked = sum(turn.tool in ("look", "branch") and not turn.branch for turn in turns)
    return figures | {
        (label, "look-ups in branches"): begun / max(1, looked),
        (label, "branches in scope"): 1 - sum(len(trial.strayed) for trial in trials) / max(1, begun),
        (label, "failed calls a task"): sum(turn.failed for turn in turns) / episodes,
    }


def replayed(task: Task, replies: Sequence[str]) -> Trial:
    """A roll-out of these replies."""
    trial = Trial(task)
    for reply in replies:
        if not trial.ended:
            trial.take(WORDS.reply(reply))
    return trial


def train(course: TrainingRun) -> Figures:
    """Demonstrations, then each reward; measured through the product."""
    episodes = 3 if course.smoke else 16
    course.train("sft", 40 if course.smoke else 300, supervised, rate=6e-3)
    found = measured(course, "sft", episodes)
    model, chance = course.train("sft unfolded", 40 if course.smoke else 300, unfolded, rate=6e-3), course.chance("measure whole")
    whole = rolled([draw(chance.worlds) for _ in range(4 if course.smoke else 64)], speaking(model, chance, whole=True))
    found["sft unfolded", "right, nothing folded in use"] = fmean(trial.right for trial in whole)
    found |= measured(course, "sft unfolded", episodes)
    for arm in ARMS:
        course.train(arm, 1 if course.smoke else 12, reinforced(arm), rate=2e-3, begin="sft")
        found |= measured(course, arm, episodes)
    return found | measured(course, "FoldGRPO", episodes, branches=0)


RECIPE = Recipe(
    name="contextfold",
    doc=(__doc__ or "").partition("\n")[0],
    words=WORDS,
    shape=TransformerShape(layers=2, width=64, heads=4, context=512),
    reply=8,
    train=train,
    drawn={"right": tuple(ARMS), "main": tuple(ARMS)},
    note="right: the share of right answers; a guess is right one time in ten. finished: the run ended in an answer with a value "
    "for each key. look-ups in branches: of those that the main line did or handed on. All through the product's agent, session, "
    "policy and window, drawn at temperature 1.",
)
app = command(RECIPE)

if __name__ == "__main__":
    sys.exit(main(commands=app, name="contextfold.py"))
