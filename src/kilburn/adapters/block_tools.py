"""Letta's tools for memory blocks over notes: append, replace and rethink, for an agent of ours.

    core = CoreMemory(store.notes("ana"), "core/human", "core/plan")
    agent = Agent(model, block_tools(core, session), session, notes=core, recall=500)

What the agent writes is in force at once, with its trust: an agent's, or a tool's once the session has read what a tool returned.
It cites what the agent was shown: the messages in its window, and by them what stood beside the prompt. So it is trusted no more
than that, and is forgotten with each of these. It is a note, never a fact of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kilburn.adapters.memory_tool import places
from kilburn.agents.access import Deed
from kilburn.agents.tool import Tool
from kilburn.backend import SegmentKind
from kilburn.errors import KernelError
from kilburn.kernel.session import Session
from kilburn.memory.core_memory import CoreMemory
from kilburn.memory.secrets import Secrets
from kilburn.memory.taint import shown_pages, tainted
from kilburn.message import Kind, Role
from kilburn.page import Page, Place

__all__ = ["block_tools"]

EDITS = 20
"""Calls of these tools after one message of the user. A model that edits more goes round in circles."""

LONG = 20
"""Characters from which on a text is known again where it stands."""

NAMES = frozenset(("core_memory_append", "memory_replace", "memory_rethink"))


def block_tools(core: CoreMemory, session: Session, *, clean: Collection[str] = (), secrets: Secrets = None) -> list[Tool]:
    """Return the tools with which the agent of a session edits its core memory.

    Args:
        core: has the limits, and says which notes are read-only.
        session: the agent's.
        clean: its tools whose results hold nobody else's words: what follows them is the agent's own.
        secrets: what to do with a text that holds a secret: see `kilburn.memory.secrets.screen`.
    """
    trusted_tools = NAMES | set(clean)

    def edit(label: str, change: Callable[[str], str], new: str, *, whole: bool = False) -> str:
        call = _calling_page(session)
        if call is not None:
            _check_turn(session)
            _check_new(core, session, call, label, new)
        version = _seen(core, session, call, label) if whole else None
        size = core.edit(
            label,
            change,
            seen=version,
            tainted=tainted(session, trusted_tools),
            cites=shown_pages(session, trusted_tools),
            secrets=secrets,
        )
        return f"{label} has {size:,} of {core.limit(label):,} characters"

    def core_memory_append(label: str, content: str) -> str:
        """Add a line at the end of one of your notes that stand in the prompt, such as what you learned about the user."""

        def added(text: str) -> str:
            if _is_in(content, text):
                raise KernelError(f"{label!r} says so already", advice="nothing was written")
            return f"{text}\n{content}" if text and not text.endswith("\n") else text + content

        return edit(label, added, content)

    def memory_replace(label: str, old_str: str, new_str: str) -> str:
        """Replace a text in one of your notes that stand in the prompt. It must stand there exactly so, and once. With an empty
        new_str it is removed."""

        def replaced(text: str) -> str:
            positions = places(text, old_str)
            if len(positions) != 1:
                lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in positions)
                reason = f"it stands in {label!r} in the lines {lines}" if positions else f"it does not stand in {label!r}"
                raise KernelError(f"nothing was replaced: {reason}", advice="copy it exactly, with enough around it")
            return text.replace(old_str, new_str)

        return edit(label, replaced, new_str)

    def memory_rethink(label: str, new_memory: str) -> str:
        """Write one of your notes that stand in the prompt anew as a whole: to sort it, or to make it shorter. What is worth
        keeping of it must be in new_memory."""
        return edit(label, lambda _: new_memory, new_memory, whole=True)

    return [Tool(function, does=Deed.WRITE, clean=True) for function in (core_memory_append, memory_replace, memory_rethink)]


def _calling_page(session: Session) -> Page | None:
    """Return a page of the message in which the agent calls: the last that it wrote."""
    with session.lock:
        pages = [page for page in session.window.pages.originals() if session.window.at(page.id) is not Place.DROPPED]
        return next((page for page in reversed(pages) if page.role is Role.ASSISTANT), None)


def _since_request(session: Session) -> list[Page]:
    with session.lock:
        last = max(session.window.request, default=0)
        return [page for page in session.window.pages.originals() if page.id > last]


def _check_turn(session: Session) -> None:
    calls = [page for page in _since_request(session) if page.kind is Kind.CALL and page.name in NAMES]
    if len(calls) > EDITS:
        raise KernelError(f"{EDITS} edits of notes since the user spoke", advice="that is enough; go on, or answer")


def _check_new(core: CoreMemory, session: Session, call: Page, label: str, new: str) -> None:
    """Check that a text is not just recalled from long-term memory, where it is already."""
    segment_number = core.notes.head and core.notes.collection.number
    keys = {*call.cites}
    for page in _since_request(session):
        keys |= {*page.cites} if page.role is Role.TOOL else set()
    kinds = {info.number: info for info in session.backend.segments() if info.kind is not SegmentKind.SESSION}
    rows = session.backend.read(key for key in keys if key[0] in kinds)
    for (segment, _), (page, state) in rows.items():
        if state.at is Place.DROPPED or (segment == segment_number and page.name == label):
            continue
        if _is_in(new, session.backend.contents.texts([page.digest])[page.digest]):
            name = f"{kinds[segment].name} {page.address}"
            raise KernelError(
                f"that is remembered already, as {name}", advice="nothing was written; it is found again when needed"
            )


def _seen(core: CoreMemory, session: Session, call: Page | None, label: str) -> str | None:
    """Return the digest of the version of a note that stood beside the prompt; "" if it was not there, None if no note was.

    Raises:
        KernelError: only its beginning stood there.
    """
    number = core.notes.collection.number if core.notes.head else 0
    pages = session.backend.read(key for key in (call.cites if call is not None else ()) if key[0] == number)
    if not pages:
        return None
    key, page = next(((key, page) for key, (page, _) in pages.items() if page.name == label), ((0, 0), None))
    if page is None:
        return ""
    if key in core.cut.get(session.number, ()):
        raise KernelError(
            f"only the beginning of {label!r} stands in the prompt",
            advice="nothing was written: shorten what you see by memory_replace until all of it stands there",
        )
    return page.digest


def _is_in(new: str, text: str) -> bool:
    """Return whether a text stands in another, whatever its blanks and capitals; of a short one nobody can tell."""
    words = " ".join(new.split()).casefold()
    return len(words) >= LONG and words in " ".join(text.split()).casefold()
