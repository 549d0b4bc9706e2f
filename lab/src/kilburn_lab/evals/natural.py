"""Natural questions: does the window show the turns of an old conversation that answer what people ask about it?

A conversation (`kilburn_lab.evals.corpora`) is told turn by turn as one session: its first speaker is the user, the others are
the assistant, and a name stands before its text. The prompt is rendered after each turn of the user. Then each question is
appended to a copy of the store as the newest message of the user, and the rendered prompt is searched for the turns that answer
it, with white space folded. Policies, baselines and the full history get the same questions in the same room; beside them stands
one search of the session, with nothing else. Only the prompts are read: nothing of the ranking or of a policy takes part.

    report = evaluate(*synthetic(0, 3, 100), policies=["tail+turns", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn_lab.evals.baselines import CHARACTERS, UNBOUNDED, Contender, compared, tell
from kilburn_lab.evals.candidate import KilburnCandidate, contender_of
from kilburn_lab.evals.corpora import Answers, Corpus, CorpusQuery, CorpusTurn
from kilburn_lab.evals.cost import Bill, ComparedRow, Rates, bill_table, bills_of, figures_of, rates_of
from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.outcomes import PolicyCounts, Shipping, join_cells
from kilburn_lab.evals.prefix import Block, common, length_of, text_of
from kilburn_lab.evals.report import EvalReport, best_words, table_of
from kilburn_lab.evals.roster import Entrant, entries

POLICIES = ("tail+turns", "tail+chunks", "hybrid", "cost")
"""What is compared unless told otherwise, beside the newest text and the full history."""

SEARCHES = (400, 1000)
"""Tokens of a search that stands alone."""

HITS = 1000
"""Passages that such a search may return: its tokens are what bounds it."""

PASSAGE = 150
"""Characters of a passage of an answering turn."""

_Question = tuple[CorpusQuery, list[str]]
"""A question, and the texts of the turns that answer it."""


class NaturalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the answer to one question a prompt shows.

    Args:
        shown: share of the answering turns that stand in the prompt whole. passages: share of their passages of 150 characters.
        prefix: share of the last prompt before the question with which this one begins.
        brought: tokens of lines that neither the last prompt nor anything new had. again: tokens that are read again.
        tokens: of the prompt.
    """

    conversation: str
    question: str
    category: str
    shown: float
    passages: float
    prefix: float = 0.0
    brought: int = 0
    again: int = 0
    tokens: int = 0


class NaturalRow(ComparedRow, frozen=True, kw_only=True):
    """One policy at one window, over all questions. Intervals are of 95%, resampled by conversation.

    Args:
        shown, passages, prefix, brought: means over the questions, see `NaturalAnswer`. prompt: the mean of its `tokens`.
        categories: `shown` by category of the question, as the file names it.
        right: questions of which all answering turns are shown.
        best: of the baselines that were measured at this window, the one with the largest `shown`. gain: less the share of
            `best`, on the same questions.
        reread_session: tokens read again while the conversations were told. reread_question: at a question, the mean.
        reread_each: tokens read again at all questions, for each of those that are `right`; None without one.
    """

    questions: int
    shown: float
    passages: float
    categories: dict[str, float]
    right: int
    prefix: float
    brought: float
    prompt: float
    reread_session: int
    reread_question: float
    reread_each: float | None


class NaturalSearch(msgspec.Struct, frozen=True, kw_only=True):
    """One search of the session with so many tokens, and no window: what of the answers its passages have."""

    tokens: int
    shown: float
    low: float
    high: float
    passages: float


class NaturalReport(EvalReport, frozen=True, kw_only=True):
    """All rows; `words` says what was asked of whom, `bills` have what providers are paid for each right answer."""

    words: str
    rows: list[NaturalRow]
    searches: list[NaturalSearch]
    bills: list[Bill]

    def table(self) -> str:
        """Plain text: what the prompts showed, what a search finds, and what providers are paid."""
        text = (
            "window={window} | policy={policy} | shown={shown:.3f} | 95%={low:.2f}-{high:.2f} | "
            "to best, 95%={gain:+.3f} {gain_low:+.2f} {gain_high:+.2f} | passages={passages:.3f} | right={right} | "
            "brought={brought:.0f} | prompt={prompt:,.0f} | prefix={prefix:.2f} | again={reread_question:,.0f} | "
            "each={reread_each:,.0f} | told again={thousands:,.0f} | over={overflow} | failed={failed}"
        )
        words = (
            f"shown: share of the answering turns that stand in the prompt whole; passages: of their passages of {PASSAGE}\n"
            "characters; right: questions of which all turns are shown; brought, prompt: tokens of a question; prefix: share of\n"
            "the last prompt before the question that stays; again: tokens read again at a question; each: the same for each\n"
            "right one; told again: thousands of tokens read again while the conversations were told"
        )
        parts = [
            self.words,
            f"{best_words('share shown', self.rows)}\n{words}",
            table_of(self.rows, text, thousands=lambda row: row.reread_session / 1000),
            "One search of the session for the question, and nothing else",
            table_of(self.searches, "tokens={tokens:,} | shown={shown:.3f} | 95%={low:.2f}-{high:.2f} | passages={passages:.3f}"),
            bill_table(self.bills, "right answers"),
        ]
        return "\n\n".join(parts)


def evaluate(
    corpora: Sequence[Corpus],
    answers: Answers,
    *,
    windows: Sequence[int] = (4000,),
    policies: Sequence[str] = POLICIES,
    embedder: Any = None,
    sample: int | None = None,
    rates: Rates | None = None,
    seed: int = 0,
    progress: Progress = unwatched,
) -> NaturalReport:
    """Ask the questions under each policy at each window; the newest text and the full history always take part.

    Args:
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies.
        embedder: of the stores; None for words alone.
        sample: questions of each conversation, drawn by the seed; None for all that have an answer.
        rates: how prompts are priced; by default by "hosted" and "local".
        seed: of the questions and of the intervals.
        progress: called with the turns told and questions asked, and their total.

    Raises:
        SpecError: a window below 1, no such policy, or no question with an answer.
    """
    if not windows or min(windows) < 1:
        raise SpecError(f"windows={list(windows)}", advice="give one or more, of 1 token or more")
    interviews = [(corpus, _questions(corpus, answers, sample, seed)) for corpus in corpora]
    count = sum(len(questions) for _, questions in interviews)
    if not count:
        raise SpecError("no question has an answer among the turns", advice="give conversations with `gold` in their queries")
    jobs = [(entry, window) for window in dict.fromkeys(windows) for entry in entries(list(policies), "", window)]
    total, done = (len(jobs) + 1) * (count + sum(len(corpus.docs) for corpus in corpora)), 0
    progress(done, total)

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    categories = {key: category for key, (_, category) in answers.items()}
    cells = [_Measurement(entry, window, embedder, categories) for entry, window in jobs]
    for cell in cells:
        for corpus, questions in interviews:
            cell.ask(corpus, questions, advance)
    searches = _searches(interviews, embedder, seed, advance)
    rates = rates or rates_of()
    rows = [_row(cell, [other for other in cells if other.window == cell.window], rates, seed) for cell in cells]
    bills = bills_of([(cell.joined(), row.right) for cell, row in zip(cells, rows, strict=True)], rates.pause)
    words = f"{count} questions about {len(interviews)} conversations, seed {seed}; "
    words += f"{'words alone' if embedder is None else f'an embedder, {embedder.name}'}; one token is {CHARACTERS} characters"
    return NaturalReport(words=words, rows=rows, searches=searches, bills=bills)


def _questions(corpus: Corpus, answers: Answers, sample: int | None, seed: int) -> list[_Question]:
    """The questions that turns of the conversation answer, or some of them."""
    texts = {turn.id: turn.text for turn in corpus.docs}
    golds = ((query, answers.get((corpus.name, query.id), (frozenset(), ""))[0]) for query in corpus.queries)
    candidates = [(query, [texts[id] for id in sorted(gold) if texts.get(id, "").strip()]) for query, gold in golds]
    candidates = [(query, turns) for query, turns in candidates if turns]
    if sample is not None:
        candidates = random.Random(f"{seed}/{corpus.name}").sample(candidates, min(sample, len(candidates)))
    return candidates


class _Measurement:
    """What was counted and shown of one policy at one window."""

    def __init__(self, entry: Entrant, window: int, embedder: Any, categories: dict[tuple[str, str], str]) -> None:
        self.policy, self.window = entry.label, window
        self.answers: list[NaturalAnswer] = []
        self.session_counts, self.question_counts = (PolicyCounts(policy=entry.label, window=window) for _ in range(2))
        self._spec, self._embedder, self._categories = entry.at(window), embedder, categories

    def joined(self) -> PolicyCounts:
        """The counts of all prompts."""
        return join_cells([self.session_counts, self.question_counts])

    def ask(self, corpus: Corpus, questions: Sequence[_Question], advance: Callable[[], None]) -> None:
        """Tell a conversation, and ask the questions about it."""
        shipping, failures = Shipping(), 0
        with tempfile.TemporaryDirectory(prefix="kilburn-natural-") as folder:
            path = Path(folder, "told.db")
            with contender_of(self.window, self._spec, path=str(path), embedder=self._embedder) as contender:
                before = _tell(
                    contender, corpus.docs, advance, lambda prompt: shipping.ship(prompt, self.session_counts), shipping.tell
                )
                if isinstance(contender, KilburnCandidate):
                    contender.embed()
                    failures = contender.stats().policy_failures
            self.session_counts.failed += failures
            for query, turns in questions:
                with self._copied(contender, path) as replica:
                    self.answers.append(self._answer(replica, corpus.name, query, turns, before, shipping.copy()))
                    if isinstance(replica, KilburnCandidate):
                        self.question_counts.failed += replica.stats().policy_failures - failures
                advance()

    @contextmanager
    def _copied(self, contender: Contender, path: Path) -> Iterator[Contender]:
        """A copy of what was told, which is closed at the end."""
        if not isinstance(contender, KilburnCandidate):
            yield copy.deepcopy(contender)
            return
        target = path.with_name("asked.db")
        shutil.copyfile(path, target)
        with contender_of(self.window, self._spec, path=str(target), embedder=self._embedder) as replica:
            yield replica

    def _answer(
        self,
        contender: Contender,
        conversation: str,
        query: CorpusQuery,
        turns: Sequence[str],
        before: Sequence[Block],
        shipping: Shipping,
    ) -> NaturalAnswer:
        contender.user(query.text)
        shipping.tell(query.text)
        earlier_lines = {line for text in (text_of(before), *shipping.fresh) for line in text.split("\n")}
        prompt, refilled = contender.prompt(), self.question_counts.refilled
        shipping.ship(prompt, self.question_counts)
        shown, passages = score(text_of(prompt), turns)
        brought = sum(len(line) for block in prompt for line in block.text.split("\n") if line not in earlier_lines)
        return NaturalAnswer(
            conversation=conversation,
            question=query.id,
            category=self._categories[conversation, query.id],
            shown=shown,
            passages=passages,
            prefix=common(before, prompt)[1] / max(1, length_of(before)),
            brought=brought // CHARACTERS,
            again=self.question_counts.refilled - refilled,
            tokens=length_of(prompt) // CHARACTERS,
        )


def _tell(
    contender: Contender,
    turns: Sequence[CorpusTurn],
    advance: Callable[[], None],
    ship: Callable[[list[Block]], object] = lambda prompt: None,
    note: Callable[[str], object] = lambda text: None,
) -> list[Block]:
    """Tell a conversation; returns the last prompt."""
    named = not {turn.speaker for turn in turns} <= {"user", "assistant"}
    prompt: list[Block] = []
    for turn in turns:
        text = f"{turn.speaker}: {turn.text}" if named else turn.text
        note(text)
        asks = turn.speaker == turns[0].speaker
        tell(contender, "user" if asks else "assistant", text)
        if asks:
            prompt = contender.prompt()
            ship(prompt)
        advance()
    return prompt


def score(shown: str, turns: Sequence[str]) -> tuple[float, float]:
    """The share of some turns that stand in a text whole, and the share of their passages; white space is folded."""
    text, folded = _folded(shown), [_folded(turn) for turn in turns]
    pieces = [turn[at : at + PASSAGE] for turn in folded for at in range(0, len(turn), PASSAGE)]
    return mean(turn in text for turn in folded), mean(piece in text for piece in pieces)


def _folded(text: str) -> str:
    return " ".join(text.split())


def _searches(
    interviews: Sequence[tuple[Corpus, list[_Question]]], embedder: Any, seed: int, advance: Callable[[], None]
) -> list[NaturalSearch]:
    """What one search finds, in sessions that are told in a window without a bound."""
    scores: dict[int, list[tuple[str, tuple[float, float]]]] = {tokens: [] for tokens in SEARCHES}
    for corpus, questions in interviews:
        with closing(KilburnCandidate(UNBOUNDED, "fifo", embedder=embedder)) as contender:
            _tell(contender, corpus.docs, advance)
            contender.embed()
            for query, turns in questions:
                for tokens, results in scores.items():
                    hits = contender.search(query.text, tokens, limit=HITS, record=False)
                    results.append((corpus.name, score(hits, turns)))
                advance()
    rows: list[NaturalSearch] = []
    for tokens, results in scores.items():
        low, high = interval(grouped((name, shown) for name, (shown, _) in results), seed)
        shown, passages = (mean(pair[at] for _, pair in results) for at in (0, 1))
        rows.append(NaturalSearch(tokens=tokens, shown=shown, low=low, high=high, passages=passages))
    return rows


def _row(cell: _Measurement, rivals: Sequence[_Measurement], rates: Rates, seed: int) -> NaturalRow:
    worth = {rival.policy: [answer.shown for answer in rival.answers] for rival in rivals}
    categories: dict[str, list[float]] = {}
    for answer in cell.answers:
        categories.setdefault(answer.category, []).append(answer.shown)
    right = sum(answer.shown == 1 for answer in cell.answers)
    return NaturalRow(
        **figures_of(cell.joined(), rates, NaturalRow),
        **compared(worth, cell.policy, [answer.conversation for answer in cell.answers], seed),
        questions=len(cell.answers),
        shown=mean(answer.shown for answer in cell.answers),
        passages=mean(answer.passages for answer in cell.answers),
        prefix=mean(answer.prefix for answer in cell.answers),
        brought=mean(answer.brought for answer in cell.answers),
        categories={name: mean(values) for name, values in sorted(categories.items())},
        right=right,
        prompt=mean(answer.tokens for answer in cell.answers),
        reread_session=cell.session_counts.refilled,
        reread_question=mean(answer.again for answer in cell.answers),
        reread_each=sum(answer.again for answer in cell.answers) / right if right else None,
    )
