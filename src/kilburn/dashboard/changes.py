"""Changes by hand in the dashboard, which a person sends as forms.

A link changes nothing. A form is accepted only from a page of this dashboard: the browser names the page's origin, and the form
returns the random token that the page contains. The changes are those of the command line and the gateway.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
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
from kilburn.errors import KernelError, KilburnError, SpecError
from kilburn.kernel.receipts import newest_moves
from kilburn.kernel.session import Session, retried
from kilburn.memory.user_memory import UserMemory
from kilburn.move import Retire
from kilburn.opening import Store
from kilburn.page import Place
from kilburn.prices import PRICES

T = TypeVar("T")

MAX_FORM_BYTES = 64 << 10
MAX_FORM_FIELDS = 40

FORM_TIMEOUT = 20.0
"""Seconds in which a browser has to send a form."""

DECIDER_RECEIPTS = 20
"""Newest receipts that are searched for the policy that decided last."""


class Hands(Protocol):
    """Makes changes by hand. A change is durable when the call returns; after an error, nothing changed."""

    def session(self, name: str, do: Callable[[Session], T]) -> T:
        """Change a session.

        Raises:
            KilburnError: there is no such session that may be changed, or the change is impossible.
        """
        ...

    def memory(self, owner: str, do: Callable[[UserMemory], T]) -> T:
        """Change the memory of a user."""
        ...


class Visit(NamedTuple):
    """A person who uses the dashboard.

    Args:
        word: the token that a form has to return.
        hands: makes the changes; None for a person who may only read.
        name: the visitor's name; "" if nobody signs in.
    """

    word: str = ""
    hands: Hands | None = None
    name: str = ""


class OwnHands:
    """Changes a store by its path. The store is opened for each change.

    Args:
        path: the store's file or URL. tenant: the tenant in it.
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

        return self._change(change)

    def memory(self, owner: str, do: Callable[[UserMemory], T]) -> T:
        """See `Hands`."""

        def change(backend: Backend) -> T:
            store = Store(backend, Budget(by_hand.WIDE_WINDOW), "fifo")
            if not any(info.info.kind is SegmentKind.MEMORY and info.info.user == owner for info in store.collections()):
                raise SpecError(f"there is no memory of {owner[:80]!r}", advice="see the list of users")
            return do(store.memory(owner))

        return self._change(change)

    def _change(self, change: Callable[[Backend], T]) -> T:
        with closing(open_backend(self._path, tenant=self._tenant)) as backend:
            return retried(lambda: change(backend))


def fresh_word() -> str:
    """Return the token of a new visit, which its forms return."""
    return secrets.token_urlsafe(32)


Form = Mapping[str, str]
"""The fields of a form."""


def _undo(hands: Hands, form: Form) -> None:
    expected = form.get("event", "")

    def undo(session: Session) -> None:
        newest, *_ = newest_moves(list(session.ledger.events()))
        if newest is not None and str(newest.events[1]) != expected:
            raise KernelError("something else has happened since this page was shown", advice="look at the receipts again")
        by_hand.undo(session)

    hands.session(form.get("name", ""), undo)


def _compact(hands: Hands, form: Form) -> None:
    pages, keep = _compaction_range(form)
    compaction = hands.session(form.get("name", ""), lambda session: compact(session, None, keep=keep, pages=pages))
    if compaction.outcome is not Outcome.DONE:
        raise KernelError(f"nothing changed: {compaction.why or compaction.outcome}", advice="choose a longer range")


def _compaction_range(form: Form) -> tuple[str | None, int]:
    """Return the pages to compact, and the number of newest messages that are not compacted.

    Raises:
        SpecError: the number is none.
    """
    keep = form.get("keep", "") or "2"
    messages = _number(keep)
    if not 0 < messages <= 100_000:
        raise SpecError(f"{keep!r} messages cannot stay", advice="give a whole number, 1 or more")
    return form.get("pages", "").strip() or None, messages


def _page_change(verb: str) -> Callable[[Hands, Form], None]:
    """Return the handler of a form that evicts, pins or unpins pages."""

    def handle(hands: Hands, form: Form) -> None:
        address, why = form.get("pages", ""), form.get("why", "")[:1_000]
        hands.session(form.get("name", ""), lambda session: by_hand.change(session, verb, address, why=why))

    return handle


def _accept(hands: Hands, form: Form) -> None:
    hands.memory(form.get("user", ""), lambda memory: memory.accept(form.get("pages", "")))


def _reject(hands: Hands, form: Form) -> None:
    def retire(memory: UserMemory) -> None:
        facts = memory.collection
        pages = facts.contents.resolve(form.get("pages", ""))
        if any(state.at is not Place.PROPOSED for _, state in map(facts.read, pages)):
            raise KernelError("the fact is not proposed any more", advice="look at the memory again")
        facts.apply(Retire(pages=tuple(pages), why="rejected by hand"))

    hands.memory(form.get("user", ""), retire)


VERBS: Mapping[str, tuple[Callable[[Hands, Form], None], str]] = {
    "undo": (_undo, "The compaction was undone: every page is where it was before."),
    "compact": (_compact, "Compacted. The newest receipt lists the evicted pages."),
    "evict": (_page_change("evict"), "Evicted. The text can be recalled by its address."),
    "pin": (_page_change("pin"), "Pinned: no policy evicts the page until it is unpinned."),
    "unpin": (_page_change("unpin"), "Unpinned: a policy can evict the page again."),
    "accept": (_accept, "Accepted: the fact is in force now."),
    "reject": (_reject, "Rejected. The fact stays readable as history."),
}
"""For each kind of form, its handler and the message that is shown after the change."""

RETURN_FIELDS = ("name", "address", "user", "from", "at")
"""Fields of a form that become the query of the screen that is shown after the change."""


def parse_form(body: bytes) -> dict[str, str]:
    """Parse the body of a form.

    Raises:
        SpecError: the body is not a form.
    """
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS, errors="strict"))
    except ValueError:
        raise SpecError("the request is not a form of the dashboard", advice="go back, and send it again") from None


def is_of_this_visit(form: Form, visit: Visit) -> bool:
    """Return whether a form contains the token of a visit."""
    return bool(visit.word) and hmac.compare_digest(form.get("word", "").encode("utf-8", "replace"), visit.word.encode())


def is_ours(headers: Mapping[bytes, list[bytes]], origins: frozenset[str] = frozenset()) -> bool:
    """Return whether a form was sent by a page of this dashboard, that is, from the origin to which it was sent.

    Args:
        headers: by name. origins: other origins of the dashboard, for a proxy that changes the Host header.
    """
    senders, hosts = headers.get(b"origin", []), headers.get(b"host", [])
    if len(senders) != 1 or len(hosts) != 1 or headers.get(b"sec-fetch-site", [b"same-origin"]) != [b"same-origin"]:
        return False
    origin = senders[0].decode("latin-1").lower()
    scheme, _, name = origin.partition("://")
    return origin in origins or (scheme in ("http", "https") and name == hosts[0].decode("latin-1").lower())


def carry_out(verb: str, form: Form, hands: Hands, screens: Mapping[str, Any]) -> str:
    """Make the change of a form, and return the path and query of the screen to show next.

    Raises:
        KilburnError: nothing changed.
    """
    if verb not in VERBS:
        raise SpecError("there is no such change", advice="go back to the screen")
    VERBS[verb][0](hands, form)
    back = form.get("back", "")
    query = {name: form[name] for name in RETURN_FIELDS if form.get(name) or (name == "user" and name in form)}
    return f"{back if back in screens else '/'}?{urlencode({**query, 'done': verb})}"


def result_message(query: Form) -> str:
    """Return the message that a screen shows after a change; "" if there was none."""
    return VERBS[query["done"]][1] if query.get("done", "") in VERBS else ""


def change_screen(reading: LedgerReader, session: Session, query: Form) -> dict[str, Any]:
    """Return what the screen of previews and changes shows."""
    receipts, _ = reading.receipts(session.number, session.ledger.head, DECIDER_RECEIPTS)
    context: dict[str, Any] = {
        "asked": query.get("show", ""),
        "tokens": query.get("tokens", ""),
        "turn": query.get("turn", ""),
        "until": query.get("until", ""),
        "pages": query.get("pages", ""),
        "keep": query.get("keep", "") or "2",
        "newest": None,
        "policy": by_hand.decider(receipts[::-1]),
        "window": session.ledger.figures.window or by_hand.DEFAULT_WINDOW,
        "preview": None,
        "difference": None,
        "trouble": None,
        "prices": PRICES["hosted"],
    }
    try:
        match context["asked"]:
            case "leaves":
                tokens = _number(context["tokens"] or "0")
                context["preview"] = by_hand.preview(reading.backend, session.name, tokens, policy=context["policy"]).preview
            case "compact":
                pages, keep = _compaction_range(query)
                copy = by_hand.opened(reading.backend, session.name, budget=reading.budget(session.name))
                context["preview"] = preview(copy, keep=keep, pages=pages)
            case "undo":
                copy = by_hand.opened(reading.backend, session.name, budget=reading.budget(session.name))
                context["newest"] = by_hand.undo(copy, dry=True)
            case "diff":
                until = _number(context["until"]) if context["until"] else None
                context["difference"] = session.ledger.difference(_number(context["turn"]), until)
    except KilburnError as error:
        context["trouble"] = error
    return context


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise SpecError(f"{text[:20]!r} is no number", advice="give a whole number, 0 or more")
    return int(text)
