"""`replay`: recorded runs of every form go through a window; overflow and loss are found by other means than the kernel's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import kilburn as package
from cli.terminal import TALK, kilburn, program, write_jsonl
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.cli.measurement import lost_bytes, recount, stream
from kilburn.errors import InvalidMessage
from kilburn.wire.recording import RecordedRun, read_runs

FIGURES = {
    "name",
    "messages",
    "pages",
    "tokens_seen",
    "prompts",
    "tokens_shipped",
    "tokens_reprefilled",
    "evictions",
    "folds",
    "faults",
    "asks",
    "refused_moves",
    "policy_failures",
    "fallbacks",
    "peak",
    "overflow",
    "lost",
    "seconds",
}


def trajectory(name: str, steps: int) -> dict[str, Any]:
    """A made-up run in the trajectory form; outputs of very different length, one step without action."""
    made = [
        {
            "thought": f"Look at {number}.",
            "action": f"open file{number}.py",
            "observation": f"{number}: return x\n" * (number % 7 * 20),
        }
        for number in range(steps)
    ]
    made.append({"thought": "I am done.", "action": "", "observation": "Please submit."})
    head = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "The parser drops a line."}]
    return {"id": name, "head": head, "steps": made}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with every form: trajectories gzipped, one chat, one file of runs, and a file that is none."""
    folder = tmp_path / "runs"
    (folder / "deep").mkdir(parents=True)
    lines = "".join(json.dumps(trajectory(f"run-{number}", 12 + number)) + "\n" for number in range(3))
    (folder / "deep" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_jsonl(folder / "talk.jsonl", TALK)
    write_jsonl(folder / "many.jsonl", [{"messages": TALK}, {"messages": TALK[:3]}])
    (folder / "notes.txt").write_text("not a run")
    return folder


def test_every_form_of_run_is_read(runs: Path) -> None:
    found = {run.name: run.messages for run in read_runs(runs)}
    assert list(found) == ["run-0", "run-1", "run-2", "many:1", "many:2", "talk"]
    assert found["talk"] == TALK
    assert found["many:2"] == TALK[:3]
    first = found["run-0"]
    assert first[2]["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"command":"open file0.py"}'}
    assert first[5] == {"role": "tool", "tool_call_id": "call_2", "content": "1: return x\n" * 20}
    assert first[-2:] == [{"role": "assistant", "content": "I am done."}, {"role": "user", "content": "Please submit."}]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    twice = write_jsonl(tmp_path / "t.jsonl", [trajectory("same", 1), trajectory("same", 2)])
    assert [run.name for run in read_runs(twice)] == ["same", "same#2"]


def test_an_export_can_be_replayed(db: Path, tmp_path: Path) -> None:
    assert kilburn("export", "--db", db, "--out", tmp_path / "out.jsonl").status == 0
    assert list(read_runs(tmp_path / "out.jsonl")) == [RecordedRun("light", TALK)]


@pytest.mark.parametrize("policy", ["fifo", "lru", "tiered", "importance", "mask", "chain(mask(keep=2), fifo)"])
@pytest.mark.parametrize("form", ["chat", "messages"])
def test_nothing_overflows_and_nothing_is_lost(runs: Path, policy: str, form: str) -> None:
    said = kilburn("replay", runs, "--window", 300, "--policy", policy, "--tokenizer", "chars/4", "--format", form, "--json")
    assert said.status == 0, said.err
    found = said.json
    assert list(found) == ["source", "window", "reserve", "policy", "tokenizer", "model", "total", "runs"]
    assert set(found["runs"][0]) == FIGURES
    assert set(found["total"]) == FIGURES | {"runs"}
    total = found["total"]
    assert (total["runs"], total["overflow"], total["lost"]) == (6, 0, 0)
    assert 100 < total["peak"] <= 300
    assert total["evictions"] > 0
    assert total["tokens_shipped"] <= 300 * total["prompts"]
    assert total["messages"] == sum(run["messages"] for run in found["runs"]) == sum(len(run.messages) for run in read_runs(runs))


def test_people_get_a_table_and_a_verdict(runs: Path) -> None:
    said = kilburn("replay", runs, "--window", 400, "--policy", "lru", "--limit", 2)
    assert said.status == 0
    assert [line.split()[0] for line in said.out.splitlines()[2:5]] == ["run-0", "run-1", "total"]
    assert said.out.splitlines()[-1].startswith("no overflow, nothing lost: 0 of ")


def test_runs_can_be_kept_in_a_store(runs: Path, tmp_path: Path) -> None:
    db = tmp_path / "kept.db"
    words = ("replay", runs, "--window", 300, "--policy", "lru", "--db", db)
    assert kilburn(*words).status == 0
    assert {row["session"] for row in kilburn("ps", "--db", db, "--json").json} == {run.name for run in read_runs(runs)}
    assert kilburn("fsck", "--db", db).status == 0
    again = kilburn(*words)
    assert again.status == 2
    assert "already" in again.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no run"),
        (b"{broken\n", "bad.jsonl:1"),
        (b'{"a": 1}\n', "'a'"),
        (b'"text"\n', "bad.jsonl:1"),
        (b'{"role": "wizard", "content": "x"}\n', "wizard"),
        (b'{"role": "user", "content": "x"}\n{"role": "tool", "tool_call_id": "c", "content": "x"}\n', "message 2"),
        (b'{"id": "r", "head": {}, "steps": []}\n', "head"),
        (b'{"messages": [1]}\n', "messages"),
        (b"\x1f\x8bno gzip", "gzip"),
    ],
)
def test_a_broken_recording_exits_2_and_says_where(tmp_path: Path, content: bytes, says: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    said = kilburn("replay", bad, "--policy", "fifo")
    assert (said.status, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--window", "0"),
        ("--window", "-5"),
        ("--window", "many"),
        ("--policy", "no_such_policy"),
        ("--policy", "fifo(bogus=1)"),
        ("--tokenizer", "chars/0"),
        ("--format", "morse"),
        ("--model", "no_such_model"),
        ("--reserve", "9000"),
        ("--limit", "0"),
    ],
)
def test_wrong_options_exit_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    talk = write_jsonl(tmp_path / "talk.jsonl", TALK)
    said = kilburn("replay", talk, *(() if "--policy" in words else ("--policy", "fifo")), *words)
    assert (said.status, said.out) == (2, "")
    assert "Traceback" not in said.err


def test_missing_files_and_empty_folders_exit_2(tmp_path: Path) -> None:
    for source in (tmp_path / "nothing.jsonl", tmp_path):
        said = kilburn("replay", source, "--policy", "fifo")
        assert said.status == 2
        assert str(source) in said.err
    with pytest.raises(InvalidMessage):
        list(read_runs(tmp_path))


def test_a_pipe_reads_json_only(runs: Path, tmp_path: Path) -> None:
    said = program("replay", runs, "--policy", "fifo", "--window", 500, "--json", folder=tmp_path)
    assert said.json["total"]["overflow"] == 0


def test_loss_is_found_where_the_store_loses() -> None:
    """A run is compared with what comes back: another run's session does not pass for it."""
    with Store(Sqlite(":memory:"), Budget(1000), "fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        measured = stream(session, RecordedRun("s", TALK))
        assert measured.overflow == 0
        assert lost_bytes(session, RecordedRun("s", TALK)) == 0
        changed = [*TALK[:3], {**TALK[3], "content": TALK[3]["content"].upper()}, *TALK[4:]]
        assert lost_bytes(session, RecordedRun("s", changed)) >= len(TALK[3]["content"])
        assert lost_bytes(session, RecordedRun("s", [*TALK, {"role": "user", "content": "never admitted"}])) >= len(
            "never admitted"
        )


def test_overflow_is_found_by_counting_again() -> None:
    with package.open(":memory:", window=1000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        stream(session, RecordedRun("s", TALK))
        prompt = session.render()
        assert 0 < recount(prompt, store.counter) <= prompt.tokens
        longer = [*prompt, {"role": "user", "content": "x" * 4000}]
        assert recount(longer, store.counter) == recount(prompt, store.counter) + 1000


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_the_judge_counts_a_call_as_it_is_sent(form: str) -> None:
    """An id and a name that are counted apart may take one token more than they do side by side."""
    with package.open(":memory:", window=8000, policy="fifo", tokenizer="chars/4") as store:
        for named in range(1, 9):
            for numbered in range(1, 9):
                session = store.session(f"{named}-{numbered}")
                call = {"id": "c" * numbered, "type": "function", "function": {"name": "n" * named, "arguments": "{}"}}
                session.append({"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]})
                session.append({"role": "tool", "tool_call_id": "c" * numbered, "content": "done"})
                prompt = session.render(form)
                assert recount(prompt, store.counter) <= prompt.tokens, (named, numbered)
