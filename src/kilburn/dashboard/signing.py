"""The sign-ins at the dashboard of a gateway. A browser cannot send a key with each request, so a person enters it once.

The browser keeps a random token that opens the dashboard and nothing else. The gateway keeps its digest in memory, so that
stopping the gateway signs everybody out. Each request looks the key up again, so a revoked key opens nothing.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kilburn.dashboard.changes import fresh_word
from kilburn.gateway.keys import Key, Keys
from kilburn.gateway.limits import Bucket

MAX_AGE = 12 * 3600.0
"""Seconds after which a person has to sign in again."""

MAX_IDLE = 2 * 3600.0
"""Seconds without a request after which a person has to sign in again."""

MAX_SIGN_INS = 1_000
"""Concurrent sign-ins; the least recently used one is removed first."""

MAX_PER_KEY = 16
"""Concurrent sign-ins with one key."""

FAILURES, ALL_FAILURES = 20, 240
"""Wrong keys per minute, of one address and of all addresses together. A quarter of them may come at once."""

MAX_ADDRESSES = 1_000
"""Addresses whose failures are counted, the ones that failed last."""

PLAIN, SECURE = "kilburn_dashboard", "__Host-kilburn_dashboard"
"""Names of the cookie. A browser accepts the second one only over TLS and from this very host."""


class SignIn(msgspec.Struct):
    """One person in one browser."""

    key: Key
    created: float
    last_use: float
    word: str = msgspec.field(default_factory=fresh_word)
    """The token that forms return."""


class SignIns:
    """The people who are signed in. Only the event loop uses it.

    Args:
        keys: the gateway's keys.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys, clock
        self._sign_ins: OrderedDict[str, SignIn] = OrderedDict()
        self._failures: OrderedDict[str, Bucket] = OrderedDict()
        self._all = Bucket(ALL_FAILURES)

    async def answer(self, verb: str, arguments: Sequence[Any]) -> Any:
        """Call one of the methods below by its name.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        methods: dict[str, Callable[..., Any]] = {
            "wait": self.wait, "enter": self.enter, "leave": self.leave, "find": self.find
        }  # fmt: skip
        return methods[verb](*arguments)

    def wait(self, address: str) -> float:
        """Return the seconds after which an address may try again; 0 for now."""
        return max(self._all.wait(), self._address_bucket(address).wait())

    def enter(self, presented: str, address: str) -> str | None:
        """Sign in with a key, and return the token for the browser. If the key is invalid or opens no sessions, return None and
        count a failure of the address.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        key = self._keys.find(presented.strip().encode("utf-8", "replace"))
        if key is None or key.figures:
            self._all.take()
            self._address_bucket(address).take()
            return None
        word, time = secrets.token_urlsafe(32), self._clock()
        self._sign_ins[_digest(word)] = SignIn(key, time, time)
        of_key = [digest for digest, sign_in in self._sign_ins.items() if sign_in.key.name == key.name]
        for digest in (*of_key[:-MAX_PER_KEY], *list(self._sign_ins)[:-MAX_SIGN_INS]):
            self._sign_ins.pop(digest, None)
        return word

    def find(self, words: Iterable[str], uses: bool = True) -> SignIn | None:
        """Return the sign-in of the first valid token, with its key as it is now.

        Args:
            uses: whether a person made the request, and not a live screen.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        for word in words:
            digest, time = _digest(word), self._clock()
            sign_in = self._sign_ins.get(digest)
            if sign_in is None:
                continue
            key = self._keys.valid(sign_in.key)
            if key is None or time - sign_in.created > MAX_AGE or time - sign_in.last_use > MAX_IDLE:
                del self._sign_ins[digest]
                continue
            sign_in.key = key
            if uses:
                sign_in.last_use = time
                self._sign_ins.move_to_end(digest)
            return sign_in
        return None

    def leave(self, words: Iterable[str]) -> None:
        """Sign out."""
        for word in words:
            self._sign_ins.pop(_digest(word), None)

    def _address_bucket(self, address: str) -> Bucket:
        bucket = self._failures.setdefault(address, Bucket(FAILURES))
        self._failures.move_to_end(address)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
        return bucket


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode("utf-8", "replace")).hexdigest()


def words_in(cookies: Iterable[bytes]) -> list[str]:
    """Return the tokens in cookies, those sent over TLS first."""
    words: dict[str, list[str]] = {SECURE: [], PLAIN: []}
    for header in cookies:
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            if name in words and 0 < len(value) <= 100:
                words[name].append(value)
    return [*words[SECURE], *words[PLAIN]][:4]


def cookie(word: str, root: str, *, secure: bool) -> str:
    """Return the header that sets the cookie with a token, or deletes it if the token is "".

    Args:
        secure: whether the page came over TLS.
    """
    name, path = (SECURE, "/; Secure") if secure else (PLAIN, root)
    return f"{name}={word}; Max-Age={round(MAX_AGE) if word else 0}; Path={path}; HttpOnly; SameSite=Strict"
