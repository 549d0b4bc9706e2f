"""Functions that the code of a recursive model can call, besides models: those of the caller, and reads of the agent's past.

The functions run in this program, with the agent's rights. Their results are recorded in the branch of the run, so a resumed run
does not call them again. Each read of the past is recorded with its pages. Therefore all results of the code are forgotten with
these pages, and the run can be replayed.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kilburn.agents.access import Deed
from kilburn.agents.loop import Agent
from kilburn.agents.tool import Tool
from kilburn.errors import AccessDenied, SpecError, ToolError
from kilburn.event import encodable
from kilburn.kernel.branches import BRANCH
from kilburn.kernel.checkpoint import figures_of
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Kind, Part
from kilburn.model import Tokens
from kilburn.page import Page, Place, parse_address
from kilburn.recursion.recorded import Key, SubCallResult
from kilburn.recursion.sub_calls import SubCalls

RESERVED_NAMES = frozenset(
    {"context", "answer", "_text", "_index", "Memory", "memory", "memory_search", "memory_sessions", "memory_pages"}
    | {"llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched"}
)
"""Names that have another meaning in the code."""

INSIDE = threading.local()
"""The agents whose code called the function that runs in this thread."""


class _Answer(msgspec.Struct):
    """The result of a function of the caller, or its error."""

    value: Any = None
    error: str = ""


class Functions:
    """The functions of one run.

    Args:
        tools: the functions, by name.
        agent: agent of the run. permitted: returns the values for a call that its rights allow.
        sub_calls: of the run: pays for the calls, and records the results.
    """

    def __init__(
        self, tools: Mapping[str, Tool], agent: Agent, permitted: Callable[[Tool, Part], dict[str, Any]], sub_calls: SubCalls
    ) -> None:
        self._agent, self._permitted, self._sub_calls = agent, permitted, sub_calls
        self.named = {name: self._callable(tool) for name, tool in tools.items()}

    def _callable(self, tool: Tool) -> Callable[..., Any]:
        signature = inspect.signature(tool.function)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{tool.name}: {error}") from None
            return self._called(tool, msgspec.json.encode(arguments).decode())

        return call

    def _called(self, tool: Tool, arguments: str) -> Any:
        """Call a function, or take its result from the record.

        Raises:
            ToolError: it raised, the arguments do not fit, the call is not allowed, or a limit is reached.
        """
        sub_calls, call = self._sub_calls, f"{tool.name}({arguments})"
        if refused := sub_calls.allow(call):
            raise ToolError(f"{tool.name} was not called: {refused}")
        result = sub_calls.known(call) or SubCallResult(self._carried_out(tool, arguments), "")
        if result.reply is None:
            raise ToolError(f"{tool.name}: {result.why}")
        sub_calls.note(call, "", (), result)
        if result.page is None and tool.deed is not Deed.READ:
            sub_calls.flush()
        answer = msgspec.json.decode(result.reply, type=_Answer)
        if answer.error:
            raise ToolError(answer.error)
        return answer.value

    def _carried_out(self, tool: Tool, arguments: str) -> str:
        """Call a function and return its result, or the error, as JSON."""
        try:
            values = self._permitted(tool, Part(kind=Kind.CALL, text=arguments, name=tool.name))
            self._sub_calls.pay(Tokens())
            outer_agents, INSIDE.agents = getattr(INSIDE, "agents", ()), _with_callers(self._agent)
            try:
                with self._sub_calls.account.working():
                    return f'{{"value":{tool.json(values)}}}'
            finally:
                INSIDE.agents = outer_agents
        except (AccessDenied, ToolError) as error:
            return msgspec.json.encode({"error": encodable(error.what)}).decode()


def _with_callers(agent: Agent) -> tuple[Agent, ...]:
    """Return an agent, and those that it works for."""
    return (agent, *(_with_callers(agent.caller) if agent.caller is not None else ()))


def is_called_by(agent: Agent) -> bool:
    """Return whether this thread is in a function that the code of this agent called, or of a run below it."""
    return agent in getattr(INSIDE, "agents", ())


def as_tools(functions: Mapping[str, Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return the functions that code may call, as tools of these names.

    Raises:
        SpecError: an invalid function or name.
    """
    if not isinstance(functions, Mapping):
        raise SpecError(f"functions={functions!r}"[:200], advice='give a dict: functions={"name": function}')
    tools = {}
    for name, function in functions.items():
        plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        if not plain or name in RESERVED_NAMES or hasattr(builtins, name):
            raise SpecError(f"a function cannot have the name {name!r}"[:200], advice="use another name: code needs this one")
        if not isinstance(function, Tool) and not callable(function):
            raise SpecError(f"{name} is no function"[:200], advice="give a typed Python function, or a Tool")
        tool = function if isinstance(function, Tool) else Tool(function, name=name)
        if tool.name != name:
            tool = Tool(tool.function, name=name, does=tool.deed, paths=tool.paths, clean=tool.clean)
        tools[name] = tool
    return tools


class Past:
    """The object `memory` of the code.

    Args:
        past: one session, or all sessions of a store.
        reader: the session of the run. It cannot cite pages of another store.
        own_run: name of that session, and first page of the run. This page, later pages and branches of the run are excluded.
        sub_calls: the run's calls: records the reads, and returns the reads of a recorded run.
        readable: returns whether a session may be read. Searches exclude all other sessions.
    """

    def __init__(
        self,
        past: Session | Store,
        reader: Session,
        own_run: tuple[str, int],
        sub_calls: SubCalls,
        readable: Callable[[str], bool],
    ) -> None:
        self._past, self._reader, self._own, self._sub_calls, self._readable = past, reader, own_run, sub_calls, readable

    def sessions(self) -> list[dict[str, Any]]:
        """Return the sessions, oldest first: name, pages, tokens."""
        if isinstance(self._past, Session):
            figures = [(self._past.name, self._past.ledger.figures)]
        else:
            infos = [info for info in self._past.sessions() if not info.damaged and self._is_past(info.name, 1)]
            figures = [(info.name, figures_of(self._past.backend, info)[0]) for info in infos]
        rows = [{"name": name, "pages": stats.pages, "tokens": stats.tokens_seen} for name, stats in figures]
        return self._told("memory.sessions()", rows, ())

    def search(self, query: str, tokens: int = 1000) -> list[dict[str, Any]]:
        """Return passages that match a query, best first, within a total of `tokens`: session, address, text, origin."""
        past = self._past
        hits = past.search(query, tokens) if isinstance(past, Session) else past.search(query, tokens, where="sessions")
        hits = [hit for hit in hits if self._is_past(hit.session, parse_address(hit.address)[0])]
        rows = [{"session": hit.session, "address": hit.address, "text": hit.text, "origin": hit.origin} for hit in hits]
        cites = [(self._session(hit.session), parse_address(hit.address)[0]) for hit in hits]
        return self._told(f"memory.search({query!r}, {tokens})", rows, self._keys(cites))

    def pages(self, session: str = "", first: int = 1, last: int | None = None) -> list[dict[str, Any]]:
        """Return the pages of a session in a range of numbers, except forgotten pages.

        Args:
            session: its name; "" if there is only one.
            first, last: numbers of pages; None for no bound.
        """
        call = f"memory.pages({session!r}, {first}, {last})"
        opened = self._session(session)
        recorded = self._sub_calls.known(call)
        if recorded is not None:
            # Exclude pages that did not exist at the recorded read.
            last = int(recorded.reply or 0)
        end = opened.window.last if last is None else last
        chosen = [page for page in _originals(opened) if first <= page.id <= end and self._is_past(opened.name, page.id)]
        opened.contents.fetch(chosen)
        self._sub_calls.note(call, str(end), self._keys((opened, page.id) for page in chosen), recorded)
        return [
            {
                "address": page.address,
                "role": str(page.role),
                "kind": str(page.kind),
                "tokens": page.tokens,
                "text": opened.contents.text(page.id),
            }
            for page in chosen
        ]

    def _keys(self, pages: Iterable[tuple[Session, int]]) -> tuple[Key, ...]:
        """Return the distinct pages of a read that can be cited."""
        keys: dict[Key, None] = {}
        is_citable: dict[str, bool] = {}
        for session, page in pages:
            if session.name not in is_citable:
                is_citable[session.name] = shares_store(self._reader, session)
            key = (session.contents.owner(page), page)
            if is_citable[session.name]:
                keys[key] = None
        return tuple(keys)

    def _is_past(self, session: str, page: int) -> bool:
        name, first = self._own
        return not session.startswith(f"{name}/{BRANCH}") and (abs(page) < first if session == name else self._readable(session))

    def _session(self, name: str) -> Session:
        if isinstance(self._past, Session):
            return self._past
        if not name and len(infos := self._past.sessions()) == 1:
            name = infos[0].name
        if not any(info.name == name and self._is_past(name, 0) for info in self._past.sessions()):
            # `Store.session` would create it.
            raise ValueError(f"there is no session {name!r} to read; see memory.sessions()")
        return self._past.session(name)

    def _told(self, call: str, rows: list[dict[str, Any]], cites: tuple[Key, ...]) -> list[dict[str, Any]]:
        recorded = self._sub_calls.known(call)
        if recorded is not None:
            rows = msgspec.json.decode(recorded.reply or "[]")
        self._sub_calls.note(call, msgspec.json.encode(rows).decode(), cites, recorded)
        return rows


def _originals(session: Session) -> list[Page]:
    return [page for page, state in session.contents.pages() if page.id > 0 and state.at is not Place.DROPPED]


def shares_store(session: Session, second: Session) -> bool:
    """Return whether a session belongs to the reader's store, so that its pages can be cited."""
    info = session.backend.segment(second.name, time=0.0, create=False)
    return info is not None and (info.number, info.created) == (second.number, second.info.created)
