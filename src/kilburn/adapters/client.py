"""A provider's SDK client whose every call goes through a process: what the wraps of `openai` and `anthropic` share.

The client's own code stays as it is: it hands over its whole history and gets a reply. In between, what is new is appended, the
window is sent, and the model's calls of `recall` and `search_memory` are answered, in rounds that the client does not see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

from kilburn.adapters.history import KeptHistory
from kilburn.kernel.memory_tools import OURS
from kilburn.message import Kind, Message

__all__ = ["ROUNDS", "Call", "calls_through"]

ROUNDS = 5
"""Times that a model may use its memory before it has to reply."""


class Call(Protocol):
    """One call of a client, with all its rounds; it knows what is particular to the provider.

    `arguments` are what is sent: the process's window instead of the client's messages, and our tools beside the client's.
    """

    history: KeptHistory
    arguments: dict[str, Any]

    def again(self, last: bool) -> None:
        """Make `arguments` those of the next round; in the `last` one no tool may be called."""

    def said(self, response: Any) -> Message | None:
        """What a whole response says; None if it says nothing."""

    def told(self, response: Any) -> Any:
        """The response for the client: without calls of ours, and with the usage of all rounds."""

    def feed(self, chunk: Any) -> Iterator[Any]:
        """What of a stream's chunk is for the client now."""

    def reply(self) -> Message:
        """What the stream said that has ended.

        Raises:
            Unavailable: the stream ended before the reply did.
        """

    def rest(self, again: bool) -> Iterator[Any]:
        """The chunks that were held back until the reply's end. `again`: another round follows."""


def _goes_on(call: Call, reply: Message, left: int) -> bool:
    """Append a reply and what our tools answer; whether another round follows. Then `arguments` are its."""
    if not any(part.kind is Kind.CALL and part.name in OURS for part in reply.parts):
        call.history.append([reply])
        return False
    if call.history.answered(reply) is not None or not left:
        return False
    call.again(left == 1)
    return True


def _told(call: Call, response: Any, left: int) -> Any:
    """What the client gets; None if another round follows."""
    reply = call.said(response)
    if reply is None:
        return response
    again = _goes_on(call, reply, left)
    told = call.told(response)
    return None if again else told


def calls_through(make: Callable[[dict[str, Any]], Call], send: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """An SDK's method `send` that goes through the process."""

    def create(**given: Any) -> Any:
        call = make(given)
        if call.arguments.get("stream"):
            return Chunks(call, send, send(**call.arguments))
        for left in range(ROUNDS, -1, -1):
            told = _told(call, send(**call.arguments), left)
            if told is not None:
                return told
        raise AssertionError("the last round has a reply")

    async def acreate(**given: Any) -> Any:
        call = await asyncio.to_thread(make, given)
        if call.arguments.get("stream"):
            return AsyncChunks(call, send, await send(**call.arguments))
        for left in range(ROUNDS, -1, -1):
            told = await asyncio.to_thread(_told, call, await send(**call.arguments), left)
            if told is not None:
                return told
        raise AssertionError("the last round has a reply")

    def started(**given: Any) -> Awaitable[Any]:
        return acreate(**given)

    return started if is_async else create


class Chunks:
    """A stream of the client, in the SDK's own chunks. If it is closed early, nothing of the reply is appended."""

    def __init__(self, call: Call, send: Callable[..., Any], stream: Any) -> None:
        self._call, self._send, self._stream = call, send, stream
        self._chunks = self._run()

    def _run(self) -> Iterator[Any]:
        for left in range(ROUNDS, -1, -1):
            for chunk in self._stream:
                yield from self._call.feed(chunk)
            again = _goes_on(self._call, self._call.reply(), left)
            yield from self._call.rest(again)
            if not again:
                return
            self._stream = self._send(**self._call.arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        return self._chunks

    def __next__(self) -> Any:
        return next(self._chunks)

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


class AsyncChunks:
    """`Chunks` for async clients."""

    def __init__(self, call: Call, send: Callable[..., Any], stream: Any) -> None:
        self._call, self._send, self._stream = call, send, stream
        self._chunks = self._run()

    async def _run(self) -> AsyncIterator[Any]:
        for left in range(ROUNDS, -1, -1):
            async for chunk in self._stream:
                for told in self._call.feed(chunk):
                    yield told
            again = await asyncio.to_thread(_goes_on, self._call, self._call.reply(), left)
            for told in self._call.rest(again):
                yield told
            if not again:
                return
            self._stream = await self._send(**self._call.arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._chunks

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    async def __aenter__(self) -> AsyncChunks:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._stream.close()


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given: without the SDKs' marks for one that was not."""
    return {key: value for key, value in arguments.items() if type(value).__name__ not in ("NotGiven", "Omit")}


def add_usage(usage: Any, spent: dict[str, int]) -> None:
    """Add the tokens of earlier rounds to a round's usage, and all of it to `spent`."""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"):
        value = getattr(usage, name, None)
        if isinstance(value, int):
            spent[name] = spent.get(name, 0) + value
            setattr(usage, name, spent[name])
