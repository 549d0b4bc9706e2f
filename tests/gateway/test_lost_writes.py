"""A database that loses what was written last, as a server does that is killed, or a file that is put back from a copy: gateways
that know more than it does go on from what is there, and no request that is asked again begins a branch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx2
import pytest

import kilburn
from effort import pairwise
from gateway.talk import user
from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import Refusal, Upstream, serving


@contextmanager
def lost(path: Path) -> Iterator[None]:
    """What is written meanwhile is lost."""
    with closing(apsw.Connection(str(path))) as file, closing(apsw.Connection(":memory:")) as before:
        _copy(file, before)
        yield
        _copy(before, file)


def _copy(source: apsw.Connection, target: apsw.Connection) -> None:
    with target.backup("main", source, "main") as made:
        made.step()


class Client:
    """It sends its whole history, or the id of the last reply."""

    def __init__(self, *, chained: bool) -> None:
        self.chained, self.history, self.before = chained, list[Any](), ""

    def ask(self, url: str, question: str) -> int:
        """Ask, and go on from the reply if there is one; the status."""
        asked = [*self.history, user(question)]
        body: dict[str, Any] = {"model": "m", "input": asked}
        if self.chained and self.before:
            body |= {"input": question, "previous_response_id": self.before}
        answer = httpx2.post(f"{url}/v1/responses", json=body, timeout=600)
        if answer.status_code == 200:
            self.history, self.before = [*asked, *answer.json()["output"]], answer.json()["id"]
        return answer.status_code


def texts(path: Path) -> list[list[str]]:
    with kilburn.open(path, readonly=True, embedder=None, tokenizer="chars/4") as store:
        sessions = [store.session(info.name) for info in store.sessions()]
        return [[part.text for message in session.contents.originals() for part in message.parts] for session in sessions]


@pytest.mark.parametrize(
    ("read", "again", "chained", "window_before"),
    pairwise([(0,), (1,), (0, 1)], [0, 1], [False, True], [(400, 3), (100_000, 3), (100_000, 0)]),
)
def test_a_question_that_was_lost_is_asked_again(
    tmp_path: Path, read: tuple[int, ...], again: int, chained: bool, window_before: tuple[int, int]
) -> None:
    """The gateways in `read` read what is lost, and the gateway `again` is asked again."""
    window, before = window_before
    path, broken = tmp_path / "a.db", list[str]()

    def reply(sent: Any) -> str | Refusal:
        question = re.findall(r"q\d", str(sent.body))[-1]
        return Refusal(status=500) if question in broken else f"r-{question}"

    with serving(Upstream(otherwise=reply)) as far, ExitStack() as stack:
        settings = Settings(db=path, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None, window=window)
        urls = [stack.enter_context(serving(build(settings))) for _ in range(2)]
        client = Client(chained=chained)
        for at in range(before):
            assert client.ask(urls[at % 2], f"q{at}") == 200
        with lost(path):
            broken.append("q3")
            for each in read:
                assert client.ask(urls[each], "q3") == 500
            broken.clear()
        for question in ("q3", "q4"):
            tries = 0
            while client.ask(urls[again], question) != 200:
                tries += 1
                assert tries < 3
        assert client.ask(urls[1 - again], "q5") == 200
    assert texts(path) == [[text for at in [*range(before), 3, 4, 5] for text in (f"q{at}", f"r-q{at}")]]


@pytest.mark.parametrize("chained", [False, True], ids=["history", "chained"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_reply_that_was_lost_and_is_another_one_now(tmp_path: Path, chained: bool, steps: int) -> None:
    """The ledger is as long as before, and says something else."""
    path, heard = tmp_path / "a.db", list[str]()

    def reply(sent: Any) -> str:
        heard.append("")
        return f"r{len(heard)}"

    with serving(Upstream(otherwise=reply)) as far, ExitStack() as stack:
        settings = Settings(db=path, upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        one, other = (stack.enter_context(serving(build(settings))) for _ in range(2))
        client, gone = Client(chained=chained), Client(chained=chained)
        assert client.ask(one, "q1") == client.ask(other, "q2") == 200
        gone.history, gone.before = client.history, client.before
        with lost(path):
            for at in range(steps):
                assert gone.ask(one, f"q{3 + at}") == 200
        for at in range(steps):
            assert client.ask(other, f"q{3 + at}") == 200
        assert client.ask(one, "q5") == client.ask(other, "q6") == 200
    replies = [1, 2, *range(3 + steps, 5 + 2 * steps)]
    questions = [1, 2, *range(3, 3 + steps), 5, 6]
    assert texts(path) == [[text for q, r in zip(questions, replies, strict=True) for text in (f"q{q}", f"r{r}")]]
