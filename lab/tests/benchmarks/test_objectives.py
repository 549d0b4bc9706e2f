"""Many questions in one session: the reward, the scripted agent, and the promise that MEM1's prompt stays flat."""

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from questions import answers_of, make, normalize, play, reward, scripted


def test_answers_match_as_squad_compares_them() -> None:
    assert normalize("The  Beatles!") == "beatles"
    assert reward("<answer>the Beatles; 1,969.</answer>", ["Beatles", "1969"]) == 2


@pytest.mark.parametrize(
    ("reply", "points"),
    [
        ("", 0),
        ("no answer at all", 0),
        ("<answer>cut off", 0),
        ("</answer><answer>", 0),
        ("<answer></answer>", 0),
        ("<answer>;;</answer>", 0),
        ("<answer>Rome</answer>", 1),
        ("<answer>Paris; Rome</answer>", 0),
        ("<answer>Rome; Paris; Oslo; more; and more</answer>", 3),
        ("<answer>x; y; z</answer> no, <answer>Rome; y; Oslo</answer>", 2),
        ("<answer>" * 20_000, 0),
    ],
)
def test_the_reward_of_replies_good_and_bad(reply: str, points: int) -> None:
    assert reward(reply, ["Rome", "Paris", "Oslo"]) == points


def test_a_question_may_have_several_right_answers() -> None:
    assert reward("<answer>NYC</answer>", [["New York", "NYC"]]) == 1
    assert reward("<answer> </answer>", [["", "the"]]) == 0, "blanks match nothing"
    assert answers_of("<answer>a;b</answer>") == ["a", "b"]


def test_the_same_seed_gives_the_same_task_and_all_answers_can_be_found() -> None:
    task = make(8, seed=3)
    assert task == make(8, seed=3)
    assert task != make(8, seed=4)
    for objective in task.objectives:
        assert any(f"founded by {objective.founder}." in found for found in task.search(f"firm {objective.firm}"))
        assert any(f"town of {objective.town}." in found for found in task.search(f"person {objective.founder}"))


@pytest.mark.parametrize("objectives", [0, -1, 201])
def test_there_are_1_to_200_questions(objectives: int) -> None:
    with pytest.raises(SpecError, match="objectives"):
        make(objectives, 0)


def test_mem1_keeps_the_prompt_flat_and_all_answers_right() -> None:
    few, many = (play(make(count, 1), "mem1", 100_000, scripted()) for count in (2, 16))
    assert (few.points, many.points) == (2, 16)
    assert many.peak - many.question <= 1.2 * (few.peak - few.question)


def test_with_nothing_leaving_the_peak_grows_with_the_questions() -> None:
    few, many = (play(make(count, 1), "fifo", 100_000, scripted("none")) for count in (2, 16))
    assert (few.points, many.points) == (2, 16)
    assert many.peak > 5 * few.peak


def test_the_answers_are_in_the_state_and_nowhere_else() -> None:
    """The agent reads its prompt only: with states that say nothing, the answers are gone with the passages."""
    assert play(make(8, 1), "mem1", 100_000, scripted("blank")).points == 0


def test_a_window_that_forgets_the_oldest_forgets_the_answers() -> None:
    assert play(make(8, 1), "fifo", 1400, scripted("none")).points <= 3


def test_an_invalid_action_ends_the_episode() -> None:
    episode = play(make(2, 1), "mem1", 100_000, lambda prompt: "<IS>I am lost</IS>")
    assert (episode.finish, episode.points, episode.turns) == ("invalid", 0, 1)
    twice = play(make(2, 1), "mem1", 100_000, lambda prompt: "<search>a</search><search>b</search>")
    assert twice.finish == "invalid"


def test_an_agent_that_never_answers_runs_out_of_turns() -> None:
    episode = play(make(2, 1), "mem1", 100_000, lambda prompt: "<IS>?</IS><search>firm</search>")
    assert (episode.finish, episode.turns, episode.points) == ("turns", 6, 0)


def test_a_kind_of_state_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match="states"):
        scripted("some")
