"""The past of an agent for code in a sandbox: its sessions, their pages, and search.

Each read is recorded with the pages that it read. So everything that the code makes of them is forgotten with them, and the run
can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kilburn.kernel.branches import BRANCH
from kilburn.kernel.checkpoint import figures_of
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.page import Page, Place, parse_address
from kilburn.recursion.recorded import Key
from kilburn.recursion.sub_calls import SubCalls


class Past:
    """The object `memory` of the code.

    Args:
        past: one session, or all sessions of a store.
        reader: the session of the run. It cannot cite pages of another store.
        own_run: name of that session, and first page of the run: later pages, and its branches, are not past.
        sub_calls: of the run: records the reads, and has the reads of a recorded run.
        readable: returns whether a session may be read. Other sessions are not found either.
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
        """Return passages that match a query, best first, of at most so many tokens together: session, address, text, origin."""
        past = self._past
        hits = past.search(query, tokens) if isinstance(past, Session) else past.search(query, tokens, where="sessions")
        hits = [hit for hit in hits if self._is_past(hit.session, parse_address(hit.address)[0])]
        rows = [{"session": hit.session, "address": hit.address, "text": hit.text, "origin": hit.origin} for hit in hits]
        cites = [(self._session(hit.session), parse_address(hit.address)[0]) for hit in hits]
        return self._told(f"memory.search({query!r}, {tokens})", rows, self._keys(cites))

    def pages(self, session: str = "", first: int = 1, last: int | None = None) -> list[dict[str, Any]]:
        """Return the pages of a session from one number to another, without forgotten ones.

        Args:
            session: its name; "" if there is only one.
            first, last: numbers of pages; None for no bound.
        """
        call = f"memory.pages({session!r}, {first}, {last})"
        opened = self._session(session)
        recorded = self._sub_calls.known(call)
        if recorded is not None:
            # The recorded read did not have later pages.
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
        """Return the pages that were read, each once, where they can be cited."""
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
    """Return whether another session is of the store of this one, so that its pages can be cited here."""
    info = session.backend.segment(second.name, time=0.0, create=False)
    return info is not None and (info.number, info.created) == (second.number, second.info.created)
