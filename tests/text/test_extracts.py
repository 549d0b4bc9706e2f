"""Extracts and condensed outputs: verbatim, within the budget, and keeping what matters."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.extract import Piece, condense, extract
from kilburn.selection.lines import join

LINES = st.sampled_from(
    [
        "We decided to use WAL mode.\n",
        "TODO: write the migration\n",
        "FAILED tests/test_a.py::test_b - assert 1 == 2\r\n",
        "src/kernel/page.py:10: error: bad\n",
        "\n",
        "ok\x0b",
        "漢字 と emoji 😀\u2028",
        "\x00NUL\x00\n",
        "x" * 700,
        "noise 12345 at 0xdeadbeef\n",
        "____ TestX.test_y ____\n",
        "\x1b[31mFAILED\x1b[0m tests/t.py::\x1b[1mtest_q\x1b[0m - no\n",
        "FAILED",
        "\r",
    ]
)
TEXTS = st.one_of(st.lists(LINES, max_size=60).map("".join), st.text(max_size=200))


def quarter(text: str) -> int:
    return (len(text) + 3) // 4


def words(text: str) -> int:
    """A counter under which a joined text may cost less or more than its parts."""
    return len(text.split()) + len(text) // 7


Counter = Callable[[str], int]
Parts = list[tuple[tuple[str, str], str]]
COUNTERS = st.sampled_from([quarter, words, len])
ROLES = st.sampled_from(
    [("user", "text"), ("assistant", "text"), ("assistant", "call"), ("tool", "result"), ("assistant", "fold")],
)


QUERIES = st.sampled_from(["", "WAL mode in page.py", "test_b 漢字"])


@given(TEXTS, st.integers(0, 300), COUNTERS, QUERIES)
def test_condensed_spans_are_exact_and_within_the_budget(text: str, tokens: int, count: Counter, query: str) -> None:
    spans = condense(text, tokens, count, query)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(a[1] < b[0] for a, b in pairwise(spans))
    assert not spans or count(join(text, spans)) <= tokens
    assert spans == condense(text, tokens, count, query)
    if text and tokens and count(text) <= tokens:
        assert spans == ((0, len(text)),)


@given(st.lists(st.tuples(ROLES, TEXTS), max_size=6), st.integers(0, 300), COUNTERS, QUERIES)
def test_an_extract_is_verbatim_ordered_and_within_the_budget(parts: Parts, tokens: int, count: Counter, query: str) -> None:
    pieces = [Piece(page, role, kind, text, "read(x)") for page, ((role, kind), text) in enumerate(parts, 1)]
    result = extract(pieces, tokens, count, query)
    assert count(result.text) == result.tokens <= max(tokens, 0)
    assert result == extract(pieces, tokens, count, query)
    assert [page for page, _ in result.spans] == sorted({page for page, _ in result.spans})
    for page, spans in result.spans:
        text = pieces[page - 1].text
        assert spans
        assert all(0 <= start < end <= len(text) for start, end in spans)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(text[start:end] in result.text for start, end in spans)
        assert f"p{page} read(x):\n" in result.text


def pytest_log(failed: int, passed: int) -> str:
    head = "=== test session starts ===\nplatform linux -- Python 3.11\n"
    body = "".join(f"tests/test_a.py::test_case_{case} PASSED [ 10%]\n" for case in range(passed))
    trace = "".join(
        f"____ test_broken_{number} ____\n\n    def test_broken_{number}():\n>       assert f({number}) == 1\n"
        f"E       AssertionError: assert {number} == 1\n\ntests/test_a.py:{number}: AssertionError\n" + "captured log line\n" * 30
        for number in range(failed)
    )
    names = "".join(f"FAILED tests/test_a.py::test_broken_{n} - AssertionError: assert {n} == 1\n" for n in range(failed))
    return f"{head}{body}{trace}=== short test summary info ===\n{names}=== {failed} failed, {passed} passed in 2.50s ===\n"


def test_a_test_log_keeps_every_failed_name_and_the_totals() -> None:
    log = pytest_log(failed=20, passed=500)
    kept = join(log, condense(log, 600, quarter))
    assert all(f"test_broken_{number}" in kept for number in range(20))
    assert "20 failed, 500 passed in 2.50s" in kept
    assert "AssertionError" in kept
    assert kept.count("captured log line") <= 1


def test_names_are_kept_without_their_messages_where_only_those_fit() -> None:
    log = pytest_log(failed=40, passed=50)
    kept = join(log, condense(log, 600, quarter))
    assert set(re.findall(r"test_broken_\d+", kept)) == {f"test_broken_{number}" for number in range(40)}


def test_compiler_output_keeps_the_error_and_drops_the_repeated_warning() -> None:
    noise = "".join(f"cc -c file{n}.c -o file{n}.o\nfile{n}.c:3:1: warning: unused variable 'x'\n" for n in range(400))
    log = f"{noise}lib/parse.c:88:13: error: use of undeclared identifier 'tok'\n{noise}make: *** [all] Error 1\n"
    kept = join(log, condense(log, 200, quarter))
    assert "lib/parse.c:88:13: error: use of undeclared identifier 'tok'" in kept
    assert "make: *** [all] Error 1" in kept
    assert kept.count("unused variable") <= 6


def test_a_file_view_keeps_its_definitions() -> None:
    body = "".join(f"{k}:    a = a * {k} + b\n" for k in range(1, 9))
    source = "".join(f"{10 * n}:def function_{n}(a, b):\n{body}" for n in range(30))
    kept = join(source, condense(source, 500, quarter))
    assert sum(f"def function_{n}(" in kept for n in range(30)) >= 25


def test_the_query_chooses_among_equal_lines() -> None:
    rows = "".join(f"src/pkg/module_{n}.py:{n}: value_{n} = compute(settings)\n" for n in range(2000))
    kept = join(rows, condense(rows, 150, quarter, "where is value_1234 set?"))
    assert "value_1234 = compute" in kept


def test_one_huge_line_gives_pieces_of_it() -> None:
    data = "{" + ", ".join(f'"key_{n}": {{"name": "n{n}", "size": {n}}}' for n in range(5000)) + "}"
    kept = join(data, condense(data, 200, quarter, "key_4321"))
    assert '"key_4321"' in kept
    assert kept.startswith("{")


def test_of_a_list_of_like_lines_head_and_tail_are_kept() -> None:
    text = "\n".join(f"file_{number:03}.txt" for number in range(190))
    shown = join(text, condense(text, 120, quarter))
    assert shown.startswith("file_000.txt\nfile_001.txt\n")
    assert shown.endswith("file_188.txt\nfile_189.txt")
    assert 90 < quarter(shown) <= 120


def test_an_extract_keeps_decisions_errors_tests_and_tasks_before_chatter() -> None:
    chatter = "".join(f"Sounds good, thank you very much for that kind reply number {n}.\n" for n in range(40))
    pieces = [
        Piece(1, "user", "text", chatter + "We decided to store pages in SQLite.\n" + chatter),
        Piece(2, "tool", "result", "captured line\n" * 200 + "KeyError: 'page 17'\n" + "captured line\n" * 200, "run(tests)"),
        Piece(3, "tool", "result", "..........\n=== 2 failed, 9 passed in 1.0s ===\n", "run(tests)"),
        Piece(4, "assistant", "text", chatter + "Remaining: update src/kernel/page.py and its docs.\n"),
    ]
    text = extract(pieces, 120, quarter).text
    for wanted in ("We decided to store", "KeyError: 'page 17'", "2 failed, 9 passed", "Remaining: update src/kernel/page.py"):
        assert wanted in text
    assert text.index(" p1 user:") < text.index(" p2 run(tests):") < text.index(" p4 assistant:")


def test_an_extract_follows_the_query() -> None:
    source = "def handler_{0}(request):\n    return respond(request, {0})\n"
    pieces = [Piece(n, "tool", "result", source.format(n), f"read(h{n}.py)") for n in range(1, 200)]
    assert "def handler_77(" in extract(pieces, 100, quarter, "open handler_77").text


def test_the_one_error_of_a_huge_output_is_found() -> None:
    text = "INFO request served in 12 ms by worker 7\n" * 200_000
    text = f"{text[:5_000_000]}\nFATAL: disk quota exceeded on /var/spool\n{text[5_000_000:]}"
    assert "FATAL: disk quota exceeded" in join(text, condense(text, 300, quarter))
    assert "FATAL: disk quota exceeded" in extract([Piece(1, "tool", "result", text)], 300, quarter).text
