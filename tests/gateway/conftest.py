"""A real server for an ASGI application; and a gateway in front of a scripted provider, with a store to look into afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import kilburn
from kilburn.gateway.app import Settings, build
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.limits import RequestBounds
from kilburn.kernel.store import Store
from kilburn.testing.upstream import Upstream
from kilburn.testing.upstream import serving as served


class Setup:
    """A gateway, its provider, and clients of both SDKs."""

    def __init__(self, url: str, upstream: Upstream, db: Path) -> None:
        self.url, self.upstream, self.db = url, upstream, db
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="client-key", max_retries=0, timeout=600)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="client-key", max_retries=0, timeout=600)

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        """A chat completion, with the headers of its response."""
        raw = self.openai.chat.completions.with_raw_response.create(model="m", messages=messages, **more)
        return raw.parse(), raw.headers

    def store(self, window: int = 1_000_000) -> Store:
        """The store, opened a second time."""
        return kilburn.open(str(self.db), window=window, policy="fifo", embedder=None)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    """Starts gateways: the script of the provider, then settings."""
    with ExitStack() as stack:

        def start(*script: Any, upstream: Upstream | None = None, form: str = "chat", **settings: Any) -> Setup:
            provider = upstream or Upstream(*script)
            far = stack.enter_context(served(provider))
            db = tmp_path / "gateway.db"
            given = {
                "db": str(db),
                "upstream": f"{far}/v1" if form == "chat" else far,
                "tokenizer": "chars/4",
                "embedder": None,
                "one_user": "keys" not in settings,
                **settings,
            }
            if given.get("model") is not None:
                given["upstream"] = None
            url = stack.enter_context(served(build(Settings(**given)), **uvicorn_options(RequestBounds())))
            setup = Setup(url, provider, db)
            stack.callback(setup.openai.close)
            stack.callback(setup.anthropic.close)
            return setup

        yield start


@pytest.fixture
def serving() -> Iterator[Callable[..., int]]:
    """Serves an application on a free port of the loopback until the test ends; returns the port."""
    with ExitStack() as stack:

        def serve(app: Any, limits: RequestBounds | None = None) -> int:
            url = stack.enter_context(served(app, **uvicorn_options(limits or RequestBounds())))
            return int(url.rpartition(":")[2])

        yield serve
