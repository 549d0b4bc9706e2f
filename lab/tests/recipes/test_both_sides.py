"""The recipe Both sides: each side is trained on what the agent shows it, and only who learns changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from both_sides import REASONER, RECIPE, SUMMARISER, asking_of, both_rolled, mixed, reinforced
from kilburn.models.scripted import Scripted
from kilburn_lab.training.course import Chance, TrainingRun
from kilburn_lab.training.transformer import Transformer
from reasoning_cache import (
    LATER,
    ROUNDS,
    SUMMARY,
    TRACE,
    WORDS,
    answered,
    by_round,
    draw,
    flawless,
    played,
    prompt_of,
    summarised,
)


@pytest.mark.parametrize("steps", [2, 5, 24])
def test_both_sides_are_trained_on_what_the_agent_shows_them_and_without_slips_they_are_right(steps: int) -> None:
    problem = draw(random.Random(steps), steps)
    rounds = flawless(problem)
    prompts, asked = [prompt_of(problem, summary) for summary, _ in rounds], [asking_of(problem, *each) for each in rounds]
    summaries = [summarised(*each) for each in rounds]
    reasoner, summariser = Scripted([trace for _, trace in rounds], tokenizer=WORDS), Scripted(summaries, tokenizer=WORDS)
    made = played(reasoner, summariser, problem)
    assert [WORDS.prompt(request.messages) for request in reasoner.requests] == prompts
    assert [WORDS.prompt(request.messages) for request in summariser.requests] == asked
    assert [one.summary for one in made.rounds] == summaries
    assert by_round(problem, made)[-1]
    assert max(map(len, [*prompts, *asked])) + TRACE <= RECIPE.shape.context


def test_the_poor_summariser_mixes_two_steps_and_keeps_what_stands_alone() -> None:
    chance = random.Random(0)
    assert {mixed("s2 1", "s3 +2 3 s4 +1 4", chance) for _ in range(50)} == {"s4 3", "s4 4"}
    assert {mixed("s2 1", "s3 +2 3 s4 end \\boxed{ 3 }", chance) for _ in range(50)} == {"so 3"}
    assert {mixed("s2 1", "s3 +2 3 s4", chance) for _ in range(50)} == {"s3 3"}


def pair() -> dict[str, Transformer]:
    return {name: Transformer(len(WORDS), RECIPE.shape, seed) for seed, name in enumerate((REASONER, SUMMARISER))}


def test_a_roll_out_asks_both_sides_what_the_agent_would_and_pays_the_last_answer() -> None:
    chance = Chance("test")
    problems = [draw(chance.worlds, 4)] * 16
    turns, rewards = both_rolled(pair(), problems, chance)
    for problem, reward, traced, summed in zip(problems, rewards, turns[REASONER], turns[SUMMARISER], strict=True):
        assert len(traced) == ROUNDS
        assert all(len(trace) <= TRACE for _, trace in traced)
        assert all(len(summary) <= SUMMARY for _, summary in summed)
        summary, answer, left = "", "", list(summed)
        for number, (prompt, reply) in enumerate(traced):
            trace = WORDS.decode(reply)
            assert prompt == prompt_of(problem, summary)
            answer = answered(trace) or answer
            if trace and number + 1 < ROUNDS:
                asked, written = left.pop(0)
                assert asked == asking_of(problem, summary, trace)
                summary = WORDS.decode(written) or summary
        assert not left
        assert reward == (answer == problem.answer)


@pytest.mark.parametrize("learners", [[REASONER], [SUMMARISER], [REASONER, SUMMARISER]])
def test_only_who_learns_gets_a_gradient(learners: list[str]) -> None:
    models = pair()
    loss, figures = reinforced(lambda done: learners)(models, Chance("test"), 0.0)
    loss.backward()
    assert [name for name, model in models.items() if any(part.grad is not None for part in model.parameters())] == learners
    assert 0 <= figures["reward"] <= 1


@pytest.mark.slow
def test_a_short_training_plays_both_through_the_agent(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("both_sides", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    assert course.lines(SUMMARISER)[-1]["loss"] < course.lines(SUMMARISER)[0]["loss"] / 2
    begun = {name: course.checkpoint(name).read_bytes() for name in (REASONER, SUMMARISER)}
    for arm, kept in {"reasoner alone": [SUMMARISER], "summariser alone": [REASONER], "by turns": [], "together": []}.items():
        after = {name: course.checkpoint(f"{arm}, {name}").read_bytes() for name in begun}
        assert [name for name in begun if after[name] == begun[name]] == kept, f"{arm}: the frozen side stays to the bit"
    assert len(course.lines("together")) * 2 == len(course.lines("by turns"))
    assert 0 <= report.figure("together", f"right by round {LATER}").mean <= 1
