"""The recipe MEM1: what is trained on is what the kernel shows, and a short training does what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun
from kilburn_lab.training.model import Toy
from mem1 import RECIPE, WORDS, Task, demonstrated, draw, played, valid, worth


def message(reply: list[int]) -> Message:
    """A reply's tokens as a message, the way that the checkpoint's model makes it."""
    text, tool, given = WORDS.split(WORDS.decode(reply))
    parts = [Part(kind=Kind.TEXT, text=text)]
    if tool:
        parts.append(Part(kind=Kind.CALL, text=given, name=tool, call=f"c{random.random()}"))
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


def shown(rows: list[tuple[list[int], list[int]]], task: str, tools: list[Callable[..., str]], policy: str) -> list[list[int]]:
    """What the kernel shows an agent that gives these replies, as the transformer reads it."""
    script = Scripted([message(reply) for _, reply in rows])
    with kilburn.open(":memory:", window=400, policy=policy, tokenizer=WORDS, embedder=None) as store:
        Agent(script, tools, store.session("s"), limits=Limits(steps=len(rows)), memory=False).run(task)
    return [WORDS.prompt(request.messages) for request in script.requests]


@pytest.mark.parametrize("count", [2, 5, 8])
def test_the_prompts_of_training_are_those_of_the_kernel(count: int) -> None:
    task = draw(random.Random(count), count)
    rows = demonstrated(task, random.Random(1))
    left = [note for _, _, note in task.notes]

    def next() -> str:
        return left.pop(0) if left else "end"

    assert shown(rows, task.question, [next], "mem1") == [prompt for prompt, _ in rows]
    assert max(len(prompt) + RECIPE.reply for prompt, _ in rows) <= RECIPE.shape.context
    assert max(len(reply) for _, reply in rows) <= RECIPE.reply
    assert all(valid(WORDS.decode(reply), count) for _, reply in rows[:-1])


def test_reward_is_the_share_of_exact_answers() -> None:
    task = draw(random.Random(0), 2)
    (first, one), (second, two) = task.answers
    other = "v0" if two != "v0" else "v1"
    assert task.reward(f"<answer> {first} {one} {second} {two} </answer>") == 1
    assert task.reward(f"<answer> {first} {one} {second} {other} </answer>") == 0.5
    assert task.reward(f"<answer> {first} {other} {second} {two} {first} {one} </answer>") == 0, "more answers than keys"
    assert task.reward("<IS> </IS>") == 0


@pytest.mark.slow
def test_a_state_is_worth_the_asked_pairs_that_it_could_keep_and_does() -> None:
    task = Task(["k1", "k2"], [(f"k{key}", f"v{key}", "") for key in (1, 3, 2, 4)])
    full = "<IS> k1 v1 k3 v3 </IS> next"
    assert worth(task, 3, full, "<IS> k1 v1 k2 v2 </IS> next") == 1
    assert worth(task, 3, full, "<IS> k3 v3 k2 v2 </IS> next") == 0.5
    assert worth(task, 3, "<IS> k3 v3 </IS> next", "<IS> k3 v3 k2 v2 </IS> next") == 1, "what was lost before costs nothing now"
    assert worth(task, 3, full, "<IS> k1 v1 k2 v7 </IS> next") == 0.5, "a wrong value is none"
    assert worth(task, 3, full, "<IS> k1 v1 k3 v3 k2 v2 </IS> next") == 0, "there is no room for three"
    assert worth(task, 3, full, "k1 v1 k2 v2") == 0
    assert worth(task, 5, full, "<answer> k1 v1 k2 v2 </answer>") == 1


def test_a_short_training_learns_the_form_and_its_checkpoint_plays_through_the_kernel(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("mem1", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    losses = [line["loss"] for line in course.lines("sft")]
    assert losses[-1] < losses[0] / 3
    assert 0 < course.lines("rl")[-1]["reward"] <= 1
    assert report.figure("rl, state blanked", "exact, 2 questions").mean <= 0.2
    assert (tmp_path / "reward.svg").read_bytes().startswith(b"<?xml")
    model, task = Toy(str(course.checkpoint("rl"))), draw(random.Random(3), 2)
    run = played(model, task)
    assert run.sizes[0] == len(WORDS.prompt([{"role": "user", "content": task.question}]))
    assert len(run.sizes) > 2, "a valid state at least once"
    again = RECIPE.run(tmp_path, seeds=1, smoke=True)
    assert again.rows == report.rows, "what is done is read, not trained again"
