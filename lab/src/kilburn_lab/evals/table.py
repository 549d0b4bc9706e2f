"""The table of eviction strategies: utilisation, latency, accuracy and overflow, over many made-up sessions.

Sessions of `kilburn_lab.evals.sessions` are streamed through real windows over one store, all of a policy's sessions in
the same store. Before each answer the prompt is rendered, and it is looked whether it has the value that was asked for.
No model takes part. What the figures mean is in `kilburn_lab.evals.table_report.TERMS`, which the report prints.

    report = evaluate(["lru", "hybrid"], sessions=20)
    print(report.table())
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.planning import STAYS
from kilburn.kernel.resolve import names, resolve
from kilburn.move import Evict, Move
from kilburn.opening import Store
from kilburn.page import Page, Span
from kilburn.policies.belady import Belady, Future
from kilburn.policies.importance import scores
from kilburn.policies.tiered import Tiered
from kilburn.policy import Policy, View
from kilburn.search.found import Found
from kilburn.testing.clock import FakeClock
from kilburn_lab.evals.baselines import CHARACTERS, PLAIN, UNBOUNDED, tell
from kilburn_lab.evals.candidate import append_and_wait
from kilburn_lab.evals.drift import texts_of
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.outcomes import PolicyCounts, Shipping
from kilburn_lab.evals.prefix import Block, blocks_of, length_of, text_of
from kilburn_lab.evals.roster import BELADY, SPECS, Entrant
from kilburn_lab.evals.sessions import Interaction, UserSession, sessions
from kilburn_lab.evals.table_report import ENTRIES, TIERS, QuestionOutcome, Streamed, TableReport

EVERYBODY = (*PLAIN, ENTRIES, TIERS, *sorted({*names("policies"), *SPECS} - {BELADY}), BELADY)
"""All baselines, all policies that ship and some combinations; those that are known here only before the others, the offline
optimum last."""

HITS = 500
"""Tokens that the hits of one search may take."""

PAUSE = 60.0
"""Seconds from one interaction to the next; sessions begin a day apart."""
DAY = 86_400.0
START = 1_700_000_000.0


@dataclass(frozen=True)
class ByEntries:
    """The least recently used leave when there are too many entries, however large they are: the usual buffer.

    Args:
        keep: pages that stay.
    """

    keep: int

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction, or nothing while there are few enough."""
        older = view.movable(page for page in view.pages if page.message != view.turn)
        older.sort(key=lambda page: (use.turn, use.time) if (use := view.uses.get(page.id)) else (0, 0.0))
        chosen: dict[int, None] = {}
        for page in older:
            if len(view.pages) - len(chosen) <= self.keep:
                break
            chosen.update(dict.fromkeys(member for member in view.group(page.id) if member not in view.stubs))
        return [Evict(pages=tuple(chosen), why="too many entries")] if chosen else []


@dataclass(frozen=True)
class TieredByImportance:
    """Brief 002's hybrid, as its words describe it: the tiers of `tiered`, and what leaves a tier is what `importance`
    holds least important. The `hybrid` that ships is another policy.
    """

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction: the least important outside of the core, then those of the core."""
        if not view.excess:
            return []
        capacity = view.budget.capacity
        core = Tiered().members(view, capacity // 4)
        older = [page for page in view.pages if page.message != view.turn]
        found = scores(view, older, (1.0, 1.0, 0.5, 0.5), 3600.0, 20.0)
        older.sort(key=lambda page: (page.id in core, found[page.id]))
        chosen = view.free(older, view.excess + capacity // 8 + view.handle)
        return [Evict(pages=chosen, why="least important of its tier")] if chosen else []


def evaluate(
    policies: Sequence[str] = EVERYBODY,
    *,
    count: int = 5,
    interactions: int = 50,
    window: int = 2000,
    seed: int = 0,
    progress: Progress = unwatched,
) -> TableReport:
    """Measure each policy on the same sessions.

    Args:
        policies: names of baselines, or specs; "entries", "tiers" and "belady" are known here too.
        count: sessions.
        interactions: of each session.
        window: in tokens of four characters.
        seed: of the sessions and of the intervals.
        progress: called with the number of finished sessions and of all.

    Raises:
        SpecError: a number that means nothing, or no such policy.
    """
    if window < 500:
        raise SpecError(f"window={window}", advice="give 500 tokens or more")
    told = sessions(count, interactions, seed)
    entrants = [Entrant(label, SPECS.get(label, label)) for label in dict.fromkeys(policies)]
    for entrant in entrants:
        if entrant.spec not in (ENTRIES, TIERS, BELADY, *PLAIN):
            resolve("policies", entrant.at(window))
    streamed: dict[str, list[Streamed]] = {entrant.label: [] for entrant in entrants}
    began = time.perf_counter()
    progress(0, len(entrants) * count)
    measured = (session for entrant in entrants for session in measure(entrant, told, window))
    for done, session in enumerate(measured, 1):
        streamed[session.policy].append(session)
        progress(done, len(entrants) * count)
    return TableReport.of(streamed, window=window, interactions=interactions, seed=seed, seconds=time.perf_counter() - began)


def measure(entrant: Entrant, told: Sequence[UserSession], window: int) -> Iterator[Streamed]:
    """Stream all sessions, one after another, through one policy over one new file."""
    clock = FakeClock(START, tick=0.0)
    plain = entrant.spec in PLAIN
    policy = "fifo" if plain else _made_here(entrant, told, window) or entrant.at(window)
    backend = Sqlite(":memory:")
    with Store(backend, Budget(UNBOUNDED if plain else window), policy, tokenizer=f"chars/{CHARACTERS}", clock=clock) as store:
        for number, session in enumerate(told):
            clock.now = START + number * DAY
            if entrant.spec == BELADY:
                store.policy = Belady(_future_of(session))
            yield _Stream(store, session, entrant.label, window, clock).run()


def _made_here(entrant: Entrant, told: Sequence[UserSession], window: int) -> Policy | None:
    """The policies that are known here only. The optimum's place is taken by another until a session begins."""
    if entrant.spec == ENTRIES:
        return ByEntries(_entries(told, window))
    if entrant.spec == TIERS:
        return TieredByImportance()
    return Belady() if entrant.spec == BELADY else None


def _entries(told: Sequence[UserSession], window: int) -> int:
    """How many messages of the mean size fit into a window."""
    sizes = [sum(map(len, texts_of(message))) for session in told for message in _messages_of(session)]
    return max(1, window * CHARACTERS * len(sizes) // sum(sizes))


def _messages_of(session: UserSession) -> Iterator[dict[str, object]]:
    for interaction in session.interactions:
        yield interaction.said
        yield from interaction.done


def _future_of(session: UserSession) -> Future:
    """What each message is needed for, and when: of one that told a fact its sentence, of others everything."""
    texts = [" ".join(texts_of(message.get("content"))) for message in _messages_of(session)]
    needed: dict[int, list[tuple[int, tuple[Span, ...]]]] = {}
    turn = 1
    for interaction in session.interactions:
        for page in interaction.uses:
            span = (0, len(texts[page - 1]))
            if interaction.asked is not None:
                at = texts[page - 1].index(interaction.asked.value)
                span = (
                    texts[page - 1].rfind(". ", 0, at) + 2 if ". " in texts[page - 1][:at] else 0,
                    at + len(interaction.asked.value),
                )
            needed.setdefault(page, []).append((turn, (span,)))
        turn += 1 + len(interaction.done)
    return {page: tuple(uses) for page, uses in needed.items()}


class _Stream:
    """One made-up session, streamed through a session of a store, and through a baseline where the policy is one."""

    def __init__(self, store: Store, session: UserSession, policy: str, window: int, clock: FakeClock) -> None:
        self.store, self.session, self.clock = store, session, clock
        self.opened = store.session(session.name, user=session.user)
        self.found = Streamed(policy=policy, session=session.name)
        self.cell, self.shipping = PolicyCounts(policy=policy, window=window), Shipping()
        self.baseline = PLAIN[policy](window) if policy in PLAIN else None
        self.last = {page: at for at, one in enumerate(session.interactions) for page in one.uses}
        """Which interaction is the last that needs a page."""
        self.derived: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def run(self) -> Streamed:
        """Everything that is said and done, and what became of the window by it."""
        began = time.perf_counter()
        for at, interaction in enumerate(self.session.interactions):
            self._interaction(at, interaction)
            self.clock.now += PAUSE
        found, stats = self.found, self.opened.stats()
        # That the kernel cuts a message down to the user's orders is no overflow.
        moves = [event for event in self.opened.ledger.events() if event.act in (Act.EVICT, Act.FOLD) and event.why != STAYS]
        moved = [event.policy for event in moves]
        found.alone = "kernel" in moved
        found.acts = sum(policy != "kernel" for policy in moved)
        found.refused, found.failed, found.asks = stats.refused_moves, stats.policy_failures, stats.asks
        found.later, found.cached, found.again = self.cell.later, self.cell.cached, self.cell.refilled
        found.seconds = time.perf_counter() - began
        return found

    def _interaction(self, at: int, interaction: Interaction) -> None:
        session, found = self.opened, self.found
        began = time.perf_counter()
        address = append_and_wait(session, interaction.said)
        tokens, blocks, text = self._prompt(interaction.said)
        spent = time.perf_counter() - began
        self.shipping.tell(*texts_of(interaction.said))
        self.shipping.ship(blocks, self.cell)
        found.prompts += 1
        found.shipped += tokens
        found.overflow += tokens > self.cell.window
        if session.window.seen > session.prompts.capacity:
            found.full += 1
            found.used += sum(self._used_later(page, at) for page in session.window.resident()) / session.prompts.capacity
        if interaction.asked is not None:
            shown, own = interaction.asked.value in text, False
            everywhere: list[Found] = []
            if self.baseline is None:
                began = time.perf_counter()
                hits = session.search(interaction.asked.question, tokens=HITS, record=False)
                spent += time.perf_counter() - began
                own = any(interaction.asked.value in hit.text for hit in hits)
                everywhere = self.store.search(interaction.asked.question, tokens=HITS, user=self.session.user)
            found.questions.append(
                QuestionOutcome(
                    earlier=interaction.asked.earlier,
                    shown=shown,
                    found=shown or own,
                    recalled=shown or own or any(interaction.asked.value in hit.text for hit in everywhere),
                    ms=1000 * spent,
                )
            )
        for page in interaction.uses:
            session.recall(f"p{page}")
        if interaction.marked:
            session.rate(address)
        for message in interaction.done:
            append_and_wait(session, message)
            self.shipping.tell(*texts_of(message))
            self._tell(message)

    def _prompt(self, message: dict[str, object]) -> tuple[int, list[Block], str]:
        """The tokens, blocks and text of the prompt after a message of the user."""
        if self.baseline is None:
            prompt = self.opened.render()
            return prompt.tokens, list(blocks_of(prompt)), "\n".join(texts_of(list(prompt)))
        self._tell(message)
        blocks = list(self.baseline.prompt())
        return -(-length_of(blocks) // CHARACTERS), blocks, text_of(blocks)

    def _tell(self, message: dict[str, object]) -> None:
        if self.baseline is not None:
            for block in blocks_of([message]):
                tell(self.baseline, block.role, block.text or block.beside)

    def _used_later(self, page: Page, at: int) -> float:
        """The tokens of a resident page that this interaction or a later one needs; of a derived page, those of the
        lines that stand in such a page."""
        if page.id > 0:
            return page.tokens if self.last.get(page.id, -1) >= at else 0
        if page.id not in self.derived:
            self.derived[page.id] = self._lines_of(page)
        lines = self.derived[page.id]
        kept = sum(size for size, sources in lines if any(self.last.get(source, -1) >= at for source in sources))
        return page.tokens * kept / max(1, sum(size for size, _ in lines))

    def _lines_of(self, page: Page) -> list[tuple[int, tuple[int, ...]]]:
        """The size of each line of a derived page, and the originals that have it."""
        sources = [(source, self.opened.contents.text(source)) for source in page.sources if self.last.get(source)]
        return [
            (len(line), tuple(source for source, text in sources if line.strip() and line.strip() in text))
            for line in self.opened.contents.text(page.id).split("\n")
        ]
