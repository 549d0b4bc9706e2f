"""Page faults: the model's calls of our tools, answered from the session and from those that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilburn.gateway.history import Session
from kilburn.kernel import memory_tools
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.memory_tools import MemoryReply
from kilburn.kernel.process import Process
from kilburn.message import Message, Part
from kilburn.wire.digests import HIDDEN

__all__ = ["answered"]

ENOUGH = "error: no more recalls in this turn; answer with what you have, or go on"


def answered(hierarchy: Hierarchy, session: Session, calls: Sequence[Part], *, over: bool) -> list[Message]:
    """The results of calls of our tools, as messages.

    Args:
        over: whether there were enough of them in this turn; then nothing is looked up.
    """
    earlier = [] if over else [hierarchy.process(name) for name in session.earlier]
    out = []
    for part in calls:
        said = MemoryReply(text=ENOUGH) if over else _called(session.process, earlier, part)
        out.append(said.message(HIDDEN + (part.call or "")))
    return out


def _called(process: Process, earlier: Sequence[Process], part: Part) -> MemoryReply:
    name, arguments = part.name or "", part.text
    if name == "recall":
        for other in earlier:
            own = _address_in(other, arguments)
            if own is not None:
                return MemoryReply(text=memory_tools.call(other, name, own).text)
        return memory_tools.call(process, name, arguments)
    found = memory_tools.call(process, name, arguments)
    for other in earlier:
        more = memory_tools.call(other, name, arguments)
        if more.sources:
            head = f'[from the earlier session {other.name}; recall its pages as "{other.name} p1"]'
            found = MemoryReply(
                text="\n".join([*([found.text] if found.sources else []), head, more.text]), sources=found.sources
            )
    return found


def _address_in(process: Process, arguments: str) -> str | None:
    """The arguments of a recall with the address as that process has it; None where it names another."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, object])
    except msgspec.DecodeError:
        return None
    session, mark, address = str(given.get("address", "")).rpartition(" ")
    return msgspec.json.encode({**given, "address": address}).decode() if mark and session == process.name else None
