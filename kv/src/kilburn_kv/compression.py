"""Applies a press to a sequence: collects what the press sees, keeps what it chooses, and drops the rest from the cache.

If all heads keep the same tokens, the others are evicted, and every token that stays keeps its position and its page.
If each head chooses for itself, the kept entries are packed together and no longer stand for single tokens. Such a
sequence has no pages any more, and cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kilburn.errors import KVError, OutOfBlocks, SpecError
from kilburn_kv.engine import Engine
from kilburn_kv.lineage import Alteration
from kilburn_kv.observation import CachedPage, Observation, Press, Selection
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.storage import numbers_of, span_of
from kilburn_kv.tensors import Tensor, torch

NOTHING: Mapping[int, CachedPage] = {}


def observe(engine: Engine, sequence: CachedSequence, press: Press, facts: Mapping[int, CachedPage] = NOTHING) -> Observation:
    """What a press sees of a sequence; `facts` says for each page what is known besides its range.

    Raises:
        SpecError: the press needs attention that was not observed.
    """
    table, device, needs = sequence.table, engine.weights.device, press.needs
    slots = table.slots()
    watch = sequence.watch
    if ("attention" in needs and (watch is None or not watch.sums)) or (
        "recent" in needs and (watch is None or watch.rows < press.recent)
    ):
        raise SpecError(
            f"{type(press).__name__.lower()} has to see {' and '.join(sorted(needs - {'keys'}))}, and sequence"
            f" {sequence.number} was opened without noting it",
            advice="open it with needs=press.needs, recent=press.recent",
        )
    positions = numbers_of(slots.logical, device)
    keys = None
    if "keys" in needs:
        engine.storage.perform(engine.tables.copies)
        keys = engine.storage.gather(span_of(slots.physical, device))[0]
    shifts = None
    if sequence.shifts:
        shifts = torch.tensor([sequence.shifts.get(place, 0) for place in slots.logical], dtype=torch.int64, device=device)
    pages = []
    for page, (start, stop) in table.pages.items().items():
        first, last = table.count(0, start), table.count(0, stop)
        pages.append(replace(facts.get(page, CachedPage(page, 0, 0)), start=first, stop=last))
    return Observation(
        positions=positions,
        end=table.end,
        keys=keys,
        attention=watch.received if watch is not None and "attention" in needs else None,
        queries=watch.queries if watch is not None and "attention" in needs else None,
        recent=watch.recent[:, :, -press.recent :] if watch is not None and "recent" in needs else None,
        pages=tuple(pages),
        shifts=shifts,
    )


def compress(
    engine: Engine, sequence: CachedSequence, press: Press, budget: int, facts: Mapping[int, CachedPage] = NOTHING
) -> int:
    """Keep at most `budget` tokens of a sequence, chosen by a press; returns how many left. If all fit, the sequence
    stays exact.

    Raises:
        BudgetTooSmall: what must stay does not fit. OutOfBlocks: so much is shared that new blocks are needed.
            SpecError: see `observe`, or the press did not return a valid selection. KVError: it would rotate keys
            that no longer stand for single positions. UnsupportedModel: it would rotate keys of an architecture whose
            keys cannot be rotated. In all cases nothing was dropped.
    """
    seen = observe(engine, sequence, press, facts)
    chosen = press.keep(seen, budget)
    _check_selection(engine, sequence, seen, chosen, press)
    before = seen.count
    if chosen.keep.dim() == 1:
        if len(chosen.keep) < before or chosen.shift is not None:
            _drop(engine, sequence, seen, chosen)
    elif chosen.keep.shape[-1] < before:
        _pack(engine, sequence, chosen.keep)
    return before - len(sequence)


def _check_selection(engine: Engine, sequence: CachedSequence, seen: Observation, chosen: Selection, press: Press) -> None:
    """A press may be foreign code. An invalid selection would drop the wrong tokens."""
    keep, shift, shape = chosen.keep, chosen.shift, engine.weights.shape
    sound = keep.dtype == torch.int64 and (keep.dim() == 1 or tuple(keep.shape[:-1]) == (shape.layers, shape.heads))
    if sound and keep.numel():
        sound = bool((keep[..., 0] >= 0).all()) and bool((keep[..., -1] < seen.count).all())
        sound = sound and bool((keep[..., 1:] > keep[..., :-1]).all())
    if not sound or (shift is not None and (keep.dim() != 1 or shift.shape != keep.shape)):
        raise SpecError(
            f"{type(press).__name__.lower()} chose no tokens of the {seen.count} that are cached",
            advice="give indices that ascend, for all heads or [layers, heads, k], as int64; shifts as many",
        )
    if shift is not None:
        engine.weights.check_rotation()
    if shift is not None and Alteration.COMPRESSED in sequence.table.altered:
        raise KVError(
            f"sequence {sequence.number} was packed: its keys have no single positions to be rotated from",
            advice="use a press that does not rotate, such as streaming(rotate=False)",
        )


def _drop(engine: Engine, sequence: CachedSequence, seen: Observation, chosen: Selection) -> None:
    turn = chosen.turn(seen)
    turned: list[tuple[int, int]] = []
    if turn is not None and chosen.shift is not None:
        places = seen.positions[chosen.keep].tolist()
        turned = [(place, by) for place, by in zip(places, turn.tolist(), strict=True) if by]
    if turned:
        # Shared tokens are rotated in new slots, which have to be available before anything leaves.
        slots, references = _slots(sequence, turned, engine.weights.device), engine.pool.references
        engine.reserve(sum(references[block] > 1 for block in {slot // engine.pool.size for slot in slots.tolist()}), [sequence])
    _evict_all_but(sequence, chosen.keep)
    if turned and chosen.shift is not None:
        _turn(engine, sequence, turned)
        sequence.shifts = dict(zip(seen.positions[chosen.keep].tolist(), chosen.shift.tolist(), strict=True))
        sequence.shifts = {place: by for place, by in sequence.shifts.items() if by}
        sequence.first = {place: key for place, key in sequence.first.items() if place in sequence.shifts}
    try:
        sequence.table.defragment()
    except OutOfBlocks:
        # So much is shared that closing the gaps would need new blocks: the gaps stay open until the others leave.
        return


def _evict_all_but(sequence: CachedSequence, keep: Tensor) -> None:
    table = sequence.table
    places = table.slots().logical
    # Runs of tokens that leave, the last first, so that earlier indices stay valid.
    borders = [-1, *keep.tolist(), len(places)]
    for left, right in zip(reversed(borders[:-1]), reversed(borders[1:]), strict=True):
        if right - left > 1:
            table.evict(places[left + 1], places[right - 1] + 1)
    if sequence.watch is not None:
        sequence.watch.select(keep)


def _turn(engine: Engine, sequence: CachedSequence, turns: list[tuple[int, int]]) -> None:
    """Rotate the keys at logical positions by so many; sequences that share them keep the old keys."""
    table, storage, device = sequence.table, engine.storage, engine.weights.device
    storage.perform(engine.tables.copies)
    keys, values = storage.gather(_slots(sequence, turns, device))
    first, gone = sequence.first, {place: sequence.shifts.get(place, 0) for place, _ in turns}
    for row, (place, _) in enumerate(turns):
        if place not in first or place not in sequence.shifts:
            first[place] = (gone[place], keys[:, :, row].clone())
    # Always from the first keys: in bfloat16 the errors of many small rotations add up.
    keys = torch.stack([first[place][1] for place, _ in turns], dim=2)
    by = torch.tensor([gone[place] + shift - first[place][0] for place, shift in turns], device=device)
    slots = table.renew([place for place, _ in turns])
    storage.perform(engine.tables.copies)
    storage.scatter(span_of(slots, device), engine.weights.rotate(keys, by), values)


def _slots(sequence: CachedSequence, turns: list[tuple[int, int]], device: torch.device) -> Tensor:
    physical = sequence.table.slots().physical
    return torch.tensor([physical[sequence.table.count(0, place)] for place, _ in turns], device=device)


def _pack(engine: Engine, sequence: CachedSequence, keep: Tensor) -> None:
    storage, table = engine.storage, sequence.table
    storage.perform(engine.tables.copies)
    keys, values = storage.gather(span_of(table.slots().physical, engine.weights.device))
    index = keep[..., None].expand(-1, -1, -1, keys.shape[-1])
    slots = engine.take_slots(sequence, lambda: table.pack(keep.shape[-1]))
    sequence.packed = table.end
    storage.scatter(span_of(slots, engine.weights.device), keys.gather(2, index), values.gather(2, index))
    if sequence.watch is not None:
        sequence.watch.select(keep)
