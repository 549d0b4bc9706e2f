"""The laws of a session, asserted from outside: they hold after every operation.

Used by the conformance kit and by the state machine of the tests. It recomputes everything the
kernel keeps incrementally, from the ledger and the stored pages, and compares.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any

from kilburn.backend import SegmentKind
from kilburn.budget import text_cost
from kilburn.collections.collection import Collection
from kilburn.event import Act, Data
from kilburn.kernel.checkpoint import checkpoint_of, restore
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Ledger, Usage
from kilburn.kernel.pages import Calls, PagesById, finder_of, reader_of
from kilburn.kernel.render import Prompt
from kilburn.kernel.replay import rebuild
from kilburn.kernel.session import Session
from kilburn.kernel.window import GONE, WindowState
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, Place, span_of
from kilburn.wire.validity import validate_chat, validate_messages


def counted(prompt: Prompt, session: Session) -> int:
    """Count the tokens of a rendered chat prompt independently, text by text."""
    counter = session.counter
    total = 0
    for message in prompt:
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or [] if part.get("type") == "text"]
        total += sum(counter.count(text) for text in texts)
        for call in message.get("tool_calls") or []:
            total += counter.count(call["function"]["name"]) + counter.count(call["function"]["arguments"])
    return total


def check_laws(session: Session, appended: Sequence[dict[str, Any]] | None = None) -> None:
    """Assert the laws that are visible from outside.

    Args:
        appended: all that was appended, in order, where nothing was forgotten.
    """
    window = session.window
    if appended is not None:
        assert session.contents.messages() == list(appended), "law 1: the transcript is not what was appended"
    prompt = session.render()
    assert prompt.tokens <= session.prompts.capacity, f"law 2: {prompt.tokens} tokens in a window of {session.prompts.capacity}"
    assert counted(prompt, session) <= prompt.tokens, "law 2: the prompt weighs more than was counted"
    for page in window.pins:
        assert window.at(page) == Place.IN, f"law 3: pinned page {page} is not in the window"
        if window.pages[page].kind is Kind.TEXT:
            assert any(_holds(message, session.contents.text(page)) for message in prompt), (
                f"law 3: pinned page {page} is not rendered as it was"
            )
    _check_request(session)
    _check_layout(session)
    _check_derived(session)
    if prompt:
        validate_chat(prompt)
        validate_messages(list(session.render("messages")))
    _check_replay(session)


def check_collection(collection: Collection) -> None:
    """Assert the laws of a collection: its ledger rebuilds the stored states, and each page follows from its sources."""
    collection.ledger.flush()
    backend, number = collection.backend, collection.number
    rows = {page.id: (page, state) for page, state in backend.pages(number)}
    assert set(rows) == {*range(1, 1 + sum(page > 0 for page in rows)), *range(-sum(page < 0 for page in rows), 0)}, (
        "pages are not numbered without holes"
    )
    events = list(backend.events(number))
    assert [event.number for event in events] == [*range(1, len(events) + 1)], "law 8: an event is missing"
    window = WindowState(collection.counter)
    for event in events:
        window.enact(event, {page: row[0] for page, row in rows.items()})
    assert window.states == {page: state for page, (_, state) in rows.items()}, "law 8: the stored states differ"
    indexed = {page for (_, page), entries in backend.words.entries((number, page) for page in rows).items() if entries}
    if collection.info.kind is SegmentKind.NOTES:
        names = [page.name for page, state in rows.values() if state.at is Place.OUT]
        assert None not in names, "law 9: a note without a name"
        assert len(set(names)) == len(names), f"law 9: two notes of one name among {sorted(map(str, names))}"
        collection.ledger.refresh()
        assert collection.named() == {page.name: page.id for page, state in rows.values() if state.at is Place.OUT}
    for page, state in rows.values():
        if state.at is Place.DROPPED:
            assert (page.digest, page.cites, page.claim, page.label, page.name) == ("", (), None, "", None), (
                f"law 1: {page.address} is not forgotten whole"
            )
            assert page.id not in indexed, f"law 1: {page.address} is forgotten and in the index"
            continue
        assert backend.contents.texts([page.digest])[page.digest], f"law 1: the text of {page.address} is not there"
        assert state.at in (Place.OUT, Place.RETIRED, Place.PROPOSED), f"{page.address} is {state.at}"
        assert state.at is not Place.PROPOSED or page.id not in indexed, f"law 9: {page.address} waits, and is in the index"
        assert state.at is not Place.OUT or page.id in indexed, f"{page.address} is in force, and not in the index"
        made_from = backend.read([*page.cites, *((number, source) for source in page.sources)])
        assert len(made_from) == len(page.cites) + len(page.sources), f"law 4: a source of {page.address} does not exist"
        for source, where in made_from.values():
            assert where.at is not Place.DROPPED, f"law 1: {page.address} is left of {source.address}, which is forgotten"
            if source.kind is not Kind.ENTITY and page.kind is not Kind.ENTITY:
                assert page.trust <= source.trust, f"law 7: {page.address} is trusted more than its sources"
            assert page.depth > source.depth, f"law 4: wrong depth of {page.address}"


def _holds(message: dict[str, Any], text: str) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(text in (part.get("text"), part.get("refusal")) for part in content)
    return text in (content, message.get("refusal"))


def _check_request(session: Session) -> None:
    """Assert that only the kernel evicts the user's latest message, unless a person forgets or retires it."""
    window = session.window
    texts = [page for page in window.pages.values() if page.role is Role.USER and page.kind is Kind.TEXT]
    messages = [page for page in texts if page.trust >= Trust.USER and not page.is_blank]
    latest = [page.id for page in messages if page.message == max(message.message for message in messages)]
    assert latest == window.request, f"law 3: the latest message is {latest}, and the window holds {window.request}"
    for page in latest:
        if window.at(page) in GONE or any(
            visible.kind is not Kind.FOLD and _is_copy(visible, page) for visible in window.visible()
        ):
            continue
        moves = [
            event
            for event in session.ledger.events()
            if event.act in (Act.EVICT, Act.FOLD) and _touches(event.data, page, window)
        ]
        policy = moves[-1].policy if moves else "nobody"
        assert policy == "kernel", f"law 3: the user's latest message, {page}, was taken from the window by {policy}"


def _is_copy(page: Page, original: int) -> bool:
    return page.id == original or (page.sources == (original,) and page.message > 0)


def _touches(data: Data, page: int, window: WindowState) -> bool:
    members_moved = {number for members in data.get("to", {}).values() for number in members}
    return page in members_moved or any(_is_copy(window.pages[number], page) for number in members_moved)


def _check_layout(session: Session) -> None:
    """Assert that there is one handle for all evicted pages between two resident pages."""
    window = session.window
    walls = sorted((*page.order, page.id) for page in window.pages.values() if window.at(page.id) in (Place.IN, Place.STUB))
    stretches: dict[int, list[int]] = {}
    for page in sorted(page for page in window.pages if page > 0 and window.at(page) == Place.OUT):
        stretches.setdefault(bisect(walls, (page, 0, page)), []).append(page)
    gaps = [(pages[0], pages[-1], len(pages), sum(map(window.cost, pages))) for pages in stretches.values()]
    assert list(window.gaps) == gaps, f"the gaps are {gaps}, not {list(window.gaps)}"
    assert len(gaps) <= len(walls) + 1, "two handles stand side by side"
    assert window.gaps.cost == sum(text_cost(session.counter, window.handle(gap)) for gap in gaps), (
        "law 2: handles cost something else"
    )
    for gap in gaps:
        assert len(session.contents.resolve(span_of(*gap[:2]))) >= gap[2], "law 1: a handle names pages that are not there"


def _check_derived(session: Session) -> None:
    window = session.window
    for page in window.pages.values():
        if page.kind not in (Kind.FOLD, Kind.EXCERPT) or window.at(page.id) == Place.DROPPED:
            continue
        assert page.sources, f"law 4: {page.address} cites nothing"
        assert page.depth == 1 + max(window.pages[source].depth for source in page.sources), "law 4: wrong depth"
        assert page.trust <= min(window.pages[source].trust for source in page.sources), (
            f"law 7: {page.address} is trusted more than its sources"
        )
        if page.kind is Kind.EXCERPT:
            text = session.contents.text(page.id)
            for source, spans in page.parts or ((page.sources[0], page.spans),):
                original = session.contents.text(source)
                assert all(original[start:stop] in text for start, stop in spans), f"law 4: {page.address} is not verbatim"


def _check_replay(session: Session) -> None:
    with session.edits.batch() as kernel:
        kernel.flush()
        _check_rebuilding(session, kernel)


def _check_rebuilding(session: Session, kernel: Kernel) -> None:
    backend, window = session.backend, session.window
    stored_states = {page.id: state for page, state in backend.pages(session.number)}
    replayed = rebuild(backend, kernel.info, session.counter, whole=True)
    _check_rebuilt(session, replayed.window)
    # The ledger lacks observations that could not be written.
    assert kernel.ledger.stats.lost or replayed.usage.pages == kernel.usage.pages, "law 8: the ledger says other uses"
    # The same from the last checkpoint, and from a new one.
    _check_rebuilt(session, rebuild(backend, kernel.info, session.counter).window)
    lineage, ledger, usage = kernel.lineage, Ledger(), Usage(session.counter)
    restored = WindowState(session.counter, PagesById(reader_of(backend, lineage)), Calls(finder_of(backend, lineage)))
    assert restore(checkpoint_of(window, kernel.ledger, kernel.usage), restored, ledger, usage), (
        "law 8: a checkpoint is of no use"
    )
    _check_rebuilt(session, restored)
    assert ledger.report(use=0) == kernel.ledger.report(use=0), "law 8: a checkpoint has other figures"
    assert usage.pages == kernel.usage.pages, "law 8: a checkpoint knows other uses"
    assert usage.calibrated.room(10**6) == kernel.usage.calibrated.room(10**6), "law 8: a checkpoint has another correction"
    own_states = {page: state for page, state in window.states.items() if kernel.lineage.owns(page)}
    assert stored_states == own_states, "law 8: the stored states differ"


def _calls(window: WindowState) -> dict[str, int]:
    return {call: page for call, page in window.calls.items() if window.at(page) is not Place.DROPPED}


def _check_rebuilt(session: Session, rebuilt: WindowState) -> None:
    window = session.window
    positions = ("turn", "spoken_messages", "seen", "last", "last_derived")
    for name in (*positions, "groups", "request", "open", "stubs", "pins", "importance"):
        assert getattr(rebuilt, name) == getattr(window, name), f"law 8: {name} differs"
    assert _calls(rebuilt) == _calls(window), "law 8: other calls"
    assert (rebuilt.shown, rebuilt.folded, rebuilt.gone) == (window.shown, window.folded, window.gone), (
        "law 8: pages are elsewhere"
    )
    assert rebuilt.states == window.states, "law 8: replaying the ledger gives other states"
    assert rebuilt.use == window.use, f"law 8: replaying the ledger gives another use ({rebuilt.use}, not {window.use})"
    assert list(rebuilt.gaps) == list(window.gaps), "law 8: replaying the ledger gives other gaps"
    assert rebuilt.stand_ins == window.stand_ins, "law 8: replaying the ledger gives other folds"
    assert [page.id for page in rebuilt.visible()] == [page.id for page in window.visible()], (
        "law 8: replaying gives another order"
    )
