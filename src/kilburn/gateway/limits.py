"""Limits of what one client, and all clients together, may take of the gateway."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, chain, compress, count, repeat
from operator import not_

import msgspec

from kilburn.errors import SpecError

__all__ = ["RequestBounds"]

WEIGHT = 128
"""Bytes of text that take as much memory as one value of JSON: a message of one letter becomes a page, with its state and its
event in the ledger."""

RATE = 600
"""Default requests per minute of a key: ten a second continuously, 150 at once."""


class RequestBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests. A request over a limit is refused before its body is read, or while it is read.

    Args:
        body: bytes of one request.
        bodies: bytes of all requests that this process is answering. A value in their JSON counts as 128 bytes.
        upload: bytes of a body that is passed on piece by piece, such as a file; it is not held in memory, and not part of
            `bodies`.
        values: values in the JSON of one request: objects, lists, and their members.
        depth: nesting of objects and lists.
        headers: number of headers of a request. header_bytes: bytes of their names and values together.
        messages: messages of one history.
        held: estimated bytes of a tenant's sessions in memory. Nothing is refused for it: the least recently used sessions are
            evicted, and read again with their next request.
        running: concurrent requests of this process. per_key: concurrent requests of one key, in all processes over one store;
            0 for no limit.
        rate: requests per minute of one key, in all processes; a quarter of a minute's may come at once. 0 for no limit.
        repeat: seconds that a request waits for an equal one that any gateway over the store is answering, before it is refused;
            0 refuses it at once.
        connections: open connections of this process.
        patience: seconds for the headers, for a body's first byte, and for a client to continue reading.
        pace: minimum average bytes per second of a body, after `patience`.
    """

    body: int = 64 << 20
    bodies: int = 1 << 30
    upload: int = 1 << 30
    values: int = 500_000
    depth: int = 128
    headers: int = 100
    header_bytes: int = 32 << 10
    messages: int = 100_000
    held: int = 64 << 20
    running: int = 512
    per_key: int = 256
    rate: int = 0
    repeat: float = 600.0
    connections: int = 2048
    patience: float = 20.0
    pace: float = 16_384.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0 or (name not in ("rate", "per_key", "repeat") and getattr(self, name) == 0):
                raise SpecError(f"{name}={getattr(self, name)!r} is no limit", advice="give a number above 0")


def parse_limits(settings: Iterable[str], *, keyed: bool) -> RequestBounds:
    """Parse limits from texts such as "messages=5000".

    Args:
        keyed: whether clients need keys. Then there is a default rate.

    Raises:
        SpecError: there is no limit of this name, or the value is not a number.
    """
    bounds: dict[str, str | int] = {"rate": RATE if keyed else 0}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in RequestBounds.__struct_fields__:
            raise SpecError(f"{text!r} is no limit", advice=f"NAME=N with one of {', '.join(RequestBounds.__struct_fields__)}")
        bounds[name] = value
    try:
        return msgspec.convert(bounds, RequestBounds, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"a limit is no number: {error}", advice="give NAME=N") from None


_MARKS = b"[]{},"
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class BodyTally:
    """Measures the JSON of a body, piece by piece, before it is parsed.

    A body that does not begin with an object is not parsed here, and has no values. In a body with invalid JSON, at least the
    values before the error are counted.

    Attributes:
        size: bytes. values, depth: as `RequestBounds` has them.
    """

    def __init__(self) -> None:
        self.size = self.values = self.depth = 0
        self._open = 0
        self._in_text = False
        self._torn = b""
        self._is_object: bool | None = None

    @property
    def weight(self) -> int:
        """Its share of `RequestBounds.bodies`."""
        return self.size + WEIGHT * self.values

    def feed(self, piece: bytes) -> None:
        """Count one piece."""
        self.size += len(piece)
        if self._is_object is None and (start := piece.lstrip(b" \t\r\n")):
            self._is_object = start.startswith(b"{")
        if not self._is_object:
            return
        piece = self._torn + piece
        self._torn = b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # The escaped character is in the next piece.
            piece, self._torn = piece[:-1], b"\\"
        texts = piece.split(b'"')
        if any(escapes := [*map(bytes.endswith, texts, repeat(b"\\"))]):
            for at in compress(count(), map(bytes.endswith, texts, repeat(b"\\\\"))):
                escapes[at] = (len(texts[at]) - len(texts[at].rstrip(b"\\"))) % 2 == 1
            # A text behind an escaped quote belongs to the same string as the text before it.
            texts = [*compress(texts, chain((True,), map(not_, escapes)))]
        marks = b"".join(texts[self._in_text :: 2]).translate(None, _NO_MARKS)
        self._in_text ^= len(texts) % 2 == 0
        opened = marks.count(b"[") + marks.count(b"{")
        self.values += opened + marks.count(b",")
        steps = memoryview(marks.translate(_STEPS, b",")).cast("b")
        if steps:
            self.depth = max(self.depth, max(accumulate(steps, initial=self._open)))
            self._open += 2 * opened - len(steps)


class Bucket:
    """The requests that a key may still make: it fills at a rate per minute, and holds a quarter of a minute's requests."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._most = max(1.0, rate / 4)
        self._left, self._at = self._most, clock()

    def wait(self) -> float:
        """Return the seconds until a request is allowed; 0 if one is."""
        moment = self._clock()
        self._left = min(self._most, self._left + (moment - self._at) * self.rate / 60)
        self._at = moment
        return max(0.0, 1 - self._left) * 60 / self.rate

    def take(self) -> float:
        """Take one request; return 0, or the seconds until one is allowed."""
        wait = self.wait()
        if not wait:
            self._left -= 1
        return wait

    def give(self) -> None:
        """Put back a request that was refused for another reason."""
        self._left = min(self._most, self._left + 1)


class Buckets:
    """The buckets of several clients.

    Args:
        max_clients: maximum number of buckets; the least recently active client's is dropped. None for no maximum.
    """

    def __init__(self, max_clients: int | None = None) -> None:
        self._most = max_clients
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def take(self, client: Hashable, rate: int) -> float:
        """Take a request from a client's bucket; return 0, or the seconds until a request is allowed. A rate of 0 is
        unlimited."""
        if not rate:
            return 0.0
        bucket = self._buckets.get(client)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[client] = Bucket(rate)
        self._buckets.move_to_end(client)
        if self._most is not None and len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return bucket.take()

    def give(self, client: Hashable) -> None:
        """Put back a request that was refused for another reason."""
        if client in self._buckets:
            self._buckets[client].give()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on a host. Names other than `localhost` are not resolved."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_listening(host: str, keys: object | None) -> None:
    """Refuse to serve other machines without keys.

    Raises:
        SpecError: the host is not this machine's loopback, and there are no keys.
    """
    if keys is None and not is_loopback(host):
        raise SpecError(
            f"{host} can be reached from outside, and no keys are set: anyone could read every session",
            advice="listen on 127.0.0.1, or add a key with `kilburn keys add` and give --keys FILE; TLS is a proxy's task",
        )
