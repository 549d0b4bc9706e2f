"""Whose it is what a provider keeps: responses, their items, conversations.

A provider keeps them for the holder of its key, and that is the gateway: to it all users are one. So the gateway remembers who
got an id first, and nobody else may go on from it, read it or delete it. In the store are digests alone.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kilburn.event import Act
from kilburn.gateway.keys import Key
from kilburn.gateway.problems import Problem
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process

__all__ = ["Ids", "Kept", "is_kept"]

SESSION = "@responses"
"""The session whose ledger says it; no client can name it."""

LONGEST = 200
"""Characters of an id."""

_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,%d})"' % LONGEST)
"""An id in JSON. Inside of a text the quotes would have backslashes."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Kept:
    """Who owns an id, for all tenants of a gateway. Safe to use from several threads."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._lock = threading.RLock()
        self._owners: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._read = 0

    def check(self, path: str, body: bytes, key: Key) -> None:
        """Refuse a request that names what is another user's. What it goes on from and nobody has is this one's from now on.

        Args:
            path: of the request, from `/v1` on.

        Raises:
            Problem: something belongs to somebody else. StoreError: it cannot be said.
        """
        # What stands in a path may be a verb, and no id.
        if not is_kept(key) and not self._any():
            return
        read = [_digest(part) for part in path.removeprefix("/v1/responses").strip("/").split("/")[:1] if part]
        named = [_digest(name) for name in _named_in(body)]
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            if any(each not in self._owners for each in (*read, *named)):
                self._learn()
            if any(self._owners.get(each, owner) != owner for each in (*read, *named)):
                said = "there is nothing of this id that this user may read or go on from"
                raise Problem(404, "not_of_this_user", said)
            self.claim(named, key)
            self.write()

    def _any(self) -> bool:
        """Whether anybody owns anything."""
        with self._lock:
            if not self._owners:
                self._learn()
            return bool(self._owners)

    def claim(self, digests: Iterable[str], key: Key) -> None:
        """Say whose some ids are, by their digests, if nobody has them. `write` makes it last."""
        if not is_kept(key):
            return
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            new = {each: owner for each in digests if each not in self._owners}
            self._owners.update(new)
            self._waiting.update(new)

    def write(self) -> None:
        """Write into the store what is not there yet.

        Raises:
            StoreError: it waits for the next time.
        """
        with self._lock:
            if self._waiting:
                process = self._process()
                process.record(Act.NOTE, policy="gateway", kept=self._waiting)
                self._waiting = {}
                process.kernel.flush_observed()

    def _process(self) -> Process:
        process = self._hierarchy.process(SESSION)
        process.refresh()
        return process

    def _learn(self) -> None:
        """Read what was written since, also by other gateways."""
        if not self._read and self._hierarchy.store.process(SESSION, time=0.0, create=False) is None:
            return
        for event in self._process().events(self._read, Act.NOTE):
            self._read = event.number
            for each, owner in event.data.get("kept", {}).items():
                self._owners.setdefault(each, owner)


class Ids:
    """Finds the ids in a reply, piece by piece."""

    def __init__(self) -> None:
        self._rest = b""
        self._seen: set[str] = set()

    def feed(self, piece: bytes) -> list[str]:
        """The digests of the ids that are new."""
        data = self._rest + piece
        self._rest = data[-LONGEST - 20 :]
        found = {_digest(match[1].decode("utf-8", "replace")) for match in _ID.finditer(data)} - self._seen
        self._seen |= found
        return list(found)


def is_kept(key: Key) -> bool:
    """Whether what a provider keeps for this one is somebody's: on one's own machine everything is one's own."""
    return bool(key.name or key.user)


def _named_in(body: bytes) -> Iterator[str]:
    """The ids of what a request goes on from.

    Raises:
        Problem: it may name something, and cannot be read.
    """
    if not body:
        return
    try:
        fields = _object(body)
        for name in ("previous_response_id", "conversation"):
            value: Any = msgspec.json.decode(fields.get(name, b"null"))
            value = value.get("id") if isinstance(value, dict) else value
            if isinstance(value, str):
                yield value
        items: Any = msgspec.json.decode(fields.get("input", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A provider may read it more kindly, and find a name in it.
        raise Problem(400, "invalid_body", "the body is no JSON object that can be read") from None
    for item in items if isinstance(items, list) else ():
        # A provider looks reasoning up by its id, and takes an item without a type for a reference.
        if isinstance(item, dict) and isinstance(item.get("id"), str):
            kind = item.get("type")
            if kind in ("item_reference", "reasoning") or (kind is None and "content" not in item):
                yield item["id"]


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=12).hexdigest()
