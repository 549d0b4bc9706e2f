"""What counts as a name or a fact."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.facts import FactKind, facts
from kilburn.selection.identifiers import identifiers
from kilburn.selection.signs import Sign, classify_line, failed_test, sign_of_prose


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("open astropy/io/ascii/qdp.py now", "path", "astropy/io/ascii/qdp.py"),
        ("see ./run.sh for it", "path", "./run.sh"),
        ("at /usr/lib/x86 there", "path", "/usr/lib/x86"),
        ("in qdp.py:62 we see", "line", "qdp.py:62"),
        ("src/a/b.rs:10:5: error", "line", "src/a/b.rs:10:5"),
        ("call np.array here", "dotted", "np.array"),
        ("std::vec::Vec is", "dotted", "std::vec::Vec"),
        ("the separability_matrix is", "name", "separability_matrix"),
        ("a CompoundModel is", "name", "CompoundModel"),
        ("getUser works", "name", "getUser"),
        ("raises KeyError there", "error", "KeyError"),
        ("run parse(x)", "call", "parse"),
        ("at commit 3f2a9bc1d it", "hash", "3f2a9bc1d"),
        ("took 350ms in all", "number", "350ms"),
        ("grew by 12.5% then", "number", "12.5%"),
        ("version 4.0.1 of it", "number", "4.0.1"),
    ],
)
def test_identifiers_of_each_kind(text: str, kind: str, name: str) -> None:
    assert (kind, name) in {(found.kind, found.text) for found in identifiers(text)}


def test_ordinary_words_are_no_identifiers() -> None:
    said = "The agent and/or the user then opened a file, because it was needed (see above). It works!"
    assert list(identifiers(said)) == []


@given(st.text(st.sampled_from("aB_1./:-(@%\\ \n\u2028\x00é漢"), max_size=200))
def test_identifier_spans_are_exact_and_in_order(text: str) -> None:
    at = 0
    for found in identifiers(text):
        start, end = found.span
        assert at <= start < end <= len(text)
        assert text[start:end] == found.text
        at = end


def test_a_megabyte_without_a_blank_is_read_in_linear_time() -> None:
    for text in ("x1" * 500_000, "A" * 1_000_000, "a." * 500_000, "/" * 1_000_000, "::" * 500_000):
        assert all(len(found.text) <= 240 for found in identifiers(text))


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("=== 4 failed, 127 passed, 1 skipped in 3.77s ===", Sign.SUMMARY),
        ("\x1b[31m=== \x1b[1m16 failed\x1b[0m, \x1b[32m66 passed\x1b[0m in 1.57s ===\x1b[0m", Sign.SUMMARY),
        ("Ran 120 tests in 0.692s", Sign.SUMMARY),
        ("FAILED (failures=2, errors=71, skipped=1)", Sign.SUMMARY),
        (" tests finished: 135 passed, 3 skipped, 10 exceptions, ", Sign.SUMMARY),
        ("test result: FAILED. 3 passed; 1 failed", Sign.SUMMARY),
        ("Session exited with code 1", Sign.SUMMARY),
        ("FAILED tests/test_a.py::test_b - assert 1 == 2", Sign.FAILED),
        ("ERROR: test_x (pkg.mod.Case)", Sign.FAILED),
        ("test_eigen E", Sign.FAILED),
        ("____ TestX.test_y ____", Sign.FAILED),
        ("ValueError: bad literal", Sign.ERROR),
        ("main.c:10:5: error: 'x' undeclared", Sign.ERROR),
        ("bash: foo: command not found", Sign.ERROR),
        ('  File "/a/b.py", line 3, in f', Sign.FRAME),
        ("class Foo(Bar):", Sign.DEFINITION),
        ("12:def area(self):", Sign.DEFINITION),
        ("test_args ok", Sign.PASSED),
        ('78:        raise ValueError(f"Unrecognized: {line}")', Sign.NONE),
        ("just a line", Sign.NONE),
    ],
)
def test_signs_of_tool_output(line: str, sign: Sign) -> None:
    assert classify_line(line) == sign


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("The root cause is the missing flag.", Sign.DECISION),
        ("We decided to keep SQLite.", Sign.DECISION),
        ("- [ ] write the docs", Sign.TASK),
        ("Next, I'll run the tests.", Sign.TASK),
        ("I'll open the file.", Sign.LEAN),
        ("Hello there.", Sign.NONE),
    ],
)
def test_signs_of_prose(line: str, sign: Sign) -> None:
    assert sign_of_prose(line) == sign


def test_one_failed_test_has_one_name_in_every_notation() -> None:
    assert failed_test("FAILED a/test_b.py::TestX::test_y - boom") == failed_test("___ TestX.test_y ___") == ("TestX", "test_y")
    assert (
        failed_test("ERROR: test_y (pkg.test_b.TestX)")
        == failed_test("test_y (pkg.test_b.TestX) ... ERROR")
        == ("TestX", "test_y")
    )
    assert failed_test("test_z E") == failed_test("___ sympy/core/tests/test_b.py:test_z ___") == ("", "test_z")


def test_facts_of_a_step() -> None:
    text = (
        "The root cause is in src/app/cache.py: `evict_page` drops 3.5 MB too early.\n"
        "Still need to update docs/cache.md.\n"
        "Traceback (most recent call last):\n"
        '  File "src/app/cache.py", line 41, in evict_page\n'
        "    raise KeyError(page)\n"
        "KeyError: 17\n"
        "1 failed, 12 passed in 0.31s\n"
    )
    prose, output = facts(text, prose=True), facts(text, prose=False)
    assert {fact.value for fact in prose[FactKind.PATH]} >= {"src/app/cache.py", "docs/cache.md"}
    assert "evict_page" in {fact.value for fact in prose[FactKind.IDENTIFIER]}
    assert [fact.value for fact in prose[FactKind.DECISION]] == [text.splitlines()[0]]
    assert not output[FactKind.DECISION]
    assert [fact.value for fact in output[FactKind.TEST]] == ["1 failed, 12 passed in 0.31s"]
    errors = {fact.value for fact in output[FactKind.ERROR]}
    assert {"KeyError: 17", 'File "src/app/cache.py", line 41, in evict_page'} <= errors
    assert all(fact.value in text[slice(*fact.span)] for found in output.values() for fact in found)


@given(st.text(max_size=300), st.booleans())
def test_every_fact_stands_in_its_line(text: str, prose: bool) -> None:
    for fact in chain.from_iterable(facts(text, prose=prose).values()):
        start, end = fact.span
        assert 0 <= start < end <= len(text)
