"""The model that answers where none is named: keys before servers on this machine, and no server that is no model server."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest

from kilburn.models.detection import SERVERS, chat_models, detect
from models.loopback import CUT, STALL, Answer, loopback

LONG = 600.0
"""Seconds: no test waits for it."""


def listing(*names: str) -> Answer:
    return Answer(body={"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"OPENAI_API_KEY": "a", "ANTHROPIC_API_KEY": "b"}, "gpt-5.5"),
        ({"OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": "b"}, "claude-sonnet-5-5"),
        ({"OPENAI_API_KEY": ""}, "llama3.2"),
    ],
)
def test_a_key_comes_before_a_server(keys: dict[str, str], name: str) -> None:
    with loopback(listing("llama3.2")) as server:
        model = detect({**keys, SERVERS: f"{server.url}/v1"}, patience=LONG)
        assert model is not None
        assert model.name == name
        assert len(server.asked) == (name == "llama3.2"), "no server is asked in vain"


def test_a_server_is_asked_for_its_list_and_nothing_else() -> None:
    with loopback(listing("nomic-embed-text", "qwen2.5:7b", "llama3.2")) as server:
        model = detect({SERVERS: f"{server.url}/v1/"}, patience=LONG)
        assert model is not None
        assert model.spec == f"chat('qwen2.5:7b', base_url='{server.url}/v1/', api_key='none')"
        assert [(asked.path, asked.body) for asked in server.asked] == [("/v1/models", {})]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=b"<html>It works!</html>"),
        Answer(status=404, body={"data": [{"id": "m"}]}),
        Answer(body={"data": "everything"}),
        Answer(body={"data": [{"name": "m"}]}),
        Answer(body=["m"]),
        listing(),
        listing("nomic-embed-text"),
        Answer(events=[b'{"data": [', CUT]),
        Answer(events=itertools.repeat(b" " * (1 << 16))),
    ],
    ids=["page", "status", "text", "no-id", "no-object", "empty", "embedder", "cut", "endless"],
)
def test_what_is_no_model_server_is_ignored(answer: Answer) -> None:
    with loopback(answer) as other, loopback(listing("m")) as server:
        model = detect({SERVERS: f"{other.url}/v1,{server.url}/v1"}, patience=LONG)
        assert model is not None
        assert model.reason == f"the server at {server.url}/v1 has it"
        assert other.asked


def test_a_server_that_is_silent_or_not_there_is_ignored() -> None:
    with loopback(Answer(events=[STALL])) as silent:
        assert chat_models(f"{silent.url}/v1", patience=0.05) == []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert chat_models(f"http://127.0.0.1:{port}/v1", patience=LONG) == []
    assert detect({SERVERS: ""}) is None


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (listing("gpt-3", "gpt-5.5"), "gpt-5.5"),
        (listing("mixtral", "gemma"), "mixtral"),
        (Answer(status=401, body={}), "gpt-5.5"),
    ],
)
def test_a_key_for_another_base_url_takes_a_model_that_is_there(answer: Any, name: str) -> None:
    with loopback(answer) as server:
        model = detect({"OPENAI_API_KEY": "sk", "OPENAI_BASE_URL": f"{server.url}/v1"}, patience=LONG)
        assert model is not None
        assert model.spec == f"chat({name!r})"
        assert server.asked[0].headers["authorization"] == "Bearer sk"
