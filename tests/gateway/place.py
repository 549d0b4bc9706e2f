"""A gateway with several keys over one store, for tests of what people do there by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

import kilburn
from gateway.talk import said, user
from kilburn.gateway.app import Settings, build
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.keys import Key, add_key
from kilburn.kernel.store import Store
from kilburn.testing.upstream import Upstream, serving

CHAT = "/v1/chat/completions"
Json = dict[str, Any]


class Place:
    """A gateway with several keys over one store, and its provider."""

    def __init__(
        self, folder: Path, stack: ExitStack, keys: dict[str, Key], people: Callable[[Any], Any] | None = None, **settings: Any
    ) -> None:
        self.people = people
        self.upstream = Upstream(otherwise="Noted, and the work goes on.")
        self.db, self.file = folder / "place.db", folder / "keys.json"
        self.keys = {name: add_key(self.file, key)[1] for name, key in keys.items()}
        far = stack.enter_context(serving(self.upstream))
        given = {"db": str(self.db), "upstream": f"{far}/v1", "tokenizer": "chars/4", "embedder": None, "window": 4000}
        self.settings = Settings(**{**given, "keys": str(self.file) if keys else None, **settings})
        self.stack = stack
        self.http = stack.enter_context(httpx2.Client(timeout=600))
        self.talk: list[Json] = []
        self.start()

    def start(self) -> None:
        self._running = ExitStack()
        self.stack.push(self._running)
        self.url = self._running.enter_context(
            serving(build(self.settings, self.people), **uvicorn_options(self.settings.limits))
        )

    def again(self) -> None:
        self._running.close()
        self.start()

    def headers(self, key: str, **more: str) -> dict[str, str]:
        given = {"x-api-key": self.keys[key]} if key else {}
        return given | {f"x-kilburn-{name}": value for name, value in more.items()}

    def say(self, text: str, key: str = "", name: str = "work", **more: str) -> Json:
        """One turn of a talk; returns what went upstream."""
        self.talk.append(user(text))
        headers = self.headers(key, session=name, **more)
        answer = self.http.post(self.url + CHAT, json={"model": "m", "messages": self.talk}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kilburn-session"] == name
        self.talk.append(said(answer.json()["choices"][0]["message"]["content"]))
        return self.upstream.sent[-1].body

    def get(self, path: str, key: str = "", **more: str) -> httpx2.Response:
        return self.http.get(f"{self.url}/sessions/{path}", headers=self.headers(key, **more))

    def do(self, verb: str, key: str = "", name: str = "work", body: Json | None = None, **more: str) -> httpx2.Response:
        return self.http.post(f"{self.url}/sessions/{quote(name)}/{verb}", json=body or {}, headers=self.headers(key, **more))

    def store(self, tenant: str = "default") -> Store:
        return kilburn.open(
            str(self.db), window=4000, policy="cost", tenant=tenant, tokenizer="chars/4", embedder=None, readonly=True
        )

    def shown(self, tenant: str = "default", name: str = "work") -> list[tuple[str, str]]:
        with self.store(tenant) as store:
            return [(page.address if page else "", instead) for _, page, instead in store.session(name).contents.shown()]
