"""Garbage is caught, a good summary passes, a thin one is completed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.extract import Piece, extract
from kilburn.selection.judgement import complete, garbage, judge, key_facts

PROMPT = "Summarise the following part of the transcript. Keep paths, identifiers, numbers, decisions, errors and open tasks."
PIECES = (
    Piece(1, "user", "text", "Please fix the cache: evict_page must never drop a pinned page. Use at most 64 MB."),
    Piece(2, "assistant", "call", '{"path": "src/store/cache.py"}', "read(src/store/cache.py)"),
    Piece(
        3,
        "tool",
        "result",
        "10:class PageCache:\n11:    def evict_page(self, page):\n12:        self.pages.pop(page)\n",
        "read(src/store/cache.py)",
    ),
    Piece(
        4,
        "assistant",
        "text",
        "The root cause is that evict_page ignores pin_count in src/store/cache.py. I'll add a check and run the tests.",
    ),
    Piece(
        5,
        "tool",
        "result",
        "FAILED tests/test_cache.py::test_pins - KeyError: 17\n=== 1 failed, 41 passed in 2.10s ===\n",
        "run(pytest)",
    ),
    Piece(6, "assistant", "text", "The fix is to test pin_count first. Still need to update docs/cache.md."),
)
GOOD = (
    "The user wants evict_page (src/store/cache.py) never to drop a pinned page, within 64 MB. "
    "Root cause: it ignores pin_count. Tests: 1 failed, 41 passed; tests/test_cache.py::test_pins raises KeyError: 17. "
    "Decision: check pin_count first. Open: docs/cache.md."
)


def quarter(text: str) -> int:
    return (len(text) + 3) // 4


def test_a_copy_in_another_order_is_an_echo() -> None:
    sentences = [" ".join(f"{word}{number}" for number in range(40)) + ". " for word in ("alpha", "beta", "gamma")]
    pieces = (Piece(1, "tool", "result", "".join(sentences), ""),)
    assert garbage("".join(reversed(sentences)), pieces) == "echo"


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        (GOOD, "done"),
        ("", "empty"),
        (" \n\t", "empty"),
        ("...", "empty"),
        ("I'm sorry, but I can't assist with that request.", "refusal"),
        ("I am sorry, but I cannot help with this log.", "refusal"),
        ("I’m afraid I can’t do that.", "refusal"),
        ("Unfortunately, I cannot summarize this conversation.", "refusal"),
        ("Sure! Please provide the transcript that you would like me to summarise.", "refusal"),
        ("The page is here. The page is here. The page is here.", "repeats"),
        ("I will now write it down. I will now write it down.", "repeats"),
        ("page page page page page page", "repeats"),
        (
            "the parser drops lines\nit fails on linux\nthe parser drops lines\nwe fix it tomorrow\nthe parser drops lines",
            "repeats",
        ),
        ("The agent is a tool. The agent is a tool that can be used to help. " * 8, "repeats"),
        ("1. src/store/cache.py\n2. evict_page\n" + "- The cache is a cache of pages.\n" * 12, "repeats"),
        ("na" * 200 + " the cache and the page", "repeats"),
        (PROMPT, "echo"),
        (f"{PROMPT} The agent did it.", "echo"),
        ("\n".join(piece.text for piece in PIECES), "echo"),
        ("\n".join(str(number) for number in range(1, 90)) + "\nThe agent counts.", "repeats"),
        ("The user asked for a fix in a software project. The assistant looked at the code and ran the tests.", "drops"),
        (
            "The agent rewrote app/models/user_account.py, moved UserManager.authenticate() to bcrypt 4.0.1, and evict_page in "
            "src/store/cache.py now honours pin_count; 128 tests passed, 1 failed.",
            "invents",
        ),
    ],
)
def test_outcomes(summary: str, outcome: str) -> None:
    assert judge(summary, PIECES, prompt=PROMPT, tokens=500, count=quarter).verdict == outcome


def test_a_short_loop_is_garbage_where_there_is_no_fact_to_miss() -> None:
    plain = [Piece(1, "assistant", "text", "hello there, on we go with nothing in particular")]
    assert judge("It goes on and on. It goes on and on. It goes on and on.", plain).verdict == "repeats"
    assert judge("Nothing of note so far; the agent goes on.", plain).acceptable
    assert garbage("0 0 0 0 0 0 0 0", plain) is None, "a row of numbers may be all that there is to say"


def test_a_summary_over_its_budget_is_too_long() -> None:
    assert judge(GOOD, PIECES, tokens=20, count=quarter).verdict == "toolong"


def test_missing_facts_are_named_and_invented_ones_too() -> None:
    judged = judge("evict_page in src/store/cache.py ignores pin_count; see lib/unknown_file.py.", PIECES, keep=0.0)
    assert judged.acceptable
    assert judged.invented == ("lib/unknown_file.py",)
    assert "1 failed" in {fact.value for fact in judged.missing}


def test_a_count_may_be_said_in_other_words() -> None:
    judged = judge("Running the suite, 1 test failed while 41 of them passed.", PIECES, keep=0.0)
    assert not {"1 failed", "41 passed"} & {fact.value for fact in judged.missing}


def test_key_facts_stand_in_their_pages() -> None:
    found = key_facts(PIECES)
    assert {"evict_page", "pin_count", "cache.py", "1 failed", "41 passed"} <= {fact.value for fact in found}
    texts = {piece.page: piece.text for piece in PIECES}
    assert all(fact.value in texts[fact.page][slice(*fact.span)] for fact in found)


def test_a_thin_summary_is_completed_with_verbatim_lines() -> None:
    thin = "The user asked for a fix of evict_page in cache.py. The assistant looked at the code and ran the tests."
    judged = judge(thin, PIECES)
    assert judged.reparable
    full = complete(thin, judged.missing, PIECES, 300, quarter)
    assert full.startswith(thin)
    assert "p5: === 1 failed, 41 passed in 2.10s ===" in full
    assert judge(full, PIECES, prompt=PROMPT, tokens=300, count=quarter).verdict == "done"


def test_the_extract_of_a_span_is_an_acceptable_summary_of_it() -> None:
    filler = [Piece(page, "tool", "result", f"captured output of step {page}\n" * 80, "run(step)") for page in range(7, 12)]
    pieces = (*PIECES, *filler)
    text = extract(pieces, 260, quarter).text
    assert judge(text, pieces, prompt=PROMPT, tokens=260, count=quarter).verdict == "done"


@given(st.text(max_size=300), st.integers(0, 200))
def test_any_text_is_judged_and_completed_within_the_budget(summary: str, tokens: int) -> None:
    judged = judge(summary, PIECES, prompt=PROMPT, tokens=tokens, count=quarter)
    assert 0.0 <= judged.coverage <= 1.0
    assert judged == judge(summary, PIECES, prompt=PROMPT, tokens=tokens, count=quarter)
    assert quarter(complete(summary, key_facts(PIECES), PIECES, tokens, quarter)) <= tokens
