"""Runs the demo: work, check, ask, compare.

It measures and returns figures; `kilburn.cli.demo` prints them.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import msgspec

import kilburn
from kilburn.agents.loop import UNLIMITED, Agent, Called, Returned, Stopped
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.library import Library
from kilburn.demo.questions import LibraryQuestion, questions
from kilburn.demo.rivals import summarised, truncated
from kilburn.demo.voice import Folded, Phrase, folds, phrase
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.ledger import Stats
from kilburn.kernel.session import Session
from kilburn.model import Model

SESSION = "library"
SYSTEM = "You are an agent that explores a Python library with tools: list, read, search."
SHORT = 80
"""Characters of an answer that a small model may phrase."""

ENOUGH = 1_200_000
"""Tokens of tool output that the demo reads by default: 150 windows of 8,000."""

WIDE = 1 << 40
"""Tokens: a window that is large enough for what a rival kept."""

Told = Callable[[str, int, int | None, str], None]
"""Called with a phase, how much is done, the total (None if unknown), and a line on what happens."""


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Args:
        db: the store's file; it must have no session "library" yet.
        library: the tree of sources; "" for the running interpreter's standard library.
        whole: tests and applications of the library too.
        folds, phrases: how many of each a model makes, if there is one.
        tokenizer: the counter's name.
        enough: tokens of tool output after which the agent opens no more files; None to read them all.
    """

    db: str
    library: str = ""
    whole: bool = False
    window: int = 8000
    policy: str = "hybrid"
    tokenizer: str = "gpt-4o"
    questions: int = 40
    seed: int = 0
    folds: int = 3
    phrases: int = 4
    enough: int | None = ENOUGH


class Checked(LibraryQuestion, frozen=True, kw_only=True):
    """A question and its answer from memory; `address` is the page from which it was read."""

    answer: str
    address: str
    exact: bool


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a rival: `exact` answers, and the number of questions whose source line it still has."""

    name: str
    tokens: int
    exact: int
    evidence: int


class JobResult(msgspec.Struct, kw_only=True):
    """All figures of the report. Tokens by the plan's tokenizer; `lost` in bytes; `failed` tool calls; `stopped`: the
    files that were not read to the end; `stats` the ledger's figures of the work; `curve` tokens seen and
    in the window, a pair a prompt; `seconds` by phase."""

    library: str
    plan: DemoPlan
    python: str = sys.version.split()[0]
    session: str = SESSION
    files: int = 0
    lines: int = 0
    calls: int = 0
    failed: int = 0
    stopped: int = 0
    output_tokens: int = 0
    stats: Stats = msgspec.field(default_factory=Stats)
    checked: int = 0
    checked_bytes: int = 0
    lost: int = 0
    faults: int = 0
    recalls: int = 0
    searches: int = 0
    asked: list[Checked] = []
    rivals: list[Rival] = []
    model: str = "none"
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
        return not self.stats.overflow and not self.lost and bool(self.asked) and self.exact == len(self.asked)


def perform(plan: DemoPlan, model: Model | None = None, told: Told = lambda phase, done, total, line: None) -> JobResult:
    """Run the whole demo; without a model, the model's part is left out.

    Raises:
        SpecError: the library is no folder, or the store has this session already. KilburnError.
    """
    root = Path(plan.library or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SpecError(f"{root} is no folder", advice="give a folder with Python sources")
    results = JobResult(library=str(root), plan=plan)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.monotonic()
        told(name, 0, None, "")
        yield
        results.seconds[name] = time.monotonic() - began

    with kilburn.open(plan.db, window=plan.window, policy=plan.policy, tokenizer=plan.tokenizer, embedder=None) as store:
        if any(info.name == SESSION for info in store.sessions()):
            raise SpecError(f"{plan.db} has a session {SESSION!r} already", advice="give another --db, or none")
        session = store.session(SESSION)
        given = [SYSTEM, TASK]
        with phase("work"):
            covered, known = _work(session, root, given, results, told)
        with phase("check"):
            check(given, results)
        with phase("questions"):
            asked = questions(root, covered, number=plan.questions, seed=plan.seed, searched=known)
        with phase("answers"):
            _answer(session, asked, results, told)
        with phase("rivals"):
            _compare(session, given, asked, results, told)
        if model is not None:
            with phase("model"):
                _speak(model, session, results, told)
    results.bytes_on_disk = sum(path.stat().st_size for path in Path(plan.db).parent.glob(Path(plan.db).name + "*"))
    return results


def _work(
    session: Session, root: Path, given: list[str], results: JobResult, told: Told
) -> tuple[dict[str, int], dict[str, int]]:
    """Let the explorer work; `given` gets every text that it and its tools say.

    Returns the last line read of each file, and the number of lines of each file that it knows of: it searches them all,
    also those that it does not read.
    """
    plan = results.plan

    def enough() -> bool:
        return plan.enough is not None and results.output_tokens >= plan.enough

    library, explorer = Library(root, whole=plan.whole), Explorer(enough)
    agent = Agent(explorer, library.tools(), session, limits=msgspec.structs.replace(UNLIMITED, reply=0), system=SYSTEM)
    for event in agent.stream(TASK):
        if isinstance(event, Called):
            given.append(event.arguments)
        elif isinstance(event, Stopped):
            given.append(event.outcome.text)
        if not isinstance(event, Returned):
            continue
        given.append(event.text)
        results.calls += 1
        results.failed += event.failed
        results.output_tokens += session.counter.count(event.text)
        told("work", len(library.covered), len(explorer.files), f"files, {results.output_tokens:,} tokens of tool output")
    results.stopped = sum(lines > library.covered.get(path, 0) for path, lines in explorer.files.items())
    results.files, results.lines = len(library.covered), sum(library.covered.values())
    results.stats = session.stats()
    cost = {page.id: page.tokens for page, _ in session.contents.pages()}
    seen = 0
    for entry in session.ledger.events():
        seen += sum(cost[page] for page in entry.pages) if entry.act is Act.ADMIT else 0
        if entry.act is Act.SHIP:
            results.curve.append((seen, entry.tokens))
    return library.covered, explorer.files


def check(given: Sequence[str], results: JobResult) -> None:
    """Compare every page, read back from the file by a second reader, with what was appended."""
    with kilburn.open(results.plan.db, window=WIDE, policy="fifo", readonly=True, embedder=None) as store:
        back = store.session(SESSION).recall(f"p1-p{results.stats.pages}").parts
    results.checked = len(given)
    results.checked_bytes = sum(len(text.encode()) for text in given)
    results.lost = sum(max(1, len((text or "").encode())) for text, found in zip_longest(given, back) if text != found)


def _answer(session: Session, asked: Sequence[LibraryQuestion], results: JobResult, told: Told) -> None:
    for number, question in enumerate(asked, start=1):
        told("answers", number, len(asked), question.question)
        found = answer(question.question, session)
        exact = found.text == question.expected
        results.asked.append(Checked(**msgspec.structs.asdict(question), answer=found.text, address=found.address, exact=exact))
    # Not from `stats`: forty questions and nothing else give a low hit rate, and that is no reason for a warning.
    acts = Counter(event.act for event in session.ledger.events())
    results.recalls, results.searches = acts[Act.FAULT], acts[Act.SEARCH]
    results.faults = sum(len(event.data.get("missed", ())) for event in session.ledger.events() if event.act is Act.FAULT)


def _compare(session: Session, given: Sequence[str], asked: Sequence[LibraryQuestion], results: JobResult, told: Told) -> None:
    """The same questions for the rivals, which keep only their window: each searches and recalls what it kept."""
    count, capacity = session.counter.count, session.prompts.capacity
    transcript = [(page, text) for (page, _), text in zip(session.contents.pages(), given, strict=False)]

    def summarising(page: int) -> None:
        told("rivals", page, len(given), "pages summarised")

    for name, kept in (
        ("truncation", truncated(transcript, capacity, count)),
        ("summarisation", summarised(transcript, capacity, count, summarising)),
    ):
        with kilburn.open(":memory:", window=WIDE, policy="fifo", tokenizer=session.counter, embedder=None) as store:
            memory = store.session(name)
            memory.append(*({"role": "user", "content": text} for text in kept))
            exact = sum(answer(question.question, memory).text == question.expected for question in asked)
        text = "\n".join(kept)
        evidence = sum(question.evidence in text for question in asked)
        results.rivals.append(Rival(name=name, tokens=count(text), exact=exact, evidence=evidence))


def _speak(model: Model, session: Session, results: JobResult, told: Told) -> None:
    plan = results.plan

    def folding(done: int, line: str) -> None:
        told("model", done, plan.folds + plan.phrases, line)

    results.model = model.name
    root = Path(results.library)
    results.model_folds = folds(model, root, plan.db, window=plan.window, number=plan.folds, told=folding)
    short = [asked for asked in results.asked if asked.address and asked.kind != "line" and len(asked.answer) <= SHORT]
    for done, asked in enumerate(short[: plan.phrases], start=plan.folds):
        folding(done, "phrasing an answer")
        results.phrases.append(phrase(model, session, asked.question, asked.answer))
