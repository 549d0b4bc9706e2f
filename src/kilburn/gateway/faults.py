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
from kilburn.kernel import memory_tools
from kilburn.kernel.brought import Brought, bring
from kilburn.kernel.memory_tools import MemoryReply
from kilburn.kernel.receipts import ranges
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
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
    """Whether a model is offered our tools."""

    AUTO = "auto"
    """Until it refuses them."""
    ON = "on"
    """Always; a refusal is the client's to see."""
    OFF = "off"


class Offer:
    """Which models are offered our tools, for all tenants of a gateway.

    Args:
        how: what the operator says: one of `MemoryTools`.
        takes: whether what answers takes tools at all, as far as is known.

    Raises:
        SpecError: it is none of these, or "on" for a model that takes no tools.
    """

    def __init__(self, how: str, *, takes: bool = True) -> None:
        if how not in [*MemoryTools]:
            raise SpecError(f"memory tools {how[:40]!r}", advice=f"say one of {', '.join(MemoryTools)}")
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
            "the upstream takes no tools for the model %r: it is asked without recall and search_memory from now on, and what "
            "has left the window is searched for the user's words",
            model[:LONGEST_MODEL],
        )


def _kind_of_request(fields: Iterable[str]) -> frozenset[str]:
    return LIMITING.intersection(fields)


ENOUGH = "error: no more recalls in this turn; answer with what you have, or go on"


def answered(store: Store, conversation: Conversation, calls: Sequence[Part], exchange: Exchange, *, over: bool) -> list[Message]:
    """The results of calls of our tools, as messages. What is from an earlier session cites its pages there.

    Args:
        exchange: is told what they came to.
        over: whether there were enough of them in this turn; then nothing is looked up.
    """
    earlier = [] if over else _earlier(store, conversation)
    done = [MemoryReply(text=ENOUGH) if over else _called(conversation.session, earlier, part, exchange) for part in calls]
    return [said.message(HIDDEN + (part.call or "")) for part, said in zip(calls, done, strict=True)]


def brought(store: Store, conversation: Conversation, tokens: int, beside: Sequence[tuple[int, int]] = ()) -> Brought | None:
    """What the user's latest message may be about, in the session and in those that it goes on from; None for nothing.

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
    given = {tracing.OPERATION: "execute_tool", tracing.TOOL: tool, tracing.CONVERSATION: session.name, tracing.CALL: part.call}
    with tracing.span(f"execute_tool {tool}", given) as made:
        said = _looked_up(session, earlier, part)
        failed, found = said.text.startswith("error:"), bool(said.sources or said.cites)
        outcome = "failed" if failed else "found" if found else "abstained"
        exchange.lookups.append((tool, outcome))
        if failed:
            made.fail("tool_error")
        if made.wanted:
            made.set({"kilburn.outcome": outcome, "kilburn.pages": " ".join(ranges(said.sources))})
    return said


def _looked_up(session: Session, earlier: Sequence[Session], part: Part) -> MemoryReply:
    name, arguments = part.name or "", part.text
    if name == "recall":
        for other in earlier:
            own = _address_in(other, arguments)
            if own is not None:
                said = memory_tools.call(other, name, own)
                return msgspec.structs.replace(said, sources=(), cites=_cites(other, said))
        return memory_tools.call(session, name, arguments)
    room = session.prompts.capacity // 2
    found = memory_tools.call(session, name, _within(arguments, room // 2) if earlier else arguments)
    for other in earlier:
        left = room - session.counter.count(found.text)
        if left <= 0:
            break
        # By its name: the window of an earlier session is not what the client's model reads.
        more = memory_tools.call(other, name, _within(arguments, left, session=other.name))
        if cites := _cites(other, more):
            head = f'[from the earlier session {other.name}; recall its pages as "{other.name} p1"]'
            text = "\n".join([*([found.text] if found.sources or found.cites else []), head, more.text])
            found = MemoryReply(text=text, sources=found.sources, cites=(*found.cites, *cites))
    return found


def _cites(session: Session, said: MemoryReply) -> tuple[tuple[int, int], ...]:
    """What a reply from another session is from: pages of that one, and of its branches."""
    owner = session.contents.owner
    return (*((owner(page), page) for page in said.sources), *said.cites)


def _within(arguments: str, tokens: int, **more: str) -> str:
    """The arguments of a search that brings so many tokens at most, with more of them; what is not valid as it is."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, object])
        asked = msgspec.convert(given.get("tokens", memory_tools.TOKENS), int, strict=False)
        return msgspec.json.encode({**given, **more, "tokens": min(asked, tokens)}).decode()
    except msgspec.DecodeError:
        return arguments


def _address_in(opened: Session, arguments: str) -> str | None:
    """The arguments of a recall with the address as that session has it; None where it names another."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, object])
    except msgspec.DecodeError:
        return None
    session, mark, address = str(given.get("address", "")).rpartition(" ")
    return msgspec.json.encode({**given, "address": address}).decode() if mark and session == opened.name else None
