"""The `anthropic` client in one line: `client = wrap(client, process)`.

`messages.create` and `messages.stream` go through the process, plain and async, streamed or not. All else of the client is as
it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from kilburn.adapters.client import add_usage, calls_through, given
from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.memory_tools import OFFERED, OURS
from kilburn.kernel.process import Process
from kilburn.message import Message
from kilburn.models.messages import Blocks
from kilburn.wire import messages as wire
from kilburn.wire.form import parse
from kilburn.wire.plain import plain

try:
    from anthropic import NOT_GIVEN
    from anthropic.lib.streaming import AsyncMessageStreamManager, MessageStreamManager
except ImportError as error:
    raise MissingExtra("anthropic", "anthropic") from error

__all__ = ["wrap"]

Client = TypeVar("Client")


def wrap(client: Client, process: Process, *, recollections: Recollections | None = None, tools: bool = True) -> Client:
    """A copy of an `Anthropic` or `AsyncAnthropic` client whose messages go through a process.

    Hand over the whole history in each call, as the API wants it.

    Args:
        recollections: long-term memory to put before the user's messages.
        tools: whether the model is offered `recall` and `search_memory`, which are answered here.
    """
    source: Any = client
    made = source.copy()
    history, messages, is_async = KeptHistory(process, recollections), made.messages, "Async" in type(made).__name__

    def call(arguments: dict[str, Any]) -> _Call:
        return _Call(arguments, history, tools)

    create = calls_through(call, messages.create, is_async=is_async)

    def stream(**arguments: Any) -> Any:
        output = arguments.pop("output_format", None)
        if output is not None:
            raise TypeError("output_format is not taken here; give output_config to create")
        if is_async:
            return AsyncMessageStreamManager(create(**arguments, stream=True), output_format=NOT_GIVEN)
        return MessageStreamManager(lambda: create(**arguments, stream=True), output_format=NOT_GIVEN)

    messages.create, messages.stream = create, stream

    def again(**options: Any) -> Any:
        return wrap(source.copy(**options), process, recollections=recollections, tools=tools)

    made.copy = made.with_options = again
    return made  # type: ignore[no-any-return]


class _Call:
    def __init__(self, arguments: dict[str, Any], history: KeptHistory, tools: bool) -> None:
        self.history, self.arguments = history, given(arguments)
        theirs = list(self.arguments.get("tools") or ())
        choice = self.arguments.get("tool_choice") or {}
        if tools and not {tool.get("name") for tool in theirs} & OURS and choice.get("type") != "none":
            self.arguments["tools"] = [*theirs, *wire.tools(OFFERED)]
        self._system = self.arguments.get("system")
        beside = [self._system, *self.arguments.get("tools", ())]
        prompt = history.prompt([plain(message, "messages") for message in arguments["messages"]], "messages", beside)
        self._put(prompt)
        self._spent: dict[str, int] = {}
        self._started = False
        self._forwarded = 0
        self._begin()

    def _put(self, prompt: Any) -> None:
        self.arguments["messages"] = list(prompt)
        if prompt.system:
            own = wire.as_blocks(self._system) if self._system else []
            self.arguments["system"] = [*own, *wire.as_blocks(prompt.system)]

    def _begin(self) -> None:
        self._blocks = Blocks(str(self.arguments.get("model")))
        self._slots: dict[int, int | None] = {}
        self._held: list[Any] = []

    def again(self, last: bool) -> None:
        self._put(self.history.render("messages"))
        if last:
            self.arguments["tool_choice"] = {"type": "none"}

    def said(self, response: Any) -> Message | None:
        return parse(response)[0] if response.content else None

    def told(self, response: Any) -> Any:
        add_usage(response.usage, self._spent)
        response.content = [block for block in response.content if block.type != "tool_use" or block.name not in OURS]
        return response

    def feed(self, event: Any) -> Iterator[Any]:
        list(self._blocks.feed(event.model_dump(mode="json", exclude_unset=True)))
        if event.type == "message_start":
            if not self._started:
                self._started = True
                yield event
        elif event.type in ("message_delta", "message_stop"):
            if event.type == "message_delta":
                add_usage(event.usage, self._spent)
            self._held.append(event)
        elif event.type.startswith("content_block_"):
            if event.type == "content_block_start":
                ours = event.content_block.type == "tool_use" and event.content_block.name in OURS
                self._slots[event.index] = None if ours else self._forwarded
                self._forwarded += not ours
            place = self._slots.get(event.index)
            if place is not None:
                event.index = place
                yield event
        else:
            yield event

    def reply(self) -> Message:
        return self._blocks.reply().message

    def rest(self, again: bool) -> Iterator[Any]:
        if not again:
            yield from self._held
        self._begin()
