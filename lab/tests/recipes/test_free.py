"""The recipe Free(): what is trained on is what the kernel shows and the policy asks, and what does harm is thrown away."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

import kilburn
from free import FEW, PAIRS, RECIPE, STEP, WORDS, Cuts, cleaning_of, directive, draw, prompt_of, proposed, shown, spared, told
from kilburn.agents.loop import Agent, Limits
from kilburn.message import Kind, Message, Part, Role
from kilburn.policies.free import Free, Prompted
from kilburn.selection.anchors import parse_anchors
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun


def look(number: int) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", name="look", call=f"c{number}"),))


@pytest.mark.parametrize("seed", range(4))
def test_the_prompts_of_training_are_those_of_the_kernel_and_of_the_policy(seed: int) -> None:
    chance, pages = random.Random(seed), FEW
    task = draw(chance, pages)
    cuts: list[Cuts] = [proposed(chance) for _ in range(pages - 1)]
    cuts[0] = [(0, PAIRS)] if seed == 1 else cuts[0]
    agent = Scripted([*map(look, range(pages + 1)), task.answer])
    replies = [WORDS.decode(WORDS.reply(directive(page, cut))) for page, cut in zip(task.pages, cuts, strict=False)]
    assert all(parse_anchors(reply) for reply in replies)
    cleaner, left = Scripted(replies, tokenizer=WORDS), [told(page) for page in task.pages]

    def look_() -> str:
        return left.pop(0) if left else "end"

    look_.__name__ = "look"
    policy = Free(every=STEP, cleaner=Prompted(most=1.0, tokens=RECIPE.reply), reach=2 * STEP - 4, least=1)
    with kilburn.open(":memory:", window=400, policy=policy, tokenizer=WORDS, model=cleaner, embedder=None) as store:
        Agent(agent, [look_], store.session("s"), limits=Limits(steps=pages + 2), memory=False).run(task.question)
    assert [WORDS.prompt(request.messages) for request in cleaner.requests] == [
        cleaning_of(task, page) for page in task.pages[:-1]
    ]
    expected = prompt_of(task, [*cuts, [], []])
    assert WORDS.decode(WORDS.prompt(agent.requests[-1].messages)) == WORDS.decode(expected)
    assert len(expected) + RECIPE.reply < RECIPE.shape.context
    assert max(len(WORDS.reply(reply)) for reply in replies) <= RECIPE.reply


def test_stretches_are_apart_and_the_key_is_spared() -> None:
    chance = random.Random(0)
    for _ in range(200):
        task, cuts = draw(chance, 1), proposed(chance)
        assert all(0 <= start < stop <= PAIRS for start, stop in cuts)
        assert all(one[1] < two[0] for one, two in pairwise(cuts))
        assert WORDS.ids[task.key] in shown(task.pages[0], spared(task, task.pages[0], cuts))


@pytest.mark.slow
def test_a_short_training_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("free", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    losses = [line["loss"] for line in course.lines("base")]
    assert losses[-1] < losses[0] / 2
    for arm in ("kept", "all"):
        assert report.figure(f"adapter, {arm}", "weights that changed").mean == 0
    assert course.lines("kept")[-1]["kept"] <= 1 == course.lines("all")[-1]["kept"]
