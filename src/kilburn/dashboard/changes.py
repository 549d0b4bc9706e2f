"""Changes by hand in the dashboard: forms that a person sends, each with a word that only our own pages have.

Nothing is changed by following a link. A form is taken only from our own pages: the browser says where it comes from, and the
form brings back the word that the page was given. What is done is what the command line and the gateway do.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, urlencode

from kilburn.agents import by_hand
from kilburn.agents.compaction import compact, preview
from kilburn.backend import Backend, SegmentKind
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.dashboard.reading import LedgerReader
from kilburn.effect import Outcome
from kilburn.errors import KernelError, KilburnError, SpecError, StoreStale
from kilburn.kernel.receipts import newest_moves
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.user_memory import UserMemory
from kilburn.move import Retire
from kilburn.page import Place
from kilburn.prices import PRICES

T = TypeVar("T")

LARGEST = 64 << 10
"""Bytes of a form."""

SENDING = 20.0
"""Seconds for sending one."""

FIELDS = 40
"""Fields of a form."""

TRIES = 3
"""How often a change is tried, if others change the same thing at the same time."""

NEWEST = 20
"""Receipts that are looked through for who decided last."""


class Hands(Protocol):
    """Where changes by hand are made. Each is durable when it returns, or nothing of it is done."""

    def session(self, name: str, do: Callable[[Session], T]) -> T:
        """Do something to a session.

        Raises:
            KilburnError: there is none that may be changed, or it cannot be done.
        """
        ...

    def memory(self, owner: str, do: Callable[[UserMemory], T]) -> T:
        """Do something to the memory of a user."""
        ...


class Visit(NamedTuple):
    """Who looks.

    Args:
        word: what a form has to bring back.
        hands: where changes are made; None for who may only look.
        name: what the visitor is called; "" where nobody signs in.
    """

    word: str = ""
    hands: Hands | None = None
    name: str = ""


class OwnHands:
    """Changes a store that is a file: it is opened for each change.

    Args:
        path: the file. tenant: whose part of it.
    """

    def __init__(self, path: str | Path, tenant: str) -> None:
        self._path, self._tenant = path, tenant

    def session(self, name: str, do: Callable[[Session], T]) -> T:
        """See `Hands`."""

        def change(backend: Backend) -> T:
            session = by_hand.opened(backend, name)
            try:
                return do(session)
            finally:
                session.close()

        return self._tried(change)

    def memory(self, owner: str, do: Callable[[UserMemory], T]) -> T:
        """See `Hands`."""

        def change(backend: Backend) -> T:
            store = Store(backend, Budget(by_hand.WIDE_WINDOW), "fifo")
            if not any(one.info.kind is SegmentKind.MEMORY and one.info.user == owner for one in store.collections()):
                raise SpecError(f"there is no memory of {owner[:80]!r}", advice="see the list of users")
            return do(store.memory(owner))

        return self._tried(change)

    def _tried(self, change: Callable[[Backend], T]) -> T:
        with closing(open_backend(self._path, tenant=self._tenant)) as backend:
            for _ in range(TRIES):
                with suppress(StoreStale):
                    return change(backend)
            return change(backend)


def fresh_word() -> str:
    """What the forms of one visit bring back."""
    return secrets.token_urlsafe(32)


# What a form asks for


def _undone(hands: Hands, given: Mapping[str, str]) -> None:
    expected = given.get("event", "")

    def undo(session: Session) -> None:
        newest, *_ = newest_moves(list(session.ledger.events()))
        if newest is not None and str(newest.events[1]) != expected:
            raise KernelError("something else has happened since this page was shown", advice="look at the receipts again")
        by_hand.undo(session)

    hands.session(given.get("name", ""), undo)


def _compacted(hands: Hands, given: Mapping[str, str]) -> None:
    pages, keep = _range_of(given)
    done = hands.session(given.get("name", ""), lambda session: compact(session, None, keep=keep, pages=pages))
    if done.outcome is not Outcome.DONE:
        raise KernelError(f"nothing changed: {done.why or done.outcome}", advice="choose a longer range")


def _range_of(given: Mapping[str, str]) -> tuple[str | None, int]:
    """The pages of a compaction, and how many newest messages stay.

    Raises:
        SpecError: no number.
    """
    keep = given.get("keep", "") or "2"
    messages = _number(keep)
    if not 0 < messages <= 100_000:
        raise SpecError(f"{keep!r} messages cannot stay", advice="give a whole number, 1 or more")
    return given.get("pages", "").strip() or None, messages


def _evicted(hands: Hands, given: Mapping[str, str]) -> None:
    why = given.get("why", "")[:1_000]
    hands.session(given.get("name", ""), lambda session: session.edits.evict(given.get("pages", ""), why))


def _kept(hands: Hands, given: Mapping[str, str]) -> None:
    hands.session(given.get("name", ""), lambda session: by_hand.keep(session, given.get("pages", "")))


def _let_move(hands: Hands, given: Mapping[str, str]) -> None:
    hands.session(given.get("name", ""), lambda session: session.unpin(given.get("pages", "")))


def _accepted(hands: Hands, given: Mapping[str, str]) -> None:
    hands.memory(given.get("user", ""), lambda memory: memory.accept(given.get("pages", "")))


def _rejected(hands: Hands, given: Mapping[str, str]) -> None:
    def retire(memory: UserMemory) -> None:
        facts = memory.collection
        pages = facts.contents.resolve(given.get("pages", ""))
        if any(state.at is not Place.PROPOSED for _, state in map(facts.read, pages)):
            raise KernelError("it does not wait any more", advice="look at the memory again")
        facts.apply(Retire(pages=tuple(pages), why="rejected by hand"))

    hands.memory(given.get("user", ""), retire)


VERBS: Mapping[str, tuple[Callable[[Hands, Mapping[str, str]], None], str]] = {
    "undo": (_undone, "Taken back: every page is where it was before."),
    "compact": (_compacted, "Compacted. The newest receipt says what left."),
    "evict": (_evicted, "Let go. Its text stays under its address."),
    "pin": (_kept, "Kept: no policy takes it out until it is unpinned."),
    "unpin": (_let_move, "It may leave again."),
    "accept": (_accepted, "Accepted: it is in force now."),
    "reject": (_rejected, "Rejected. It stays readable as history."),
}
"""Each verb: what does it, and what is said afterwards."""

BACK = ("name", "address", "user", "from", "at")
"""What the way back to a screen may have of a form's fields."""


def form_of(body: bytes) -> dict[str, str]:
    """The fields of a form.

    Raises:
        SpecError: it is none.
    """
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=FIELDS, errors="strict"))
    except ValueError:
        raise SpecError("this is no form of ours", advice="go back, and send it again") from None


def is_of_this_visit(given: Mapping[str, str], visit: Visit) -> bool:
    """Whether a form brings back the word of a visit."""
    return bool(visit.word) and hmac.compare_digest(given.get("word", "").encode("utf-8", "replace"), visit.word.encode())


def is_ours(headers: Mapping[bytes, list[bytes]], origins: frozenset[str] = frozenset()) -> bool:
    """Whether a browser says that a form is of our own pages: of the very name and port that it sends it to.

    Args:
        headers: by name. origins: others that are ours, behind a proxy that gives the request another name.
    """
    said, hosts = headers.get(b"origin", []), headers.get(b"host", [])
    if len(said) != 1 or len(hosts) != 1 or headers.get(b"sec-fetch-site", [b"same-origin"]) != [b"same-origin"]:
        return False
    origin = said[0].decode("latin-1").lower()
    scheme, _, name = origin.partition("://")
    return origin in origins or (scheme in ("http", "https") and name == hosts[0].decode("latin-1").lower())


def done(verb: str, given: Mapping[str, str], hands: Hands, screens: Mapping[str, Any]) -> str:
    """Do what a form asks for; returns where to go then, below the dashboard.

    Raises:
        KilburnError: nothing changed.
    """
    if verb not in VERBS:
        raise SpecError("there is no such change", advice="go back to the screen")
    VERBS[verb][0](hands, given)
    back = given.get("back", "")
    kept = {name: given[name] for name in BACK if given.get(name) or (name == "user" and name in given)}
    return f"{back if back in screens else '/'}?{urlencode({**kept, 'done': verb})}"


def said_of(query: Mapping[str, str]) -> str:
    """What is said above a screen after a change."""
    return VERBS[query["done"]][1] if query.get("done", "") in VERBS else ""


# What is shown before a change


def ahead(reading: LedgerReader, session: Session, query: Mapping[str, str]) -> dict[str, Any]:
    """What the screen of previews and changes shows."""
    found, _ = reading.receipts(session.number, session.ledger.head, NEWEST)
    shown: dict[str, Any] = {
        "asked": query.get("show", ""),
        "tokens": query.get("tokens", ""),
        "turn": query.get("turn", ""),
        "until": query.get("until", ""),
        "pages": query.get("pages", ""),
        "keep": query.get("keep", "") or "2",
        "newest": None,
        "policy": by_hand.decider(found[::-1]),
        "window": session.ledger.figures.window or by_hand.DEFAULT_WINDOW,
        "preview": None,
        "difference": None,
        "trouble": None,
        "prices": PRICES["hosted"],
    }
    try:
        match shown["asked"]:
            case "leaves":
                tokens = _number(shown["tokens"] or "0")
                shown["preview"] = by_hand.preview(reading.backend, session.name, tokens, policy=shown["policy"]).preview
            case "compact":
                pages, keep = _range_of(query)
                looked = by_hand.opened(reading.backend, session.name, budget=reading.budget(session.name))
                shown["preview"] = preview(looked, keep=keep, pages=pages)
            case "undo":
                looked = by_hand.opened(reading.backend, session.name, budget=reading.budget(session.name))
                shown["newest"] = by_hand.undo(looked, dry=True)
            case "diff":
                until = _number(shown["until"]) if shown["until"] else None
                shown["difference"] = session.ledger.difference(_number(shown["turn"]), until)
    except KilburnError as error:
        shown["trouble"] = error
    return shown


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise SpecError(f"{text[:20]!r} is no number", advice="give a whole number, 0 or more")
    return int(text)
