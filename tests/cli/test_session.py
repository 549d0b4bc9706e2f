"""`ps`, `show`, `stats`, `recall`, `search`, `top`: looking changes nothing and says what is there."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kilburn as package
from cli.terminal import TALK, kilburn, program, write_jsonl
from kilburn.agents.loop import Agent
from kilburn.model import Request
from kilburn.models.scheduler import Scheduler
from kilburn.move import Fold
from kilburn.testing import Scripted

ODD = "a\x00b\r\nc\tß 🌊\u2028\x1b[31m \u202e end \n\n"


def test_ps_gives_stable_keys(db: Path) -> None:
    (row,) = kilburn("ps", "--db", db, "--json").json
    assert list(row) == [
        "session",
        "pages",
        "derived",
        "tokens",
        "tokens_in_window",
        "window",
        "fill",
        "places",
        "hit_rate",
        "faults",
        "refaults",
        "evictions",
        "folds",
        "jobs",
        "created",
        "used",
        "damaged",
    ]
    assert (row["session"], row["pages"], row["places"], row["window"]) == ("light", 6, {"in": 6}, None)
    assert "light" in kilburn("ps", "--db", db).out


def test_ps_lists_the_newest_of_many_forks(tmp_path: Path) -> None:
    path, clock = tmp_path / "agent.db", iter(range(1, 10_000))
    with package.open(str(path), window=300, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        for name in ("other", "chat", *(f"chat~{number}" for number in range(2, 31)), "chat~", "~2"):
            store.session(name).append({"role": "user", "content": "go"}, time=float(next(clock)))
    few = kilburn("ps", "--db", path)
    listed = [row.split()[0] for row in few.out.splitlines()[1:] if row.split()]
    assert listed == ["other", *(f"chat~{number}" for number in range(26, 31)), "chat~", "~2"]
    assert "25 older forks of chat" in few.err
    assert all(f"chat~{number} " in kilburn("ps", "--all", "--db", path).out for number in range(2, 31))
    assert len(kilburn("ps", "--db", path, "--json").json) == 33


def test_ps_tells_the_window_of_the_last_prompt(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with package.open(str(path), window=300, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        for number in range(20):
            session.append({"role": "user", "content": f"{number} " + "word " * 30})
            session.render()
    (row,) = kilburn("ps", "--db", path, "--json").json
    assert row["window"] == 300
    assert 0 < row["tokens_in_window"] <= 300
    assert row["evictions"] > 0
    assert row["places"]["out"] > 0


def test_ps_and_top_show_who_waits_and_for_what(tmp_path: Path) -> None:
    path, gate = tmp_path / "agent.db", threading.Event()

    def slow(request: Request) -> str:
        assert gate.wait(600)
        return "Done."

    with package.open(str(path), window=2000, tokenizer="chars/4") as store, ThreadPoolExecutor(3) as pool:
        scheduler = Scheduler(Scripted([slow] * 3), "priority(slice=16)")
        for number, name in enumerate(("first", "second", "third")):
            session = store.session(name)
            model = scheduler.model(name, session=session)
            pool.submit(Agent(model, [], session, memory=False).run, "Go on.")
            while len(scheduler.jobs()) <= number:
                time.sleep(0.001)
        stages: dict[str, str] = {}
        while len(stages) < 2:  # a job that waits for a second says so
            rows = kilburn("ps", "--db", path, "--json").json
            stages = {row["session"]: row["jobs"] for row in rows if row["jobs"]}
        assert {name: (jobs["stage"], jobs["ahead"]) for name, jobs in stages.items()} == {
            "second": ("waiting", 0),
            "third": ("waiting", 1),
        }
        shown = kilburn("ps", "--db", path).out
        gate.set()
        pool.shutdown()
    assert "priority(slice=16)" in shown
    assert all(len(line) <= 120 for line in shown.splitlines())
    rows = kilburn("top", "--json", "--db", path).json["sessions"]
    done = {row["session"]: (row["jobs"]["stage"], row["jobs"]["finished"]) for row in rows}
    assert done == dict.fromkeys(("first", "second", "third"), ("done", 1))
    assert all(row["jobs"]["waited"] >= 1 for row in rows if row["session"] != "first")
    assert "mean wait" in kilburn("top", "--once", "--db", path).out


def test_looking_changes_nothing(db: Path) -> None:
    def state() -> list[object]:
        with package.open(str(db), policy="fifo", readonly=True) as store:
            session = store.session("light")
            return [list(session.ledger.events()), session.contents.pages()]

    before = state()
    for words in (
        ("ps",),
        ("show", "light"),
        ("show", "light", "p2"),
        ("recall", "light", "p1-p6"),
        ("search", "oil"),
        ("stats", "light"),
    ):
        assert kilburn(*words, "--db", db).status == 0
    assert kilburn("top", "--once", "--db", db).status == 0
    assert state() == before


def test_show_lists_pages_and_says_all_of_one(db: Path) -> None:
    table = kilburn("show", "light", "--db", db).out
    assert [line.split()[0] for line in table.splitlines()] == ["address", "p1", "p2", "p3", "p4", "p5", "p6"]
    rows = kilburn("show", "light", "--db", db, "--json").json["pages"]
    assert [row["kind"] for row in rows] == ["text", "text", "text", "text", "call", "result"]
    (page,) = kilburn("show", "light", "p6", "--db", db, "--json").json["pages"]
    assert page["text"] == TALK[5]["content"]
    assert page["digest"] == hashlib.sha256(page["text"].encode()).hexdigest()
    assert (page["role"], page["trust"], page["at"], page["call"], page["group"]) == ("tool", "tool", "in", "c1", "p5")
    assert "wind south-west 4" in kilburn("show", "light", "p6", "--db", db).out


def test_show_tells_what_was_folded_from_what(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with package.open(str(path), window=10_000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append({"role": "system", "content": "s"}, {"role": "user", "content": "task"})
        for number in range(4):
            session.append({"role": "assistant", "content": f"{number} " + "step " * 50})
        session.edits.apply(Fold(pages=(3, 4), text="two steps"))
    fold = kilburn("show", "s", "f1", "--db", path, "--json").json["pages"][0]
    assert fold["sources"] == ["p3", "p4"]
    assert "two steps" in fold["text"]
    source = kilburn("show", "s", "p3", "--db", path, "--json").json["pages"][0]
    assert (source["folds"], source["at"]) == (["f1"], "folded")


def test_text_cannot_drive_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    talk = write_jsonl(tmp_path / "odd.jsonl", [{"role": "user", "content": ODD}])
    assert kilburn("import", talk, "--db", path).status == 0
    for words in (("show", "odd"), ("show", "odd", "p1"), ("search", "end")):
        said = kilburn(*words, "--db", path)
        assert said.status == 0
        assert not {"\x1b", "\x00", "\r", "\u202e"} & set(said.out)


def test_recall_gives_exactly_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    talk = write_jsonl(tmp_path / "odd.jsonl", [{"role": "user", "content": ODD}, {"role": "user", "content": "no newline"}])
    assert kilburn("import", talk, "--db", path).status == 0
    assert kilburn("recall", "odd", "p1", "--db", path).raw == ODD.encode()
    assert program("recall", "odd", "p1", "--db", path, folder=tmp_path).raw == ODD.encode()
    assert kilburn("recall", "odd", "p1-p2", "--db", path).raw == (ODD + "no newline").encode()
    found = kilburn("recall", "odd", "p1", "--db", path, "--json").json
    assert found["text"] == ODD
    assert [page["text"] for page in found["pages"]] == [ODD]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("recall", "light", "p7"), "p1-p6"),
        (("recall", "light", "seven"), "not an address"),
        (("recall", "light", "p4-p2"), "backwards"),
        (("recall", "light", "f1"), "does not exist"),
        (("show", "light", "p99"), "p1-p6"),
        (("recall", "dark", "p1"), "light"),
        (("stats", "dark"), "light"),
        (("search", "oil", "--session", "dark"), "light"),
        (("search", "  "), "empty"),
    ],
)
def test_what_is_not_there_exits_2(db: Path, words: tuple[str, ...], says: str) -> None:
    said = kilburn(*words, "--db", db)
    assert (said.status, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1


def test_search_finds_across_sessions_within_its_budget(db: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", [{"role": "user", "content": "no oil here, only fog"}])
    assert kilburn("import", other, "--db", db).status == 0
    hits = kilburn("search", "fog", "--db", db, "--json").json["hits"]
    assert {(hit["session"], hit["address"]) for hit in hits} == {("light", "p4"), ("other", "p1")}
    told = {"session", "address", "span", "text", "score", "age", "origin", "where", "tokens"}
    told |= {"speaker", "time", "trust", "since", "until", "why", "claim", "contested", "doubted"}
    assert set(hits[0]) == told
    assert {hit["session"] for hit in kilburn("search", "fog", "--session", "other", "--db", db, "--json").json["hits"]} == {
        "other"
    }
    assert kilburn("search", "fog", "--tokens", 1, "--db", db, "--json").json["hits"] == []
    assert kilburn("search", "zeppelin", "--db", db).out == "nothing found\n"


def test_top_shows_one_frame_without_a_terminal(db: Path, tmp_path: Path) -> None:
    said = program("top", "--once", "--db", db, folder=tmp_path)
    assert said.status == 0
    assert "light" in said.out
    assert "6 in" in said.out
    assert kilburn("top", "--json", "--db", db).json["sessions"][0]["session"] == "light"


@pytest.mark.slow
def test_looking_works_while_an_agent_writes(db: Path) -> None:
    """Readers see some state that was, never a broken one."""
    stop = threading.Event()

    def work() -> None:
        with package.open(str(db), window=500, policy="fifo", tokenizer="chars/4") as store:
            while not stop.wait(0.001):
                store.session("busy").append({"role": "user", "content": "word " * 40})

    agent = threading.Thread(target=work)
    agent.start()
    try:
        for _ in range(15):
            for words in (("ps", "--json"), ("top", "--once"), ("show", "light"), ("search", "oil")):
                said = kilburn(*words, "--db", db)
                assert said.status == 0, said.out + said.err
    finally:
        stop.set()
        agent.join()


def test_stats_are_the_ledgers(db: Path) -> None:
    figures = kilburn("stats", "light", "--db", db, "--json").json
    assert (figures["pages"], figures["overflow"], figures["window"]) == (6, 0, 0)
    assert "tokens seen" in kilburn("stats", "light", "--db", db).out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_can_be_read_or_says_why(db: Path) -> None:
    db.parent.chmod(0o500)
    try:
        said = kilburn("ps", "--db", db)
    finally:
        db.parent.chmod(0o700)
    assert said.status in (0, 1)
    assert "Traceback" not in said.err


def test_policies_and_models_are_listed() -> None:
    assert {"fifo", "lru", "chain"} <= {row["name"] for row in kilburn("policies", "--json").json}
    models = kilburn("models", "list", "--json").json
    assert {"smollm2", "qwen"} <= {row["name"] for row in models}
    assert "smollm2" in kilburn("models", "list").out


def test_pulling_what_has_no_name_exits_2(tmp_path: Path) -> None:
    said = kilburn("models", "pull", "no-such-model")
    assert said.status == 2
    assert "smollm2" in said.err


def test_pulling_a_path_gives_the_path(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(28))
    assert kilburn("models", "pull", path).out == f"{path}\n"
    assert kilburn("models", "pull", path, "--json").json == {"name": str(path), "path": str(path), "bytes": 32}


def test_chat_reads_lines_and_keeps_the_session(tmp_path: Path) -> None:
    words = ("chat", "talk", "--model", "echo", "--policy", "fifo", "--window", 2000)
    said = program(*words, folder=tmp_path, given=b"good evening\n/recall p1\n/recall p9\n/pin p1\n/stats\n/search evening\n")
    assert said.status == 0, said.err
    assert said.out.count("good evening") >= 3
    assert "tokens in the window" in said.out
    assert "p9" in said.err
    again = program(*words, folder=tmp_path, given=b"and good night\n/quit\n")
    assert again.status == 0
    rows = program("show", "talk", "--json", folder=tmp_path).json["pages"]
    assert [row["role"] for row in rows] == ["user", "assistant", "user", "assistant"]


def test_chat_without_a_model_exits_2(tmp_path: Path) -> None:
    assert program("chat", "--model", "none", folder=tmp_path).status == 2
    assert not (tmp_path / "agent.db").exists()
