"""Where replies are that their provider keeps, by the digests of the ids that it gave them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MAX_REPLIES = 200_000
"""Replies that are known in memory, for each tenant."""


class ReplyPlace(NamedTuple):
    """The place of a reply.

    Args:
        session: the name of its session, and `number`, which no other session ever has.
        turn: how many messages the session has with it.
        calls: the ids of its calls, if the session has others.
    """

    session: str
    number: int
    turn: int
    calls: tuple[str, ...]


class ReplyPlaces:
    """The places of the last replies. There may be very many, so each is a row of bytes. The owner holds a lock.

    Args:
        max_replies: number of replies that are kept in memory.
    """

    def __init__(self, max_replies: int = MAX_REPLIES) -> None:
        self._most = max_replies
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        """They go when the young ones are half of all."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: str) -> ReplyPlace | None:
        """Return the place of a reply, if it is in memory."""
        row = self._young.get(key.encode()) or self._old.get(key.encode())
        if row is None:
            return None
        session, number, turn, calls = msgspec.msgpack.decode(row)
        return ReplyPlace(session, number, turn, tuple(calls))

    def keep(self, key: str, place: ReplyPlace) -> None:
        """Store the place of a reply."""
        self._young[key.encode()] = msgspec.msgpack.encode(place)
        if 2 * len(self._young) >= self._most:
            self._old, self._young = self._young, {}
