"""The `openai` client in one line: `client = wrap(client, process)`.

Chat completions go through the process: `create`, `parse` and `stream`, plain and async, streamed or not. All else of the
client is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from kilburn.adapters.client import add_usage, calls_through, given
from kilburn.adapters.history import KeptHistory, Recollections, system_of
from kilburn.kernel.memory_tools import OFFERED, OURS
from kilburn.kernel.process import Process
from kilburn.message import Message
from kilburn.models.assembly import Assembly
from kilburn.wire import chat
from kilburn.wire.form import parse
from kilburn.wire.plain import plain

__all__ = ["wrap"]

Client = TypeVar("Client")


def wrap(client: Client, process: Process, *, recollections: Recollections | None = None, tools: bool = True) -> Client:
    """A copy of an `OpenAI` or `AsyncOpenAI` client whose chat completions go through a process.

    Hand over the whole history in each call, as the API wants it.

    Args:
        recollections: long-term memory to put before the user's messages.
        tools: whether the model is offered `recall` and `search_memory`, which are answered here.
    """
    source: Any = client
    made = source.copy()
    history, completions = KeptHistory(process, recollections), made.chat.completions

    def call(arguments: dict[str, Any]) -> _Call:
        return _Call(arguments, history, tools)

    for name in ("create", "parse"):
        send = getattr(completions, name)
        setattr(completions, name, calls_through(call, send, is_async="Async" in type(made).__name__))

    def again(**options: Any) -> Any:
        return wrap(source.copy(**options), process, recollections=recollections, tools=tools)

    made.copy = made.with_options = again
    return made  # type: ignore[no-any-return]


class _Call:
    def __init__(self, arguments: dict[str, Any], history: KeptHistory, tools: bool) -> None:
        self.history, self.arguments = history, given(arguments)
        self._system, messages = system_of([plain(message, "messages") for message in self.arguments["messages"]])
        theirs = list(self.arguments.get("tools") or ())
        names = {tool.get("function", {}).get("name") for tool in theirs}
        if tools and not names & OURS and self.arguments.get("tool_choice") != "none":
            self.arguments["tools"] = [*theirs, *chat.tools(OFFERED)]
        prompt = history.prompt(messages, "chat", [*self._system, *self.arguments.get("tools", ())])
        self.arguments["messages"] = [*self._system, *prompt]
        self._spent: dict[str, int] = {}
        self._id, self._rounds = "", 0
        self._begin()

    def _begin(self) -> None:
        self._assembly = Assembly(str(self.arguments.get("model")))
        self._slots: dict[int, int | None] = {}
        self._held: list[Any] = []

    def again(self, last: bool) -> None:
        self.arguments["messages"] = [*self._system, *self.history.render("chat")]
        if last:
            self.arguments["tool_choice"] = "none"

    def said(self, response: Any) -> Message | None:
        return parse(response.choices[0].message)[0] if response.choices else None

    def told(self, response: Any) -> Any:
        add_usage(response.usage, self._spent)
        message = response.choices[0].message
        if message.tool_calls:
            theirs = [call for call in message.tool_calls if call.type != "function" or call.function.name not in OURS]
            message.tool_calls = theirs or None
        return response

    def feed(self, chunk: Any) -> Iterator[Any]:
        list(self._assembly.feed(chunk.model_dump(mode="json", exclude_unset=True)))
        self._id = chunk.id = self._id or chunk.id
        for choice in chunk.choices:
            if self._rounds:
                # The first round has said who speaks; the SDK's helper joins what is said twice.
                choice.delta.role = None
            pieces = [] if choice.index else list(choice.delta.tool_calls or ())
            if pieces and not (mine := self._theirs(pieces)):
                if not (choice.delta.content or choice.finish_reason):
                    return
                choice.delta.tool_calls = None
            elif pieces:
                choice.delta.tool_calls = mine
        if chunk.usage:
            add_usage(chunk.usage, self._spent)
        if self._held or not chunk.choices or chunk.choices[0].finish_reason:
            self._held.append(chunk)
        else:
            yield chunk

    def _theirs(self, pieces: list[Any]) -> list[Any]:
        """The pieces of calls that are not ours, numbered without ours."""
        kept = []
        for piece in pieces:
            if piece.index not in self._slots:
                name = piece.function.name if piece.function else None
                count = sum(place is not None for place in self._slots.values())
                self._slots[piece.index] = None if name in OURS else count
            place = self._slots[piece.index]
            if place is not None:
                piece.index = place
                kept.append(piece)
        return kept

    def reply(self) -> Message:
        return self._assembly.reply().message

    def rest(self, again: bool) -> Iterator[Any]:
        if not again:
            yield from self._held
        self._rounds += 1
        self._begin()
