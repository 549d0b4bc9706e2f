"""Runs the demo: work, check, questions, comparison. Returns figures, which `kilburn.cli.demo` prints."""

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
"""Tokens of a window that holds everything a rival remembers."""

Report = Callable[[str, int, int | None, str], None]
"""Reports progress: a phase, the amount done, the total (None if unknown), and a description of the current step."""


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run.

    Args:
        db: the store's file. It must not contain a session "library".
        library: the tree of sources; "" for the standard library of this interpreter.
        whole: include the library's tests and applications.
        folds, phrases: numbers of folds and answers that a model writes.
        tokenizer: the name of the token counter.
        enough: tokens of tool output after which the agent opens no more files; None to read all files.
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
    """A question with its answer from memory; `address` is the page from which it was read."""

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
    """All figures of the report. Tokens are counted by the plan's tokenizer. `lost` are bytes, `failed` tool calls, `stopped`
    files that were not read to the end. `stats` are the ledger's figures of the work. `curve` has the tokens seen and those in
    the window, for each prompt. `seconds` is by phase."""

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
        """Return the number of questions that were answered exactly."""
        return sum(question.exact for question in self.asked)

    @property
    def ok(self) -> bool:
        """Return whether nothing overflowed, nothing was lost, and every question was answered exactly."""
        return not self.stats.overflow and not self.lost and bool(self.asked) and self.exact == len(self.asked)


def perform(plan: DemoPlan, model: Model | None = None, report: Report = lambda phase, completed, total, step: None) -> JobResult:
    """Run the whole demo. Without a model, its part is skipped.

    Raises:
        SpecError: the library is no folder, or the store already has this session. KilburnError.
    """
    root = Path(plan.library or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SpecError(f"{root} is no folder", advice="give a folder with Python sources")
    results = JobResult(library=str(root), plan=plan)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.monotonic()
        report(name, 0, None, "")
        yield
        results.seconds[name] = time.monotonic() - began

    with kilburn.open(plan.db, window=plan.window, policy=plan.policy, tokenizer=plan.tokenizer, embedder=None) as store:
        if any(info.name == SESSION for info in store.sessions()):
            raise SpecError(f"{plan.db} has a session {SESSION!r} already", advice="give another --db, or none")
        session = store.session(SESSION)
        texts = [SYSTEM, TASK]
        with phase("work"):
            covered, line_counts = _work(session, root, texts, results, report)
        with phase("check"):
            check(texts, results)
        with phase("questions"):
            question_list = questions(root, covered, number=plan.questions, seed=plan.seed, searched=line_counts)
        with phase("answers"):
            _answer(session, question_list, results, report)
        with phase("rivals"):
            _compare(session, texts, question_list, results, report)
        if model is not None:
            with phase("model"):
                _speak(model, session, results, report)
    results.bytes_on_disk = sum(path.stat().st_size for path in Path(plan.db).parent.glob(Path(plan.db).name + "*"))
    return results


def _work(
    session: Session, root: Path, texts: list[str], results: JobResult, report: Report
) -> tuple[dict[str, int], dict[str, int]]:
    """Let the explorer work, and append to `texts` every text that it and its tools produce.

    Return the last line read of each file, and the line count of each known file. All known files are searched, even those that
    are not read.
    """
    plan = results.plan

    def enough() -> bool:
        return plan.enough is not None and results.output_tokens >= plan.enough

    library, explorer = Library(root, whole=plan.whole), Explorer(enough)
    agent = Agent(explorer, library.tools(), session, limits=msgspec.structs.replace(UNLIMITED, reply=0), system=SYSTEM)
    for event in agent.stream(TASK):
        if isinstance(event, Called):
            texts.append(event.arguments)
        elif isinstance(event, Stopped):
            texts.append(event.outcome.text)
        if not isinstance(event, Returned):
            continue
        texts.append(event.text)
        results.calls += 1
        results.failed += event.failed
        results.output_tokens += session.counter.count(event.text)
        report("work", len(library.covered), len(explorer.files), f"files, {results.output_tokens:,} tokens of tool output")
    results.stopped = sum(lines > library.covered.get(path, 0) for path, lines in explorer.files.items())
    results.files, results.lines = len(library.covered), sum(library.covered.values())
    results.stats = session.stats()
    cost = {page.id: page.tokens for page, _ in session.contents.pages()}
    total = 0
    for entry in session.ledger.events():
        total += sum(cost[page] for page in entry.pages) if entry.act is Act.ADMIT else 0
        if entry.act is Act.SHIP:
            results.curve.append((total, entry.tokens))
    return library.covered, explorer.files


def check(texts: Sequence[str], results: JobResult) -> None:
    """Compare every page, read from the file by a second reader, with what was appended."""
    with kilburn.open(results.plan.db, window=WIDE, policy="fifo", readonly=True, embedder=None) as store:
        back = store.session(SESSION).recall(f"p1-p{results.stats.pages}").parts
    results.checked = len(texts)
    results.checked_bytes = sum(len(text.encode()) for text in texts)
    results.lost = sum(max(1, len((text or "").encode())) for text, page in zip_longest(texts, back) if text != page)


def _answer(session: Session, question_list: Sequence[LibraryQuestion], results: JobResult, report: Report) -> None:
    for number, question in enumerate(question_list, start=1):
        report("answers", number, len(question_list), question.question)
        reply = answer(question.question, session)
        exact = reply.text == question.expected
        results.asked.append(Checked(**msgspec.structs.asdict(question), answer=reply.text, address=reply.address, exact=exact))
    # `session.stats()` would warn of a low hit rate, which forty recalls and nothing else always cause.
    acts = Counter(event.act for event in session.ledger.events())
    results.recalls, results.searches = acts[Act.FAULT], acts[Act.SEARCH]
    results.faults = sum(len(event.data.get("missed", ())) for event in session.ledger.events() if event.act is Act.FAULT)


def _compare(
    session: Session, texts: Sequence[str], question_list: Sequence[LibraryQuestion], results: JobResult, report: Report
) -> None:
    """Ask the rivals the same questions. A rival remembers only its window, which it searches and recalls."""
    count, capacity = session.counter.count, session.prompts.capacity
    transcript = [(page, text) for (page, _), text in zip(session.contents.pages(), texts, strict=False)]

    def summarising(page: int) -> None:
        report("rivals", page, len(texts), "pages summarised")

    for name, remembered in (
        ("truncation", truncated(transcript, capacity, count)),
        ("summarisation", summarised(transcript, capacity, count, summarising)),
    ):
        with kilburn.open(":memory:", window=WIDE, policy="fifo", tokenizer=session.counter, embedder=None) as store:
            memory = store.session(name)
            memory.append(*({"role": "user", "content": text} for text in remembered))
            exact = sum(answer(question.question, memory).text == question.expected for question in question_list)
        text = "\n".join(remembered)
        evidence = sum(question.evidence in text for question in question_list)
        results.rivals.append(Rival(name=name, tokens=count(text), exact=exact, evidence=evidence))


def _speak(model: Model, session: Session, results: JobResult, report: Report) -> None:
    plan = results.plan

    def folding(completed: int, line: str) -> None:
        report("model", completed, plan.folds + plan.phrases, line)

    results.model = model.name
    root = Path(results.library)
    results.model_folds = folds(model, root, plan.db, window=plan.window, number=plan.folds, report=folding)
    short = [
        question for question in results.asked if question.address and question.kind != "line" and len(question.answer) <= SHORT
    ]
    for number, question in enumerate(short[: plan.phrases], start=plan.folds):
        folding(number, "phrasing an answer")
        results.phrases.append(phrase(model, session, question.question, question.answer))
