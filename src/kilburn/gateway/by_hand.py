"""The verbs of a window over HTTP: what would leave, two prompts compared, a compaction taken back, pages kept and let go.

A session that is in memory is changed there, under its own lock: a request that is being answered goes on, and its next round
has the changed window, as the next request has. Another one is opened for this as the command line does it. Who may do what is
said by `sees` alone, and what a client may not see is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kilburn.agents import by_hand
from kilburn.agents.compaction import compact, preview
from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.errors import KilburnError, MissingExtra, SpecError, StoreStale
from kilburn.gateway.history import Histories
from kilburn.gateway.keys import Key
from kilburn.gateway.looking import LookingBackend
from kilburn.gateway.problems import Problem, problem_of
from kilburn.gateway.threads import in_thread
from kilburn.gateway.users import Shares, sees, shows, told
from kilburn.kernel.receipts import Preview
from kilburn.kernel.session import Session
from kilburn.memory.user_memory import UserMemory

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error

T = TypeVar("T")

TRIES = 5
"""How often a change is tried, if others change the same session at the same time."""


Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Address = Annotated[str, msgspec.Meta(max_length=100)]


class UndoRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `undo` takes: tokens that the prompt may take then; None for what the last one might take."""

    tokens: Tokens | None = None


class PagesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `evict`, `pin` and `unpin` take: the address of a page or of a range, and a reason for the ledger."""

    pages: Address
    why: Annotated[str, msgspec.Meta(max_length=1_000)] = ""


class RangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `compact` takes: the address of a range, or None for all that is old, and how many newest messages stay."""

    pages: Address | None = None
    keep: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2


class WindowsByHand:
    """The sessions and memories of a gateway, for people who look at them and change them by hand. Safe to use from several
    threads.

    Args:
        db: the store's file.
        opened: gives the sessions of a tenant.
        budget, policy: of a session that is not in memory.
    """

    def __init__(self, db: str, opened: Callable[[str], Histories], budget: Budget, policy: Any) -> None:
        self._db, self._opened, self._budget, self._policy = db, opened, budget, policy
        self._lock = threading.Lock()
        self._reading: dict[str, Backend] = {}

    def looking(self, key: Key, user: str = "") -> LookingBackend:
        """The store as this client may look at it."""
        return LookingBackend(self._backend(key.tenant), shows(key, user))

    def _backend(self, tenant: str) -> Backend:
        """A connection of its own, so that no request waits for who looks."""
        with self._lock:
            if tenant not in self._reading:
                whole = self._opened(tenant).store.backend
                alone = self._db != ":memory:"
                self._reading[tenant] = open_backend(self._db, tenant=tenant, readonly=True) if alone else whole
            return self._reading[tenant]

    def budget(self, key: Key, name: str) -> Budget | None:
        """What the window of a session may hold now, if it is in memory."""
        known = self._opened(key.tenant).served(name)
        return None if known is None else known.prompts.budget

    # What would be

    def previewed(self, key: Key, user: str, name: str, tokens: int = 0) -> Preview:
        """What would leave if a message of so many tokens came.

        Raises:
            Problem: no such session. KilburnError: see `Session.edits.preview`.
        """
        self._info(key, user, name)
        window = self._budget.window
        return by_hand.preview(self.looking(key, user), name, tokens, otherwise=window, policy=self._policy).preview

    def compared(self, key: Key, user: str, name: str, turn: int, until: int | None) -> Any:
        """How two prompts differ; see `Session.ledger.difference`.

        Raises:
            Problem: no such session. KilburnError.
        """
        self._info(key, user, name)
        return by_hand.opened(self.looking(key, user), name).ledger.difference(turn, until)

    def compaction(self, key: Key, user: str, name: str, pages: str | None, keep: int) -> Preview:
        """What `compact` would do.

        Raises:
            Problem: no such session. KilburnError: see `kilburn.agents.compaction.preview`.
        """
        self._info(key, user, name)
        found = by_hand.opened(self.looking(key, user), name, budget=self.budget(key, name))
        return preview(found, keep=keep, pages=pages)

    # What is changed

    def change(self, key: Key, user: str, name: str, do: Callable[[Session], T]) -> T:
        """Do something to a session, durably.

        Raises:
            Problem: no such session. KilburnError: nothing changed.
        """
        for _ in range(TRIES):
            with suppress(StoreStale):
                return self._changed(key, user, name, do)
        return self._changed(key, user, name, do)

    def _changed(self, key: Key, user: str, name: str, do: Callable[[Session], T]) -> T:
        info = self._info(key, user, name)
        histories = self._opened(key.tenant)
        backend = histories.store.backend
        served = histories.served(name)
        if served is not None and served.number == info.number:
            served.ledger.refresh()
            done = do(served)
        else:
            session = by_hand.opened(backend, name)
            try:
                done = do(session)
            finally:
                session.close()
        backend.sync(info.number)
        return done

    def memory(self, key: Key, owner: str, do: Callable[[UserMemory], T]) -> T:
        """Do something to a memory, durably.

        Raises:
            Problem: there is none that this client may change. KilburnError: nothing changed.
        """
        store = self._opened(key.tenant).store
        found = [one for one in store.collections() if one.info.kind is SegmentKind.MEMORY and one.info.user == owner]
        if not found or not sees(key, "")(owner):
            raise Problem(404, "memory_not_found", "there is no such memory that this key may change")
        done = do(store.memory(owner))
        store.backend.sync(found[0].number)
        return done

    def _info(self, key: Key, user: str, name: str) -> SegmentInfo:
        info = self.looking(key, user).segment(name, time=0.0, create=False) if name else None
        if info is None or info.kind is not SegmentKind.SESSION:
            raise Problem(404, "session_not_found", "there is no session of this name that this key may see")
        return info

    def close(self) -> None:
        """Release what was opened to look."""
        with self._lock:
            for backend in self._reading.values():
                if backend.readonly:
                    backend.close()
            self._reading.clear()


def undone(session: Session, asked: UndoRequest) -> dict[str, Any]:
    """Take the newest compaction back."""
    receipt = by_hand.undo(session, asked.tokens)
    return _said(session, "taken back", [*receipt.left, *receipt.back]) | {"policy": receipt.policy, "turn": receipt.turn}


def compacted(session: Session, asked: RangeRequest) -> dict[str, Any]:
    """Put the most telling lines in place of a range, or of what is old."""
    done = compact(session, None, keep=asked.keep, pages=asked.pages)
    return {"session": session.name, "use": session.prompts.use, **msgspec.to_builtins(done)}


def evicted(session: Session, asked: PagesRequest) -> dict[str, Any]:
    """Let pages go."""
    return _said(session, "let go", session.edits.evict(asked.pages, asked.why))


def kept(session: Session, asked: PagesRequest) -> dict[str, Any]:
    """Keep pages."""
    by_hand.keep(session, asked.pages)
    return _said(session, "kept", [asked.pages])


def let_move(session: Session, asked: PagesRequest) -> dict[str, Any]:
    """Let a policy take pages out again."""
    session.unpin(asked.pages)
    return _said(session, "may leave again", [asked.pages])


def _said(session: Session, done: str, pages: Iterable[str]) -> dict[str, Any]:
    return {"session": session.name, "done": done, "pages": list(pages), "use": session.prompts.use}


CHANGES: Mapping[str, tuple[type, Callable[[Session, Any], dict[str, Any]]]] = {
    "undo": (UndoRequest, undone),
    "compact": (RangeRequest, compacted),
    "evict": (PagesRequest, evicted),
    "pin": (PagesRequest, kept),
    "unpin": (PagesRequest, let_move),
}
"""Each verb that changes a session: what it takes, and what does it."""

LOOKS = ("preview", "diff")
"""The verbs that change nothing."""


def routes(windows: WindowsByHand, shares: Shares) -> list[Route]:
    """The routes, below `/sessions/NAME/`. A name may have slashes."""

    async def verb(request: Request) -> Response:
        name, _, asked = request.path_params["rest"].rpartition("/")
        method: Literal["GET", "POST"] = "GET" if asked in LOOKS else "POST"
        if asked not in CHANGES and asked not in LOOKS:
            raise Problem(404, "unknown_url", f"a session has {', '.join((*LOOKS, *CHANGES))}")
        if request.method != method:
            raise Problem(405, "method_not_allowed", f"{asked} takes {method}")
        key: Key = request.state.key
        try:
            user = told(request.headers, b"", key)
            async with shares.taken(key, user):
                if asked in LOOKS:
                    said = await in_thread(_looked, windows, key, user, name, asked, dict(request.query_params))
                else:
                    kind, do = CHANGES[asked]
                    given = _given(await request.body(), kind)
                    said = await in_thread(windows.change, key, user, name, lambda session: do(session, given))
        except KilburnError as error:
            raise problem_of(error) from error
        return Response(msgspec.json.encode(said), media_type="application/json")

    return [Route("/sessions/{rest:path}", verb, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]


def _looked(windows: WindowsByHand, key: Key, user: str, name: str, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
    if verb == "preview":
        tokens = _number(query, "tokens", 0)
        return {"session": name, "tokens": tokens, **msgspec.to_builtins(windows.previewed(key, user, name, tokens or 0))}
    turn, until = _number(query, "turn"), _number(query, "until")
    if turn is None:
        raise SpecError("diff without turn", advice="give the number of the last message of the earlier prompt: ?turn=3")
    found = windows.compared(key, user, name, turn, until)
    return {"session": name, "turn": turn, "until": until, **msgspec.to_builtins(found)}


def _number(query: Mapping[str, str], name: str, otherwise: int | None = None) -> int | None:
    given = query.get(name, "")
    if not given:
        return otherwise
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise SpecError(f"{name} is no number", advice="give a whole number, 0 or more")
    return int(given)


def _given(body: bytes, kind: type) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"the body does not fit: {error}", advice='send JSON such as {"pages": "p7"}') from None
