"""What the rules take out is said elsewhere; what is said once stays; one pass settles it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.selection.anchors import Scanned
from kilburn.selection.cleaning import redundant
from kilburn.selection.lines import complement, merge

BLOCK = "".join(f"a line of a block that is long enough to count, number {word}\n" for word in ("one", "two", "three", "four"))


def output(number: int, text: str, name: str = "run", key: str = "", fixed: bool = False) -> Scanned:
    return Scanned(number, text, ((0, len(text)),), name, key, fixed)


def left(scanned: list[Scanned]) -> list[str]:
    """The pages' texts after a pass."""
    return ["".join(page.text[start:stop] for start, stop in page.spans) for page in cleaned(scanned)]


def cleaned(scanned: list[Scanned]) -> list[Scanned]:
    cuts: dict[int, list[tuple[int, int]]] = {}
    for cut in redundant(scanned):
        cuts.setdefault(cut.page, []).append((cut.start, cut.stop))
    return [
        Scanned(page.page, page.text, complement(page.spans, merge(cuts.get(page.page, []))), page.name, page.key, page.fixed)
        for page in scanned
    ]


def test_an_older_view_of_the_same_file_goes_for_the_newer() -> None:
    old, new = "import os\n\ndef f():\n    return 1\n", "import os\n\ndef f():\n    return 2\n"
    assert left([output(2, old, "read", "read a.py"), output(4, new, "read", "read a.py")]) == ["", new]


def test_the_same_words_that_gave_something_else_supersede_nothing() -> None:
    pages = [
        output(2, "page one of the text\nits end\n", "scroll", "scroll"),
        output(4, "page two\nthe end\n", "scroll", "scroll"),
    ]
    assert left(pages) == [page.text for page in pages]


def test_a_newer_view_that_failed_supersedes_nothing() -> None:
    pages = [
        output(2, "def f(): pass\n", "read", "read a.py"),
        output(4, "cat: a.py: No such file or directory\n", "read", "read a.py"),
    ]
    assert left(pages) == [page.text for page in pages]


def test_the_latest_output_is_compared_with_but_never_cut() -> None:
    assert left([output(2, BLOCK, "read", "read a"), output(4, BLOCK, "read", "read a", fixed=True)]) == ["", BLOCK]
    assert left([output(2, BLOCK, fixed=True), output(4, BLOCK)]) == [BLOCK, BLOCK]


def test_a_failed_try_goes_down_to_its_error_line_once_the_tool_has_succeeded() -> None:
    failed = "usage line\n  --all  everything\n  --one  one thing\nerror: unrecognized arguments: --al\n"
    tries = [output(2, failed), output(4, "3 files\n")]
    assert left(tries) == ["error: unrecognized arguments: --al\n", "3 files\n"]
    assert left(tries[:1]) == [failed], "nothing has succeeded yet"


def test_a_block_goes_for_its_last_copy_and_single_lines_stay() -> None:
    pages = [output(2, f"before\n{BLOCK}after\n"), output(4, BLOCK + "more\n")]
    assert left(pages) == ["before\nafter\n", BLOCK + "more\n"]
    line = BLOCK.splitlines(keepends=True)[0]
    assert left([output(2, f"x\n{line}y\n"), output(4, f"z\n{line}w\n")]) == [f"x\n{line}y\n", f"z\n{line}w\n"]


def test_repetition_within_one_page_keeps_the_last() -> None:
    assert left([output(2, BLOCK + "between\n" + BLOCK)]) == ["between\n" + BLOCK]
    loop = "still waiting for the server to come up\n" * 40
    assert 1 <= left([output(2, loop)])[0].count("\n") <= 5


LINE = st.sampled_from(["", "x", *(f"line {letter} " + letter * 40 for letter in "abcd"), "z" * 450])
TEXT = st.lists(LINE, max_size=14).map("\n".join)
PAGE = st.tuples(TEXT, st.sampled_from(["", "run", "read"]), st.sampled_from(["", "k1", "k2"]), st.booleans())


@settings(max_examples=300, deadline=None)
@given(pages=st.lists(PAGE, max_size=6))
def test_a_second_pass_finds_nothing_and_no_line_is_lost_but_to_a_copy_or_an_error(
    pages: list[tuple[str, str, str, bool]],
) -> None:
    scanned = [
        output(number, text, name, name and key, fixed) for number, (text, name, key, fixed) in enumerate(pages, 1) if text
    ]
    once = [page for page in cleaned(scanned) if page.spans]
    assert redundant(once) == []
    shown = {line for page in once for start, stop in page.spans for line in page.text[start:stop].splitlines()}
    superseded = {page.page for page in scanned} - {page.page for page in once}
    for page in scanned:
        if page.page not in superseded and page.spans:
            assert set(page.text.splitlines()) <= shown
