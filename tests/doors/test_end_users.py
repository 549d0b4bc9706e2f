"""End users below one key: nothing of one ever reaches another, in whatever order they come.

Users of an application are named by the header, by OpenAI's fields or by Anthropic's, with names that look alike. They share
the names of sessions, hear the same canned words, compact their histories, ask for each other's sessions and pages, and go on
from each other's responses. What comes to the provider for one, or back to one, has no word of another.

A long run: `PYTHONPATH=src:tests python tests/doors/test_end_users.py --trials 200 --seed 1`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from doors.stub import Answer, Part, Seen, answer_of, refusal, whole
from doors.visit import Got, Ground, Json, Trial, check, find_broken, folder_of_memory, format_broken, gateway, prose, run, visit
from effort import rounds
from kilburn.gateway.keys import Key, add_key

WINDOW = 1200
CANNED = ("Thank you for your patience. Our team looks into every request, in the order in which they come. " * 11)[:1008]
FAMILIES = (
    ("alice", "bob", "carol"),
    ("ana", "Ana", "ana~2"),
    ("ana", "ana/ana", "/ana"),
    ("a b", "a%20b", "a  b"),
    ("x" * 101, "x" * 102, "x" * 103),
    ("josé", "jose\u0301", "jos"),
    ("..", "../..", "."),
    ("@memory", "memory", "@responses"),
    ("1", "01", "1.0"),
    ("user_aa_account__session_1", "user_bb_account__session_1", "user_cc_account__session_1"),
    ("*", "%", "_"),
)
WAYS = {
    "chat": ("header", "user", "safety_identifier"),
    "responses": ("header", "user", "safety_identifier"),
    "messages": ("header", "metadata"),
}
SHAPES = ("chat", "responses", "messages")


class User:
    """One end user, and the histories that their clients hold."""

    def __init__(self, rng: random.Random, name: str, way: str, form: str) -> None:
        self.name, self.way, self.form = name, way, form
        self.canary = f"canary{rng.randrange(10**12):012d}"
        self.hidden = f"case-{rng.randrange(10**12):012d}"
        self.history: list[Json] = []
        self.named = ""
        self.asked_for: set[str] = set()
        self.responses: list[str] = []

    def body(self, messages: list[Json]) -> tuple[Json, dict[str, str]]:
        body: Json = {"model": "m", "input" if self.form == "responses" else "messages": messages}
        headers: dict[str, str] = {}
        if self.form == "messages":
            body["max_tokens"] = 500
        if self.way == "header":
            headers["x-kilburn-user"] = self.name.encode().decode("latin-1")
        elif self.way == "metadata":
            body["metadata"] = {"user_id": self.name}
        else:
            body[self.way] = self.name
        return body, headers


class Model:
    """Searches for whatever others said, as often as it is let."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.others: list[str] = []
        self.names: list[str] = []
        self.own = 0

    def answer(self, seen: Seen) -> Answer:
        if seen.method != "POST" or not seen.form:
            return refusal("chat", "no such path", 404)
        body, form = seen.body, seen.form
        offered = {tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools", ())}
        talk = body.get("messages") or body.get("input") or []
        rounds = sum(
            1
            for item in talk[-9:]
            if isinstance(item, dict) and ("tool_call" in str(item) or "call_id" in str(item) or "tool_use" in str(item))
        )
        parts: list[Part] = [("M", CANNED)]
        if "recall" in offered and rounds < 3 and self.rng.random() < 0.6:
            parts = [self.probe() for _ in range(self.rng.randrange(1, 4))]
        return answer_of(form, whole(form, parts), bool(body.get("stream")))

    def probe(self) -> Part:
        rng = self.rng
        if rng.random() < 0.5:
            query = rng.choice(
                (
                    "canary parcel secret locker",
                    "canary",
                    "case",
                    "the number of my parcel is",
                    CANNED[:60],
                    prose(rng, 3),
                    "my locker",
                )
            )
            return ("F", "search_memory", {"query": query})
        name = rng.choice((*self.names, *(f"{name}~2" for name in self.names), "main", "main~2", "main~3"))
        page = rng.choice(("p1", "p2", "p1-p9", "p3", "f1"))
        return (
            "F",
            "recall",
            {
                "address": rng.choice(
                    (page, f"{name} {page}", f"{name}/{page}", f"b1/{page}", f"@memory {page}", f"@memory/x {page}")
                )
            },
        )


class Street:
    """One gateway, one key, three users."""

    def __init__(self, rng: random.Random, ground: Ground, model: Model, key: str) -> None:
        self.rng, self.ground, self.model, self.key = rng, ground, model, key
        names = rng.sample(rng.choice(FAMILIES), 3)
        self.users = []
        for name in names:
            form = rng.choice(SHAPES)
            ways = [way for way in WAYS[form] if way != "header" or (name == name.strip())]
            self.users.append(User(rng, name, rng.choice(ways), form))
        self.told: list[str] = []

    def look(self, user: User, raw: bytes, what: str) -> None:
        """Nothing of another user is in these bytes."""
        shown = {
            "who": [user.name, user.way, user.form],
            "others": [(other.name, other.way, other.form) for other in self.users if other is not user],
        }
        for other in self.users:
            if other is user:
                self.model.own += what == "the provider" and raw.count(user.canary.encode()) > 1
                continue
            # The model itself names other users' sessions in its calls, which go to the provider.
            for word in (other.canary, other.hidden) if what == "the client" else (other.canary,):
                if word in user.asked_for:
                    continue
                at = raw.find(word.encode())
                check(
                    at < 0,
                    f"nothing of one user reaches {what} for another",
                    shown | {"steps": self.told, "bytes": repr(raw[max(at - 300, 0) : at + 60])},
                )
        if what == "the client":
            for path in (str(self.ground.folder), "/dev/shm", "/work/", "site-packages", "Traceback", "doors.db"):
                check(
                    path.encode() not in raw,
                    "no path of the machine in what a client gets",
                    shown | {"steps": self.told, "path": path, "bytes": repr(raw[:600])},
                )

    def send(self, user: User, body: Any, headers: dict[str, str], path: str = "") -> Got:
        before = len(self.ground.stub.seen)
        secret = {"authorization": f"Bearer {self.key}", "x-api-key": ""}
        if path:
            got = visit(self.ground.url, path, body, headers=secret | headers)
        else:
            got = self.ground.ask(user.form, body, headers=secret | headers)
        for seen in self.ground.stub.seen[before:]:
            self.look(
                user, seen.path.encode() + b"\n" + repr(sorted(seen.headers.items())).encode() + b"\n" + seen.raw, "the provider"
            )
        self.look(user, got.everything, "the client")
        return got

    def step(self) -> None:
        rng = self.rng
        user = rng.choice(self.users)
        others = [other for other in self.users if other is not user]
        deeds = ("say",) * 8 + ("compact", "remember", "ask", "steal", "odd", "chain", "begin", "fork")
        deed = rng.choice(deeds)
        self.told.append(f"{user.name[:12]} {deed}")
        if deed == "odd":
            self.odd(user, rng.choice(others))
            return
        if deed == "chain":
            self.chain(user, rng.choice(others))
            return
        if deed == "compact" and user.history:
            user.history = [
                {"role": "user", "content": f"A summary of what was said: {CANNED}"},
                {"role": "assistant", "content": CANNED},
            ]
        elif deed == "begin":
            user.history = []
            user.named = rng.choice(("", "main", user.hidden))
        elif deed == "fork" and len(user.history) > 2:
            user.history = user.history[:-2]
        elif deed == "steal":
            other = rng.choice(others)
            if rng.random() < 0.5 and other.named:
                user.named = other.named
                user.asked_for.add(other.named)
            user.history = [] if rng.random() < 0.5 else [m for m in other.history if m["role"] == "assistant"][:1] or []
            user.history = [{"role": "user", "content": "Hello."}, *user.history] if user.history else []
        words = {
            "remember": f"Remember that my locker has the number {user.canary}.",
            "ask": "What is the number of my locker? And of my parcel?",
        }
        text = words.get(deed, f"Hello, the secret number of my parcel is {user.canary}. " + "The box was wet. " * 8)
        asked = [*user.history, {"role": "user", "content": text}]
        body, headers = user.body(asked)
        if user.named:
            headers["x-kilburn-session"] = user.named
        if rng.random() < 0.4:
            body["stream"] = True
        got = self.send(user, body, headers)
        check(got.status == 200, f"a user is served: {got.words}", {"steps": self.told, "status": got.status, "who": user.name})
        user.history = [*asked, {"role": "assistant", "content": CANNED}]
        if user.form == "responses" and not body.get("stream"):
            user.responses.append(got.json["id"])

    def odd(self, user: User, other: User) -> None:
        """Requests that are answered with an error, as a rule."""
        rng = self.rng
        body, headers = user.body([{"role": "user", "content": "Hello."}])
        path = ""
        raw: Any = body
        kind = rng.randrange(8)
        if kind == 0:
            raw = b'{"model": "m", "messages": [' + rng.choice(
                (b"1]}", b'{"role": "x"}]}', b"", b'{"role": "user", "content": 5}]}')
            )
        elif kind == 1:
            headers["x-kilburn-session"] = rng.choice(
                ("@memory", "@responses", "@memory/x", "a" * 300, "\x7f", f"{other.named or 'main'}~2")
            )
            user.asked_for.add(other.named)
        elif kind == 2:
            path = rng.choice(
                ("/v1/nothing", "/v1/files", "/v1/responses/resp_x", "/v1/batches", "/v1/models", "/health", "/v1/rerank")
            )
        elif kind == 3:
            headers["x-kilburn-user"] = rng.choice(("", "@", "\x01", "x" * 5000))
        elif kind == 4:
            body["model"] = "é" * 3000
        elif kind == 5:
            raw = json.dumps(body).encode()[:-3]
        elif kind == 6:
            headers["content-encoding"] = "gzip"
        else:
            raw = json.dumps(body | {"messages": [{"role": "tool", "tool_call_id": "x", "content": "x"}]}).encode()
        with suppress(OSError, ValueError):
            self.send(user, raw, headers, path)

    def chain(self, user: User, other: User) -> None:
        """Goes on from another user's response."""
        if not other.responses or user.form != "responses":
            return
        body, headers = user.body([{"role": "user", "content": "What did I say?"}])
        body["previous_response_id"] = self.rng.choice(other.responses)
        before = len(self.ground.stub.seen)
        got = self.send(user, body, headers)
        check(got.status == 404, "a response of another user is not there", {"status": got.status, "steps": self.told})
        check(len(self.ground.stub.seen) == before, "a request for it does not reach the provider", self.told)


def trial(rng: random.Random, *, ground: Ground, model: Model, keys: Path, learn: bool, link: str) -> None:
    secret = add_key(keys, Key(tenant=f"t{rng.randrange(10**12)}", memory=300 if learn else 0, learn=learn, link=link))[1]
    street = Street(rng, ground, model, secret)
    model.rng = rng
    model.names = sorted({user.hidden for user in street.users} | {"main"})
    for _ in range(22):
        street.step()


@contextmanager
def end_users(form: str, learn: bool) -> Iterator[Trial]:
    model = Model()
    folder = folder_of_memory()
    try:
        keys = folder / "keys.json"
        add_key(keys, Key(tenant="first"))
        with gateway(model.answer, form=form, window=WINDOW, keys=str(keys)) as ground:
            yield partial(trial, ground=ground, model=model, keys=keys, learn=learn, link="auto")
        assert model.own, "no search found a user's own words: these trials show nothing"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


FUZZERS: dict[str, Callable[[], Any]] = {
    f"{form}{'-learn' if learn else ''}": partial(end_users, form, learn)
    for form in ("chat", "messages")
    for learn in (False, True)
}


@pytest.mark.parametrize("name", FUZZERS)
def test_end_users_are_walls(name: str) -> None:
    with FUZZERS[name]() as trial:
        broken = find_broken(trial, trials=rounds(2, 8))
    assert not broken, format_broken(broken)


if __name__ == "__main__":
    run(FUZZERS, __doc__ or "")
