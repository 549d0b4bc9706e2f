"""Receipts: what each compaction took out of the window, why, by which policy, and how to get it back.

They are read from the ledger alone, so a reopened session has them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.effect import Outcome
from kilburn.event import Act, Event
from kilburn.page import Place, address_of, span_of

MOVES = frozenset({Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE})


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One compaction, or moves of the kernel or of a person.

    Args:
        turn: the last admitted message; `time` is in seconds since the epoch.
        events: numbers of its first and last event in the ledger.
        policy: who did it: a policy's spec, its class's name in lower case, "compact on demand", "kernel" or "user"; `cause` is
            why it was asked.
        outcome: DONE if the moves were carried out, NO_PROGRESS if they freed nothing in a window that was too full, else what
            went wrong; see `Outcome`. A word that is none of these was written by another version.
        why: the reasons of the moves, and what the policy noted, joined by "; "; of a summary, how it was made.
        left: addresses of what left the window or was folded, in ranges; each can be recalled. What a fold cites, and had left
            before, is not among them.
        folds: addresses of what stands in their place.
        brought: addresses of copies of passages whose pages stayed where they are (see `kilburn.move.Bring`).
        back: addresses of pages that came back.
        freed: tokens by which the window shrank; `added`: by which it grew. One of them is 0.
        asked: outcomes of the model's answers.
        figures: the policy's own counts.
    """

    turn: int
    time: float
    policy: str
    cause: str
    outcome: Outcome | str
    why: str = ""
    left: tuple[str, ...] = ()
    folds: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    freed: int = 0
    added: int = 0
    asked: tuple[str, ...] = ()
    figures: dict[str, int] = {}
    events: tuple[int, int] = (0, 0)


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What would leave a window now, and at which price.

    Args:
        receipts: of the compactions that would be made; no page that they would make has its address yet.
        use: tokens of the prompt now; `after` then, without the tokens that were asked about.
        capacity: tokens that the prompt may take.
        again: tokens of `after` that a provider would process again, because its cache of prefixes does not have them.
        asks: questions that a model would be asked. In their place the policy did what it does without one.
    """

    receipts: tuple[Receipt, ...] = ()
    use: int
    after: int
    capacity: int
    again: int = 0
    asks: int = 0


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How one prompt of a session differs from an earlier one.

    Args:
        before, after: tokens of the two.
        kept: tokens of the beginning that they share: what a provider's cache of prefixes serves.
        left: addresses of pages that only the first shows.
        came: addresses of pages that only the second shows.
        changed: addresses of pages of which one shows the whole and the other a line that stands for it.
    """

    before: int
    after: int
    kept: int
    left: tuple[str, ...] = ()
    came: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def receipts(events: Iterable[Event], use: int = 0) -> Iterator[Receipt]:
    """Yield the receipts of a ledger, oldest first. A part of a ledger must not begin in the middle of a receipt.

    Args:
        use: tokens in the window before the first of these events.
    """
    moves: list[Event] = []
    for event in events:
        if event.act in MOVES:
            if moves and (event.policy == "user" or _whose(moves[-1]) != _whose(event)):
                yield _receipt(moves, moves[-1], use)
                use, moves = moves[-1].tokens, []
            moves.append(event)
            continue
        if event.act is Act.COMPACT:
            if moves and moves[-1].policy != event.policy:
                # The kernel cut what cannot fit before it asked the policy.
                yield _receipt(moves, moves[-1], use)
                moves = []
            yield _receipt(moves, event, use)
            moves = []
        elif moves and event.act is not Act.REFUSE:
            yield _receipt(moves, moves[-1], use)
            moves = []
        use = event.tokens
    if moves:
        yield _receipt(moves, moves[-1], use)


def _whose(event: Event) -> tuple[str, str, int]:
    """What the moves of one receipt have in common. So a call that a late result brought back (kernel, "admit") is apart from
    evictions under pressure."""
    return event.policy, event.cause, event.turn


def _receipt(moves: list[Event], last: Event, use: int) -> Receipt:
    """The receipt of some moves, up to their COMPACT event, or the last of them if there is none."""
    moved = [entry for event in moves if event.act is not Act.LOAD for entry in event.data.get("to", {}).items()]
    leaving = {page for place, pages in moved if place != Place.IN for page in pages}
    back = {page for event in moves for page in event.pages if event.act is Act.LOAD}
    data: Mapping[str, Any] = last.data if last.act is Act.COMPACT else {}
    why = [event.why for event in [*moves, last] if event.why]
    freed = figure if isinstance(figure := data.get("freed"), int) else use - last.tokens
    return Receipt(
        turn=last.turn,
        time=last.time,
        policy=last.policy,
        cause=last.cause,
        outcome=_outcome_of(data),
        why="; ".join(dict.fromkeys(why)),
        left=ranges(leaving),
        folds=tuple(address_of(event.data["fold"]) for event in moves if "fold" in event.data and not _is_copy(event)),
        brought=tuple(address_of(event.data["fold"]) for event in moves if _is_copy(event)),
        back=ranges(back),
        freed=max(0, freed),
        added=max(0, -freed),
        asked=tuple(data.get("asked", ())),
        events=((moves or [last])[0].number, last.number),
        figures={key: value for key, value in data.items() if key not in ("outcome", "freed", "moves", "asked", "raised")},
    )


def newest_moves(events: Sequence[Event]) -> tuple[Receipt | None, set[int], set[int]]:
    """Return the newest compaction that is not undone yet, the pages that it moved or made, and the pages that the kernel moved
    since because a result came late. What only retires pages cannot be undone.

    Args:
        events: the whole ledger of a session.
    """
    undone = {int(event.data["undoes"]) for event in events if "undoes" in event.data}
    since = set[int]()
    for receipt in reversed(list(receipts(events))):
        moves = [event for event in events[receipt.events[0] - 1 : receipt.events[1]] if event.act in MOVES - {Act.RETIRE}]
        if not moves or receipt.events[1] in undone or any("undoes" in event.data for event in moves):
            continue
        moved_pages = {page for event in moves for page in _moved_by(event)}
        if (receipt.policy, receipt.cause) != ("kernel", "admit"):
            return receipt, moved_pages, since
        # A late result brought its call back, or left with it.
        since |= moved_pages
    return None, set(), since


def _moved_by(event: Event) -> Iterator[int]:
    """The pages whose place, or whose stand-in, an event changed, and the one that it made."""
    data = event.data
    for pages in data.get("to", {}).values():
        yield from pages
    yield from data.get("uncover", ())
    if "fold" in data:
        yield data["fold"]
        yield from data.get("cover", event.pages)


def _is_copy(event: Event) -> bool:
    """Whether it made a page that stands for nothing, so that nothing left."""
    return "fold" in event.data and not event.data.get("cover", event.pages)


def _outcome_of(data: Mapping[str, Any]) -> Outcome | str:
    word = str(data.get("outcome", Outcome.DONE))
    return next((outcome for outcome in Outcome if outcome == word), word)


def ranges(pages: Iterable[int]) -> tuple[str, ...]:
    """Addresses of pages, with neighbours joined into ranges."""
    spans: list[tuple[int, int]] = []
    for page in sorted(pages):
        first, last = spans[-1] if spans else (0, 0)
        if page > 1 and first > 0 and page == last + 1:
            spans[-1] = first, page
        else:
            spans.append((page, page))
    return tuple(span_of(first, last) if first < last else address_of(last) for first, last in spans)
