"""The recipe of memory as action: the notes, what is paid, and that training sees what the product shows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted
from kilburn_lab.training.course import TrainingRun
from kilburn_lab.training.model import Toy
from memory_action import (
    ARMS,
    ASKED,
    GROUP,
    KEYS,
    RECIPE,
    ROOM,
    STEPS,
    WORDS,
    Noted,
    Says,
    carried_out,
    draw,
    guesses,
    pay_writes,
    played,
    rolled,
)


def knowing(prompts: list[list[int]]) -> list[list[int]]:
    """Somebody who always does what is right."""
    replies = []
    for prompt in prompts:
        words = WORDS.decode(prompt).split()
        key, value = next(word for word in words if word in KEYS), next((word for word in words if word.startswith("v")), "")
        shown = words[words.index("<tool>") + 1 : -1] if "<tool>" in words else []
        if "ask" in words:
            reply = shown[-1] if shown else f"read {key}"
        elif words[1] == "chat" or words[2] == "heard" or words[-2] == "ok":
            reply = "done"
        elif words[2] == "gone":
            reply = f"delete {key}"
        else:
            reply = f"read {key}" if not shown else f"add {key} {value}" if shown == ["none"] else f"update {key} {value}"
        replies.append(WORDS.reply(reply))
    return replies


def test_the_notes_hold_what_the_actions_say() -> None:
    held: dict[str, str] = {}
    assert carried_out(held, "read", "k1") == "none"
    assert carried_out(held, "update", "k1", "v1") == carried_out(held, "delete", "k1") == "none"
    assert carried_out(held, "add", "k1", "v7") == carried_out(held, "add", "k1", "v2") == "ok"
    assert carried_out(held, "read", "k1") == "v2 v7", "nothing tells which is newer"
    assert carried_out(held, "update", "k1", "v3") == "ok"
    assert [carried_out(held, "add", f"k{number}", "v1") for number in range(2, 2 + ROOM)] == ["ok"] * (ROOM - 1) + ["full"]
    assert carried_out(held, "delete", "k1") == "ok"
    assert "k1" not in held


def test_the_product_s_notes_hold_the_same() -> None:
    with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer=WORDS, embedder=None) as store:
        plain, noted = dict[str, str](), Noted(store.notes("agent"))
        chance = random.Random(1)
        for _ in range(60):
            call = chance.choice(["read", "add", "update", "delete"]), chance.choice(KEYS[:4]), chance.choice(["v1", "v2"])
            assert carried_out(plain, *call) == carried_out(noted, *call)
            assert dict(noted) == plain


def test_a_stream_can_be_answered_and_needs_every_action() -> None:
    tasks = [draw(random.Random(seed)) for seed in range(60)]
    trials = rolled(tasks, knowing)
    assert all(trial.reward == 1 for trial in trials)
    assert {turn.call[0] for trial in trials for turn in trial.turns if turn.call} == {"read", "add", "update", "delete"}

    def without(word: str, instead: str) -> Says:
        def says(prompts: list[list[int]]) -> list[list[int]]:
            replies = [WORDS.decode(reply) for reply in knowing(prompts)]
            return [WORDS.reply(reply.replace(word, instead) if reply.startswith(word) else reply) for reply in replies]

        return says

    for word, instead in (("delete", "read"), ("update", "add"), ("add", "update")):
        worse = rolled(tasks, without(word, instead))
        assert sum(trial.reward for trial in worse) < 0.95 * len(tasks), word


def test_training_sees_what_the_product_shows() -> None:
    task = draw(random.Random(5))
    [trial] = rolled([task], guesses(random.Random(2)))
    held: dict[str, str] = {}
    for at, (text, _) in enumerate(task.messages):
        turns = [turn for turn in trial.turns if turn.at == at]
        script = Scripted([said(turn.row[1], number) for number, turn in enumerate(turns)])

        def read(key: str) -> str:
            return carried_out(held, "read", key)

        def add(key: str, value: str) -> str:
            return carried_out(held, "add", key, value)

        def update(key: str, value: str) -> str:
            return carried_out(held, "update", key, value)

        def delete(key: str) -> str:
            return carried_out(held, "delete", key)

        with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer=WORDS, embedder=None) as store:
            Agent(script, [read, add, update, delete], store.session("s"), limits=Limits(steps=STEPS), memory=False).run(text)
        assert [WORDS.prompt(request.messages) for request in script.requests] == [turn.row[0] for turn in turns]
    assert held == trial.held
    assert max(len(prompt) + RECIPE.reply for turn in trial.turns for prompt in [turn.row[0]]) <= RECIPE.shape.context


def said(reply: Sequence[int], number: int) -> Message:
    """A reply's tokens as a message."""
    text, tool, given = WORDS.split(WORDS.decode(reply))
    parts = [Part(kind=Kind.TEXT, text=text)] if text or not tool else []
    if tool:
        parts.append(Part(kind=Kind.CALL, text=given, name=tool, call=f"c{number}"))
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


def test_a_write_is_paid_if_a_right_answer_used_it_and_less_if_nothing_did() -> None:
    task = draw(random.Random(3))
    good = rolled([task] * (GROUP - 1), knowing)
    [bad] = rolled([task], lambda prompts: [WORDS.reply("done") for _ in prompts])
    trials = [*good, bad]
    pay_writes(trials)
    asked = next(at for at, (text, key) in enumerate(task.said) if key in task.values and "told" in text)
    paid = [next(turn.extra for turn in trial.turns if turn.at == asked) for trial in trials]
    assert paid[0] > 0 > paid[-1]
    assert sum(paid) == pytest.approx(0)


@pytest.mark.slow
def test_a_short_training_plays_through_the_product(tmp_path: Path) -> None:
    report = RECIPE.run(tmp_path, seeds=1, smoke=True)
    course = TrainingRun("memory_action", tmp_path, WORDS, RECIPE.shape, reply=RECIPE.reply)
    losses = [line["loss"] for line in course.lines("sft")]
    assert losses[-1] < losses[0] / 2
    assert {row.arm for row in report.rows} == {"sft", *ARMS, "writes, reads blanked"}
    answers = played(Toy(str(course.checkpoint("writes"))), draw(random.Random(1)))
    assert len(answers) == ASKED
