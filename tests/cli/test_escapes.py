"""Nothing that a tool, a file or a name says reaches the terminal but as text: every verb, over a store full of escapes."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import sys
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import apsw
import pytest

import kilburn as package
from cli.terminal import kilburn
from kilburn.cli import main
from kilburn.terminal import line, plain, spelled

SOURCES = Path(package.__file__).parent
EVIL = "\x1b]0;EVIL\x07\x1b[2J\x9b31m\x7f\u202eevil\u2066\u2028\u2029[red]x[/red]\r\x08\x0czz\x85"
FILE = EVIL.replace("/", "")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
TENANT, SESSION = "t" + EVIL, "s\n" + EVIL
CALL = {"id": "c" + EVIL, "type": "function", "function": {"name": "n" + EVIL, "arguments": json.dumps({"a": EVIL})}}
TALK = [
    {"role": "system", "content": "needle " + EVIL},
    {"role": "user", "content": "needle " + EVIL},
    {"role": "assistant", "content": EVIL, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "needle " + EVIL * 3},
    *({"role": "user", "content": f"{number} needle {EVIL}" * 9} for number in range(12)),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store, and with files of which names and contents are full of escapes."""
    with package.open(str(tmp_path / "agent.db"), window=700, policy="fifo", tenant=TENANT, tokenizer="chars/4") as store:
        for name in (SESSION, "copy" + EVIL):
            session = store.session(name)
            session.append(*TALK[:4])
            for message in TALK[4:]:
                session.append(message)
            session.render()
    (tmp_path / f"talk{FILE}.jsonl").write_text("".join(json.dumps(message) + "\n" for message in TALK))
    runs = [{"id": EVIL + str(number), "messages": TALK} for number in range(2)]
    (tmp_path / f"runs{FILE}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    bad_ones = [EVIL, *map(json.dumps, ({EVIL: 1}, {"role": EVIL}, {"role": "user", "content": {EVIL: 1}}))]
    for number, bad in enumerate(bad_ones):
        (tmp_path / f"bad{number}{FILE}.jsonl").write_text(bad)
    monkeypatch.chdir(tmp_path)
    for name, value in {"TERM": "dumb", "COLUMNS": "200", "KILBURN_DB": "agent.db", "KILBURN_TENANT": TENANT}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


VERBS: list[tuple[str, ...]] = [
    ("ps",),
    ("ps", "--json"),
    ("show", SESSION),
    ("show", SESSION, "p3-p4"),
    ("show", SESSION, "p3", "--json"),
    ("stats", SESSION),
    ("stats", SESSION, "--json"),
    ("recall", SESSION, "p1-p4", "--json"),
    ("search", "needle"),
    ("search", "needle", "--session", SESSION),
    ("search", "needle", "--explain"),
    ("search", EVIL, "--where", EVIL),
    ("search", EVIL, "--user", EVIL, "--at", "1d"),
    ("search", "needle", "--at", EVIL),
    ("search", "needle", "--json"),
    ("receipts", SESSION),
    ("receipts", SESSION, "--json"),
    ("top", "--once"),
    ("top", "--json"),
    ("fsck",),
    ("fsck", "--json"),
    ("export", SESSION, "--out", f"out{FILE}.jsonl"),
    ("export", SESSION, "--out", f"out{FILE}.jsonl"),
    ("policies",),
    ("import", f"out{FILE}.jsonl"),
    ("import", f"out{FILE}.jsonl", "--session", "new" + EVIL),
    ("import", f"talk{FILE}.jsonl", "--json"),
    ("import", f"talk{FILE}.jsonl", "--session", "again" + EVIL, "--json"),
    *(("import", f"bad{number}{FILE}.jsonl") for number in range(4)),
    ("replay", f"talk{FILE}.jsonl", "--window", "700"),
    ("replay", f"runs{FILE}.jsonl", "--window", "700"),
    ("replay", f"runs{FILE}.jsonl", "--json"),
    ("replay", f"bad2{FILE}.jsonl"),
    ("replay", EVIL),
    ("models", "list"),
    ("models", "pull", EVIL),
    ("chat", "chat" + EVIL, "--model", "echo", "--no-memory"),
    ("chat", "--model", EVIL),
    ("chat", "--model", "echo", "--policy", f"fifo({EVIL!r})"),
    ("lab", "paging", "--data", EVIL),
    ("lab", "paging", "--policy", EVIL),
    ("lab", "kv", "--policy", EVIL),
    ("lab", "drift", "--arm", EVIL),
    ("forget", SESSION, "p3"),
    ("forget", SESSION, "p2-p4", "--yes", "--why", EVIL),
    ("forget", SESSION, "p5", "--yes", "--json"),
    ("remember", "needle " + EVIL, "--user", "u" + EVIL),
    ("remember", EVIL, "--user", "u" + EVIL, "--json"),
    ("remember", EVIL, "--until", EVIL),
    ("remember", EVIL, "--secrets", EVIL),
    ("learn", SESSION),
    ("learn", SESSION, "--user", "u" + EVIL, "--json"),
    ("learn", EVIL),
    ("learn", SESSION, "--policy", EVIL),
    ("memories", "list"),
    ("memories", "list", "--json"),
    ("memories", "list", "--at", EVIL),
    ("memories", "show", "p1", "--user", "u" + EVIL),
    ("memories", "show", "p1", "--user", EVIL),
    ("memories", "history", "p1", "--user", "u" + EVIL),
    ("memories", "retire", "p1", "--user", "u" + EVIL, "--why", EVIL),
    ("memories", "undo", "p1", "--user", "u" + EVIL),
    ("memories", "accept", "p1", "--user", "u" + EVIL),
    ("memories", "pin", EVIL, "--user", "u" + EVIL),
    ("memories", "sweep", "--retention", EVIL, "--yes"),
    ("documents", "add", ".", "--name", "d" + EVIL, "--user", "u" + EVIL),
    ("documents", "add", EVIL),
    ("documents", "list"),
    ("documents", "show", f"d{EVIL}/talk{FILE}.jsonl"),
    ("documents", "show", EVIL),
    ("documents", "remove", f"d{EVIL}/talk{FILE}.jsonl", "--yes"),
    ("forget", "--user", "u" + EVIL, "--dry-run"),
    ("forget", "--source", SESSION, "--yes"),
    ("forget", "--user", "u" + EVIL, "--yes"),
    ("forget", "--tool", EVIL, "--yes"),
    ("forget", "--document", EVIL, "--yes"),
    ("recall", SESSION, EVIL),
    ("recall", EVIL, "p1"),
    ("show", EVIL),
    ("ps", "--db", EVIL),
    (EVIL,),
    ("--" + EVIL,),
    ("ps", "--" + EVIL),
    ("eval", EVIL),
    ("search", "x", "--limit", EVIL),
    ("--debug", "recall", SESSION, "p99"),
    ("ps", EVIL),
    ("--help",),
]
EXACT: list[tuple[str, ...]] = [
    ("recall", SESSION, "p5"),
    ("export", SESSION, "--no-note"),
]
"""Exact in a pipe, visible on a terminal."""

PRINTERS = ("print", "Console", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc")
LINES = f"needle {EVIL}\n/search needle\n/recall p1\n/recall {EVIL}\n/{EVIL}\n/pin p1\n/stats\n"


def on_a_terminal(*words: str) -> tuple[int, bytes]:
    """Run a verb here with both outputs on a pseudo-terminal; its status, and all that came."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    came = bytearray()

    def drain() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                return
            if not piece:
                return
            came.extend(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    with open(theirs, "w", encoding="utf-8", newline="") as screen, redirect_stdout(screen), redirect_stderr(screen):
        assert sys.stdout.isatty()
        status = main(list(words))
    reader.join()
    os.close(ours)
    return status, bytes(came)


@contextmanager
def given(lines: str) -> Iterator[None]:
    """Lines on standard input."""
    before, sys.stdin = sys.stdin, io.StringIO(lines)
    try:
        yield
    finally:
        sys.stdin = before


def hidden(came: bytes) -> list[str]:
    return UNSEEN.findall(came.decode("utf-8"))


@pytest.mark.slow
def test_no_verb_sends_an_escape_to_a_terminal_or_a_pipe(place: Path) -> None:
    seen = 0
    for words in VERBS:
        with given(LINES):
            said = kilburn(*words)
        assert not hidden(said.raw), words
        assert not hidden(said.err.encode()), words
        with given(LINES):
            status, came = on_a_terminal(*words)
        assert not hidden(came), (words, came)
        assert came or status == 0, words
        seen += b"EVIL" in came
    assert seen > 40


def test_what_is_exact_in_a_pipe_is_visible_on_a_terminal(place: Path) -> None:
    for words in EXACT:
        status, came = on_a_terminal(*words)
        assert status == 0
        assert not hidden(came), words
        assert "\x9b" in kilburn(*words).out, words


def test_recall_is_exact_in_a_pipe_and_where_it_is_asked_for(place: Path) -> None:
    assert kilburn("recall", SESSION, "p5").out == TALK[3]["content"]
    assert on_a_terminal("recall", SESSION, "p5", "--raw") == (0, str(TALK[3]["content"]).encode())
    assert on_a_terminal("recall", SESSION, "p5") == (0, plain(str(TALK[3]["content"])).encode())
    assert json.loads(on_a_terminal("recall", SESSION, "p5", "--json")[1])["text"] == TALK[3]["content"]


def test_a_chat_shows_what_comes_as_text(place: Path) -> None:
    with given(LINES):
        status, came = on_a_terminal("chat", "chat" + EVIL, "--model", "echo", "--no-memory")
    assert status == 0
    assert not hidden(came)
    assert came.count(b"EVIL") > 3


def test_findings_are_text_too(place: Path) -> None:
    db = apsw.Connection("agent.db")
    db.execute("UPDATE content SET data = x'00', codec = 0")
    db.execute("UPDATE page SET place = 'folded' WHERE id = 3")
    db.close()
    said = kilburn("fsck")
    assert said.status == 1
    assert "EVIL" in said.out
    assert not hidden(said.raw)
    assert not hidden(on_a_terminal("fsck")[1])


def test_markup_is_text(place: Path) -> None:
    for words in (("ps",), ("top", "--once"), ("show", SESSION, "p1"), ("replay", f"runs{FILE}.jsonl")):
        assert "[red]x[/red]" in kilburn(*words).out.replace("\n", ""), words


def test_visible_text_says_the_same() -> None:
    assert plain("a\x1b\x9b\u202e\ud800\t\n") == "a\\x1b\\x9b\\u202e\\ud800\t\n"
    assert line("a\nb\tc") == "a\\x0ab\\x09c"
    assert json.loads(spelled(json.dumps(EVIL, ensure_ascii=False))) == EVIL


def test_nothing_else_prints() -> None:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path == SOURCES / "terminal.py":
            continue
        text = path.read_text(encoding="utf-8")
        if not re.search(rf"\b({'|'.join(map(re.escape, PRINTERS))})\(", text):
            continue  # to parse it takes most of the time
        tree = ast.parse(text)
        # A file that is run by itself, in a process of its own, prints for the program that started it.
        own = [part for part in tree.body if not (isinstance(part, ast.If) and "__main__" in ast.unparse(part.test))]
        for node in (node for part in own for node in ast.walk(part)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in PRINTERS:
                found.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {called}")
    assert not found
