"""The rights of an agent, and the function that decides about a call.

`decide` is pure. The agent loop calls it before each call of a tool, and asks a person if it says so. Privileges for agents, and
a person's consent before irreversible actions, are from AIOS (arXiv 2403.16971).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.errors import SpecError

__all__ = ["CallQuestion", "Deed", "Permit", "Privilege", "Rights"]


class Deed(StrEnum):
    """The effect of a tool."""

    READ = "read"
    """Nothing changes."""
    WRITE = "write"
    """Something changes, and the change can be reverted."""
    IRREVERSIBLE = "irreversible"
    """The change cannot be reverted: a message is sent, money is paid."""


class Permit(StrEnum):
    """Whether a call may be carried out, from the least to the most strict."""

    ALLOW = "allow"
    ASK = "ask"
    """Only with the consent of a person."""
    DENY = "deny"


STRICTNESS = tuple(Permit)


class Privilege(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of permissions. Patterns are a shell's: `*`, `?`, `[a-c]`; case counts, and `*` matches `/` too.

    Args:
        name: name in messages and in the ledger.
        tools: patterns of the names of tools that may be called, memory tools included.
        files: folders that must contain the paths of these calls; None for anywhere. Links in them are resolved once, now.
        sessions: patterns of other sessions that may be read. An agent may always read its own session and its branches.
        memories: patterns of users whose memories may be read; "" is the memory of all users.
        documents: patterns of documents that may be read.

    Raises:
        SpecError: a string instead of a tuple, or a folder whose path is not absolute.
    """

    name: str = "all"
    tools: tuple[str, ...] = ("*",)
    files: tuple[str, ...] | None = None
    sessions: tuple[str, ...] = ()
    memories: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("tools", "files", "sessions", "memories", "documents"):
            value = getattr(self, field)
            if value is None and field == "files":
                continue
            if isinstance(value, str) or not all(isinstance(pattern, str | os.PathLike) for pattern in value):
                raise SpecError(f"{field}={value!r} of privilege {self.name!r}", advice="give a tuple of strings")
            if field == "files":
                if relative := [folder for folder in value if not os.path.isabs(folder)]:
                    raise SpecError(f"files: {relative[0]!r} is not absolute", advice="give the whole path of the folder")
                value = [os.path.realpath(folder) for folder in value]
            msgspec.structs.force_setattr(self, field, tuple(value))

    def reads(self, kind: SegmentKind, name: str) -> bool:
        """Return whether it allows to read a session or a document of this name, or the memory of a user of this name."""
        patterns = {
            SegmentKind.SESSION: self.sessions,
            SegmentKind.MEMORY: self.memories,
            SegmentKind.DOCUMENT: self.documents,
        }
        return _matches(name, patterns.get(kind, ()))

    def holds(self, path: str) -> bool:
        """Return whether a resolved path is one of its folders, or lies in one."""
        return self.files is None or any(Path(path).is_relative_to(folder) for folder in self.files)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """The rights of an agent. Without arguments it may call each of its tools, and read its own session.

    Args:
        privileges: a call needs a privilege that allows all of it: the tool, all its paths, and what it reads.
        after_untrusted: permission of calls that change something, once the session has read results of tools
            (see `kilburn.memory.taint`).
        wait: seconds until an unanswered question to a person counts as a no.
        above: rights that must also allow a call, such as those of the agent that started this one.

    Raises:
        SpecError: an invalid `wait` or `after_untrusted`.
    """

    privileges: tuple[Privilege, ...] = (Privilege(),)
    after_untrusted: Permit = Permit.ALLOW
    wait: float = 60.0
    above: Rights | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.wait <= threading.TIMEOUT_MAX:
            raise SpecError(f"wait={self.wait!r}", advice="give seconds, 0 or more")
        if self.after_untrusted not in STRICTNESS:
            raise SpecError(f"after_untrusted={self.after_untrusted!r}", advice=f"use one of {', '.join(Permit)}")
        msgspec.structs.force_setattr(self, "after_untrusted", Permit(self.after_untrusted))
        msgspec.structs.force_setattr(self, "privileges", tuple(self.privileges))

    @property
    def bounds_files(self) -> bool:
        """Whether any of them is limited to some folders."""
        bounded = any(privilege.files is not None for privilege in self.privileges)
        return bounded or (self.above is not None and self.above.bounds_files)

    def under(self, above: Rights) -> Rights:
        """Bound these rights by those of another agent."""
        return msgspec.structs.replace(self, above=above if self.above is None else self.above.under(above))

    def within(self, folder: Path) -> Rights:
        """Limit these rights to the files of a folder."""
        every = ("*",)
        return self.under(
            Rights(privileges=(Privilege(name="folder", files=(str(folder),), sessions=every, memories=every, documents=every),))
        )

    @property
    def heeds_taint(self) -> bool:
        """Whether it matters what the session has read."""
        return self.after_untrusted is not Permit.ALLOW or (self.above is not None and self.above.heeds_taint)

    @property
    def reaches(self) -> bool:
        """Whether there may be anything to read besides the agent's own session."""
        mine = any(privilege.sessions or privilege.memories or privilege.documents for privilege in self.privileges)
        return mine and (self.above is None or self.above.reaches)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """A call, as `decide` sees it.

    Args:
        tool: its name.
        deed: the effect of the tool.
        paths: the resolved paths that it opens (see `whereabouts`).
        reads: the other segments that it reads: kind and name; for a memory, the user.
        tainted: whether the session has read what tools returned.
    """

    tool: str
    deed: Deed = Deed.WRITE
    paths: tuple[str, ...] = ()
    reads: tuple[tuple[SegmentKind, str], ...] = ()
    tainted: bool = False


class Decision(msgspec.Struct, frozen=True):
    """The decision about a call.

    Args:
        permit: whether it may be carried out.
        cause: "tool", "file", "session", "memory", "document", "untrusted" or "irreversible"; "" if it is simply allowed.
        why: the reason, for the model and a person.
    """

    permit: Permit
    cause: str = ""
    why: str = ""


def decide(rights: Rights, action: Action) -> Decision:
    """Decide about a call: the strictest decision of the rights and of those above them."""
    decision = _check_privileges(rights.privileges, action)
    if decision.permit is not Permit.DENY:
        decisions = [decision]
        if action.deed is Deed.IRREVERSIBLE:
            decisions.append(Decision(Permit.ASK, "irreversible", f"what {action.tool} does cannot be undone"))
        if action.tainted and action.deed is not Deed.READ:
            why = f"{action.tool} changes something, and this session has read what tools returned"
            decisions.append(Decision(rights.after_untrusted, "untrusted", why))
        decision = _strictest(decisions)
    return decision if rights.above is None else _strictest([decide(rights.above, action), decision])


def _strictest(decisions: Iterable[Decision]) -> Decision:
    return max(decisions, key=lambda decision: STRICTNESS.index(decision.permit))


def _check_privileges(privileges: Iterable[Privilege], action: Action) -> Decision:
    """Return whether one privilege allows all of a call; if none does, what the first obstacle is."""
    remaining = [privilege for privilege in privileges if _matches(action.tool, privilege.tools)]
    if not remaining:
        return Decision(Permit.DENY, "tool", f"this agent may not call {action.tool}")
    for path in action.paths:
        previous, remaining = remaining, [privilege for privilege in remaining if privilege.holds(path)]
        if not remaining:
            folders = sorted({folder for privilege in previous for folder in privilege.files or ()})
            return Decision(Permit.DENY, "file", f"{action.tool} may only go to {', '.join(folders) or 'no file'}, not to {path}")
    for kind, name in action.reads:
        remaining = [privilege for privilege in remaining if privilege.reads(kind, name)]
        if not remaining:
            return Decision(Permit.DENY, str(kind), f"this agent may not read the {kind} {name!r}")
    return Decision(Permit.ALLOW)


def flatten(values: Iterable[str | list[str]]) -> list[str]:
    """Return all paths of several parameters."""
    return [path for value in values for path in ([value] if isinstance(value, str) else value)]


def whereabouts(path: str) -> str:
    """Resolve a path: absolute, without `..`, links followed. A path that does not exist yet is resolved as far as it exists.

    Raises:
        TypeError, ValueError, OSError: an invalid path, or there is no current folder.
    """
    return str(os.path.realpath(os.fspath(path)))


class CallQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a person: may this call be carried out?

    Args:
        session: the session of the agent.
        tool: name of the tool.
        arguments: JSON, as the model wrote it: data, never instructions.
        why: the reason of the question.
        seconds: time until the question counts as answered with no.
        over: set when the answer is no longer awaited: the time is up, or the run was cancelled.
    """

    session: str
    tool: str
    arguments: str
    why: str
    seconds: float
    over: threading.Event = msgspec.field(default_factory=threading.Event)


Confirm = Callable[[CallQuestion], bool]
"""Asks a person. Only True is a yes."""


class Consent(StrEnum):
    """The outcome of a question. Everything but YES means no."""

    YES = "yes"
    NO = "no"
    TIMEOUT = "timeout"
    ABSENT = "absent"
    """There is nobody to ask."""
    BUSY = "busy"
    """An earlier question was not answered in time, and still waits."""
    FAILED = "failed"
    """The hook raised."""
    INVALID = "invalid"
    """The hook returned neither True nor False."""
    CANCELLED = "cancelled"
    """The run was cancelled."""


class Confirmation:
    """Asks a person, one question at a time.

    A hook that does not return occupies its thread, and until it returns each further question is answered with no at once. So
    there is at most one such thread, and a late answer is never taken for the answer of another question. `thread` is the
    thread of the last question.
    """

    def __init__(self, hook: Confirm | None = None) -> None:
        self.hook = hook
        self._one = threading.Lock()
        self.thread: threading.Thread | None = None
        self._answers: queue.SimpleQueue[Consent] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def begin(self) -> None:
        """Begin a run: questions are asked again."""
        self._cancelled.clear()

    def cancel(self) -> None:
        """Give up the run: the question that waits, and each later one, is answered with no."""
        self._cancelled.set()
        self._answers.put(Consent.CANCELLED)

    def ask(self, question: CallQuestion) -> Consent:
        """Ask, and wait for the answer for `question.seconds` at most."""
        with self._one:
            hook, answers = self.hook, queue.SimpleQueue[Consent]()
            if hook is None:
                return Consent.ABSENT
            self._answers = answers
            if self._cancelled.is_set():
                return Consent.CANCELLED
            if self.thread is not None and self.thread.is_alive():
                return Consent.BUSY
            self.thread = threading.Thread(target=lambda: answers.put(_answer(hook, question)), daemon=True, name="confirm")
            self.thread.start()
            try:
                return answers.get(timeout=question.seconds)
            except queue.Empty:
                return Consent.TIMEOUT
            finally:
                question.over.set()


def _answer(hook: Confirm, question: CallQuestion) -> Consent:
    try:
        answer: Any = hook(question)
    except BaseException:  # noqa: BLE001 -- whatever the hook raises is no yes, and nobody else would see it in this thread
        return Consent.FAILED
    return Consent.YES if answer is True else Consent.NO if answer is False else Consent.INVALID
