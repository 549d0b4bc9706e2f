"""Gateways that count together what clients take: over a file of one machine here, over PostgreSQL in tests/postgres."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.talk import user
from kilburn.backends.counting import Demand, FileTurnstile, Ruling
from kilburn.errors import StoreBusy
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.tally import Tally
from kilburn.testing.upstream import Upstream
from waiting import until

ONE = (Demand(b"ana", 0, 1),)
YES = Ruling()


class Held(FileTurnstile):
    """Counts when it is told to, notes what it is told, and fails as often as it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.open, self.failing, self.told = threading.Event(), 0, list[tuple[int, dict[bytes, int]]]()
        self.open.set()

    def count(self, asked: Sequence[Sequence[Demand]], held: Mapping[bytes, int]) -> list[Ruling]:
        self.open.wait(600)
        self.told.append((len(asked), dict(held)))
        rulings = super().count(asked, held)
        if self.failing:
            self.failing -= 1
            raise StoreBusy("the answer was lost", advice="ask again")
        return rulings


def run(path: Path, does: Callable[[Held, Tally], Awaitable[None]], **more: Any) -> None:
    async def all_of_it() -> None:
        turnstile = Held(path)
        tally = Tally(turnstile, **more)
        try:
            await does(turnstile, tally)
        finally:
            await tally.close()

    asyncio.run(all_of_it())


async def is_free(path: Path) -> bool:
    """Whether another gateway would be let in; it takes nothing."""
    other = FileTurnstile(path)
    try:
        return other.count([ONE], {}) == [YES]
    finally:
        other.close()


def test_what_comes_while_others_ask_is_asked_together(tmp_path: Path) -> None:
    async def does(turnstile: Held, tally: Tally) -> None:
        turnstile.open.clear()
        first = asyncio.create_task(tally.take([Demand(b"bob", 0, 100)]))
        await asyncio.sleep(0)
        others = [asyncio.create_task(tally.take([Demand(b"bob", 0, 100)])) for _ in range(20)]
        await asyncio.sleep(0)
        turnstile.open.set()
        assert await asyncio.gather(first, *others) == [YES] * 21
        assert [count for count, _ in turnstile.told] == [1, 20], "two questions"

    run(tmp_path / "counted", does)


def test_what_is_over_is_given_back_and_so_is_what_nobody_waited_for(tmp_path: Path) -> None:
    async def does(turnstile: Held, tally: Tally) -> None:
        assert await tally.take(ONE) == YES
        assert not await is_free(tmp_path / "counted")
        assert await tally.take(ONE) == Ruling(0)
        tally.give(ONE)
        while not await is_free(tmp_path / "counted"):
            await asyncio.sleep(0.01)
        for settled in (False, True):
            turnstile.open.clear()
            left = asyncio.create_task(tally.take(ONE))
            await asyncio.sleep(0.01)
            turnstile.open.set()
            while settled and not turnstile.told[-1][0]:
                await asyncio.sleep(0)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            while not await is_free(tmp_path / "counted"):
                await asyncio.sleep(0.01)

    run(tmp_path / "counted", does)


@pytest.mark.parametrize("opens", [False, True])
def test_an_answer_that_is_lost_holds_nothing(tmp_path: Path, opens: bool) -> None:
    async def does(turnstile: Held, tally: Tally) -> None:
        turnstile.failing = 1
        if opens:
            assert await tally.take(ONE) == YES
            tally.give(ONE)
        else:
            with pytest.raises(StoreBusy):
                await tally.take(ONE)
        while not await is_free(tmp_path / "counted"):
            await asyncio.sleep(0.01)

    run(tmp_path / "counted", does, opens=opens)


def test_a_gateway_that_ends_gives_back_all(tmp_path: Path) -> None:
    async def does(turnstile: Held, tally: Tally) -> None:
        assert await tally.take(ONE) == YES

    run(tmp_path / "counted", does)
    assert asyncio.run(is_free(tmp_path / "counted"))


def test_two_gateways_of_one_machine_let_in_what_one_would(gateway: Any, tmp_path: Path) -> None:
    held = threading.Event()

    def reply(sent: Any) -> str:
        held.wait(600)
        return "yes"

    file = str(tmp_path / "keys.json")
    _, secret = add_key(file, Key())
    made, upstream = str(tmp_path / "counted"), Upstream(otherwise=reply)
    limits = RequestBounds(per_key=8)
    both = [gateway(upstream=upstream, keys=file, limits=limits, db=made) for _ in range(2)]

    def ask(number: int, **headers: str) -> str:
        body = {"model": "m", "messages": [user(f"q{number}")]}
        url = f"{both[number % 2].url}/v1/chat/completions"
        answer = httpx2.post(url, json=body, headers={"x-api-key": secret, **headers}, timeout=600)
        return "" if answer.status_code == 200 else str(answer.json()["error"]["code"])

    with ThreadPoolExecutor(16) as pool:
        # An end user may take a quarter of what the key may.
        waiting = [pool.submit(ask, number, **{"x-kilburn-user": "ana"}) for number in range(4)]
        until(lambda: sum(one.done() for one in waiting) == 2)
        assert {one.result() for one in waiting if one.done()} == {"user_concurrency_limit_exceeded"}
        waiting += [pool.submit(ask, number) for number in range(4, 12)]
        until(lambda: sum(one.done() for one in waiting) == 4)
        held.set()
        said = [one.result() for one in waiting]
    assert said.count("") == 8
    assert said[4:].count("concurrency_limit_exceeded") == 2
    until(lambda: ask(0) == "")
    assert ask(1) == ""
