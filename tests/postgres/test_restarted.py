"""A server that is killed, as by a power cut, while something is written that is not on its disk yet: nobody is told that it is
there."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from gateway.talk import user
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import MissingExtra, StoreUnavailable
from kilburn.gateway.app import Gateway, Settings, build
from kilburn.gateway.keys import Key
from kilburn.testing.upstream import Upstream, serving

pytestmark = pytest.mark.slow

LAZY = ("wal_writer_delay=10s", "autovacuum=off", "shared_buffers=32MB")
"""Nothing reaches the disk before somebody waits for it."""


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            made = OwnServer(Path(folder) / "s", LAZY)
        except MissingExtra as error:
            pytest.skip(f"no PostgreSQL here: {error}")
        Path(folder).chmod(0o711)
        made.start()
        yield made
        made.stop("immediate")


def cut(server: OwnServer) -> None:
    server.stop("immediate")
    server.start()


def texts(url: str, tenant: str) -> list[list[str]]:
    with kilburn.open(url, tenant=tenant, readonly=True, embedder=None, tokenizer="chars/4") as store:
        sessions = [store.session(info.name) for info in store.sessions()]
        return [[part.text for message in session.contents.originals() for part in message.parts] for session in sessions]


def test_what_a_server_lost_is_not_synced(server: OwnServer) -> None:
    with kilburn.open(server.url, tenant="direct", embedder=None, tokenizer="chars/4", durable=False) as store:
        session = store.session("s")
        session.append(user("one"))
        store.backend.sync(session.number)
        session.append(user("two"))
        cut(server)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="has lost"):
                store.backend.sync(session.number)
        store.backend.sync()
        other = store.session("t")
        other.append(user("three"))
        store.backend.sync(other.number)
        session.ledger.refresh()
        session.append(user("four"))
        store.backend.sync(session.number)
        with suppress(RuntimeError), session.contents.alone():
            session.append(user("five"))
            raise RuntimeError
        # What was undone is not lost.
        store.backend.sync(session.number)
        with session.contents.alone():
            session.append(user("six"))
        cut(server)
        with pytest.raises(StoreUnavailable, match="has lost"):
            store.backend.sync(session.number)
    assert texts(server.url, "direct") == [["one", "four"], ["three"]]


def test_what_is_done_by_hand_and_lost_by_the_server_is_not_said_to_be_done(server: OwnServer) -> None:
    with kilburn.open(server.url, tenant="hand", embedder=None, tokenizer="chars/4") as store:
        store.session("s").append(user("one"))
        number = store.session("s").number
    gateway = Gateway(
        Settings(db=server.url, tenant="hand", upstream="http://127.0.0.1:9/v1", tokenizer="chars/4", embedder=None)
    )
    key = Key(tenant="hand")

    def let_move(session: kilburn.Session) -> None:
        session.unpin("p1")
        cut(server)

    with pytest.raises(StoreUnavailable, match="has lost"):
        gateway.windows.change(key, "", "s", let_move)
    gateway.windows.change(key, "", "s", lambda session: session.unpin("p1"))
    asyncio.run(gateway.close())
    cut(server)
    with Postgres(server.url, tenant="hand", readonly=True) as backend:
        assert [state.pinned for _, state in backend.pages(number)] == [False]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_does_not_stand_without_the_question_that_a_server_lost(server: OwnServer, stream: bool) -> None:
    cuts, tenant = [True], f"stream-{stream}"

    def reply(sent: Any) -> str:
        if len(sent.body["messages"]) == 3 and cuts:
            cuts.pop()
            cut(server)
        return f"r{len(sent.body['messages'])}"

    with serving(Upstream(otherwise=reply)) as far:
        settings = Settings(db=server.url, tenant=tenant, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        with serving(build(settings)) as url:

            def ask(*messages: Any) -> httpx2.Response:
                body = {"model": "m", "messages": messages, "stream": stream}
                return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=600)

            begun = [user("q1")]
            ask(*begun)
            begun += [{"role": "assistant", "content": "r1"}, user("q3")]
            failed = ask(*begun)
            assert not cuts
            assert "cannot be reached; try again" in failed.text
            if not stream:
                assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
            assert ask(*begun).status_code == 200
    cut(server)
    assert texts(server.url, tenant) == [["q1", "r1", "q3", "r3"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_server_lost_is_asked_again_by_the_id_of_the_reply_before_it(server: OwnServer, stream: bool) -> None:
    """It is no branch. The server is away as well when the reply comes; the client of a stream is told so at its end."""
    cuts, ids, tenant = [True], list[str](), f"after-{stream}"

    def reply(sent: Any) -> str:
        question = re.findall(r"q\d", str(sent.body))[-1]
        if question == "q2" and cuts:
            cuts.pop()
            server.stop("immediate")
        return f"r-{question}"

    with serving(Upstream(otherwise=reply)) as far:
        settings = Settings(db=server.url, tenant=tenant, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        with serving(build(settings)) as url:

            def ask(question: str, *, stream: bool = False) -> httpx2.Response:
                body = {"model": "m", "input": question, "stream": stream}
                body |= {"previous_response_id": ids[-1]} if ids else {}
                return httpx2.post(f"{url}/v1/responses", json=body, timeout=600)

            ids.append(ask("q1").json()["id"])
            failed = ask("q2", stream=stream)
            assert "cannot be reached; try again" in failed.text
            assert failed.status_code == (200 if stream else 503)
            server.start()
            for question in ("q2", "q3"):
                ids.append(ask(question).json()["id"])
    assert texts(server.url, tenant) == [["q1", "r-q1", "q2", "r-q2", "q3", "r-q3"]]
