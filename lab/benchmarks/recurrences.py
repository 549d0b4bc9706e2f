"""How far a Reasoning Cache carries: a task that takes many more steps than one context holds.

The task is a recurrence, x -> (a x + c) mod m, N times: the problem is a line, the state is a number, and
nothing but doing the steps gives the answer. `Stepper` is a public solver that does them and knows
nothing but its prompt, so that what comes out depends on the rounds alone; a language model can be put
in its place.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Overlong, Refused
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Model, Reply, Request
from kilburn.tokens.estimate import Characters
from kilburn_lab.reasoning_cache import Reasoning, ReasoningCache, RoundPrompts, Schedule

STEPWISE = RoundPrompts(
    system="You continue lists of numbers. You write the lines of the list and nothing else.",
    reason="{problem}",
    resume="{problem}\n\nThe list is written up to this line:\n{summary}\nGo on with the next lines.",
    summarise=(
        "This list is written in parts: {problem}\n\nThe last line of the part before:\n{summary}\n\n"
        "The newest part, whose end may be cut off:\n{trace}\n\n"
        "Copy the last line of the newest part that is whole, and nothing else."
    ),
)
"""Prompts for a model that can do little: one step a line, and a summary of one value."""


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """x_0 = `start`, x_(n+1) = (`factor` x_n + `term`) mod `modulus` (0 for none); asked is #`steps`."""

    start: int
    factor: int
    term: int
    modulus: int
    steps: int

    @property
    def problem(self) -> str:
        """The task in words."""
        rule = (
            f"{self.factor} times the one before it plus {self.term}"
            if self.factor != 1
            else f"{self.term} more than the one before it"
        )
        if self.modulus:
            rule += f", modulo {self.modulus}"
        return f"Continue this list up to #{self.steps}. Each value is {rule}.\n#0 = {self.start}\n#1 = {self.after(1)}\n"

    def after(self, steps: int) -> int:
        """The value after so many steps."""
        value = self.start
        for _ in range(steps):
            value = self.factor * value + self.term
            value = value % self.modulus if self.modulus else value
        return value


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one task.

    Args:
        right: whether a trace has the right last value.
        reached: the furthest step of which a trace has the right value.
        reasoning: all else.
    """

    right: bool
    reached: int
    reasoning: Reasoning


def recurrences(count: int, steps: Sequence[int], *, seed: int = 0, factor: int | None = None) -> list[Recurrence]:
    """Seeded tasks of these lengths in turn; `factor` fixes what is multiplied by, 1 for additions only."""
    rng = random.Random(seed)
    return [
        Recurrence(
            start=rng.randrange(90),
            factor=rng.choice((3, 7, 11)) if factor is None else factor,
            term=rng.randrange(3, 10),
            modulus=rng.choice((89, 97)) if factor is None else 0,
            steps=steps[number % len(steps)],
        )
        for number in range(count)
    ]


def solve(task: Recurrence, model: Model, schedule: Schedule, prompts: RoundPrompts = STEPWISE, tokenizer: Any = None) -> Run:
    """One task by a Reasoning Cache, in a session of its own; it ends with the round that gives an answer."""
    with Store(Sqlite(":memory:"), Budget(1 << 30), "fifo", tokenizer=tokenizer or model.tokenizer) as store:
        session = store.session("task")
        cache = ReasoningCache(model, session, schedule, prompts=prompts, done=lambda trace: f"#{task.steps} = " in trace)
        made = cache.run(task.problem)
        traces = [str(session.recall(one.trace_address)) for one in made.rounds if one.trace_address]
    found = {(int(number), int(value)) for trace in traces for number, value in VALUE.findall(trace)}
    reached = max((number for number, value in found if number <= task.steps and value == task.after(number)), default=0)
    return Run(right=(task.steps, task.after(task.steps)) in found, reached=reached, reasoning=made)


VALUE = re.compile(r"#(\d{1,6}) = (\d{1,6})\b")
PART = "\nThe newest part, whose end may be cut off:\n"
RULE = re.compile(
    r"up to #(\d+)\. Each value is (?:(\d+) times the one before it plus (\d+)|(\d+) more than the one before it)"
    r"(?:, modulo (\d+))?\.\n#0 = (\d+)\n"
)


class Stepper:
    """A model that does steps of a `Recurrence`, a line each, until its reply is full, and knows only its prompt.

    Asked with STEPWISE's prompts. Tokens are four characters.

    Args:
        context: tokens of prompt and reply together; None for any number.
        slips: one step in so many goes wrong, as it would for a model; 0 for none. Which ones depends on
            the value alone.
    """

    name = "stepper"
    form = "chat"

    def __init__(self, context: int | None = None, slips: int = 0) -> None:
        self.context, self.slips = context, slips
        self.tokenizer: Any = Characters(4)
        self.peak = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The next lines, or the last whole value of those that it is shown.

        Raises:
            Refused: no messages. Overlong: prompt and reply do not fit the context.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        prompt = "\n".join(str(message["content"]) for message in request.messages)
        held = self.tokenizer.count(prompt) + request.max_tokens
        self.peak = max(self.peak, held)
        if self.context is not None and held > self.context:
            raise Overlong(f"{held} tokens in a context of {self.context}", advice="ask for less")
        most = 4 * request.max_tokens
        rule = RULE.search(prompt)
        if rule is None:
            text, finish = "I see no recurrence."[:most], "stop"
        elif PART in prompt:
            text, finish = _last_value(prompt), "stop"
        else:
            text, finish = self._steps(rule, prompt, most)
        yield from (Delta(text[at : at + 40]) for at in range(0, len(text), 40))
        part = Part(kind=Kind.TEXT, text=text)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(part,)), finish=finish)

    def _steps(self, rule: re.Match[str], prompt: str, most: int) -> tuple[str, str]:
        last, factor, term, modulus, start = (
            int(rule[1]),
            int(rule[2] or 1),
            int(rule[3] or rule[4]),
            int(rule[5] or 0),
            int(rule[6]),
        )
        known = VALUE.findall(prompt[rule.end() :].partition("\nThe list is written up to this line:\n")[2])
        number, value = (int(known[-1][0]), int(known[-1][1])) if known else (0, start)
        lines: list[str] = []
        size = 0
        while number < last and size < most:
            wrong = bool(self.slips) and value % self.slips == 1
            number, value = number + 1, factor * value + term + wrong
            value = value % modulus if modulus else value
            lines.append(f"#{number} = {value}\n")
            size += len(lines[-1])
        text = "".join(lines)
        return text[:most], "stop" if len(text) <= most else "length"


def _last_value(prompt: str) -> str:
    """The last value on a whole line, or the one that was known before."""
    before, _, shown = prompt.rpartition(PART)
    lines = shown.partition("\n\nCopy the last line")[0].splitlines()
    for line in [*before.partition("\nThe last line of the part before:\n")[2].splitlines(), *lines[:-1]][::-1]:
        found = VALUE.search(line)
        if found:
            return found[0]
    return "nothing yet"
