"""Change, conflict and forgetting: what a memory says is true now, and was true at a time, after many changes of mind.

Streams of statements (`kilburn_lab.evals.streams`) go into a store on disk, and questions about them are asked through its one
search, at a token budget; whether a recall would abstain is counted beside. In mode `claims` each statement is given as a
claim: storage, conflict and search are judged, and must be exact. In mode `text` it is a message, from which a memory policy
learns: then the policy is judged too. In mode `sessions` nothing is learned, and the messages themselves are searched: what a
memory has to be better than. In mode `talk` (`kilburn_lab.evals.following`) a person talks as people do, and it is counted how
much of what is in force at the end is true, and how many questions find only what is over.

    report = evaluate(streams=20)
    print(report.table())

A value counts as returned if it stands in the text of a hit, so a stored sentence that repeats what is not true any more
counts against the memory. An answer is right if it has all values that hold, and no other that was ever said on the topic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.claims import same_claim
from kilburn.errors import Forgotten, SpecError
from kilburn.kernel.store import Store
from kilburn.memory.conflict import settle
from kilburn.memory.learning import Learned
from kilburn.message import Trust
from kilburn.move import Add, Retire
from kilburn.page import Claim, Place
from kilburn.search.dates import DAY
from kilburn.testing import FakeClock
from kilburn_lab.evals.following import EXTRACTORS, FollowReport, embed, follow, timed
from kilburn_lab.evals.intervals import wilson
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.streams import FAMILIES, Stream, StreamInquiry, Telling, stream

MODES = ("claims", "text", "sessions", "talk")
TOKENS = 300
"""Budget of an answer."""

STREAMS = 5


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer, as a line of `--out` has it.

    Args:
        returned: which values of the topic stood in the hits.
        leaked: values of other users that did.
        marked: whether each hit with one of several expected values says that it is contested.
        withheld: whether a recall abstains where this search answers.
    """

    mode: str
    family: str
    stream: int
    user: str
    text: str
    at: float | None
    expected: tuple[str, ...]
    returned: tuple[str, ...]
    leaked: tuple[str, ...] = ()
    open: bool = False
    marked: bool = False
    tokens: int = 0
    withheld: bool = False

    @property
    def right(self) -> bool:
        """Whether exactly what was expected was returned."""
        return set(self.returned) == set(self.expected)

    @property
    def stale(self) -> bool:
        """Whether something was returned that does not hold at that time."""
        return not set(self.returned) <= set(self.expected)


class ChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one mode and family: questions and right answers for now and for a time in the past; `right_low` and
    `right_high` bound the share of all of them (95%).

    Args:
        empty: questions to which nothing is the right answer: what a memory that never answers has right.
        stale: answers with a value that does not hold at that time; `missing` those without one that does.
        open: questions on open contradictions; `both` those that returned all sides, `marked` said so.
        leaks: answers with another user's value.
        withheld: right answers that are not empty, where a recall abstains.
        forgotten: values that were forgotten; `found` those that some route still gave, `in_files` those of which a byte
            string was left in a file.
    """

    mode: str
    family: str
    now: int
    now_right: int
    past: int
    past_right: int
    right_low: float
    right_high: float
    empty: int
    stale: int
    missing: int
    open: int
    both: int
    marked: int
    leaks: int
    withheld: int
    forgotten: int
    found: int
    in_files: int


class ChangeReport(EvalReport, frozen=True, kw_only=True):
    """E5."""

    streams: int
    seed: int
    tokens: int
    policy: str
    rows: list[ChangeRow]
    asked: tuple[ChangeAnswer, ...] = ()
    talk: FollowReport | None = None
    failed: int = 0
    """Times that the memory policy raised, or returned nonsense."""

    def failures(self) -> dict[str, int]:
        """See `EvalReport`."""
        return {self.policy: self.failed} if self.failed else {}

    def to_json(self) -> str:
        """All figures as one line of JSON, the single answers left out."""
        talk = None if self.talk is None else msgspec.structs.replace(self.talk, asked=())
        return msgspec.json.encode(msgspec.structs.replace(self, asked=(), talk=talk)).decode()

    def table(self) -> str:
        """For people."""
        columns = (
            "mode={mode} | sentences={sentences} | now={now_right}/{now} | past={past_right}/{past} | right={right:.3f} | "
            "95%={right_low:.3f}-{right_high:.3f} | by silence={silence:.3f} | stale={stale} | missing={missing} | "
            "both sides={both}/{open} | marked={marked}/{open} | leaks={leaks} | withheld={withheld} | "
            "forgotten: left={forgotten}: {found} found, {in_files} in files"
        )
        rows = table_of(
            self.rows,
            columns,
            ("mode", "sentences"),
            sentences=lambda row: "-" if row.mode == "claims" else row.family,
            right=lambda row: (row.now_right + row.past_right) / (row.now + row.past),
            silence=lambda row: row.empty / (row.now + row.past),
        )
        what = f"{self.streams} streams from seed {self.seed}, {self.tokens} tokens an answer, learned by {self.policy}"
        talk = "" if self.talk is None else self.talk.table()
        return "\n\n".join(part for part in (f"{rows}\n\n{what}" if self.rows else "", talk) if part)


def evaluate(
    streams: int = STREAMS,
    *,
    seed: int = 0,
    modes: Sequence[str] = MODES,
    families: Sequence[str] = FAMILIES,
    tokens: int = TOKENS,
    policy: str = "plain",
    half: str = "report",
    extractors: Sequence[str] = EXTRACTORS,
    embedder: str = "none",
    progress: Progress = unwatched,
) -> ChangeReport:
    """Measure each mode with each family of sentences; `claims` has no sentences, so it is measured once.

    Args:
        streams: number of seeds, from `seed` on; in the mode `talk`, of talks.
        tokens: budget of each answer.
        policy: spec of the memory policy that learns in mode `text`.
        half, extractors: of the mode `talk`.
        embedder: spec of what finds by meaning; "none" for words alone.
        progress: called with the number of finished streams and talks, and of all.

    Raises:
        SpecError: a number that means nothing, or no such mode, family or policy.
    """
    if streams < 1 or tokens < 1:
        raise SpecError(f"streams={streams}, tokens={tokens}", advice="give numbers of 1 or more")
    check_known("mode", modes, MODES)
    told = modes
    modes = [mode for mode in modes if mode != "talk"]
    many = len(extractors) * streams if "talk" in told else 0
    jobs = [(mode, family) for mode in modes for family in (FAMILIES[:1] if mode == "claims" else families)]
    rows, every = [], []
    done = failed = 0
    progress(0, len(jobs) * streams + many)
    for mode, family in jobs:
        asked: list[ChangeAnswer] = []
        left: list[tuple[bool, bool]] = []
        for number in range(seed, seed + streams):
            some, gone, broke = measure(stream(number, family), mode, tokens=tokens, policy=policy, embedder=embedder)
            asked += some
            left += gone
            failed += broke
            done += 1
            progress(done, len(jobs) * streams + many)
        rows.append(_row(mode, family, asked, left))
        every += asked
    talk = None
    if many:
        talk = follow(
            streams,
            seed=seed,
            half=half,
            extractors=extractors,
            tokens=tokens,
            embedder=embedder,
            progress=lambda one, _: progress(len(jobs) * streams + one, len(jobs) * streams + many),
        )
    return ChangeReport(
        streams=streams, seed=seed, tokens=tokens, policy=policy, rows=rows, asked=tuple(every), talk=talk, failed=failed
    )


def _row(mode: str, family: str, asked: Sequence[ChangeAnswer], left: Sequence[tuple[bool, bool]]) -> ChangeRow:
    now = [one for one in asked if one.at is None]
    past = [one for one in asked if one.at is not None]
    contested = [one for one in asked if one.open]
    low, high = wilson(sum(one.right for one in asked), len(asked))
    return ChangeRow(
        mode=mode,
        family=family,
        now=len(now),
        now_right=sum(one.right for one in now),
        past=len(past),
        past_right=sum(one.right for one in past),
        right_low=low,
        right_high=high,
        empty=sum(not one.expected for one in asked),
        stale=sum(one.stale for one in asked),
        missing=sum(not set(one.expected) <= set(one.returned) for one in asked),
        open=len(contested),
        both=sum(set(one.expected) <= set(one.returned) for one in contested),
        marked=sum(one.marked for one in contested),
        leaks=sum(bool(one.leaked) for one in asked),
        withheld=sum(one.withheld for one in asked if one.right and one.expected),
        forgotten=len(left),
        found=sum(found for found, _ in left),
        in_files=sum(in_files for _, in_files in left),
    )


def measure(
    told: Stream, mode: str, *, tokens: int = TOKENS, policy: str = "plain", embedder: str = "none"
) -> tuple[list[ChangeAnswer], list[tuple[bool, bool]], int]:
    """One stream through one store in a folder of its own.

    Returns:
        The questions with their answers; for each value that was forgotten then, whether a route still found it, and
        whether it was left in a file; and how often the memory policy failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        clock = FakeClock(told.changes[0].time, tick=0.001)
        with timed(str(path), clock, embedder) as store:
            failed = 0
            if mode == "claims":
                for change in told.changes:
                    clock.now = max(clock.now, change.time)
                    _give(store, change)
            else:
                failed = _tell(store, clock, told.changes, policy if mode == "text" else "")
            clock.advance(DAY)
            embed(store)
            asked = [_ask(store, told, question, mode, tokens) for question in told.questions]
            gone = _forget(store, told, mode)
            found = {value: _found(store, user, value) for user, value in gone}
        kept = [file.read_bytes().lower() for file in sorted(Path(folder).rglob("*")) if file.is_file()]
        in_files = {value: any(value.lower().encode() in data for data in kept) for value in found}
    return asked, [(found[value], in_files[value]) for value in found], failed


def _give(store: Store, change: Telling) -> None:
    """Write a statement as claims, as a person would who knows what it says."""
    if change.kind == "noise":
        return
    memory = store.memory(change.user).collection
    since = change.time if change.since is None else change.since
    standing = list(memory.pages(history=True))
    claims = [
        Claim(
            subject=change.subject, relation=change.relation, object=value, many=change.many, correction=change.kind == "correct"
        )
        for value in change.values
    ]
    if change.kind == "retract":
        pages = [
            page.id
            for page, state in standing
            if state.at is not Place.RETIRED and page.claim is not None and same_claim(page.claim, claims[0])
        ]
        memory.apply(Retire(tuple(pages), until=change.time))
        return
    new = [
        Add(text=f"{claim.subject} {claim.relation} {claim.object}", claim=claim, since=since, until=change.until)
        for claim in claims
    ]
    memory.apply(*settle([(add, Trust.USER) for add in new], standing, now=change.time).moves)


def _tell(store: Store, clock: FakeClock, changes: Iterable[Telling], policy: str) -> int:
    """Have the conversations, and learn from each session when it is over, if there is a policy; how often that failed."""
    failed = 0
    current: dict[str, str] = {}
    for change in changes:
        clock.now = max(clock.now, change.time)
        name = f"{change.user}-{change.session}"
        before = current.setdefault(change.user, name)
        if before != name:
            current[change.user] = name
            if policy:
                failed += _has_failed(store.memory(change.user).learn(before, policy=policy))
        session = store.session(name, user=change.user)
        session.append({"role": "user", "content": change.text}, time=change.time)
        session.append({"role": "assistant", "content": "Understood."}, time=change.time + 5)
    for user, name in current.items() if policy else ():
        failed += _has_failed(store.memory(user).learn(name, policy=policy))
    return failed


def _has_failed(learned: Learned) -> bool:
    return "the policy failed" in learned.why


def _ask(store: Store, told: Stream, question: StreamInquiry, mode: str, tokens: int) -> ChangeAnswer:
    text = f"{question.subject} {question.relation}" if mode == "claims" else question.text
    where = "sessions" if mode == "sessions" else "facts"
    hits = store.search(text, tokens, None, where=where, user=question.user, at=question.at)
    withheld = store.search(text, tokens, where=where, user=question.user, at=question.at, limit=None, abstain=True).abstained
    shown = [hit.text for hit in hits]
    topic = (*question.expected, *question.others)
    sides = [hit for hit in hits if any(value in hit.text for value in question.expected)]
    return ChangeAnswer(
        mode=mode,
        family=told.family,
        stream=told.seed,
        user=question.user,
        text=text,
        at=question.at,
        expected=question.expected,
        returned=tuple(value for value in topic if any(value in text for text in shown)),
        leaked=tuple(
            value
            for user, values in told.told.items()
            if user != question.user
            for value in values
            if any(value in text for text in shown)
        ),
        open=question.open,
        marked=question.open and len(sides) > 1 and all(bool(hit.contested) for hit in sides),
        tokens=sum(hit.tokens for hit in hits),
        withheld=withheld,
    )


def _forget(store: Store, told: Stream, mode: str) -> list[tuple[str, str]]:
    """Forget, for each user, everything that was said about one value that holds now; returns (user, value)."""
    gone = []
    for user in told.told:
        value = next(
            (
                question.expected[0]
                for question in told.questions
                if question.user == user and question.at is None and question.expected
            ),
            None,
        )
        if value is None:
            continue
        gone.append((user, value))
        if mode == "claims":
            memory = store.memory(user).collection
            for page, _ in list(memory.pages(history=True)):
                if value in memory.contents.text(page.id):
                    memory.forget(page.address)
            continue
        for info in store.sessions():
            session = store.session(info.name)
            for address in [page.address for page, state in session.contents.pages() if state.at is not Place.DROPPED]:
                if value in session.recall(address):
                    session.forget(address)
    return gone


def _found(store: Store, user: str, value: str) -> bool:
    """Whether any way of reading still gives a value."""
    shown: list[Any] = [
        *store.search(value),
        *store.search(value, 1000, limit=None, abstain=True),
        *store.search(value, 1000, user=user, limit=None, abstain=True),
    ]
    texts = [hit.text for hit in shown]
    for memory in store.collections():
        for page, _ in memory.pages(history=True, proposed=True):
            try:
                texts.append(str(memory.recall(page.address)))
            except Forgotten:
                continue
    for info in store.sessions():
        session = store.session(info.name)
        texts += [hit.text for hit in session.search(value)]
        texts += [str(message) for message in session.contents.messages()]
    return any(value in text for text in texts)
