"""The verb itself: what it refuses, and the file that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal import kilburn
from dashboard.made import HOSTILE, SCRIPT
from kilburn import open as open_store


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "can be reached from outside"),
        (("--host", "192.0.2.7"), "can be reached from outside"),
        (("parser",), "--export"),
        (("nobody", "--export", "out.html"), "there is no session 'nobody'"),
        (
            ("--db", "nowhere.db"),
            "there is no store at nowhere.db: give its file with --db, or in KILBURN_DB; `kilburn chat` makes one",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kilburn("dashboard", *(() if "--db" in words else ("--db", made)), *words)
    assert done.status == 2
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_no_word_of_a_page_unless_asked(made: Path, tmp_path: Path) -> None:
    plain, whole = tmp_path / "plain.html", tmp_path / "whole.html"
    assert kilburn("dashboard", "--db", made, "--export", plain).status == 0
    assert kilburn("dashboard", "--db", made, "--export", whole, "--contents").status == 0
    said = plain.read_text(encoding="utf-8")
    for words in ("I look at", "part_", "Find the bug", "fix bugs", "read(", "strips", "Go on after", "prefers tea", "long line"):
        assert words not in said
    assert "I look at" in whole.read_text(encoding="utf-8")
    for name in ("misses", "parser", "summarize", "p3-p29"):
        assert name in said
    for one in (plain, whole):
        assert one.stat().st_mode & 0o077 == 0
        assert "<script" not in one.read_text(encoding="utf-8")
        assert "<b onmouseover" not in one.read_text(encoding="utf-8")
    assert HOSTILE not in said
    assert SCRIPT not in whole.read_text(encoding="utf-8")
    again = kilburn("dashboard", "--db", made, "--export", plain)
    assert again.status == 2
    assert kilburn("dashboard", "--db", made, "--export", plain, "--force").status == 0


def test_a_file_has_no_word_of_a_reason_that_a_person_gave(tmp_path: Path) -> None:
    path, plain, whole = tmp_path / "agent.db", tmp_path / "plain.html", tmp_path / "whole.html"
    with open_store(str(path), tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(*({"role": "user", "content": f"{number}: more words."} for number in range(5)))
        session.edits.evict("p2", "it is about Zoe's illness")
        session.render()
    assert kilburn("dashboard", "a", "--db", path, "--export", plain).status == 0
    assert kilburn("dashboard", "a", "--db", path, "--export", whole, "--contents").status == 0
    assert "illness" not in plain.read_text(encoding="utf-8")
    assert "illness" in whole.read_text(encoding="utf-8")
