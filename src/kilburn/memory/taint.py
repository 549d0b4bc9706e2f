"""What a session has read, and so how far what it writes may be believed: the second half of law 7.

One rule, which an agent's rights and learning both ask. All that was read since the session began counts, and not only what is
in the window: what an agent says after an untrusted read may carry it on, when the text itself has left and the user has spoken
again. For the same reason a branch begins with what its parent had read when it wrote the branch's prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kilburn.errors import KernelError
from kilburn.kernel.session import Session
from kilburn.message import Role, Trust
from kilburn.page import Page


def lowest_read(session: Session, clean: Collection[str] = ()) -> dict[int, Trust]:
    """How far the least trusted text may be believed that a session had read when each of its originals came, by the page's id,
    in order. Under 0 is what had been read when the session began.

    What was recalled from the session itself is trusted as what it was recalled from.

    Args:
        clean: tools whose results hold nobody else's words.
    """
    lowest = _carried_in(session, clean)
    read = {0: lowest}
    with session.lock:
        pages = session.window.pages
        for page in pages.originals():
            ours = page.trust < Trust.AGENT and _is_ours(page, pages, clean)
            lowest = min(lowest, Trust.AGENT if ours else page.trust)
            read[page.id] = lowest
    return read


def tainted(session: Session, clean: Collection[str] = (), until: int | None = None) -> bool:
    """Whether a session has read an untrusted text: anything that is trusted no more than a tool.

    Args:
        clean: tools whose results hold nobody else's words.
        until: the last page that counts; None for all.
    """
    read = lowest_read(session, clean)
    return any(trust < Trust.AGENT for page, trust in read.items() if until is None or page <= until)


def shown_pages(session: Session, clean: Collection[str] = ()) -> Sequence[tuple[int, int]]:
    """Return what the model of a session is shown, as the sources of what it writes now: (number of the segment, page id).

    In a session that has read nothing untrusted, a page of low trust holds our own words: what it was made from stands for it.

    Args:
        clean: tools whose results hold nobody else's words.
    """
    with session.lock:
        pages, untrusted = session.window.pages, tainted(session, clean)
        remaining, sources = [*session.window.visible()], dict[int, None]()
        while remaining:
            page = remaining.pop()
            if untrusted or page.trust >= Trust.AGENT:
                sources[page.id] = None
            else:
                remaining += (pages[source] for source in page.sources)
        return [(session.contents.owner(page), page) for page in sources]


def _carried_in(session: Session, clean: Collection[str]) -> Trust:
    """What a branch's prompt may carry into it from the session that wrote it. A branch with the history has read it itself."""
    fork = session.branches.forked
    if fork is None or not fork.call or fork.at:
        return Trust.OPERATOR
    try:
        parent = session.branches.parent
    except KernelError:
        return Trust.TOOL  # what it had read is gone, so nobody knows
    return Trust.TOOL if parent is not None and tainted(parent, clean, fork.call) else Trust.OPERATOR


def _is_ours(page: Page, pages: Mapping[int, Page], clean: Collection[str]) -> bool:
    """Whether a page of low trust holds our own words, or words of a session that had read nothing untrusted until then.

    Of what it was recalled from, originals came before it and count by themselves; a fold does not, so its trust is looked at.
    """
    if page.cites:
        return False
    if page.role is Role.ASSISTANT and page.sources:
        # It was answered from these.
        return all(pages[each].trust > Trust.TOOL or _is_ours(pages[each], pages, clean) for each in page.sources)
    if page.role is not Role.TOOL:
        return False
    if page.sources:
        return all(source > 0 or pages[source].trust > Trust.TOOL for source in page.sources)
    return page.answers != 0 and pages[page.answers].name in clean
