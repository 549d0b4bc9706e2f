"""The recipe Reasoning Cache: what is trained on is what the agent shows, the oracle solves the world, and blanks do not."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import pytest

from kilburn.models.scripted import Scripted
from kilburn_lab.training.course import Chance, TrainingRun
from kilburn_lab.training.transformer import Transformer
from reasoning_cache import (
    LATER,
    LONGEST,
    RECIPE,
    ROUNDS,
    TRACE,
    WORDS,
    Problem,
    Rule,
    answered,
    by_round,
    draw,
    flawless,
    played,
    prompt_of,
    reasoned,
    reinforced,
    rolled,
    summarised,
)


def oracle(problem: Problem, blank: bool = False) -> tuple[Scripted, list[list[int]]]:
    """A model that reasons without a slip, and the prompts of training."""
    rounds = flawless(problem, blank=blank)
    return Scripted([trace for _, trace in rounds], tokenizer=WORDS), [prompt_of(problem, summary) for summary, _ in rounds]


@pytest.mark.parametrize("steps", [2, 5, 6, 23, LONGEST])
def test_the_prompts_of_training_are_those_of_the_agent_and_the_oracle_is_right(steps: int) -> None:
    problem = draw(random.Random(steps), steps)
    model, prompts = oracle(problem)
    made = played(model, Rule(), problem)
    assert [WORDS.prompt(request.messages) for request in model.requests] == prompts
    assert max(map(len, prompts)) + TRACE <= RECIPE.shape.context
    needed = (steps + 1) // 2
    assert by_round(problem, made) == [False] * (needed - 1) + [True] * (LATER - needed + 1)
    assert [one.summary for one in made.rounds][needed - 1 :] == [f"so {problem.answer}"] * (LATER - needed + 1)
    assert all(one.trace_tokens <= TRACE for one in made.rounds)


def test_with_its_summary_blanked_the_oracle_answers_only_what_fits_into_a_round() -> None:
    for steps in (2, 3, 12):
        problem = draw(random.Random(steps), steps)
        model, prompts = oracle(problem, blank=True)
        made = played(model, Rule(blank=True), problem)
        assert [WORDS.prompt(request.messages) for request in model.requests] == prompts
        assert made.answer == (problem.answer if steps == 2 else "")


def test_the_rule_keeps_the_last_whole_step_or_the_answer_and_else_what_it_had() -> None:
    assert summarised("s3 4", "s4 +2 6 s5 +1 7") == "s5 7"
    assert summarised("s3 4", "s4 +2 6 s5 +1") == "s4 6"
    assert summarised("s3 4", "s4 end \\boxed{ 4 }") == "so 4"
    assert summarised("s3 4", "s4 end \\boxed{ 4") == summarised("s3 4", "+2 s4") == summarised("s3 4", "") == "s3 4"
    assert answered("\\boxed{ 1 } \\boxed{ 2 }") == "2"


def test_the_demonstrator_slips_where_a_sum_is_ten_and_takes_answers_back_and_nowhere_else() -> None:
    chance = random.Random(0)

    def said(problem: Problem, summary: str) -> set[str]:
        return {WORDS.decode(reasoned(problem, summary, chance)) for _ in range(100)}

    assert said(Problem(3, (4, 2, 1)), "") == {"s1 +4 7 s2 +2 9"}
    assert said(Problem(8, (4, 2, 1)), "") == {"s1 +4 2 s2 +2 4"}, "past ten"
    assert said(Problem(8, (2, 2, 1)), "") == {"s1 +2 0 s2 +2 2", "s1 +2 1 s2 +2 3"}
    assert said(Problem(8, (2, 2, 1)), "so 9") == {"\\boxed{ 9 }", "\\boxed{ 0 }"}


def test_a_reward_is_paid_for_the_last_answer_of_three_rounds() -> None:
    model, chance = Transformer(len(WORDS), RECIPE.shape), Chance("test")
    problems = [draw(chance.worlds, 4)] * 40
    rows, rewards = rolled(model, problems, chance)
    for turns, problem, reward in zip(rows, problems, rewards, strict=True):
        traces = [WORDS.decode(trace) for _, trace in turns]
        assert len(traces) == ROUNDS
        assert all(len(trace) <= TRACE for _, trace in turns)
        assert reward == (["", *filter(None, map(answered, traces))][-1] == problem.answer)
        summaries = [*accumulate(traces[:-1], summarised, initial="")]
        assert [prompt for prompt, _ in turns] == [prompt_of(problem, summary) for summary in summaries]
    loss, figures = reinforced(model, chance, 0.0)
    assert loss.isfinite()
    assert 0 <= figures["reward"] < 0.1


@pytest.mark.slow
def test_a_short_training_plays_through_the_agent(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("reasoning_cache", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    losses = [line["loss"] for line in course.lines("demonstrations")]
    assert losses[-1] < losses[0] / 2
    assert [line["step"] for line in course.lines("reward, by round")] == list(range(1, LATER + 1))
    assert report.figure("reward, summary blanked", f"right by round {LATER}").mean <= 1 / 3
    assert (tmp_path / "right.svg").read_bytes().startswith(b"<?xml")
