"""Learning: the messages of a session become facts in a memory.

A memory policy plans for one exchange between user and assistant at a time. Its moves are written in one transaction with the
cursor, so no message is learned from twice or skipped, despite crashes and concurrent learners. A failure of the model is an
outcome in the memory's ledger: the exchange waits and is tried again at the next call. It never counts as "nothing to learn".
Each policy has its own cursor in each session.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, cast

import msgspec

from kilburn.answering import answerer
from kilburn.backend import Passage, SegmentInfo, SegmentKind, State
from kilburn.claims import is_speaker, topic
from kilburn.collections.collection import Collection
from kilburn.effect import Answer, Ask, Find, Hit, Later, Outcome
from kilburn.errors import (
    Forgotten,
    KernelError,
    ModelError,
    QuotaExceeded,
    SecretFound,
    SpecError,
    StoreCorrupt,
    StoreError,
    StoreStale,
    UnknownAddress,
)
from kilburn.event import Act, Data
from kilburn.kernel.consultation import Breaker
from kilburn.kernel.drive import run
from kilburn.kernel.plans import PlanCourse, moves_of
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.quota import Quota, make_room
from kilburn.memory.secrets import Secrets, screen
from kilburn.memory.taint import lowest_read
from kilburn.memory.view import SUMMARY, MemoryPolicy, MemoryView, Utterance
from kilburn.message import Kind, Role, Trust
from kilburn.move import Add, Retire
from kilburn.native import ending
from kilburn.page import Claim, Page, Place, address_of, span_of

__all__ = ["Learned"]

log = logging.getLogger("kilburn")

DEFAULT_MESSAGES = 2
"""Messages of an exchange, unless the policy sets `messages`."""

MAX_EARLIER_MESSAGES = 10
"""Messages before an exchange that a policy sees at most."""

MAX_ATTEMPTS = 5
"""How often learning starts over without progress because others changed the memory."""

FIRST_SCAN_EVENTS = 1_000
"""Events of the ledger in the first backward scan for a cursor; doubled for each further scan."""

MAX_CLOCK_SKEW = 86_400.0
"""Seconds by which clocks may differ: the scan for a cursor stops this long before the session was created."""

MAX_PASSAGES = 64
"""Passages that are searched for facts about a subject."""

OUT_OF_TOKENS = "too few tokens are left: the question takes"
"""The beginning of the reason of a question that was not asked because the tokens were spent."""

_BAD = (Outcome.FAILED, Outcome.EMPTY, Outcome.REFUSED, Outcome.REJECTED, Outcome.TRUNCATED, Outcome.ILLEGAL)


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call; all of it can be read at once (`store.memory(user).recall("f1")`).

    Args:
        memory: the name of the memory.
        stored: addresses of new facts that are in force.
        retired: addresses of superseded facts, and of facts that are no longer true.
        unchanged: number of statements that were known already.
        proposed: addresses of new pages that wait until a person accepts them, because untrusted text was read before.
        failed: addresses, in the session, of texts for which learning failed; the next call tries again.
        why: the last failure, or "".
        refused: addresses, in the session, of texts that were left out because they hold a secret.
    """

    memory: str
    stored: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    unchanged: int = 0
    proposed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    why: str = ""
    refused: tuple[str, ...] = ()


class Learning:
    """Learning from a session in a thread of its own, so that the agent goes on. Use it as a context manager, or close it.

    Closing abandons the current exchange and writes nothing more; the next call begins there.

    Args:
        policy: one policy, or several that learn one after the other.
        tokens: tokens of the questions and answers of each policy at most; None for no bound. With a bound, learning stops at
            the first failure of the model, and only one waiting exchange is tried, after the new ones.
    """

    def __init__(
        self,
        store: Store,
        session: str | Session,
        policy: Any = "plain",
        model: Any = None,
        user: str | None = None,
        *,
        tokens: int | None = None,
    ) -> None:
        self._stop, self._outcome = threading.Event(), Future[Learned]()
        jobs = [
            LearningJob(store, session, spec, user, stopped=self._is_stopped, tokens=tokens)
            for spec in (policy if isinstance(policy, list | tuple) else [policy])
        ]
        answer = make_answerer(store, model, self._is_stopped)
        self._ended = False
        self._thread = threading.Thread(target=self._work, args=(jobs, answer), name="kilburn-learn", daemon=True)
        self._thread.start()

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or ending()

    def _work(self, jobs: Sequence[LearningJob], answer: Callable[[Ask], Answer]) -> None:
        try:
            learned = _combine([run(job.learn(), answer) for job in jobs])
            self._ended = any(job.spent for job in jobs) and not self._is_stopped()
            self._outcome.set_result(learned)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._outcome.set_exception(error)
            if not self._stop.is_set():
                log.warning("learning in the background ended with %s", type(error).__name__)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool | None:
        """Whether nothing could be learned yet from something; None where it did not end by itself, or asked no model."""
        return bool(self._outcome.result().failed) if self.done and self._ended else None

    def result(self, timeout: float | None = None) -> Learned:
        """Wait for the end of learning, and return what was learned.

        Raises:
            TimeoutError: learning has not ended within so many seconds. Whatever `UserMemory.learn` raises.
        """
        self._thread.join(timeout)
        return self._outcome.result(0)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop, and wait so many seconds for the thread; return whether it has ended. A model call that is running is abandoned,
        and its answer is thrown away."""
        self._stop.set()
        self._thread.join(timeout)
        return self.done

    def __enter__(self) -> Learning:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _combine(learned: Sequence[Learned]) -> Learned:
    """Combine the results of several policies."""
    return Learned(
        memory=learned[0].memory,
        unchanged=sum(result.unchanged for result in learned),
        why=next((result.why for result in reversed(learned) if result.why), ""),
        **{
            name: tuple(dict.fromkeys(address for result in learned for address in getattr(result, name)))
            for name in ("stored", "retired", "proposed", "failed", "refused")
        },
    )


def make_answerer(
    store: Store, model: Any, stopped: Callable[[], bool] = lambda: False, *, required: bool = False
) -> Callable[[Ask], Answer]:
    """Return a function that answers the questions of a policy by a model, until it is stopped.

    Raises:
        SpecError: a model is required, and there is none.
    """
    chosen = store.model if model is None else resolve("models", model)
    if chosen is None and required:
        raise SpecError("a model has to be asked, and there is none", advice="give model=")
    return answerer(chosen, stopped)


class _Exchange(msgspec.Struct, frozen=True):
    """Texts to plan for together and the earlier ones, still without their words, and the cursor afterwards (0: unchanged)."""

    new: tuple[Utterance, ...]
    earlier: tuple[Utterance, ...]
    upto: int

    @property
    def span(self) -> tuple[int, int]:
        return self.new[0].page.id, self.new[-1].page.id


class _Progress(msgspec.Struct):
    """The progress of a policy in a session: the last page, and the exchanges that wait for another attempt (first and last
    page)."""

    upto: int = 0
    waiting: tuple[tuple[int, int], ...] = ()


class _Course(PlanCourse):
    moves: Sequence[Add | Retire] = ()
    broke: Outcome | None = None
    why: str = ""

    @property
    def failure(self) -> Outcome | None:
        """How it failed; None if it did not."""
        return self.broke if self.broke in _BAD else None


class _Bookmarks:
    """The progress of each policy in each session, read from the ledger of a memory: new events, and older ones backwards as
    far as needed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Progress] = {}
        # The events after `_low`, up to `_high`, were read.
        self._low = self._high = 0
        self._lock = threading.Lock()

    def of(self, memory: Collection, session: SegmentInfo, policy: str) -> _Progress:
        """Return how far a policy has learned from a session; from nothing, if the ledger does not say."""
        key, block = (session.number, policy), FIRST_SCAN_EVENTS
        with self._lock:
            head = memory.ledger.head
            if not self._high:
                self._low = self._high = head
            self._known |= _read_progress(memory, self._high, head)[0]
            self._high = max(self._high, head)
            while self._low and key not in self._known:
                low = max(0, self._low - block)
                noted, since = _read_progress(memory, low, self._low)
                self._known = noted | self._known
                self._low, block = low, 2 * block
                if since < session.created - MAX_CLOCK_SKEW:
                    break  # the session did not exist then
            return self._known.get(key, _Progress())


def _read_progress(memory: Collection, start: int, upto: int) -> tuple[dict[tuple[int, str], _Progress], float]:
    """Return the last progress of each policy and session in a stretch of the ledger, and the time of its first event."""
    progress: dict[tuple[int, str], _Progress] = {}
    since = math.inf
    for event in itertools.takewhile(lambda event: event.number <= upto, memory.backend.events(memory.number, start)):
        since = min(since, event.time)
        if event.act is Act.NOTE and "learned" in event.data:
            fields = {name: event.data.get(name) for name in _Progress.__struct_fields__}
            progress[event.data["learned"], event.policy] = msgspec.convert(fields, _Progress)
    return progress, since


_bookmarks: weakref.WeakKeyDictionary[Collection, _Bookmarks] = weakref.WeakKeyDictionary()


class LearningJob:
    """One call of `UserMemory.learn`, which documents the arguments.

    Args:
        user: owner of the memory; None for the user of the session.
        stopped: returns whether to stop.
        tokens: see `Learning`.
    """

    def __init__(
        self,
        store: Store,
        session: str | Session,
        policy: Any,
        user: str | None,
        secrets: Secrets = None,
        quota: Quota | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tokens: int | None = None,
    ) -> None:
        if isinstance(session, str) and session not in {info.name for info in store.sessions()}:
            raise SpecError(f"no session {session[:80]!r} to learn from", advice="see kilburn ps")
        self.session = session if isinstance(session, Session) else store.session(session)
        self.policy: MemoryPolicy = resolve("memory", policy)
        self.name = policy.partition("(")[0].strip() if isinstance(policy, str) else type(policy).__name__.lower()
        if self.name in ("kernel", "user"):
            raise SpecError(f"a policy named {self.name!r}", advice="the ledger has this name for a person's changes; rename it")
        if cursor := getattr(self.policy, "cursor", ""):
            self.name = f"{self.name} {cursor}"
        whose = self.session.info.user if user is None else user
        self.writes = getattr(self.policy, "writes", SegmentKind.MEMORY)
        keeper = store.notes(whose) if self.writes is SegmentKind.NOTES else store.memory(whose)
        self.memory = keeper.collection
        self.messages = max(1, int(getattr(self.policy, "messages", DEFAULT_MESSAGES)))
        self.number = self.session.number
        self.bookmarks = _bookmarks.setdefault(self.memory, _Bookmarks())
        self.clock, self.vectors = store.clock, store.vectors
        self.secrets, self.quota = secrets, quota
        self.stopped = stopped
        self.tokens, self.count, self.spent = tokens, store.counter.count, 0
        self.stored: list[str] = []
        self.retired: list[str] = []
        self.proposed: list[str] = []
        self.unchanged = 0
        self.failed: dict[tuple[int, int], str] = {}
        self.why = ""
        self.refused: dict[str, None] = {}

    def learn(self) -> Generator[Ask, Answer, Learned]:
        """Learn from all exchanges that are new or wait for another attempt; start over if others learn at the same time."""
        attempts = MAX_ATTEMPTS
        while True:
            progress = self._progress()
            try:
                yield from self._all(progress)
                break
            except (StoreStale, Forgotten, UnknownAddress):
                # The memory was changed, or a page was forgotten, since the view was made.
                attempts = attempts - 1 if self._progress() == progress else MAX_ATTEMPTS
                if not attempts:
                    raise
        return Learned(
            memory=self.memory.name,
            stored=tuple(self.stored),
            retired=tuple(self.retired),
            unchanged=self.unchanged,
            proposed=tuple(self.proposed),
            failed=tuple(self.failed.values()),
            why=self.why,
            refused=tuple(self.refused),
        )

    def waiting(self) -> tuple[int, bool]:
        """Return how many messages of the user the policy has not read yet, and whether one that it has not read was evicted."""
        progress, session = self._progress(), self.session
        with session.lock:
            session.ledger.refresh()
            new = [page for page in session.window.pages.originals() if _is_pending(page.id, progress) and page.kind is Kind.TEXT]
            texts = [page for page in new if page.role in (Role.USER, Role.ASSISTANT) and page.trust >= Trust.AGENT]
            evicted = any(session.window.at(page.id) in (Place.OUT, Place.FOLDED, Place.STUB) for page in texts)
            return len({page.message for page in texts if page.role is Role.USER and not page.is_blank}), evicted

    def _progress(self) -> _Progress:
        progress = self.bookmarks.of(self.memory, self.session.info, self.name)
        # Inherited messages of a fork are learned from in their own session.
        return (
            progress if progress.upto else msgspec.structs.replace(progress, upto=self.session.branches.origin().get("known", 0))
        )

    def _all(self, progress: _Progress) -> Generator[Ask, Answer, None]:
        exchanges, end = self._exchanges(progress)
        if self.tokens is not None:
            # Waiting exchanges are tried after new ones, one per call.
            retried = [exchange for exchange in exchanges if not exchange.upto]
            exchanges = [*(exchange for exchange in exchanges if exchange.upto), *retried[:1]]
            self.failed.update({exchange.span: span_of(*exchange.span) for exchange in retried})
        committed = progress
        breaker = Breaker()
        for place, exchange in enumerate(exchanges):
            if self.stopped():
                return
            head, spent = self.memory.ledger.head, self.spent
            try:
                view = self._view(exchange)
                course = (yield from self._plan(view)) if view.new else _Course()
            except StoreCorrupt as error:
                if self._is_overtaken(exchange, head):
                    raise StoreStale("something was forgotten while it was learned from", advice="learn again") from error
                raise
            if self.stopped() or (spent and OUT_OF_TOKENS in course.why):
                return  # the next call begins here
            if Outcome.NO_MODEL in course.asked and not course.moves and course.noted is not Outcome.DONE:
                raise SpecError(f"the policy {self.name!r} asks a model, and there is none", advice="give model=, or use plain")
            course = self._write(exchange, course, progress, head)
            progress = self._after(exchange, course, progress)
            if course.moves or course.answered or course.failure:
                committed = progress
            breaker.note(Outcome.FAILED if course.failure is Outcome.FAILED and course.answered else Outcome.DONE, place)
            if breaker.is_open(place) or (self.tokens is not None and course.failure):
                rest = exchanges[place + 1 :]
                self.failed.update({exchange.span: span_of(*exchange.span) for exchange in rest})
                break
        else:
            # An exchange that was forgotten meanwhile waits no longer.
            waiting = tuple(span for span in progress.waiting if span in self.failed)
            progress = msgspec.structs.replace(progress, upto=max(end, progress.upto), waiting=waiting)
        if progress != committed:
            self._commit((), progress, {}, Trust.USER, None)

    def _after(self, exchange: _Exchange, course: _Course, progress: _Progress) -> _Progress:
        first, last = exchange.span
        waiting = {(low, high) for low, high in progress.waiting if high < first or last < low}
        if course.failure:
            waiting.add(exchange.span)
            self.failed[exchange.span] = span_of(*exchange.span)
            self.why = f"{course.failure}: {course.why}" if course.why else str(course.failure)
        else:
            self.failed.pop(exchange.span, None)
        return msgspec.structs.replace(progress, waiting=tuple(sorted(waiting)), upto=max(progress.upto, exchange.upto))

    def _write(self, exchange: _Exchange, course: _Course, progress: _Progress, head: int) -> _Course:
        """Write the moves of a plan, or its failure, in one transaction with the cursor."""
        figures: dict[str, Any] = dict(course.figures)
        if course.answered:
            figures["asked"] = [str(outcome) for outcome in course.answered]
        taint = min(utterance.taint for utterance in exchange.new)
        try:
            moves = self._allowed(course.moves, exchange, figures)
            quota = None if self.writes is SegmentKind.NOTES else self.quota
            if quota is not None and taint < Trust.AGENT:
                quota = msgspec.structs.replace(quota, evict=False)
            course = msgspec.structs.replace(course, moves=make_room(quota, self.memory, moves, self.clock()))
            if course.moves or course.answered or course.failure:
                self._commit(course.moves, self._after(exchange, course, progress), figures, taint, head, course)
        except (StoreStale, QuotaExceeded):
            raise
        except KernelError as error:
            if isinstance(error, Forgotten | UnknownAddress) and self._is_overtaken(exchange, head):
                raise
            log.info("the plan of %s was refused: %s", self.name, error)
            course = msgspec.structs.replace(course, moves=(), broke=Outcome.ILLEGAL, why=type(error).__name__)
            self._commit((), self._after(exchange, course, progress), figures, taint, head, course)
        self.unchanged += course.figures.get("unchanged", 0)
        return course

    def _is_overtaken(self, exchange: _Exchange, head: int) -> bool:
        """Return whether others wrote into the memory, or a person forgot what was said, since the policy was asked."""
        self.session.ledger.refresh()
        pages = (utterance.page.id for utterance in (*exchange.earlier, *exchange.new))
        return self.memory.ledger.head != head or any(self.session.window.at(page) is Place.DROPPED for page in pages)

    def _commit(
        self,
        moves: Sequence[Add | Retire],
        progress: _Progress,
        figures: Mapping[str, Any],
        taint: Trust,
        head: int | None,
        course: _Course | None = None,
    ) -> None:
        outcome = (course.failure if course else None) or Outcome.DONE
        data: Data = {"upto": progress.upto, "waiting": progress.waiting, "learned": self.number, "outcome": outcome}
        if course is not None and course.failure and course.why:
            data["detail"] = course.why
        note = cast(Data, {**figures, **data})
        adds = [move for move in moves if isinstance(move, Add)]
        added = self.memory.apply(*moves, policy=self.name, cause="learn", tainted=taint < Trust.AGENT, seen=head, note=note)
        rows = [self.memory.read(self.memory.contents.resolve(address)[0]) for address in added]
        waits = {place for place, (_, state) in enumerate(rows) if state.at is Place.PROPOSED}
        for place, address in enumerate(added):
            (self.proposed if place in waits else self.stored).append(address)
        for move in moves:
            if isinstance(move, Retire) and taint >= Trust.AGENT and move.refers not in waits:
                self.retired += [address_of(page) for page in move.pages]
        assert len(added) == len(adds)

    # The view of a policy

    def _exchanges(self, progress: _Progress) -> tuple[list[_Exchange], int]:
        """Return the exchanges to learn from, in order, and the last page of the session."""
        session = self.session
        with session.lock:
            session.ledger.refresh()
            pages = session.window.pages.originals()
            excluded = {page.id for page in pages if session.window.at(page.id) in (Place.DROPPED, Place.RETIRED)}
            heard = list(_utterances(session.contents.owner, pages, excluded, lowest_read(session)))
            is_new = [_is_pending(utterance.page.id, progress) and not utterance.recalled for utterance in heard]
        groups: list[list[int]] = []
        for at, (utterance, wants) in enumerate(zip(heard, is_new, strict=True)):
            if wants and (not groups or not _belongs(utterance, [heard[n] for n in groups[-1]], progress, self.messages)):
                groups.append([])
            if wants:
                groups[-1].append(at)
        exchanges = []
        for group in groups:
            new = tuple(heard[at] for at in group)
            tainted = min(utterance.taint for utterance in new) < Trust.AGENT
            preceding = (heard[at] for at in range(group[0] - 1, -1, -1))
            fit = (utterance for utterance in preceding if not utterance.recalled and (tainted or utterance.taint >= Trust.AGENT))
            last = new[-1].page.id
            exchanges.append(
                _Exchange(new, tuple(itertools.islice(fit, MAX_EARLIER_MESSAGES))[::-1], last if last > progress.upto else 0)
            )
        return exchanges, pages[-1].id if pages else 0

    def _with_texts(self, heard: Sequence[Utterance]) -> tuple[Utterance, ...]:
        """Return utterances with their texts. Secrets are replaced by marks; a text with a secret that is to be refused is left
        out."""
        self.session.contents.fetch(utterance.page for utterance in heard)
        screened = []
        for utterance in heard:
            try:
                text, _ = screen(self.session.contents.text(utterance.page.id), self.secrets)
                screened.append(dataclasses.replace(utterance, text=text))
            except SecretFound as error:
                log.info("%s of session %s is not learned from: %s", utterance.address, self.session.name, error.what)
                self.refused[utterance.address] = None
        return tuple(screened)

    def _view(self, exchange: _Exchange) -> MemoryView:
        memory = self.memory
        summary = next((page.id for page, _ in self._about(f"session {self.session.name}", SUMMARY)), 0)
        return MemoryView(
            new=self._with_texts(exchange.new),
            earlier=self._with_texts(exchange.earlier),
            summary=memory.contents.text(summary) if summary else "",
            now=self.clock(),
            session=self.session.name,
            user=memory.info.user,
            page=lambda page: memory.read(page)[0],
            text=memory.contents.text,
            about=self._about,
            summary_page=summary,
            made_from=self._made_from,
            note=self._note,
        )

    def _note(self, name: str) -> Page | None:
        """Return the page in force of a note."""
        with self.memory.lock:
            self.memory.ledger.refresh()
            page = (self.memory.named() or {}).get(name)
        return None if page is None else self.memory.read(page)[0]

    def _made_from(self, pages: Sequence[int]) -> list[Page]:
        """Return the pages of the memory that are in force and were made from these pages."""
        memory = self.memory
        rows = memory.backend.read(key for key in memory.backend.citing(memory.number, pages) if key[0] == memory.number)
        return [page for page, state in rows.values() if state.at is Place.OUT]

    def _about(self, subject: str, relation: str, thing: str = "") -> list[tuple[Page, State]]:
        """Return what is in force about a subject; see `MemoryView.about`."""
        key = topic(Claim(subject=subject, relation=relation))
        # Half of a memory may be about its user, so that word would find too much.
        words = [relation, thing] if is_speaker(subject) and (relation or thing) else [subject, relation, thing]
        rows = []
        for page, state in self._found(" ".join(words), MAX_PASSAGES):
            page_key = topic(page.claim) if page.claim is not None else None
            if page_key is not None and (page_key == key or (not relation and page_key[:2] == key[:2])):
                rows.append((page, state))
        return sorted(rows, key=lambda row: (-row[0].time, row[0].id))

    def _found(self, query: str, limit: int) -> list[tuple[Page, State]]:
        """Return the pages of the memory that match a query and are in force, best first."""
        return self._in_force(self.memory.backend.words.search(query, segments=[self.memory.number], limit=limit))

    def _alike(self, query: str, limit: int) -> list[tuple[Page, State]]:
        """Return the pages in force whose vectors are nearest to a query, best first; none if there are no vectors."""
        if self.vectors is None or not limit:
            return []
        try:
            nearest = self.vectors.nearest(query, [self.memory.number], limit)
        except ModelError as error:
            log.warning("found by words alone: %s", error)
            return []
        return self._in_force(passage for passage, _ in nearest)

    def _in_force(self, passages: Iterable[Passage]) -> list[tuple[Page, State]]:
        """Return the pages of some passages that are in force, in their order."""
        keys = list(dict.fromkeys((passage.segment, passage.page) for passage in passages))
        rows = self.memory.backend.read(keys)
        return [rows[key] for key in keys if key in rows and rows[key][1].at is Place.OUT]

    # The effects of a policy

    def _plan(self, view: MemoryView) -> Generator[Ask, Answer, _Course]:
        """Ask the policy; whatever it raises or returns is an outcome."""
        course = _Course()
        course.moves = yield from moves_of(
            self.name,
            lambda: self.policy.plan(view),
            course,
            partial(self._ask, course=course),
            self._at_once,
            kinds=Add | Retire,
            # An error of the store during a search is no failure of the policy.
            passes=StoreError,
        )
        course.why = next((note.why[:300] for note in reversed(course.notes) if note.why), "")
        if course.raised:
            course.broke, course.why = Outcome.FAILED, f"the policy failed: {course.raised}"
        elif not course.moves:
            course.broke = course.noted
        return course

    def _ask(self, ask: Ask, course: _Course) -> Generator[Ask, Answer, Answer]:
        prompt_tokens = self.count(ask.prompt) + self.count(ask.system)
        if self.tokens is not None and self.spent + prompt_tokens + ask.max_tokens > self.tokens:
            course.asked.append(Outcome.FAILED)
            return Answer(
                outcome=Outcome.FAILED, detail=f"{OUT_OF_TOKENS} {prompt_tokens + ask.max_tokens:,}, {self.tokens:,} may be"
            )
        answer = yield ask
        self.spent += prompt_tokens + self.count(answer.text)
        course.asked.append(answer.outcome)
        if answer.outcome is not Outcome.NO_MODEL:
            detail = answer.detail[:300]
            self.memory.ledger.record(
                Act.ASK, policy=self.name, cause="learn", why=ask.purpose[:300], outcome=answer.outcome, detail=detail
            )
        return answer

    def _at_once(self, effect: Find | Later) -> Answer:
        if isinstance(effect, Later):
            raise SpecError("a memory policy yielded Later", advice="learning is in the background already: yield Ask")
        return self._find(effect)

    def _find(self, find: Find) -> Answer:
        memory, limit = self.memory, max(0, find.limit)
        rows = self._found(find.query, 4 * max(1, find.limit))[:limit]
        alike = self._alike(find.query, limit)
        # Up to half of the hits come from meaning: a paraphrase shares no word with the query.
        by_words = max(limit - len(alike), limit - limit // 2)
        rows = list({page.id: (page, state) for page, state in (*rows[:by_words], *alike, *rows[by_words:])}.values())[:limit]
        texts = memory.backend.contents.texts(page.digest for page, _ in rows)
        hits = tuple(
            Hit(page=page.id, span=(0, len(texts[page.digest])), text=texts[page.digest], score=1.0 / (1 + at))
            for at, (page, _) in enumerate(rows)
        )
        return Answer(outcome=Outcome.DONE if hits else Outcome.EMPTY, hits=hits)

    def _allowed(self, moves: Sequence[Add | Retire], exchange: _Exchange, figures: dict[str, Any]) -> Sequence[Add | Retire]:
        """Return the moves without retirements of pages that are trusted more than the speaker; their number is added to the
        figures."""
        # Whoever may edit a note edits it whole, and the note shows its trust.
        if self.writes is SegmentKind.NOTES or not any(isinstance(move, Retire) for move in moves):
            return moves
        trusts = {utterance.cite: utterance.page.trust for utterance in (*exchange.earlier, *exchange.new)}
        adds = [move for move in moves if isinstance(move, Add)]
        spoke = max(utterance.page.trust for utterance in exchange.new)
        allowed: list[Add | Retire] = []
        for move in moves:
            if isinstance(move, Retire):
                if move.refers is not None and 0 <= move.refers < len(adds):
                    authority = min((trusts.get(cite, Trust.TOOL) for cite in adds[move.refers].cites), default=Trust.USER)
                else:
                    authority = self.memory.read(move.by)[0].trust if move.by else spoke
                pages = tuple(page for page in move.pages if self.memory.read(page)[0].trust <= authority)
                if len(pages) < len(move.pages):
                    figures["spared"] = figures.get("spared", 0) + len(move.pages) - len(pages)
                if not pages:
                    continue
                allowed.append(msgspec.structs.replace(move, pages=pages))
            else:
                allowed.append(move)
        return tuple(allowed)


def _utterances(
    owner: Callable[[int], int], pages: Iterable[Page], excluded: set[int], lowest_trust: Mapping[int, Trust]
) -> Iterable[Utterance]:
    """Yield the texts of user and assistant, still without their words, each with the lowest trust read before it.

    Args:
        owner: maps a page to the number of the segment in which it was made.
        lowest_trust: the lowest trust of all that was read before each page.
    """
    recalled = False
    for page in pages:
        speaks = page.kind is Kind.TEXT and page.role is Role.USER and page.trust >= Trust.USER and not page.is_blank
        # A user speaks for themselves, but an assistant may repeat a planted text long after it was read.
        taint = page.trust if speaks else lowest_trust[page.id]
        recalled = bool(page.sources or page.cites) or (recalled and not speaks)
        is_text = page.kind is Kind.TEXT and page.role in (Role.USER, Role.ASSISTANT) and page.trust >= Trust.AGENT
        if is_text and not page.is_blank and page.id not in excluded:
            yield Utterance(owner(page.id), page, "", recalled, min(taint, Trust.USER))


def _is_pending(page: int, progress: _Progress) -> bool:
    return page > progress.upto or any(first <= page <= last for first, last in progress.waiting)


def _belongs(utterance: Utterance, group: Sequence[Utterance], progress: _Progress, max_messages: int) -> bool:
    """Return whether an utterance is part of the same exchange: at most so many messages, of the same taint. An exchange of two
    messages ends where the user speaks again."""
    messages = {member.page.message for member in group}
    goes_on = utterance.role is not Role.USER or group[-1].role is Role.USER or max_messages > DEFAULT_MESSAGES
    return (
        (utterance.page.message in messages or (len(messages) < max_messages and goes_on))
        and (utterance.taint < Trust.AGENT) == (group[0].taint < Trust.AGENT)
        and (utterance.page.id > progress.upto) == (group[0].page.id > progress.upto)
        and not any(first == utterance.page.id for first, _ in progress.waiting)
    )
