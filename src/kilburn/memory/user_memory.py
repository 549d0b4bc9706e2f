"""A user's memory: remembers, learns, updates and searches facts. `Store.memory` makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kilburn.arguments import checked
from kilburn.backend import State
from kilburn.claims import DOUBTS
from kilburn.collections.collection import Collection, undisturbed
from kilburn.collections.versions import Version
from kilburn.errors import KernelError
from kilburn.event import Act
from kilburn.kernel.drive import run
from kilburn.kernel.segment import Recalled
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.doubt import (
    MAX_DOUBTED_FACTS,
    doubt_link,
    doubted_facts,
    has_change_sign,
    resemblance_test,
    rival_test,
    rival_words,
)
from kilburn.memory.learning import Learned, LearningJob, make_answerer
from kilburn.memory.quota import Quota, make_room
from kilburn.memory.secrets import Secrets, screen
from kilburn.memory.taint import lowest_read
from kilburn.memory.words import content_words, is_said
from kilburn.message import Kind, Role, Trust
from kilburn.move import Add, Retire
from kilburn.page import Page, Place, parse_address
from kilburn.search.found import Findings
from kilburn.search.search import Searcher

MAX_RIVALS = 8
"""Facts in force that are compared with a new one at most."""

MAX_WORDS, MAX_FACTS_PER_WORD = 12, 32
"""Words of a sentence that are searched for facts that it may change, the longest first; newest facts with each word."""

MAX_RECENT_MESSAGES = 10
"""Messages of the user that may support a fact that an agent notes: the newest ones."""


@checked
class UserMemory:
    """The facts that are known of a user of the tenant; made by `Store.memory`. Safe to use from several threads.

    Args:
        store: has the sessions to learn from, and the vectors to search with.
        collection: holds the facts as pages; its `apply` takes any change, and its `events` are the ledger.
    """

    def __init__(self, store: Store, collection: Collection) -> None:
        self._store, self.collection = store, collection
        self.name, self.user = collection.name, collection.info.user

    def __repr__(self) -> str:
        """Name and size of the memory; no text of a fact."""
        return f"<UserMemory {self.name!r}: {self.collection.info.pages} pages>"

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
        """Store a fact that a person states, and return its address. It can be found at once. Facts that it may make untrue stay
        in force, and a search marks them (`Found.doubted`).

        Args:
            since, until: validity in seconds since the epoch.
            importance: 0 to 1.
            pin: never retired by a quota, never swept.
            secrets: what to do if it holds a secret: see `kilburn.memory.secrets.screen`.
            quota: size limit of the memory.

        Raises:
            SecretFound, QuotaExceeded: it may not be written. KernelError: an empty text, or invalid times.
            MissingExtra, StoreError.
        """
        clean, _ = screen(text, secrets)
        add = Add(text=clean, since=since, until=until, importance=importance, why="a person told it")

        def write() -> str:
            head = None if quota is None else self.collection.ledger.head
            olds = self._rivals(clean)
            adds = [add, *([doubt_link(olds)] if olds else [])]
            return self.collection.apply(*make_room(quota, self.collection, adds, self.collection.clock()), seen=head)[0]

        address = undisturbed(write)
        if pin:
            self.pin(address)
        return address

    def note(self, text: str, session: Session, *, secrets: Secrets = None) -> str:
        """Store a fact that the agent of a session notes, and return its address. If the user said it, in whatever words, it
        cites that message and holds at once. Otherwise it counts as the agent's word, and is only proposed if the agent had read
        untrusted text.

        Args:
            secrets: see `remember`.

        Raises:
            SecretFound, MissingExtra. KernelError: an empty text, or a session without messages. StoreError.
        """
        clean, _ = screen(text, secrets)
        with session.lock:
            session.ledger.refresh()
            window = session.window
            pages = [page for page in window.pages.originals() if window.at(page.id) is not Place.DROPPED]
            messages = [page for page in pages if page.kind is Kind.TEXT and page.role is Role.USER and page.trust >= Trust.USER]
            source_message = next(
                (page for page in reversed(messages[-MAX_RECENT_MESSAGES:]) if is_said(clean, session.contents.text(page.id))),
                None,
            )
            source = source_message or next((page for page in reversed(pages) if page.role is Role.ASSISTANT), None)
            if source is None:
                raise KernelError("nothing was said yet", advice="a fact that an agent notes cites what was said")
            tainted = source_message is None and lowest_read(session)[source.id] < Trust.AGENT
            cite = (session.contents.owner(source.id), source.id)

        def write() -> str:
            olds = self._rivals(clean) if not tainted else []
            add = Add(text=clean, cites=(cite,), since=source.time, why="an agent noted it")
            return self.collection.apply(
                add, *([doubt_link(olds)] if olds else []), policy="agent", cause="learn", tainted=tainted
            )[0]

        return undisturbed(write)

    def _rivals(self, text: str) -> list[int]:
        """Return the facts in force that a sentence may make untrue; none if they would be too many."""
        pair, words = rival_words(text), list[str]()
        if has_change_sign(text):
            words = sorted(content_words(text), key=lambda word: (-len(word), word))[:MAX_WORDS]
        if pair is None and not words:
            return []
        backend, number = self.collection.backend, self.collection.number
        queries = [*([pair] if pair is not None else []), *((word, "") for word in words)]
        limit = MAX_FACTS_PER_WORD if words else MAX_RIVALS
        matches = [[hit.page for hit in hits] for hits in backend.words.newest(number, queries, limit)]
        near = matches.pop(0)[:MAX_RIVALS] if pair is not None else []
        # Only the newest facts with a common word are read, so the cost does not grow with the memory.
        weights: dict[int, float] = {}
        for pages in matches:
            for page in pages:
                weights[page] = weights.get(page, 0.0) + 1 / len(pages)
        near += sorted(weights, key=lambda page: (-weights[page], -page))[:MAX_RIVALS]
        keys = [(number, page) for page in dict.fromkeys(near)]
        # `skim` does not verify: the doubted facts are read again when the doubt is written.
        rows = [page for page, state in (backend.skim(keys).values() if keys else ()) if state.at is Place.OUT]
        facts = [page for page in rows if page.kind is Kind.FACT]
        texts = backend.contents.texts({page.digest for page in facts}) if facts else {}
        is_rival, resembles = rival_test(text), resemblance_test(text) if words else None
        rivals = []
        for fact in facts:
            fact_text = texts[fact.digest]
            if is_rival(fact_text) or (resembles is not None and resembles(fact_text, fact.claim)):
                rivals.append(fact.id)
        return rivals if len(rivals) <= MAX_DOUBTED_FACTS else []

    def update(self, address: str, text: str, *, since: float | None = None, secrets: Secrets = None) -> str:
        """Replace a fact by a new text, as a person, and return its address. The old fact is retired in the same transaction and
        stays in the history. The new fact inherits its importance.

        Args:
            address: one fact that is in force.
            since: when the new one becomes true, and the old one untrue, in seconds since the epoch; None for now.
            secrets: see `remember`.

        Raises:
            UnknownAddress, Forgotten. KernelError: several facts, one that is not in force, or an empty text. LawBroken: it
            is pinned. SecretFound, MissingExtra, StoreError. Nothing was changed.
        """
        clean, _ = screen(text, secrets)

        def write() -> str:
            head, pages = self.collection.ledger.head, self.collection.contents.resolve(address)
            if len(pages) != 1:
                raise KernelError(f"{address} names {len(pages):,} facts", advice="update one at a time")
            _, state = self.collection.read(pages[0])
            if state.at is not Place.OUT:
                raise KernelError(f"{address} is {state.at}, not in force", advice="see its history; `remember` adds a fact")
            add = Add(text=clean, since=since, importance=state.importance, why="a person updated it")
            doubts = self._doubts(pages[0])
            retirement = Retire((*pages, *[page.id for page in doubts]), refers=0, why="a person updated it")
            # The new fact doubts what the old one doubted.
            about = [doubted_facts(page) for page in doubts]
            olds = sorted(set().union(*(facts for facts in about if pages[0] not in facts)))
            return self.collection.apply(add, *([doubt_link(olds)] if olds else []), retirement, seen=head)[0]

        return undisturbed(write)

    def _doubts(self, fact: int) -> list[Page]:
        """Return the pages in force by which a fact is doubted, or doubts others."""
        backend, number = self.collection.backend, self.collection.number
        rows = backend.read(key for key in backend.citing(number, [fact]) if key[0] == number).values()
        pages = [page for page, state in rows if state.at is Place.OUT]
        return [page for page in pages if page.claim is not None and page.claim.relation == DOUBTS]

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
            secrets: what to do with a text that holds a secret, before any policy or model sees it: "redact" replaces
                it by a mark; "refuse" leaves the text out; None does not look for secrets.
            quota: size limit of the memory. Facts learned after an untrusted text never evict others.

        Raises:
            SpecError: no such session, policy or model, or the policy asks a model and there is none. QuotaExceeded,
            StoreError: nothing of the current exchange was written; earlier ones are. MissingExtra: `secrets` without the
            extra.
        """
        job = LearningJob(self._store, session, policy, self.user, secrets, quota)
        return run(job.learn(), make_answerer(self._store, model))

    def search(
        self, query: str, tokens: int = 1000, limit: int | None = 20, *, at: float | None = None, abstain: bool = False
    ) -> Findings:
        """Return facts of this memory that match; see `Store.search`, which also finds the facts of all users.

        Raises:
            StoreError.
        """
        store, time = self._store, self.collection.clock() if at is None else at
        search = Searcher(self.collection.backend, store.ranking, store.vectors, [self.collection.info])
        hits = search.findings(query, tokens, time, self.collection.counter, limit=limit, at=at, abstain=abstain)
        self.collection.ledger.record(Act.SEARCH, [parse_address(hit.address)[0] for hit in hits], cause="fault")
        return hits

    def recall(self, address: str) -> Recalled:
        """Return the exact text at an address, also of retired facts.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        return self.collection.recall(address)

    def pages(self, at: float | None = None, *, proposed: bool = False, history: bool = False) -> Iterator[tuple[Page, State]]:
        """Yield facts with their states; see `Collection.pages`."""
        return self.collection.pages(at, proposed=proposed, history=history)

    def history(self, address: str) -> list[Version]:
        """Return the versions of a fact, oldest first; see `Collection.history`."""
        return self.collection.history(address)

    def pin(self, address: str) -> None:
        """Protect facts from quotas and sweeps."""
        self.collection.pin(address)

    def unpin(self, address: str) -> None:
        """Take a pin back."""
        self.collection.unpin(address)

    def accept(self, address: str, why: str = "") -> list[str]:
        """Put proposed facts in force; see `Collection.accept`."""
        return self.collection.accept(address, why)

    def undo(self, address: str, why: str = "") -> list[str]:
        """Undo the last change of facts; see `Collection.undo`."""
        return self.collection.undo(address, why)

    def forget(self, address: str, why: str = "") -> list[str]:
        """Forget facts, and all that was made from them; see `Segment.forget`."""
        return self.collection.forget(address, why)
