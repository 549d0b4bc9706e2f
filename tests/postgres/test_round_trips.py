"""How often a search and a commit wait for the server, and how many statements they are, whatever the size of the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

import kilburn
from kilburn.backends.postgres.keys import StoredKeys
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreUnavailable
from kilburn.kernel.store import Store
from waiting import until
from ways import Link, Way, way_to

PROMPT: dict[str, Any] = {"window": 4000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}


@pytest.fixture
def way(server: OwnServer, url: str) -> Iterator[Way]:
    with way_to(str(server.folder / ".s.PGSQL.5432"), url) as made:
        yield made


class Talk:
    """What goes over a way: a letter for each message of the client, and `<` for each of the server."""

    def __init__(self, way: Way) -> None:
        self._letters: list[str] = []
        way.sent = lambda message: self._letters.append(message[:1].decode())
        way.answered = self._answered

    def _answered(self, link: Link, message: bytes) -> bytes:
        self._letters.append("<")
        return message

    def clear(self) -> None:
        self._letters.clear()

    @property
    def statements(self) -> int:
        return self._letters.count("E")

    @property
    def turns(self) -> int:
        """How often the client has asked for answers, by a flush or a sync. Unlike the times at which answers arrive, this does
        not depend on the clock."""
        return sum([letter in "HS" for letter in self._letters])


def fill(store: Store, sessions: range) -> None:
    for number in sessions:
        messages = [f"remark {number} of ana about pottery and kilns", f"answer {number}: glaze {number * 7} suits pottery"]
        store.session(f"s{number}").append(*({"role": "user", "content": text} for text in messages))


def test_a_search_of_a_whole_tenant_waits_three_times_whatever_its_size(way: Way) -> None:
    """The end of its transaction is a fourth message, for whose answer it does not wait."""
    talk, counts = Talk(way), []
    with kilburn.open(way.url, **PROMPT) as store:
        for sessions in (range(5), range(5, 60)):
            fill(store, sessions)
            for query, limit in (("pottery", 20), ("which glaze suits pottery", None)):
                talk.clear()
                hits = store.search(query, tokens=8000, limit=limit)
                counts.append((len(hits) > 5, talk.statements <= 6, talk.turns <= 4))
    assert counts == [(True, True, True)] * 4


def test_a_question_waits_seven_times_whatever_the_size_of_its_session(way: Way) -> None:
    """Once for the session's head, three times for the search and twice for the commit; and the end of the search's transaction
    may be answered by itself."""
    talk, counts = Talk(way), []
    facts = {"Zeynep": "cobalt", "Odin": "celadon", "Wilma": "shino", "Pavel": "tenmoku"}
    with kilburn.open(way.url, **PROMPT | {"policy": "hybrid"}) as store:
        session = store.session("s")
        session.append(*({"role": "user", "content": f"The glaze of {name} is {glaze}."} for name, glaze in facts.items()))
        for name, pages in zip(facts, (60, 1, 240, 1), strict=True):
            texts = [f"remark {number} about kilns and wood, {'and more ' * 40}" for number in range(pages)]
            session.append(*({"role": "assistant", "content": text} for text in texts))
            talk.clear()
            session.append({"role": "user", "content": f"What is the glaze of {name}?"})
            counts.append((talk.statements <= 16, talk.turns <= 7))
            assert facts[name] in str(session.render())
            session.append({"role": "assistant", "content": "I see."})
    assert counts == [(True, True)] * 4


def test_what_a_search_reads_ahead_is_what_it_finds_without(url: str) -> None:
    with kilburn.open(url, **PROMPT) as store:
        fill(store, range(30))
        store.session("s3").append({"role": "user", "content": "pottery " * 900})
        backend = store.backend
        assert isinstance(backend, Postgres)
        whole = backend.words.search("pottery glaze", limit=60)
        keys = sorted({(hit.segment, hit.page) for hit in whole})
        read = backend.read(keys)
        beside = backend.words.entries(keys)
        digests = {page.digest for page, _ in read.values()}
        texts = backend.contents.texts(digests)
        for ahead in (True, False):
            with backend.at_once(ahead=ahead):
                assert backend.words.search("pottery glaze", limit=60) == whole
                assert (backend.read(keys), backend.skim(keys)) == (read, read)
                assert backend.words.entries(keys) == beside
                assert backend.contents.texts(digests) == texts
                assert backend.read([(1, 999)]) == {}


def test_a_snapshot_sees_nothing_that_others_write_and_ends(url: str) -> None:
    with kilburn.open(url, **PROMPT) as store, Postgres(url) as other:
        fill(store, range(2))
        backend = store.backend
        assert isinstance(backend, Postgres)
        with backend.at_once(ahead=True):
            before = backend.segments()
            with ExitStack() as writing:
                more = writing.enter_context(kilburn.open(url, **PROMPT))
                more.session("s0").append({"role": "user", "content": "pottery, later"})
                assert len(other.words.search("later")) == 1
            assert backend.words.search("later") == []
            assert backend.segments() == before
        assert len(backend.words.search("later")) == 1


@pytest.mark.slow
def test_a_connection_that_breaks_at_any_step_of_a_search(way: Way) -> None:
    """It is made anew if nothing was read yet; later the search says so, and the next one finds what there is."""
    with kilburn.open(way.url, **PROMPT) as store:
        fill(store, range(3))
        whole = [hit.text for hit in store.search("pottery")]
        outcomes = []
        for step in range(1, 40):
            reached = False

            def cut(link: Link, number: int, step: int = step) -> None:
                nonlocal reached
                if number == step and not reached:
                    reached = True
                    link.cut()

            way.count()
            way.asked = cut
            try:
                assert [hit.text for hit in store.search("pottery")] == whole
                outcomes.append("found")
            except StoreUnavailable:
                outcomes.append("unavailable")
            way.asked = lambda link, number: None
            assert [hit.text for hit in store.search("pottery")] == whole
            if not reached:
                break
        assert not reached
        assert outcomes[0] == outcomes[-1] == "found"
        assert "unavailable" in outcomes


def test_a_change_of_keys_is_told_and_not_asked_for(way: Way, url: str) -> None:
    talk, ended, known = Talk(way), threading.Event(), list[list[str]]()
    with closing(StoredKeys(way.url)) as stored, closing(StoredKeys(url)) as other:

        def watch() -> None:
            for _ in stored.changes(ended, look=3600.0):
                known.append([name for _, name, _ in stored.since(0)])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            until(lambda: known == [[]])
            talk.clear()
            for number in range(1, 4):
                with other.changing() as bodies:
                    bodies[f"key {number}"] = b"{}"
                until(lambda number=number: len(known[-1]) == number)  # type: ignore[misc]
            assert talk.statements == 2 * 3
        finally:
            ended.set()
            watcher.join()
