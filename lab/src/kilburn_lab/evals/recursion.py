"""Recursive models on texts beyond any window: aggregation and pairs, from 24 thousand to 10 million tokens.

What is measured is the system and not a small model: the labels come from an oracle (a model that looks each remark up),
and the root is a program that writes what a good model would write (`FaultlessRoot`), so every reply is known and no reply is
wrong. What is left to go wrong is the budget, the batches, the sandbox, the recursion and the window. Real models may take
either place. Beside it, with the same labels: code alone (depth 0), the newest part of the text that fits a window, and one
search whose hits fit it; their reader makes no mistakes either.

    report = evaluate([24_000], systems=["depth 1", "truncate"])
    print(report.table())
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import msgspec

from kilburn.agents.loop import UNLIMITED, Limits
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Model, Reply, Request
from kilburn.opening import Store
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult
from kilburn.recursion.sandbox import Bounds
from kilburn_lab.evals.aggregation import (
    KEYWORDS,
    TASKS,
    TOPICS,
    AggregateQuestion,
    Item,
    items,
    question_of,
    reports,
    tally,
    topic_of,
)
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of

SYSTEMS = ("depth 0", "depth 1", "depth 2", "truncate", "search")
"""Code without sub-calls; with `llm_query`; with `rlm_query`; the newest text that fits; a search whose hits fit."""

REPORTS = "reports"
"""The task of judging pairs: which reports are of the same event. Its size is a number of reports, not of tokens."""

BATCH = 50
"""Items that one sub-call labels, by default."""

PIECE = 400_000
"""Characters of a piece that a run below gets: about 100,000 tokens."""

TOGETHER = 100
"""Prompts of one batch: what the code hands over at once is bounded."""

TELL = "What is each remark about? Answer with one line for each, `number: topic`. Topics: " + ", ".join(TOPICS)
PAIR = "Are these two reports of the same event? Answer yes or no."
ENTRIES = "Count the remarks by user, month and topic: a dict of 'user|month|topic' to a number."

LOOK = "print(len(context), 'characters'); print(context[:200])"

LABEL = f"""\
batch = BATCH
items = [line.split(" | ", 2) for line in context.splitlines()]
prompts = []
for start in range(0, len(items), batch):
    part = enumerate(items[start:start + batch], start)
    prompts.append({TELL!r} + "\\n" + "\\n".join(f"{{n}}: {{item[2]}}" for n, item in part))
labels = {{}}
for start in range(0, len(prompts), {TOGETHER}):
    for reply in llm_query_batched(prompts[start:start + {TOGETHER}]):
        for line in (reply or "").splitlines():
            n, _, label = line.partition(":")
            if n.strip().isdecimal():
                labels[int(n)] = label.strip().lower()
found = {{}}
for n, (date, user, remark) in enumerate(items):
    if n in labels:
        key = (user, date[:7], labels[n])
        found[key] = found.get(key, 0) + 1
print(len(labels), "of", len(items), "labelled")
"""

WORDS = f"""\
words = {KEYWORDS!r}
found = {{}}
for line in context.splitlines():
    date, user, remark = line.split(" | ", 2)
    label = {TOPICS[0]!r}
    for topic, marks in words.items():
        for mark in marks:
            if mark in remark:
                label = topic
    key = (user, date[:7], label)
    found[key] = found.get(key, 0) + 1
"""

PIECES = f"""\
lines, pieces, size = [], [], 0
for line in context.splitlines(True):
    lines.append(line); size += len(line)
    if size >= {PIECE}:
        pieces.append("".join(lines)); lines, size = [], 0
if lines:
    pieces.append("".join(lines))
found = {{}}
for start in range(0, len(pieces), 8):
    for part in rlm_query_batched({ENTRIES!r}, pieces[start:start + 8]):
        for key, n in (part or {{}}).items():
            key = tuple(key.split("|"))
            found[key] = found.get(key, 0) + n
print(len(pieces), "pieces,", sum(found.values()), "remarks")
"""

READY = 'answer["content"] = {}\nanswer["ready"] = True'

JUDGE = f"""\
texts = context.splitlines()
pairs = [[a, b] for a in range(len(texts)) for b in range(a + 1, len(texts))]
same = []
for start in range(0, len(pairs), 1000):
    chunk = pairs[start:start + 1000]
    prompts = [{PAIR!r} + f"\\nA: {{texts[a]}}\\nB: {{texts[b]}}" for a, b in chunk]
    same += [pair for pair, reply in zip(chunk, llm_query_batched(prompts)) if (reply or "").strip().lower().startswith("yes")]
"""

OVERLAP = """\
texts = context.splitlines()
words = [set(text.replace(",", "").split()) for text in texts]
same = [[a, b] for a in range(len(texts)) for b in range(a + 1, len(texts)) if len(words[a] & words[b]) >= 4]
"""


def _reply(text: str) -> Reply:
    return Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)))


class Oracle:
    """A model that knows the topic of every remark, and which reports are of one event.

    It reads the prompts that `FaultlessRoot` writes, and says nothing of others.
    """

    name = "oracle"
    form = "chat"
    context: int | None = None
    tokenizer: Any = f"chars/{CHARACTERS}"

    def stream(self, request: Request) -> Iterator[Reply]:
        """The labels, one a line; or yes or no."""
        asked, _, rest = request.messages[-1]["content"].partition("\n")
        if asked == PAIR:
            a, b = (set(re.findall(r"[A-Z]\w+|\d+", line[3:])) | set(_events(line)) for line in rest.splitlines())
            yield _reply("yes" if a - {"A", "B"} == b - {"A", "B"} else "no")
            return
        told = []
        for line in rest.splitlines():
            number, _, remark = line.partition(": ")
            topic = topic_of(remark)
            told += [f"{number}: {topic}"] if topic else []
        yield _reply("\n".join(told) or "nothing to label")


def _events(line: str) -> list[str]:
    return re.findall(r"outage|recall|strike|flood|fire|storm|theft|delay|protest|crash", line)


class FaultlessRoot:
    """The root as a program: it writes the code that a good model would write, in two cells, and makes no mistakes.

    It keeps no state, so it may be the root of many runs at once: the question says what to do, and the replies before it
    say how far it is.

    Args:
        questions: those that it may be asked.
        depth: of the outermost run.
        batch: items that one sub-call labels.
    """

    name = "template"
    form = "chat"
    context: int | None = None
    tokenizer: Any = f"chars/{CHARACTERS}"

    def __init__(self, questions: Sequence[AggregateQuestion], depth: int, batch: int = BATCH) -> None:
        self._codes = {question.text: question.code for question in questions}
        self._depth = depth
        self._label = LABEL.replace("BATCH", str(batch))

    def stream(self, request: Request) -> Iterator[Reply]:
        """The next cell."""
        said = [message for message in request.messages if message["role"] == "assistant"]
        asked = next((text for message in request.messages if (text := message.get("content")) in self._codes), ENTRIES)
        code = self._work(asked) if said else LOOK
        call = Part(kind=Kind.CALL, text=json.dumps({"code": code}), call=f"c{len(said)}", name="repl")
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(call,)), finish=Finish.CALLS)

    def _work(self, asked: str) -> str:
        if asked == ENTRIES:
            return self._label + READY.format('{"|".join(key): n for key, n in found.items()}')
        if asked == REPORTS_QUESTION:
            return (JUDGE if self._depth else OVERLAP) + READY.format("same")
        return (WORDS, self._label, PIECES)[min(self._depth, 2)] + READY.format(self._codes[asked])


REPORTS_QUESTION = "Which pairs of reports, as [first, second] by number from 0, are of the same event?"


class RecursionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One question to one system.

    Args:
        system: see `SYSTEMS`.
        task: the kind of question.
        size: tokens that the text should have; of reports, their number.
        tokens: of the text, of four characters each.
        items: in the text.
        exact: whether the answer is right.
        f1: of pairs; None of any other question.
        calls: sub-calls.
        resident: tokens of the largest prompt of the outermost model.
        spent: tokens of all prompts and replies.
        outcome: how the run ended; "read" for one prompt.
    """

    system: str
    task: str
    size: int
    tokens: int
    items: int
    exact: bool
    f1: float | None
    calls: int
    resident: int
    spent: int
    seconds: float
    outcome: str


class RecursionReport(EvalReport, frozen=True, kw_only=True):
    """What was measured; `model` and `sub` are the root and who answers sub-calls."""

    model: str
    sub: str
    window: int
    seed: int
    rows: list[RecursionRow]

    def table(self) -> str:
        """A line for each system and size: right answers, F1 of pairs, sub-calls, tokens, seconds; means, and the largest
        prompt."""
        known: dict[tuple[str, int, str], list[RecursionRow]] = {}
        for row in self.rows:
            known.setdefault((REPORTS if row.task == REPORTS else "items", row.size, row.system), []).append(row)
        columns = (
            "system={key[2]} | text={key[0]} | tokens={tokens:,} | items={items:,} | questions={questions} | right={right:.2f} | "
            "pair F1={f1:.2f} | calls={calls:,} | resident={resident:,} | spent={spent:,} | seconds={seconds:.1f}"
        )
        body = table_of(
            [(key, rows, [row.f1 for row in rows if row.f1 is not None]) for key, rows in known.items()],
            columns,
            ("system", "text"),
            "-",
            key=lambda one: one[0],
            tokens=lambda one: round(mean(row.tokens for row in one[1])),
            items=lambda one: round(mean(row.items for row in one[1])),
            questions=lambda one: len(one[1]),
            right=lambda one: mean(row.exact for row in one[1]),
            f1=lambda one: mean(one[2]) if one[2] else None,
            calls=lambda one: round(mean(row.calls for row in one[1])),
            resident=lambda one: max(row.resident for row in one[1]),
            spent=lambda one: round(mean(row.spent for row in one[1])),
            seconds=lambda one: mean(row.seconds for row in one[1]),
        )
        words = f"root: {self.model}; sub-calls: {self.sub}; window {self.window:,} tokens of {CHARACTERS} characters"
        return f"{words}\n\n{body}"


def evaluate(
    tokens: Sequence[int] = (24_000,),
    *,
    systems: Sequence[str] = SYSTEMS,
    tasks: Sequence[str] = TASKS,
    judged: Sequence[int] = (),
    window: int = 8000,
    batch: int = BATCH,
    count: int = 1,
    seed: int = 0,
    model: Model | None = None,
    sub: Model | None = None,
    tools: bool = True,
    limits: Limits | None = None,
    sandbox: str = "auto",
    progress: Progress = unwatched,
) -> RecursionReport:
    """Ask each system the same questions about the same texts.

    Args:
        tokens: sizes of the texts, of four characters a token.
        systems: of `SYSTEMS`.
        tasks: of `TASKS`.
        judged: numbers of reports whose pairs are judged one by one, at depth 0 and 1.
        window: tokens of every model's prompt.
        batch: items that one sub-call labels.
        count: texts of each size, with a question of each task.
        model: the root; None for `FaultlessRoot`.
        sub: answers sub-calls; None for `Oracle`.
        tools: whether the root is offered tools.
        limits: of each question; by default eight steps, and no other.
        progress: called with the questions that are done, and all.

    Raises:
        SpecError: no such system or task. SandboxRefused, MissingExtra: there is no sandbox on this machine.
    """
    check_known("system", systems, SYSTEMS)
    rows: list[RecursionRow] = []
    jobs: list[tuple[str, int, int, str]] = []
    for size in dict.fromkeys(tokens):
        jobs += [(task, size, seed + at, system) for at in range(count) for system in systems for task in tasks]
    depths = [system for system in systems if system in ("depth 0", "depth 1")]
    jobs += [(REPORTS, size, seed + at, system) for size in judged for at in range(count) for system in depths]
    text: tuple[tuple[str, int, int], list[Item], str] = (("", 0, 0), [], "")
    for done, (task, size, number, system) in enumerate(jobs):
        progress(done, len(jobs))
        told: list[Item] = []
        if task == REPORTS:
            lines, same = reports(size, number)
            whole, asked = "\n".join(lines), AggregateQuestion(task=REPORTS, text=REPORTS_QUESTION, code="", answer=same)
        else:
            if text[0] != ("items", size, number):
                told = items(size, number)
                text = ("items", size, number), told, "\n".join(item.line for item in told)
            _, told, whole = text
            asked = question_of(task, told, number)
        began = time.perf_counter()
        with Store(Sqlite(":memory:"), Budget(window), "hybrid", tokenizer=f"chars/{CHARACTERS}") as store:
            if system.startswith("depth"):
                depth = int(system[-1])
                agent = RecursiveModel(
                    model or FaultlessRoot([asked], depth, batch),
                    store.session("root"),
                    sub=sub or Oracle(),
                    depth=depth,
                    limits=limits or msgspec.structs.replace(UNLIMITED, steps=8),
                    sandbox=sandbox,
                    bounds=Bounds(seconds=120, memory=2 << 30, output=4000),
                    tools=tools,
                )
                found = agent.ask(asked.text, whole)
            else:
                found = _read(store, asked, told, whole, window, search=system == "search")
        seconds = time.perf_counter() - began
        rows.append(
            RecursionRow(
                system=system,
                task=task,
                size=size,
                tokens=-(-len(whole) // CHARACTERS),
                items=len(told) or size,
                exact=found.content == asked.answer,
                f1=_f1(found.content, asked.answer) if task in ("pairs", REPORTS) else None,
                calls=found.calls,
                resident=found.resident,
                spent=found.tokens,
                seconds=seconds,
                outcome=str(found.outcome) if system.startswith("depth") else "read",
            )
        )
    return RecursionReport(
        model=(model or FaultlessRoot([], 0)).name, sub=(sub or Oracle()).name, window=window, seed=seed, rows=rows
    )


def _read(
    store: Store, asked: AggregateQuestion, told: Sequence[Item], whole: str, window: int, *, search: bool
) -> RecursiveResult:
    """What a reader answers who sees one window of the text, knows every topic, and makes no mistakes."""
    room = (window - 1000) * CHARACTERS
    if search:
        session = store.session("text")
        lines = whole.splitlines()
        for start in range(0, len(lines), 1000):
            parts = ["\n".join(lines[at : at + 20]) for at in range(start, min(start + 1000, len(lines)), 20)]
            session.append(*({"role": "user", "content": part} for part in parts))
        hits = session.search(asked.text, tokens=window - 1000, limit=10_000, record=False)
        shown = "\n".join(hit.text for hit in hits)[:room]
    else:
        shown = whole[-room:]
    lines_shown = set(shown.splitlines())
    seen = [item for item in told if item.line in lines_shown]
    found = tally(seen)
    content = asked.compute(found) if found else None
    return RecursiveResult(content=content, resident=len(shown) // CHARACTERS, tokens=len(shown) // CHARACTERS)


def _f1(found: Any, wanted: list[list[Any]]) -> float:
    """Of pairs: the harmonic mean of precision and recall."""
    try:
        got, want = {tuple(pair) for pair in found}, {tuple(pair) for pair in wanted}
    except TypeError:
        return 0.0
    if not got and not want:
        return 1.0
    return 2 * len(got & want) / (len(got) + len(want))
