"""Whatever is damaged, a reader sees exactly what was written or a typed error, and `fsck` finds it (see damage.py)."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import apsw
import pytest

import kilburn
from backends.damage import read, run
from cli.terminal import kilburn as command
from kernel.talk import user
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import StoreCorrupt, StoreError
from kilburn.event import Act, Event
from kilburn.search.found import DamageWarning
from kilburn.testing.stores import batch_of

SEED = time.time_ns() % 1_000_000


def change(path: Path, statement: str, *values: object) -> None:
    """Write behind Kilburn's back."""
    db = apsw.Connection(str(path))
    try:
        db.execute(statement, values)
        assert db.changes() > 0
    finally:
        db.close()


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Two sessions, `a` and `b`, each with an observation in its ledger."""
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4") as store:
        for name in ("a", "b"):
            for number in range(8):
                store.session(name).append(user(f"{name} says {number} " + "word " * 50))
            store.session(name).recall("p2")
    return path


@pytest.mark.slow
def test_damage_of_every_kind(tmp_path: Path) -> None:
    told: list[str] = []
    failed, seen = run(12, SEED, tmp_path, told.append)
    assert not failed, "\n".join(told)
    assert seen["unreadable"] + seen["found"] > 4


@pytest.mark.parametrize("seed", [1102, 1534, 1541, 2195, 11637])
def test_damage_that_once_broke_a_promise(tmp_path: Path, seed: int) -> None:
    """A passage whose place is no number; an event whose act was swapped with an observation's; a citation by no page."""
    told: list[str] = []
    assert run(1, seed, tmp_path, told.append)[0] == 0, "\n".join(told)


@pytest.mark.parametrize("field", ["trust", "tokens"])
def test_no_figure_of_a_page_changes_silently(talk: Path, field: str) -> None:
    change(
        talk,
        "UPDATE page SET record = CAST(replace(CAST(record AS TEXT), ?, ?) AS BLOB) WHERE segment = 1 AND id = 3",
        "says",
        "said",
    )
    db = apsw.Connection(str(talk))
    ((record,),) = db.execute("SELECT record FROM page WHERE segment = 1 AND id = 3")
    db.close()
    at = record.index(field.encode()) + len(field)
    flipped = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
    change(talk, "UPDATE page SET record = ? WHERE segment = 1 AND id = 3", flipped)
    error = read(talk, "a")
    assert isinstance(error, StoreCorrupt)
    assert "p3" in str(error)
    assert "'a'" in str(error)
    assert "kilburn fsck" in str(error)
    assert isinstance(read(talk, "b"), dict)
    assert command("fsck", "--db", talk).status == 1


def test_a_damaged_session_blocks_no_other(talk: Path, tmp_path: Path) -> None:
    change(talk, "UPDATE page SET record = x'c1' WHERE segment = 1 AND id = 3")
    rows = {row["session"]: row for row in command("ps", "--db", talk, "--json").json}
    assert "p3" in rows["a"]["damaged"]
    assert (rows["b"]["damaged"], rows["b"]["pages"]) == (None, 8)
    assert "b" in command("top", "--once", "--db", talk).out
    hits = command("search", "says", "--db", talk, "--json")
    assert {hit["session"] for hit in hits.json["hits"]} == {"b"}
    assert "'a'" in hits.err
    out = tmp_path / "all.jsonl"
    assert command("export", "--no-note", "--db", talk, "--out", out).status == 1
    assert out.read_text().count('"session":"b"') == 1
    assert '"session":"a"' not in out.read_text()
    assert command("forget", "b", "p1", "--yes", "--db", talk).status == 0


@pytest.mark.parametrize("page", range(1, 9))
def test_a_search_leaves_out_a_process_that_turns_out_damaged_beside_a_hit(talk: Path, page: int) -> None:
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        whole = [(hit.session, hit.address, hit.text) for hit in store.search("4", 4000)]
    matches = {address for session, address, _ in whole if session == "a"}
    change(talk, "UPDATE page SET record = x'c1' WHERE segment = 1 AND id = ?", page)
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            hits = [(hit.session, hit.address, hit.text) for hit in store.search("4", 4000)]
        # By words alone, a page beside a hit is not read; a page that matches is.
        damaged = any(isinstance(one.message, DamageWarning) for one in told)
        assert damaged or f"p{page}" not in matches
        assert hits == [one for one in whole if one[0] == "b" or not damaged]
        with pytest.warns(DamageWarning, match="'a'"):
            recalled = store.search("4", 4000, abstain=True)
        assert {hit.session for hit in (*recalled, *recalled.withheld)} == {"b"}


def test_a_session_that_cannot_be_opened_is_quarantined_and_its_name_is_free(talk: Path) -> None:
    before = read(talk, "b")
    counts = "SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM event), (SELECT count(*) FROM content)"
    rows = apsw.Connection(str(talk)).execute(counts).fetchall()
    change(talk, "UPDATE page SET record = x'c1' WHERE segment = 1 AND id = 3")
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store, pytest.raises(StoreCorrupt, match="fsck"):
        store.session("a")
    said = command("fsck", "--repair", "--db", talk, "--json")
    assert (said.status, said.json["left"]) == (0, [])
    (name,) = said.json["quarantined"]
    assert "quarantined" in name
    assert command("fsck", "--db", talk).status == 0
    assert read(talk, "b") == before
    assert apsw.Connection(str(talk)).execute(counts).fetchall() == rows
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append(user("begun anew"))
        with pytest.raises(StoreCorrupt, match="quarantined"):
            store.session(name)


def test_an_observation_that_cannot_be_read_leaves_a_note(talk: Path) -> None:
    before = read(talk, "a")
    assert isinstance(before, dict)
    ((number, _),) = apsw.Connection(str(talk)).execute("SELECT number, body FROM event WHERE segment = 1 AND act = 'fault'")
    change(talk, "UPDATE event SET body = x'c1' WHERE segment = 1 AND number = ?", number)
    assert isinstance(read(talk, "a"), StoreCorrupt)
    found = command("fsck", "--db", talk, "--json").json["findings"]
    assert [(item["kind"], item["session"], item["derived"]) for item in found] == [("ledger", "a", True)]
    said = command("fsck", "--repair", "--db", talk, "--json")
    assert (said.status, said.json["left"]) == (0, [])
    after = read(talk, "a")
    assert isinstance(after, dict)
    assert [after[part] for part in ("pages", "messages", "texts", "prompt")] == [
        before[part] for part in ("pages", "messages", "texts", "prompt")
    ]
    assert after["events"][number - 1].data == {"quarantined": "fault"}
    assert apsw.Connection(str(talk)).execute("SELECT record FROM quarantine").get == b"\xc1"


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (Act.SHIP, Event(number=1, act=Act.SHIP, time=1.0)),
        (Act.EVICT, Event(number=1, act=Act.EVICT, time=1.0, pages=(99,), data={"to": {"out": [99]}})),
        (Act.FOLD, Event(number=1, act=Act.FOLD, time=1.0, data={"fold": [1]})),
        (Act.PIN, Event(number=1, act=Act.PIN, time=1.0, pages=(7,))),
    ],
    ids=lambda value: str(value) if isinstance(value, Act) else "",
)
def test_an_event_that_makes_no_sense_is_named_and_found(tmp_path: Path, act: Act, event: Event) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path) as backend:
        for name in ("a", "b"):
            info = backend.segment(name, time=1.0)
            assert info is not None
            batch = batch_of(0, {})
            batch.events = [event] if name == "a" else []
            backend.commit(info.number, batch)
    error = read(path, "a")
    assert isinstance(error, StoreCorrupt)
    assert f"event 1 of session 'a' ({act})" in str(error)
    assert isinstance(read(path, "b"), dict)
    assert command("fsck", "--db", path).status == 1
    assert command("fsck", "--repair", "--db", path).status == 0
    assert isinstance(read(path, "b"), dict)


@pytest.mark.parametrize("prompt", [10_000_000, 10**18, 0, 2**63])
def test_an_absurd_report_of_a_provider_leaves_a_session_readable(talk: Path, prompt: int) -> None:
    with Sqlite(talk) as backend:
        info = backend.segment("a", time=1.0)
        assert info is not None
        usage = Event(number=info.head + 1, act=Act.USAGE, time=1.0, data={"counted": 300, "prompt": prompt})
        ship = Event(number=info.head + 2, act=Act.SHIP, time=1.0, tokens=5, data={"again": 0, "window": 0})
        batch = batch_of(info.head, {})
        batch.events = [usage, ship]
        backend.commit(info.number, batch)
    for verb in (["ps"], ["top", "--once"], ["recall", "a", "p1"], ["fsck"], ["export", "a", "--no-note"], ["stats", "a"]):
        assert command(*verb, "--db", talk).status == 0, verb


@pytest.mark.parametrize(
    "change_of",
    [{"time": True}, {"time": float("nan")}, {"time": 10**400}, {"tokens": 2**70}, {"label": "\ud800"}, {"trust": 9}],
    ids=lambda change: next(iter(change)),
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, change_of: dict[str, object]) -> None:
    import msgspec

    with Sqlite(tmp_path / "k.db") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        batch = batch_of(0, {1: "text"})
        batch.pages = [msgspec.structs.replace(batch.pages[0], **change_of)]
        with pytest.raises(StoreError, match="read again"):
            backend.commit(info.number, batch)
        assert list(backend.pages(info.number)) == []


def test_a_damaged_name_never_lets_a_session_begin_anew(talk: Path) -> None:
    change(talk, "UPDATE segment SET name = 'q' WHERE name = 'a'")
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        with pytest.raises(StoreCorrupt, match="may be here"):
            store.session("a")
        assert store.session("b").recall("p1")
    assert command("fsck", "--repair", "--db", talk).status == 0
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        store.session("a")


def test_a_lost_session_is_missed(talk: Path) -> None:
    change(talk, "DELETE FROM segment WHERE name = 'a'")
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4", readonly=True) as store:
        assert [bool(info.damaged) for info in store.sessions()] == [False, True]
    found = command("fsck", "--db", talk, "--json").json["findings"]
    assert {item["kind"] for item in found} >= {"session", "orphan"}
    assert isinstance(read(talk, "b"), dict)


def test_a_lost_session_is_not_begun_anew(talk: Path) -> None:
    change(talk, "DELETE FROM segment WHERE name = 'a'")
    with Sqlite(talk) as backend, pytest.raises(StoreCorrupt, match="may be here already"):
        backend.segment("a", time=1.0)


def test_forgetting_takes_what_is_quarantined_too(talk: Path) -> None:
    change(talk, "INSERT INTO quarantine(segment, kind, number, record) VALUES(1, 'event', 3, x'c1')")
    with kilburn.open(str(talk), window=900, policy="fifo", tokenizer="chars/4") as store:
        store.session("a").forget("p3")
    assert apsw.Connection(str(talk)).execute("SELECT record FROM quarantine").get is None


def test_a_session_that_was_quarantined_can_be_forgotten(talk: Path) -> None:
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append(user("canarysecret of its own"))
        store.session("b").append(user("both said this"))
        store.session("a").append(user("both said this"))
    change(talk, "UPDATE page SET record = x'c1' WHERE segment = 1 AND id = 3")
    assert command("fsck", "--repair", "--db", talk).status == 0
    before = read(talk, "b")
    name = "a (quarantined, 1)"
    said = command("forget", name, "p1", "--yes", "--db", talk)
    assert said.status != 0
    assert "--all" in said.err
    assert command("forget", name, "--all", "--db", talk).status != 0
    assert command("forget", "b", "--all", "--yes", "--db", talk).status != 0
    assert b"canarysecret" in talk.read_bytes()
    assert command("forget", name, "--all", "--yes", "--db", talk).status == 0
    left = b"".join(path.read_bytes() for path in talk.parent.iterdir())
    for gone in (b"canarysecret", b"canarys", b"a says", name.encode()):
        assert gone not in left
    assert b"both said this" in left
    assert read(talk, "b") == before
    assert command("fsck", "--db", talk).status == 0
    assert [row["session"] for row in command("ps", "--db", talk, "--json").json] == ["b"]


def test_lost_settings_of_the_index_are_found_and_set_again(talk: Path) -> None:
    change(talk, "DELETE FROM text_1_config WHERE k = 'secure-delete'")
    found = command("fsck", "--db", talk, "--json").json["findings"]
    assert [(item["kind"], item["derived"]) for item in found] == [("index", True)]
    with Sqlite(talk) as backend:
        assert inspect_store(backend) == []


@pytest.mark.parametrize("statement", ["DELETE FROM text_1_config WHERE k = 'version'", "DELETE FROM text_1_data"])
def test_an_index_that_fts5_refuses_is_made_anew(talk: Path, statement: str) -> None:
    before = read(talk, "a")
    change(talk, statement)
    assert command("fsck", "--db", talk).status == 1
    assert command("fsck", "--repair", "--db", talk).status == 0
    assert command("fsck", "--db", talk).status == 0
    assert read(talk, "a") == before
    assert command("search", "says", "--db", talk, "--json").json["hits"]


@pytest.mark.parametrize("segment", [1, 77])
def test_passages_of_no_page_are_found_and_removed(talk: Path, segment: int) -> None:
    db = apsw.Connection(str(talk))
    ((lowest,),) = db.execute("SELECT min(id) FROM passage WHERE id >> 32 = 1")
    # The next text of the same length would get this number.
    place = (segment << 32) | ((lowest & 0xFFFFFFFF) - 32)
    db.execute("INSERT INTO passage VALUES(?, 99, 0, 5)", (place,))
    db.close()
    found = command("fsck", "--db", talk, "--json").json["findings"]
    assert [(item["kind"], item["derived"]) for item in found] == [("index", True)]
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        if segment == 1:
            with pytest.raises(StoreCorrupt, match="fsck --repair"):
                store.session("a").append(user("a says 8 " + "word " * 50))
    assert command("fsck", "--repair", "--db", talk).status == 0
    with kilburn.open(str(talk), policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append(user("a says 8 " + "word " * 50))


@pytest.mark.parametrize("statement", ["UPDATE tenant SET seal = x'00'", "UPDATE tenant SET name = 'q' WHERE id = 1"])
def test_a_damaged_row_of_a_tenant_is_restored(talk: Path, statement: str) -> None:
    before = read(talk, "a")
    change(talk, statement)
    error = read(talk, "a")
    assert isinstance(error, StoreCorrupt)
    assert "fsck --repair" in str(error)
    assert "other sessions" not in str(error)
    assert command("fsck", "--db", talk).status == 1
    assert command("fsck", "--repair", "--db", talk).status == 0
    assert read(talk, "a") == before
