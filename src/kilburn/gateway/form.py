"""The gateway's interface to a provider's form: parsing requests, rewriting them, and reading replies.

A request's known fields are read, and all others stay byte for byte as the client wrote them. The system prompt and the tools are
counted, and never changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import msgspec

from kilburn.errors import InvalidMessage, Unavailable, WireError
from kilburn.gateway.events import MARK, ServerEvent, written
from kilburn.memory.memory_tools import OURS
from kilburn.message import Kind, Message, Part
from kilburn.model import MAX_TOKENS, Delta, Reply, Request, Tokens, ToolSpec
from kilburn.wire.digests import HIDDEN
from kilburn.wire.oddities import numbered
from kilburn.wire.plain import NOT_JSON, plain, whole_number

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_object = msgspec.json.Decoder(dict[str, Any]).decode


SHORT = 1 << 12
"""Maximum size of a body that is searched for a history, in bytes."""

MAX_PARTS = 100
"""Maximum number of parts of a message; with more, neighbouring texts with the same other fields are joined."""

ROUNDS_FIELD = "kilburn_rounds"
"""A field of the client's usage: the usage of each round, if there were hidden rounds."""

UNREADABLE = (
    msgspec.DecodeError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    RecursionError,
    Unavailable,
    WireError,
)
"""Exceptions of parsing a reply that does not follow its provider's form."""


class ParsedRequest(msgspec.Struct, kw_only=True):
    """A client's request, parsed as far as needed.

    Args:
        raw: the client's bytes.
        fields: its fields, each as its JSON.
        history: the field with the conversation; a list without its closing bracket.
        previous: id of the reply that it continues, whose history only the provider has; "" where the history is whole.
        calls: ids of that reply's calls, if the session has others for them.
        lead: messages before the conversation that are never changed: the system prompt of the chat form.
        messages: the conversation, each message as its JSON; it and `lead` are empty until `Form.split`.
        model: the model that it names.
        stream: whether the client wants a streamed reply.
        reply: maximum tokens of the reply; 0 if the request sets none.
        choices: number of replies.
        faults: whether our tools may be offered: there is one reply, and no tool of the client has one of our names.
        tools: whether the client has tools of its own.
        parsed: messages of the conversation that were read already, by their JSON.
        open: whether our tools can be added to them: the field is a list, and there are no older `functions`.
    """

    raw: bytes
    fields: dict[str, msgspec.Raw]
    history: bytes
    previous: str = ""
    calls: tuple[str, ...] = ()
    lead: list[bytes] = []
    messages: list[bytes] = []
    parsed: dict[bytes, list[Message]] = {}
    model: str
    stream: bool
    reply: int
    choices: int
    faults: bool
    tools: bool
    open: bool = True

    @property
    def system(self) -> list[bytes]:
        """The system prompt as JSON: messages of the chat form, and fields of the others."""
        return [*self.lead, *(bytes(self.fields[key]) for key in ("system", "instructions") if key in self.fields)]

    @property
    def beside(self) -> list[bytes]:
        """The fields beside the conversation that take room in the window, as JSON."""
        return [*self.system, *([bytes(self.fields["tools"])] if "tools" in self.fields else ())]


class Form(ABC):
    """A provider's form.

    Args:
        name: of the form.
        path: below `/v1`.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    key: ClassVar[str] = "messages"
    """The field with the conversation."""
    rendered: ClassVar[str]
    """The form in which a session renders its prompt for this form."""
    caps: ClassVar[tuple[str, ...]]
    """Fields that limit the reply."""
    reader: ClassVar[type[Reading]]
    """Reads replies of this form."""

    def open(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> ParsedRequest:
        """Parse a request's fields.

        Args:
            parsed: its fields, as `parse_fields` returns them.

        Raises:
            InvalidMessage: it is not JSON, or not a request of this form.
        """
        fields = decoded(_fields, raw, "the body is no JSON object") if parsed is None else {**parsed}
        if self.key not in fields:
            raise InvalidMessage(f"{self.key} is missing", advice="send at least one message")
        choices = max(1, _count(fields, "n"))
        model, tools = _value(fields, "model"), _value(fields, "tools")
        return ParsedRequest(
            raw=raw,
            fields=fields,
            history=_begun(fields[self.key]),
            previous=self.after(raw, fields),
            model=model if isinstance(model, str) else "",
            stream=bool(_value(fields, "stream")),
            reply=max((_count(fields, key) for key in self.caps), default=0),
            choices=choices,
            faults=choices == 1 and OURS.isdisjoint(_names(tools)),
            tools=bool(tools),
            open=(tools is None or isinstance(tools, list)) and not _value(fields, "functions"),
        )

    def unread(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> bool:
        """Return whether a request has no history here, and is passed through as it is.

        Args:
            parsed: its fields, as `parse_fields` returns them.
        """
        return False

    def empty(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> bool:
        """Return whether a request has no conversation: its provider may have a stored prompt for it, or refuses it.

        Args:
            parsed: its fields, as `parse_fields` returns them.
        """
        if len(raw) > SHORT and f'"{self.key}"'.encode() in raw:
            return False
        fields = parse_fields(raw) if parsed is None else parsed
        return fields is not None and _blank(bytes(fields.get(self.key, b"null")))

    def after(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> str:
        """Return the id of the reply that a request continues; "" for none, or if the request also names other objects of its
        provider.

        Args:
            parsed: its fields, as `parse_fields` returns them.
        """
        return ""

    def split(self, req: ParsedRequest) -> None:
        """Split the conversation into messages.

        Raises:
            InvalidMessage: the conversation is not a list, or is empty.
        """
        req.messages = listed(req.fields[self.key], self.key)

    def read(self, raw: bytes) -> list[Message]:
        """Parse one message of the client, which may become several. In a message of more than `MAX_PARTS` parts, neighbouring
        texts with the same other fields become one part: each part becomes a page.

        Raises:
            InvalidMessage: the message is invalid. DuplicateCall: two of its calls have the same id.
        """
        source = plain(decoded(decode_object, raw, "a message is not an object"), "message")
        return [join_texts(message) for message in self._read(source)]

    def parsed(self, sources: Any) -> list[Message]:
        """Parse the messages of a decoded list.

        Raises:
            InvalidMessage: a message is invalid. DuplicateCall.
        """
        return numbered([message for source in sources for message in self._read(plain(source, "message"))], whole=True)

    @abstractmethod
    def _read(self, source: dict[str, Any]) -> list[Message]:
        """Parse a decoded message, which may become several."""

    def together(self, messages: list[Message]) -> list[Message]:
        """Return the messages of a history, joined where its provider accepts them only together, and each result with its call's
        id."""
        return numbered(messages)

    def shown(self, message: Message) -> list[Part]:
        """Return the parts that the client sees of a reply with calls of our tools: its texts."""
        return [part for part in message.parts if part.kind is Kind.TEXT]

    def led(self, message: Message, parts: Sequence[Part]) -> Message:
        """Return a reply behind texts that the client saw before it. A provider requires its reasoning to be first."""
        first = next(at for at, part in enumerate((*message.parts, None)) if part is None or part.kind is not Kind.REASONING)
        return msgspec.structs.replace(message, parts=(*message.parts[:first], *parts, *message.parts[first:]))

    @abstractmethod
    def splice(self, req: ParsedRequest, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """Return the request with other messages and additional tools."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """Return an error in this form."""

    def reading(self, faults: bool, *, holds: bool = True) -> Reading:
        """Return a reader of the replies to one request; see `Reading`."""
        return self.reader(faults, holds=holds)

    def request(self, body: bytes, into: str, cap: int) -> Request:
        """Return a client's request for a model, with messages in the model's form."""
        return self._request({key: whole_number(value) for key, value in decode_object(body).items()}, into, cap)

    @abstractmethod
    def _request(self, fields: dict[str, Any], into: str, cap: int) -> Request:
        """Return the same for a decoded request."""

    def asking(
        self, fields: Mapping[str, Any], messages: Sequence[Any], system: Any, into: str, cap: int, **more: Any
    ) -> Request:
        """Return the same for a decoded request, given its messages and its system prompt in the model's form."""
        return Request(
            messages=messages,
            system=system,
            tools=tuple(_specs(fields.get("tools"))),
            max_tokens=next((fields[key] for key in reversed(self.caps) if fields.get(key)), cap),
            temperature=fields.get("temperature"),
            options=options(fields, into),
            **more,
        )

    @abstractmethod
    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """Return a function that writes the pieces of a model's reply as events of this form."""

    @abstractmethod
    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """Return a model's reply as one body of this form."""


class Reading(ABC):
    """Reads the upstream's replies to one request of a client, over several rounds, and determines what the client sees.

    Every byte is passed on unchanged until a call of our tools, which is removed, or another round. From then on the client sees
    one reply: the first round's beginning, all texts, and the last round's end and usage. Bytes that cannot be read are passed on
    too, and `reply` raises an error.

    Args:
        faults: whether our calls may be in it.
        holds: whether the last events of a reply are held back until it is in the session, so that the client's next request
            finds it there.
    """

    done_ends: ClassVar[bool] = False
    """Whether the data `[DONE]` ends a reply of this form."""

    def __init__(self, faults: bool, *, holds: bool = True) -> None:
        self.faults = faults
        self._holds = holds
        self._held: list[bytes] = []
        self._raw = b""
        """The reply, if it is not streamed."""
        self.changed = False
        """Whether the client sees other bytes than the upstream's: after a call of ours, or another round."""
        self.rounds = 0
        self.spoke = False
        """Whether this round had more than its first events."""
        self.usage: dict[str, Any] = {}
        """The usage that this round reports."""
        self._earlier_usage: list[dict[str, Any]] = []
        """The usage that each earlier round reported."""
        self.failed: dict[str, Any] | None = None
        """An error within the reply."""
        self.ended = False
        """Whether this round is known to be complete, by a reason or by the last event of a reply."""
        self.odd: Exception | None = None
        """The error by which a part of this round could not be read."""
        self.deltas: list[Delta] = []
        """The pieces of text in the last event."""
        self._ends = False
        """Whether the last event ends a reply, or has the reason of its end."""
        self._next = 0
        """The number of the client's next block, item or call."""
        self._slots: dict[int, int | None] = {}
        """The client's numbers of this round's blocks, items or calls; None for a call of ours."""
        self._begin()

    def feed(self, event: ServerEvent) -> bytes:
        """Return the bytes that the client sees of one event now."""
        self.deltas, self._ends = [], False
        try:
            if not event.data:
                visible = b"" if self.rounds else event.raw
            elif event.is_done:
                self.ended, self._ends = self.ended or self.done_ends, self.done_ends
                visible = b"" if self.changed else event.raw
            else:
                visible = self._feed(event)
        except UNREADABLE as error:
            self.odd, visible = error, event.raw
        if self.changed or not self._holds or not (self._held or self._ends or self.failed is not None):
            return visible
        # Events behind the end, such as comments, are held back with it.
        self._held.append(visible)
        return b""

    @abstractmethod
    def _feed(self, event: ServerEvent) -> bytes:
        """Return the same for an event with data; raise one of `UNREADABLE` for an invalid event."""

    def _slot(self, index: int, mine: bool) -> int | None:
        """Return the number under which the client sees a new block; None if it is a call of ours, which the client does not
        see."""
        slot = None if mine else self._next if self.changed else index
        self.changed = self.changed or mine
        self._slots[index] = slot
        self._next = self._next if slot is None else max(self._next, slot + 1)
        return slot

    def take(self, body: bytes) -> None:
        """Read a complete reply that is not streamed."""
        self._raw = body
        try:
            self._take(body.removeprefix(MARK))
        except UNREADABLE as error:
            self.odd = error

    @abstractmethod
    def _take(self, body: bytes) -> None:
        """Read the same; raise one of `UNREADABLE` for an invalid reply."""

    def _check(self, has_reply: bool, has_calls: bool) -> None:
        """Raise Unavailable if there is no reply, if it is incomplete, or if a part of it could not be read: then only the
        client's next request tells what the client made of it.

        Args:
            has_reply: whether anything came. has_calls: whether the reply calls our tools, so that another round follows.
        """
        if self.odd is not None:
            raise unreadable(self.odd) from self.odd
        if not has_reply:
            raise Unavailable("the upstream sent no reply", advice="check the upstream")
        if not self.ended and not has_calls:
            raise Unavailable("the upstream: the stream ended before the reply did", advice="try again")

    def left(self) -> bytes:
        """Return the bytes held back, if every byte is passed on: the end of a reply, or the error at its end."""
        return b"" if self.changed else b"".join(self._held)

    @property
    def id(self) -> str:
        """The reply's id as the client sees it, if the client can continue from it by the id alone; else ""."""
        return ""

    def reply(self) -> Reply:
        """Return this round's complete reply.

        Raises:
            Unavailable: there is no reply, or it cannot be read.
        """
        try:
            return self._reply()
        except Unavailable:
            raise
        except UNREADABLE as error:
            raise unreadable(error) from error

    @abstractmethod
    def _reply(self) -> Reply:
        """Return the same; raise one of `UNREADABLE`."""

    def begin_again(self) -> None:
        """Begin the next round instead of this one, which had only an error."""
        self.faults, self.failed = True, None
        self.again()

    def again(self) -> None:
        """Begin the next round."""
        self.rounds += 1
        self.changed, self.odd, self.ended, self.spoke = True, None, False, False
        self._held.clear()
        self._slots = {}
        self._earlier_usage += [self.usage] if self.usage else []
        self.usage = {}
        self._begin()

    def _reported_usage(self) -> dict[str, Any]:
        """Return the last round's usage, which has that of every round in `kilburn_rounds` if there were several."""
        if not (self.usage and self._earlier_usage):
            return self.usage
        return {**self.usage, ROUNDS_FIELD: [*self._earlier_usage, self.usage]}

    @abstractmethod
    def _begin(self) -> None:
        """Drop the state of the last round."""

    def end(self) -> bytes:
        """Return the bytes held back until all rounds ended: the reply's last events, or the whole body."""
        if not self.changed or (self._raw and (self.odd is not None or not self.ended)):
            return self._raw or self.left()
        try:
            return self._end()
        except UNREADABLE:
            return self._raw

    @abstractmethod
    def _end(self) -> bytes:
        """Return the same, written anew; raise one of `UNREADABLE`."""

    def broken(self, error: dict[str, Any]) -> bytes:
        """Return the event that ends a stream with an error."""
        return written(error, "error")

    def ours(self, reply: Reply) -> tuple[Part, ...]:
        """Return a reply's calls of our tools."""
        return tuple(part for part in reply.calls if part.name in OURS) if self.faults else ()


def is_ours(called: Any) -> bool:
    """Return whether a tool or a call of one has the name of one of our tools."""
    name = called.get("name") if isinstance(called, dict) else None
    return isinstance(name, str) and name in OURS


def hidden(message: Message) -> Message:
    """Return a reply whose calls of our tools are marked as hidden."""
    parts = tuple(
        msgspec.structs.replace(part, call=HIDDEN + (part.call or "")) if part.kind is Kind.CALL and part.name in OURS else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)


def join_texts(message: Message) -> Message:
    """Return a message with its neighbouring texts joined, if it has more than `MAX_PARTS` parts and these texts have the same
    other fields. It says the same by its digest."""
    if len(message.parts) <= MAX_PARTS:
        return message
    parts: list[Part] = []
    for (kind, extra), run in groupby(message.parts, lambda part: (part.kind, part.extra)):
        texts = list(run)
        parts += [Part(kind=kind, text="".join([part.text for part in texts]), extra=extra)] if kind is Kind.TEXT else texts
    return msgspec.structs.replace(message, parts=tuple(parts))


def parse_fields(raw: bytes) -> Mapping[str, msgspec.Raw] | None:
    """Return the fields of a body, each as its JSON; None if the body is no object."""
    try:
        return _fields(raw)
    except NOT_JSON:
        return None


def decoded(decode: Any, raw: bytes | msgspec.Raw, subject: str) -> Any:
    """Decode JSON.

    Raises:
        InvalidMessage: it is not JSON, or not of this type.
    """
    try:
        return decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"{subject}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"{subject}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise InvalidMessage(f"{subject}: nested too deep") from None


def listed(raw: bytes | msgspec.Raw, subject: str) -> list[bytes]:
    """Return the items of a list, each as its JSON.

    Raises:
        InvalidMessage: it is empty, or no list.
    """
    items = decoded(_list, raw, subject)
    if not items:
        raise InvalidMessage(f"{subject} is empty", advice="send at least one message")
    return [bytes(item) for item in items]


def _begun(raw: msgspec.Raw) -> bytes:
    """Return a list's JSON without its closing bracket, and other JSON whole. It may be long, so it is copied once."""
    whole = memoryview(raw)
    return bytes(whole[:-1] if bytes(whole[-1:]) == b"]" else whole).strip()


def _value(fields: Mapping[str, msgspec.Raw], key: str) -> Any:
    """Return a field's value; None if it is missing or cannot be read, since the provider reports that."""
    if key not in fields:
        return None
    try:
        return msgspec.json.decode(fields[key])
    except NOT_JSON:
        return None


def _count(fields: Mapping[str, msgspec.Raw], key: str) -> int:
    """Return a field's whole number, or 0 if it has none."""
    if key not in fields:
        return 0
    value = whole_number(_value(fields, key))
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else 0


def _names(tools: Any) -> Iterator[str]:
    """Yield the names of the client's tools."""
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            yield inner["name"]


def _blank(raw: bytes) -> bool:
    """Return whether a history's JSON is empty."""
    return len(raw) <= SHORT and raw.translate(None, b" \t\r\n") in (b"null", b"[]", b'""')


def _specs(tools: Any) -> Iterator[ToolSpec]:
    """Yield a client's function tools, whatever the form."""
    for tool in of_theirs(tools):
        if tool.get("type") == "function" or "input_schema" in tool:
            function = tool.get("function", tool)
            schema = function.get("input_schema", function.get("parameters") or {"type": "object", "properties": {}})
            yield ToolSpec(name=function["name"], description=function.get("description") or "", parameters=schema)


def with_tools(fields: Mapping[str, Any], more: Sequence[Any]) -> dict[str, Any]:
    """Return a request's fields with more tools behind the client's own."""
    client_tools = msgspec.json.decode(fields["tools"], type=list[msgspec.Raw] | None) if more and "tools" in fields else None
    return {**fields, "tools": [*(client_tools or ()), *more]} if more else {**fields}


def of_theirs(value: Any) -> list[Any]:
    """Return a request's list of tools or of blocks; an empty list if it has none."""
    return value if isinstance(value, list) else []


def unreadable(error: Exception) -> Unavailable:
    """Return the error for an invalid reply."""
    return Unavailable(f"the upstream sent no valid reply: {str(error)[:200]}", advice="check the upstream")


def options(fields: Mapping[str, Any], into: str) -> dict[str, Any]:
    """Return the settings of a reply that both forms have, under the names of one of them.

    Raises:
        InvalidMessage: the stop sequences are neither a text nor a list of texts.
    """
    stop = fields.get("stop") or fields.get("stop_sequences") or []
    ends = [stop] if isinstance(stop, str) else stop
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise InvalidMessage("stop: neither a string nor a list of strings", advice="send one of these, or leave it out")
    settings = {"stop_sequences" if into == "messages" else "stop": ends} if ends else {}
    return {**settings, "top_p": fields["top_p"]} if fields.get("top_p") is not None else settings


def usage_or_zero(tokens: Tokens | None) -> Tokens:
    """Return a reply's tokens; zero if the provider reports none."""
    return tokens or Tokens()
