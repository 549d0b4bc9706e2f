"""A model that repeats the last user message: useful offline, to see what a window ships.

The reply is a prefix of that message, bounded by the request's `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kilburn.errors import Refused
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request, Tokens

_LETTERS = 4
"""Letters that one token stands for, as in the counter "chars/4"."""


class Echo:
    """Echoes the text of the last user message, word by word.

    Args:
        name: its name.
        form: the wire form that it asks for, "chat" or "messages".
        context: its pretended window in tokens, or None.
    """

    def __init__(self, *, name: str = "echo", form: str = "chat", context: int | None = None) -> None:
        self.name = name
        self.form = form
        self.context = context
        self.tokenizer: Any = "chars/4"

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the last user message, cut after `max_tokens` times four letters.

        Raises:
            Refused: a request without messages.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        question = next((_text(message) for message in reversed(request.messages) if message.get("role") == "user"), "")
        text = question[: request.max_tokens * _LETTERS]
        start = 0
        while start < len(text):
            end = text.find(" ", start) + 1 or len(text)
            yield Delta(text[start:end])
            start = end
        heard = sum(len(_text(message)) for message in request.messages)
        yield Reply(
            message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)),
            finish=Finish.STOP if text == question else Finish.LENGTH,
            usage=Tokens(prompt=-(-heard // _LETTERS), reply=-(-len(text) // _LETTERS)),
        )


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "\n".join(str(block["text"]) for block in blocks if isinstance(block, dict) and "text" in block)
