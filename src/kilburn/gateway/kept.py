"""Whose it is what a provider keeps: responses, conversations, files, batches and whatever else has an id.

A provider keeps them for the holder of its key, and that is the gateway: to it all users are one. So the gateway remembers who
got an id first, and nobody else may go on from it, read it or delete it. In the store are digests alone.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import msgspec

from kilburn.errors import StoreStale
from kilburn.event import Act
from kilburn.gateway.form import Form
from kilburn.gateway.keys import Key
from kilburn.gateway.problems import Problem
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.wire.digests import HIDDEN
from kilburn.wire.plain import NOT_JSON

SESSION = "@responses"
"""The session whose ledger says it; no client can name it."""

KNOWN = 100_000
"""Ids that are known in memory: those that were named last. An older one is looked for in the ledger."""

TRIES = 5
"""How often it is tried to write, if other gateways write at the same time."""

LONGEST = 200
"""Characters of an id."""

SHORTEST = 8
"""Characters of what may be an id in a path; it has a digit too. A verb has none."""

KEEPS_NOTHING = ("audio", "completions", "embeddings", "images", "moderations", "rerank", "models")
"""Paths whose answers leave nothing at the provider that a later request could name."""

ANSWERS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
"""Paths of answers that nobody asks for again by an id."""

READING = ("GET", "HEAD")

_ID = re.compile(rb'"(?:id|[a-z_]{0,40}file_id)"\s*:\s*"([^"\\]{1,%d})"' % LONGEST)
"""An id in JSON. Inside of a text the quotes would have backslashes."""

_NAMED = re.compile(
    rb'"(?:[a-z_]{0,40}(?:file|container|vector_store|batch|thread|conversation|upload|assistant|skill|video)_ids?|container)"'
    rb'\s*:\s*(\[[^\]]*|"[^"\\]*")'
)
"""Ids of what a provider keeps, which a request may name anywhere in its JSON. A list need not end: so no byte is read twice."""

_NAMING = (b'_id"', b'_ids"', b'container"')
"""What the names end with before which these stand. Most requests have none of it, and that is found sooner."""

_OURS = re.compile(rb"\[[pf]\d+(?:-[pf]\d+)? (?:out|in part)\b|\"" + HIDDEN.encode())
_TEXT = re.compile(rb'"([^"\\]{1,%d})"' % LONGEST)
_ESCAPE = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_DIGIT = re.compile("[0-9]")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Item(msgspec.Struct):
    """An item of a conversation, as far as it says which one the provider keeps; the rest of it is passed over."""

    id: Any = None
    type: Any = None
    content: msgspec.Raw = msgspec.Raw()


_items = msgspec.json.Decoder(list[_Item]).decode


class Kept:
    """Who owns an id, for all tenants of a gateway. Safe to use from several threads.

    Args:
        opened: gives the store; it is asked for when something is named.
        known: ids that are known in memory.
    """

    def __init__(self, opened: Callable[[], Store], known: int = KNOWN) -> None:
        self._opened = opened
        self._most = known
        self._lock = threading.RLock()
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[str, str] = {}
        self._read = 0
        self._whole = True
        """Whether all that was read is still known."""

    def check(self, method: str, path: str, body: bytes, key: Key, *, lent: bool = True) -> bool:
        """Refuse a request that names what is another user's. What it goes on from and nobody has is this one's from now on.

        Args:
            path: of the request, decoded, from `/v1` on.
            body: empty where it is no JSON.
            lent: whether it goes upstream with the gateway's key, under which others keep things too.

        Returns:
            whether the ids of its answer are this user's.

        Raises:
            Problem: something belongs to somebody else, or to all. StoreError: it cannot be said.
        """
        parts = [part.partition(";")[0] for part in path.split("/")[2:] if part]
        kind, rest = (parts[0].lower(), parts[1:]) if parts else ("", [])
        answers = path in ANSWERS and method == "POST"
        if answers and not is_kept(key) and not self._any():
            # Whatever it names: to look through a long body takes longer than to ask whether anything is anybody's.
            return False
        if b"\0" in body and is_kept(key):
            # A provider may read it as UTF-16.
            raise Problem(400, "invalid_body", "the body is no JSON in UTF-8")
        going = list(_named_in(body)) if kind == "responses" else []
        named = [*going, *_mentioned(body)]
        if kind not in KEEPS_NOTHING and not answers:
            named += rest
        if not is_kept(key) and (not named or not self._any()):
            return False
        ids = {_digest(name) for name in named}
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            owners = self._owners_of(ids) if ids else {}
            if any(each != owner for each in owners.values()):
                said = "there is nothing of this id that this user may read or go on from"
                raise Problem(404, "not_of_this_user", said)
            own = any(_digest(part) in owners for part in rest)
            if is_kept(key) and lent and not own and not answers:
                _check_alone(method, kind, rest)
            if going:
                self.claim((_digest(name) for name in going), key)
                self.write()
        if not is_kept(key) or answers or kind in KEEPS_NOTHING or method == "HEAD" or rest[-1:] == ["content"]:
            return False
        return kind == "responses" or own or (method == "POST" and not any(map(_is_id, rest)))

    def _any(self) -> bool:
        """Whether anybody owns anything."""
        with self._lock:
            if not self._owners:
                self._learn()
            return bool(self._owners)

    def _owners_of(self, ids: Iterable[str]) -> dict[str, str]:
        """The owners of the ids that have one.

        Raises:
            StoreError: the store cannot say it.
        """
        wanted = set(ids)
        if any(each not in self._owners for each in wanted):
            self._learn()
        found = {each: self._owners[each] for each in wanted if each in self._owners}
        if len(found) < len(wanted) and not self._whole:
            # Who got it first has it, so the oldest one counts.
            for event in self._session().ledger.events(0, Act.NOTE):
                kept = event.data.get("kept", {})
                for each in wanted & kept.keys() - found.keys():
                    found[each] = kept[each]
        self._know(found)
        return found

    def _know(self, owners: Mapping[str, str]) -> None:
        for each, owner in owners.items():
            self._owners.setdefault(each, owner)
            self._owners.move_to_end(each)
        # What is not written yet is known here alone.
        while len(self._owners) - len(self._waiting) > self._most:
            oldest = next(iter(self._owners))
            if oldest in self._waiting:
                self._owners.move_to_end(oldest)
                continue
            del self._owners[oldest]
            self._whole = False

    def claim(self, digests: Iterable[str], key: Key) -> None:
        """Say whose some ids are, by their digests, if nobody has them. `write` makes it last.

        Raises:
            StoreError: the store cannot say whether somebody has them.
        """
        if not is_kept(key):
            return
        owner = _digest(f"{key.tenant}\0{key.user}")
        with self._lock:
            wanted = list(digests)
            known = self._owners if self._whole else self._owners_of(wanted)
            new = {each: owner for each in wanted if each not in known}
            self._waiting.update(new)
            self._know(new)

    def write(self) -> None:
        """Write into the store what is not there yet.

        Raises:
            StoreError: it waits for the next time.
        """
        with self._lock:
            for left in reversed(range(TRIES if self._waiting else 0)):
                with suppress(StoreStale) if left else nullcontext():
                    with self._session().edits.batch() as kernel:
                        kernel.record(Act.NOTE, policy="gateway", kept=dict(self._waiting))
                    self._waiting.clear()
                    self._know({})
                    break

    def _session(self) -> Session:
        session = self._opened().session(SESSION)
        session.ledger.refresh()
        return session

    def _learn(self) -> None:
        """Read what was written since, also by other gateways."""
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
        """The digests of the ids that are new."""
        data = self._rest + piece
        self._rest = data[-LONGEST - 60 :]
        found = {_digest(match[1].decode("utf-8", "replace")) for match in _ID.finditer(data)} - self._seen
        self._seen |= found
        return list(found)


def is_kept(key: Key) -> bool:
    """Whether the gateway guards what a provider keeps for this user. Without gateway keys it does so for the end users that
    requests name; clients with different credentials are kept apart by the provider."""
    return bool(key.name) or key.user.startswith("/")


def names_nothing(method: str, path: str, body: bytes, key: Key) -> bool:
    """Whether a conversation of nobody in particular names nothing that a provider keeps: then nothing need be looked up."""
    return not is_kept(key) and method == "POST" and path in ANSWERS and not any(_mentioned(body))


def is_ours(form: Form, body: bytes) -> bool:
    """Whether a request has what only this gateway could read: a handle, a call of its own tools, or a name of what a provider
    keeps, which may be from a round that the client did not see."""
    if _OURS.search(body):
        return True
    try:
        return form.name == "responses" and any(_named_in(body))
    except Problem:
        return True


def _is_id(part: str) -> bool:
    """Whether a part of a path may be an id, and no verb."""
    return len(part) >= SHORTEST and _DIGIT.search(part) is not None


def _check_alone(method: str, kind: str, rest: Sequence[str]) -> None:
    """Refuse what is not one user's: a list of all that is kept under the gateway's key, and what administers it.

    Raises:
        Problem: it is refused.
    """
    reads = method in READING
    if kind.startswith("organization") or (kind == "models" and not reads):
        raise Problem(403, "not_permitted", "the provider's account is the operator's; this key does not administer it")
    if kind == "chat" or (reads and kind != "models" and not any(map(_is_id, rest))):
        raise Problem(403, "not_permitted", "this would tell what others keep at the provider; name what is yours by its id")


def _mentioned(body: bytes) -> Iterator[str]:
    """The ids of files and the like that a request names, wherever it does."""
    if b"\\u00" in body:
        body = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), body)
    if not any(word in body for word in _NAMING):
        return
    for found in _NAMED.finditer(body):
        for text in _TEXT.finditer(found[1]):
            yield text[1].decode("utf-8", "replace")


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
        items = _read_items(fields.get("input", b"null"))
    except NOT_JSON:
        # A provider may read it more kindly, and find a name in it.
        raise Problem(400, "invalid_body", "the body is no JSON object that can be read") from None
    for item in items:
        # A provider looks reasoning up by its id, and takes an item without a type for a reference.
        referred = item.type in ("item_reference", "reasoning") or (item.type is None and not item.content)
        if isinstance(item.id, str) and referred:
            yield item.id


def _read_items(raw: bytes | msgspec.Raw) -> list[_Item]:
    """Return the objects of a list; none if it is no list."""
    try:
        return _items(raw)
    except msgspec.ValidationError:
        listed = msgspec.json.decode(raw)
        objects = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return _items(msgspec.json.encode(objects))


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=12).hexdigest()
