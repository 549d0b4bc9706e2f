"""Gateways that are killed, several over one file, and a full disk: nothing is lost or doubled, and the next request works."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from effort import rounds
from gateway.talk import said, user
from kilburn.testing.upstream import Upstream, calling, serving
from waiting import until

FILLER = "The river carries sand, and the sand carries gold. " * 6
IGNORING = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"


class Served:
    """`kilburn serve` in a process of its own."""

    def __init__(
        self, db: Path, upstream: str, window: int = 1000, fail: str = "closed", place: str = "", more: Sequence[str] = ()
    ) -> None:
        options = {
            "port": 0,
            "upstream": f"{upstream}/v1",
            "window": window,
            "db": place or db,
            "log": db.with_suffix(".log"),
            "fail": fail,
        }
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        # A limit on the size of files stands in for a disk: going over it must be an error, not the end.
        run = IGNORING + "from kilburn.cli import main; main()"
        told = db.with_suffix(f".{time.monotonic_ns()}")
        with told.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-c", run, "serve", *given, *more], stderr=file)

        def address() -> re.Match[str] | None:
            assert self.process.poll() is None, told.read_text()
            return re.match(r"(http://[\d.]+:\d+)/v1", told.read_text())

        found = until(address)
        assert found is not None
        self.url = found[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(600)

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(600)
        self.process.kill()

    def ask(self, messages: list[Any], *, stream: bool = False, **headers: str) -> tuple[str, str]:
        """The reply's text, and the session's name."""
        body = {"model": "m", "messages": messages, "stream": stream}
        with httpx2.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=600) as answer:
            raw = b"".join(answer.iter_bytes()).decode()
        assert answer.status_code == 200, raw
        if not stream:
            return json.loads(raw)["choices"][0]["message"]["content"], answer.headers["x-kilburn-session"]
        events = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
        assert raw.rstrip().endswith("data: [DONE]"), raw[-300:]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        return text, answer.headers["x-kilburn-session"]


class Setup:
    """A provider that answers q7 with r7, after it has recalled something half of the time.

    Args:
        db: the store's file, beside which the logs are. place: the store in place of it.
    """

    def __init__(self, db: Path, place: str = "") -> None:
        self.db, self.place, self.moment, self.chance = db, place, "", random.Random(0)
        self.upstream = Upstream(otherwise=self.reply, piece=8)
        self.stack = ExitStack()
        self.far = self.stack.enter_context(serving(self.upstream))
        self.served: list[Served] = []

    def serve(self, **more: Any) -> Served:
        self.served.append(Served(self.db, self.far, place=self.place, **more))
        return self.served[-1]

    def reply(self, sent: Any) -> Any:
        messages = sent.body["messages"]
        last = messages[-1]
        if last["role"] == "user" and sent.body.get("tools") and (self.chance.random() < 0.7 or "round" in self.moment):
            if self.moment == "before the round":
                self.served[-1].kill()
            return calling(("recall", {"address": "p1"}), text="I look. ")
        if (self.moment == "between the rounds" and last["role"] == "tool") or self.moment == "before the reply":
            self.served[-1].kill()
        asked = [found for message in messages if (found := re.match(r"q(\d+)", str(message["content"])))]
        return f"r{asked[-1][1]} " + "and so on " * 8 if asked else "lost"

    def close(self) -> None:
        for served in self.served:
            served.stop()
        self.stack.close()

    def fsck(self) -> str:
        if self.place:
            return ""
        done = subprocess.run(
            [sys.executable, "-m", "kilburn", "fsck", "--db", str(self.db)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return "" if done.returncode == 0 else done.stdout + done.stderr

    def sessions(self) -> dict[str, list[str]]:
        """What the client knows of each session."""
        with kilburn.open(self.place or str(self.db), readonly=True, embedder=None, tokenizer="chars/4") as store:
            found = {}
            for info in store.sessions():
                texts: list[str] = []
                for message in store.session(info.name).contents.originals():
                    told = "".join(part.text for part in message.parts if part.kind == "text")
                    if told:
                        texts.append(told)
                found[info.name] = texts
            return found


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path / "a.db")
    yield made
    made.close()


MOMENTS = ("between the requests", "before the reply", "before the round", "between the rounds", "in the stream")


def interrupted(setup: Setup, served: Served, talk: list[Any], moment: str, chance: random.Random) -> tuple[str, str] | None:
    """A request in which the gateway is killed; its answer if it was over before."""
    setup.moment = moment
    timer = threading.Timer(chance.random() * 0.2, served.kill)
    if moment == "in the stream":
        setup.upstream.pause = 0.01
        timer.start()
    try:
        return served.ask(talk, stream=chance.random() < 0.5 or moment == "in the stream")
    except (httpx2.HTTPError, AssertionError):
        served.process.wait(600)
        return None
    finally:
        if moment == "in the stream":
            timer.join()
        setup.moment, setup.upstream.pause = "", 0.0


@pytest.mark.parametrize("seed", range(rounds(1, 2)))
def test_a_gateway_that_is_killed_goes_on_where_it_was(setup: Setup, seed: int) -> None:
    chance = setup.chance = random.Random(seed)
    served, talk, killed, names = setup.serve(), list[Any](), 0, set[str]()
    moments = list(MOMENTS)
    chance.shuffle(moments)
    while moments:
        talk.append(user(f"q{len(talk)} {FILLER}"))
        answer = None
        if len(talk) > 12:
            moment = moments.pop()
            if moment == "between the requests":
                served.kill()
            else:
                answer = interrupted(setup, served, talk, moment, chance)
            if served.process.poll() is not None:
                killed += 1
                served = setup.serve()
        text, name = answer or served.ask(talk, stream=chance.random() < 0.5)
        assert f"r{len(talk) - 1} " in text
        names.add(name)
        talk.append(said(text))
    served.kill()
    assert killed >= 4
    assert setup.fsck() == ""
    assert not [sent.wrong for sent in setup.upstream.refused]
    found = setup.sessions()
    assert [text.strip() for text in found[name]] == [message["content"].strip() for message in talk]
    assert names == set(found) == {name}, "there is one session"


@pytest.mark.slow
def test_two_gateways_over_one_file_and_a_client_that_alternates(setup: Setup) -> None:
    both, talk, names = (setup.serve(), setup.serve()), list[Any](), set[str]()
    for number in range(12):
        talk.append(user(f"q{len(talk)} {FILLER}"))
        text, name = both[number % 2].ask(talk, stream=number % 3 == 0)
        assert f"r{len(talk) - 1} " in text
        talk.append(said(text))
        names.add(name)
    assert setup.fsck() == ""
    assert not [sent.wrong for sent in setup.upstream.refused]
    found = setup.sessions()
    assert [text.strip() for text in found[name]] == [message["content"].strip() for message in talk]
    assert names == set(found) == {name}


@pytest.mark.slow
def test_two_clients_of_two_gateways_race_on_one_session(setup: Setup) -> None:
    both = (setup.serve(), setup.serve())
    setup.upstream.delay = 0.02
    talks: list[list[Any]] = [[], []]
    last: dict[int, str] = {}
    problems: list[BaseException] = []

    def client(place: int) -> None:
        talk = talks[place]
        try:
            for number in range(14):
                # Both begin with the same words; they say something of their own from the third request on.
                own = "" if number < 2 else f" of {place}"
                talk.append(user(f"q{len(talk)}{own} {FILLER}"))
                text, last[place] = both[(number + place) % 2].ask(talk, stream=number % 2 == 0, **{"x-kilburn-session": "work"})
                talk.append(said(text))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=client, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not problems
    assert setup.fsck() == ""
    assert not [sent.wrong for sent in setup.upstream.refused]
    found = setup.sessions()
    assert last[0] != last[1]
    for place, talk in enumerate(talks):
        assert [text.strip() for text in found[last[place]]] == [message["content"].strip() for message in talk]
    # Each client has its own; beside these there is at most what both began at the same time.
    assert len(found) <= 4, {name: len(texts) for name, texts in found.items()}


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_next_request_works_when_there_is_room(setup: Setup) -> None:
    served, talk, name = setup.serve(window=8000), list[Any](), ""
    for _ in range(3):
        talk.append(user(f"q{len(talk)} {FILLER}"))
        text, name = served.ask(talk)
        talk.append(said(text))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = max(file.stat().st_size for file in setup.db.parent.iterdir())
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (most + 50_000, hard))
    errors: list[tuple[str, int, Any]] = []

    def client(place: int) -> None:
        path = ("/v1/chat/completions", "/v1/messages")[place % 2]
        for number in range(20):
            words = f"q{place}{number} " + random.Random(100 * place + number).randbytes(7_500).hex()
            body = {"model": "m", "max_tokens": 9, "messages": [user(words)], "stream": number % 2 == 0}
            answer = httpx2.post(served.url + path, json=body, timeout=600)
            if answer.status_code != 200:
                errors.append((path, answer.status_code, answer.json()))

    threads = [threading.Thread(target=client, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert {path for path, _, _ in errors} == {"/v1/chat/completions", "/v1/messages"}, "the disk was full"
    for path, status, body in errors:
        assert status in (503, 507), body
        assert body["error"]["message"]
        assert body.get("type") == ("error" if path == "/v1/messages" else None)
    talk.append(user(f"q{len(talk)} {FILLER}"))
    with suppress(AssertionError):
        served.ask(talk)
        talk[-1]["content"] += "again"
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    text, again = served.ask(talk)
    assert f"r{len(talk) - 1} " in text
    assert again in (name, f"{name}~2")
    talk.append(said(text))
    assert setup.fsck() == ""
    assert [text.strip() for text in setup.sessions()[again]] == [message["content"].strip() for message in talk]
