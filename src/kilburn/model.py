"""What a language model is to Kilburn: one verb, `stream`.

A request holds messages in the wire form that the model asks for; a stream yields pieces of text as
they come and ends with the whole `Reply`. Models are synchronous generators; async callers drive
them in a thread (`kilburn.kernel.drive`), so no model is written twice. Closing the generator early
closes the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec

from kilburn.message import Message, Part

__all__ = ["Delta", "Finish", "Model", "Reply", "Request", "Tokens", "ToolSpec", "complete"]

MAX_TOKENS = 2**40
"""Bound on the tokens in a report."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a number of tokens: whole, 0 or more, and no more than any prompt ever had."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a model sees it: name, one-paragraph description, JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


def object_schema(fields: Mapping[str, Any], *, optional: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of an object with these fields, by name, and no others; each must be there unless it is `optional`."""
    required = [name for name in fields if name not in optional]
    schema = {"type": "object", "properties": dict(fields)} | ({"required": required} if required else {})
    return schema | {"additionalProperties": False}


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply cost according to the provider, in tokens. `cached` and `written` are the parts of `prompt` that were
    read from, or written to, its prompt cache. `beside` is the provider's own work, such as a compaction before the
    reply. It is billed too, is in no other figure, and says nothing about this prompt's size."""

    prompt: int = 0
    reply: int = 0
    cached: int = 0
    written: int = 0
    beside: Tokens | None = None

    @property
    def sound(self) -> bool:
        """Whether the figures are possible: each is a number of tokens, and the cached and written ones are parts of the
        prompt. A provider may report anything; a report that is not sound is ignored."""
        figures = (self.prompt, self.reply, self.cached, self.written)
        if not all(map(is_count, figures)) or self.cached + self.written > self.prompt:
            return False
        return self.beside is None or (isinstance(self.beside, Tokens) and self.beside.sound)

    @property
    def total(self) -> int:
        """Tokens of prompt and reply, and of the provider's own work."""
        return self.prompt + self.reply + (self.beside.total if self.beside is not None else 0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a model.

    Args:
        messages: in the model's own `form`, as `Session.render` gives them.
        system: for the "messages" form, where the system prompt is not a message; None elsewhere.
        tools: the tools it may call.
        max_tokens: cap of the reply.
        temperature: 0 for greedy decoding.
        schema: JSON schema that the reply must follow, if the model can be made to.
        timeout: seconds for the whole reply, or None.
        seed: for sampling, or None.
        options: passed through to the provider untouched.
    """

    messages: Sequence[dict[str, Any]]
    system: Any = None
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int = 1024
    temperature: float | None = None
    schema: dict[str, Any] | None = None
    timeout: float | None = None
    seed: int | None = None
    options: dict[str, Any] = {}


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    """It was cut at its cap."""
    CALLS = "calls"
    """It wants tools run."""
    REFUSED = "refused"


class Delta(msgspec.Struct, frozen=True):
    """A piece of the reply's text as it came; `reasoning` marks a piece of its thinking."""

    text: str
    reasoning: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply.

    Args:
        message: an ASSISTANT message whose parts are texts, calls and reasoning, in order.
        finish: why it ended.
        usage: what the provider counted, or None if it reported nothing, or something impossible.
    """

    message: Message
    finish: Finish = Finish.STOP
    usage: Tokens | None = None

    @property
    def text(self) -> str:
        """The reply's text parts, joined."""
        return "".join(part.text for part in self.message.parts if part.kind == "text")

    @property
    def calls(self) -> tuple[Part, ...]:
        """The tool calls, in order."""
        return tuple(part for part in self.message.parts if part.kind == "call")


@runtime_checkable
class Model(Protocol):
    """A language model. `form` is "chat" or "messages". `context` is its whole window in tokens, or None if unknown.
    `tokenizer` is a name for `kilburn.tokens`, or a counter.

    `kilburn.testing.check_model` holds an implementation to this contract.
    """

    name: str
    form: str
    context: int | None
    tokenizer: Any

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Deltas as they come, then exactly one `Reply`, last.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
        """
        ...


def takes_tools(model: Model) -> bool:
    """Whether a model may be offered tools: unless it says no in its attribute `takes_tools`, as one does whose chat template
    has no place for them, or whose server has refused them."""
    return bool(getattr(model, "takes_tools", True))


def build_request(model: Model, prompt: str, system: str | None = None, **settings: Any) -> Request:
    """Return the request for one prompt. The system prompt is where the model's form has it: beside the messages, or first among
    them.

    Args:
        settings: of the request, as `Request` takes them.
    """
    user, beside = {"role": "user", "content": prompt}, model.form == "messages"
    lead = [{"role": "system", "content": system}] if system and not beside else []
    return Request(messages=[*lead, user], system=system if system and beside else None, **settings)


watch: Callable[[Model, Request], Iterator[Delta | Reply]] | None = None
"""Who sees each question and its reply, and gives the pieces on; see `kilburn.tracing`. It is set once, or never."""


def stream_pieces(model: Model, request: Request) -> Iterator[Delta | Reply]:
    """Yield the pieces of a reply. Every request to a model in this program goes through this function."""
    return model.stream(request) if watch is None else watch(model, request)


def complete(model: Model, request: Request) -> Reply:
    """The whole reply of a model, without the pieces."""
    for piece in stream_pieces(model, request):
        if isinstance(piece, Reply):
            return piece
    raise AssertionError(f"model {model.name} ended its stream without a reply")
