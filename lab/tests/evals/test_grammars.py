"""Facts of sources in Java, C, Go and JavaScript, and what is measured with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError
from kilburn_lab.evals.answers import ALONE, evaluate
from kilburn_lab.evals.baselines import HISTORY
from kilburn_lab.evals.grammars import GRAMMARS, definitions, grammar_of, shelves
from kilburn_lab.evals.paging import evaluate as paging
from kilburn_lab.evals.questions import FAMILIES, interviews
from kilburn_lab.evals.sample import sample_of

SOURCES = Path(__file__).with_name("sources")


def facts(path: str, line: str) -> dict[str, str]:
    """By question, without the name of the file, what a line answers; "line" for its own number."""
    grammar = grammar_of(path)
    assert grammar is not None
    asked = ((fact.asked.replace(" in {path}", ""), line[fact.start : fact.stop] or "line") for fact in grammar.facts(line))
    return dict(asked)


@pytest.mark.parametrize(
    ("path", "line", "name", "more"),
    [
        ("a.py", "def grow(self, by: int = 17, *, far='off'):", "grow", {"What is the last argument of `grow` called?": "far"}),
        ("a.java", "public class Tree extends Node implements Leaf {", "Tree", {"What is the base class of `Tree`?": "Node"}),
        ("a.java", "private static final int LIMIT = 17;", "LIMIT", {"What is the value of `LIMIT`?": "17"}),
        ("a.java", "Tree(int a, char[] b, int... cs) {", "Tree", {"What is the last argument of `Tree` called?": "cs"}),
        ("a.c", "static int f(struct t *t, int (*g)(int), char *far)", "f", {"What is the last argument of `f` called?": "far"}),
        ("a.h", "extern int f(int one, char **two, unsigned n);", "f", {"What is the last argument of `f` called?": "n"}),
        ("a.h", "# define LIMIT   0x11 /* each */", "LIMIT", {"What is the value of `LIMIT`?": "0x11"}),
        ("a.c", 'static const char *name = "mercury";', "name", {"What is the value of `name`?": '"mercury"'}),
        ("a.c", "struct tree {", "tree", {}),
        ("a.go", "func (t *Tree) Grow(by, far int) {", "Grow", {}),
        ("a.go", "func Grow(t Tree, by, far int) (int, error) {", "Grow", {"What is the last argument of `Grow` called?": "far"}),
        ("a.go", "var limit = 17", "limit", {"What is the value of `limit`?": "17"}),
        ("a.go", "type Handler func(w Writer, r *Request)", "Handler", {}),
        ("a.js", "export default class Tree extends Node {", "Tree", {"What is the base class of `Tree`?": "Node"}),
        ("a.js", "grow(by = 17) {", "grow", {"What is the default value of the argument `by` of `grow`?": "17"}),
        ("a.mjs", "const grow = async (a, b, ...rest) => {", "grow", {"What is the last argument of `grow` called?": "rest"}),
        ("a.js", "let über = 'größe';", "über", {"What is the value of `über`?": "'größe'"}),
    ],
)  # fmt: skip
def test_a_line_is_read_as_its_language_reads_it(path: str, line: str, name: str, more: dict[str, str]) -> None:
    found = facts(path, line)
    assert found[f"On which line does the definition of `{name}` begin?"] == "line"
    assert more.items() <= found.items()
    assert len(found) <= 3


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a.java", "if (x) {"),
        ("a.java", "return f(a, b, c);"),
        ("a.java", "for (int i = 7; i < 3; i++) {"),
        ("a.c", "} else if (f(a, b, c)) {"),
        ("a.c", "else if (f(a, b, c)) {"),
        ("a.c", "foo(a, b, c);"),
        ("a.c", "#define MAX(a, b) 17"),
        ("a.go", "if err := f(a, b, c); err != nil {"),
        ("a.go", "x, y := 1, 17"),
        ("a.js", "while (x) {"),
        ("a.js", "return f(a, 17, c);"),
        ("a.js", "} catch (e) {"),
    ],
)
def test_a_line_that_defines_nothing_states_nothing(path: str, line: str) -> None:
    assert facts(path, line) == {}


def test_the_sources_of_a_folder_are_told_apart_by_language(tmp_path: Path) -> None:
    shelf = shelves(SOURCES)
    assert {language: set(texts) for language, texts in shelf.items()} == {
        "C": {"drum.c", "drum.h"},
        "Go": {"queue.go", "stones.go"},
        "Java": {"Auditor.java", "Ledger.java"},
        "JavaScript": {"matcher.js", "router.js"},
    }
    assert dict(definitions("Ledger.java", shelf["Java"]["Ledger.java"]))[18] == "book"
    assert grammar_of("notes.txt") is None
    (tmp_path / "short.go").write_text("package short\n")
    (tmp_path / "latin.c").write_bytes(b"/* \xe9 */\n" * 30)
    with pytest.raises(SpecError, match="no sources"):
        shelves(tmp_path)


def test_questions_are_asked_of_each_language_and_have_their_answers_in_the_session() -> None:
    held = interviews(8, 60, sources=SOURCES, tokens=1500)
    asked = [(one, question) for one in held for question in one.questions if FAMILIES[question.kind] == "source"]
    assert {question.language for _, question in asked} == {grammar.name for grammar in GRAMMARS} - {"Python"}
    assert {question.kind for _, question in asked} == {"line", "base", "argument", "default"}
    known = {question.text: question.answer for _, question in asked}
    for one, question in asked:
        assert question.answer in "\n".join(step.observation for step in one.steps)
        assert f"-{question.language}-" in one.id
    said = {
        "What is the base class of `Ledger` in Ledger.java?": "Journal",
        "What is the value of `TRACKS` in drum.c?": "4096",
        "What is the last argument of `Push` in queue.go called?": "urgent",
        "On which line does the definition of `drum_stop` in drum.h begin?": "21",
        "What is the default value of the argument `depth` of `find` in router.js?": "7",
        "What is the last argument of `suspect` in Auditor.java called?": "withinDays",
    }
    assert len(known.keys() & said.keys()) > 2
    assert all(known[text] == said[text] for text in known.keys() & said.keys())


def test_answers_are_told_by_language() -> None:
    report = evaluate(4, 6, windows=[100_000, 500], policies=["fifo"], sources=SOURCES, tokens=1500)
    full, small = report.row("fifo", 100_000), report.row("tail", 500)
    assert full.languages == dict.fromkeys(full.languages, 1.0)
    assert len(full.languages) >= 3
    assert set(report.row(ALONE, 0).languages.values()) == {0.0}
    assert set(report.row(HISTORY, 500).languages.values()) == {1.0}
    assert min(small.languages.values()) < 1.0
    assert "questions in Java" in report.words
    assert {"C", "Go", "Java", "JavaScript"} & set(report.table().split())


def test_a_scripted_agent_copies_lines_of_the_sources_that_it_read() -> None:
    sample = sample_of(None, 8, sources=SOURCES)
    assert "C (2 runs) and Go (2 runs) and Java (2 runs) and JavaScript (2 runs) of sources" in sample.words
    assert sample.count("copy") > 20
    copied = {one.name for listed in sample.wanted.values() for one in listed if one.kind == "copy"}
    lines = {line.strip() for texts in shelves(SOURCES).values() for text in texts.values() for line in text.split("\n")}
    assert len(copied & lines) > 10
    report = paging(sample, [100_000, 300], ["fifo"])
    large, small = report.row("fifo", 100_000), report.row("fifo", 300)
    assert large.by_action["copy"].share == 1.0 > small.by_action["copy"].share
    assert sample_of(None, 8, sources=SOURCES).digest == sample.digest != sample_of(None, 8, sources=SOURCES, seed=1).digest
    for wrong in ("runs.jsonl", "."):
        with pytest.raises(SpecError, match="recorded runs and sources"):
            sample_of(wrong, sources=SOURCES)


def test_the_verbs_take_a_folder_of_sources() -> None:
    said = command("lab", "answers", "--sources", SOURCES, "--sample", 2, "--tokens", 1500, "--window", 500, "--policy", "fifo")
    assert said.status == 0, said.err
    assert "questions in" in said.out
    runs = command("lab", "paging", "--sources", SOURCES, "--sample", 2, "--window", 500, "--policy", "fifo")
    assert runs.status == 0, runs.err
    for verb in ("answers", "paging"):
        assert command("lab", verb, "--sources", SOURCES, "--data", "runs.jsonl", "--window", 500).status == 2
