"""What people see: tables that fit the width they have, and progress where there is no terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cli.terminal import TALK, write_jsonl
from kilburn.cli.screen import grid, progress, shortened
from kilburn.cli.top import frame, traffic
from kilburn.gateway.exchange import SessionTotals
from kilburn.terminal import Styled

JOBS = {
    "stage": "waiting",
    "since": 1.0,
    "ahead": 12,
    "discipline": "fair",
    "slice": 20_000,
    "finished": 4_321,
    "waited": 98_765.4,
    "longest": 1234.5,
    "ran": 4567.8,
}


def drawn(lines: list[Styled]) -> list[str]:
    """The lines of a table without their styles."""
    return [text for text, _ in lines]


def session(name: str, number: int, **more: object) -> dict[str, object]:
    """A row of `top`, with large figures."""
    figures = dict.fromkeys(("pages", "tokens", "tokens_in_window", "faults", "refaults", "evictions", "folds"), number)
    places = {"in": number, "stub": number, "folded": number, "out": number}
    one = {"session": name, "window": 1_000_000, "fill": 0.5, "places": places, "hit_rate": 0.9876, "jobs": None, "used": 0.0}
    one["damaged"] = None
    return figures | one | more


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200, 260])
@pytest.mark.parametrize("name", ["s", "a-very-long-name-of-a-session-" * 4 + "end", "日本語のとても長い名前" * 6])
def test_a_frame_fits_its_screen_and_cuts_no_number(width: int, name: str) -> None:
    rows = [session(name, 7_654_321), session("other", 12), session("queued", 5, jobs=JOBS)]
    whole = {word for line in drawn(frame(rows, "default", 10_000)) for word in line.split()}
    lines = drawn(frame(rows, "default", width))
    assert max(map(cell_len, lines)) <= width
    told = [line for line in lines[1:] if "larger window" not in line]
    figures = {word for line in told for word in line.split() if any(character.isdigit() for character in word)}
    assert figures <= whole | {"7.7M", "1.0M"}
    assert len([line for line in lines if line.startswith("session")]) == 2


@pytest.mark.parametrize("height", [8, 24, 30, 60])
@pytest.mark.parametrize("jobs", [None, JOBS])
def test_a_frame_of_many_sessions_fits_its_height(height: int, jobs: object) -> None:
    rows = [session(f"s{number}", 5, jobs=jobs) for number in range(40)]
    lines = drawn(frame(rows, "default", 100, height))
    assert len(lines) <= height
    assert any(line.startswith("queues") for line in lines) == (jobs is not None)
    shown = sum(line.startswith("s") for line in lines[2 : height // 2 if jobs else None])
    assert shown >= height // 2 - 4 > 0 or height == 8
    assert (height == 60 and not jobs) or any(" rows and " in line for line in lines)
    assert len(drawn(traffic([SessionTotals(tenant="t", session=f"s{number}") for number in range(40)], 100, height))) <= height


def test_at_a_hundred_columns_the_figures_that_matter_are_there() -> None:
    heads = drawn(frame([session("a-very-long-name-of-a-session-" * 4, 7_654_321)], "default", 100))[1]
    assert all(head in heads for head in ("session", "window", "in window", "of", "hit rate", "out", "last use"))
    heads = drawn(frame([session("a-very-long-name-of-a-session-" * 4, 7_654_321)], "default", 80))[1]
    assert all(head in heads for head in ("session", "window", "in window", "hit rate", "last use"))


@pytest.mark.parametrize("width", [80, 100])
def test_a_gateways_frame_fits_too(width: int) -> None:
    row = SessionTotals(
        tenant="t", session="agent-" * 20, requests=9_999, sent=7_654_321, shipped=7_654_321, window=200_000, hit_rate=0.1
    )
    lines = drawn(traffic([row, SessionTotals(tenant="other", session="s")], width))
    assert max(map(cell_len, lines)) <= width
    assert "7.7M" in lines[2]


@given(
    st.integers(24, 120),
    st.lists(
        st.tuples(st.text("ab é漢\x1b\n", max_size=60), st.integers(), st.text("ab é漢", max_size=90), st.floats(0, 1)),
        max_size=4,
    ),
)
def test_every_table_fits_and_its_numbers_are_whole(width: int, rows: list[tuple[str, int, str, float]]) -> None:
    heads = ("name", "number", "what", "share")
    lines = drawn(grid(heads, rows, width=width))
    note = lines.pop() if " more " in lines[-1] else ""
    assert max(map(cell_len, lines)) <= max(width, 16)
    assert bool(note) == (len(lines[0].split()) < len(heads))
    for line, row in zip(lines[1:], rows, strict=True):
        assert "number" not in lines[0] or f"{row[1]:,}" in line
        assert "share" not in lines[0] or f"{row[3]:.1%}" in line


@given(st.text("ab漢字", max_size=40), st.integers(1, 30), st.booleans())
def test_a_shortened_text_has_its_width(text: str, width: int, middle: bool) -> None:
    found = shortened(text, width, middle=middle)
    assert found == text if cell_len(text) <= width else "…" in found
    assert cell_len(found) <= max(width, 3)


class Lines(io.StringIO):
    """Standard error that is no terminal, and says when a line with some words came."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.came = words, threading.Event()

    def write(self, text: str) -> int:
        if self.words in text:
            self.came.set()
        return super().write(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [("work: 3 of 10,", (3, None, "")), ("work: 3 of 40 files, a\\x1bb,", (3, 40, "files, a\x1bb")), ("work:", None)],
)
def test_long_work_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, words: str, told: tuple[int, int | None, str] | None
) -> None:
    monkeypatch.delenv("KILBURN_QUIET")
    err = Lines(words)
    threads = threading.active_count()
    with redirect_stderr(err), progress("work", 10, first=0.001) as done:
        if told:
            done(*told)
        assert err.came.wait(300)
    assert threading.active_count() == threads
    assert err.getvalue().endswith(" s\n")


def test_work_that_fails_leaves_no_voice_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILBURN_QUIET")
    threads = threading.active_count()
    with redirect_stderr(io.StringIO()), pytest.raises(ValueError, match="lost"), progress("work"):
        raise ValueError("lost")
    assert threading.active_count() == threads


def test_quiet_is_quiet() -> None:
    err = Lines("work")
    with redirect_stderr(err), progress("work", first=0.0):
        assert not err.came.wait(0.05)
    assert err.getvalue() == ""


def test_a_command_in_a_pipe_says_how_long_it_waits_and_its_output_stays_clean(tmp_path: Path) -> None:
    source = tmp_path / "talk.jsonl"
    os.mkfifo(source)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KILBURN_")}
    words = [sys.executable, "-m", "kilburn", "import", str(source), "--json", "--db", str(tmp_path / "agent.db")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=kept, cwd=tmp_path) as running:
        assert running.stderr is not None
        first = running.stderr.readline()  # nobody has written to the pipe yet
        write_jsonl(source, TALK)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    assert re.fullmatch(rb"reading talk.jsonl: [0-9]+ s\n", first)
    assert json.loads(out)["sessions"][0]["session"] == "talk"
