"""Checkpoints: the state of a session at one event, so that its ledger need not be replayed from the beginning.

A checkpoint is derived from the ledger: with none, or one that cannot be used, everything is replayed. `kilburn fsck` replays
everything and compares (law 8). It has numbers only, no word of a page, so that forgetting need not search it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from kilburn.backend import Backend, SegmentInfo, State
from kilburn.kernel.gaps import Gap
from kilburn.kernel.ledger import Ledger, Stats, Usage
from kilburn.kernel.standing import packed, unpacked
from kilburn.kernel.window import IN, WindowState
from kilburn.page import Place, expanded, stretches
from kilburn.policy import Use

FORM = 1
"""Of another form, everything is replayed."""

Runs = list[int]


class _Checkpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The state of a session. Lists of pages are stretches: first and last of each.

    Args:
        counter: whose tokens these are.
        places: the pages at each place.
        marked: pages that are pinned or important: (id, pinned, importance).
        costs: of the originals, in order; `others` are those of derived pages in the window.
        folds: what each fold stands for, by its id.
        groups: the members of each group, the group's own number first.
        uses: how pages were used.
        ratios, factor: of the calibration.
    """

    form: int
    counter: str
    last: int
    last_derived: int
    turn: int
    said: int
    seen: int
    request: list[int]
    open: dict[int, int]
    places: dict[str, Runs]
    marked: list[tuple[int, bool, float]]
    costs: list[int]
    others: dict[int, int]
    folds: dict[int, Runs]
    groups: list[tuple[int, ...]]
    stubs: dict[int, int]
    gaps: list[Gap]
    uses: list[tuple[int, int, float, Runs]]
    tokenizer: str
    factor: float
    ratios: list[float]
    stats: Stats
    filled: float
    evicted: dict[int, int]
    standing: list[list[int]]
    atomic: Runs
    compactions: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Checkpoint)


def checkpoint_of(window: WindowState, ledger: Ledger, usage: Usage) -> bytes:
    """The state of a session between two batches."""
    places: dict[str, list[int]] = {}
    marked = []
    for page, state in window.states.items():
        places.setdefault(state.at.value, []).append(page)
        if state.pinned or state.importance:
            marked.append((page, state.pinned, state.importance))
    derived = [page for page in window.shown if page < 0]
    return _encode(
        _Checkpoint(
            form=FORM,
            counter=window.counter.name,
            last=window.last,
            last_derived=window.last_derived,
            turn=window.turn,
            said=window.said,
            seen=window.seen,
            request=window.request,
            open=window.open,
            places={at: _runs(pages) for at, pages in places.items()},
            marked=marked,
            costs=[window.cost(page) for page in range(1, window.last + 1)],
            others={page: window.cost(page) for page in derived},
            folds={fold: _runs(window.stand_ins.of(fold)) for fold in window.stand_ins.folds()},
            groups=[(group, *members) for group, members in window.groups.items()],
            stubs=window.stubs,
            gaps=list(window.gaps),
            uses=_uses(usage.pages),
            tokenizer=usage.tokenizer,
            **usage.calibrated.state(),
            **ledger.state(window.turn),
            standing=packed(window.standing),
            atomic=_runs(window.atomic),
            compactions=window.compactions,
        )
    )


def _runs(pages: Iterable[int]) -> Runs:
    return stretches(sorted(pages))


def _uses(uses: Mapping[int, Use]) -> list[tuple[int, int, float, Runs]]:
    """How pages were used, those with the same use together."""
    pages_by_use: dict[Use, list[int]] = {}
    for page, use in uses.items():
        pages_by_use.setdefault(use, []).append(page)
    return [(use.count, use.turn, use.time, _runs(pages)) for use, pages in pages_by_use.items()]


def restore(data: bytes, window: WindowState, ledger: Ledger, usage: Usage) -> bool:
    """Give an empty window, with its pages and calls, the state of a checkpoint; and the ledger's figures, and how pages were
    used. False where it cannot be used: another counter's, or of another form; then nothing has changed.

    Raises:
        StoreCorrupt: a page that is in the window cannot be read.
    """
    try:
        checkpoint = _decoder.decode(data)
        states = _states(checkpoint)
        folds = {fold: set(expanded(runs)) for fold, runs in checkpoint.folds.items()}
        standing = unpacked(checkpoint.standing)
        uses: dict[int, Use] = {}
        for count, turn, time, runs in checkpoint.uses:
            uses.update(dict.fromkeys(expanded(runs), Use(count, turn, time)))
        atomic = expanded(checkpoint.atomic)
        sound = all(0 < page <= checkpoint.last for page in (*standing, *atomic, *checkpoint.compactions))
        sound = (
            sound
            and checkpoint.form == FORM
            and len(checkpoint.costs) == checkpoint.last
            and len(states) == checkpoint.last - checkpoint.last_derived
        )
    except (msgspec.MsgspecError, ValueError, LookupError):
        return False
    if not sound or checkpoint.counter != window.counter.name:
        return False
    window.last, window.last_derived, window.turn = checkpoint.last, checkpoint.last_derived, checkpoint.turn
    window.said, window.seen, window.request, window.open = checkpoint.said, checkpoint.seen, checkpoint.request, checkpoint.open
    window.standing, window.atomic, window.compactions = standing, list(atomic), checkpoint.compactions
    window.pages.settle(checkpoint.last_derived, checkpoint.last)
    window.costs = dict(enumerate(checkpoint.costs, 1)) | checkpoint.others
    window.groups = {group: members for group, *members in checkpoint.groups}
    window.adopt(states, folds, checkpoint.stubs, checkpoint.gaps)
    usage.pages.update(uses)
    usage.tokenizer = checkpoint.tokenizer
    usage.calibrated.adopt(checkpoint.factor, checkpoint.ratios)
    ledger.adopt(checkpoint.stats, checkpoint.filled, checkpoint.evicted)
    return True


_COUNTED = ("stats", "filled", "evicted")

_Glance: Any = msgspec.defstruct(
    "_Glance",
    [(field.name, field.type if field.name in _COUNTED else msgspec.Raw) for field in msgspec.structs.fields(_Checkpoint)],
    array_like=True,
)
"""A checkpoint of which everything but the figures is passed over."""


def figures_of(backend: Backend, info: SegmentInfo) -> tuple[Stats, int]:
    """Return the figures of a session from its newest checkpoint and the events since, and how many events that took. No page is
    read, and the session is not opened.

    Raises:
        StoreError: the ledger cannot be read. LookupError, TypeError, ValueError: an event makes no sense.
    """
    ledger, head, use = Ledger(), 0, 0
    checkpoint = backend.checkpoint(info.number)
    if checkpoint is not None:
        with suppress(msgspec.MsgspecError):  # of another form
            figures = msgspec.msgpack.decode(checkpoint[1], type=_Glance)
            ledger.adopt(figures.stats, figures.filled, figures.evicted)
            head = checkpoint[0]
    # The last event of the checkpoint says what the window holds.
    begin = max(0, head - 1)
    for event in islice(backend.events(info.number, begin), max(0, info.head - begin)):
        if event.number > head:
            ledger.count(event)
        use = event.tokens
    return ledger.report(use=use), info.head - head


def _states(checkpoint: _Checkpoint) -> dict[int, State]:
    states: dict[int, State] = {}
    for at, runs in checkpoint.places.items():
        state = IN if at == Place.IN else State(at=Place(at))
        states.update(dict.fromkeys(expanded(runs), state))
    for page, pinned, importance in checkpoint.marked:
        states[page] = State(at=states[page].at, pinned=pinned, importance=importance)
    return states
