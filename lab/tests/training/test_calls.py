"""Trajectories out of a ledger: what a trainer reads is, byte for byte, what the model was shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import kilburn
from cli.terminal import kilburn as run
from kilburn.agents.loop import Agent
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted
from kilburn_lab.training.calls import LedgerCalls

LONG = " ".join(["nothing of it matters"] * 30)


def said(text: str, number: int) -> Message:
    call = Part(kind=Kind.CALL, text="{}", name="look", call=f"c{number}")
    return Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text), call))


def state(number: int) -> str:
    return f"<IS>seen {number}</IS>"


def directive(number: int) -> str:
    if number < 2:
        return "I look."
    return f'<compress>{{"compress_range": [1, {number - 1}], "compress_text": "seen {number - 1}"}}</compress> I look.'


def recorded(db: Path, policy: str, says: Callable[[int], str], window: int) -> list[bytes]:
    """A run in a store; what the model was shown at each call."""
    script = Scripted([*(said(says(number), number) for number in range(1, 8)), "done"])

    def look() -> str:
        """Look."""
        return f"{len(script.requests)}: {LONG}"

    with kilburn.open(str(db), window=window, policy=policy, tokenizer="chars/4", embedder=None) as store:
        Agent(script, [look], store.session("run"), memory=False).run("What is there?")
    return [msgspec.json.encode(request.messages) for request in script.requests]


POLICIES = [("mem1", state, 4000), ("agentfold", directive, 4000), ("fifo", state, 900), ("hybrid", state, 900)]


@pytest.mark.parametrize(("policy", "says", "window"), POLICIES, ids=[policy for policy, _, _ in POLICIES])
def test_prompts_are_what_the_model_was_shown(tmp_path: Path, policy: str, says: Callable[[int], str], window: int) -> None:
    db = tmp_path / "agent.db"
    shown = recorded(db, policy, says, window)
    with kilburn.open(str(db), window=window, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        calls = list(LedgerCalls(store.session("run")))
        whole = store.session("run").contents.messages()
    assert [msgspec.json.encode(call.prompt) for call in calls] == shown
    assert [call.completion[0] for call in calls] == [message for message in whole if message["role"] == "assistant"]
    assert any(b"out:" in prompt or b"Compressed Step" in prompt or b"in part" in prompt for prompt in shown)
    assert len(shown) == 8


def test_the_verb_writes_lines_for_trl(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    shown = recorded(db, "mem1", state, 4000)
    done = run("lab", "trajectories", "--db", db, "--out", tmp_path / "calls.jsonl")
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == list(map(json.loads, shown))
    assert lines[-1]["completion"] == [{"role": "assistant", "content": "done"}]
    done = run("lab", "trajectories", "--db", db, "--out", tmp_path / "all.jsonl", "--form", "messages", "--session", "run")
    assert done.status == 0, done.err
    told = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["messages"] for line in told] == [[*line["prompt"], *line["completion"]] for line in lines]
    assert run("lab", "trajectories", "--db", db, "--out", tmp_path / "all.jsonl").status != 0
    assert run("lab", "trajectories", "--db", db, "--out", tmp_path / "x.jsonl", "--form", "chatml").status != 0


def test_a_store_without_a_reply_says_what_makes_one(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("run").append({"role": "user", "content": "Hello."})
    done = run("lab", "trajectories", "--db", tmp_path / "agent.db", "--out", tmp_path / "calls.jsonl")
    assert done.status == 0
    assert "0 calls\nNo reply of a model" in done.err
    assert "`kilburn chat`" in done.err


def test_what_was_forgotten_is_in_no_example(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    recorded(db, "mem1", state, 4000)
    with kilburn.open(str(db), window=4000, policy="mem1", tokenizer="chars/4", embedder=None) as store:
        store.session("run").forget("p5")
        calls = LedgerCalls(store.session("run"))
        kept = list(calls)
        assert calls.left_out >= 1
        assert len(kept) + calls.left_out == 8
        assert "2: nothing" not in json.dumps([call.prompt for call in kept])
