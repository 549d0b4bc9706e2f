"""The end users of an application: who a request is for, as the client tells it, and what one of them may take.

A key opens a tenant, and an application has one key for all its users. Each of them that a request names is a wall: no session,
search, memory or limit is shared by two. The names come from the application, so they are bytes to keep apart, not to believe.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import quote

import msgspec

from kilburn.backend import SegmentInfo, SegmentKind
from kilburn.backends.counting import Demand
from kilburn.errors import SpecError, StoreError
from kilburn.gateway.keys import STAND_INS, Key, Link
from kilburn.gateway.limits import Buckets, RequestBounds
from kilburn.gateway.problems import Problem, client_message, over_most, over_rate
from kilburn.gateway.tally import Tally
from kilburn.wire.plain import NOT_JSON

HEADER = "x-kilburn-user"
"""The header that names an end user; it wins over the body."""

MAX_USER_CHARS = 100
"""Maximum length of a user within a name, in characters; a longer one is replaced by its digest."""

MAX_DEVICE_CHARS = 1_000
"""Maximum length of Claude Code's JSON about itself, in characters."""

SHARE = 4
"""An end user may take this fraction of the key's limits (one fourth)."""

MAX_USERS = 10_000
"""Maximum number of end users whose rate is remembered, the last active ones."""

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key")
"""Headers with a client's key for the provider."""

_NO_CREDENTIALS = frozenset(key.encode() for key in STAND_INS)

_CLAUDE = re.compile(r"user_([0-9a-f]{64})_account_([0-9a-f-]{36}|)_session_[0-9a-f-]{36}")
"""Claude Code's older form of `user_id`: a device, an account, and a session, which changes every time."""


class _Fields(msgspec.Struct):
    safety_identifier: msgspec.Raw = msgspec.Raw(b"null")
    user: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"null")


_fields = msgspec.json.Decoder(_Fields).decode

NAMING = _Fields.__struct_fields__
"""Fields of a body that name its end user."""


def requested_user(headers: Mapping[str, str], body: bytes, key: Key, fields: Mapping[str, msgspec.Raw] | None = None) -> str:
    """Return the end user that a request names: in the header, or else in OpenAI's `safety_identifier` and `user` and
    Anthropic's `metadata.user_id`; "" for none. If several of these fields differ, the user is their combination.

    Claude Code's own `user_id` names a device and a session. The session is ignored, and with one person's key the device is
    ignored too.

    Args:
        fields: the body's fields, if it was parsed already.

    Raises:
        SpecError: a header that is not UTF-8.
    """
    try:
        user_name = headers.get(HEADER, "").encode("latin-1").decode().strip()
    except UnicodeError:
        raise SpecError(f"a {HEADER} that is not UTF-8", advice="send the bytes of its UTF-8, or letters of ASCII") from None
    if user_name:
        return _quoted(user_name)
    if fields is not None and fields.keys().isdisjoint(NAMING):
        return ""
    try:
        naming = _fields(body) if fields is None else _Fields(**{name: fields[name] for name in NAMING if name in fields})
    except NOT_JSON:
        return ""  # a body that is read later is refused then; one that is not read has no session
    safety, user, metadata = map(_value, (naming.safety_identifier, naming.user, naming.metadata))
    users = [_quoted(_text(value)) for value in (safety, user)]
    user_name = _text(metadata.get("user_id") if isinstance(metadata, dict) else metadata)
    device = _device(user_name)
    if device is None:
        users.append(_quoted(user_name))
    elif not key.person:
        users.append(f"device={_quoted(device)}")
    return "&".join(dict.fromkeys(filter(None, users)))


def client_user(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the user that a client is without gateway keys: `client-` and a one-way digest of its credential for the provider.

    The name is the same whichever header carries the credential.

    Args:
        headers: names in small letters, with their values.

    Returns:
        "" for a client without a credential, or with a stand-in for it.
    """
    credentials = sorted({_credential(value) for name, value in headers if name in CREDENTIALS} - _NO_CREDENTIALS)
    if not credentials:
        return ""
    return f"client-{hashlib.blake2b(msgspec.json.encode(credentials), digest_size=12, person=b'kilburn-client').hexdigest()}"


def _credential(value: bytes) -> bytes:
    kind, _, rest = value.strip().partition(b" ")
    return rest.strip() if kind.lower() == b"bearer" else value.strip()


def _value(raw: msgspec.Raw) -> object:
    """Decode JSON; return its raw text if it cannot be decoded, such as half of a character."""
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON:
        return bytes(raw).decode("utf-8", "backslashreplace")


def _text(value: object) -> str:
    """Return a text as it is, and any other value as its JSON."""
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value, order="sorted").decode()


def _device(text: str) -> str | None:
    """Return device and account of a `user_id` of Claude Code, in its older or newer form; None for others."""
    if match := _CLAUDE.fullmatch(text):
        return f"{match[1]} {match[2]}"
    try:
        fields = msgspec.json.decode(text, type=dict[str, str]) if text.startswith("{") and len(text) <= MAX_DEVICE_CHARS else {}
    except NOT_JSON:
        return None
    if fields.keys() != {"device_id", "account_uuid", "session_id"}:
        return None
    return f"{fields['device_id']} {fields['account_uuid']}"


def _quoted(user: str) -> str:
    """Return a user as a part of a name: without separators, not too long, and unique."""
    short = quote(user, safe="@:+") if len(user) <= MAX_USER_CHARS else user
    return short if len(short) <= MAX_USER_CHARS else f"%-{hashlib.blake2b(user.encode(), digest_size=16).hexdigest()}"


def below(key: Key, user: str, link: Link) -> Key:
    """Return the key for one request. Its user is the key's own, or `/USER` or `/KEY USER/USER`, which no key has; its `link` is
    on or off.

    Args:
        user: the end user that the request names, as `requested_user` returns it.
        link: the operator's setting of links for the whole gateway.
    """
    policies = {link, key.link}
    linked = Link.OFF not in policies and (Link.ON in policies or key.person or bool(user))
    full_name = f"/{_quoted(key.user)}/{user}" if key.user and user else f"/{user}" if user else key.user
    return msgspec.structs.replace(key, user=full_name, link=Link.ON if linked else Link.OFF)


def sees(key: Key, user: str) -> Callable[[str], bool]:
    """Return a predicate for the owners of the sessions that a client may see. An end user sees its own sessions. The key of a
    person sees that person's and those of its end users. A client without keys and without a credential is the operator of this
    machine and sees all. Another key sees those of its end users and those without an owner.

    Args:
        user: the end user that the request names, as `requested_user` returns it.
    """
    if user:
        return below(key, user, Link.AUTO).user.__eq__
    if key.figures or not (key.name or key.user):
        return lambda owner: True
    if key.user:
        prefix = f"/{_quoted(key.user)}/"
        return lambda owner: owner == key.user or owner.startswith(prefix)
    return lambda owner: not owner or (owner.startswith("/") and owner.count("/") == 1)


def shows(key: Key, user: str = "") -> Callable[[SegmentInfo], bool]:
    """Return a predicate for the segments of a tenant that a client may read: the sessions that `sees` allows, and the memory,
    documents and notes of the same users and of all users. The gateway's own segments are hidden from all."""
    mine = sees(key, user)

    def shown(info: SegmentInfo) -> bool:
        if info.kind is SegmentKind.SESSION:
            return not info.name.startswith("@") and mine(info.user)
        return not info.user or mine(info.user)

    return shown


def logged(user: str) -> str:
    """Return the user of a key for the log. An end user is shown by a digest, because the name comes from a request."""
    if not user.startswith("/"):
        return user
    key_user, _, end = user[1:].rpartition("/")
    return f"{key_user}/{hashlib.blake2b(end.encode(), digest_size=8).hexdigest()}"


class Shares:
    """Enforces the limits of end users, who share those of their key, and of keys, if several gateways count together.

    It is used in the event loop alone.

    Args:
        tally: counts for all gateways over the store; None if this gateway is alone.
    """

    def __init__(self, limits: RequestBounds, tally: Tally | None = None) -> None:
        self._limits, self._tally = limits, tally
        self._running: Counter[tuple[str, str]] = Counter()
        self._buckets = Buckets(MAX_USERS)

    @asynccontextmanager
    async def taken(self, key: Key, user: str) -> AsyncIterator[None]:
        """Count one request while it is answered.

        Raises:
            Problem: it exceeds the user's share, or the limits of all gateways together.
        """
        with self._here(key, user):
            demands = () if self._tally is None else self._demands(key, user)
            if self._tally is None or not demands:
                yield
                return
            try:
                refused, wait = await self._tally.take(demands)
            except StoreError as error:
                raise Problem(503, "store_unavailable", client_message(error), retry_after=1) from error
            if refused >= 0:
                demand, of_user = demands[refused], bool(user) and refused == len(demands) - 1
                raise over_rate(demand.rate, wait, user=of_user) if wait else over_most(demand.limit, user=of_user)
            try:
                yield
            finally:
                self._tally.give(demands)

    def _demands(self, key: Key, user: str) -> tuple[Demand, ...]:
        """Return a request's demands on its key, and then on its user; none without limits."""
        rate, limit = key.rate or self._limits.rate, self._limits.per_key if key.name else 0
        if not rate and not limit:
            return ()
        name = key.name.encode()
        demands = [Demand(_digest(name), rate, limit)]
        if user:
            demands.append(Demand(_digest(f"{key.name}/{_client(key)}{user}".encode()), _share(rate), _share(limit)))
        return tuple(demands)

    @contextmanager
    def _here(self, key: Key, user: str) -> Iterator[None]:
        if not user:
            yield
            return
        limit = _share(self._limits.per_key)
        client = key.name, _client(key) + user
        if limit and self._running[client] >= limit:
            raise over_most(limit, user=True)
        rate = _share(key.rate or self._limits.rate)
        if wait := self._buckets.take(client, rate):
            raise over_rate(rate, wait, user=True)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


def _client(key: Key) -> str:
    """Return the prefix of an end user's name that separates the clients of a gateway without keys."""
    return "" if key.name or not key.user else f"{key.user}/"


def _share(limit: int) -> int:
    return max(1, limit // SHARE) if limit else 0


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()
