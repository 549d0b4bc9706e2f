"""The levels of one tenant: a store, a budget, a policy, and the sessions that live there.

`kilburn.open` makes it. It finds the parts by name and connects them.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kilburn.arguments import checked
from kilburn.backend import Backend, SegmentInfo, SegmentKind, at_once, check_name
from kilburn.budget import Budget, Counter, repriced
from kilburn.collections.collection import Collection
from kilburn.errors import KilburnError, SpecError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale
from kilburn.event import Act
from kilburn.forgetting.closure import closure
from kilburn.forgetting.erasure import Erasure, erase, made_by, made_from, make_receipt, unreached
from kilburn.kernel.branches import BRANCH, branches_in
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.drive import aside
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.planning import Planner
from kilburn.kernel.resolve import resolve
from kilburn.kernel.segment import Segment
from kilburn.kernel.session import Session
from kilburn.page import parse_address
from kilburn.policy import Policy
from kilburn.retrieval import Meanings, Ranking
from kilburn.search.found import DamageWarning, Findings, Found
from kilburn.search.search import RANKING, Searcher, segment_kinds

if TYPE_CHECKING:
    from kilburn.memory.notes import Notes
    from kilburn.memory.user_memory import UserMemory
else:
    # `checked` reads the annotations, and these modules stand above.
    Notes = UserMemory = object

COLLECTIONS = (SegmentKind.MEMORY, SegmentKind.DOCUMENT, SegmentKind.NOTES)

MEMORY = "@memory"
"""The memory of all users of the tenant; that of one of them has a name below it."""

DOCUMENT = "@document"
"""Documents have names below this."""


NOTES = "@notes"
"""Notes of all users of the tenant; those of one of them, or of an agent, have a name below it."""


def _name_of_memory(user: str) -> str:
    return f"{MEMORY}/{user}" if user else MEMORY


@checked
class Store:
    """A one-level store for the agents of one tenant.

    Args:
        backend: an open backend; it serves exactly one tenant.
        budget: what each segment's window may hold.
        policy: a spec such as "hybrid" or "summarize(keep=4)", or an object with `plan`.
        tokenizer: "auto", a model's name, "chars/4", or a `Counter`.
        file_tokens: see `kilburn.open`.
        model: answers when a policy asks: a spec, a model, or None.
        clock: seconds since the epoch.
        ranking: puts what a search finds in order: a spec such as "blend" or "blend(near=0)", or an object with `rank`.
        vectors: finds by meaning; None for words alone.
        foreign: whether these specs may name classes from outside Kilburn; see `kilburn.open`.
    """

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        policy: Any = "hybrid",
        *,
        tokenizer: Any = "auto",
        file_tokens: int | None = None,
        model: Any = None,
        clock: Callable[[], float] = time.time,
        foreign: bool = True,
        ranking: Any = RANKING,
        vectors: Meanings | None = None,
    ) -> None:
        self.backend, self.budget, self.clock = backend, budget, clock
        self.policy_name = policy if isinstance(policy, str) else type(policy).__name__.lower()
        if self.policy_name in ("kernel", "user"):
            raise SpecError(
                f"a policy named {self.policy_name!r}",
                advice="the ledger has this name for moves that a policy may not make; rename it",
            )
        self.ranking: Ranking = resolve("search.rankings", ranking, foreign=foreign)
        self.vectors = vectors
        self.policy: Policy = resolve("policies", policy, foreign=foreign)
        self.model = None if model is None or model == "none" else resolve("models", model, foreign=foreign)
        self._counts_by_request = tokenizer == "auto" and self.model is None
        if tokenizer == "auto" and self.model is not None:
            tokenizer = self.model.tokenizer
        self._file_tokens = file_tokens
        self.counter = self._priced(capabilities.counters.counter_for(tokenizer))
        # What a model's chat template adds to every prompt, besides its messages.
        self.budget = Budget(budget.window, budget.reserve, budget.overhead + int(getattr(self.counter, "overhead", 0)))
        self._sessions: dict[str, Session] = {}
        self._collections: dict[str, Collection] = {}
        # Names of notes that no agent may change, by their owner: see `Notes.protect`.
        self._readonly: dict[str, set[str]] = {}
        # Sessions that finish a forgetting that broke off.
        self._finishing: set[str] = set()
        # Names of sessions as they were last seen, by number.
        self._names: dict[int, str] = {}
        self._lock = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        """The figures that are in memory. Nothing is read."""
        figures = f"window={self.budget.window}, policy={self.policy_name!r}, {len(self._sessions)} sessions open"
        return f"<Store on {self.backend!r}: {'closed' if self._closed else figures}>"

    @property
    def tenant(self) -> str:
        """The tenant that this store serves."""
        return self.backend.tenant

    def session(self, name: str, user: str = "") -> Session:
        """The session of that name: created for this user of the tenant, or reopened where it was left.

        Args:
            user: whose it is; "" for nobody in particular, and where it exists already.

        Raises:
            SpecError: not a valid name: see `kilburn.backend.check_name`; or that of a collection, or another user's.
            StoreReadOnly: it does not exist, and the store was opened for reading.
        """
        with self._lock:
            check_name(name, "session")
            session = self._sessions.get(name)
            # One that has not begun is known to nobody else, and another program may have begun it.
            opens = session is None or session._kernel.stale or not session.number
            if session is None or opens:
                session = self._sessions[name] = self._open(self._info(name, SegmentKind.SESSION, user))
            _check_user(session.info, user)
        return self._finished(session) if opens else session

    def _finished(self, opened: Session) -> Session:
        """A session that was just opened, when a forgetting that broke off there is finished."""
        name = opened.name
        with self._lock:
            if name in self._finishing or self.backend.readonly:
                return opened
            self._finishing.add(name)
        try:
            # Other segments are opened and locked for this, and this one is perhaps opened again.
            opened.branches.finish()
        finally:
            self._finishing.discard(name)
        with self._lock:
            session = self._sessions.get(name, opened)
            return session if session.number == opened.number else opened

    def release(self, name: str) -> None:
        """Keep a session in memory no longer: what waits is written, and `session` reads it again. Unknown names are ignored."""
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def memory(self, user: str = "") -> UserMemory:
        """Return the memory of a user of the tenant, created where there is none; "" for the one of all users. It remembers,
        learns, updates and forgets facts, searches them and recalls them by their addresses. Its pages and its ledger are in
        `UserMemory.collection`.

        Raises:
            SpecError: no name of a user. StoreReadOnly: it does not exist, and the store was opened for reading.
        """
        facts = self._collection(_name_of_memory(user), SegmentKind.MEMORY, user)
        return cast(UserMemory, capabilities.memories.make_memory(self, facts))

    def document(self, name: str, user: str = "") -> Collection:
        """The document of that name: a collection of its passages, created where there is none.

        Raises:
            SpecError: no name of a document, or another user's. StoreReadOnly: it does not exist, and the store was opened
                for reading.
        """
        return self._collection(f"{DOCUMENT}/{check_name(name, 'document')}", SegmentKind.DOCUMENT, user)

    def notes(self, owner: str = "") -> Notes:
        """The notes of a user of the tenant, or of an agent, by their names; "" for those of all users. The first that is
        written begins them.

        Raises:
            SpecError: no name of a user.
        """
        return cast(Notes, capabilities.memories.make_notes(self, check_name(owner, "user") if owner else ""))

    def _collection(self, name: str, kind: SegmentKind, user: str) -> Collection:
        if user:
            check_name(user, "user")
        with self._lock:
            return self._collect(self._info(check_name(name, str(kind)), kind, user))

    def collections(self) -> list[Collection]:
        """All memories, documents and notes of this tenant, oldest first; none of their pages is read. Damaged ones are left out,
        with a warning."""
        collections = []
        for info in self.backend.segments():
            if info.kind in COLLECTIONS and not info.damaged:
                with self._lock:
                    collections.append(self._collect(info))
            elif info.damaged and info.kind is not SegmentKind.SESSION:
                warnings.warn(f"left out: {info.name} is damaged: {info.damaged}", DamageWarning, stacklevel=2)
        return collections

    def _info(self, name: str, kind: SegmentKind, user: str) -> SegmentInfo:
        """The session of that name and kind, created where there is none."""
        info = self.backend.segment(name, time=0.0, create=False)
        if info is None and self.backend.readonly:
            raise StoreReadOnly(f"no {kind} {name!r} here, and this store was opened for reading", advice="see kilburn ps")
        if info is None:
            if kind is SegmentKind.SESSION:
                _check_new(name)
            info = self.backend.segment(name, time=self.clock(), kind=kind, user=user)
        if info is None or info.kind is not kind:
            raise SpecError(f"{name!r} is no {kind}", advice="give another name")
        _check_user(info, user)
        return info

    def _collect(self, info: SegmentInfo) -> Collection:
        """The collection of this row: the one that is open, unless that was forgotten and another has its name now."""
        collection = self._collections.get(info.name)
        if collection is None or collection.number != info.number:
            collection = self._collections[info.name] = Collection(self, info, self.counter, self.clock)
        return collection

    def segment(self, number: int) -> Segment:
        """The session, memory or document of that number.

        Raises:
            StoreCorrupt: there is none. StoreStale: it was forgotten just now.
        """
        name = self._names.get(number, "")
        info = self.backend.segment(name, time=0.0, create=False) if name else None
        if info is None or info.number != number:
            infos = {info.number: info for info in self.backend.segments()}
            self._names = {info.number: info.name for info in infos.values() if not info.damaged}
            if number not in infos:
                raise StoreCorrupt(f"there is no segment {number}", advice="run `kilburn fsck`")
            info = infos[number]
        # Never by its name alone: it may have been forgotten by now, and another may have its name, or none.
        with self._lock:
            if info.kind is not SegmentKind.SESSION:
                return self._collect(info)
            opened = self._sessions.get(info.name)
            if opened is not None and opened.number > number:
                raise StoreStale(f"segment {number} was forgotten, and another has its name", advice="do it again")
            opens = opened is None or opened._kernel.stale or opened.number != number
            if opened is None or opens:
                opened = self._sessions[info.name] = self._open(info)
        return self._finished(opened) if opens else opened

    def counter_of(self, model: str) -> Counter | None:
        """The counter for a model that a request names; None if the store was opened with a tokenizer or a model of its own, or
        if the name is of no known family."""
        counter = capabilities.counters.counter_of_model(model) if self._counts_by_request else None
        return None if counter is None else self._priced(counter)

    def _priced(self, counter: Counter) -> Counter:
        return counter if self._file_tokens is None else repriced(counter, file_tokens=self._file_tokens)

    def _open(self, info: SegmentInfo, *, new: bool = False) -> Session:
        # A session goes on with the counter of the last model that it was for.
        counter = self.counter_of(counter_of(self.backend, info.number)) if info.number and self._counts_by_request else None
        kernel = Kernel(self.backend, info, counter or self.counter, self.budget, self.clock, self.ranking, self.vectors)
        answer = capabilities.answers.answerer(self.model)
        planner = Planner(kernel, self.policy, self.policy_name, answer if self.model is not None else None)
        session = Session(self, kernel, planner, answer)
        if not self.backend.readonly and not new:
            session.branches.catch_up()
            try:
                planner.reopen()
            except StoreStale:
                # Another program went on with it while it was read.
                session.ledger.refresh()
        return session

    def _begin(self, name: str, user: str, write: Callable[[Session], None]) -> Session | None:
        """A new session, which exists when `write` has written into it; None if the name is taken by then."""
        if self.backend.segment(name, time=0.0, create=False) is not None:
            return None
        session = self._open(SegmentInfo(number=0, name=name, created=self.clock(), user=user), new=True)
        try:
            write(session)
        except StoreStale:
            # Another program may have taken the name meanwhile.
            if self.backend.segment(name, time=0.0, create=False) is None:
                raise
            return None
        with self._lock:
            opened = self._sessions.get(name)
            # Another thread may have opened it by now.
            if opened is None or opened._kernel.stale or opened.number != session.number:
                opened = self._sessions[name] = session
            return opened

    def _prepare(self, name: str, user: str) -> Session:
        with self._lock:
            opened = self._sessions.get(name)
            if not self.backend.readonly and (opened is None or not opened.number) and self._is_new(name):
                _check_new(name)
                session = self._open(SegmentInfo(number=0, name=name, created=self.clock(), user=user), new=True)
                session._kernel.note_counter()
                # One that was prepared before, and never began, is another one's, or was given up.
                self._sessions[name] = session
                return session
        return self.session(name, user)

    def _is_new(self, name: str) -> bool:
        """Whether it is a name for a session, and none has it."""
        try:
            check_name(name, "session")
        except SpecError:
            return False
        return self.backend.segment(name, time=0.0, create=False) is None

    def sessions(self) -> list[SegmentInfo]:
        """All sessions of this tenant, the oldest first. `damaged` of one says why it cannot be read. Collections are not
        sessions: see `collections`."""
        return [info for info in self.backend.segments() if info.kind is SegmentKind.SESSION]

    def search(
        self,
        query: str,
        tokens: int = 1000,
        limit: int | None = 20,
        *,
        where: str | Iterable[str] = "all",
        user: str | None = None,
        at: float | None = None,
        abstain: bool = False,
        without: Iterable[str] = (),
    ) -> Findings:
        """Passages of this tenant that match, best first, within a token budget. What is damaged is left out, with a warning.

        With `abstain` they are in reading order, but facts are best first; the turns that stand beside a hit are among them, and
        what was said twice is there once. Where nothing that was found is likely to answer, it abstains: the result is empty,
        and what was found is in its `withheld`.

        Args:
            limit: hits at most; None for as many as fit.
            where: "sessions", "facts", "documents", "notes", "all", or several of these.
            user: only what belongs to this user of the tenant, or to all users (""); None for everything.
            at: what was known and true at this time, in seconds since the epoch; None for now.
            abstain: whether nothing is better than something unlikely.
            without: names of segments that are left out, such as the session that runs.

        Raises:
            SpecError: no such place. StoreError.
        """
        moment = self.clock() if at is None else at
        with at_once(self.backend, ahead=True) if self.vectors is None else nullcontext():
            search = self._searching(where, user, set(without))
            hits = search.findings(query, tokens, moment, self.counter, limit=limit, at=at, abstain=abstain)
        self._record(user, hits)
        return hits

    async def asearch(
        self,
        query: str,
        tokens: int = 1000,
        limit: int | None = 20,
        *,
        where: str | Iterable[str] = "all",
        user: str | None = None,
        at: float | None = None,
        abstain: bool = False,
        without: Iterable[str] = (),
    ) -> Findings:
        """`search` for async callers, in a worker thread."""
        return await aside(
            partial(self.search, query, tokens, limit, where=where, user=user, at=at, abstain=abstain, without=without)
        )

    def _searching(self, where: str | Iterable[str], user: str | None, without: set[str]) -> Searcher:
        scope = self.backend.scope(segment_kinds(where), user)
        infos, everywhere = scope.infos, scope.everything
        for info in scope.damaged:
            if info.name not in without:
                warnings.warn(f"not searched: {info.name}: {info.damaged}", DamageWarning, stacklevel=3)
        for name in without:
            with suppress(StoreCorrupt):
                excluded = self.backend.segment(name, time=0.0, create=False)
                if excluded is not None and excluded.number in infos:
                    infos, everywhere = dict(infos), False
                    del infos[excluded.number]
        return Searcher(self.backend, self.ranking, self.vectors, infos, everywhere=everywhere)

    def _record(self, user: str | None, hits: Iterable[Found]) -> None:
        """Note the search and its results in the ledgers of the memories, so that a fact that is read does not decay."""
        if self.backend.readonly:
            return
        pages: dict[str, list[int]] = {} if user is None else {_name_of_memory(user): []}
        for hit in hits:
            if hit.session == MEMORY or hit.session.startswith(f"{MEMORY}/"):
                pages.setdefault(hit.session, []).append(parse_address(hit.address)[0])
        for name, numbers in pages.items():
            info = self.backend.segment(name, time=0.0, create=False)
            if info is not None and not info.damaged:
                with self._lock:
                    memory = self._collect(info)
                memory.ledger.record(Act.SEARCH, numbers, cause="fault")

    def forget(
        self,
        *,
        session: str | None = None,
        address: str | None = None,
        user: str | None = None,
        document: str | None = None,
        tool: str | None = None,
        source: str | None = None,
        why: str = "",
        dry: bool = False,
    ) -> Erasure:
        """Forget, for ever and in every place that Kilburn reaches, and say what went from where. Give a session, a user, a
        document, a tool or a source.

        Args:
            session: a session, with all that was made from it in any segment: folds, facts, passages.
            address: only these pages of the session (`p17`, `p17-p20`), or of a branch of it (`b1/p17`). The session may also
                be a collection (`@memory/ana`).
            user: a user's sessions, memory and documents, and all that was made from them.
            document: a document, and all that was made from it.
            tool: the results of a tool in all sessions, and all that was made from them.
            source: what collections hold that was made from a session or a document. It stays itself.
            why: a reason for the ledger; say nothing of the content.
            dry: only say what would go.

        Raises:
            SpecError: none of these, or more than one; nothing of that name (but a tool without results forgets nothing).
            UnknownAddress, Forgotten.
            StoreError: the disk fails, or others keep adding to it. Nothing dangles, and asking again goes on.
        """
        scopes = {"session": session, "user": user, "document": document, "tool": tool, "source": source}
        chosen = {name: value for name, value in scopes.items() if value is not None}
        if len(chosen) != 1 or (address is not None and session is None):
            raise SpecError("forget takes one of session, user, document, tool and source", advice="an address is of a session")
        roots, whole = self._to_forget(*chosen.popitem(), address)
        arguments = {name: value for name, value in (*scopes.items(), ("address", address)) if value is not None}
        return self.forget_pages(roots, whole, asked=arguments, why=why, dry=dry)

    def forget_pages(
        self,
        roots: Mapping[int, Iterable[int]],
        whole: Sequence[SegmentInfo] = (),
        *,
        asked: Mapping[str, str] | None = None,
        why: str = "",
        dry: bool = False,
    ) -> Erasure:
        """Forget pages of several segments and all that was made from them; see `forget`.

        Args:
            roots: number of a segment -> ids of its pages.
            whole: sessions that are forgotten with their names and ledgers.
            asked: what the receipt repeats.
        """
        going = sorted((info for info in whole if not info.damaged), key=_depth_of)
        everything = {number: list(pages) for number, pages in roots.items()}
        everything |= {info.number: [page.id for page, _ in self.backend.pages(info.number)] for info in going}
        receipt = Erasure(
            asked=dict(asked or {}),
            time=self.clock(),
            whole=tuple(info.name for info in going),
            left=tuple((info.name, info.damaged) for info in whole if info.damaged),
        )
        keys = closure(self, everything)
        receipt = make_receipt(self, keys, receipt)
        if not dry:
            if self.backend.readonly:
                raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to forget")
            erase(self, everything, keys, [info.number for info in going], why)
            # It is done: a server that is gone by now takes no receipt away.
            with suppress(StoreError):
                receipt = msgspec.structs.replace(receipt, unreached=unreached(self.backend))
            with self._lock:
                for info in going:
                    self._sessions.pop(info.name, None)
                    self._collections.pop(info.name, None)
        return receipt

    def _to_forget(self, scope: str, name: str, address: str | None) -> tuple[dict[int, list[int]], list[SegmentInfo]]:
        """The pages that are to be forgotten, by session, and the sessions that are to be forgotten as a whole."""
        infos = [info for info in self.backend.segments() if info.kind is not SegmentKind.FORGOTTEN]
        if scope == "tool":
            return made_by(self.backend, name), []
        if scope == "user" and name and (theirs := [info for info in infos if info.user == name]):
            return {}, theirs
        # A session may have the name of a user.
        names = {"session": (name,), "document": (f"{DOCUMENT}/{name}",), "source": (name, f"{DOCUMENT}/{name}")}.get(scope, ())
        target = next((info for info in infos if info.name in names), None)
        if target is None:
            raise SpecError(f"no {scope} {name!r} here", advice="see `kilburn ps`, `memories list` and `documents list`")
        if scope == "source":
            return made_from(self.backend, target), []
        if address is None:
            return {}, [*self._below(target), target]
        return self.segment(target.number).contents.forgettable(address), []

    def _below(self, info: SegmentInfo) -> list[SegmentInfo]:
        """The branches of a session, and those that are damaged, too."""
        below = {branch.number for branch, _ in branches_in(self.backend, info, {})}
        under = self.backend.segments(info.name)
        damaged = {branch.number for branch in under if branch.damaged and branch.name.startswith(f"{info.name}/{BRANCH}")}
        return [info for info in under if info.number in below | damaged]

    def close(self) -> None:
        """Write the waiting observations, and release the file; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for segment in (*self._sessions.values(), *self._collections.values()):
                segment.close()
        finally:
            if self.vectors is not None:
                self.vectors.close()
            self.backend.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except KilburnError:
            # An earlier error says more than the one that it caused here.
            if error is None:
                raise

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await aside(partial(self.__exit__, kind, error, trace))


def session_of(store: Store, name: str, user: str = "") -> Session:
    """`Store.session`, but a new one is in the store only once something was appended to it: both are one transaction. If another
    program has begun it by then, the append raises `StoreStale`.

    Raises:
        What `Store.session` raises.
    """
    return store._prepare(name, user)


def _check_new(name: str) -> None:
    """Check that a new session may have this name."""
    if name.partition("/")[0] in (MEMORY, DOCUMENT, NOTES):
        raise SpecError(f"{name!r} is the name of a collection", advice="give the session another name")


def _check_user(info: SegmentInfo, user: str) -> None:
    if user and info.user != user:
        raise SpecError(f"{info.name!r} does not belong to user {user!r}", advice="give another name, or leave the user out")


def _depth_of(info: SegmentInfo) -> int:
    """The order in which sessions go: branches before what they forked from."""
    return -info.name.count(f"/{BRANCH}")
