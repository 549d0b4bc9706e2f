"""`kilburn serve --workers N` in processes of its own, for tests, and clients that talk with it all the time."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2

import kilburn
from gateway.talk import said, user
from waiting import until

REQUESTS = 'kilburn_requests_total{route="/v1/chat/completions",status="200",tenant="default"}'

PAUSE = 0.15
"""Seconds that a client thinks."""


class Crew:
    """A parent and its workers.

    Args:
        folder: for the log and what is told.
        db: a file or a URL.
    """

    def __init__(self, folder: Path, upstream: str, db: str, workers: int = 2, **options: Any) -> None:
        self._told = folder / "told"
        given = {"port": 0, "upstream": f"{upstream}/v1", "window": 1000, "db": db, "log": folder / "log", "workers": workers}
        words = [f"--{name}={value}" if value is not True else f"--{name}" for name, value in {**given, **options}.items()]
        with self._told.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "kilburn", "serve", *words], stderr=file)
        self.url = self.hears(r"(http://[\d.]+:\d+)/v1")

    def hears(self, pattern: str) -> str:
        """The first group of what is told, once it is."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.told
            return re.search(pattern, self.told)

        match = until(found)
        assert match is not None
        return str(match[match.re.groups])

    @property
    def told(self) -> str:
        return self._told.read_text()

    @property
    def workers(self) -> list[int]:
        """Their numbers as processes."""
        pid = self.process.pid
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def restart(self) -> None:
        """A rolling restart, to its end."""
        before = self.told.count("workers are new")
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.told.count("workers are new") > before or self.process.poll() is not None)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(600)

    def series(self, **headers: str) -> dict[str, float]:
        """What /metrics says."""
        page = httpx2.get(f"{self.url}/metrics", headers=headers, timeout=600)
        assert page.status_code == 200, page.text
        lines = [line.rpartition(" ") for line in page.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()


class Talker(threading.Thread):
    """A client that talks until it is told to end, and repeats nothing that fails.

    Args:
        keeps: whether it keeps its connection.
    """

    def __init__(self, url: str, name: str, *, keeps: bool) -> None:
        super().__init__(daemon=True)
        self.url, self.named, self.keeps = url, name, keeps
        self.talk: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._over = threading.Event()

    def run(self) -> None:
        with httpx2.Client(timeout=600) as kept:
            while not self._over.wait(PAUSE) and not self.failed:
                self.talk.append(user(f"{self.named} asks {len(self.talk)}"))
                try:
                    self._ask(kept)
                except Exception as error:
                    self.failed.append(f"{type(error).__name__}: {error}")

    def _ask(self, kept: httpx2.Client) -> None:
        body = {"model": "m", "messages": self.talk, "stream": len(self.talk) % 4 == 1}
        post = kept.post if self.keeps else httpx2.post
        answer = post(f"{self.url}/v1/chat/completions", json=body, headers={"x-kilburn-session": self.named}, timeout=600)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kilburn-session"] == self.named
        if not body["stream"]:
            text = answer.json()["choices"][0]["message"]["content"]
        else:
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-300:]
            events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
            text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        self.talk.append(said(text))

    def end(self) -> None:
        self._over.set()
        self.join(600)


def reply(sent: Any) -> str:
    return f"{sent.body['messages'][-1]['content']}, and hears of it"


def texts_of(db: str) -> dict[str, list[str]]:
    """What each session says."""
    with kilburn.open(db, readonly=True, embedder=None, tokenizer="chars/4") as store:
        return {
            info.name: ["".join(part.text for part in message.parts) for message in store.session(info.name).contents.originals()]
            for info in store.sessions()
        }


def check_talks(crew: Crew, db: str, talkers: list[Talker]) -> None:
    """Each client talked, nothing failed, and the store has each message once and in order."""
    for talker in talkers:
        talker.end()
    assert [talker.failed for talker in talkers] == [[]] * len(talkers), crew.told
    found = texts_of(db)
    for talker in talkers:
        assert len(talker.talk) > 4
        assert found[talker.named] == [message["content"] for message in talker.talk]
    assert not [name for name in found if "~" in name], "nothing was taken for a branch"
