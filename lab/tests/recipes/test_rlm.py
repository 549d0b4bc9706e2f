"""The recipe RLM: the scripted roots run in the sandbox, and their trajectories are what the root is shown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kilburn
from kilburn.agents.loop import Limits
from kilburn.errors import MissingExtra, SandboxRefused
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult
from kilburn.recursion.sandbox import open_sandbox
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun
from rlm import ASKED, PIECES, RECIPE, SHORT, WHOLE, WORDS, Reader, Task, cells, demonstrated, draw


@pytest.fixture(autouse=True, scope="module")
def sandbox() -> None:
    try:
        with open_sandbox():
            pass
    except (SandboxRefused, MissingExtra) as error:
        pytest.skip(str(error))


def scripted(task: Task, arm: str) -> tuple[RecursiveResult, list[list[int]]]:
    """What the scripted root of an arm finds, and what it is shown."""
    root = Scripted([WORDS.decode(WORDS.reply(cell)) for cell in cells(task, arm)])
    with kilburn.open(":memory:", window=2000, policy="fifo", tokenizer=WORDS, embedder=None) as store:
        agent = RecursiveModel(root, store.session("ask"), sub=Reader(), tools=False, limits=Limits(steps=4))
        result = agent.ask(task.question, task.text)
    return result, [WORDS.prompt(request.messages) for request in root.requests]


@pytest.mark.parametrize("kind", ASKED)
def test_the_root_that_cuts_is_right_at_any_length_and_is_shown_what_is_trained_on(kind: str) -> None:
    for records in (SHORT[0], 333):
        task = draw(random.Random(records), records)
        task = Task(kind, task.key, task.mark, task.records)
        result, prompts = scripted(task, PIECES)
        rows = demonstrated(task, PIECES)
        assert str(result.content) == task.answer
        assert result.calls == -(-records // 8)
        assert prompts == [prompt for prompt, _ in rows]
        assert max(len(prompt) + RECIPE.reply for prompt, _ in rows) <= RECIPE.shape.context
        assert max(len(reply) for _, reply in rows) <= RECIPE.reply


def test_the_root_that_asks_at_once_is_right_about_short_texts_alone() -> None:
    found = {}
    for records in (SHORT[1], 120):
        task = draw(random.Random(7), records)
        task = Task("late", task.key, task.mark, task.records)
        result, prompts = scripted(task, WHOLE)
        assert prompts == [prompt for prompt, _ in demonstrated(task, WHOLE)]
        found[records] = str(result.content) == task.answer
    assert found == {SHORT[1]: True, 120: False}


@pytest.mark.slow
def test_a_short_training_learns_to_write_code(tmp_path: Path) -> None:
    RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("rlm", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    for arm in (PIECES, WHOLE):
        losses = [line["loss"] for line in course.lines(arm)]
        assert losses[14] < losses[0] / 1.5, "of the first cells"
