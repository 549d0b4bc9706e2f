"""What async callers have: the store as an async context, and reads in a thread; and what stores and sessions look like."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreError, UnknownAddress
from kilburn.testing import check_laws


def said(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Pump {number} runs at {number} bar."}


def opened(path: Any, **options: Any) -> kilburn.Store:
    return kilburn.open(str(path), **{"window": 2000, "tokenizer": "chars/4", "embedder": None, **options})


async def test_a_session_is_read_as_it_is_written(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        session = store.session("s")
        for number in range(20):
            await session.aappend(said(number))
        assert await session.arecall("p7") == session.recall("p7") == "Pump 6 runs at 6 bar."
        assert await session.arender() == session.render()
        assert await session.arender("messages") == session.render("messages")
        hits = await session.asearch("pump 11", tokens=300, limit=2, record=False)
        assert [hit.text for hit in hits] == [hit.text for hit in session.search("pump 11", tokens=300, limit=2, record=False)]
        memory = store.memory("ana")
        memory.collection.add("Ana likes tea.")
        assert [hit.text for hit in await store.asearch("tea", where="facts", user="ana")] == ["Ana likes tea."]
        found = await store.asearch("pump 11", tokens=200, where="sessions", abstain=True)
        again = store.search("pump 11", tokens=200, where="sessions", abstain=True)
        assert [hit.text for hit in found] == [hit.text for hit in again]
        with pytest.raises(UnknownAddress):
            await session.arecall("p99")
        check_laws(session)
    with pytest.raises(StoreError):
        store.sessions()


async def test_leaving_it_closes_it_once_and_hands_on_what_was_raised(tmp_path: Path) -> None:
    store = opened(tmp_path / "a.db")

    async def broken() -> None:
        async with store:
            store.session("s").append(said(1))
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await broken()
    assert "closed" in repr(store)
    async with opened(tmp_path / "a.db") as store:
        assert len(store.session("s").contents.messages()) == 1
        store.close()


async def test_readers_beside_a_writer_and_one_that_is_given_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        session = store.session("s")
        await session.aappend(said(0))

        async def write() -> None:
            for number in range(1, 40):
                await session.aappend(said(number))
                await asyncio.sleep(0)

        async def read() -> None:
            for _ in range(40):
                assert (await session.arecall("p1")).startswith("Pump 0")
                assert await session.arender()
                assert await session.asearch("pump")

        await asyncio.gather(write(), read(), read())
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with session.lock:
                held.set()
                free.wait(600)

        holder = threading.Thread(target=hold)
        holder.start()
        assert await asyncio.to_thread(held.wait, 60)
        waiting = asyncio.create_task(session.arecall("p1"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        free.set()
        await asyncio.to_thread(holder.join)
        assert len(session.contents.messages()) == 40
        check_laws(session)


def test_stores_and_sessions_show_what_they_are_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = opened(path, tenant="works", policy="lru")
    session, memory = store.session("s"), store.memory("ana")
    session.append(said(1), {"role": "assistant", "content": "Secret words."})
    memory.collection.add("Secret words.")
    assert repr(session) == f"<Session 's' of tenant 'works': 2 pages, {session.prompts.use} of 2000 tokens>"
    assert repr(memory).startswith("<UserMemory '@memory/ana': ")
    assert repr(store.backend) == f"<Sqlite {str(path)!r} of tenant 'works'>"
    assert repr(store) == f"<Store on {store.backend!r}: window=2000, policy='lru', 1 sessions open>"
    branch = session.fork("Look aside.")
    assert repr(branch).startswith("<Session 's/b1' of tenant 'works': ")
    everything = [session, branch, memory, store, store.backend]
    assert not any("Secret" in repr(one) or "Look aside" in repr(one) for one in everything)
    session.forget("p2")
    store.close()
    assert repr(store) == f"<Store on {store.backend!r}: closed>"
    assert all(map(repr, everything))
    data = bytearray(path.read_bytes())
    data[200:] = b"x" * len(data[200:])
    path.write_bytes(data)
    assert all(map(repr, everything))


def test_a_store_in_memory_and_one_for_reading(tmp_path: Path) -> None:
    opened(tmp_path / "a.db").close()
    with opened(tmp_path / "a.db", readonly=True) as store:
        assert repr(store.backend).endswith("of tenant 'default', for reading>")
    with Store(Sqlite(":memory:", tenant="works"), kilburn.Budget(500), "fifo", tokenizer="chars/4") as made:
        made.session("s").append(said(1))
        assert repr(made.backend) == "<Sqlite ':memory:' of tenant 'works'>"
        assert repr(made.session("s")).startswith("<Session 's' of tenant 'works': 1 pages, ")
