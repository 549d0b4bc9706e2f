"""Three gateways over one database, and one key: they let in what one would, and know the same keys."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import psycopg
import pytest

from gateway.talk import user
from gateway.test_crash import Served, Setup
from gateway.test_serve import told_of_keys
from kilburn.errors import SpecError, StoreError
from kilburn.gateway.keys import Key, Keys, add_key, read_keys, revoke_key
from waiting import until

RATE = 12
"""Few enough that a machine on which each request takes seconds refuses some, too."""


class Held(Setup):
    """A provider that answers when it is told to."""

    def __init__(self, *given: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        super().__init__(*given)

    def reply(self, sent: Any) -> Any:
        self.open.wait(600)
        return "yes"


@pytest.fixture
def setup(tmp_path: Any, url: str) -> Any:
    made = Held(tmp_path / "a.db", url)
    yield made
    made.open.set()
    made.close()


def asked(served: Served, secret: str, words: str) -> httpx2.Response:
    body = {"model": "m", "messages": [user(words)]}
    headers = {"authorization": f"Bearer {secret}"}
    return httpx2.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=600)


def codes(answers: list[httpx2.Response]) -> list[str]:
    return ["" if answer.status_code == 200 else answer.json()["error"]["code"] for answer in answers]


@pytest.mark.slow
def test_three_gateways_let_in_what_one_would_and_know_the_same_keys(setup: Held, url: str) -> None:
    _, slow = add_key(url, Key(rate=RATE, note="few a minute"))
    many_key, many = add_key(url, Key(rate=60_000, note="few at once"))
    three = [setup.serve(more=("--keys", url, "--limit", "per_key=3")) for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        # In turns, so that no more than three are answered at once.
        began = time.monotonic()
        said = codes([asked(three[number % 3], slow, f"q{number}") for number in range(18)])
        let_in = said.count("")
        assert set(said) == {"", "rate_limit_exceeded"}
        assert RATE // 4 <= let_in <= RATE // 4 + (time.monotonic() - began) * RATE / 60

        setup.open.clear()
        waiting = [pool.submit(asked, three[number % 3], many, f"at once {number}") for number in range(8)]
        until(lambda: sum(one.done() for one in waiting) == 5)
        assert codes([one.result() for one in waiting if one.done()]) == ["concurrency_limit_exceeded"] * 5
        setup.open.set()
        assert sorted(codes([one.result() for one in waiting])) == [""] * 3 + ["concurrency_limit_exceeded"] * 5
        # What is over is given back without delay, but nobody waits for that.
        until(lambda: codes([asked(three[0], many, "and on")]) == [""])

    revoke_key(url, many_key.name)
    _, new = add_key(url, Key(note="made while they run"))
    for served in three:
        until(lambda served=served: asked(served, many, "gone").status_code == 401)
        until(lambda served=served: asked(served, new, "new").status_code == 200)


def test_keys_in_a_database_are_added_listed_changed_and_revoked(url: str) -> None:
    assert read_keys(url) == []
    made, secret = add_key(url, Key(tenant="acme", user="ana"))
    other, _ = add_key(url, Key(tenant="acme", rate=5))
    assert read_keys(url) == [made, other]
    keys = Keys(url)
    try:
        assert keys.find(secret.encode()) == made
        assert keys.find(b"kilburn-" + made.name.encode() + b"-" + b"x" * 43) is None
        gone = revoke_key(url, made.name)
        assert gone.revoked
        assert read_keys(url) == [gone, other]
        until(lambda: keys.find(secret.encode()) is None)
        assert keys.valid(made) is None
        assert keys.valid(other) == other
    finally:
        keys.close()
    with pytest.raises(SpecError, match="no key"):
        revoke_key(url, "00000000")


def test_a_database_without_a_key_is_told_at_the_start(url: str) -> None:
    told = told_of_keys(f"{url}&password=hunter2")
    assert "there is no key in postgresql://" in told
    assert "so no client is admitted: make one with `kilburn keys add`" in told
    assert "hunter2" not in told
    made, _ = add_key(url, Key())
    assert told_of_keys(url) == ""
    revoke_key(url, made.name)
    assert "is revoked, so no client is admitted" in told_of_keys(url)


def test_a_key_that_this_version_cannot_read_lets_nobody_in_and_stops_no_other(url: str) -> None:
    made, secret = add_key(url, Key(user="ana"))
    _, other = add_key(url, Key(user="bob"))
    with psycopg.connect(url) as connection:
        newer = "convert_to(replace(convert_from(body, 'UTF8'), '{', '{\"only_on_sundays\":true,'), 'UTF8')"
        connection.execute(f"UPDATE kilburn.key SET body = {newer} WHERE name = %s", (made.name,))
    keys = Keys(url)
    try:
        assert keys.find(secret.encode()) is None
        assert keys.find(other.encode()) is not None
    finally:
        keys.close()
    with pytest.raises(SpecError, match="cannot be read"):
        read_keys(url)
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM kilburn.key WHERE name <> %s", (made.name,))
    with pytest.raises(SpecError, match="none of the keys"):
        Keys(url)


def test_without_a_database_no_gateway_begins_with_its_keys() -> None:
    with pytest.raises(StoreError):
        Keys("postgresql://nobody@127.0.0.1:1/none")
