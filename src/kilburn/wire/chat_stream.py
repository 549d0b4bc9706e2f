"""Assembles the chunks of a streamed chat completion into one reply.

The in-process model, HTTP endpoints and the gateway's upstream stream this form. Tool calls arrive in pieces, and not every
server numbers them. Reasoning arrives under two names.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from kilburn.errors import Unavailable, WireError
from kilburn.event import encodable
from kilburn.message import Kind
from kilburn.model import Delta, Finish, Reply, Tokens
from kilburn.wire import chat
from kilburn.wire.oddities import as_text, chat_message
from kilburn.wire.parts import call_slots
from kilburn.wire.plain import plain

FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CALLS: "tool_calls",
    Finish.REFUSED: "content_filter",
}
_FINISHES = {reason: finish for finish, reason in FINISH_REASONS.items()} | {"function_call": Finish.CALLS}
_MESSAGE_KEYS = ("role", "content", "refusal", *chat.THOUGHTS, "tool_calls")
"""Keys of a message that are read."""


class Halves:
    """Joins characters that a stream split in two. JSON can carry half of a character, a surrogate. A server that splits
    its reply anywhere sends the other half in the next piece. Neither half can be stored or encoded alone."""

    def __init__(self) -> None:
        self._held: dict[Any, str] = {}

    def join(self, place: Any, text: str) -> str:
        """Return the complete characters of a text after one more piece of it; a first half is kept until its second half
        comes."""
        text = self._held.pop(place, "") + text
        if "\ud800" <= text[-1:] <= "\udbff":
            self._held[place], text = text[-1], text[:-1]
        return encodable(text)

    def rest(self) -> Iterator[tuple[Any, str]]:
        """Yield each place with a first half that stayed alone, and its replacement."""
        halves, self._held = self._held, {}
        return ((place, encodable(half)) for place, half in halves.items())


_PIECES = ("text", "summary", "data")
"""Keys of an entry of reasoning, whose texts come in pieces."""


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Add pieces of fields: texts and lists are continued, and of anything else the newer one counts."""
    for key, value in more.items():
        old: Any = into.get(key)
        if isinstance(value, dict):
            into[key] = dict(old) if isinstance(old, dict) else {}
            _merge(into[key], value)
        elif isinstance(value, str) and isinstance(old, str):
            into[key] += value
        elif isinstance(value, list) and isinstance(old, list):
            into[key] = _continued(old, value)
        elif value is not None or key not in into:
            into[key] = value


def _continued(entries: list[Any], more: list[Any]) -> list[Any]:
    """Return a list with more entries. One with the type and the index of the entry before it is a piece of that: its texts are
    continued, because a signature that comes with the last piece is of the whole text."""
    out = [*entries]
    for entry in more:
        last = out[-1] if out else None
        if not isinstance(entry, dict) or not isinstance(last, dict) or "index" not in entry or not _is_piece(entry, last):
            out.append(entry)
            continue
        piece = {key: value for key, value in entry.items() if value is not None}
        joined = {key: last[key] + piece[key] for key in _PIECES if key in piece and isinstance(last.get(key), str)}
        out[-1] = {**last, **piece, **joined}
    return out


def _is_piece(entry: dict[str, Any], last: dict[str, Any]) -> bool:
    same = entry["index"] == last.get("index") and entry.get("type") == last.get("type")
    return same and all(isinstance(entry.get(key) or "", str) for key in _PIECES)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list; none where it is no list."""
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def _joined(content: Any) -> str:
    """Return a piece of a text; some servers send it as a list of blocks."""
    if isinstance(content, list):
        texts = (block.get("text") for block in _objects(content))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


class Assembly:
    """Takes chunks in order and ends with a reply.

    Args:
        name: the model's name, for errors.
        whole: whether a message without calls keeps fields that are not read here. One with calls always does, because its
            provider demands them back with the calls: signatures of thoughts, reasoning in a form of its own.
    """

    def __init__(self, name: str, *, whole: bool = False) -> None:
        self._name, self._namele = name, whole
        self._beside: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {"content": [], "refusal": [], "reasoning_content": [], "reasoning": []}
        self._thinking: dict[str, Any] | None = None
        self._calls: list[dict[str, Any]] = []
        self._slots: dict[int, int] = {}
        self._finish: str | None = None
        self._usage: Tokens | None = None
        self._halves = Halves()

    @property
    def said(self) -> bool:
        """Whether there was anything of a reply: a text, a call, or why it ended."""
        return self._finish is not None or bool(self._calls or self._beside or self._thinking) or any(self._texts.values())

    def feed(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        """Yield the pieces of text in a chunk."""
        if chunk.get("usage") is not None:
            self._usage = chat.read_usage(chunk["usage"])
        for choice in _objects(chunk.get("choices")):
            if choice.get("index"):
                continue
            finish = choice.get("finish_reason")
            self._finish = finish if isinstance(finish, str) and finish else self._finish
            delta = choice.get("delta") or choice.get("message")
            if not isinstance(delta, dict):
                delta = {}
            for key, texts in self._texts.items():
                text = _joined(delta.get(key))
                # Some servers send the same reasoning under both names.
                if text and not (key == "reasoning" and delta.get("reasoning_content")):
                    text = self._halves.join(key, text)
                    if text:
                        texts.append(text)
                        yield Delta(text, key in chat.THOUGHTS)
            for block in _objects(delta.get("content")):
                if block.get("type") == "thinking":
                    yield from self._feed_thinking(block)
            for piece in _objects(delta.get("tool_calls")):
                self._feed_call(piece)
            _merge(self._beside, {key: value for key, value in delta.items() if key not in _MESSAGE_KEYS})
            if self._finish is not None:
                for key, text in self._halves.rest():
                    self._texts[key].append(text)
                    yield Delta(text, key in chat.THOUGHTS)

    def feed_text(self, text: str) -> list[Delta]:
        """Return the same for a chunk with a piece of the answer's text, and nothing else."""
        text = self._halves.join("content", text)
        if not text:
            return []
        self._texts["content"].append(text)
        return [Delta(text, reasoning=False)]

    def _feed_thinking(self, block: dict[str, Any]) -> Iterator[Delta]:
        """Join the chunks of a reasoning block, which Mistral sends as a list of texts in the content."""
        chunks = list(_objects(block.get("thinking")))
        if self._thinking is None:
            self._thinking = {**block, "thinking": chunks}
        else:
            for chunk in chunks:
                last = self._thinking["thinking"][-1:]
                if last and {**last[0], "text": ""} == {**chunk, "text": ""} and isinstance(chunk.get("text"), str):
                    self._thinking["thinking"][-1] = {**chunk, "text": last[0]["text"] + chunk["text"]}
                else:
                    self._thinking["thinking"].append(chunk)
        yield from (Delta(text, reasoning=True) for text in [_joined(chunks)] if text)

    def _feed_call(self, piece: dict[str, Any]) -> None:
        index, call_id = piece.get("index"), piece.get("id")
        if isinstance(index, str) and index.isdigit():
            index = int(index)
        call_id = call_id if isinstance(call_id, str) else "" if call_id is None else str(call_id)
        body = "custom" if "custom" in piece else "function"
        fields = piece.get(body)
        fields = fields if isinstance(fields, dict) else {}
        at = self._slots.get(index) if isinstance(index, int) else self._last_if(call_id, fields.get("name"))
        if at is None or (call_id and self._calls[at]["id"] not in ("", call_id)):
            self._calls.append({"id": "", "type": body})
            at = len(self._calls) - 1
            if isinstance(index, int):
                self._slots[index] = at
        call = self._calls[at]
        call["id"] = call_id or call["id"]
        body, slot = call_slots(call)
        called = call.setdefault(body, {"name": "", slot: ""})
        for key, value in fields.items():
            if key in called:
                called[key] += as_text(value)
        _merge(call, {key: value for key, value in piece.items() if key not in ("index", "id", "type", "function", "custom")})

    def _last_if(self, call_id: str, name: Any) -> int | None:
        """Return the last call, if a piece without a number goes on with it; not if it begins another one."""
        if not self._calls:
            return None
        last = self._calls[-1]
        if call_id and last["id"]:
            return len(self._calls) - 1 if call_id == last["id"] else None
        called = last.get(last["type"]) or {}
        return None if name and called.get("name") else len(self._calls) - 1

    def reply(self, *, ended: bool = False) -> Reply:
        """Return the whole reply.

        Args:
            ended: whether it is known to be over, although nothing says why.

        Raises:
            Unavailable: the stream ended before the reply did, or it is no message.
        """
        if self._finish is None and not ended:
            raise Unavailable(f"{self._name}: the stream ended before the reply did", advice="try again")
        source: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts["content"])}
        for key in ("reasoning_content", "reasoning", "refusal"):
            if self._texts[key]:
                source[key] = "".join(self._texts[key])
        for call in self._calls:
            call[call["type"]] = {key: encodable(text) for key, text in call[call["type"]].items()}
            # A result refers to its call by id. If the server gives none, a new unique one is made.
            call["id"] = call["id"] or f"call_{uuid.uuid4().hex[:24]}"
        if self._thinking is not None:
            text = source["content"]
            source["content"] = [self._thinking, *([{"type": "text", "text": text}] if text else [])]
        if self._calls:
            source["tool_calls"] = self._calls
        if self._calls or self._namele:
            source |= {key: value for key, value in self._beside.items() if value not in (None, "", [], {})}
        if isinstance(source.get("audio"), dict):
            source["audio"] = {"id": source["audio"].get("id")}  # which is all that is sent back
        try:
            message = chat.read(chat_message(plain(source, "reply")), "reply")
        except WireError as error:
            raise Unavailable(f"{self._name} sent what is no message: {error.what}", advice="try again") from error
        finish = _FINISHES.get(self._finish or "", Finish.STOP)
        if finish == Finish.STOP and any(part.kind is Kind.CALL for part in message.parts):
            finish = Finish.CALLS
        if finish == Finish.STOP and self._texts["refusal"]:
            finish = Finish.REFUSED
        return Reply(message=message, finish=finish, usage=self._usage)
