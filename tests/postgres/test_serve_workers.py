"""Several workers over one database: what they serve, how many connections they have, and how often they ask it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx2
import psycopg
import pytest

import kilburn
from gateway.crew import REQUESTS, Crew, Talker, check_talks, reply
from gateway.talk import said, user
from kilburn.backends.counting import Demand
from kilburn.backends.gateways import open_keys, open_turnstile
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import SpecError
from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import Upstream, serving
from waiting import until

pytestmark = pytest.mark.slow


def test_a_rolling_restart_of_three_workers_loses_no_request(url: str, tmp_path: Path) -> None:
    place = f"{url}&connections=2"
    with serving(Upstream(otherwise=reply)) as far:
        crew = Crew(tmp_path, far, place, workers=3)
        try:
            talkers = [Talker(crew.url, f"talk{number}", keeps=number == 0) for number in range(3)]
            for talker in talkers:
                talker.start()
            until(lambda: all(len(talker.talk) > 4 or talker.failed for talker in talkers))
            crew.restart()
            check_talks(crew, url, talkers)
            asked = sum(len(talker.talk) // 2 for talker in talkers)
            assert crew.series()[REQUESTS] == asked
            workers = crew.workers
            crew.process.kill()
            # They end by themselves: nobody else would end them.
            until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
        finally:
            crew.close()


def test_a_process_has_as_many_connections_as_its_url_says(url: str) -> None:
    with kilburn.open(f"{url}&connections=2", embedder=None, tokenizer="chars/4") as store, psycopg.connect(url) as watching:
        store.session("s").append(user("one"))
        many: list[int] = []
        threads = [threading.Thread(target=lambda: [store.sessions() for _ in range(20)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            many += [count for (count,) in watching.execute(asked).fetchall()]
            watching.rollback()
        assert 1 <= max(many) <= 2
    with pytest.raises(SpecError, match="connections"):
        kilburn.open(f"{url}&connections=many")


def test_what_counts_and_the_keys_are_among_as_many_connections_as_the_url_says(url: str) -> None:
    """Before this, they had eight of their own as soon as the URL said a number."""
    place = f"{url}&connections=2"
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with (
        Postgres(place) as backend,
        closing(open_turnstile(place)) as turnstile,
        closing(open_keys(place)) as keys,
        psycopg.connect(url, autocommit=True) as watching,
    ):
        every: list[Callable[[], object]] = [
            backend.segments,
            lambda: turnstile.count([[Demand(b"a", 0, 1000)]], {}),
            lambda: keys.since(0),
        ]
        threads = [threading.Thread(target=lambda do=do: [do() for _ in range(20)]) for do in every for _ in range(4)]
        for thread in threads:
            thread.start()
        many: list[int] = []
        while any(thread.is_alive() for thread in threads):
            many += [count for (count,) in watching.execute(asked).fetchall()]
        assert 1 <= max(many) <= 2


def told_by(server: OwnServer, url: str) -> Callable[[], list[str]]:
    """What the server says of statements in this database from now on."""
    name = re.findall(r"/(\w+)\?", url)[0]
    with psycopg.connect(url, autocommit=True) as connection:
        for told in ("log_statement = 'all'", "log_min_messages = 'log'"):
            connection.execute(f"ALTER DATABASE {name} SET {told}")  # type: ignore[arg-type]
    log = server.folder / "log"

    def asked() -> list[str]:
        return [line for line in log.read_text().splitlines() if re.search(r"(execute \S+|statement): |[Pp]arameters: ", line)]

    return asked


def test_a_request_is_two_transactions_and_the_last_one_is_on_the_disk(url: str, server: OwnServer) -> None:
    asked = told_by(server, url)
    with serving(Upstream(otherwise="Noted.")) as far:
        settings = Settings(db=url, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        with serving(build(settings)) as near, httpx2.Client(timeout=600) as client:
            talk = []
            for number in range(6):
                talk.append(user(f"question {number}"))
                before = len(asked())
                answer = client.post(f"{near}/v1/chat/completions", json={"model": "m", "messages": talk})
                talk.append(said(answer.json()["choices"][0]["message"]["content"]))
            lines = asked()[before:]
    told = "\n".join(lines)
    assert len(re.findall(r"(?:execute \S+|statement): BEGIN", told)) == 2, told
    assert len(re.findall(r"(?:execute \S+|statement): ", told)) <= 30, told
    # Only the second one waits for the disk, and there is no third that does nothing else.
    waits = ["'on'" in line for line in lines if "arameters: " in line and "'kilburn_rows'" in line]
    assert waits == [False, True], told


def test_a_new_conversation_is_eight_transactions_of_which_two_write(url: str, server: OwnServer) -> None:
    """Its session begins with what is asked: there is none with nothing in it."""
    asked = told_by(server, url)
    with serving(Upstream(otherwise="Noted.")) as far:
        settings = Settings(db=url, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        with serving(build(settings)) as near, httpx2.Client(timeout=600) as client:
            # The first one after a start also looks for what the client may have compacted.
            for number in range(3):
                before = len(asked())
                body = {"model": "m", "messages": [user(f"conversation {number}")]}
                assert client.post(f"{near}/v1/chat/completions", json=body).status_code == 200
            lines = asked()[before:]
    told = "\n".join(lines)
    begun = re.findall(r"(?:execute \S+|statement): BEGIN ISOLATION LEVEL (REPEATABLE READ READ ONLY|READ COMMITTED)", told)
    assert len(begun) <= 8, told
    assert begun.count("READ COMMITTED") == 2, told
    waits = ["'on'" in line for line in lines if "parameters: " in line.lower() and "'kilburn_rows'" in line]
    assert sum(waits) == 1, told
    assert waits[-1], told
