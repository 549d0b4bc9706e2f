"""After a forget no byte of the page is left in any of the store's files."""

from __future__ import annotations

import random
import signal
import string
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from kilburn.event import Act, Event
from kilburn.page import digest_of
from kilburn.store import Batch
from kilburn.stores.sqlite import Sqlite
from kilburn.testing.stores import batch_of, page_of


def word(chance: random.Random) -> str:
    """A word that shares no beginning or end with others, so that prefix compression cannot hide it."""
    return "".join(chance.choices(string.ascii_lowercase, k=20)) + "x"


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def traces(folder: Path, words: list[str]) -> list[str]:
    """The words of which any ten letters in a row are in any file."""
    files = everything(folder)
    return [one for one in words if any(one[at : at + 10].encode() in files for at in range(len(one) - 9))]


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "one by one"])
@pytest.mark.parametrize("later", [0, 60], ids=["at once", "after merges"])
def test_nothing_of_an_erased_page_is_left(tmp_path: Path, together: bool, later: int) -> None:
    chance = random.Random(3)
    secrets = {number: [word(chance) for _ in range(3)] for number in range(10, 90, 8)}
    texts = {
        number: " ".join(
            [*chance.choices(["the", "quick", "brown", "fox", "jumps", "over", "it"], k=30), *secrets.get(number, [])]
        )
        * (1 + number % 3)
        for number in range(1, 90)
    }
    with Sqlite(tmp_path / "k.db", synchronous="OFF") as store:
        info = store.process("s", time=1.0)
        assert info is not None
        head = 0
        for group in [texts] if together else [{number: text} for number, text in texts.items()]:
            store.commit(info.number, batch_of(head, group))
            head += 1
        for number in range(1000, 1000 + later):
            store.commit(info.number, batch_of(head, {number: f"later {number} " + word(chance)}))
            head += 1
        words = [secret for group in secrets.values() for secret in group]
        assert traces(tmp_path, words) == words
        store.commit(info.number, Batch(head=head, erase=list(secrets)))
        assert traces(tmp_path, words) == []
        assert store.findings() == []
        assert all(store.search(secret) == [] for secret in words)
    assert traces(tmp_path, words) == []


def test_labels_calls_extras_digests_and_reasons_go_too(tmp_path: Path) -> None:
    page = page_of(1, "canarytext " * 50, extra='{"canaryextra": 1}', label="canarylabel", call="canarycall")
    texts = {digest_of(text): text for text in ("canarytext " * 50, '{"canaryextra": 1}')}
    event = Event(
        number=1,
        act=Act.ADMIT,
        time=1.0,
        pages=(1,),
        why="canarywhy",
        data={"digest": page.digest, "label": ["canarylabel"], "kept": 7},
    )
    with Sqlite(tmp_path / "k.db") as store:
        info = store.process("s", time=1.0)
        assert info is not None
        store.commit(info.number, Batch(head=0, events=[event], pages=[page], texts=texts, index=[1]))
        store.commit(info.number, Batch(head=1, erase=[1]))
        files = everything(tmp_path)
        assert b"canary" not in files
        assert page.digest.encode() not in files
        assert bytes.fromhex(page.digest) not in files
        assert next(store.events(info.number)).data == {"digest": "", "label": [""], "kept": 7}


def test_a_reader_delays_the_scrubbing_of_the_log_but_not_the_erasure(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, busy_timeout=0.05) as store:
        info = store.process("s", time=1.0)
        assert info is not None
        store.commit(info.number, batch_of(0, {1: "canarytext alone"}))
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
        store.commit(info.number, Batch(head=1, erase=[1]))
        assert store.search("canarytext") == []
        reader.close()
        store.commit(info.number, batch_of(1, {2: "another"}))
        assert b"canarytext" not in everything(tmp_path)


FORGETFUL = """
import sys
from kilburn.store import Batch
from kilburn.stores.sqlite import Sqlite
store = Sqlite(sys.argv[1], busy_timeout=0.0)
store.commit(1, Batch(head=1, erase=[1]))
print("forgotten", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_next_writer_finishes_an_erasure(tmp_path: Path, end: str) -> None:
    """A reader kept the log when the page was forgotten, and the writer ended before it could cut it."""
    path = tmp_path / "k.db"
    with Sqlite(path) as store:
        info = store.process("s", time=1.0)
        assert info is not None
        store.commit(info.number, batch_of(0, {1: "canarytext alone", 2: "kept"}))
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
    with subprocess.Popen([sys.executable, "-c", FORGETFUL, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"forgotten\n"
        if end == "killed":
            writer.send_signal(signal.SIGKILL)
    reader.close()
    if end == "killed":
        assert b"canarytext" in everything(tmp_path), "or this test sees nothing"
    with Sqlite(path) as store:
        assert b"canarytext" not in everything(tmp_path)
        assert store.findings() == []
    assert b"canarytext" not in everything(tmp_path)


def test_an_erasure_is_tried_again_by_any_writer_and_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, busy_timeout=0.0) as store:
        info = store.process("s", time=1.0)
        assert info is not None
        store.commit(info.number, batch_of(0, {1: "canarytext alone"}))
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
        # This one would wait an hour for the reader.
        with Sqlite(path, busy_timeout=3600.0) as other:
            store.commit(info.number, Batch(head=1, erase=[1]))
            other.commit(info.number, batch_of(1, {2: "another"}))
            reader.close()
            other.commit(info.number, batch_of(2, {3: "and another"}))
            assert b"canarytext" not in everything(tmp_path)


def test_of_an_erased_process_neither_name_nor_user_nor_ledger_is_left(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "k.db") as store:
        for number in range(30):
            info = store.process(f"canaryname {number}", time=1.0, user=f"canaryuser {number}")
            assert info is not None
            note = Event(number=2, act=Act.NOTE, time=1.0, why="canarywhy", data={"canarykey": ["canarydata"]})
            store.commit(info.number, batch_of(0, {1: f"canarytext {number}"}))
            store.commit(info.number, Batch(head=1, events=[note]))
            store.commit(info.number, Batch(head=2, erase=[1]))
        kept = store.process("kept", time=1.0, user="keeper")
        assert kept is not None
        for info in store.processes():
            if info.name != "kept":
                store.erase(info.number)
        assert b"canary" not in everything(tmp_path)
        assert store.findings() == []
        assert store.processes()[-1] == kept
    assert b"canary" not in everything(tmp_path)
