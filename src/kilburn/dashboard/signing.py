"""Who is signed in at the dashboard of a gateway: a browser has no key to send, so a person gives one once.

What the browser keeps is a random word that opens the dashboard and nothing else. Here is its digest, in memory alone: who ends
the gateway signs everybody out. The key is asked for again at each request, so one that was revoked opens nothing.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from kilburn.dashboard.changes import fresh_word
from kilburn.gateway.keys import Key, Keys
from kilburn.gateway.limits import Bucket

LASTS = 12 * 3600.0
"""Seconds after which one signs in again."""

IDLE = 2 * 3600.0
"""Seconds without a request after which one does."""

MOST = 1_000
"""Sign-ins at once; the one that was used longest ago goes first."""

OF_A_KEY = 16
"""Of these, with one key."""

FAILURES, ALL_FAILURES = 20, 240
"""Wrong keys per minute: of one address, and of all together. A quarter of them may come at once."""

ADDRESSES = 1_000
"""Addresses whose failures are counted: those that failed last."""

PLAIN, SECURE = "kilburn_dashboard", "__Host-kilburn_dashboard"
"""Names of the cookie. Of the second one a browser vouches that it came over TLS, and from this very host."""


class SignIn(msgspec.Struct):
    """One person in one browser."""

    key: Key
    begun: float
    used: float
    word: str = msgspec.field(default_factory=fresh_word)
    """What forms bring back."""


class SignIns:
    """Who is signed in. It is used in the event loop alone.

    Args:
        keys: of the gateway.
        clock: seconds that never go back.
    """

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys, clock
        self._known: OrderedDict[str, SignIn] = OrderedDict()
        self._failures: OrderedDict[str, Bucket] = OrderedDict()
        self._all = Bucket(ALL_FAILURES)

    async def answer(self, verb: str, given: Sequence[Any]) -> Any:
        """What one of the verbs below comes to.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        match verb:
            case "wait":
                return self.wait(*given)
            case "enter":
                return self.enter(*given)
            case "leave":
                return self.leave(*given)
            case _:
                words, uses = given
                return self.find(words, uses=uses)

    def wait(self, address: str) -> float:
        """Seconds after which this address may try again; 0 for now."""
        return max(self._all.wait(), self._of(address).wait())

    def enter(self, presented: str, address: str) -> str | None:
        """The word for the browser, if the key is valid and opens sessions; None if not, which counts against the address.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        key = self._keys.find(presented.strip().encode("utf-8", "replace"))
        if key is None or key.figures:
            self._all.take()
            self._of(address).take()
            return None
        word, now = secrets.token_urlsafe(32), self._clock()
        self._known[_digest(word)] = SignIn(key, now, now)
        theirs = [digest for digest, one in self._known.items() if one.key.name == key.name]
        for digest in (*theirs[:-OF_A_KEY], *list(self._known)[:-MOST]):
            self._known.pop(digest, None)
        return word

    def find(self, words: Iterable[str], *, uses: bool = True) -> SignIn | None:
        """Who has one of these words, with the key as it is now.

        Args:
            uses: whether it is a person who asks, and no screen that keeps itself up to date.

        Raises:
            SpecError, OSError: the keys cannot be read.
        """
        for word in words:
            digest, now = _digest(word), self._clock()
            known = self._known.get(digest)
            if known is None:
                continue
            key = self._keys.valid(known.key)
            if key is None or now - known.begun > LASTS or now - known.used > IDLE:
                del self._known[digest]
                continue
            known.key = key
            if uses:
                known.used = now
                self._known.move_to_end(digest)
            return known
        return None

    def leave(self, words: Iterable[str]) -> None:
        """Sign out."""
        for word in words:
            self._known.pop(_digest(word), None)

    def _of(self, address: str) -> Bucket:
        bucket = self._failures.setdefault(address, Bucket(FAILURES))
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES:
            self._failures.popitem(last=False)
        return bucket


class Reception:
    """Where one asks who is signed in: `SignIns` of this process, or of the parent of several that serve at one address.

    Args:
        ask: takes a verb of `SignIns` and what it is given.
    """

    def __init__(self, ask: Callable[[str, Sequence[Any]], Awaitable[Any]]) -> None:
        self._ask = ask

    async def wait(self, address: str) -> float:
        """See `SignIns.wait`."""
        return float(await self._ask("wait", [address]))

    async def enter(self, presented: str, address: str) -> str | None:
        """See `SignIns.enter`."""
        word: str | None = await self._ask("enter", [presented, address])
        return word

    async def find(self, words: Iterable[str], *, uses: bool = True) -> SignIn | None:
        """See `SignIns.find`."""
        found = await self._ask("find", [list(words), uses])
        return found if isinstance(found, SignIn) else msgspec.convert(found, SignIn | None)

    async def leave(self, words: Iterable[str]) -> None:
        """See `SignIns.leave`."""
        await self._ask("leave", [list(words)])


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode("utf-8", "replace")).hexdigest()


def words_in(cookies: Iterable[bytes]) -> list[str]:
    """The words of our cookies, those that came over TLS first."""
    found: dict[str, list[str]] = {SECURE: [], PLAIN: []}
    for header in cookies:
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            if name in found and 0 < len(value) <= 100:
                found[name].append(value)
    return [*found[SECURE], *found[PLAIN]][:4]


def cookie(word: str, root: str, *, secure: bool) -> str:
    """The header that gives a browser its word; that takes it away, where the word is "".

    Args:
        secure: whether the page came over TLS.
    """
    name, path = (SECURE, "/; Secure") if secure else (PLAIN, root)
    return f"{name}={word}; Max-Age={round(LASTS) if word else 0}; Path={path}; HttpOnly; SameSite=Strict"
