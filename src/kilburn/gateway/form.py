"""What the gateway asks of a provider's form: take a request apart, put it together again, and read replies.

A request's known fields are read, and every other one stays byte for byte as the client wrote it. What stands before the
conversation (system prompt, tools) stays the client's too: it is counted, and never changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from kilburn.errors import InvalidMessage, Unavailable
from kilburn.gateway.events import ServerEvent, written
from kilburn.kernel.memory_tools import OURS
from kilburn.message import Kind, Message, Part
from kilburn.model import Delta, Reply, Request, Tokens, ToolSpec
from kilburn.wire.digests import HIDDEN
from kilburn.wire.plain import plain

__all__ = ["Asked", "Form", "Reading", "decoded", "hidden", "listed"]

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Asked(msgspec.Struct, kw_only=True):
    """One request, taken apart.

    Args:
        raw: the client's bytes.
        fields: its fields, each as its JSON.
        history: the field with the conversation, whole.
        after: the id of the reply that it goes on from, where its provider has what came before; "" where the history is whole.
        calls: ids of that reply's calls, if the session has others for them.
        lead: messages before the conversation that are the client's business: the system prompt of the chat form.
        messages: the conversation, each message as its JSON; it and `lead` are empty until `Form.split`.
        model: the model that it names.
        stream: whether the reply is to be streamed.
        reply: tokens that the reply may have; 0 where it does not say.
        choices: replies that it wants.
        faults: whether our tools may be offered: there is one reply, and no tool of the client has one of our names.
        tools: whether the client has tools of its own.
    """

    raw: bytes
    fields: dict[str, msgspec.Raw]
    history: bytes
    after: str = ""
    calls: tuple[str, ...] = ()
    lead: list[bytes] = []
    messages: list[bytes] = []
    model: str
    stream: bool
    reply: int
    choices: int
    faults: bool
    tools: bool

    @property
    def beside(self) -> list[bytes]:
        """What is sent beside the conversation and takes room in the window, as JSON."""
        return [*self.lead, *(bytes(self.fields[key]) for key in ("system", "instructions", "tools") if key in self.fields)]


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
    """The form in which a process renders its prompt for this one."""
    caps: ClassVar[tuple[str, ...]]
    """Fields that bound the reply."""

    def open(self, raw: bytes) -> Asked:
        """Take a request apart.

        Raises:
            InvalidMessage: it is not JSON, or not a request of this form.
        """
        fields = decoded(_fields, raw, "the body is no JSON object")
        if self.key not in fields:
            raise InvalidMessage(f"{self.key} is missing", advice="send at least one message")
        choices = int(_plain(fields, "n", int | None, 1) or 1)
        return Asked(
            raw=raw,
            fields=fields,
            history=bytes(fields[self.key]).strip(),
            after=self.after(raw),
            model=str(_plain(fields, "model", str, "")),
            stream=bool(_plain(fields, "stream", bool | None, False)),
            reply=max((int(_plain(fields, key, int | None, 0) or 0) for key in self.caps), default=0),
            choices=choices,
            faults=choices == 1 and OURS.isdisjoint(self._tools(fields)),
            tools=bytes(fields.get("tools", b"")).strip() not in (b"", b"[]", b"null"),
        )

    def unread(self, raw: bytes) -> bool:
        """Whether a request has no history, and goes through as it is."""
        return False

    def after(self, raw: bytes) -> str:
        """The id of the reply that a request goes on from, if it names nothing else that only its provider has; else ""."""
        return ""

    def split(self, asked: Asked) -> None:
        """Take the conversation apart.

        Raises:
            InvalidMessage: it is no list, or empty.
        """
        asked.messages = listed(asked.history, self.key)

    def _tools(self, fields: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        """The names of the client's tools."""
        if "tools" in fields:
            for tool in decoded(_tools, bytes(fields["tools"]), "tools") or ():
                inner = tool.get("function", tool)
                if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                    yield inner["name"]

    def read(self, raw: bytes) -> list[Message]:
        """The messages that one message of the client is.

        Raises:
            InvalidMessage: it is none. DuplicateCall: two of its calls have one id.
        """
        return self._read(plain(decoded(_object, raw, "a message is no object"), "message"))

    @abstractmethod
    def _read(self, source: dict[str, Any]) -> list[Message]:
        """The messages that a decoded message is."""

    def together(self, messages: list[Message]) -> list[Message]:
        """The messages of a history, those joined that its provider takes back only together."""
        return messages

    def led(self, message: Message, said: Sequence[Part]) -> Message:
        """A reply that begins with words which the client was shown before it. A provider wants its reasoning first."""
        first = next(at for at, part in enumerate((*message.parts, None)) if part is None or part.kind is not Kind.REASONING)
        return msgspec.structs.replace(message, parts=(*message.parts[:first], *said, *message.parts[first:]))

    @abstractmethod
    def splice(self, asked: Asked, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """The request with other messages, and with more tools."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """An error in this form."""

    @abstractmethod
    def reading(self, faults: bool, *, held: bool = True) -> Reading:
        """Reads the replies to one request; see `Reading`."""

    @abstractmethod
    def request(self, body: bytes, into: str, cap: int) -> Request:
        """What a model is asked that runs here, with messages in its own form."""

    @abstractmethod
    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """Writes the pieces of a model's reply as the events of this form."""

    @abstractmethod
    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """A model's reply as one body of this form."""


class Reading(ABC):
    """Reads what the upstream answers to one request of a client, over several rounds, and says what the client sees of it.

    Our own calls are taken out. The client sees one reply: the first round's beginning, all texts, and the last round's end,
    with the usage of all rounds summed.

    Args:
        faults: whether our calls may be in it; otherwise every byte goes through as it came.
        held: whether the events that end a reply are held back until it is in the session, so that a client that goes on
            at once finds it there.
    """

    def __init__(self, faults: bool, *, held: bool = True) -> None:
        self.faults = faults
        self._holds = held
        self._held: list[bytes] = []
        self.rounds = 0
        self.spoke = False
        """Whether there was more in this round than its beginning."""
        self.usage: dict[str, Any] = {}
        self.failed: dict[str, Any] | None = None
        """An error that came inside the stream."""

    @abstractmethod
    def feed(self, event: ServerEvent) -> bytes:
        """What the client sees of one event, now.

        Raises:
            Unavailable: it is no event of this form.
        """

    @abstractmethod
    def take(self, body: bytes) -> None:
        """Take a whole reply, of a request that is not streamed.

        Raises:
            Unavailable: it is no reply.
        """

    def _last_of(self, raw: bytes) -> bytes:
        """Hold back an event that ends a reply, where that is asked for; returns what the client sees of it now."""
        if not self._holds:
            return raw
        self._held.append(raw)
        return b""

    @property
    def id(self) -> str:
        """The reply's id, as the client sees it, where it can go on from there by the id alone; else ""."""
        return ""

    @abstractmethod
    def reply(self) -> Reply:
        """This round's reply.

        Raises:
            Unavailable: the stream ended before the reply did.
        """

    @abstractmethod
    def again(self) -> None:
        """Begin the next round."""

    @abstractmethod
    def end(self) -> bytes:
        """What was held back until all rounds were over: the reply's end as events, or the whole body."""

    def broken(self, error: dict[str, Any]) -> bytes:
        """The event that ends a stream with an error."""
        return written(error, "error")

    def ours(self, reply: Reply) -> tuple[Part, ...]:
        """The calls of a reply that are for us."""
        return tuple(part for part in reply.calls if part.name in OURS) if self.faults else ()


def hidden(message: Message) -> Message:
    """A reply with its calls for us marked as such."""
    parts = tuple(
        msgspec.structs.replace(part, call=HIDDEN + (part.call or "")) if part.kind is Kind.CALL and part.name in OURS else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)


def decoded(decode: Any, raw: bytes, what: str) -> Any:
    """Decoded JSON.

    Raises:
        InvalidMessage: it is not JSON, or not of this type.
    """
    try:
        return decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"{what}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"{what}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise InvalidMessage(f"{what}: nested too deep") from None


_object = msgspec.json.Decoder(dict[str, Any]).decode
_tools = msgspec.json.Decoder(list[dict[str, Any]] | None).decode


def listed(raw: bytes, what: str) -> list[bytes]:
    """A list, item by item.

    Raises:
        InvalidMessage: it is empty, or no list.
    """
    items = decoded(_list, raw, what)
    if not items:
        raise InvalidMessage(f"{what} is empty", advice="send at least one message")
    return [bytes(item) for item in items]


def _plain(fields: Mapping[str, msgspec.Raw], key: str, kind: Any, missing: Any) -> Any:
    if key not in fields:
        return missing
    return decoded(lambda raw: msgspec.json.decode(raw, type=kind), bytes(fields[key]), key)


def summed(total: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports of usage as one: numbers are added, at every level; of anything else the newer one counts."""
    for key, value in more.items():
        known = total.get(key)
        if isinstance(value, dict):
            total[key] = summed(dict(known) if isinstance(known, dict) else {}, value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and isinstance(known, int | float):
            total[key] = known + value
        elif value is not None or key not in total:
            total[key] = value
    return total


def unreadable(error: Exception) -> Unavailable:
    """The error for a reply that is none."""
    return Unavailable(f"the upstream sent what is no reply: {str(error)[:200]}", advice="check the upstream")


def options(asked: Mapping[str, Any], into: str) -> dict[str, Any]:
    """The settings of a reply that both forms have, as one of them names them.

    Raises:
        InvalidMessage: what ends a reply is no text, and no list of texts.
    """
    stop = asked.get("stop") or asked.get("stop_sequences") or []
    ends = [stop] if isinstance(stop, str) else stop
    if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends):
        raise InvalidMessage("stop: neither a string nor a list of strings", advice="send one of these, or leave it out")
    given = {"stop_sequences" if into == "messages" else "stop": ends} if ends else {}
    return {**given, "top_p": asked["top_p"]} if asked.get("top_p") is not None else given


def usage_of(tokens: Tokens | None) -> Tokens:
    """What a reply cost, zero where nothing is known."""
    return tokens or Tokens()
