"""The recipe AgentFold: what is trained on is what the kernel shows, and folding late is what pays."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest

import kilburn
from agentfold import LATE, ONCE, POLICY, RECIPE, WORDS, demonstrated, draw
from kilburn.agents.loop import Agent, Limits
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun


def message(reply: list[int], number: int) -> Message:
    """A reply's tokens as a message, the way that the checkpoint's model makes it."""
    text, tool, given = WORDS.split(WORDS.decode(reply))
    parts = [Part(kind=Kind.TEXT, text=text)] if text or not tool else []
    if tool:
        parts.append(Part(kind=Kind.CALL, text=given, name=tool, call=f"c{number}"))
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


@pytest.mark.parametrize("arm", [LATE, ONCE])
@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_the_prompts_of_training_are_those_of_the_kernel(arm: str, pairs: int) -> None:
    task = draw(random.Random(pairs), pairs)
    rows = demonstrated(task, arm, random.Random(1))
    script = Scripted([message(reply, number) for number, (_, reply) in enumerate(rows)])
    left = list(task.shown)

    def look() -> str:
        return left.pop(0)

    with kilburn.open(":memory:", window=160, policy=POLICY, tokenizer=WORDS, embedder=None) as store:
        Agent(script, [look], store.session("s"), limits=Limits(steps=len(rows)), memory=False).run(task.question)
    for request, (prompt, _) in zip(script.requests, rows, strict=True):
        assert WORDS.decode(WORDS.prompt(request.messages)) == WORDS.decode(prompt)
    assert max(len(prompt) + RECIPE.reply for prompt, _ in rows) <= RECIPE.shape.context
    assert max(len(reply) for _, reply in rows) <= RECIPE.reply


def test_the_late_demonstrator_is_always_right_and_the_other_one_guesses() -> None:
    def right(arm: str) -> float:
        chance, found = random.Random(2), []
        for _ in range(200):
            task = draw(chance, 4)
            found.append(task.reward(WORDS.decode(demonstrated(task, arm, chance)[-1][1])))
        return fmean(found)

    assert right(LATE) == 1
    assert 0.25 < right(ONCE) < 0.55  # two of the three values may be the same


@pytest.mark.slow
def test_a_short_training_learns_to_fold(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("agentfold", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    for arm in (LATE, ONCE):
        losses = [line["loss"] for line in course.lines(arm)]
        assert losses[-1] < losses[0] / 4
    assert report.figure("late, texts blanked", "exact, 6 steps").mean == 0
    assert report.figure(LATE, "peak prompt, 24 steps").mean < report.figure(LATE, "transcript, 24 steps").mean
