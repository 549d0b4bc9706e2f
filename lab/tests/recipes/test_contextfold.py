"""The recipe ContextFold: what is trained on is what the kernel shows, the fold is needed, and what each penalty falls on."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest

import kilburn
from contextfold import (
    ARMS,
    GROUP,
    MOST,
    PENALTIES,
    POLICY,
    RECIPE,
    STEPS,
    WINDOW,
    WITHIN,
    WORDS,
    Trial,
    demonstrator,
    draw,
    played,
    replayed,
    rolled,
    weights_of,
)
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.loop import Limits
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun
from kilburn_lab.training.model import Toy


def trials(many: int, **habits: float) -> list[Trial]:
    """Roll-outs of a demonstrator with these habits."""
    says = demonstrator(random.Random(1), **habits)
    return rolled(
        [draw(random.Random(seed)) for seed in range(many)], lambda going: [WORDS.reply(says(trial)) for trial in going]
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_prompts_of_training_are_those_of_the_kernel(seed: int) -> None:
    task, says = draw(random.Random(seed)), demonstrator(random.Random(seed))
    stray = random.Random(seed)

    def reply(trial: Trial) -> str:
        # Now and then what a demonstrator never says: a return in the main line, a branch that ends in prose, an unknown key.
        return stray.choice(["return v1", "v2 v3", "look v1"]) if trial.turns and stray.random() < 0.2 else says(trial)

    [trial] = rolled([task], lambda going: [WORDS.reply(reply(one)) for one in going])
    said = [WORDS.decode(turn.row[1]) for turn in trial.turns]
    # A roll-out ends at a limit; the product asks once more for what a branch has found.
    replies = [WORDS.message(reply, f"c{at}") for at, reply in enumerate([*said, *["v1"] * STEPS])]
    script = Scripted(replies, tokenizer=WORDS)

    def look(key: str) -> str:
        return task.look(key)

    with kilburn.open(":memory:", window=WINDOW, policy=POLICY, tokenizer=WORDS, embedder=None) as store:
        within = SubAgent(limits=Limits(steps=WITHIN))
        agent = Branching(script, [look], store.session("s"), agents=[within], limits=Limits(steps=STEPS), memory=False)
        result = agent.run(task.question)
    shown = [WORDS.decode(WORDS.prompt(request.messages)) for request in script.requests[: len(trial.turns)]]
    assert shown == [WORDS.decode(turn.row[0]) for turn in trial.turns]
    assert result.text == trial.answer or not trial.answer


def test_who_branches_knows_everything_and_who_does_not_cannot() -> None:
    folding, flat = trials(100, folds=1, strays=0, fails=0), trials(100, folds=0)
    assert all(trial.right == 1 for trial in folding)
    assert fmean(trial.right for trial in flat) < 0.5, "the last key, and guesses"
    assert max(trial.longest for trial in folding) <= MOST < min(trial.longest for trial in flat)
    assert 0.5 < fmean(trial.right for trial in trials(100)) < 0.9, "the demonstrator is a poor one"


def test_prompts_and_replies_fit_into_the_weights_and_the_window() -> None:
    turns = [turn for trial in trials(100, strays=1, fails=0.5) for turn in trial.turns]
    assert max(len(prompt) for prompt, _ in (turn.row for turn in turns)) < WINDOW
    assert max(len(turn.whole[0]) for turn in turns) + RECIPE.reply <= RECIPE.shape.context
    assert max(len(turn.row[1]) for turn in turns) <= RECIPE.reply


def test_each_penalty_falls_on_what_it_is_about() -> None:
    clean, long = trials(1, folds=1, strays=0, fails=0)[0], trials(1, folds=0)[0]
    assert {clean.penalty(turn, PENALTIES) for turn in clean.turns} == {0}
    assert {long.penalty(turn, ["unfolded"]) for turn in long.turns} == {-1}
    assert {long.penalty(turn, ["scope", "failure"]) for turn in long.turns} == {0}

    first, second, third = clean.task.values
    replies = [
        f"branch {first} {first}",
        f"branch {first} {first}",
        f"look {second}",
        f"look {first}",
        f"return {clean.task.values[first]}",
    ]
    odd = replayed(clean.task, [*replies, "return v1", f"look {third}", "answer"])
    assert [odd.penalty(turn, ["failure"]) for turn in odd.turns] == [0, -1, 0, 0, 0, -1, 0, 0]
    assert [odd.penalty(turn, ["scope"]) for turn in odd.turns] == [0, -0.2, -0.2, -0.2, -0.2, 0, 0, 0]
    assert [odd.penalty(turn, ["unfolded"]) for turn in odd.turns] == [0, 0, 0, 0, 0, -1, -1, -1]


def test_a_penalty_lowers_a_right_roll_out_and_never_below_a_wrong_one() -> None:
    task = draw(random.Random(3))
    keys = list(task.values)
    says = demonstrator(random.Random(1), folds=1, strays=0, fails=0)
    clean = rolled([task] * (GROUP - 2), lambda going: [WORDS.reply(says(trial)) for trial in going])
    folded = [f"branch {key} {key}" for key in keys]
    inner = [[f"look {key}", f"return {task.values[key]}"] for key in keys]
    last = f"look {keys[2]}"
    answer = " ".join(["answer", *(f"{key} {value}" for key, value in task.values.items())])
    long = replayed(task, [folded[0], *inner[0], folded[1], *inner[1], last, answer])
    wrong = replayed(task, ["answer"])
    group = [*clean, long, wrong]
    assert [trial.right for trial in group] == [1] * (GROUP - 1) + [0]

    def of(trial: Trial, heeded: tuple[str, ...]) -> list[float]:
        weights, before = weights_of(group, heeded), group[: group.index(trial)]
        begin = sum(len(each.turns) for each in before)
        return weights[begin : begin + len(trial.turns)]

    assert of(long, ()) == [of(clean[0], ())[0]] * len(long.turns)
    paid = of(long, PENALTIES)
    assert paid[0] == paid[1] == of(clean[0], ())[0], "to branch, and what is within a branch, is not what made it long"
    assert paid[-1] == paid[-2] == of(wrong, PENALTIES)[0] < 0
    everything_right = weights_of(clean + clean[:2], PENALTIES)
    assert set(everything_right) == {0.0}


@pytest.mark.slow
def test_a_short_training_plays_through_the_product(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("contextfold", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    losses = [line["loss"] for line in course.lines("sft")]
    assert losses[-1] < losses[0] / 2
    assert {row.arm for row in report.rows} == {"sft", "sft unfolded", *ARMS, "FoldGRPO, no branches"}
    run = played(Toy(str(course.checkpoint("FoldGRPO")), temperature=1.0), draw(random.Random(1)))
    assert run.longest >= 6, "the question is in every prompt of the main line"
    assert 1 <= len(run.replies) <= STEPS * (WITHIN + 2)
