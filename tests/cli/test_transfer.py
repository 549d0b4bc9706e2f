"""`export` and `import`: what comes back is the same file, byte for byte, whatever happened to the session."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import signal
import stat
import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn as package
from cli.terminal import TALK, kilburn, program
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.cli.archive import Clock, gather, rebuild
from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.move import Retire
from kilburn.wire.recording import bounded_lines, read_lines, read_runs

ANTHROPIC: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thought": "", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "see", "input": {"far": True}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "fog"}, {"type": "text", "text": "and now?"}],
    },
]


def there_and_back(db: Path) -> tuple[bytes, bytes]:
    """An export, and the export of what an import made of it."""
    first = kilburn("export", "--db", db)
    assert first.status == 0, first.err
    copy = db.with_name("copy.jsonl")
    copy.write_bytes(first.raw)
    other = db.with_name("other.db")
    done = kilburn("import", copy, "--db", other)
    assert done.status == 0, done.err
    return first.raw, kilburn("export", "--db", other).raw


def test_an_export_says_in_json_what_it_wrote(db: Path) -> None:
    copy = db.with_name("copy.jsonl")
    said = kilburn("export", "--out", copy, "--db", db, "--json")
    assert said.json == {
        "file": str(copy),
        "sessions": ["light"],
        "lines": len(copy.read_bytes().splitlines()),
        "left_out": {"damaged": [], "branches": 0},
        "branches": 0,
    }
    plain = kilburn("export", "--db", db, "--no-note")
    assert kilburn("export", "--db", db, "--no-note", "--json").raw == plain.raw
    refused = kilburn("export", "nobody", "--db", db, "--json")
    assert (refused.status, refused.raw) == (2, b"")
    assert json.loads(refused.err)["error"]["message"] == "no session 'nobody'"


def test_a_session_comes_back_byte_for_byte(db: Path) -> None:
    first, second = there_and_back(db)
    assert first == second
    lines = [json.loads(line) for line in first.splitlines()]
    assert lines[0] == {"kilburn": "session", "version": 1, "session": "light", "created": lines[0]["created"]}
    assert [line["message"] for line in lines[1:-1]] == TALK
    assert lines[-1] == {"state": {"pinned": ["p1", "p2"], "retired": [], "marks": {}}}


def test_pins_marks_trust_times_and_sources_come_back(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with package.open(str(path), window=20_000, policy="fifo") as store:
        session = store.session("a")
        session.append(*TALK, *ANTHROPIC)
        session.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="from the web"),), trust=Trust.TOOL))
        session.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="you said: Logged."),), sources=(3,)))
        session.pin("p4")
        session.unpin("p1")
        session.rate("p3", 0.25)
        store.session("b").append({"role": "user", "content": "second"})
        before = [(page, state.pinned, state.importance) for page, state in session.contents.pages()]
        messages = session.contents.messages()
    first, second = there_and_back(path)
    assert first == second
    with package.open(str(path.with_name("other.db")), window=20_000, policy="fifo", readonly=True) as store:
        session = store.session("a")
        assert session.contents.messages() == messages
        after = [(page, state.pinned, state.importance) for page, state in session.contents.pages()]
        assert after == before


def test_what_was_retired_or_forgotten_stays_so_and_addresses_stay(db: Path) -> None:
    with package.open(str(db), window=20_000, policy="fifo") as store:
        session = store.session("light")
        session.append(*ANTHROPIC)
        session.append({"role": "user", "content": "last words"})
        session.edits.apply(Retire(pages=(3,)))
        session.forget("p2")
        session.forget("p9")
    first, second = there_and_back(db)
    assert first == second
    assert b"Hesper" not in first
    other = db.with_name("other.db")
    assert kilburn("recall", "light", "p4", "--db", other).out == TALK[3]["content"]
    assert kilburn("recall", "light", "p2", "--db", other).status == 1
    assert kilburn("recall", "light", "p9", "--db", other).status == 1
    assert kilburn("show", "light", "p3", "--db", other, "--json").json["pages"][0]["at"] == "retired"
    assert kilburn("fsck", "--db", other).status == 0


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
talks = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=25)
@given(talk=talks, forgotten=st.sets(st.integers(0, 7), max_size=3), pinned=st.integers(0, 7))
def test_any_talk_comes_back(talk: list[tuple[str, str]], forgotten: set[int], pinned: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agent.db")
        with package.open(str(path), window=100_000, policy="fifo") as store:
            session = store.session("any")
            session.append(*({"role": role, "content": text} for role, text in talk))
            session.pin(f"p{pinned % len(talk) + 1}")
            for page in forgotten:
                if page < len(talk):
                    session.forget(f"p{page + 1}")
        first, second = there_and_back(path)
        assert first == second


def test_a_window_that_let_go_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    said = [{"role": "user", "content": f"{number}: " + "word " * 40} for number in range(60)]
    with package.open(str(path), window=300, policy="fifo", tokenizer="chars/4") as store:
        for message in said:
            store.session("s").append(message)
    first, second = there_and_back(path)
    assert first == second
    assert [json.loads(line)["message"] for line in first.splitlines()[1:-1]] == said


def test_export_writes_a_file_of_its_owner_and_leaves_a_note(db: Path, tmp_path: Path) -> None:
    plain, packed = tmp_path / "out.jsonl", tmp_path / "out.jsonl.gz"
    assert kilburn("export", "light", "--out", plain, "--db", db).status == 0
    assert kilburn("export", "light", "-o", packed, "--db", db).status == 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert stat.S_IMODE(plain.stat().st_mode) == 0o600
    assert list(tmp_path.glob("*.part")) == []
    receipt = kilburn("forget", "light", "p3", "--yes", "--json", "--db", db).json
    assert [export["to"] for export in receipt["exports"]] == [str(plain), str(packed)]
    assert kilburn("import", packed, "--db", tmp_path / "new.db").status == 0


def test_export_of_a_file_that_cannot_be_made_leaves_none(db: Path, tmp_path: Path) -> None:
    said = kilburn("export", "light", "-o", tmp_path / "no" / "out.jsonl", "--db", db)
    assert said.status == 1
    assert said.err.count("\n") == 1


def test_bare_messages_become_a_session_named_after_the_file(tmp_path: Path) -> None:
    talk = tmp_path / "monday.jsonl.gz"
    talk.write_bytes(gzip.compress("\n\n".join(map(json.dumps, TALK)).encode()))
    said = kilburn("import", talk, "--db", tmp_path / "agent.db", "--json")
    assert said.json["sessions"] == [{"session": "monday", "pages": 6, "tokens": said.json["sessions"][0]["tokens"]}]
    with package.open(str(tmp_path / "agent.db"), policy="fifo", readonly=True) as store:
        assert store.session("monday").contents.messages() == TALK


BAD: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"{not json}\n", "bad.jsonl:1"),
    (b'{"role": "user", "content": "ok"}\n["no", "object"]\n', "bad.jsonl:2"),
    (b'{"role": "wizard", "content": "abracadabra"}\n', "wizard"),
    (b'{"role": "tool", "tool_call_id": "c9", "content": "x"}\n', "c9"),
    (b'{"role": "user", "content": "ok"}\n{"role": "user", "content": 7}\n', "bad.jsonl:2"),
    (b'{"id": "r", "head": [], "steps": []}\n', "without messages"),
    (b'{"kilburn": "session", "version": 2, "session": "s", "created": 1}\n', "version 2"),
    (b'{"kilburn": "session", "version": 1, "session": "", "created": 1}\n', "bad.jsonl:1: '' is no session name"),
    (
        b'{"kilburn": "session", "version": 1, "session": "s", "created": 1}\n{"message": {"role": "user", "content": "x"}}\n',
        "time",
    ),
    (b'{"kilburn": "session", "version": 1, "session": "s", "created": 1}\n{"state": {"pinned": 3}}\n', "bad.jsonl:2"),
    (b"\x1f\x8b\x08broken", "gzip"),
    (b'\xff\xfe{"role": "user"}\n', "bad.jsonl:1"),
]


@pytest.mark.parametrize(("content", "says"), BAD)
def test_a_file_that_does_not_fit_changes_nothing(db: Path, tmp_path: Path, content: bytes, says: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    before = kilburn("ps", "--db", db, "--json").json
    said = kilburn("import", bad, "--db", db)
    assert (said.status, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1
    assert kilburn("ps", "--db", db, "--json").json == before


def test_an_import_does_not_mix_with_a_session_that_is_there(db: Path, tmp_path: Path) -> None:
    said = kilburn("import", tmp_path / "talk.jsonl", "--session", "light", "--db", db)
    assert said.status == 2
    assert "--session" in said.err
    assert kilburn("import", tmp_path / "nothing.jsonl", "--db", db).status == 2


def test_an_export_without_a_note_writes_nothing_into_the_store(db: Path, tmp_path: Path) -> None:
    with package.open(str(db), policy="fifo") as store:
        agent = store.session("light")
        assert kilburn("export", "light", "--no-note", "--out", tmp_path / "out.jsonl", "--db", db).status == 0
        assert agent.append({"role": "user", "content": "still at work"}) == "p7"
    receipt = kilburn("forget", "light", "p3", "--yes", "--json", "--db", db).json
    assert receipt["exports"] == []


def test_a_process_of_its_own_writes_the_same_bytes(db: Path, tmp_path: Path) -> None:
    assert program("export", "--db", db, folder=tmp_path).raw == kilburn("export", "--db", db).raw


def test_an_export_never_replaces_its_store_and_no_file_without_force(db: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(db)
    os.link(db, tmp_path / "hard")
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.part").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"mine")
    before = db.read_bytes()
    for name in (db, f"{db}-wal", f"{db}-shm", tmp_path / "link", tmp_path / "hard", tmp_path / "x" / ".." / "agent.db"):
        for force in ([], ["--force"]):
            said = kilburn("export", "light", "--db", db, "--out", name, *force)
            assert (said.status, said.err.count("\n")) == (2, 1), name
    assert db.read_bytes() == before
    assert kilburn("export", "light", "--db", db, "--out", out).status == 0
    first = out.read_bytes()
    said = kilburn("export", "light", "--db", db, "--out", out)
    assert (said.status, out.read_bytes()) == (2, first)
    assert "--force" in said.err
    out.chmod(0o666)
    assert kilburn("export", "light", "--db", db, "--out", out, "--force").status == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert (tmp_path / "victim").read_bytes() == b"mine"


@pytest.mark.slow
def test_a_measurement_never_replaces_a_store(db: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(db)
    before = db.read_bytes()
    for name in (db, f"{db}-wal", tmp_path / "link"):
        for force in ([], ["--force"]):
            assert kilburn("lab", "paging", "--sample", "1", "--out", name, *force).status == 2
    assert db.read_bytes() == before


@pytest.mark.slow
def test_cells_are_only_added_to_a_file_of_cells(db: Path, tmp_path: Path) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_bytes(b"mine\n")
    for file in (mine, db):
        before = file.read_bytes()
        assert kilburn("lab", "paging", "--sample", "1", "--out", file, "--resume").status == 2
        assert file.read_bytes() == before
    assert kilburn("lab", "paging", "--sample", "1", "--out", mine).status == 2
    assert mine.read_bytes() == b"mine\n"


HEAD = '{"kilburn": "session", "version": 1, "session": "s", "created": 1}\n'
SAYS = '{"message": {"role": "user", "content": "x"}, "time": 1}\n'
STATE = '{"state": {"pinned": [], "retired": [], "marks": {}}}\n'
ODD = (
    "true",
    "null",
    '"1"',
    "[1]",
    "{}",
    "-1",
    "1e300",
    "1e999",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "253402300800",
    "NaN",
    "-0.5",
)
NAMES = ("", " ", "a\x1b[31m", "a\u202eb", "a\nb", "a\0b", "n" * 501, 7, True, None, ["a"])


def odd_lines() -> Iterator[tuple[int, str]]:
    """Files with one value that cannot be, and the line that it stands in."""
    for value in ODD:
        yield 1, HEAD.replace('"created": 1', f'"created": {value}')
        yield 2, HEAD + SAYS.replace('"time": 1', f'"time": {value}')
        yield 2, HEAD + f'{{"parts": [{{"kind": "text", "text": "x"}}], "role": "user", "time": {value}}}\n'
        yield 3, HEAD + SAYS + STATE.replace('"marks": {}', f'"marks": {{"p1": {value}}}')
    for value in ("true", "1.0", "2", '"1"'):
        if value != "1.0":
            yield 1, HEAD.replace('"version": 1', f'"version": {value}')
    for name in NAMES:
        yield 1, HEAD.replace('"s"', json.dumps(name))
    yield 1, HEAD.replace('"s"', '"\\ud800"')
    yield 2, HEAD + '{"message": {"role": "user", "content": "\\udfff"}, "time": 1}\n'
    yield 2, HEAD + '{"message": {"role": "user", "content": "x"}, "time": 1, "more": 2}\n'
    yield 2, HEAD + SAYS.replace('"x"', "[" * 5000 + "]" * 5000)
    yield 2, HEAD + SAYS.replace('"x"', '[{"type": "x", "y": ' + "[" * 300 + "]" * 300 + "}]")
    yield 2, HEAD + '{"message": {"role": "user", "content": "x", "n": 1e400}, "time": 1}\n'
    for address in ("p2", "p0", "f1", "p1-p9", "x", "p99999999999999999", "", "p" + "9" * 500):
        for line in (f'"pinned": ["{address}"]', f'"retired": ["{address}"]', f'"marks": {{"{address}": 0.5}}'):
            key = line.partition(":")[0]
            yield 3, HEAD + SAYS + STATE.replace(f"{key}: []", line).replace(f"{key}: {{}}", line)
    for part in (
        '{"parts": [], "role": "user", "time": 1}',
        '{"parts": [null], "role": "user", "time": 1}',
        '{"parts": [null], "kinds": ["call"], "calls": ["c"], "role": "user", "time": 1}',
        '{"parts": [null], "kinds": ["result"], "calls": ["c"], "role": "tool", "time": 1}',
        '{"parts": [{"kind": "fold", "text": "x"}], "role": "user", "time": 1}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "trust": 3}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "trust": true}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "sources": ["p7"]}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "sources": ["f1"]}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "extra": "[]"}',
        '{"parts": [{"kind": "text", "text": "x"}], "role": "user", "time": 1, "extra": "{\\"form\\":\\"chat\\",\\"dict\\":7}"}',
        '{"parts": [{"kind": "opaque", "text": "x"}], "role": "user", "time": 1}',
    ):
        yield 2, HEAD + part + "\n"


def brought(path: Path) -> None:
    with Store(Sqlite(":memory:"), Budget(1 << 40), "fifo") as store:
        for saved in gather(read_lines(path), "bad"):
            rebuild(store, Clock(0), saved)


def test_one_odd_value_anywhere_is_a_typed_error_that_names_its_line(db: Path, tmp_path: Path) -> None:
    before = db.read_bytes()
    bad = tmp_path / "bad.jsonl"
    for number, (line, content) in enumerate(odd_lines()):
        bad.write_text(content, encoding="utf-8")
        with pytest.raises(package.KilburnError) as caught:
            brought(bad)
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert f"bad.jsonl:{line}" in said, (content[:300], said)
        assert len(said) < 2000
        if number % 9 == 0:
            done = kilburn("import", bad, "--db", db)
            assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), (content[:300], done.err)
            assert f"bad.jsonl:{line}" in done.err
    assert db.read_bytes() == before
    assert kilburn("fsck", "--db", db).status == 0


def test_a_bomb_is_not_unpacked(db: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress((HEAD + SAYS * 50_000).encode()))
    for words, line in (("--max-size", "100000"), 1755), (("--max-size", "20"), 1):
        said = kilburn("import", bomb, "--db", db, *words)
        assert said.status == 2
        assert f"bomb.jsonl.gz:{line}: the file has more than" in said.err
    packed = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(bytes(40_000_000))))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessage, match="bomb:1: the file has more than"):
            list(bounded_lines(packed, "bomb", 1_000_000))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_name_is_no_path_and_a_bad_one_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    copy, db = tmp_path / "in" / "copy.jsonl", tmp_path / "in" / "agent.db"
    copy.write_text(HEAD.replace('"s"', '"../../evil/\\u001b"') + SAYS)
    assert kilburn("import", copy, "--db", db).status == 2
    assert not db.exists()
    assert kilburn("import", copy, "--db", db, "--session", "../good").status == 0
    assert [row["session"] for row in kilburn("ps", "--db", db, "--json").json] == ["../good"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "agent.db",
        "agent.db-shm",
        "agent.db-wal",
        "copy.jsonl",
    ]


def thinking(form: str) -> list[dict[str, Any]]:
    """A message with thinking and two calls, and what came back."""
    if form == "chat":
        calls = [{"id": each, "type": "function", "function": {"name": "see", "arguments": "{}"}} for each in "ab"]
        return [
            {"role": "user", "content": "look"},
            {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": each, "content": f"saw {each}"} for each in "ab"),
        ]
    picture = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    use = [{"type": "tool_use", "id": each, "name": "see", "input": {}} for each in "ab"]
    back = [{"type": "text", "text": "saw b"}, picture]
    return [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": form, ("data" if "red" in form else "thinking"): "hm", "signature": "s"}, *use],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "saw a"},
                {"type": "tool_result", "tool_use_id": "b", "content": back},
                {"type": "text", "text": "go on"},
            ],
        },
    ]


@pytest.mark.parametrize("form", ["chat", "thinking", "redacted_thinking"])
def test_whatever_is_forgotten_of_a_thinking_message_the_export_comes_back(tmp_path: Path, form: str) -> None:
    with package.open(":memory:", policy="fifo") as store:
        store.session("n").append(*thinking(form))
        pages = [page.id for page, _ in store.session("n").contents.pages()]
    db = tmp_path / "agent.db"
    cases = [case for size in (1, 2) for case in combinations(pages, size)]
    with package.open(str(db), window=100_000, policy="fifo") as store:
        for case in cases:
            session = store.session("-".join(map(str, case)))
            session.append(*thinking(form))
            for page in case:
                session.forget(f"p{page}")
    first, second = there_and_back(db)
    assert first == second
    assert first.count(b'"kilburn"') == len(cases)
    assert kilburn("fsck", "--db", tmp_path / "other.db").status == 0


def test_what_branches_share_is_written_once(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    with package.open(str(db), window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("work")
        for number in range(20):
            session.append({"role": "user", "content": f"message {number}"})
        for number in range(5):
            branch = session.fork(f"question {number}")
            branch.append({"role": "user", "content": f"only here {number}"})
            branch.fork("deeper").append({"role": "user", "content": f"deeper {number}"})
        store.session("other").append({"role": "user", "content": "message 0"})
        store.session("work/b1").forget("p7")
        names = [info.name for info in store.sessions()]
        said = {name: store.session(name).contents.messages() for name in names}
    first, second = there_and_back(db)
    assert first == second
    assert first.count(b"message 12") == 1
    assert first.count(b"only here 4") == 1
    assert first.count(b'"message 0"') == 2
    with package.open(str(tmp_path / "other.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        assert {name: store.session(name).contents.messages() for name in names} == said
    runs = {run.name: run.messages for run in read_runs(tmp_path / "copy.jsonl")}
    # What a branch was begun with is no message of a client, and a run leaves it out.
    assert runs["work/b5/b1"] == [message for message in said["work/b5/b1"] if message["content"] not in ("question 4", "deeper")]
    assert runs.keys() == set(names)


@pytest.mark.parametrize(
    "line",
    [
        '{"same":{"session":"a","lines":3}}',
        '{"same":{"session":"c","lines":1}}',
        '{"same":{"session":"b","lines":1}}',
        '{"same":1}',
        '{"same":{"session":"a","lines":5000001}}',
    ],
)
def test_a_beginning_that_is_not_there_is_refused(line: str, tmp_path: Path) -> None:
    header = '{{"kilburn":"session","version":1,"session":"{}","created":1}}'
    message = '{"message":{"role":"user","content":"hello"},"time":1}'
    copy = tmp_path / "copy.jsonl"
    copy.write_text("\n".join([header.format("a"), message, message, header.format("b"), line, message]))
    refused = kilburn("import", copy, "--db", tmp_path / "b.db")
    assert refused.status != 0
    assert "copy.jsonl:5" in refused.err
    with pytest.raises(InvalidMessage, match=r"copy.jsonl:5"):
        list(read_runs(copy))


def test_an_export_says_what_becomes_of_branches(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    with package.open(str(db), window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("work")
        session.append({"role": "user", "content": "hello"})
        session.fork("look").fork("deeper")
    assert "branches of 'work': 2" in kilburn("export", "work", "--db", db).err
    assert "exported branches: 2" in kilburn("export", "--db", db).err
    nested = kilburn("export", "work/b1/b1", "--db", db).err
    assert "not exported" not in nested
    assert "exported branches: 1" in nested


def forty(folder: Path) -> Path:
    """An export of forty sessions; in one of them a page was forgotten."""
    db, copy = folder / "forty.db", folder / "forty.jsonl"
    with package.open(str(db), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        for number in range(40):
            session = store.session(f"s{number:02}")
            session.append(*({"role": "user", "content": f"message {number} {at} " + "words " * 40} for at in range(30)))
        session.forget("p3")
    copy.write_bytes(kilburn("export", "--db", db).raw)
    return copy


@pytest.mark.slow
def test_an_import_that_is_killed_has_brought_all_or_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    copy, found, dice = forty(tmp_path), set[int](), random.Random(20)
    for number in range(8):
        db = tmp_path / f"{number}.db"
        enough = dice.randrange(40_000, 2_500_000)
        child = os.fork()
        if not child:
            try:
                # The system kills it at the first write behind so many bytes of a file.
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (enough, enough))
                kilburn("import", copy, "--db", db)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        there = len(kilburn("ps", "--db", db, "--json").json)
        found.add(there)
        again = kilburn("import", copy, "--db", db)
        assert again.status == (2 if there else 0), again.err
        assert kilburn("fsck", "--db", db).status == 0
        assert kilburn("export", "--db", db).raw == copy.read_bytes()
    assert 0 in found, found
    assert found <= {0, 40}


def test_an_import_that_fails_in_the_middle_brings_nothing(tmp_path: Path) -> None:
    copy, db = forty(tmp_path), tmp_path / "agent.db"
    with package.open(str(db), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("s39").append({"role": "user", "content": "I was here before."})
    before = kilburn("export", "--db", db, "--no-note").raw
    done = kilburn("import", copy, "--db", db)
    assert (done.status, done.out) == (2, "")
    assert "s39" in done.err
    assert kilburn("export", "--db", db, "--no-note").raw == before
    assert kilburn("fsck", "--db", db).status == 0


def test_a_copy_of_no_store_names_what_is_missing(tmp_path: Path) -> None:
    done = kilburn("copy", tmp_path / "nowhere.db", tmp_path / "moved.db")
    assert (done.status, done.out) == (2, "")
    assert "give the store to be copied as SRC" in done.err
    assert list(tmp_path.iterdir()) == []
