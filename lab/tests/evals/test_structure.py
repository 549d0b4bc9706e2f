"""Whole sections: what counts, in the forms that agents see, and what scattered lines are worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.sample import sample_of
from kilburn_lab.evals.structure import Sections, sections

VIEW = """\
[File: src/parser.py (14 lines total)]
1:import re
2:from functools import cache
3:
4:class Parser:
5:    level = 3
6:
7:    def first(self, text):
8:        found = re.search("a", text)
9:        if found is None:
10:            return ""
11:        return found[0]
12:
13:    def last(
14:        self, text
15:    ):
16:        return text[-1]
"""

DIFF = """\
diff --git a/one.py b/one.py
--- a/one.py
+++ b/one.py
@@ -1,3 +1,3 @@
 import re
-level = 3
+level = 4
 other = 5
@@ -20,2 +20,3 @@ def last():
     value = 1
+    value += 1
     return value
"""

FAILURE = """\
collected 2 items
Traceback (most recent call last):
  File "one.py", line 3, in <module>
    first("b")
ValueError: no such letter
ran in 0.1 s
"""

LOG = """\
2026-11-23 00:01:02 INFO begins
2026-11-23 00:01:03 ERROR cannot read
    the reason
    and where
2026-11-23 00:01:09 INFO ends
"""

HITS = """\
Found 4 matches
src/parser.py:7:    def first(self, text):
src/parser.py (2 matches)
Line 13:    def last(
parser.py 16: return text[-1]
"""

texts = st.text(st.sampled_from("ab :-@/1\t\n(}"), max_size=80)


def share(prompt: str, *outputs: str) -> float:
    seen = Sections()
    for output in outputs:
        seen.add(output)
    whole, told = seen.count(prompt)
    return whole / told


def part(text: str, first: int, last: int) -> str:
    return "\n".join(text.split("\n")[first:last])


@given(st.lists(texts, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whole_outputs_in_any_order_are_whole(outputs: list[str], chance: random.Random) -> None:
    seen = Sections()
    for output in outputs:
        seen.add(output)
    chance.shuffle(outputs)
    whole, told = seen.count("\n[p1 out: 3 tokens]\n".join(outputs))
    assert whole == told


@given(texts, texts)
def test_what_is_whole_is_a_part_of_what_is_shown(output: str, prompt: str) -> None:
    seen = Sections()
    seen.add(output)
    whole, told = seen.count(prompt)
    assert 0 <= whole <= told <= len(prompt)


@given(texts)
def test_a_section_is_a_stretch_of_the_text(text: str) -> None:
    count = sum(1 for line in text.split("\n") if line.strip())
    assert all(0 <= first < last <= max(count, 1) for first, last in sections(text))


@given(st.lists(st.integers(0, 99), unique=True))
def test_scattered_lines_of_code_are_worth_nothing(places: list[int]) -> None:
    lines = [f"{number}:{'    ' * (number % 3)}name_{number} = {number}" for number in range(100)]
    apart = [place for place in places if place % 2]
    seen = Sections()
    seen.add("\n".join(lines))
    assert seen.count("\n".join(lines[place] for place in apart))[0] == 0


def test_a_whole_function_counts_and_half_of_it_does_so_in_part() -> None:
    assert share(part(VIEW, 7, 12), VIEW) == 1.0
    assert share(part(VIEW, 13, 17), VIEW) == 1.0
    assert share(part(VIEW, 7, 10), VIEW) == 0.0
    # The second function is whole, of the first one the end is not.
    assert 0.4 < share(part(VIEW, 10, 17), VIEW) < 0.8
    # Blank lines may be left out, others may not.
    assert share(part(VIEW, 4, 17).replace("\n6:\n", "\n"), VIEW) == 1.0
    assert share(part(VIEW, 7, 12).replace('10:            return ""', "…"), VIEW) == 0.0


@pytest.mark.parametrize(
    ("text", "first", "last", "whole"),
    [
        (DIFF, 3, 8, True),
        (DIFF, 8, 12, True),
        (DIFF, 4, 8, False),
        (FAILURE, 1, 5, True),
        (FAILURE, 1, 4, False),
        (LOG, 0, 1, True),
        (LOG, 1, 4, True),
        (LOG, 1, 2, False),
        (HITS, 1, 2, True),
        (HITS, 2, 3, True),
        (HITS, 3, 4, True),
        (HITS, 4, 5, True),
        (HITS, 0, 1, False),
    ],
)
def test_hunks_tracebacks_and_records(text: str, first: int, last: int, whole: bool) -> None:
    assert share(part(text, first, last), text) == whole


def test_a_paragraph_counts_by_its_lines_or_its_length() -> None:
    long = "A sentence that says something. " * 8
    prose = f"Title\n\n{long}\n\none line\n\nthree\nshort\nlines\n"
    assert share(long, prose) == 1.0
    assert share("three\nshort\nlines", prose) == 1.0
    assert share("one line", prose) == 0.0
    assert share(long[:100], prose) == 0.0


def test_what_is_not_of_an_output_counts_on_neither_side() -> None:
    seen = Sections()
    seen.add(LOG)
    assert seen.count("the agent's own words\n[p1 in part:]") == (0, 0)


def test_the_rows_have_it_where_the_window_cannot_hold_everything() -> None:
    report = evaluate(sample_of(None, 3), [600, 100_000], ["hybrid"])
    tail, hybrid = (report.row(policy, 600).sections for policy in ("tail", "hybrid"))
    assert tail is not None
    assert hybrid is not None
    assert 0 < hybrid < tail < 1
    assert report.row("hybrid", 100_000).sections is None
