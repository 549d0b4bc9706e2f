"""Records the owners of objects that a provider stores: responses, conversations, files, batches and others with an id.

To a provider, all users of the gateway are one, the holder of its key. So the gateway records which user got an id first, and no
other user may continue from it, read it or delete it. The store has only digests of the ids.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.event import Act
from kilburn.gateway.form import Form
from kilburn.gateway.keys import Key
from kilburn.gateway.problems import Problem
from kilburn.kernel.session import Session, retried
from kilburn.kernel.store import Store
from kilburn.wire.digests import HIDDEN
from kilburn.wire.plain import NOT_JSON

SESSION = "@responses"
"""The session whose ledger has the owners; no client can name it."""

MAX_IDS = 100_000
"""Maximum number of ids in memory, the last used ones. Older ones are looked up in the ledger."""

MAX_ID_CHARS = 200
"""Maximum length of an id, in characters."""

MIN_ID_CHARS = 8
"""Minimum length of an id in a path, in characters. An id also has a digit, unlike a verb."""

KEEPS_NOTHING = ("audio", "completions", "embeddings", "images", "moderations", "rerank", "models")
"""Paths after whose answers the provider stores nothing that a later request could name."""

ANSWERS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
"""Paths whose answers are never requested again by an id."""

READING = ("GET", "HEAD")

_ID = re.compile(rb'"(?:id|[a-z_]{0,40}file_id)"\s*:\s*"([^"\\]{1,%d})"' % MAX_ID_CHARS)
"""Matches an id in JSON. Within a JSON string, the quotes would be escaped."""

_ID_FIELDS = re.compile(
    rb'"(?:[a-z_]{0,40}(?:file|container|vector_store|batch|thread|conversation|upload|assistant|skill|video)_ids?|container)"'
    rb'\s*:\s*(\[[^\]]*|"[^"\\]*")'
)
"""Matches fields anywhere in a request's JSON that name stored objects. A list may be incomplete, so no byte is read twice."""

_NAMING = (b'_id"', b'_ids"', b'container"')
"""Ends of the names of such fields. Most requests have none of them, which is a faster check."""

_OURS = re.compile(rb"\[[pf]\d+(?:-[pf]\d+)? (?:out|in part)\b|\"" + HIDDEN.encode())
_TEXT = re.compile(rb'"([^"\\]{1,%d})"' % MAX_ID_CHARS)
_ESCAPE = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_DIGIT = re.compile("[0-9]")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Item(msgspec.Struct):
    """The fields of a conversation's item that tell which stored item it is."""

    id: Any = None
    type: Any = None
    content: msgspec.Raw = msgspec.Raw()


_items = msgspec.json.Decoder(list[_Item]).decode


class Kept:
    """The owners of ids, for all tenants of a gateway. Safe to use from several threads.

    Args:
        opened: returns the store, which is opened at the first lookup.
        max_ids: number of ids that are kept in memory.
    """

    def __init__(self, opened: Callable[[], Store], max_ids: int = MAX_IDS) -> None:
        self._opened = opened
        self._most = max_ids
        self._lock = threading.RLock()
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[str, str] = {}
        self._read = 0
        self._whole = True
        """Whether all owners that were read are still in memory."""

    def check(self, method: str, path: str, body: bytes, key: Key, *, lent: bool = True) -> bool:
        """Refuse a request that names another user's objects. Objects without an owner that it continues become this user's.

        Args:
            path: the request's decoded path, from `/v1` on.
            body: the request's JSON, or empty bytes.
            lent: whether it goes upstream with the gateway's key, under which other users have objects too.

        Returns:
            whether the ids of its answer become this user's.

        Raises:
            Problem: an object belongs to another user, or to all. StoreError: the owners cannot be read.
        """
        parts = [part.partition(";")[0] for part in path.split("/")[2:] if part]
        kind, rest = (parts[0].lower(), parts[1:]) if parts else ("", [])
        answers = path in ANSWERS and method == "POST"
        if answers and not is_kept(key) and not self._any():
            # The search of a long body takes longer than the check whether any object has an owner.
            return False
        if b"\0" in body and is_kept(key):
            # A provider may decode it as UTF-16.
            raise Problem(400, "invalid_body", "the body is no JSON in UTF-8")
        going = list(_named_in(body)) if kind == "responses" else []
        names = [*going, *_mentioned(body)]
        if kind not in KEEPS_NOTHING and not answers:
            names += rest
        if not is_kept(key) and (not names or not self._any()):
            return False
        ids = {_digest(name) for name in names}
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            owners = self._find_owners(ids) if ids else {}
            if any(holder != owner for holder in owners.values()):
                reason = "there is nothing of this id that this user may read or go on from"
                raise Problem(404, "not_of_this_user", reason)
            is_own = any(_digest(part) in owners for part in rest)
            if is_kept(key) and lent and not is_own and not answers:
                _check_alone(method, kind, rest)
            if going:
                self.claim((_digest(name) for name in going), key, write=True)
        if not is_kept(key) or answers or kind in KEEPS_NOTHING or method == "HEAD" or rest[-1:] == ["content"]:
            return False
        return kind == "responses" or is_own or (method == "POST" and not any(map(_is_id, rest)))

    def _any(self) -> bool:
        """Return whether any object has an owner."""
        with self._lock:
            if not self._owners:
                self._learn()
            return bool(self._owners)

    def _find_owners(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the owners of the ids that have one.

        Raises:
            StoreError: the store cannot be read.
        """
        digests = set(ids)
        if any(digest not in self._owners for digest in digests):
            self._learn()
        owners = {digest: self._owners[digest] for digest in digests if digest in self._owners}
        if len(owners) < len(digests) and not self._whole:
            # The first user who got an id owns it, so the oldest note counts.
            for event in self._session().ledger.events(0, Act.NOTE):
                noted = event.data.get("kept", {})
                for digest in digests & noted.keys() - owners.keys():
                    owners[digest] = noted[digest]
        self._know(owners)
        return owners

    def _know(self, owners: Mapping[str, str]) -> None:
        for digest, owner in owners.items():
            self._owners.setdefault(digest, owner)
            self._owners.move_to_end(digest)
        # Owners that are not written yet are only in memory.
        while len(self._owners) - len(self._waiting) > self._most:
            oldest = next(iter(self._owners))
            if oldest in self._waiting:
                self._owners.move_to_end(oldest)
                continue
            del self._owners[oldest]
            self._whole = False

    def claim(self, digests: Iterable[str], key: Key, *, write: bool = False) -> None:
        """Make a user the owner of ids that have none, by their digests.

        Args:
            write: write the owners now; otherwise the next `write` stores them.

        Raises:
            StoreError: the owners cannot be read or written. The gateway keeps them in memory until it stops.
        """
        if not is_kept(key):
            return
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            requested = list(digests)
            owners = self._owners if self._whole else self._find_owners(requested)
            new = {digest: owner for digest in requested if digest not in owners}
            self._waiting.update(new)
            self._know(new)
            if write:
                self.write()

    def write(self) -> None:
        """Write new owners to the store.

        Raises:
            StoreError: they cannot be written now, and will be with the next call.
        """
        with self._lock:
            if self._waiting:
                retried(self._note_owners)

    def _note_owners(self) -> None:
        with self._session().edits.batch() as kernel:
            kernel.record(Act.NOTE, policy="gateway", kept=dict(self._waiting))
        self._waiting.clear()
        self._know({})

    def _session(self) -> Session:
        session = self._opened().session(SESSION)
        session.ledger.refresh()
        return session

    def _learn(self) -> None:
        """Read the owners that were written since the last call, also by other gateways."""
        if not self._read and self._opened().backend.segment(SESSION, time=0.0, create=False) is None:
            return
        for event in self._session().ledger.events(self._read, Act.NOTE):
            self._read = event.number
            self._know(event.data.get("kept", {}))


class Ids:
    """Finds the ids in a reply, piece by piece."""

    def __init__(self) -> None:
        self._rest = b""
        self._seen: set[str] = set()

    def feed(self, piece: bytes) -> list[str]:
        """Return the digests of new ids in a piece."""
        data = self._rest + piece
        self._rest = data[-MAX_ID_CHARS - 60 :]
        digests = {_digest(match[1].decode("utf-8", "replace")) for match in _ID.finditer(data)} - self._seen
        self._seen |= digests
        return list(digests)


def is_kept(key: Key) -> bool:
    """Return whether the gateway guards the provider's objects of this user. Without gateway keys it does so only for the end
    users that requests name; the provider separates clients with different credentials."""
    return bool(key.name) or key.user.startswith("/")


def names_nothing(method: str, path: str, body: bytes, key: Key) -> bool:
    """Return whether a conversation without an end user names no stored object, so that no lookup is needed."""
    return not is_kept(key) and method == "POST" and path in ANSWERS and not any(_mentioned(body))


def is_ours(form: Form, body: bytes) -> bool:
    """Return whether only this gateway can read a request: it has a handle, a call of its own tools, or an id of a stored object,
    which may be from a hidden round."""
    if _OURS.search(body):
        return True
    try:
        return form.name == "responses" and any(_named_in(body))
    except Problem:
        return True


def _is_id(part: str) -> bool:
    """Return whether a part of a path may be an id rather than a verb."""
    return len(part) >= MIN_ID_CHARS and _DIGIT.search(part) is not None


def _check_alone(method: str, kind: str, rest: Sequence[str]) -> None:
    """Refuse requests that concern all users: lists of all objects under the gateway's key, and its administration.

    Raises:
        Problem: the request is refused.
    """
    reads = method in READING
    if kind.startswith("organization") or (kind == "models" and not reads):
        raise Problem(403, "not_permitted", "the provider's account is the operator's; this key does not administer it")
    if kind == "chat" or (reads and kind != "models" and not any(map(_is_id, rest))):
        raise Problem(403, "not_permitted", "this would list objects of other users; name your own by their ids")


def _mentioned(body: bytes) -> Iterator[str]:
    """Yield the ids of files and other objects that a request names anywhere."""
    if b"\\u00" in body:
        body = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), body)
    if not any(word in body for word in _NAMING):
        return
    for match in _ID_FIELDS.finditer(body):
        for text in _TEXT.finditer(match[1]):
            yield text[1].decode("utf-8", "replace")


def _named_in(body: bytes) -> Iterator[str]:
    """Yield the ids of the objects from which a request continues.

    Raises:
        Problem: the request cannot be read, and may name an object.
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
        items = _read_items(fields.get("input", b"null"))
    except NOT_JSON:
        # A provider may be more lenient, and find an id in it.
        raise Problem(400, "invalid_body", "the body is no JSON object that can be read") from None
    for item in items:
        # A provider looks reasoning up by its id, and treats an item without a type as a reference.
        referred = item.type in ("item_reference", "reasoning") or (item.type is None and not item.content)
        if isinstance(item.id, str) and referred:
            yield item.id


def _read_items(raw: bytes | msgspec.Raw) -> list[_Item]:
    """Return the objects in a list; an empty list for other JSON."""
    try:
        return _items(raw)
    except msgspec.ValidationError:
        listed = msgspec.json.decode(raw)
        objects = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return _items(msgspec.json.encode(objects))


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=12).hexdigest()
