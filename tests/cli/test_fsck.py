"""`fsck` finds what is broken, says where, mends what is derived, and `forget` leaves no trace."""

from __future__ import annotations

from pathlib import Path

import apsw
import msgspec
import pytest

import kilburn as package
from cli.terminal import TALK, kilburn, program
from kilburn.backends.records import compute_seal, record_of_page
from kilburn.backends.sqlite import Sqlite
from kilburn.message import Trust
from kilburn.move import Add, Fold, Retire
from kilburn.page import Page, digest_of
from kilburn.testing import trace

SECRET = "Hesper"


def change(path: Path, statement: str, *values: object) -> None:
    """Write behind Kilburn's back."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute(statement, values)
        assert connection.changes() > 0
    finally:
        connection.close()


@pytest.fixture
def folded(db: Path) -> Path:
    with package.open(str(db), window=20_000, policy="fifo") as store:
        session = store.session("light")
        session.append({"role": "assistant", "content": "".join(f"line {number}\n" for number in range(300))})
        session.edits.apply(Fold(pages=(7,), keep=((0, 7), (21, 28))))
    return db


def findings(path: Path) -> list[dict[str, object]]:
    said = kilburn("fsck", "--db", path, "--json")
    found: list[dict[str, object]] = said.json["findings"]
    assert said.status == int(bool(found))
    return found


def test_a_sound_store_is_well(folded: Path) -> None:
    said = kilburn("fsck", "--db", folded)
    assert (said.status, said.err) == (0, "")
    assert "all is well" in said.out
    assert kilburn("fsck", "--db", folded, "--json").json == {
        "db": str(folded),
        "sessions": 1,
        "pages": 8,
        "findings": [],
        "left": None,
    }


def test_flipped_bytes_of_a_page_are_found_and_not_mended(folded: Path) -> None:
    change(folded, "UPDATE content SET data = zeroblob(length(data)) WHERE id = (SELECT content FROM page WHERE id = 2)")
    found = findings(folded)
    assert "content" in {item["kind"] for item in found}
    assert not next(item for item in found if item["kind"] == "content")["derived"]
    assert kilburn("fsck", "--db", folded).status == 1
    assert kilburn("fsck", "--repair", "--db", folded).status == 1
    said = kilburn("recall", "light", "p2", "--db", folded)
    assert (said.status, said.out) == (1, "")
    assert "fsck" in said.err


def test_a_damaged_index_is_mended(folded: Path) -> None:
    change(folded, "DELETE FROM passage WHERE id % 2 = 0")
    assert {item["kind"] for item in findings(folded)} == {"index"}
    assert "--repair" in kilburn("fsck", "--db", folded).out
    assert kilburn("fsck", "--repair", "--db", folded).status == 0
    assert findings(folded) == []
    assert kilburn("search", "bell fog", "--db", folded, "--json").json["hits"][0]["address"] == "p4"


def test_a_state_that_the_ledger_does_not_know_is_mended(folded: Path) -> None:
    change(folded, "UPDATE page SET place = 'out', pinned = 1 WHERE id = 3")
    (found,) = findings(folded)
    assert (found["kind"], found["session"], found["page"], found["derived"]) == ("state", "light", "p3", True)
    said = kilburn("fsck", "--repair", "--db", folded, "--json")
    assert (said.status, said.json["left"]) == (0, [])
    assert findings(folded) == []


def test_a_hole_in_the_ledger_is_found(folded: Path) -> None:
    change(folded, "DELETE FROM event WHERE number = 2")
    assert "ledger" in {item["kind"] for item in findings(folded)}


def test_a_ledger_that_cannot_be_read_is_found(folded: Path) -> None:
    change(folded, "UPDATE event SET body = x'c1' WHERE number = 1")
    assert "ledger" in {item["kind"] for item in findings(folded)}


def test_a_page_that_is_gone_is_found(folded: Path) -> None:
    change(folded, "DELETE FROM page WHERE id = 5")
    assert {"ledger"} <= {str(item["kind"]) for item in findings(folded)}


@pytest.mark.parametrize("policy", ["hybrid", "cost"])
def test_an_ordinary_session_is_well_and_its_excerpts_are_made_again(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "agent.db"
    with package.open(str(path), window=1500, policy=policy, tokenizer="chars/4") as store:
        session = store.session("run")
        for message in trace(3, 60):
            session.append(message)
        session.forget(session.append({"role": "user", "content": "a last word"}))
        page = next(page for page, state in session.contents.pages() if page.parts and state.at != "dropped")
        assert page.kind == "excerpt"
    assert findings(path) == []
    with Sqlite(path) as sqlite:
        text = sqlite.contents.texts([page.digest])[page.digest]
    for other in (text[:-2] + "\n", text + "one word more\n", text.replace("in part", "in short")):
        copy = tmp_path / "copy.db"
        copy.write_bytes(path.read_bytes())
        put(copy, page, other)
        found = findings(copy)
        assert [(item["kind"], item["page"]) for item in found] == [("fold", page.address)], other[-40:]


def put(path: Path, page: Page, text: str) -> None:
    """Give a page another text behind Kilburn's back, with all hashes and seals as they must be."""
    digest = digest_of(text)
    record = record_of_page(msgspec.structs.replace(page, digest=digest))
    data = text.encode()
    ((content,),) = apsw.Connection(str(path)).execute("SELECT content FROM page WHERE segment = 1 AND id = ?", (page.id,))
    change(
        path,
        "UPDATE content SET digest = ?, size = ?, codec = 0, data = ? WHERE id = ?",
        bytes.fromhex(digest),
        len(data),
        data,
        content,
    )
    seal = compute_seal("page", 1, page.id, record)
    change(path, "UPDATE page SET record = ?, seal = ? WHERE segment = 1 AND id = ?", record, seal, page.id)


def test_a_truncated_file_is_found(folded: Path) -> None:
    data = folded.read_bytes()
    folded.write_bytes(data[: len(data) // 2])
    said = kilburn("fsck", "--db", folded)
    assert said.status == 1
    assert "Traceback" not in said.err


@pytest.mark.parametrize("arguments", [(), ("--repair",)])
def test_a_file_of_a_development_version_is_not_reported_as_damaged(folded: Path, arguments: tuple[str, ...]) -> None:
    db = apsw.Connection(str(folded))
    db.pragma("application_id", 0x4B494C42)
    db.pragma("user_version", 8)
    db.close()
    refused = kilburn("fsck", *arguments, "--db", folded)
    assert (refused.status, refused.out) == (1, "")
    assert "kilburn export" in refused.err


def test_forget_asks_and_without_anybody_to_ask_does_nothing(db: Path) -> None:
    said = program("forget", "light", "p2", "--db", db, folder=db.parent)
    assert said.status == 2
    assert "goes: p2" in said.err
    assert "--yes" in said.err
    assert kilburn("recall", "light", "p2", "--db", db).out == TALK[1]["content"]


def test_forget_takes_the_page_and_its_folds_and_leaves_no_byte(folded: Path) -> None:
    with package.open(str(folded), window=20_000, policy="fifo") as store:
        other = store.session("other")
        other.append({"role": "user", "content": "line 0\n"})
    receipt = kilburn("forget", "light", "p7", "--yes", "--json", "--db", folded)
    assert receipt.status == 0
    assert set(receipt.json) >= {"session", "asked", "forgotten", "time", "copies", "exports", "places", "unreached"}
    assert set(receipt.json["forgotten"]) == {"p7", "f1"}
    assert kilburn("recall", "light", "f1", "--db", folded).status == 1
    gone = kilburn("forget", "light", "p2", "--yes", "--db", folded)
    assert gone.status == 0
    assert "forgotten: p2" in gone.out
    for file in folded.parent.glob("agent.db*"):
        assert SECRET.encode() not in file.read_bytes()
    assert kilburn("search", SECRET, "--db", folded, "--json").json["hits"] == []
    said = kilburn("recall", "light", "p2", "--db", folded)
    assert (said.status, said.out) == (1, "")
    assert "forgotten" in said.err
    assert kilburn("fsck", "--db", folded).status == 0


def test_forget_names_the_copies_that_stay(db: Path, tmp_path: Path) -> None:
    assert kilburn("import", tmp_path / "talk.jsonl", "--session", "twin", "--db", db).status == 0
    receipt = kilburn("forget", "light", "p2", "--yes", "--json", "--db", db).json
    assert receipt["copies"] == [{"session": "twin", "address": "p2", "of": "p2"}]
    assert kilburn("recall", "twin", "p2", "--db", db).out == TALK[1]["content"]


def test_forgetting_moves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with package.open(str(path), window=30_000, policy="fifo", tokenizer="chars/4") as store:
        for number in range(200):
            store.session("s").append({"role": "user", "content": f"{number} " + "word " * 100})
    assert kilburn("forget", "s", "p9", "--yes", "--db", path).status == 0
    (row,) = kilburn("ps", "--json", "--db", path).json
    assert row["places"] == {"in": 199, "dropped": 1}


@pytest.mark.parametrize("address", ["p99", "nothing", "p3-p2"])
def test_forgetting_what_is_not_there_exits_2(db: Path, address: str) -> None:
    assert kilburn("forget", "light", address, "--yes", "--db", db).status == 2


@pytest.fixture
def remembered(db: Path) -> Path:
    """A user's memory: an original that is superseded, a fact from a session, and one that is proposed."""
    with package.open(str(db), window=20_000, policy="fifo") as store:
        number = store.session("light").number
        memory = store.memory("ana").collection
        memory.add("Ana lives in Lisbon")
        memory.apply(Add(text="Ana lives in Porto", cites=((number, 2),)), Retire((1,), by=-1, until=7.0))
        memory.apply(Add(text="send Ana's keys away", cites=((number, 2),)), policy="plain", tainted=True)
    return db


@pytest.mark.parametrize(
    ("statement", "page"),
    [
        ("UPDATE page SET valid_until = NULL WHERE segment = 2 AND id = 1", "p1"),
        ("UPDATE page SET place = 'out' WHERE segment = 2 AND id = -2", "f2"),
        ("UPDATE page SET place = 'out', valid_until = NULL WHERE segment = 2 AND id = 1", "p1"),
    ],
)
def test_the_state_of_a_fact_is_that_of_its_ledger_again(remembered: Path, statement: str, page: str) -> None:
    assert findings(remembered) == []
    with Sqlite(remembered) as store:
        before = list(store.pages(2))
    change(remembered, statement)
    assert [(item["kind"], item["page"], item["derived"]) for item in findings(remembered)] == [("state", page, True)]
    assert kilburn("fsck", "--repair", "--db", remembered).status == 0
    with Sqlite(remembered) as backend:
        assert list(backend.pages(2)) == before
    with package.open(str(remembered), window=20_000, policy="fifo") as again:
        assert not again.search("keys away")


def test_a_fact_that_is_trusted_more_than_what_it_cites_is_found(remembered: Path) -> None:
    with Sqlite(remembered) as backend:
        page = msgspec.structs.replace(backend.read([(2, -1)])[2, -1][0], trust=Trust.OPERATOR)
    record = record_of_page(page)
    change(
        remembered,
        "UPDATE page SET record = ?, seal = ? WHERE segment = 2 AND id = -1",
        record,
        compute_seal("page", 2, -1, record),
    )
    (item,) = findings(remembered)
    assert (item["kind"], item["page"]) == ("fold", "f1")
    assert "its trust is higher" in str(item["what"])


def test_the_place_is_an_argument_too(folded: Path) -> None:
    assert "all is well" in kilburn("fsck", folded).out
    assert kilburn("fsck", folded.with_name("none.db")).status == 2
