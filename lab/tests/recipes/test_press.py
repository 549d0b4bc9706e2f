"""`eval press`: the same cache for each press, nothing told that gives the answer away, figures that follow from the outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cli.terminal import Said, kilburn
from kilburn.errors import BudgetTooSmall, SpecError
from kilburn_kv.engine import Engine
from kilburn_kv.weights import Weights, weights_of
from kilburn_lab.evals.intervals import wilson
from kilburn_lab.evals.trajectories import synthetic
from press import app
from press_curves.measurement import PRESSES, RESTARTS, Setting, _read, evaluate
from press_curves.needles import Case, Passage, case_of, frame_of, library, passages_of
from press_curves.report import FULL, OURS, WHENS, Pressed, draw

TEXT = [found for run in synthetic(12, 7) if (found := passages_of(run))]
REST = 12


def press(*words: object) -> Said:
    """Run the recipe in this process."""
    return kilburn(*words, commands=app, name="press.py")


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte."""
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def tiny() -> Weights:
    """Two layers of random weights, which read letters."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=0,
        max_position_embeddings=4096,
    )
    return weights_of(LlamaForCausalLM(config), letters())


@pytest.fixture(scope="module")
def report(tiny: Weights) -> Pressed:
    return evaluate(tiny, TEXT, Setting(cases=2, tokens=900, rest=REST, budgets=(1.0, 0.5, 0.4)), name="tiny")


def case(tiny: Weights, number: int, seed: int = 0) -> Case:
    return case_of(TEXT, tiny, frame_of(tiny.tokenizer), number, tokens=900, rest=REST, seed=seed)


def test_at_the_whole_budget_everybody_is_the_full_cache(report: Pressed) -> None:
    for when in WHENS:
        full = report.cell(FULL, 1.0, when)
        for way in PRESSES:
            found = report.cell(way, 1.0, when)
            assert (found.right, found.logprob, found.rest) == (full.right, full.logprob, full.rest)


def test_a_smaller_cache_and_a_restart_are_other_models(report: Pressed) -> None:
    for when in WHENS:
        told = {report.cell(way, 0.5, when).logprob for way in PRESSES}
        # Nobody keeps what another keeps: not even the restart, and not the page-aware press that is told less.
        assert len(told) == len(PRESSES)
    for way in RESTARTS:
        assert report.cell(way, 0.5).rest != report.cell(FULL, 0.5).rest


def test_reading_behind_many_caches_at_once_is_reading_behind_each(tiny: Weights) -> None:
    engine = Engine(tiny, 2048)
    tokens = [5, 9, 200, 31, 77, 5]
    caches = [engine.open([1 + (place * step) % 250 for place in range(40)]) for step in (3, 7)]
    for cache, read in zip([engine.fork(one) for one in caches], _read(engine, caches, tokens, 3), strict=True):
        logs = []
        for token in tokens:
            logs.append(float(engine.refresh(cache).log_softmax(-1)[token]))
            engine.step([(cache, [token])])
        assert read.logs.tolist() == pytest.approx(logs[-3:], abs=1e-4)


def test_an_answer_is_right_where_greedy_decoding_says_it(tiny: Weights) -> None:
    engine = Engine(tiny, 2048)
    cache = engine.open([1 + (place * place) % 250 for place in range(40)])
    tokens = [9]
    engine.step([(cache, tokens)])
    for _ in range(4):
        tokens.append(int(engine.refresh(cache).argmax()))
        engine.step([(cache, tokens[-1:])])
    engine.truncate(cache, 40)
    (greedy,) = _read(engine, [engine.fork(cache)], tokens, 4)
    (other,) = _read(engine, [engine.fork(cache)], [*tokens[:-1], (tokens[-1] + 1) % 256], 4)
    assert greedy.right
    assert not other.right


def test_the_same_seed_gives_the_same_cases_and_another_seed_others(tiny: Weights) -> None:
    assert case(tiny, 3) == case(tiny, 3)
    assert case(tiny, 3).prompt != case(tiny, 4).prompt
    assert case(tiny, 3).prompt != case(tiny, 3, seed=1).prompt


def test_what_a_press_is_told_does_not_give_the_answer_away(tiny: Weights) -> None:
    """Questions differ, the context and what is known of it do not; and the answer is on pages of every kind that hold facts."""
    kinds: Counter[str] = Counter()
    places = []
    for number in range(120):
        one = case(tiny, number)
        home = one.leaves[one.home - 1]
        answer = tiny.text(list(one.answer))
        assert answer in home.text
        assert answer not in tiny.text(list(one.question))
        assert not home.stale
        assert not home.pinned
        # All pages that a press is told of look alike to it but for what is known of every one of their kind.
        facts = one.facts
        assert facts.keys() == set(range(1, len(one.leaves) + 1))
        assert all(fact.distance is None for fact in facts.values())
        assert sum(fact.stale for fact in facts.values()) == 2
        assert sum(fact.folded for fact in facts.values()) == 1
        # The value stands where it was planted, and in an excerpt of that page at most.
        others = {at for at, leaf in enumerate(one.leaves, 1) if answer.strip() in leaf.text} - {one.home}
        assert all(one.leaves[at - 1].role == "excerpt" for at in others)
        kinds[one.kind] += 1
        kinds["folded"] += home.folded
        places.append((one.home - 1) / len(one.leaves))
    assert kinds["updated"] == kinds["plain"] == 60
    # A page that is folded is not spared: what is known of it may be wrong for the question.
    assert kinds["folded"] > 0
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_an_older_version_stands_before_the_later_one_and_says_another_value(tiny: Weights) -> None:
    one = case(tiny, 0)
    assert one.kind == "updated"
    subject = one.asked.removeprefix("What is the ").removesuffix("?")
    saying = [at for at, leaf in enumerate(one.leaves, 1) if f"{subject} is" in leaf.text and leaf.role != "excerpt"]
    assert len(saying) == 2
    assert one.leaves[saying[0] - 1].stale
    assert saying[1] == one.home


def test_the_held_out_text_is_how_the_last_page_goes_on(tiny: Weights) -> None:
    one = case(tiny, 5)
    tail = one.leaves[-1].text[-30:] + tiny.text(list(one.rest))
    assert any(tail in f"{passage.text}\n" for document in TEXT for passage in document)


@pytest.mark.parametrize("write", RESTARTS.values(), ids=RESTARTS)
def test_a_restart_holds_its_budget_and_nothing_that_was_superseded(tiny: Weights, write: Callable[..., str]) -> None:
    one = case(tiny, 0)
    for room in (40, 200, 600):
        assert len(tiny.tokens(write(one, room, tiny))) <= room
    whole = write(one, 100_000, tiny)
    assert len(whole) > 600
    old = next(leaf for leaf in one.leaves if leaf.stale).text.partition(" office is ")[2][:4]
    assert old not in whole


def test_figures_follow_from_the_outcomes(report: Pressed) -> None:
    assert report.cases == 2
    for cell in report.cells:
        found = [one for one in report.outcomes if (one.when, one.way) == (cell.when, cell.way)]
        found = [one for one in found if one.way == FULL or one.budget == cell.budget]
        assert cell.asked == len(found) == 2
        assert cell.right == sum(one.right for one in found)
        assert (cell.low, cell.high) == wilson(cell.right, cell.asked)
        assert sum(asked for _, asked in cell.kinds.values()) == 2
    mine, other = report.cell(OURS, 0.4), report.cell("window", 0.4)
    assert other.ours == mine.share - other.share
    assert report.cell(FULL, 0.4).rest_low == 0


def test_python_s_own_documentation_is_text_enough(tiny: Weights) -> None:
    documents = library()
    assert sum(len(document) for document in documents) > 500
    made = case_of(documents, tiny, frame_of(tiny.tokenizer), 0, tokens=900, rest=REST)
    assert 600 < len(made.prompt) < 1600


def test_the_picture_is_drawn_and_no_other_format(report: Pressed, tmp_path: Path) -> None:
    draw(tmp_path / "press.svg", report)
    assert "<svg" in (tmp_path / "press.svg").read_text()
    with pytest.raises(SpecError):
        draw(tmp_path / "press.txt", report)


@pytest.mark.parametrize(
    "given",
    [{"budgets": (0.0,)}, {"budgets": (1.5,)}, {"budgets": ()}, {"presses": ("nonsense",)}, {"cases": 0}, {"presses": ()}],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(given: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        Setting(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["streaming(sinks=4)", "pages", "summary", "excerpts", "snapkv"])
def test_a_budget_below_what_must_stay_is_named(tiny: Weights, way: str) -> None:
    with pytest.raises(BudgetTooSmall, match="keep"):
        evaluate(tiny, TEXT, Setting(cases=1, tokens=900, rest=REST, budgets=(0.003,), presses=(way,)))


def test_documents_without_text_are_refused(tiny: Weights) -> None:
    with pytest.raises(SpecError, match="too little text"):
        evaluate(tiny, [[Passage("tool", "short")]], Setting(cases=1, rest=REST))
    with pytest.raises(SpecError):
        evaluate(tiny, [], Setting(cases=1, rest=REST))


def test_the_verb_prints_a_table_or_json_and_draws(tiny: Weights, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    common = ["--cases", "1", "--tokens", "900", "--model", str(tmp_path / "model"), "--threads", "1"]
    told = press(*common, "--budgets", "100,40", "--presses", "snapkv(window=16, kernel=3),pages", "--json")
    assert told.status == 0, told.err
    found = told.json
    assert {cell["way"] for cell in found["cells"]} == {"full", "snapkv(window=16, kernel=3)", "pages"}
    assert {cell["budget"] for cell in found["cells"]} == {1.0, 0.4}
    assert len(found["outcomes"]) == 2 + 2 * 2 * 2
    shown = press(*common, "--budgets", "40", "--presses", "window", "--plot", str(tmp_path / "press.svg"))
    assert shown.status == 0, shown.err
    assert "window" in shown.out
    assert (tmp_path / "press.svg").exists()


@pytest.mark.parametrize("given", [["--budgets", "many"], ["--presses", "nonsense"], ["--budgets", "0"], ["--plot", "a.txt"]])
def test_the_verb_refuses_what_it_cannot_do(given: list[str]) -> None:
    told = press(*given)
    assert told.status == 2
    assert told.err
