"""Compaction on demand, for a client that wants room before the policy makes it.

With `compact`, a model writes the summary, and the kernel puts it in place. With `compact_at_provider`, the provider returns one
signed block, which is sent first from then on. Both are atomic: nothing changes until the summary has arrived. Both raise while
a tool call waits for its result, as the provider does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.effect import Outcome
from kilburn.errors import Forgotten, LawBroken, ModelError, Refused
from kilburn.event import Act, Event
from kilburn.kernel.receipts import Preview
from kilburn.kernel.render import to_send
from kilburn.kernel.session import Session
from kilburn.model import Model, Request, ToolSpec, complete
from kilburn.move import Evict
from kilburn.page import address_of
from kilburn.policies.compact import Compact, behind
from kilburn.wire.compaction import compaction_block, put_block_first
from kilburn.wire.editing import SummarizeRequest, write

__all__ = ["compact"]

NAME = "compact on demand"


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a compaction.

    Args:
        outcome: DONE, or why nothing changed.
        address: address of the summary, or "".
        freed: freed tokens of the window.
        why: the reason in words, or "".
    """

    outcome: Outcome
    address: str = ""
    freed: int = 0
    why: str = ""


def compact(
    session: Session,
    model: Model | None,
    *,
    instructions: str | None = None,
    keep: int = 2,
    to: int | None = None,
    pages: str | None = None,
) -> Compaction:
    """Summarise the window of a session now, whatever its policy is.

    Args:
        model: writes the summary; None takes the most informative lines verbatim.
        instructions: a prompt in place of the default one.
        keep: newest messages that stay unchanged; the last one always does.
        to: tokens of the summary (see `Compact`).
        pages: address of a range; only its pages are summarised.

    Raises:
        LawBroken: a tool call has no result yet; nothing changed. UnknownAddress, Forgotten: of `pages`.
    """
    _check_no_open_call(session)
    return _outcome(session.edits.compact(_policy(session, pages, instructions=instructions, keep=keep, to=to), NAME, model))


def preview(session: Session, *, keep: int = 2, to: int | None = None, pages: str | None = None) -> Preview:
    """Preview what `compact` would do without a model. Nothing changes, and nothing is recorded.

    Raises:
        LawBroken: a tool call has no result yet. UnknownAddress, Forgotten: of `pages`.
    """
    _check_no_open_call(session, records=False)
    return session.edits.preview(by=_policy(session, pages, keep=keep, to=to))


def _policy(session: Session, pages: str | None, **options: Any) -> Compact:
    chosen = session.contents.resolve(pages) if pages is not None else None
    return Compact(pages=(chosen[0], chosen[-1]) if chosen else None, idle=True, **options)


def _check_no_open_call(session: Session, *, records: bool = True) -> None:
    with session.lock:
        waiting = session.window.waiting()
    if not waiting:
        return
    if records:
        session.ledger.record(
            Act.COMPACT, policy=NAME, cause="user", outcome=Outcome.REJECTED, why="a tool call has no result yet"
        )
    raise LawBroken(6, f"{address_of(waiting[0])} is a call without a result yet", advice="append its result, then compact")


def _outcome(events: Sequence[Event]) -> Compaction:
    """Read the result of a compaction from its events."""
    address = ""
    for event in events:
        if event.act is Act.FOLD and "fold" in event.data:
            address = address_of(event.data["fold"])
        if event.act is Act.COMPACT:
            return Compaction(
                outcome=Outcome(event.data["outcome"]), address=address, freed=event.data.get("freed", 0), why=event.why
            )
    return Compaction(outcome=Outcome.NO_PROGRESS, why="nothing that may leave is worth a summary")


def compact_at_provider(
    session: Session, model: Model, *, instructions: str | None = None, keep: int = 2, tools: tuple[ToolSpec, ...] = ()
) -> Compaction:
    """Let the provider summarise the window of a session now (`compaction: {"type": "summarize"}`).

    The block is appended, with all pages of the prompt as its sources, and the pages that it replaces are evicted. Send the next
    prompt with `kilburn.models.editing.Editing`, which puts the block first. Pages that were appended in the meantime stay. The
    newest messages are part of the summary, and stay too.

    Args:
        model: a model of the "messages" form.
        keep: newest messages that stay unchanged.
        tools: tools of the conversation; the provider requires them if it has calls.

    Raises:
        LawBroken: a tool call has no result yet; nothing changed. EmptyPrompt: there is nothing to summarise.
    """
    _check_no_open_call(session)
    with session.lock:
        prompt, turn = to_send(session.render("messages")), session.window.turn
    form = write(SummarizeRequest(instructions=instructions) if instructions else SummarizeRequest())
    request = Request(
        messages=put_block_first(prompt), system=prompt.system, tools=tools, max_tokens=4096, options={"compaction": form}
    )
    try:
        reply = complete(model, request)
    except Refused as error:
        return _record(session, Compaction(outcome=Outcome.REFUSED, why=type(error).__name__))
    except ModelError as error:
        return _record(session, Compaction(outcome=Outcome.FAILED, why=type(error).__name__))
    block = compaction_block(reply.message)
    if block is None or len(reply.message.parts) != 1:
        return _record(session, Compaction(outcome=Outcome.REJECTED, why="the reply is not exactly one compaction block"))
    if not block.stands:
        return _record(session, Compaction(outcome=Outcome.FAILED, why="the provider's compaction gave nothing"))
    try:
        address = session.append(msgspec.structs.replace(reply.message, sources=prompt.pages))
    except Forgotten:
        # The block may contain text that was forgotten in the meantime.
        return _record(session, Compaction(outcome=Outcome.FAILED, why="a page that it was made from was forgotten"))
    old_use = session.prompts.use
    with session.lock:
        leaving = behind(session.edits.view(), turn - keep)
        if leaving:
            session.edits.apply(Evict(pages=leaving, why="the provider's summary stands for it"))
    return _record(session, Compaction(outcome=Outcome.DONE, address=address, freed=old_use - session.prompts.use))


def _record(session: Session, compaction: Compaction) -> Compaction:
    # The eviction has a receipt of its own, with what it freed.
    session.ledger.record(Act.COMPACT, policy=NAME, cause="user", outcome=compaction.outcome, freed=0, why=compaction.why)
    return compaction
