"""Does a memory follow what changes? Of the facts in force at the end, how many are true; and what do questions find?

Talk (`kilburn_lab.evals.talks`) goes through one store, session by session, and is learned from with an extractor:

- `none`: nothing is learned;
- `rules`: the policy `plain`, without a model;
- `perfect`: the policy `facts` with a scripted model that reads every message and decides rightly, so that what is lost is
  lost by the memory's guards and its search;
- `careless`: the same with one that misses facts, invents some, believes traps, turns negations round and decides at random.

Each question is asked over facts, over sessions, over all, and of what is brought beside a prompt. Nothing depends on a clock
or on a thread: the store's clock is the talk's, and vectors are made only where an embedder is named.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.claims import DOUBTS
from kilburn.errors import SpecError
from kilburn.memory.brought import quotation
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Reply, Request
from kilburn.opening import Store
from kilburn.page import Page, Place
from kilburn.search.choice import vectors_for
from kilburn.search.found import Found
from kilburn.testing import FakeClock
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, grid, table_of
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.talks import TOPICS_OF, Talk, TalkFact, TalkQuestion, TalkTurn, talk

EXTRACTORS = ("none", "rules", "perfect", "careless")
PLACES = ("facts", "sessions", "all", "brought")
TOKENS = 300
"""Budget of an answer."""

USER = "ana"

_POLICIES = {"rules": "plain", "perfect": "facts", "careless": "facts"}
_GONE = re.compile(
    r"\b(?:no longer|not|never|stopped|quit|gave up|sold|left|former\w*|any ?more|instead|from|replaced|swapped)\b|n't\b",
    re.IGNORECASE,
)


class FollowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question with what was found, as a line of `--out` has it.

    Args:
        current: whether the answer was found; where what was said is over, whether what ended it was, or nothing stale.
        stale: whether something that is over was found and was not marked as doubted.
        first: whether the answer came before whatever is over.
    """

    extractor: str
    where: str
    talk: int
    question: TalkQuestion
    current: bool
    stale: bool
    first: bool
    shown: tuple[str, ...]


class FollowRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one extractor.

    Args:
        told: facts that a perfect reader takes from the talk and that are true at the end; `learned` those in force.
        facts: facts in force at the end that say something of what was talked about; `true` those that are true, `doubted`
            those that are not, and are marked; `needless` those that are true, and are marked.
        traps: facts in force that came from a trap; of so many traps. `invented`: facts with a value that nobody said.
        questions: that were asked in each place; of `over` of them the answer is that it is over. For each place: answers with
            the current value, those with only a stale one, and those in which the current one came first.
    """

    extractor: str
    told: int
    learned: int
    facts: int
    true: int
    doubted: int
    needless: int
    traps: int
    of_traps: int
    invented: int
    questions: int
    over: int
    current: dict[str, int]
    stale: dict[str, int]
    first: dict[str, int]


class FollowReport(EvalReport, frozen=True, kw_only=True):
    """What each extractor leaves in a memory, and what is found there."""

    talks: int
    seed: int
    half: str
    tokens: int
    embedder: str
    rows: list[FollowRow]
    asked: tuple[FollowAnswer, ...] = ()

    def to_json(self) -> str:
        """All figures as one line of JSON, the single answers left out."""
        return msgspec.json.encode(msgspec.structs.replace(self, asked=())).decode()

    def table(self) -> str:
        """For people."""
        columns = (
            "extractor={extractor} | learned={learned}/{told} | in force={facts} | true={true} | else doubted={doubted} | "
            "true or doubted={right:.3f} | true and doubted={needless} | traps={traps}/{of_traps} | invented={invented}"
        )
        facts = table_of(self.rows, columns, ("extractor",), none="-", right=_right)
        heads = ("extractor", "over", "questions", "of these over", "current", "only stale", "newest first")
        body = [
            [row.extractor, where, f"{row.questions}", f"{row.over}"]
            + [f"{count[where]} ({count[where] / row.questions:.3f})" for count in (row.current, row.stale, row.first)]
            for row in self.rows
            for where in PLACES
        ]
        vectors = "no vectors" if self.embedder == "none" else f"vectors of {self.embedder}"
        which = f"{self.talks} talks of the half {self.half!r} from seed {self.seed}, {self.tokens} tokens an answer, {vectors}"
        return f"{facts}\n\n{grid(heads, body, ('extractor', 'over'))}\n\n{which}"


def follow(
    talks: int,
    *,
    seed: int = 0,
    half: str = "report",
    extractors: Sequence[str] = EXTRACTORS,
    tokens: int = TOKENS,
    embedder: str = "none",
    progress: Progress = unwatched,
) -> FollowReport:
    """Measure each extractor on so many talks, from `seed` on.

    Raises:
        SpecError: no such extractor, half or embedder, or numbers that mean nothing.
    """
    if talks < 1 or tokens < 1:
        raise SpecError(f"talks={talks}, tokens={tokens}", advice="give numbers of 1 or more")
    check_known("extractor", extractors, EXTRACTORS)
    check_known("half", [half], HALVES)
    rows: list[FollowRow] = []
    every: list[FollowAnswer] = []
    for extractor in extractors:
        counts, answers = [], list[FollowAnswer]()
        for number in range(seed, seed + talks):
            figures, some = _measured(talk(number, half), extractor, tokens, embedder)
            counts.append(figures)
            answers += some
            progress(len(rows) * talks + len(counts), talks * len(extractors))
        rows.append(_row(extractor, counts, answers))
        every += answers
    return FollowReport(talks=talks, seed=seed, half=half, tokens=tokens, embedder=embedder, rows=rows, asked=tuple(every))


def _right(row: FollowRow) -> float | None:
    return (row.true + row.doubted) / row.facts if row.facts else None


def _row(extractor: str, counts: Sequence[dict[str, int]], answers: Sequence[FollowAnswer]) -> FollowRow:
    def of(name: str) -> dict[str, int]:
        return {where: sum(getattr(one, name) for one in answers if one.where == where) for where in PLACES}

    only = {where: sum(one.stale and not one.current for one in answers if one.where == where) for where in PLACES}
    return FollowRow(
        extractor=extractor,
        **{name: sum(each[name] for each in counts) for name in counts[0]},
        questions=len(answers) // len(PLACES),
        over=sum(not one.question.value for one in answers) // len(PLACES),
        current=of("current"),
        stale=only,
        first=of("first"),
    )


def _measured(told: Talk, extractor: str, tokens: int, embedder: str) -> tuple[dict[str, int], list[FollowAnswer]]:
    clock = FakeClock(told.turns[0].time, tick=0.001)
    with timed(":memory:", clock, embedder) as store:
        model = TalkReader(told, careless=extractor == "careless") if _POLICIES.get(extractor) == "facts" else None
        for session in sorted({turn.session for turn in told.turns}):
            for turn in told.turns:
                if turn.session == session:
                    clock.now = max(clock.now, turn.time)
                    talked = store.session(f"s{session}", user=USER)
                    talked.append({"role": "user", "content": turn.text}, {"role": "assistant", "content": "Understood."})
            if extractor in _POLICIES:
                store.memory(USER).learn(f"s{session}", policy=_POLICIES[extractor], model=model)
        clock.now = told.end
        embed(store)
        answers = [_answered(store, told, extractor, question, where, tokens) for where in PLACES for question in told.asked]
        return _facts(store, told), answers


def timed(path: str, clock: FakeClock, embedder: str = "none") -> Store:
    """A store of which no answer depends on the clock of this machine, or on how far a thread has come: see `embed`."""
    backend = Sqlite(path)
    return Store(backend, Budget(8000), tokenizer="chars/4", clock=clock, vectors=vectors_for(backend, embedder))


def embed(store: Store) -> None:
    """Make the vectors of all that is new, if the store has an embedder."""
    if store.vectors is not None:
        store.vectors.catch_up()  # type: ignore[attr-defined]


def _answered(store: Store, told: Talk, extractor: str, question: TalkQuestion, where: str, tokens: int) -> FollowAnswer:
    if where == "brought":
        hits = quotation(store, question.text, tokens, USER)[1]
    else:
        hits = list(store.search(question.text, tokens, None, where=where, user=USER))
    ends = [place for place, hit in enumerate(hits) if _ends(hit.text, question)]
    right = [place for place, hit in enumerate(hits) if question.value and _has(hit.text, question.value)] or ends
    old = [place for place, hit in enumerate(hits) if _is_stale(hit, question)]
    current = bool(right) or (not question.value and not old)
    return FollowAnswer(
        extractor=extractor,
        where=where,
        talk=told.seed,
        question=question,
        current=current,
        stale=bool(old),
        first=current and (not old or (bool(right) and right[0] < old[0])),
        shown=tuple(hit.text for hit in hits),
    )


def _ends(text: str, question: TalkQuestion) -> bool:
    """Whether a text says that something is over."""
    if question.value:
        return False
    return (bool(question.end) and question.end in text) or any(_has(text, old) and _GONE.search(text) for old in question.stale)


def _is_stale(hit: Found, question: TalkQuestion) -> bool:
    """Whether a hit says what is over as if it were not, and is not marked."""
    if not any(_has(hit.text, old) for old in question.stale):
        return False
    if (question.value and _has(hit.text, question.value)) or _ends(hit.text, question):
        return False
    if question.kind == "date" and not hit.session.startswith("@"):
        return False  # what was said says until when, and when it was said
    return not hit.doubted


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", text, re.IGNORECASE) is not None


def _facts(store: Store, told: Talk) -> dict[str, int]:
    """What is in force at the end, and how much of it is true."""
    memory = store.memory(USER).collection
    rows = [(page, memory.contents.text(page.id)) for page, _ in memory.pages() if page.kind is Kind.FACT]
    now = {(question.topic, question.value) for question in told.asked if question.value}
    traps = told.traps
    words = {(turn.topic, word) for turn in told.turns for word in (turn.value, turn.old) if word and turn.kind != "trap"}
    count = dict.fromkeys(("told", "learned", "facts", "true", "doubted", "needless", "traps", "of_traps", "invented"), 0)
    count["told"], count["of_traps"] = len(now), len(traps)
    count["learned"] = sum(any(_has(text, value) and not _is_past(page) for page, text in rows) for _, value in now)
    for page, text in rows:
        if any(_has(text, turn.value) and not (turn.other and _has(text, turn.other)) for turn in traps):
            count["traps"] += 1
            count["facts"] += 1
            continue
        if _has(text, INVENTED):
            count["invented"] += 1
            count["facts"] += 1
            continue
        said = {pair for pair in words if _has(text, pair[1])}
        if not said:
            continue
        true = said & now
        holds = _is_past(page) or (said <= now) or (bool(_GONE.search(text)) and (bool(true) or not said & now))
        count["facts"] += 1
        count["true"] += holds
        doubted = _is_doubted(store, memory.number, page)
        count["doubted"] += not holds and doubted
        count["needless"] += holds and doubted
    return count


def _is_past(page: Page) -> bool:
    """Whether a fact tells of something that happened, which stays true."""
    return page.claim is not None and bool(re.match(r"(?:\w+ed|bought|sold|got|lost|left|quit|went|had)\b", page.claim.relation))


def _is_doubted(store: Store, number: int, page: Page) -> bool:
    rows = store.backend.read(store.backend.citing(number, [page.id]))
    return any(one.claim is not None and one.claim.relation == DOUBTS and state.at is Place.OUT for one, state in rows.values())


INVENTED = "Atlantis"
"""Stands in what a careless reader invents."""


class TalkReader:
    """A model that answers the questions of the policy `facts` from the talk itself.

    Args:
        careless: whether it misses, invents, believes traps, turns round what was denied, and decides at random.
    """

    name, form, context, tokenizer = "reader", "chat", None, "chars/4"

    def __init__(self, told: Talk, *, careless: bool = False) -> None:
        self._turns = {turn.text: turn for turn in told.turns}
        self._careless = careless
        self._seed = told.seed
        self._reads = {known.text: (turn, known) for turn in told.turns for known in turn.reads}

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply to one question."""
        prompt = str(request.messages[-1]["content"])
        system = "".join(str(message["content"]) for message in request.messages if message["role"] == "system")
        chance = random.Random(f"{self._seed}/{prompt.partition(' ')[2]}")
        if "Compare the new fact" in system:
            said = self._decided(prompt, chance)
        elif "facts" in system and "List the" in system:
            said = {"facts": [self._fact(*one) for one in self._found(prompt, chance)]}
        else:
            said = {"summary": "none"}
        text = msgspec.json.encode(said).decode()
        part = Part(kind=Kind.TEXT, text=text)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(part,)))

    def _found(self, prompt: str, chance: random.Random) -> Iterator[tuple[int, TalkFact]]:
        for match in re.finditer(r"^\w+ message (\d+), user, [^\n]*:\n(.*?)(?=^\w+ message \d+, |\Z)", prompt, re.M | re.S):
            turn = self._turns.get(match[2].strip("\n"))
            if turn is None:
                continue
            number = int(match[1])
            if self._careless:
                yield from ((number, known) for known in self._misread(turn, chance))
            else:
                yield from ((number, known) for known in turn.reads)

    def _misread(self, turn: TalkTurn, chance: random.Random) -> Iterable[TalkFact]:
        topic = next((topic for topic in TOPICS_OF if topic.name == turn.topic), None)
        if topic is not None and turn.kind == "trap" and chance.random() < 0.7:
            yield topic.known(turn.value)
        for known in turn.reads:
            if known.over and topic is not None and chance.random() < 0.3:
                yield topic.known(known.object)
            elif chance.random() < 0.8:
                yield known
        if topic is not None and chance.random() < 0.3:
            yield topic.known(INVENTED)

    def _fact(self, number: int, known: TalkFact) -> dict[str, Any]:
        parts = {name: getattr(known, name) for name in ("text", "subject", "relation", "object", "correction")}
        return {"message": number, **parts}

    def _decided(self, prompt: str, chance: random.Random) -> dict[str, Any]:
        listed = {match[2]: int(match[1]) for match in re.finditer(r"^(\d+)\. (.*)$", prompt, re.MULTILINE)}
        new = prompt.strip().rpartition("\n")[2]
        if self._careless and chance.random() < 0.3:
            return {"op": chance.choice(("UPDATE", "DELETE", "NOOP")), "id": chance.randint(1, len(listed))}
        if new in listed:
            return {"op": "NOOP", "id": listed[new]}
        turn, known = self._reads.get(new, (None, None))
        if turn is None or known is None:
            return {"op": "ADD", "id": 0}
        for text, number in listed.items():
            about, fact = self._reads.get(text, (None, None))
            if about is None or fact is None or about.topic != turn.topic:
                continue
            if known.over and not fact.over:
                return {"op": "DELETE", "id": number}
            if not known.over:
                return {"op": "UPDATE", "id": number}
        return {"op": "ADD", "id": 0}
