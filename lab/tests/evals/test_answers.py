"""`eval answers`: questions with exact answers, and readers that know only the window."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError, Unavailable
from kilburn.model import Request
from kilburn.models.scripted import Scripted
from kilburn_lab.evals.answers import ALONE, AnswerReport, SavedReply, evaluate
from kilburn_lab.evals.baselines import HISTORY
from kilburn_lab.evals.questions import FAMILIES, Interview, interviews, normal
from kilburn_lab.evals.readers import ModelReader, WeightsReader
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.saved import SavedCells
from kilburn_lab.evals.trajectories import synthetic

LOG = """\
tests/test_rows.py ..F.F
E   ValueError: no row 17 of 12
FAILED tests/test_rows.py::test_last_row - ValueError: no row 17 of 12
FAILED tests/test_rows.py::test_first_row - TypeError: a row is no list
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some made-up runs in a file, and a log."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "runs.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, synthetic(12, seed=4))))
    (folder / "test.log").write_text(LOG, encoding="utf-8")
    return folder


def recorded(runs: Path, half: str = "") -> list[Interview]:
    return interviews(12, 6, data=runs / "runs.jsonl", logs=runs, tokens=1000, half=half)


def rows(report: AnswerReport) -> dict[str, float]:
    return {row.policy: row.right for row in report.rows}


def test_each_question_has_one_answer_in_its_session_and_none_in_itself(runs: Path) -> None:
    asked = [(one, question) for one in [*interviews(6, 8, seed=1), *recorded(runs)] for question in one.questions]
    assert {FAMILIES[question.kind] for _, question in asked} == set(FAMILIES.values())
    for one, question in asked:
        told = "\n".join(f"{step.thought}\n{step.action}\n{step.observation}" for step in one.steps)
        assert question.answer in told
        assert normal(question.answer) not in normal(question.text)
    known = {question.text: question.answer for _, question in asked}
    assert known["Which test failed with this message: TypeError: a row is no list"] == "test_first_row"


def test_a_writer_is_asked_once_for_each_session_and_judged_by_the_answers() -> None:
    writer = Scripted(["The work goes on, and nothing was decided."] * 1000)
    few, many = (evaluate(1, count, windows=[1000], policies=["summarize"], writer=writer) for count in (1, 6))
    alone, plain = many.row("summarize +model", 1000), many.row("summarize", 1000)
    assert (few.row("summarize +model", 1000).questions, alone.questions) == (1, 6)
    assert len(writer.requests) == few.row("summarize +model", 1000).writer.asks + alone.writer.asks
    # A question may make a policy ask once more; the session before it is told again and not asked again.
    assert 0 < alone.writer.asks <= few.row("summarize +model", 1000).writer.asks + 5
    assert plain.writer.asks == 0
    assert "writer" in many.table()
    assert "writer" not in evaluate(1, 1, windows=[1000], policies=["fifo"]).table()


def test_a_definition_is_read_as_python_reads_it(tmp_path: Path) -> None:
    shown = (
        "[File: src/a.py (9 lines)]\n7:class Tree(Node):\n8:    def grow(self, by: int = 17, *, far='off'):\n9:  ...",
        "[File: src/b.py (9 lines)]\n2:class Leaf(Twig):\n3:    def fall(self, to, slowly=0.5):\n4:    def stay(self, by=7):",
    )
    steps = [{"thought": "I look.", "action": "open", "observation": text + "\n" * 300} for text in shown]
    (tmp_path / "runs.jsonl").write_bytes(msgspec.json.encode({"id": "x", "head": [], "steps": steps}))
    known = {q.text: q.answer for one in interviews(1, 99, data=tmp_path / "runs.jsonl", tokens=250) for q in one.questions}
    assert known["What is the base class of `Tree` in src/a.py?"] == "Node"
    assert known["On which line does the definition of `grow` in src/a.py begin?"] == "8"
    assert known["What is the last argument of `grow` in src/a.py called?"] == "far"
    assert known["What is the default value of the argument `slowly` of `fall` in src/b.py?"] == "0.5"


def test_the_exact_reader_knows_all_from_the_full_history_and_nothing_from_the_question() -> None:
    report = evaluate(3, 4, windows=[100_000], policies=["hybrid"])
    assert rows(report) == {ALONE: 0.0, HISTORY: 1.0, "tail": 1.0, "hybrid": 1.0}
    assert {row.overflow for row in report.rows} == {0}


def test_a_window_that_is_too_small_costs_answers_and_tools_bring_them_back() -> None:
    alone = evaluate(3, 4, windows=[1000], policies=["fifo"])
    with_tools = evaluate(3, 4, windows=[1000], policies=["fifo"], tools=True)
    assert rows(alone)["fifo"] < 0.5 < rows(with_tools)["fifo"]
    assert rows(alone)["tail"] == rows(with_tools)["tail"]
    row = with_tools.row("fifo", 1000)
    assert 0 < row.calls <= 2
    assert (row.overflow, row.gain) == (0, pytest.approx(row.right - rows(alone)["tail"]))


def test_a_session_is_shipped_once_however_many_questions_are_asked_of_it() -> None:
    one, four = (evaluate(1, count, windows=[3000], policies=["fifo"], seed=2) for count in (1, 4))
    for policy in ("tail", "fifo"):
        few, many = one.row(policy, 3000), four.row(policy, 3000)
        assert many.questions == 4
        # Each further question is one more prompt, which goes on from the session's last one.
        assert many.prompts == few.prompts + 3
        assert few.kept is not None
        assert many.kept is not None
    bills = {(bill.policy, bill.provider): bill for bill in four.bills}
    assert (ALONE, "openai") not in bills
    assert bills[HISTORY, "openai"].read > bills["fifo", "openai"].read > bills["tail", "openai"].read
    assert bills["tail", "openai"].shipped > four.row("tail", 3000).shipped * 4


def test_a_model_is_asked_for_json_and_may_look_a_fact_up_before_it_answers() -> None:
    [one] = interviews(1, 1)
    [asked] = one.questions

    def reply(request: Request) -> str:
        shown = str(request.messages[-1]["content"])
        assert asked.text in shown
        if found := re.search(asked.fact, shown, re.MULTILINE):
            return msgspec.json.encode({"answer": found[1]}).decode()
        forms = (request.schema or {}).get("anyOf")
        return msgspec.json.encode({"search_memory": asked.text} if forms else {"answer": "unknown"}).decode()

    def measured(model: Scripted, **options: bool) -> AnswerReport:
        return evaluate(1, 1, windows=[200], policies=["fifo"], reader=ModelReader(model), **options)

    assert rows(measured(Scripted([reply] * 9))) == {ALONE: 0.0, HISTORY: 1.0, "tail": 0.0, "fifo": 0.0}
    report = measured(Scripted([reply] * 9), tools=True)
    assert report.row("fifo", 200).calls >= 1
    # A model that fails, or does not write what it was asked for, has no answer.
    for wrong in ("my answer is 7", '{"recall": "p1"}', '{"answer": 7}', '["answer"]', Unavailable("gone", advice="wait")):
        assert set(rows(measured(Scripted([wrong] * 9))).values()) == {0.0}


def test_replies_are_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    def kept(model: Scripted, policy: str, *, resume: bool) -> AnswerReport:
        saved = SavedCells(tmp_path / "replies.jsonl", model.name, SavedReply, resume=resume)
        return evaluate(1, 2, windows=[500], policies=[policy], reader=ModelReader(model), saved=saved)

    first = kept(Scripted(['{"answer": "yes"}'] * 8), "fifo", resume=False)
    assert kept(Scripted(), "fifo", resume=True) == first
    # What another policy shows has to be read.
    more = Scripted(['{"answer": "yes"}'] * 8)
    kept(more, "hybrid", resume=True)
    assert 0 < len(more.requests) <= 2


def test_weights_are_held_to_the_form() -> None:
    class Copyist:
        name = "copyist"

        def write(self, system: str, asked: str, verbs: tuple[str, ...], length: int) -> tuple[str, str]:
            return verbs[-1], "p1"

    report = evaluate(1, 1, windows=[500], policies=["fifo"], reader=WeightsReader(Copyist()), tools=True)
    assert {one.policy: one.calls for one in report.outcomes} == {ALONE: 0, HISTORY: 0, "tail": 0, "fifo": 2}


def test_questions_of_another_session_are_not_answered() -> None:
    assert set(rows(evaluate(3, 4, windows=[2000], policies=["fifo"], swap=True)).values()) == {0.0}


def test_the_halves_of_the_sessions_have_none_in_common(runs: Path) -> None:
    tune, report = ({one.id for one in recorded(runs, half)} for half in HALVES)
    assert tune
    assert report
    assert not tune & report
    assert tune | report == {one.id for one in recorded(runs)}


def test_the_same_seed_asks_the_same() -> None:
    assert interviews(2, 6, seed=3) == interviews(2, 6, seed=3) != interviews(2, 6, seed=4)


def test_the_verb_prints_a_table_or_json(runs: Path) -> None:
    small = ("lab", "answers", "--sample", "2", "--tokens", "1000", "--window", "500", "--policy", "fifo")
    said = command(*small, "--data", str(runs / "runs.jsonl"), "--logs", str(runs), "--tools", "--json")
    assert said.status == 0
    assert {row["policy"] for row in said.json["rows"]} == {ALONE, HISTORY, "tail", "fifo"}
    assert "the exact reader has no tools" in command(*small).out
    assert command(*small, "--half", "third").status == 2
    assert command(*small, "--resume").status == 2
    assert command(*small, "--model", "nobody").status == 2


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for wrong in (
        {"sessions": 0},
        {"questions": 0},
        {"windows": []},
        {"windows": [0]},
        {"policies": ["nobody"]},
        {"logs": tmp_path},
    ):
        with pytest.raises(SpecError):
            evaluate(**{"sessions": 1, **wrong})  # type: ignore[arg-type]
