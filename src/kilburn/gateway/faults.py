"""Page faults: the model's calls of our tools, answered from the session and from those that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilburn.gateway.sessions import Session
from kilburn.kernel import memory_tools
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.memory_tools import MemoryReply
from kilburn.kernel.process import Process
from kilburn.message import Message, Part
from kilburn.wire.digests import HIDDEN

__all__ = ["answered"]

Cites = tuple[tuple[int, int], ...]
"""Pages of other processes: (number of the process, page id)."""

ENOUGH = "error: no more recalls in this turn; answer with what you have, or go on"


def answered(hierarchy: Hierarchy, session: Session, calls: Sequence[Part], *, over: bool) -> list[Message]:
    """The results of calls of our tools, as messages. What is from an earlier session cites its pages there.

    Args:
        over: whether there were enough of them in this turn; then nothing is looked up.
    """
    earlier: list[Process] = []
    if session.earlier and not over:
        # A session that was forgotten since has its number no longer.
        names = {info.number: info.name for info in hierarchy.processes() if not info.damaged}
        earlier = [hierarchy.process(names[number]) for number in session.earlier if number in names]
    out = []
    for part in calls:
        said, cites = (MemoryReply(text=ENOUGH), ()) if over else _called(session.process, earlier, part)
        out.append(msgspec.structs.replace(said.message(HIDDEN + (part.call or "")), cites=cites))
    return out


def _called(process: Process, earlier: Sequence[Process], part: Part) -> tuple[MemoryReply, Cites]:
    name, arguments = part.name or "", part.text
    if name == "recall":
        for other in earlier:
            own = _address_in(other, arguments)
            if own is not None:
                said = memory_tools.call(other, name, own)
                return MemoryReply(text=said.text), _cites(other, said)
        return memory_tools.call(process, name, arguments), ()
    found = memory_tools.call(process, name, arguments)
    cites: Cites = ()
    for other in earlier:
        # By its name: the window of an earlier session is not what the client's model reads.
        more = memory_tools.call(other, name, _within(other, arguments))
        if more.sources:
            head = f'[from the earlier session {other.name}; recall its pages as "{other.name} p1"]'
            text = "\n".join([*([found.text] if found.sources or cites else []), head, more.text])
            found, cites = MemoryReply(text=text, sources=found.sources), (*cites, *_cites(other, more))
    return found, cites


def _cites(process: Process, said: MemoryReply) -> Cites:
    return tuple((process.kernel.info.number, page) for page in said.sources)


def _within(process: Process, arguments: str) -> str:
    """The arguments of a search with the name of the session to search; what is not JSON as it is."""
    try:
        return msgspec.json.encode({**msgspec.json.decode(arguments, type=dict[str, object]), "session": process.name}).decode()
    except msgspec.DecodeError:
        return arguments


def _address_in(process: Process, arguments: str) -> str | None:
    """The arguments of a recall with the address as that process has it; None where it names another."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, object])
    except msgspec.DecodeError:
        return None
    session, mark, address = str(given.get("address", "")).rpartition(" ")
    return msgspec.json.encode({**given, "address": address}).decode() if mark and session == process.name else None
