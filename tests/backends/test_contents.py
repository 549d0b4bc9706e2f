"""Texts that are stored as pieces of others: who shares them, and what is left when their sources go."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

import kilburn
from kilburn.backend import Batch
from kilburn.backends.codec import SPLICED
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.move import Fold
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of

LONG = "\n".join(f"line {number} of what was said at length, and of nothing else" for number in range(200))


def opened(path: Path) -> kilburn.Store:
    return kilburn.open(str(path), window=8000, policy="fifo", tokenizer="chars/4", embedder=None)


def excerpt(session: kilburn.Session, text: str = LONG) -> str:
    """The text of an excerpt of a message that the session has just been told."""
    said = [("user", "Tell me."), ("assistant", text), ("user", "I see.")]
    session.append(*[{"role": role, "content": words} for role, words in said])
    (address,) = session.edits.apply(Fold((session.window.last - 1,), keep=((0, 3000), (5000, 8000))))
    return str(session.recall(address))


def codecs(path: Path, text: str) -> list[int]:
    with apsw.Connection(str(path)) as db:
        found = db.execute("SELECT codec FROM content WHERE digest = ?", (bytes.fromhex(digest_of(text)),)).fetchall()
    return [codec for (codec,) in found]


def test_an_excerpt_is_stored_as_pieces_and_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with opened(path) as store:
        text = excerpt(store.session("s"))
    assert codecs(path, text) == [SPLICED]
    with opened(path) as store:
        assert str(store.session("s").recall("f1")) == text


def test_a_message_that_says_what_an_excerpt_says_outlives_it(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with opened(path) as store:
        text = excerpt(store.session("s"))
        other = store.session("other")
        other.append({"role": "user", "content": text})
        assert codecs(path, text) != [SPLICED]
        assert "f1" in store.session("s").forget("p2")
        assert str(other.recall("p1")) == text
        assert inspect_store(store.backend) == []  # type: ignore[attr-defined]
    with opened(path) as store:
        assert str(store.session("other").recall("p1")) == text


def test_an_excerpt_that_says_what_a_message_says_is_that_text(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with opened(path) as store:
        text = excerpt(store.session("s"))
        store.session("s").forget("p2")
        store.session("other").append({"role": "user", "content": text})
        assert excerpt(store.session("again")) == text
        store.session("again").forget("p2")
        assert str(store.session("other").recall("p1")) == text


@pytest.mark.parametrize("first", ["a", "b"])
def test_equal_excerpts_of_two_sessions_go_one_by_one(tmp_path: Path, first: str) -> None:
    path = tmp_path / "k.db"
    with opened(path) as store:
        assert excerpt(store.session("a")) == excerpt(store.session("b"))
        store.session(first).forget("p2")
        left = store.session("b" if first == "a" else "a")
        assert str(left.recall("f1")).startswith("[p2 in part:]")
        assert inspect_store(store.backend) == []  # type: ignore[attr-defined]


def test_equal_excerpts_of_other_texts_are_stored_whole(tmp_path: Path) -> None:
    """The kept spans are the same, and the texts that they are from are not."""
    path = tmp_path / "k.db"
    with opened(path) as store:
        text = excerpt(store.session("a"))
        assert excerpt(store.session("b"), LONG[:8000] + "Another end of it." + LONG[8018:]) == text
        assert codecs(path, text) != [SPLICED]
        store.session("a").forget("p2")
        assert str(store.session("b").recall("f1")) == text
        assert inspect_store(store.backend) == []  # type: ignore[attr-defined]


def test_a_lost_source_is_an_error_and_no_other_text(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with opened(path) as store:
        excerpt(store.session("s"))
    with apsw.Connection(str(path)) as db:
        db.execute("PRAGMA foreign_keys = 0")
        db.execute("DELETE FROM content WHERE digest = ?", (bytes.fromhex(digest_of(LONG)),))
    with opened(path) as store:
        with pytest.raises(kilburn.KilburnError, match="missing"):
            store.session("s").recall("f1")
        assert "content" in {finding.kind for finding in inspect_store(store.backend)}  # type: ignore[attr-defined]


def test_pieces_that_do_not_make_the_text_are_refused(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "k.db") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        with pytest.raises(kilburn.KilburnError):
            backend.commit(info.number, Batch(head=0, pages=batch_of(0, {1: "text"}).pages))
        assert inspect_store(backend) == []
