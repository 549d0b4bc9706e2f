"""The recipe CoMem: what is trained on is what the kernel shows and the policy asks, and what is paid is the same action."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kilburn
from comem import MINDED, POLICY, RECIPE, ROOM, WORDS, Log, acted, asking_of, chosen, draw, prompt_of, same, told
from kilburn.agents.loop import Agent, Limits
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun
from waiting import until


def look(number: int) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", name="look", call=f"c{number}"),))


def shown(log: Log, memory: str | None) -> tuple[list[list[int]], list[list[int]]]:
    """What the kernel shows the agent, and what the policy asks."""
    agent, asked = Scripted([*map(look, range(5)), "act"]), Scripted([memory or ""] * 3, tokenizer=WORDS)
    left = list(log.pages)
    with kilburn.open(
        ":memory:", window=600, policy=POLICY if memory else "fifo", tokenizer=WORDS, model=asked, embedder=None
    ) as store:
        session = store.session("log")

        def look_() -> str:
            if len(left) == 1 and memory:
                errand = session._planner.background._errand
                until(lambda: errand is not None and errand.answer is not None)
            return left.pop(0)

        look_.__name__ = "look"
        Agent(agent, [look_], session, limits=Limits(steps=9), memory=False).run("begin")
    return [WORDS.prompt(request.messages) for request in agent.requests], [
        WORDS.prompt(each.messages) for each in asked.requests
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_prompts_of_training_are_those_of_the_kernel_and_of_the_policy(seed: int) -> None:
    log = draw(random.Random(seed))
    memory = told(chosen(log, random.Random(seed)))
    prompts, asked = shown(log, None)
    assert prompts == [prompt_of(log, None, steps) for steps in range(6)]
    prompts, asked = shown(log, memory)
    assert prompts[-1] == prompt_of(log, memory)
    assert asked == [asking_of(log)]
    assert max(len(prompt) for prompt in [*prompts, *asked]) + RECIPE.reply <= RECIPE.shape.context


def test_the_same_action_is_paid_in_full_a_part_of_it_in_part_and_another_one_not() -> None:
    whole = "act lamp red door blue"
    assert same(whole, whole) == 1
    assert same(whole, "act door blue") == 0.5
    assert same(whole, "act door green") == same(whole, "act lamp red rain red") == same(whole, "") == 0


def test_a_log_has_two_readings_that_are_minded_and_nothing_says_which() -> None:
    log = draw(random.Random(4))
    assert len(log.readings) == 6
    assert sum(name in MINDED for name, _ in log.readings) == ROOM
    assert acted(log.readings) == log.action
    assert len(WORDS.reply(log.action)) <= RECIPE.reply


@pytest.mark.slow
def test_a_short_training_plays_through_the_product(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("comem", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    for arm in ("agent", "likelihood"):
        losses = [line["loss"] for line in course.lines(arm)]
        assert losses[-1] < losses[0] / 2
    assert 0 <= course.lines("equivalence")[-1]["reward"] <= 1
    assert report.figure("likelihood", "same action").mean <= 1
