"""A coding assistant runs a long session through the gateway: nothing is lost, every request is valid, prefixes stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import kilburn
from cli.terminal import kilburn as program
from kilburn.errors import SpecError
from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import Upstream, serving
from kilburn_lab.evals.gateway_session import Client, RecordedSession, Speech, evaluate, lost
from kilburn_lab.evals.trajectories import synthetic


@pytest.fixture
def recorded() -> RecordedSession:
    return RecordedSession(islice(synthetic(2, 1), 2))


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def url(upstream: Upstream) -> Iterator[str]:
    with serving(upstream) as at:
        yield at


def settings(db: Path, url: str, window: int) -> Settings:
    return Settings(db=str(db), upstream=url, window=window, tokenizer="chars/4", embedder=None)


# The agent looks back at long stretches that have left the window.
@pytest.mark.filterwarnings("ignore:hit rate")
@pytest.mark.slow
def test_nothing_is_lost_every_request_is_valid_and_the_prefix_stays() -> None:
    report = evaluate(runs=4, window=8000)
    through, alone, cut = (report.row(system) for system in ("kilburn", "pass-through", "truncation"))
    assert report.tokens > 1.5 * report.window
    assert through.refused == alone.refused == cut.refused == 0
    assert through.lost == 0 < cut.lost
    assert through.beyond == 0 < alone.beyond
    assert through.recalls > 0
    assert through.requests == report.steps + through.recalls
    assert through.shared / through.shipped > cut.shared / cut.shipped + 0.1
    assert through.shipped < alone.shipped
    assert "kilburn" in report.table()


def test_the_gateway_may_restart_in_the_middle_of_a_session(
    recorded: RecordedSession, upstream: Upstream, url: str, tmp_path: Path
) -> None:
    db, half = tmp_path / "agent.db", len(recorded.steps) // 2
    history: list[dict[str, object]] = []
    looked = 0
    for steps in (recorded.steps[:half], recorded.steps[half:]):
        with serving(build(settings(db, url, 3000))) as gateway:
            client = Client(gateway, recorded)
            client.history = history or client.history
            for index, (reply, following) in enumerate(steps):
                upstream.otherwise = agent = Speech(reply, looks_back=index % 5 == 4)
                client.ask(following, stream=index % 2 == 0)
                looked += agent.looked
            history = client.history
            client.close()
    assert not upstream.refused
    assert looked > 1
    assert len(upstream.prompts) == len(recorded.steps) + looked
    assert max(sent.tokens for sent in upstream.prompts) <= 3000
    assert lost(str(db), history) == 0
    with kilburn.open(str(db), tokenizer="chars/4", embedder=None) as store:
        assert len(store.sessions()) == 1
    called = [block["name"] for message in history for block in message["content"] if block["type"] == "tool_use"]  # type: ignore[attr-defined, index]
    assert set(called) == {"shell"}


def test_what_a_store_does_not_have_counts_as_lost(
    recorded: RecordedSession, upstream: Upstream, url: str, tmp_path: Path
) -> None:
    with serving(build(settings(tmp_path / "agent.db", url, 8000))) as gateway:
        client = Client(gateway, recorded)
        upstream.otherwise = recorded.steps[0][0]
        client.ask(None, stream=False)
        client.close()
    assert lost(str(tmp_path / "agent.db"), client.history) == 0
    more = [*client.history, {"role": "user", "content": "This was never said."}]
    assert lost(str(tmp_path / "agent.db"), more) == len("This was never said.")


def test_a_client_that_truncates_sends_what_fits(recorded: RecordedSession, upstream: Upstream, url: str) -> None:
    client = Client(url, recorded, room=2000)
    for reply, following in recorded.steps:
        upstream.otherwise = reply
        client.ask(following, stream=False)
    client.close()
    assert not upstream.refused
    assert len(client.kept()) < len(client.history)
    assert client.kept()[0] == client.history[0]
    assert client.kept()[-1] == client.history[-1]


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"window": 0}])
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError):
        evaluate(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_verb_prints_what_was_measured() -> None:
    ran = program("lab", "bench", "session", "--runs", "1", "--window", "3000", "--json")
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    assert [row["system"] for row in report["rows"]] == ["pass-through", "truncation", "kilburn"]
    assert report["rows"][2]["lost"] == 0
