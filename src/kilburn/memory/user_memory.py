"""A user's memory: a collection that remembers, learns, updates and searches facts. `Store.memory` finds it by its name."""

from __future__ import annotations

from functools import partial
from typing import Any

from kilburn.arguments import checked
from kilburn.backend import SegmentInfo
from kilburn.claims import DOUBTS
from kilburn.collections.collection import Collection, undisturbed
from kilburn.errors import KernelError
from kilburn.event import Act
from kilburn.kernel.drive import arun, aside, run
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.kernel.taint import lowest_read
from kilburn.memory.doubt import MOST as DOUBTED
from kilburn.memory.doubt import doubted_by, link, resembling, rival_words, rivalling, turns
from kilburn.memory.learning import Learned, LearningJob, answering
from kilburn.memory.retention import Quota, within
from kilburn.memory.secrets import Secrets, screen
from kilburn.memory.words import is_said, told
from kilburn.message import Kind, Role, Trust
from kilburn.move import Add, Retire
from kilburn.page import Page, Place, parse_address
from kilburn.search.found import Findings
from kilburn.search.search import Searcher

NEAR = 8
"""Facts that are compared with one that is told."""

WORDS, EACH = 12, 32
"""Words of a sentence by which facts are looked for that it may change, the longest first; facts of each."""

RECENT = 10
"""The user's last messages, in which it is looked for what an agent notes."""


@checked
class UserMemory(Collection):
    """What is known of a user of the tenant, fact by fact; made by `Store.memory`.

    Safe to use from several threads.

    Args:
        levels: whose sessions it learns from, and what it searches with.
    """

    def __init__(self, levels: Store, info: SegmentInfo) -> None:
        super().__init__(levels, info, levels.counter, levels.clock)
        self._levels = levels

    def remember(
        self,
        text: str,
        *,
        since: float | None = None,
        until: float | None = None,
        importance: float = 0.0,
        pin: bool = False,
        secrets: Secrets = None,
        quota: Quota | None = None,
    ) -> str:
        """Keep a fact that a person tells; returns its address. It can be found at once. What it may make untrue stays in force,
        and a search marks it (`Found.doubted`).

        Args:
            since, until: from when to when it is true, in seconds since the epoch.
            importance: 0 to 1.
            pin: never retired by a quota, never swept.
            secrets: what to do if it holds a secret: see `kilburn.memory.secrets.screen`.
            quota: what the memory may hold.

        Raises:
            SecretFound, QuotaExceeded: it may not be written. KernelError: an empty text, or times that cannot be.
            MissingExtra, StoreError.
        """
        clean, _ = screen(text, secrets)
        add = Add(text=clean, since=since, until=until, importance=importance, why="a person told it")

        def write() -> str:
            seen = None if quota is None else self.ledger.head
            olds = self._rivals(clean)
            adds = [add, *([link(olds)] if olds else [])]
            return self.apply(*within(quota, self, adds, self.clock()), seen=seen)[0]

        address = undisturbed(write)
        if pin:
            self.pin(address)
        return address

    def note(self, text: str, session: Session, *, secrets: Secrets = None) -> str:
        """Keep a fact that the agent of a session notes; returns its address. Where the user said it, in whatever words, it cites
        that message and holds at once; else it is the agent's word, and proposed if the agent had read what may not be believed.

        Args:
            secrets: see `remember`.

        Raises:
            SecretFound, MissingExtra. KernelError: an empty text, or a session in which nothing was said. StoreError.
        """
        clean, _ = screen(text, secrets)
        with session.lock:
            session.ledger.refresh()
            pages = [page for page in session.window.pages.originals() if session.window.at(page.id) is not Place.DROPPED]
            said = [page for page in pages if page.kind is Kind.TEXT and page.role is Role.USER and page.trust >= Trust.USER]
            its = next((page for page in reversed(said[-RECENT:]) if is_said(clean, session.contents.text(page.id))), None)
            source = its or next((page for page in reversed(pages) if page.role is Role.ASSISTANT), None)
            if source is None:
                raise KernelError("nothing was said yet", advice="a fact that an agent notes cites what was said")
            tainted = its is None and lowest_read(session)[source.id] < Trust.AGENT
            cite = (session.contents.owner(source.id), source.id)

        def write() -> str:
            olds = self._rivals(clean) if not tainted else []
            add = Add(text=clean, cites=(cite,), since=source.time, why="an agent noted it")
            return self.apply(add, *([link(olds)] if olds else []), policy="agent", cause="learn", tainted=tainted)[0]

        return undisturbed(write)

    def _rivals(self, text: str) -> list[int]:
        """The facts in force that a sentence may make untrue."""
        pair, words = rival_words(text), sorted(told(text), key=lambda word: (-len(word), word)) if turns(text) else []
        if pair is None and not words:
            return []
        wanted = [*([pair] if pair is not None else []), *((word, "") for word in words[:WORDS])]
        found = [[hit.page for hit in hits] for hits in self.backend.words.newest(self.number, wanted, EACH if words else NEAR)]
        near = found.pop(0)[:NEAR] if pair is not None else []
        # Of a common word only the newest facts are looked at: it costs the same however many there are.
        worth: dict[int, float] = {}
        for pages in found:
            for page in pages:
                worth[page] = worth.get(page, 0.0) + 1 / len(pages)
        near += sorted(worth, key=lambda page: (-worth[page], -page))[:NEAR]
        keys = [(self.number, page) for page in dict.fromkeys(near)]
        # What is marked is read again, and verified, when it is linked.
        skimmed = self.backend.skim(keys).values() if keys else ()
        rows = [page for page, state in skimmed if state.at is Place.OUT and page.kind is Kind.FACT]
        texts = self.backend.contents.texts({page.digest for page in rows}) if rows else {}
        rivals, resembles = rivalling(text), resembling(text) if words else None
        olds = []
        for row in rows:
            known = texts[row.digest]
            if rivals(known) or (resembles is not None and resembles(known, row.claim)):
                olds.append(row.id)
        return olds if len(olds) <= DOUBTED else []

    def update(self, address: str, text: str, *, since: float | None = None, secrets: Secrets = None) -> str:
        """Put a new text in place of a fact, as a person; returns its address. The old fact is retired in the same
        transaction and stays in the history. The new one has its importance.

        Args:
            address: one fact that is in force.
            since: from when the new one is true, and the old one is not, in seconds since the epoch; None for now.
            secrets: see `remember`.

        Raises:
            UnknownAddress, Forgotten. KernelError: several facts, one that is not in force, or an empty text. LawBroken: it
            is pinned. SecretFound, MissingExtra, StoreError. Nothing was changed.
        """
        clean, _ = screen(text, secrets)

        def write() -> str:
            seen, pages = self.ledger.head, self.contents.resolve(address)
            if len(pages) != 1:
                raise KernelError(f"{address} names {len(pages):,} facts", advice="update one at a time")
            _, state = self.read(pages[0])
            if state.at is not Place.OUT:
                raise KernelError(f"{address} is {state.at}, not in force", advice="see its history; `remember` adds a fact")
            add = Add(text=clean, since=since, importance=state.importance, why="a person updated it")
            doubts = self._doubts(pages[0])
            gone = Retire((*pages, *[page.id for page in doubts]), refers=0, why="a person updated it")
            # What the old fact may have made untrue, the new one may, too.
            about = [doubted_by(page) for page in doubts]
            olds = sorted(set().union(*(facts for facts in about if pages[0] not in facts)))
            return self.apply(add, *([link(olds)] if olds else []), gone, seen=seen)[0]

        return undisturbed(write)

    def _doubts(self, fact: int) -> list[Page]:
        """The pages in force by which a fact is doubted, or doubts others."""
        keys = [key for key in self.backend.citing(self.number, [fact]) if key[0] == self.number]
        rows = self.backend.read(keys).values()
        there = [page for page, state in rows if state.at is Place.OUT]
        return [page for page in there if page.claim is not None and page.claim.relation == DOUBTS]

    def learn(
        self,
        session: str | Session,
        policy: Any = "plain",
        model: Any = None,
        *,
        secrets: Secrets = None,
        quota: Quota | None = None,
    ) -> Learned:
        """Learn from what was said in a session since the last call.

        Args:
            session: its name, or the open session; of any user.
            policy: a spec such as "plain" or "facts", or an object with `plan`.
            model: answers what the policy asks: a spec or a model; None for that of the store.
            secrets: what to do with a text that holds a secret, before any policy or model sees it: "redact" puts a mark in
                its place; "refuse" leaves the text out, as if it had not been said; None does not look.
            quota: what the memory may hold. What follows an untrusted text never evicts anything.

        Raises:
            SpecError: no such session, policy or model, or the policy asks a model and there is none. QuotaExceeded,
            StoreError: nothing of the exchange in hand was written; what came before stays. MissingExtra: `secrets` without
            the extra.
        """
        job = LearningJob(self._levels, session, policy, self.info.user, secrets, quota)
        return run(job.learn(), answering(self._levels, model))

    async def alearn(
        self,
        session: str | Session,
        policy: Any = "plain",
        model: Any = None,
        *,
        secrets: Secrets = None,
        quota: Quota | None = None,
    ) -> Learned:
        """`learn` for async callers: the model runs in a worker thread. If it is cancelled, nothing of the exchange in hand is
        written."""
        job = LearningJob(self._levels, session, policy, self.info.user, secrets, quota)
        return await arun(job.learn(), answering(self._levels, model))

    def search(
        self, query: str, tokens: int = 1000, limit: int | None = 20, *, at: float | None = None, abstain: bool = False
    ) -> Findings:
        """Facts of this memory that match; see `Store.search`, which also finds what belongs to all users.

        Raises:
            StoreError.
        """
        levels, now = self._levels, self.clock() if at is None else at
        search = Searcher(self.backend, levels.ranking, levels.vectors, [self.info])
        hits = search.findings(query, tokens, now, self.counter, limit=limit, at=at, abstain=abstain)
        self.ledger.record(Act.SEARCH, [parse_address(hit.address)[0] for hit in hits], cause="fault")
        return hits

    async def asearch(
        self, query: str, tokens: int = 1000, limit: int | None = 20, *, at: float | None = None, abstain: bool = False
    ) -> Findings:
        """`search` for async callers, in a worker thread."""
        return await aside(partial(self.search, query, tokens, limit, at=at, abstain=abstain))
