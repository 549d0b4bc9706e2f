"""A policy that raises is told once, counted everywhere where policies are judged, and ends a command with status 1."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import kilburn
from cli.terminal import kilburn as command
from kilburn.kernel import plans
from kilburn.testing import check_laws

BROKEN = '''
"""Policies that fail, each in its own way."""
from kilburn.policies.fifo import Fifo

class Raises(Fifo):
    def plan(self, view):
        if view.excess:
            raise LookupError("it is in the words of the page")
        return []

class Nonsense(Fifo):
    def plan(self, view):
        return 7 if view.excess else []

class Remembers:
    def plan(self, view):
        raise LookupError("no memory")
'''


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of failing policies, on the path, in which nothing has failed yet."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plans._logged.clear()
    yield tmp_path
    plans._logged.clear()


COMMANDS = [
    ("lab", "paging", "--sample", 3, "--window", 300),
    ("lab", "table", "--sample", 2, "--interactions", 20, "--window", 500),
    ("lab", "drift", "--sample", 1, "--passes", 2, "--window", 500),
    ("lab", "tasks", "--sample", 2, "--window", 500),
    ("lab", "answers", "--sample", 2, "--questions", 1, "--window", 500),
]


@pytest.mark.parametrize("words", COMMANDS, ids=[str(words[1]) for words in COMMANDS])
@pytest.mark.parametrize("name", ["Raises", "Nonsense"])
def test_an_evaluation_of_a_failing_policy_says_so(
    broken: Path, words: tuple[str | int, ...], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = f"broken:{name}"
    if words[:3] == ("lab", "bench", "session"):
        pytest.importorskip("starlette", reason="the extra serve is not installed")
        spec = "lru"
    said = command(*words, "--policy", spec, "--json")
    if spec == "lru":
        assert (said.status, said.err.count("failed")) == (0, 0)
        return
    assert said.status == 1
    assert f"policy {spec} failed" in said.err
    report = json.loads(said.out)
    rows = report["health"] if words[1] == "drift" else report["rows"]
    failed = {row["policy"]: row["failed"] for row in rows}
    assert failed.pop(spec) > 0
    assert not any(failed.values())
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == 1
    assert told[0].exc_info is not None
    assert str(told[0].exc_info[1]).startswith("it is in the words" if name == "Raises" else "resolve: a plan gave")
    shown = command(*words, "--policy", spec)
    assert shown.status == 1
    assert " failed" in shown.out
    assert len([record for record in caplog.records if record.exc_info]) == 1, "once"


def test_a_policy_that_works_ends_well(broken: Path) -> None:
    said = command("lab", "paging", "--sample", 2, "--window", 300, "--policy", "lru", "--json")
    assert said.status == 0
    assert {row["failed"] for row in json.loads(said.out)["rows"]} == {0}
    assert "failed" not in said.err


def test_a_memory_policy_that_fails(broken: Path) -> None:
    said = command(
        "lab", "change", "--sample", 1, "--mode", "text", "--family", "plain", "--policy", "broken:Remembers", "--json"
    )
    assert said.status == 1
    assert json.loads(said.out)["failed"] > 0
    assert "policy broken:Remembers failed" in said.err


def test_a_replay_says_it_too(broken: Path) -> None:
    talk = broken / "talk.jsonl"
    talk.write_text("".join(json.dumps({"role": "user", "content": f"{n} " + "word " * 50}) + "\n" for n in range(40)))
    said = command("replay", talk, "--window", 300, "--policy", "broken:Raises", "--json")
    assert said.status == 1
    assert json.loads(said.out)["total"]["policy_failures"] > 0
    assert "policy broken:Raises failed" in said.err


def test_a_session_warns_of_it(broken: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kilburn.open(str(broken / "a.db"), window=300, policy="broken:Raises", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        for number in range(30):
            session.append({"role": "user", "content": f"{number} " + "word " * 40})
        stats = session.stats()
        assert stats.policy_failures > 5
        assert any(f"the policy failed {stats.policy_failures} times" in warning for warning in stats.warnings)
        assert "words of the page" not in str([event.data for event in session.ledger.events()])
        check_laws(session)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    with kilburn.open(str(broken / "a.db"), window=300, policy="lru", tokenizer="chars/4", embedder=None) as store:
        assert store.session("s").stats().policy_failures == stats.policy_failures
        check_laws(store.session("s"))
