"""`bench gateway`: the load's two ends agree, what is lost or reordered is noticed, and all systems are measured."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError, Unavailable
from kilburn.testing.upstream import Upstream, calling, serving
from kilburn_lab.evals.gateway import evaluate
from kilburn_lab.evals.gateway_load import ClientConnection, ClientConversation, Heard, answer_all, said
from kilburn_lab.evals.gateway_report import GatewayRow
from kilburn_lab.evals.pass_through import build

App = Callable[[Any, Any, Any], Awaitable[None]]


async def exchanged(port: int, *, stream: bool, events: int = 5) -> tuple[bool, Heard]:
    connection, talk = ClientConnection(port), ClientConversation(1, 10, 4)
    heard = await connection.ask(talk.next(7, events, stream=stream))
    right = talk.hear(heard)
    await connection.close()
    return right, heard


@pytest.mark.parametrize("stream", [True, False])
async def test_the_stub_says_what_the_latest_message_asks_for(stream: bool) -> None:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(answer_all(port.set_result))
    right, heard = await exchanged(await port, stream=stream)
    task.cancel()
    await asyncio.wait([task])
    assert right
    assert heard.text == said(7, 5) == "7:0 7:1 7:2 7:3 7:4 "
    assert heard.first > 0


def says(*texts: str, finish: str | None = "stop", done: bool = True) -> App:
    """A server that streams these texts."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    if finish is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": b"data: %s\n\n" % json.dumps(chunk).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if done else b""})

    return app


@pytest.mark.parametrize(
    ("app", "right"),
    [
        (says("7:0 ", "7:1 "), True),
        (says("7:0 7:1 "), True),
        (says("7:1 ", "7:0 "), False),
        (says("7:0 "), False),
        (says("7:0 ", "7:1 ", "7:1 "), False),
        (says("8:0 ", "8:1 "), False),
        (says("7:0 ", "7:1 ", finish=None), False),
        (says("7:0 ", "7:1 ", done=False), False),
    ],
    ids=["right", "joined", "reordered", "lost", "twice", "another's", "no finish", "no end"],
)
async def test_a_stream_that_is_not_as_it_was_sent_is_noticed(app: App, right: bool) -> None:
    with serving(app) as url:
        assert (await exchanged(int(url.rpartition(":")[2]), stream=True, events=2))[0] is right


def test_a_conversation_resends_everything_and_is_the_same_for_a_seed() -> None:
    one, other = (ClientConversation(3, 12, 19) for _ in range(2))
    body = one.next(1, 2)
    assert body == other.next(1, 2)
    messages = json.loads(body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 10 + ["user"]
    one.hear(Heard(200, said(1, 2), True, 0.0))
    assert json.loads(one.next(2, 2))["messages"][: len(messages)] == messages
    assert len(one) == len(messages) + 2


def test_the_pass_through_proxy_changes_nothing() -> None:
    upstream = Upstream(calling(("read", {"path": "a.py"}), text="Let me see. é"), otherwise="Done.")
    with (
        serving(upstream) as url,
        serving(build(url)) as proxy,
        openai.OpenAI(base_url=f"{proxy}/v1", api_key="mine", max_retries=0) as client,
    ):
        asked: Any = [{"role": "user", "content": "Look."}]
        with client.chat.completions.stream(model="scripted", messages=asked) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.content == "Let me see. é"
        assert client.chat.completions.create(model="scripted", messages=asked).choices[0].message.content == "Done."
        assert client.models.list().data
    assert upstream.sent[0].headers["authorization"] == "Bearer mine"
    assert not upstream.refused


@pytest.mark.slow
def test_all_systems_are_measured_in_one_run(tmp_path: Path) -> None:
    """Kilburn's gateway beside the proxy that passes on and beside none; the figures are of this machine, and not judged."""
    small = ["--requests", "40", "--rounds", "4", "--streams", "20", "--window", "3000", "--sessions", "200"]
    ran = kilburn("lab", "bench", "gateway", *small, "--json")
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    assert [row["system"] for row in report["rows"]] == ["no proxy", "pass-through", "kilburn"]
    for row in report["rows"]:
        assert (row["failed"], row["wrong"]) == (0, 0)
        assert row["rate"] > 0
        for latency, asked in zip(row["latencies"], [(20, True), (1000, True), (20, False), (1000, False)], strict=True):
            assert (latency["messages"], latency["streamed"]) == asked
            assert 0 < latency["p50"] <= latency["p95"]
    for latency in report["rows"][2]["latencies"]:
        assert latency["cpu"] > 0
        assert latency["behind"] is not None
    assert [each["sessions"] for each in report["beginnings"]] == [10, 200]
    assert report["rows"][2]["memory"][-1][0] == 40
    assert 190_000 < report["rows"][0]["latencies"][1]["tokens"] < 230_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"requests": 0},
        {"streams": 0},
        {"sessions": 0},
        {"peers": {"nobody": "python"}},
        {"peers": {"litellm": "/none"}},
    ],
)
def test_numbers_and_names_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        evaluate(**{"rounds": 1, "requests": 1, "streams": 1, **wrong})


def test_a_system_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("")
    (tmp_path / "litellm").write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    (tmp_path / "litellm").chmod(0o755)
    with pytest.raises(Unavailable, match="litellm did not start: no such model"):
        evaluate(rounds=1, requests=1, streams=1, peers={"litellm": str(python)})


def test_growth_is_what_the_second_half_adds() -> None:
    memory = [(1000 * at, 1e6 * min(at, 5) + 1e5 * max(0, at - 5)) for at in range(1, 11)]
    row: dict[str, Any] = {"system": "kilburn", "latencies": [], "rate": 1.0, "failed": 0, "wrong": 0, "memory": memory}
    assert GatewayRow(**row).growth == pytest.approx(1e5)
    assert GatewayRow(**{**row, "memory": memory[:1]}).growth is None
