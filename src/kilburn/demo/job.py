"""The demo from its first call to its last figure: work, check, ask, compare.

It measures and returns; it prints nothing (`report` does) and decides nothing (the policy does).
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits, Returned
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.memory import OfProcess
from kilburn.demo.questions import Question, questions
from kilburn.demo.rivals import Kept, summarised, truncated
from kilburn.demo.voice import Folded, Phrase, folds, phrase, speaker
from kilburn.demo.workshop import Workshop
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.process import Process
from kilburn.model import Model
from kilburn.page import digest_of

__all__ = ["Asked", "Outcome", "Plan", "Rival", "perform"]

SESSION = "library"
SYSTEM = "You are an agent that explores a Python library with tools: list, read, search, run."
SHORT = 80
"""Characters of an answer that a small model may phrase."""

BLOCK = 128
"""Pages that the check recalls at a time."""

Told = Callable[[str, int, int | None, str], None]
"""Called with a phase, how much is done, of how much (None: not known), and a line on what happens."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Args:
        db: the store's file; it must have no session "library" yet.
        library: the tree of sources; "" for the running interpreter's standard library.
        whole: tests and applications of the library too.
        model: a model's name or spec, or "none".
        folds, phrases: how much of it the model does.
        tokenizer: who counts.
        seconds: after which the agent stops once it has seen `enough` tokens of tool output; None for never.
    """

    db: str
    library: str = ""
    whole: bool = False
    window: int = 8000
    policy: str = "hybrid"
    tokenizer: str = "gpt-4o"
    questions: int = 40
    seed: int = 0
    model: str = "none"
    folds: int = 3
    phrases: int = 4
    seconds: float | None = 90.0
    enough: int = 1_200_000


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question and what memory gave: `address` is the page it was read from."""

    kind: str
    question: str
    expected: str
    answer: str
    exact: bool
    address: str
    where: str


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """What another way kept. `exact` answers, and questions whose source line was still there, read or not."""

    name: str
    tokens: int
    exact: int
    evidence: int


class Outcome(msgspec.Struct, kw_only=True):
    """All that is reported. Tokens by `tokenizer`; `lost` in bytes; `seconds` by phase; `failed` tool calls;
    `stopped` the steps that were still on the agent's list when its time was up."""

    library: str
    python: str
    db: str
    session: str
    policy: str
    tokenizer: str
    seed: int
    window: int
    capacity: int = 0
    files: int = 0
    lines: int = 0
    calls: int = 0
    failed: int = 0
    stopped: int = 0
    output_tokens: int = 0
    pages: int = 0
    prompts: int = 0
    peak: int = 0
    tokens_shipped: int = 0
    evictions: int = 0
    folds: int = 0
    overflow: int = 0
    checked: int = 0
    checked_bytes: int = 0
    lost: int = 0
    faults: int = 0
    recalls: int = 0
    searches: int = 0
    asked: list[Asked] = []
    rivals: list[Rival] = []
    model: str = "none"
    model_missing: str = ""
    model_folds: list[Folded] = []
    phrases: list[Phrase] = []
    curve: list[tuple[int, int]] = []
    seconds: dict[str, float] = {}
    bytes_on_disk: int = 0

    @property
    def exact(self) -> int:
        """Questions answered exactly."""
        return sum(asked.exact for asked in self.asked)

    @property
    def ok(self) -> bool:
        """Nothing overflowed, nothing was lost, everything was answered."""
        return not self.overflow and not self.lost and bool(self.asked) and self.exact == len(self.asked)


def perform(plan: Plan, told: Told = lambda phase, done, total, line: None) -> Outcome:
    """Run the whole demo.

    Raises:
        SpecError: the library is no folder, or the store has this session already. KilburnError.
    """
    root = Path(plan.library or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SpecError(f"{root} is no folder", advice="give a folder with Python sources")
    outcome = Outcome(
        library=str(root),
        python=sys.version.split()[0],
        db=plan.db,
        session=SESSION,
        policy=plan.policy,
        tokenizer=plan.tokenizer,
        seed=plan.seed,
        window=plan.window,
    )
    _Job(plan, root, outcome, told).do()
    outcome.bytes_on_disk = sum(path.stat().st_size for path in Path(plan.db).parent.glob(Path(plan.db).name + "*"))
    return outcome


class _Job:
    """One run of the demo."""

    def __init__(self, plan: Plan, root: Path, outcome: Outcome, told: Told) -> None:
        self.plan, self.root, self.outcome, self.told = plan, root, outcome, told
        self.journal: list[tuple[str, int]] = []
        self.contexts: list[str] = []

    def do(self) -> None:
        """Fetch the model, if any, and then do everything; what the model cannot be had for is left out."""
        plan, outcome = self.plan, self.outcome
        with self._phase("fetch"):
            model, outcome.model_missing = speaker(
                plan.model,
                lambda name, done, total: self.told("fetch", done, total, f"{name}, {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"),
            )
        try:
            self._remember()
            if model is not None:
                outcome.model = model.name
                with self._phase("model"):
                    self._speak(model)
        finally:
            if hasattr(model, "close"):
                model.close()

    def _remember(self) -> None:
        plan = self.plan
        with kilburn.open(plan.db, window=plan.window, policy=plan.policy, tokenizer=plan.tokenizer) as store:
            if any(info.name == SESSION for info in store.processes()):
                raise SpecError(f"{plan.db} has a session {SESSION!r} already", advice="give another --db, or none")
            process = store.process(SESSION)
            with self._phase("work"):
                covered = self._work(process)
            with self._phase("check"):
                self._check(process)
            with self._phase("questions"):
                self.told("questions", 0, None, "reading the sources for exact answers")
                asked = questions(self.root, covered, number=plan.questions, seed=plan.seed)
            with self._phase("answers"):
                self._answer(process, asked)
            with self._phase("rivals"):
                self._compare(process, asked)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self.told(name, 0, None, "")
        yield
        self.outcome.seconds[name] = time.monotonic() - began

    def _note(self, text: str) -> None:
        data = text.encode("utf-8")
        self.journal.append((hashlib.sha256(data).hexdigest(), len(data)))

    def _work(self, process: Process) -> dict[str, int]:
        plan, outcome, count = self.plan, self.outcome, process.counter.count

        def handed(output: str) -> None:
            self._note(output)
            outcome.output_tokens += count(output)
            outcome.calls += 1

        workshop = Workshop(self.root, whole=plan.whole, noted=handed)
        explorer = Explorer(noted=self._note)
        agent = Agent(explorer, workshop.tools(), process, limits=Limits(steps=None, reply=0), system=SYSTEM)
        outcome.capacity = process.capacity
        self._note(SYSTEM)
        self._note(TASK)
        began = time.monotonic()
        events = agent.stream(TASK)
        for event in events:
            if isinstance(event, Returned):
                if event.failed:
                    self._note(event.text)
                    outcome.calls += 1
                    outcome.failed += 1
                if plan.seconds is not None and time.monotonic() - began > plan.seconds and outcome.output_tokens >= plan.enough:
                    outcome.stopped = explorer.left
                    break
                if not outcome.calls % 10:
                    self.told(
                        "work", outcome.calls, outcome.calls + explorer.left, f"{outcome.output_tokens:,} tokens of tool output"
                    )
        events.close()  # type: ignore[attr-defined]
        outcome.files, outcome.lines = len(workshop.covered), sum(workshop.covered.values())
        self._measure(process)
        return workshop.covered

    def _measure(self, process: Process) -> None:
        outcome, stats = self.outcome, process.stats()
        for name in ("pages", "prompts", "peak", "tokens_shipped", "evictions", "folds", "overflow"):
            setattr(outcome, name, stats[name])
        seen = 0
        cost = {page.id: page.tokens for page, _ in process.pages()}
        for event in process.events():
            if event.act is Act.ADMIT:
                seen += sum(cost[page] for page in event.pages)
            elif event.act is Act.SHIP:
                outcome.curve.append((seen, event.tokens))

    def _check(self, process: Process) -> None:
        """Every page, read back from the file by a second reader, against what was handed over."""
        outcome, journal = self.outcome, self.journal
        with kilburn.open(
            self.plan.db, window=self.plan.window, tokenizer=self.plan.tokenizer, policy="fifo", readonly=True
        ) as store:
            reader = store.process(SESSION)
            last = max((page.id for page, _ in reader.pages()), default=0)
            for first in range(1, len(journal) + 1, BLOCK):
                wanted = journal[first - 1 : first - 1 + BLOCK]
                there = min(last, first - 1 + len(wanted))
                parts = reader.recall(f"p{first}-p{there}").parts if there >= first else ()
                for (digest, size), text in zip(wanted, parts, strict=False):
                    outcome.checked += 1
                    outcome.checked_bytes += size
                    outcome.lost += 0 if digest_of(text) == digest else max(1, size)
                outcome.lost += sum(max(1, size) for _, size in wanted[len(parts) :])
                self.told("check", first, len(journal), f"{outcome.checked_bytes / 1e6:,.1f} MB compared")

    def _answer(self, process: Process, asked: list[Question]) -> None:
        outcome, memory = self.outcome, OfProcess(process)
        for number, question in enumerate(asked, start=1):
            self.told("answers", number, len(asked), question.text)
            given = answer(question.text, memory)
            self.contexts.append(given.context)
            outcome.asked.append(
                Asked(
                    kind=question.kind,
                    question=question.text,
                    expected=question.answer,
                    answer=given.text,
                    exact=given.text == question.answer,
                    address=given.address,
                    where=question.where,
                )
            )
        outcome.recalls, outcome.searches = memory.recalls, memory.searches
        # Not from `stats`: asked forty questions and nothing else, a window misses, and that is no reason to warn.
        outcome.faults = sum(len(event.data.get("missed", ())) for event in process.events() if event.act is Act.FAULT)

    def _compare(self, process: Process, asked: list[Question]) -> None:
        """The same questions to those who keep only their window."""
        capacity, last, count = self.outcome.capacity, self.outcome.pages, process.counter.count
        pages = [page for page, _ in process.pages() if 0 < page.id <= last]
        said = [(page, process.text(page.id)) for page in pages]
        self._score("truncation", truncated(said, capacity, count), asked, count)

        def told(page: int) -> None:
            if not page % 50:
                self.told("rivals", page, last, "summarising")

        self._score("summarisation", summarised(said, capacity, count, told), asked, count)

    def _score(self, name: str, kept: Kept, asked: list[Question], count: Callable[[str], int]) -> None:
        text = kept.text
        self.outcome.rivals.append(
            Rival(
                name=name,
                tokens=count(text),
                exact=sum(answer(question.text, kept).text == question.answer for question in asked),
                evidence=sum(question.evidence in text for question in asked),
            )
        )

    def _speak(self, model: Model) -> None:
        plan, outcome, number = self.plan, self.outcome, self.plan.folds + self.plan.phrases

        def told(done: int, line: str) -> None:
            self.told("model", done, number, line)

        outcome.model_folds = folds(model, self.root, plan.db, window=plan.window, number=plan.folds, told=told)
        short = [at for at, asked in enumerate(outcome.asked) if asked.kind != "line" and len(asked.answer) <= SHORT]
        for done, at in enumerate(short[: plan.phrases]):
            asked = outcome.asked[at]
            told(plan.folds + done, "phrasing an answer")
            outcome.phrases.append(phrase(model, asked.question, self.contexts[at] or asked.answer, asked.answer))
