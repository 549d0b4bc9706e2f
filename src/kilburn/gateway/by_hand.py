"""Changes of a window by hand, over HTTP: previews, comparisons, undoing compactions, evicting, pinning and unpinning pages.

A session in memory is changed there, under its own lock: a running request continues, and its next round has the changed window.
Other sessions are opened as the command line opens them. `sees` decides which sessions a client may change; others do not exist
for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kilburn.agents import by_hand
from kilburn.agents.compaction import compact, preview
from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.errors import KilburnError, MissingExtra, SpecError
from kilburn.gateway.history import Histories
from kilburn.gateway.keys import Key
from kilburn.gateway.looking import LookingBackend
from kilburn.gateway.problems import Problem, to_problem
from kilburn.gateway.threads import in_thread
from kilburn.gateway.users import Shares, requested_user, sees, shows
from kilburn.kernel.receipts import Preview
from kilburn.kernel.session import Session, retried
from kilburn.memory.user_memory import UserMemory

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error

T = TypeVar("T")
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Address = Annotated[str, msgspec.Meta(max_length=100)]


class UndoRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `undo`: the maximum tokens of the prompt afterwards; None for the last prompt's bound."""

    tokens: Tokens | None = None


class PagesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `evict`, `pin` and `unpin`: the address of a page or range, and a reason for the ledger."""

    pages: Address
    why: Annotated[str, msgspec.Meta(max_length=1_000)] = ""


class RangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `compact`: the address of a range, or None for all old pages, and the number of newest messages that stay."""

    pages: Address | None = None
    keep: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2


class WindowsByHand:
    """Reads and changes a gateway's sessions and memories for people. Safe to use from several threads.

    Args:
        db: the store's file.
        opened: returns the sessions of a tenant.
        budget, policy: used for sessions that are not in memory.
    """

    def __init__(self, db: str, opened: Callable[[str], Histories], budget: Budget, policy: Any) -> None:
        self._db, self._opened, self._budget, self._policy = db, opened, budget, policy
        self._lock = threading.Lock()
        self._reading: dict[str, Backend] = {}

    def looking(self, key: Key, user: str = "") -> LookingBackend:
        """Return the store, limited to the segments that this client may read."""
        return LookingBackend(self._backend(key.tenant), shows(key, user))

    def _backend(self, tenant: str) -> Backend:
        """Return a separate connection, so that no request waits for readers."""
        with self._lock:
            if tenant not in self._reading:
                whole = self._opened(tenant).store.backend
                alone = self._db != ":memory:"
                self._reading[tenant] = open_backend(self._db, tenant=tenant, readonly=True) if alone else whole
            return self._reading[tenant]

    def budget(self, key: Key, name: str) -> Budget | None:
        """Return the present budget of a session's window, if the session is in memory."""
        session = self._opened(key.tenant).served(name)
        return None if session is None else session.prompts.budget

    # Reading

    def previewed(self, key: Key, user: str, name: str, tokens: int = 0) -> Preview:
        """Return which pages a message of so many tokens would evict.

        Raises:
            Problem: no such session. KilburnError: see `Session.edits.preview`.
        """
        self._info(key, user, name)
        window = self._budget.window
        return by_hand.preview(self.looking(key, user), name, tokens, otherwise=window, policy=self._policy).preview

    def compared(self, key: Key, user: str, name: str, turn: int, until: int | None) -> Any:
        """Return the differences between two prompts; see `Session.ledger.difference`.

        Raises:
            Problem: no such session. KilburnError.
        """
        self._info(key, user, name)
        return by_hand.opened(self.looking(key, user), name).ledger.difference(turn, until)

    def compaction(self, key: Key, user: str, name: str, pages: str | None, keep: int) -> Preview:
        """Return a preview of `compact`.

        Raises:
            Problem: no such session. KilburnError: see `kilburn.agents.compaction.preview`.
        """
        self._info(key, user, name)
        session = by_hand.opened(self.looking(key, user), name, budget=self.budget(key, name))
        return preview(session, keep=keep, pages=pages)

    # Changing

    def change(self, key: Key, user: str, name: str, do: Callable[[Session], T]) -> T:
        """Change a session durably.

        Raises:
            Problem: no such session. KilburnError: nothing was changed.
        """
        return retried(lambda: self._changed(key, user, name, do))

    def _changed(self, key: Key, user: str, name: str, do: Callable[[Session], T]) -> T:
        info = self._info(key, user, name)
        histories = self._opened(key.tenant)
        backend = histories.store.backend
        served = histories.served(name)
        if served is not None and served.number == info.number:
            served.ledger.refresh()
            result = do(served)
        else:
            session = by_hand.opened(backend, name)
            try:
                result = do(session)
            finally:
                session.close()
        backend.sync(info.number)
        return result

    def memory(self, key: Key, owner: str, do: Callable[[UserMemory], T]) -> T:
        """Change a memory durably.

        Raises:
            Problem: there is no such memory that this client may change. KilburnError: nothing was changed.
        """
        store = self._opened(key.tenant).store
        memories = [info for info in store.collections() if info.info.kind is SegmentKind.MEMORY and info.info.user == owner]
        if not memories or not sees(key, "")(owner):
            raise Problem(404, "memory_not_found", "there is no such memory that this key may change")
        result = do(store.memory(owner))
        store.backend.sync(memories[0].number)
        return result

    def _info(self, key: Key, user: str, name: str) -> SegmentInfo:
        info = self.looking(key, user).segment(name, time=0.0, create=False) if name else None
        if info is None or info.kind is not SegmentKind.SESSION:
            raise Problem(404, "session_not_found", "there is no session of this name that this key may see")
        return info

    def close(self) -> None:
        """Close the connections for reading."""
        with self._lock:
            for backend in self._reading.values():
                if backend.readonly:
                    backend.close()
            self._reading.clear()


def _page_change(verb: str) -> Callable[[Session, PagesRequest], dict[str, Any]]:
    """Return the function that evicts, pins or unpins pages."""
    return lambda session, req: by_hand.change(session, verb, req.pages, why=req.why).figures()


def undone(session: Session, req: UndoRequest) -> dict[str, Any]:
    """Undo the newest compaction."""
    change = by_hand.change(session, "undo", tokens=req.tokens)
    return change.figures() | ({"policy": change.receipt.policy, "turn": change.receipt.turn} if change.receipt else {})


def compacted(session: Session, req: RangeRequest) -> dict[str, Any]:
    """Replace a range, or all old pages, by their most informative lines."""
    compaction = compact(session, None, keep=req.keep, pages=req.pages)
    return {"session": session.name, "use": session.prompts.use, **msgspec.to_builtins(compaction)}


CHANGES: Mapping[str, tuple[type, Callable[[Session, Any], dict[str, Any]]]] = {
    "undo": (UndoRequest, undone),
    "compact": (RangeRequest, compacted),
    "evict": (PagesRequest, _page_change("evict")),
    "pin": (PagesRequest, _page_change("pin")),
    "unpin": (PagesRequest, _page_change("unpin")),
}
"""Type of the arguments, and the function, of each verb that changes a session."""

LOOKS = ("preview", "diff")
"""The verbs that change nothing."""


def routes(windows: WindowsByHand, shares: Shares) -> list[Route]:
    """Return the routes below `/sessions/NAME/`. A name may have slashes."""

    async def verb(request: Request) -> Response:
        name, _, action = request.path_params["rest"].rpartition("/")
        method: Literal["GET", "POST"] = "GET" if action in LOOKS else "POST"
        if action not in CHANGES and action not in LOOKS:
            raise Problem(404, "unknown_url", f"a session has {', '.join((*LOOKS, *CHANGES))}")
        if request.method != method:
            raise Problem(405, "method_not_allowed", f"{action} takes {method}")
        key: Key = request.state.key
        try:
            user = requested_user(request.headers, b"", key)
            async with shares.taken(key, user):
                if action in LOOKS:
                    reply = await in_thread(_looked, windows, key, user, name, action, dict(request.query_params))
                else:
                    kind, do = CHANGES[action]
                    arguments = _given(await request.body(), kind)
                    reply = await in_thread(windows.change, key, user, name, lambda session: do(session, arguments))
        except KilburnError as error:
            raise to_problem(error) from error
        return Response(msgspec.json.encode(reply), media_type="application/json")

    return [Route("/sessions/{rest:path}", verb, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]


def _looked(windows: WindowsByHand, key: Key, user: str, name: str, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
    if verb == "preview":
        tokens = _number(query, "tokens", 0)
        return {"session": name, "tokens": tokens, **msgspec.to_builtins(windows.previewed(key, user, name, tokens or 0))}
    turn, until = _number(query, "turn"), _number(query, "until")
    if turn is None:
        raise SpecError("diff without turn", advice="give the number of the last message of the earlier prompt: ?turn=3")
    difference = windows.compared(key, user, name, turn, until)
    return {"session": name, "turn": turn, "until": until, **msgspec.to_builtins(difference)}


def _number(query: Mapping[str, str], name: str, otherwise: int | None = None) -> int | None:
    text = query.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise SpecError(f"{name} is not a number", advice="give a whole number, 0 or more")
    return int(text)


def _given(body: bytes, kind: type) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"the body does not fit: {error}", advice='send JSON such as {"pages": "p7"}') from None
