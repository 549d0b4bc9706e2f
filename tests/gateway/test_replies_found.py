"""A client goes on from a reply by its id, and another gateway has answered: what finding it costs, and that it is found."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

import kilburn
from backends.test_damage import change
from cli.terminal import kilburn as run
from gateway.test_history import assistant, take, user
from kernel.test_flat import calls
from kilburn.backends.places import open_backend
from kilburn.event import Act, Event
from kilburn.gateway.history import Histories, _key
from kilburn.gateway.responses import ResponsesForm
from kilburn.testing.stores import batch_of
from kilburn.wire.form import parse

RESPONSES = ResponsesForm()


def opened(place: str) -> kilburn.Store:
    return kilburn.open(place, window=100_000, policy="fifo", tokenizer="chars/4", embedder=None)


def going_on(reply: str) -> bytes:
    return msgspec.json.encode({"model": "m", "input": "And?", "previous_response_id": reply})


def answer(histories: Histories, reply: str, *, of: str = "") -> str:
    """A request that is answered; returns the session's name."""
    conversation = take(histories, [user(f"What is {reply}?")], of=of)
    histories.said(conversation, parse(assistant(f"It is {reply}.")))
    histories.replied(conversation, reply)
    histories.give(conversation)
    return conversation.name


def goes_on(histories: Histories, reply: str, *, of: str = "") -> str:
    conversation = histories.take(RESPONSES, RESPONSES.open(going_on(reply)), None, of)
    histories.give(conversation)
    return conversation.name


def add_sessions(place: str, numbers: range) -> None:
    """Sessions with a reply each, which a gateway has noted."""
    with closing(open_backend(place, durable=False)) as backend:
        for number in numbers:
            batch = batch_of(0, {1: f"question {number}"})
            note = Event(number=2, act=Act.NOTE, time=2.0, data={"reply": _key(f"other {number}"), "turn": 1, "calls": []})
            batch = msgspec.structs.replace(batch, events=[*batch.events, note])
            backend.begin(f"chat-{number}", batch, time=float(number))


def costs(place: str, counts: tuple[int, ...]) -> list[int]:
    """What it takes a gateway that has just begun to find a reply, beside so many sessions."""
    with opened(place) as store:
        answer(Histories(store), "resp_1")
        found, before = [], 0
        for count in counts:
            add_sessions(place, range(before, count))
            before = count
            histories = Histories(store)
            asked = going_on("resp_1")
            found.append(calls(lambda histories=histories, asked=asked: histories.has(RESPONSES, asked, {}, "")))
            assert histories.has(RESPONSES, asked, {}, "")
    return found


def check_found(place: str) -> None:
    """Another gateway finds it, of the same user only, and after something was forgotten; an unknown one is nobody's."""
    with opened(place) as one, opened(place) as two:
        first, second = Histories(one), Histories(two)
        name = answer(first, "resp_1", of="ana")
        assert second.has(RESPONSES, going_on("resp_1"), {}, "ana")
        assert not second.has(RESPONSES, going_on("resp_1"), {}, "bob")
        assert not second.has(RESPONSES, going_on("resp_2"), {}, "ana")
        later = answer(first, "resp_3", of="bob")
        assert goes_on(second, "resp_3", of="bob") == later
        one.session(name).forget("p1")
        assert Histories(two).has(RESPONSES, going_on("resp_1"), {}, "ana")
        assert goes_on(Histories(two), "resp_1", of="ana") == name
        one.session(name).ledger.refresh()
        one.forget(session=name)
        assert not Histories(two).has(RESPONSES, going_on("resp_1"), {}, "ana")


def test_what_it_costs_to_find_a_reply_does_not_grow_with_sessions(tmp_path: Path) -> None:
    few, *more = costs(str(tmp_path / "a.db"), (10, 100, 1000))
    assert max(more) <= few
    with opened(str(tmp_path / "a.db")) as store:
        plan = store.backend._db.execute("EXPLAIN QUERY PLAN SELECT segment FROM history WHERE tenant = 1 AND digest = x'00'")
        assert "history_digest" in str(list(plan))


def test_a_reply_of_another_gateway_is_found(tmp_path: Path) -> None:
    check_found(str(tmp_path / "a.db"))


REPLY = "SELECT segment, message, tenant, digest, is_last, last_page FROM history WHERE message < 0 AND segment = 1"
INSERT = "INSERT INTO history(segment, message, tenant, digest, is_last, last_page)"


@pytest.mark.parametrize(
    ("statement", "events"),
    [
        ("DELETE FROM history WHERE message < 0", 2),
        ("UPDATE history SET digest = CAST('f0f0f0f0f0f0f0f0f0f0f0f0' AS BLOB) WHERE message < 0 AND segment = 1", 1),
        ("UPDATE history SET tenant = 7 WHERE message < 0 AND segment = 1", 1),
        ("UPDATE history SET is_last = 1 WHERE message < 0 AND segment = 1", 1),
        ("UPDATE history SET last_page = 9 WHERE message < 0 AND segment = 1", 1),
        ("UPDATE history SET message = -1 WHERE message < 0 AND segment = 1", 2),
        ("UPDATE history SET message = 0 WHERE message < 0 AND segment = 1", 2),
        (f"{INSERT} SELECT segment, message - 5, tenant, x'00', is_last, last_page FROM ({REPLY})", 1),
        ("UPDATE history SET segment = 9 WHERE message < 0 AND segment = 1", 2),
        (f"{INSERT} SELECT 2, 0, tenant, digest, 1, last_page FROM ({REPLY})", 1),
    ],
)
def test_rows_of_replies_are_checked_and_made_again(tmp_path: Path, statement: str, events: int) -> None:
    """Nothing else in the file tells where a reply is: a gateway finds it by its row alone."""
    place = str(tmp_path / "a.db")
    with opened(place) as store:
        names = [answer(Histories(store), f"resp_{number}") for number in range(2)]
        said = list(store.backend._db.execute("SELECT * FROM history WHERE message < 0 ORDER BY segment"))
    assert run("fsck", "--db", place).status == 0
    change(tmp_path / "a.db", statement)
    found = run("fsck", "--db", place, "--json").json["findings"]
    assert len(found) == events
    for one in found:
        assert one["derived"]
        assert re.fullmatch(r"the index of replies and event \d+ disagree|histories whose session is not there: 9", one["what"])
    repaired = run("fsck", "--repair", "--db", place, "--json")
    assert (repaired.status, repaired.json["left"]) == (0, [])
    with opened(place) as store:
        assert list(store.backend._db.execute("SELECT * FROM history WHERE message < 0 ORDER BY segment")) == said
        histories = Histories(store)
        assert [goes_on(histories, f"resp_{number}") for number in range(2)] == names


def test_a_note_that_is_damaged_takes_its_reply_along_in_a_repair(tmp_path: Path) -> None:
    """The note is quarantined: it names no reply any more, and no other is lost."""
    place = str(tmp_path / "a.db")
    with opened(place) as store:
        names = [answer(Histories(store), f"resp_{number}") for number in range(2)]
    change(tmp_path / "a.db", "UPDATE event SET body = x'c1' WHERE segment = 1 AND act = 'note'")
    assert {found["kind"] for found in run("fsck", "--db", place, "--json").json["findings"]} == {"ledger"}
    repaired = run("fsck", "--repair", "--db", place, "--json")
    assert (repaired.status, repaired.json["left"]) == (0, [])
    with opened(place) as store:
        assert list(store.backend._db.execute("SELECT segment FROM history WHERE message < 0")) == [(2,)]
        assert not Histories(store).has(RESPONSES, going_on("resp_0"), {}, "")
        assert goes_on(Histories(store), "resp_1") == names[1]
