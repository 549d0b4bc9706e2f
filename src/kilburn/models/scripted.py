"""A model with prepared replies: the public fake for tests, examples and dry runs.

Replies are taken from a queue, in order, whatever is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kilburn.errors import Refused, Unavailable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request

ScriptEntry = str | Reply | Message | Exception | Callable[[Request], Any]
"""One entry of a script: a text, a message, a whole reply, an error to raise, or a function of the
request that gives one of these."""


class Scripted:
    """Replies from a script.

    Args:
        replies: what it will say, one entry a call; more with `enqueue`.
        name: its name.
        form: the wire form that it asks for, "chat" or "messages".
        context: its pretended window in tokens, or None.
        tokenizer: a counter's name, or a counter.
        piece: characters of a streamed piece; None streams each part whole.

    `requests` holds every request it saw, oldest first.
    """

    def __init__(
        self,
        replies: Iterable[ScriptEntry] = (),
        *,
        name: str = "scripted",
        form: str = "chat",
        context: int | None = None,
        tokenizer: Any = "chars/4",
        piece: int | None = None,
    ) -> None:
        if piece is not None and piece < 1:
            raise ValueError(f"piece={piece} holds no letter; give 1 or more")
        self.name = name
        self.form = form
        self.context = context
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self._piece = piece
        self._script: deque[ScriptEntry] = deque([replies] if isinstance(replies, str) else replies)

    def enqueue(self, *replies: ScriptEntry) -> None:
        """Append to the script."""
        self._script.extend(replies)

    @property
    def left(self) -> int:
        """Entries of the script that were not used yet."""
        return len(self._script)

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the next entry of the script, in pieces.

        Raises:
            Refused: a request without messages; the script stays where it was.
            Unavailable: the script has run out.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        self.requests.append(request)
        try:
            answer = self._script.popleft()
        except IndexError:
            raise Unavailable(
                f"the script of {self.name} has run out after {len(self.requests) - 1} replies", advice="enqueue more replies"
            ) from None
        reply = _reply(answer, request)
        for part in reply.message.parts:
            if part.kind in (Kind.TEXT, Kind.REASONING):
                for text in self._pieces(part.text):
                    yield Delta(text, part.kind is Kind.REASONING)
        yield reply

    def _pieces(self, text: str) -> Iterator[str]:
        size = self._piece or max(len(text), 1)
        for start in range(0, len(text), size):
            yield text[start : start + size]


def _reply(answer: Any, request: Request) -> Reply:
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, Reply):
        return answer
    if isinstance(answer, Message):
        calls = any(part.kind is Kind.CALL for part in answer.parts)
        return Reply(message=answer, finish=Finish.CALLS if calls else Finish.STOP)
    if isinstance(answer, str):
        return Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=answer),)))
    if callable(answer):
        return _reply(answer(request), request)
    raise TypeError(f"a script holds texts, messages, replies, errors and functions of a request, not {type(answer).__name__}")
