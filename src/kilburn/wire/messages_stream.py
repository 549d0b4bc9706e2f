"""Assembles the events of a streamed message of Anthropic's form into one reply.

Arguments of tool calls stay the exact text that the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilburn.errors import Unavailable, WireError
from kilburn.event import encodable
from kilburn.message import Kind, Message
from kilburn.model import Delta, Finish, Reply, Tokens, is_count
from kilburn.wire import messages as wire
from kilburn.wire.chat_stream import Halves
from kilburn.wire.compaction import read_block, read_report, report_json
from kilburn.wire.oddities import as_text, messages_message
from kilburn.wire.plain import counted, load_object, plain

STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.LENGTH: "max_tokens",
    Finish.CALLS: "tool_use",
    Finish.REFUSED: "refusal",
}
_FINISHES = {reason: finish for finish, reason in STOP_REASONS.items()} | {
    "stop_sequence": Finish.STOP,
    "pause_turn": Finish.STOP,
    "compaction": Finish.STOP,
    "model_context_window_exceeded": Finish.LENGTH,
}
_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class ReplyBlocks:
    """Takes a stream's events in order and ends with a reply. `name` is the model's name, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blocks: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, str] = {}
        self._halves = Halves()
        self._usage: dict[str, Any] = {}
        self._said: dict[str, Any] = {}
        """What the reply says about the provider's own work on the prompt."""
        self._stop: str | None = None

    @property
    def said(self) -> bool:
        """Whether there was anything of a reply: a block, or why it ended."""
        return self._stop is not None or any(block.get("text") or block["type"] != "text" for block in self._blocks.values())

    def feed(self, event: dict[str, Any]) -> Iterator[Delta]:
        """Yield the pieces of text in an event."""
        kind = event.get("type")
        if kind == "message_start":
            message = _object(event.get("message"))
            self._count(message.get("usage"), message.get("context_management"))
        elif kind == "message_delta":
            stop = _object(event.get("delta")).get("stop_reason")
            self._stop = stop if isinstance(stop, str) and stop else self._stop
            self._count(event.get("usage"), event.get("context_management"))
        elif kind == "content_block_start":
            index = self._place(event, len(self._blocks))
            block = self._blocks[index] = {"type": "text", **_object(event.get("content_block"))}
            if block["type"] in ("text", "thinking"):
                text = block.get(block["type"])
                block[block["type"]] = ""
                yield from self._say(index, block["type"], text)
        elif kind == "content_block_delta":
            yield from self._extend(self._place(event, max(0, len(self._blocks) - 1)), _object(event.get("delta")))
        if self._stop is not None:
            for (index, key), text in self._halves.rest():
                yield from self._say(index, key, text)

    def _place(self, event: dict[str, Any], usual: int) -> int:
        """Return the number of the block that an event is about; some servers leave it out."""
        index = event.get("index")
        return index if isinstance(index, int) else usual

    def _extend(self, index: int, delta: dict[str, Any]) -> Iterator[Delta]:
        kind = delta.get("type")
        if index not in self._blocks and kind in ("text_delta", "thinking_delta"):
            self._blocks[index] = {"type": _PIECES[kind], _PIECES[kind]: ""}
        block = self._blocks[index]
        if kind == "input_json_delta":
            self._arguments[index] = self._arguments.get(index, "") + as_text(delta.get("partial_json"))
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta.get("citation")]
        elif kind == "compaction_delta":
            # It comes whole, in one piece.
            block.update({key: value for key, value in delta.items() if key != "type"})
        elif kind in _PIECES:
            key = _PIECES[kind]
            yield from self._say(index, key, delta.get(key))

    def _say(self, index: int, key: str, text: Any) -> Iterator[Delta]:
        block = self._blocks[index]
        text = self._halves.join((index, key), text if isinstance(text, str) else "")
        block[key] = (block.get(key) or "") + text
        if key != "signature" and text:
            yield Delta(text, key == "thinking")

    def _count(self, usage: Any, management: Any) -> None:
        if usage is not None and not isinstance(usage, dict):
            self._usage["input_tokens"], usage = None, None
        # A null is ignored: the end of a stream repeats fields of its start without their values.
        self._usage.update({key: value for key, value in counted(usage).items() if value is not None})
        if usage and usage.get("iterations"):
            self._said["usage"] = {"iterations": usage["iterations"]}
        if management:
            self._said["context_management"] = management

    def reply(self, *, ended: bool = False) -> Reply:
        """Return the whole reply.

        Args:
            ended: whether it is known to be over, although nothing says why.

        Raises:
            Unavailable: the stream ended before the reply did, or it is no message.
        """
        if self._stop is None and not ended:
            raise Unavailable(f"{self._name}: the stream ended before the reply did", advice="try again")
        arguments: list[str] = []
        for index, block in self._blocks.items():
            if block["type"] == "tool_use":
                value = block.get("input")
                whole = value if isinstance(value, str) and value else json.dumps(value or {})
                arguments.append(encodable(self._arguments.get(index) or whole))
                block["input"] = {}
            elif index in self._arguments:
                text = encodable(self._arguments[index]).strip()
                block["input"] = load_object(text) or {"_raw": text} if text else {}
            elif block["type"] == "compaction":
                # An empty summary would be refused when it is sent back.
                block["content"] = block.get("content") or None
        try:
            report = {**self._said, "stop_reason": self._stop}
            for block in self._blocks.values():
                if block["type"] == "compaction":
                    read_block(plain(block, "compaction"))
            usage = self._tokens(report)
            source = {"role": "assistant", "content": list(self._blocks.values()), **report_json(report)}
            message = _with_arguments(wire.read(messages_message(plain(source, "reply")), "reply")[0], arguments)
        except WireError as error:
            raise Unavailable(f"{self._name} sent what is no message: {error.what}", advice="try again") from error
        calling = Finish.CALLS if any(part.kind is Kind.CALL for part in message.parts) else Finish.STOP
        return Reply(message=message, finish=_FINISHES.get(self._stop or "", calling), usage=usage)

    def _tokens(self, report: dict[str, Any]) -> Tokens | None:
        """Return what the reply cost; None if the usage leaves out the prompt or the reply, or is impossible. An unreadable
        report of the provider's own work is removed from it."""
        fresh, reply = self._usage.get("input_tokens"), self._usage.get("output_tokens")
        cached, created = self._usage.get("cache_read_input_tokens", 0), self._usage.get("cache_creation_input_tokens", 0)
        try:
            beside = read_report({"usage": report.get("usage")}).beside
        except WireError:
            del report["usage"]
            return None
        if not (is_count(fresh) and is_count(reply) and is_count(cached) and is_count(created)):
            return None
        tokens = Tokens(prompt=fresh + cached + created, reply=reply, cached=cached, written=created, beside=beside)
        return tokens if tokens.sound else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _with_arguments(message: Message, arguments: Sequence[str]) -> Message:
    """Return the message with each call's arguments as they were streamed; the wire form holds them decoded."""
    remaining = iter(arguments)
    parts = tuple(
        msgspec.structs.replace(part, text=next(remaining)) if part.kind is Kind.CALL else part for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)
