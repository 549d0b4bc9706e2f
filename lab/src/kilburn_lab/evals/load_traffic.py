"""What the sessions of a load say, and what is right to answer: both ends work it out from the words alone.

A question, a tool's output and a reply carry the number of their session and of their exchange. A reply is a function of the
question and the output that it follows, to the letter. So a client sees by itself whether the answer is its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kilburn.errors import MissingExtra
from kilburn.message import Message
from kilburn.testing.upstream import Sent, Upstream, calling

FORMS = ("chat", "messages", "responses", "chain")
"""The wire forms; a chain is of responses that name the one before, in place of the history."""

TOOL = "look"
MARK = re.compile(r"\[(ask|out|re) (\d+)\.(\d+)\]")
"""What a text is, its session and its exchange."""

LENGTHS = ((2, 30), (5, 30), (9, 20), (16, 15), (40, 5))
"""Exchanges of a session, and how many of a hundred sessions have so many: nine, on the average."""

PIECE, PAUSE = 24, 0.002
"""Characters of an event of a stream, and seconds between two."""

WORDS = (
    *("agent", "bind", "call", "error", "fetch", "file", "gap", "line", "merge", "of", "page", "naïve", "größer", "東京"),
    *("parse", "prompt", "read", "store", "test", "the", "token", "trace", "value", "window", "\n", '"quoted"', "a\\b", "🙂"),
)


class ScriptedExchange(NamedTuple):
    """One of a session's: a question, perhaps a tool's output, and the replies.

    Args:
        question: what the client says. output: of the tool, if the model calls it.
        call: what the model calls the tool with; None if it does not. call_id: of that call.
        reply: what the model says in the end.
        stream: whether the client asks for a stream.
        leaves: characters of the reply after which the client hangs up, once; 0 if it hears all of it.
        returns: whether it then asks again.
    """

    question: str
    output: str
    call: dict[str, str] | None
    call_id: str
    reply: str
    stream: bool
    leaves: int
    returns: bool


class Script(NamedTuple):
    """All that a session says. `named`: whether its client gives it a name."""

    number: int
    form: str
    named: bool
    exchanges: tuple[ScriptedExchange, ...]


def scripts(sessions: int, seed: int, *, leaving: bool = True) -> Iterator[Script]:
    """The sessions of a load; the same for a seed.

    Args:
        leaving: whether some clients hang up in the middle of a stream.
    """
    for number in range(1, sessions + 1):
        chance = random.Random(f"{seed}/{number}")
        (length,) = chance.choices([each for each, _ in LENGTHS], [share for _, share in LENGTHS])
        form, named = FORMS[number % len(FORMS)], chance.random() < 0.5
        yield Script(number, form, named, tuple(_exchange(chance, seed, number, at, leaving) for at in range(1, length + 1)))


def _exchange(chance: random.Random, seed: int, number: int, at: int, leaving: bool) -> ScriptedExchange:
    question = f"[ask {number}.{at}] {_words(chance, chance.randrange(8, 60))} {seed}"
    called = call_for(question)
    output = f"[out {number}.{at}] {_words(chance, chance.randrange(8, 120))}" if called else ""
    reply, stream = reply_to(question, output), chance.random() < 0.6
    leaves = chance.randrange(1, len(reply)) if leaving and stream and not called and chance.random() < 0.06 else 0
    call, call_id = called or (None, "")
    return ScriptedExchange(question, output, call, call_id, reply, stream, leaves, chance.random() < 0.7)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count)).strip()


def _chance_of(*texts: str) -> random.Random:
    return random.Random(hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest())


def call_for(question: str) -> tuple[dict[str, str], str] | None:
    """The arguments of the call that a question leads to, and its id; None if the model just answers."""
    _, number, at = _mark_of(question)
    if _chance_of(question, "call").random() >= 0.25:
        return None
    return {"at": f"{number}.{at}", "why": "größer 🙂"}, f"call_{number}_{at}"


def reply_to(question: str, output: str = "") -> str:
    """What is right to answer."""
    _, number, at = _mark_of(question)
    chance = _chance_of(question, output)
    return f"[re {number}.{at}] {_words(chance, chance.randrange(6, 90))}"


def recalls(question: str) -> bool:
    """Whether the model reads the session's first page before it answers, if it is offered to."""
    return _chance_of(question, "recall").random() < 0.4


def mark_of(text: str) -> tuple[str, int, int] | None:
    """What a text is, its session and its exchange; None if it is none of a load's."""
    found = MARK.match(text)
    return (found[1], int(found[2]), int(found[3])) if found else None


def _mark_of(text: str) -> tuple[str, int, int]:
    found = mark_of(text)
    if found is None:
        raise ValueError(f"no text of a load: {text[:40]!r}")
    return found


def answer(sent: Sent) -> Message:
    """What the stub replies: to the newest question that it was sent, whatever else stands in the prompt.

    Words of another session in the prompt are told in the reply, which is then not what its client expects.
    """
    key = "input" if sent.api == "responses" else "messages"
    texts = [*_texts(sent.body.get(key))]
    said = [text for text in texts if mark_of(text)]
    asked = [text for text in said if text.startswith("[ask ")]
    outputs = [text for text in said if text.startswith("[out ")]
    # A chain sends an output alone: the question that it belongs to is in a response before, which the stub remembers.
    newest = max(asked + outputs, key=lambda text: _mark_of(text)[2], default="")
    if not newest:
        return calling(text="there was no question")
    _, number, at = _mark_of(newest)
    question = next((text for text in asked if _mark_of(text)[1:] == (number, at)), None) or _asked.get((number, at), "")
    output = next((text for text in outputs if _mark_of(text)[1:] == (number, at)), "")
    if not question:
        return calling(text=f"the question {number}.{at} was not in the prompt")
    _asked[number, at] = question
    others = {int(each[1]) for text in texts for each in MARK.findall(text)} - {number}
    if others:
        return calling(text=f"{reply_to(question, output)} beside words of sessions {sorted(others)}")
    if not output and recalls(question) and _offered(sent, "recall") and (number, at) not in _recalled:
        _recalled.add((number, at))
        return calling(("recall", {"address": "p1"}, f"read_{number}_{at}"))
    called = call_for(question)
    if called and not output and called[1] in texts:
        return calling(text=f"the output {number}.{at} was not in the prompt as it was sent")
    if called and not output:
        return calling((TOOL, *called))
    return calling(text=reply_to(question, output))


_asked: dict[tuple[int, int], str] = {}
"""Questions that the stub was sent, by session and exchange."""

_recalled: set[tuple[int, int]] = set()
"""Those before which it has read the first page."""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _offered(sent: Sent, name: str) -> bool:
    return any((tool.get("function") or tool).get("name") == name for tool in sent.body.get("tools") or ())


async def answer_all(announce: Callable[[int], None]) -> None:
    """Serve as the stub until cancelled; `announce` gets the port.

    Raises:
        MissingExtra: no uvicorn.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise MissingExtra("uvicorn", "serve") from None
    import socket

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    upstream = Upstream(otherwise=answer, measured=False, piece=PIECE, pause=PAUSE)
    config = uvicorn.Config(upstream, log_level="warning", access_log=False, timeout_keep_alive=600)
    announce(listener.getsockname()[1])
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    asyncio.run(answer_all(lambda port: print(port, file=sys.stdout, flush=True)))
