"""The record of a recursive model's run: the notes and pages in its session, and how they are read again.

A run can be replayed from its record without a model, or resumed where its record ends. The session has the root's replies and
the outputs of its cells; branches of it have the sub-calls and the runs below. Notes in the ledger record the rest: the question
and its limits, the costs, refused calls, and the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Unpack

import msgspec

from kilburn.agents.loop import Limits, RunResult
from kilburn.errors import Forgotten, SpecError, ToolError
from kilburn.event import Act, Data, Event
from kilburn.kernel.session import Session
from kilburn.message import Message, Role, Trust
from kilburn.page import Page, Place, digest_of
from kilburn.recursion.sandbox import Bounds

Key = tuple[int, int]
"""A page of another segment: the segment's number, and the page's id."""

MAX_PROMPT_CHARS = 100
"""Characters of a prompt that identify a failed sub-call."""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A failed sub-call, or the sub-calls of a cell that a limit refused.

    Args:
        prompt: beginning of the first prompt.
        why: the error, or the limit that was reached.
        count: number of sub-calls.
    """

    prompt: str
    why: str
    count: int = 1


class RefusedCalls(msgspec.Struct, kw_only=True):
    """Calls of one cell that were refused because a limit is reached.

    Args:
        code: page of the cell. limit: name of the limit. prompt: beginning of the first prompt. count: number of calls.
    """

    code: int
    limit: str
    prompt: str
    count: int = 0

    @property
    def missing(self) -> Missing:
        """What the result of the run says of them."""
        return Missing(prompt=self.prompt, why=limit_reason(self.limit), count=self.count)


class SubCallResult(NamedTuple):
    """The result of a sub-call.

    Args:
        reply: the text of the reply, None if there was none. why: the reason why there was none.
        page: the recorded page, which is not written again: of the reply, or of the prompt if there was none.
    """

    reply: str | None
    why: str
    page: Key | None = None


class Entry(NamedTuple):
    """A recorded sub-call: the page of the code that asked, the branch, the prompt, the reply if there was one, and the error."""

    code: int
    branch: Session
    prompt: Page
    reply: Page | None
    why: str


def note(session: Session, why: str, pages: Iterable[int] = (), /, **data: Unpack[Data]) -> None:
    """Record a note about a run in the ledger of its session; it is written with the next commit."""
    session.ledger.record(Act.NOTE, [*pages], policy="user", why=why, **data)


def note_data(event: Event) -> Data:
    """Return the data of a note; empty if the event is none."""
    return event.data if event.act is Act.NOTE else {}


def limit_reason(limit: str) -> str:
    """Return the reason of a call that was not made because a limit is reached."""
    return f"the limit of {limit} is reached"


def prompt_head(prompt: str) -> str:
    """Return the beginning of a prompt, in one line."""
    return " ".join(prompt.split())[:MAX_PROMPT_CHARS]


class RunRecord:
    """A run that is recorded in a session, to be replayed without a model, or to be resumed.

    Args:
        session: session of the run. If several questions were asked in it, the last one counts.
        goes_on: whether the run is resumed where its record ends. Failed calls of its last cell are then asked again.
        new_limits: limits that are different now. A run that a limit ended without an answer is resumed if the limit is higher.

    Attributes:
        question: the question.
        digest: digest of the text. past: whether the code could read the past.
        replies: the root's replies, in order. ends: the last page of each.
        outputs: the page of each cell's output, by the page of its code.
        depth: nesting depth of runs.
        limits, cell_bounds: limits of the run and of a cell. functions: names of the functions of the caller.
        spent: costs of all models together. resident: tokens of the root's largest prompt.
        ended: the ledger's data of the end; empty if the run was interrupted, or is resumed. more: whether a limit had ended it.

    Raises:
        SpecError: nothing was asked there, or the session continued with something else.
        Forgotten: a page of the run was forgotten.
    """

    spent: RunResult
    resident: int
    last: float
    ended: Data
    _refused: list[RefusedCalls]
    _answers_at: set[int]
    _branches: list[tuple[str, bool]]

    def __init__(self, session: Session, *, goes_on: bool = False, new_limits: Mapping[str, Any] | None = None) -> None:
        self.session, self.goes_on, self.number = session, goes_on, session.number
        self._lock = threading.Lock()
        question, began, earlier_seconds = self._read_ledger()
        self.first, self.digest, self.depth = int(question["asked"]), str(question["digest"]), int(question["depth"])
        self.began, self.past = int(question["began"]), bool(question["past"])
        self.limits = msgspec.convert(question["limits"], Limits)
        self.cell_bounds = msgspec.convert(question["bounds"], Bounds)
        self.functions: tuple[str, ...] = tuple(question["functions"])
        self.question = session.contents.text(self.first)
        if self.ended.get("page") and self.ended["page"] not in session.window.pages:
            self.ended = {}  # the answer was not written
        self.more = bool(goes_on and self._has_more(new_limits or {}))
        self.ended = {} if self.more else self.ended
        self._read_pages()
        self._read_branches()
        self.spent.seconds = earlier_seconds + max(0.0, self.last - began)
        # Refused calls of an interrupted cell are asked again.
        self._refused = [refusal for refusal in self._refused if not (goes_on and self.is_open(refusal.code))]
        self._left = [refusal.count for refusal in self._refused]

    def _read_ledger(self) -> tuple[Data, float, float]:
        """Read what was asked last and its outcome from the ledger. Return the question, when the last part of the run began, and
        the seconds of the earlier parts."""
        question: Data = {}
        began = earlier_seconds = 0.0
        for event in self.session.ledger.events():
            data = note_data(event)
            if "asked" in data:
                question, began, earlier_seconds = data, event.time, 0.0
                self.spent, self.resident, self.last, self.ended = RunResult(), 0, 0.0, {}
                self._refused, self._answers_at, self._branches = [], set(), []
            elif not question:
                continue
            elif "resumed" in data:
                began, earlier_seconds, self.ended = event.time, float(data["seconds"]), {}
            elif "branch" in data and "calls" in data:
                self._branches.append((data["branch"], bool(data["calls"])))
            elif "answered" in data:
                self.ended = data
                # An answer in prose is the reply itself.
                self._answers_at |= {int(data["page"])} if data["answered"] != "said" else set()
            elif "refused" in data:
                code, limit = event.pages[0], str(data["limit"])
                self._refused.append(RefusedCalls(code=code, limit=limit, prompt=str(data["prompt"]), count=int(data["refused"])))
            self._count(event)
        if not question:
            raise SpecError(f"nothing was asked in the session {self.session.name!r}", advice="see `kilburn ask --help`")
        return question, began, earlier_seconds

    def _count(self, event: Event) -> None:
        data = note_data(event)
        if "spent" in data:
            self._add(RunResult(calls=data["spent"], tokens=data["tokens"], money=data["money"]), event.time)
            self.resident = max(self.resident, data.get("resident", 0))
        elif event.act is Act.ADMIT:
            self.last = max(self.last, event.time)

    def _add(self, spent: RunResult, last: float) -> None:
        self.spent.add(spent.calls, spent.tokens, spent.money)
        self.last = max(self.last, last)

    def _has_more(self, new_limits: Mapping[str, Any]) -> bool:
        """Return whether the run ended at a limit, has no answer, and the limit is higher now."""
        limit = self.ended.get("limit")
        if not limit or limit not in new_limits or self.ended["answered"] not in ("unready", "nothing"):
            return False
        old_limit, new_limit = self.limits.most(limit), msgspec.structs.replace(self.limits, **new_limits).most(limit)
        return old_limit is not None and (new_limit is None or new_limit > old_limit)

    def _read_pages(self) -> None:
        """Read the root's replies and the outputs of its cells."""
        replies: dict[int, list[Page]] = {}
        self.outputs: dict[int, int] = {}
        previous: Page | None = None
        for page in self._originals(self.session, self.first):
            if page.role is Role.ASSISTANT and page.id not in self._answers_at:
                replies.setdefault(page.message, []).append(page)
            elif page.answers:
                self.outputs[page.answers] = page.id
            elif previous is not None and previous.message in replies and page.trust is Trust.TOOL:
                self.outputs[previous.id] = page.id
            elif self.goes_on and not self.ended and page.trust > Trust.AGENT:
                reason = f"the session {self.session.name!r} went on with something else"
                raise SpecError(reason, advice="ask again in a new session")
            previous = page
        part = self.session.contents.part
        self.replies = [Message(role=Role.ASSISTANT, parts=tuple(part(page)[0] for page in parts)) for parts in replies.values()]
        self.ends = [parts[-1].id for parts in replies.values()]
        self._latest = {page.id for parts in [*replies.values()][-1:] for page in parts}

    def is_open(self, code: int) -> bool:
        """Return whether the run was cut off in the cell of this page: it has no output."""
        return code in self._latest and code not in self.outputs

    def _read_branches(self) -> None:
        """Read the sub-calls, and the runs below this one."""
        entries: list[Entry] = []
        self._runs: dict[tuple[str, str], deque[RunRecord]] = {}
        self._below: list[RunRecord] = []
        for name, calls in self._branches:
            branch = self.session.branches.open(name)
            if calls:
                entries += self._read_entries(branch)
            elif any("asked" in note_data(event) for event in branch.ledger.events()):
                run = RunRecord(branch, goes_on=self.goes_on)
                self._runs.setdefault((run.question, run.digest), deque()).append(run)
                self._below.append(run)
                self._add(run.spent, run.last)
        # A resumed run asks the failed calls of an interrupted cell again.
        last_branch = {(entry.code, entry.prompt.digest): entry.branch for entry in entries}
        self._entries = [
            entry
            for entry in entries
            if entry.reply is not None
            or (last_branch[entry.code, entry.prompt.digest] is entry.branch and not self.is_open(entry.code))
        ]
        self._answers: dict[str, deque[Entry]] = {}
        for entry in self._entries:
            self._answers.setdefault(entry.prompt.digest, deque()).append(entry)

    def _read_entries(self, branch: Session) -> list[Entry]:
        why: dict[int, str] = {}
        for event in branch.ledger.events():
            self._count(event)
            if event.act is Act.NOTE and event.pages:
                why[event.pages[0]] = event.why
        pages = self._originals(branch, 1)
        # A prompt cites the code that asked; a reply has its prompt as its only source.
        replies = {page.sources[0]: page for page in pages if page.sources and not page.cites}
        entries = []
        for page in pages:
            if page.cites:
                code = max((cited for segment, cited in page.cites if segment == self.number), default=0)
                entries.append(Entry(code, branch, page, replies.get(page.id), why.get(page.id, "it failed")))
        return entries

    def _originals(self, session: Session, first: int) -> list[Page]:
        pages = [(page, state) for page, state in session.contents.pages() if page.id > first]
        for page, state in pages:
            if state.at is Place.DROPPED and not (self.goes_on and self.ended):
                raise Forgotten(f"{page.address} of {session.name!r} was forgotten", advice="ask again in a new session")
        return [page for page, _ in pages]

    def has(self, prompt: str, run: tuple[str, str] | None = None) -> bool:
        """Return whether the record has an unused result of this prompt, or of this run."""
        with self._lock:
            return bool(self._answers.get(digest_of(prompt)) if run is None else self._runs.get(run))

    def refusal(self, code: int) -> str:
        """Return the name of the limit that refused a further call in the cell of that page; "" if none did."""
        with self._lock:
            for at, refusal in enumerate(self._refused):
                if self._left[at] and (refusal.code == code or not self.goes_on):
                    self._left[at] -= 1
                    return refusal.limit
        return ""

    def answer(self, prompt: str) -> SubCallResult | None:
        """Return the result of this prompt in the record; None if it is not there and the run goes on."""
        with self._lock:
            entries = self._answers.get(digest_of(prompt))
            entry = entries.popleft() if entries else None
        if entry is None:
            return None if self.goes_on else SubCallResult(None, "it is not in the recorded run")
        page = (entry.branch.number, (entry.reply or entry.prompt).id) if self.goes_on else None
        if entry.reply is None:
            return SubCallResult(None, entry.why, page)
        return SubCallResult(entry.branch.contents.text(entry.reply.id), "", page)

    def run(self, question: str, digest: str) -> RunRecord | None:
        """Return the recorded run below this one that asked this question; None if there is none and the run goes on.

        Raises:
            ToolError: there is none.
        """
        with self._lock:
            runs = self._runs.get((question, digest))
            if not runs and not self.goes_on:
                raise ToolError("this run is not in the recorded one")
            return runs.popleft() if runs else None

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Sub-calls that gave nothing, those of runs below included."""
        failures: dict[str, Missing] = {}
        for _, branch, prompt, reply, why in self._entries:
            failures.pop(prompt.digest, None)
            if reply is None:
                failures[prompt.digest] = Missing(prompt=prompt_head(branch.contents.text(prompt.id)), why=why)
        refused = (refusal.missing for refusal in self._refused)
        return (*failures.values(), *refused, *(missing for run in self._below for missing in run.missing))


class Rerun:
    """The recorded part of a resumed run: the root's replies, and the outputs as the model saw them.

    Args:
        record: record of the resumed run; None for a new run, which has no recorded part.

    Attributes:
        left: the remaining replies, each with its last page.
        differing: the outputs that changed when their cells were run again.
    """

    def __init__(self, record: RunRecord | None) -> None:
        self.record = record if record is not None and record.goes_on else None
        self.left = deque(zip(self.record.replies, self.record.ends, strict=True) if self.record is not None else ())
        self.differing: list[str] = []
        self._said = {"differing": False, "more": False}

    def output(self, code: int) -> int | None:
        """Return the page of a cell's output, if it stands in the record."""
        return self.record.outputs.get(code) if self.record is not None else None

    def is_open(self, code: int) -> bool:
        """Return whether the run was cut off in the cell of this page."""
        return self.record is not None and self.record.is_open(code)

    def notices(self) -> Iterable[str]:
        """Yield notices for the model, each once, before its first reply that is not in the record."""
        if self.differing and not self._said["differing"]:
            self._said["differing"] = True
            addresses = ", ".join(self.differing)
            yield f"[The run was cut off, and its cells were run again. {addresses} came out otherwise: look at your variables.]"
        if self.record is not None and self.record.more and not self._said["more"]:
            self._said["more"] = True
            yield "[The limit is higher now. Go on.]"
