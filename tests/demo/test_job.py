"""The demo from end to end on a small library: nothing overflows, nothing is lost, all is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kilburn.demo.job import DemoPlan, JobResult, check, perform
from kilburn.demo.voice import phrase
from kilburn.errors import SpecError
from kilburn.models import weights
from kilburn.models.local import Local
from kilburn.models.scripted import Scripted


@pytest.fixture(scope="module")
def performed(shared_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return perform(DemoPlan(db=str(tmp_path_factory.mktemp("demo") / "d.db"), library=str(shared_tree), window=2500, seed=3))


def test_a_history_far_beyond_the_window_never_overflows_it(performed: JobResult) -> None:
    assert performed.output_tokens > 10 * performed.plan.window
    assert performed.stats.overflow == 0
    assert 0 < performed.stats.peak <= performed.stats.room < performed.plan.window
    assert all(tokens <= performed.stats.room for _, tokens in performed.curve)
    assert len(performed.curve) == performed.stats.prompts


def test_every_page_comes_back_as_it_was_handed_over(performed: JobResult) -> None:
    assert performed.lost == 0
    assert performed.checked == performed.stats.pages
    assert performed.checked_bytes > 4 * performed.plan.window
    assert performed.failed == 0


def test_every_question_is_answered_exactly_from_memory(performed: JobResult) -> None:
    assert [asked.question for asked in performed.asked if not asked.exact] == []
    assert len(performed.asked) == 40
    assert {asked.kind for asked in performed.asked} == {"signature", "method", "constant", "line", "place"}
    assert all(asked.address for asked in performed.asked)
    assert performed.recalls
    assert performed.searches
    assert performed.ok


def test_the_rivals_had_the_same_window_and_lost_most(performed: JobResult) -> None:
    assert [rival.name for rival in performed.rivals] == ["truncation", "summarisation"]
    for rival in performed.rivals:
        assert 0 < rival.tokens <= performed.stats.room
        assert rival.exact < len(performed.asked) / 2


def test_an_address_that_was_given_can_be_recalled_afterwards(performed: JobResult) -> None:
    asked = next(asked for asked in performed.asked if asked.kind == "line")
    with kilburn.open(performed.plan.db, window=100_000, policy="fifo", readonly=True) as store:
        assert asked.answer in store.session(performed.session).recall(asked.address)


@pytest.mark.parametrize("policy", ["lru", "chain(preprocess, mask, fifo)", "summarize(ask=False)"])
def test_other_policies_lose_nothing_either(policy: str, shared_tree: Path, tmp_path: Path) -> None:
    results = perform(DemoPlan(db=str(tmp_path / "d.db"), library=str(shared_tree), window=3000, policy=policy, questions=10))
    assert results.ok, [asked for asked in results.asked if not asked.exact]


def test_an_agent_that_has_read_enough_is_asked_about_what_it_read(shared_tree: Path, tmp_path: Path) -> None:
    plan = DemoPlan(db=str(tmp_path / "d.db"), library=str(shared_tree), window=4000, enough=15_000, questions=10)
    results = perform(plan)
    assert results.stopped > 0
    assert 15_000 <= results.output_tokens < 25_000
    assert results.ok, [asked for asked in results.asked if not asked.exact]


def test_a_name_that_an_unread_file_defines_too_is_not_asked_for(tmp_path: Path) -> None:
    # `enough` ends the reading after the first file; the search for definitions goes over all files.
    root = tmp_path / "library"
    root.mkdir()
    (root / "first.py").write_text("def shared(one):\n    return one\n\n\ndef alone(one):\n    return one\n" + "# more\n" * 30)
    (root / "second.py").write_text("def shared(one):\n    return one\n")
    for seed in range(4):
        plan = DemoPlan(db=str(tmp_path / f"{seed}.db"), library=str(root), window=4000, enough=60, seed=seed)
        results = perform(plan)
        assert (results.files, results.stopped) == (1, 1)
        assert [asked.expected for asked in results.asked if asked.kind == "place"] == ["first.py"]
        assert results.ok, [asked for asked in results.asked if not asked.exact]


def test_a_store_that_has_the_session_already_is_refused(performed: JobResult, shared_tree: Path) -> None:
    with pytest.raises(SpecError, match="already"):
        perform(DemoPlan(db=performed.plan.db, library=str(shared_tree)))


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no folder"):
        perform(DemoPlan(db=str(tmp_path / "d.db"), library=str(tmp_path / "nowhere")))


def test_each_phase_is_told_in_turn(shared_tree: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    plan = DemoPlan(db=str(tmp_path / "d.db"), library=str(shared_tree), questions=5)
    perform(plan, report=lambda phase, done, total, line: lines.append(phase))
    assert list(dict.fromkeys(lines)) == ["work", "check", "questions", "answers", "rivals"]


def test_a_page_that_does_not_come_back_is_counted_as_lost(shared_tree: Path, tmp_path: Path) -> None:
    plan = DemoPlan(db=str(tmp_path / "d.db"), library=str(shared_tree), questions=1)
    results = perform(plan)
    with kilburn.open(plan.db, window=4000, policy="fifo", readonly=True) as store:
        given = list(store.session(results.session).recall(f"p1-p{results.stats.pages}").parts)
    check(given, results)
    assert (results.checked, results.lost) == (results.stats.pages, 0)
    check([*given[:-1], given[-1] + "x", "gone"], results)
    assert results.lost == len(given[-1].encode()) + 1 + len("gone")


def test_a_model_answers_from_what_one_search_brings_and_is_not_believed() -> None:
    with kilburn.open(":memory:", window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append({"role": "user", "content": "The relay of boculemi listens on port 31245."})
        model = Scripted(["It is\n31245.", "It is 31245."])
        right = phrase(model, session, "Which port has boculemi?", "31245")
        wrong = phrase(model, session, "Which port has boculemi?", "99")
    assert (right.said, right.found, right.holds) == ("It is 31245.", True, True)
    assert (wrong.found, wrong.holds) == (False, False)
    assert "listens on port 31245" in model.requests[0].messages[-1]["content"]


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_model_folds_and_phrases(shared_tree: Path, tmp_path: Path) -> None:
    weights.pull("smollm2")
    plan = DemoPlan(db=str(tmp_path / "d.db"), library=str(shared_tree), questions=5, folds=1, phrases=1)
    with Local("smollm2") as model:
        results = perform(plan, model)
    assert results.ok
    assert [fold.outcome in ("accepted", "completed", "rejected") for fold in results.model_folds] == [True]
    assert results.model_folds[0].why
    assert results.model_folds[0].tokens > 1000
    assert [bool(phrase.said) for phrase in results.phrases] == [True]
    with kilburn.open(plan.db, window=8000, policy="fifo", readonly=True) as store:
        assert store.session("folds by smollm2").stats().asks == 1
