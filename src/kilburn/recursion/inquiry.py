"""The state of one question to a recursive model, from its beginning to its answer, and the result.

It writes the session of the run with the sources of each page, and checks that no other program writes there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kilburn.agents.loop import UNLIMITED, Account, Limits, RunEvent, in_branch, text_message
from kilburn.errors import KilburnError, NoValue, StoreStale
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.message import Message, Role, Trust
from kilburn.model import Reply
from kilburn.recursion.functions import shares_store
from kilburn.recursion.recorded import Key, Missing, Rerun, RunRecord, note, note_data
from kilburn.recursion.sandbox import Sandbox
from kilburn.recursion.sub_calls import SubCalls
from kilburn.wire.form import parse

EMPTY = {"content": None, "ready": False}
"""The initial value of the variable."""
EMPTY_CODE = '{"content": None, "ready": False}'
"""The same as code."""


class AnswerOutcome(StrEnum):
    """The outcome of a question."""

    ANSWERED = "answered"
    PARTIAL = "partial"
    """Answered, but some sub-calls failed: see `RecursiveResult.missing`."""
    FORCED = "forced"
    """The limit of steps was reached; the model answered when it was asked to."""
    PROSE = "said"
    """The model answered in prose instead of by the variable `answer`; its text is the content."""
    UNREADY = "unready"
    """A limit was reached. The content is that of `answer`, which was not marked as ready."""
    NOTHING = "nothing"
    """There is no answer."""


class RecursiveResult(msgspec.Struct, kw_only=True):
    """The result of a question.

    Args:
        outcome: the outcome of the question.
        content: the answer, a JSON value; None if there is none.
        limit: the limit that was reached: "steps" (of the root), "calls", "tokens", "seconds", "money"; or "".
        missing: failed sub-calls, including those of nested runs.
        differing: outputs that changed when a resumed run repeated their cells.
        address: address of the answer in the session; "" if there is none.
        steps: number of the root's replies.
        calls: number of answered sub-calls, including those of nested runs.
        tokens, money: costs of all models together.
        resident: tokens of the root's largest prompt, as reported by the provider or otherwise counted here.
        sandbox: name of the sandbox. lacks: protections and features that it lacks on this machine.
    """

    outcome: AnswerOutcome = AnswerOutcome.NOTHING
    content: Any = None
    limit: str = ""
    missing: tuple[Missing, ...] = ()
    differing: tuple[str, ...] = ()
    address: str = ""
    steps: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0
    resident: int = 0
    sandbox: str = ""
    lacks: tuple[str, ...] = ()


class SubCalled(msgspec.Struct, frozen=True):
    """Numbers of answered and of failed sub-calls so far."""

    done: int
    failed: int


class AnswerVariable:
    """The variable `answer` of a sandbox.

    Args:
        kind: the type that its content must have.

    Attributes:
        ready: whether the code marked the content as the answer.
        content: the answer, a JSON value, once it is ready.
    """

    def __init__(self, sandbox: Sandbox, kind: Any) -> None:
        self._sandbox, self._kind = sandbox, kind
        self.ready, self.content = False, None

    def current(self) -> Any:
        """Return the content, ready or not; None if there is none."""
        try:
            value = self._sandbox.get("answer")
        except KilburnError:
            return None  # the sandbox has ended, or code replaced the variable
        return value.get("content") if isinstance(value, dict) else None

    def check(self) -> str:
        """Check the variable after a cell. Return an error message for the model, or "". An invalid value is reset."""
        try:
            value = self._sandbox.get("answer")
        except NoValue as error:
            return self._again(f"answer could not be read, and is {EMPTY_CODE} again: {error.what}")
        if not isinstance(value, dict) or not EMPTY.keys() <= value.keys():
            return self._again(f'answer must be a dict with "content" and "ready"; it is {EMPTY_CODE} again')
        if value["ready"] is not True:
            return "" if value["ready"] is False else '[answer["ready"] must be True or False]'
        if value["content"] is None:
            return self._unready('answer["content"] is None: set it to the result, then answer["ready"] = True')
        try:
            self.content = msgspec.to_builtins(msgspec.convert(value["content"], self._kind))
        except msgspec.ValidationError as error:
            return self._unready(f'answer["content"] has the wrong type: {error}')
        self.ready = True
        return ""

    def _again(self, why: str) -> str:
        self._sandbox.run(f"answer = {EMPTY_CODE}")
        return f"[{why}]"

    def _unready(self, why: str) -> str:
        self._sandbox.run('answer["ready"] = False')
        return f"[{why}]"


Watch = Callable[[RunEvent | SubCalled], None]
"""Receives each event as it happens."""


class Inquiry:
    """One question, and the state of its run.

    Args:
        session: the session with the root's steps.
        limits: limits of the question. clock: monotonic seconds. outer: account of the run above.
        recorded: the recorded run that is replayed or resumed.
        watch: receives the events.

    Attributes:
        whole: costs of all models together. own: the root's steps.
        rerun: the recorded replies and outputs of a resumed run.
        last: sources of the next cell besides its code: the description of the text, then the last output. Each output has the
            one before it as a source, because variables persist.
        page: the root's last reply. began: first page of the run.
        before: code that is run before each cell.
        resident: tokens of the root's largest prompt.
        calls, missing: answered and failed sub-calls of the runs below.
        sub_calls, sandbox, answer: set when the run begins.
    """

    sub_calls: SubCalls
    sandbox: Sandbox
    answer: AnswerVariable

    def __init__(
        self,
        session: Session,
        limits: Limits,
        clock: Callable[[], float],
        outer: Account | None,
        *,
        recorded: RunRecord | None,
        watch: Watch | None,
    ) -> None:
        self.session, self.limits, self.recorded, self.watch = session, limits, recorded, watch
        self.whole = Account(msgspec.structs.replace(limits, steps=None), clock, outer)
        self.own = Account(msgspec.structs.replace(UNLIMITED, steps=limits.steps), clock, self.whole)
        self.rerun = Rerun(recorded)
        self.began = self.rerun.record.began if self.rerun.record is not None else session.window.last + 1
        self.last: tuple[int, ...] = ()
        self.page = self.resident = self.calls = 0
        self.before = ""
        self.missing: list[Missing] = []
        self._cited: list[Key] = []
        self._pinned: list[str] = []
        self._below = threading.Lock()
        self._showing = threading.RLock()

    # The beginning, and the end

    def begin(self, messages: Sequence[Any], system: str, description: str, **data: Any) -> None:
        """Append the question, and the description of the text for the model.

        Args:
            system: the system prompt; "" if the session has it. description: the description of the text for the model.
            data: further data of the run for its record.
        """
        session, source_run = self.session, self.recorded
        if source_run is not None and shares_store(session, source_run.session):
            # A replayed question has the record as its source, so it is forgotten with it.
            key = source_run.number, source_run.session.window.last
            messages = [
                msgspec.structs.replace(parsed, cites=(*parsed.cites, key), trust=Trust.TOOL)
                for message in messages
                for parsed in parse(message)
            ]
        if system:
            session.append({"role": "system", "content": system})
        session.append(*messages)
        first = session.window.last
        limits = msgspec.to_builtins(self.limits)
        limits["prices"] = {name: price for name, price in limits["prices"].items() if math.isfinite(price)}
        note(session, "asked", asked=first, began=self.began, limits=limits, **data)
        session.append(text_message(Role.USER, description, trust=Trust.TOOL, sources=(first,)))
        self._hold(first)

    def resume(self, run: RunRecord) -> None:
        """Resume a recorded run: from here on it belongs to this program."""
        with self.session.edits.batch() as kernel:
            # This fails if the session was changed since it was read.
            kernel.record(Act.NOTE, policy="user", why="resumed", resumed=run.first, seconds=run.spent.seconds)
        self.resident = run.resident
        self._hold(run.first)
        self._count_recorded()

    def _hold(self, first: int) -> None:
        """Pin the question and the description of the text where there is room."""
        session, pages = self.session, (first, first + 1)
        self.last = (first + 1,)
        self._seen = session.ledger.head
        if sum(map(session.window.cost, pages)) <= session.prompts.capacity // 4:
            for page in pages:
                session.pin(f"p{page}")
        self._pinned = [f"p{page}" for page in pages if page in session.window.pins]

    def unpin(self) -> None:
        """Unpin what the run kept in the window, because the question is answered."""
        for pinned in self._pinned:
            self.session.unpin(pinned)

    def next_recorded(self) -> Reply | None:
        """Return the root's next reply in the record; None where the record ends."""
        if not self.rerun.left:
            return None
        message, self.page = self.rerun.left.popleft()
        self._count_recorded()
        return Reply(message=message)

    def _count_recorded(self) -> None:
        """Count what the recorded part spent once its replies are used up, so that limits hold for both parts together."""
        record = self.rerun.record
        if record is not None and not self.rerun.left:
            self.whole.add_spent(record.spent)
            self.own.outcome.steps += len(record.replies)

    # The session

    def check(self) -> None:
        """Check that no other program resumed this run.

        Raises:
            StoreStale: another program resumed it.
        """
        session = self.session
        with session.lock:
            later = [*session.backend.events(session.number, self._seen)]
            self._seen += len(later)
            if any("resumed" in note_data(event) for event in later):
                raise taken_over_error(session)

    def append(self, message: Message) -> int:
        """Append a message of one part; its page."""
        self.check()
        self.session.append(message)
        return self.session.window.last

    def say(self, text: str) -> None:
        """Append a message of ours to the model, unless it is in the record."""
        if not self.rerun.left:
            self.append(text_message(Role.USER, text, trust=Trust.AGENT))

    def admit(self, message: Message, code: int) -> int:
        """Append the output of a cell and return its page. A recorded output stays as the model saw it."""
        recorded = self.rerun.output(code)
        if recorded is None:
            return self.append(message)
        page = self.session.window.pages[recorded]
        # Sources that the recorded cell did not have become sources of the next one.
        cites = set(page.cites)
        self._cited += [key for key in message.cites if key not in cites]
        if self.session.contents.text(recorded) != message.parts[0].text:
            self.rerun.differing.append(page.address)
        return recorded

    def take_cited(self) -> tuple[Key, ...]:
        """Return the pages elsewhere that a cell's output is from: sub-calls, what was read, and the ends of runs below."""
        cited, self._cited = (*self.sub_calls.take_written(), *dict.fromkeys(self._cited)), []
        return cited

    def write(self) -> None:
        """Write what was only recorded so far."""
        self.session.ledger.flush()

    def fork(self, prompt: str, *, system: str = "", calls: bool) -> Session:
        """Fork a branch for the sub-calls, or for a run below."""
        branch = self.session.fork(prompt, inherit="nothing", system=system)
        note(self.session, "branch", branch=branch.name.rpartition("/")[2], calls=calls)
        self.write()
        return branch

    def end_below(self, branch: Session, result: RecursiveResult) -> None:
        """Add the result of a run below; several may end at the same time."""
        with self._below:
            self._cited.append((branch.number, branch.window.last))
            self.missing += result.missing
            self.rerun.differing += [f"{branch.name.rpartition('/')[2]}/{address}" for address in result.differing]
            self.calls += result.calls

    # Events

    def show(self, event: RunEvent | SubCalled) -> None:
        """Pass an event to the watcher, one at a time."""
        if self.watch is not None:
            with self._showing:
                self.watch(event)

    def show_below(self, branch: str, event: RunEvent | SubCalled) -> None:
        """Pass an event of a run below to the watcher."""
        if not isinstance(event, SubCalled):
            self.show(in_branch(branch, event))


def taken_over_error(session: Session) -> StoreStale:
    """Return the error of a run that another program goes on with."""
    return StoreStale(
        f"another program went on with the run in {session.name!r}",
        advice="wait for its answer: `kilburn ask --resume` shows it then, and goes on with a run that was cut off",
    )
