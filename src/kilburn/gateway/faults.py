"""Page faults: the model's calls of our tools, answered from the session and from those that it goes on from; and what a model
is brought that takes no tools.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from kilburn import tracing
from kilburn.errors import SpecError
from kilburn.gateway.conversations import Conversation
from kilburn.gateway.exchange import Exchange
from kilburn.kernel.receipts import ranges
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory import memory_tools
from kilburn.memory.brought import Brought, bring
from kilburn.memory.memory_tools import MemoryReply
from kilburn.message import Message, Part
from kilburn.wire.digests import HIDDEN

log = logging.getLogger("kilburn.gateway")

LONGEST_MODEL = 200
"""Characters of a model's name in a log."""

MODELS = 1_000
"""Models of which it is kept that they refuse tools."""


LIMITING = frozenset({"output_config", "output_format", "parallel_tool_calls", "response_format", "text", "tool_choice", "tools"})
"""Fields of a request with which a provider may refuse our tools although the model takes tools."""


class MemoryTools(StrEnum):
    """When a model is offered our tools."""

    AUTO = "auto"
    """Until it refuses them."""
    ON = "on"
    """Always; a refusal is the client's to see."""
    OFF = "off"


class Offer:
    """Decides which models are offered our tools, for all tenants of a gateway.

    Args:
        how: what the operator says: one of `MemoryTools`.
        takes: whether what answers takes tools at all, as far as is known.

    Raises:
        SpecError: it is none of these, or "on" for a model that takes no tools.
    """

    def __init__(self, how: str, *, takes: bool = True) -> None:
        if how not in [*MemoryTools]:
            raise SpecError(f"invalid memory tools {how[:40]!r}", advice=f"say one of {', '.join(MemoryTools)}")
        if how == MemoryTools.ON and not takes:
            raise SpecError("the model takes no tools", advice="leave memory tools at auto, or use another model")
        self.how = MemoryTools(how)
        self._takes = takes and how != MemoryTools.OFF
        self._refusing: set[tuple[str, frozenset[str]]] = set()
        self._suspected: set[str] = set()
        """Models that refused a plain request once, for a reason that may have been another one."""

    def to(self, model: str, fields: Iterable[str]) -> bool:
        """Return whether a model is offered our tools in a request with these fields. One that refused them in a plain request
        takes no tools at all."""
        kinds = {(model, frozenset[str]()), (model, _kind_of_request(fields))}
        return self._takes and self._refusing.isdisjoint(kinds)

    def refused(self, model: str, fields: Iterable[str], *, certain: bool) -> None:
        """Record that a model, or its server, refused our tools in a request with these fields, and answered without them.

        Args:
            certain: whether the refusal named tools. If it did not, a model is offered them in plain requests until it refuses a
                second one.
        """
        kind = _kind_of_request(fields)
        if (model, kind) in self._refusing:
            return
        if not certain and not kind and model not in self._suspected:
            if len(self._suspected) >= MODELS:
                self._suspected.clear()
            self._suspected.add(model)
            return
        if len(self._refusing) >= MODELS:
            self._refusing.clear()
        self._refusing.add((model, kind))
        log.warning(
            "the upstream takes no tools for the model %r: from now on it is asked without recall and search_memory, and the "
            "gateway searches evicted messages for the user's words",
            model[:LONGEST_MODEL],
        )


def _kind_of_request(fields: Iterable[str]) -> frozenset[str]:
    return LIMITING.intersection(fields)


ENOUGH = "error: no more recalls in this turn; answer with what you have, or go on"


def answered(store: Store, conversation: Conversation, calls: Sequence[Part], exchange: Exchange, *, over: bool) -> list[Message]:
    """Return the results of calls of our tools, as messages. Results from an earlier session cite its pages.

    Args:
        exchange: gets the outcomes.
        over: whether there were enough of them in this turn; then nothing is looked up.
    """
    earlier = [] if over else _earlier(store, conversation)
    replies = [MemoryReply(text=ENOUGH) if over else _called(conversation.session, earlier, part, exchange) for part in calls]
    return [reply.message(HIDDEN + (part.call or "")) for part, reply in zip(calls, replies, strict=True)]


def brought(store: Store, conversation: Conversation, tokens: int, beside: Sequence[tuple[int, int]] = ()) -> Brought | None:
    """Return passages about the user's latest message from the session and the earlier ones; None if there are none.

    Args:
        beside: pages of which passages stand beside this prompt already.
    """
    return bring(conversation.session, tokens, _earlier(store, conversation), beside=beside, turn=conversation.then)


def _earlier(store: Store, conversation: Conversation) -> list[Session]:
    if not conversation.earlier:
        return []
    # A session that was forgotten since has its number no longer.
    names = {info.number: info.name for info in store.sessions() if not info.damaged and info.user == conversation.user}
    return [store.session(names[number]) for number in conversation.earlier if number in names]


def _called(session: Session, earlier: Sequence[Session], part: Part, exchange: Exchange) -> MemoryReply:
    """Carry out one call, as a span."""
    tool = part.name or ""
    attributes = {
        tracing.OPERATION: "execute_tool",
        tracing.TOOL: tool,
        tracing.CONVERSATION: session.name,
        tracing.CALL: part.call,
    }
    with tracing.span(f"execute_tool {tool}", attributes) as span:
        reply = _looked_up(session, earlier, part)
        failed, has_sources = reply.text.startswith("error:"), bool(reply.sources or reply.cites)
        outcome = "failed" if failed else "found" if has_sources else "abstained"
        exchange.lookups.append((tool, outcome))
        if failed:
            span.fail("tool_error")
        if span.wanted:
            span.set({"kilburn.outcome": outcome, "kilburn.pages": " ".join(ranges(reply.sources))})
    return reply


def _looked_up(session: Session, earlier: Sequence[Session], part: Part) -> MemoryReply:
    name, arguments = part.name or "", part.text
    if name == "recall":
        for session_before in earlier:
            local_arguments = _address_in(session_before, arguments)
            if local_arguments is not None:
                reply = memory_tools.call(session_before, name, local_arguments)
                return msgspec.structs.replace(reply, sources=(), cites=_cites(session_before, reply))
        return memory_tools.call(session, name, arguments)
    room = session.prompts.capacity // 2
    hits = memory_tools.call(session, name, _within(arguments, room // 2) if earlier else arguments)
    for session_before in earlier:
        remaining = room - session.counter.count(hits.text)
        if remaining <= 0:
            break
        # By its name: the window of an earlier session is not what the client's model reads.
        more = memory_tools.call(session_before, name, _within(arguments, remaining, session=session_before.name))
        if cites := _cites(session_before, more):
            head = f'[from the earlier session {session_before.name}; recall its pages as "{session_before.name} p1"]'
            text = "\n".join([*([hits.text] if hits.sources or hits.cites else []), head, more.text])
            hits = MemoryReply(text=text, sources=hits.sources, cites=(*hits.cites, *cites))
    return hits


def _cites(session: Session, reply: MemoryReply) -> tuple[tuple[int, int], ...]:
    """Return the pages of another session, and of its branches, that a reply is from."""
    owner = session.contents.owner
    return (*((owner(page), page) for page in reply.sources), *reply.cites)


def _within(arguments: str, tokens: int, **more: str) -> str:
    """Return the arguments of a search, limited to so many tokens; invalid arguments are returned unchanged."""
    try:
        fields = msgspec.json.decode(arguments, type=dict[str, object])
        requested = msgspec.convert(fields.get("tokens", memory_tools.TOKENS), int, strict=False)
        return msgspec.json.encode({**fields, **more, "tokens": min(requested, tokens)}).decode()
    except msgspec.DecodeError:
        return arguments


def _address_in(opened: Session, arguments: str) -> str | None:
    """Return the arguments of a recall with the address within that session; None if the address names another."""
    try:
        fields = msgspec.json.decode(arguments, type=dict[str, object])
    except msgspec.DecodeError:
        return None
    session, mark, address = str(fields.get("address", "")).rpartition(" ")
    return msgspec.json.encode({**fields, "address": address}).decode() if mark and session == opened.name else None
