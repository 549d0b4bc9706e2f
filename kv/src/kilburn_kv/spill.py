"""Writes keys and values to disk and restores them bit for bit: of a sequence, or of one of its pages.

A sequence comes back as it was, whatever was done to it: with its gaps, pages and evictions, and the logits of the
next token. A page comes back as it was in its own gap, and only approximately at another place; the result says
which. A file of another model, dtype or tenant is a miss, and so is a file that changed. Nothing is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from kilburn.errors import InvalidRange, KVError
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.page import Place
from kilburn_kv.engine import Engine
from kilburn_kv.lineage import Alteration, TableLineage, context
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.shelf import Shelf
from kilburn_kv.spill_file import Contents, Draft, Header, Miss, PageHeader, SequenceHeader, Why
from kilburn_kv.storage import Span, span_of
from kilburn_kv.table import Table
from kilburn_kv.tensors import Tensor, torch
from kilburn_kv.watch import AttentionWatch

__all__ = ["Spill", "preempt", "resume"]


class Spilled(msgspec.Struct, frozen=True):
    """A file on disk.

    Args:
        address: identifies it, in any process: the SHA-256 of its contents, hex.
        bytes: size of the file.
        tokens: how many tokens' keys and values it has.
    """

    address: str
    bytes: int
    tokens: int


class RestoredPage(msgspec.Struct, frozen=True):
    """A page that is cached again.

    Args:
        page: its id.
        start: its first logical position now.
        stop: behind its last.
        exact: whether the cache has for it what it would have if it had never left. True only if tokens and evictions
            prove it.
        why: why it is not exact, in words; empty if it is.
    """

    page: int
    start: int
    stop: int
    exact: bool
    why: str = ""


class Spill:
    """Saves sequences and pages of engines to a folder, and restores them.

    Args:
        folder: created if it is missing.
        limit_bytes: see `Shelf`: the least recently used files are deleted first.

    Attributes:
        shelf: the files: their pins and sizes, and `drop` to delete one.

    Raises:
        SpillFailed: the folder cannot be created.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None) -> None:
        self.shelf = Shelf(folder, limit_bytes)
        self._windows: dict[str, Session] = {}

    def attend(self, session: Session) -> list[str]:
        """From now on, files with what a session forgets are removed here too; returns the addresses of files that are
        removed at once.

        These are files with pages that were forgotten before. Later removals are in the process's ledger (`note`,
        with `how` "forgotten" and the addresses as `files`). Files of sequences that no `Residence` keeps stay.

        Raises:
            SpillFailed: some files could not be removed.
        """
        owner = owner_of(session)
        self._windows[owner] = session

        def erase(pages: Collection[int]) -> None:
            gone = self.shelf.forget(owner, pages)
            if gone:
                why = "spilled keys and values were removed"
                session.ledger.record(Act.NOTE, pages, policy="kernel", why=why, how="forgotten", files=gone)

        session.erasers[f"spilled to {self.shelf.folder.resolve()}"] = erase
        forgotten = _forgotten_pages(session)
        return self.shelf.forget(owner, forgotten) if forgotten else []

    def save(self, engine: Engine, sequence: CachedSequence, *, pin: bool = False) -> Spilled:
        """Write a sequence to disk; it stays in the cache as it is.

        Raises:
            SpillFailed: the disk or the limit does not allow it; nothing of it is left there. KVError: it contains
                what its session has forgotten (see `attend`). FreedSequence.
        """
        table, watch = sequence.table, sequence.watch
        self._check_forgotten(sequence, table.end)
        slots = table.slots()
        first = dict(sorted(each for each in sequence.first.items() if each[0] in sequence.shifts))
        header = SequenceHeader(
            key=engine.identity,
            tokens=table.tokens.tolist(),
            cached=_runs(slots.logical),
            evictions=list(table.evictions),
            pages=table.pages.items(),
            altered=table.altered,
            shifts=sequence.shifts,
            first={place: shift for place, (shift, _) in first.items()},
            owners=sorted(sequence.owners),
            stood=table.stood,
            shared=table.key is not None,
            watch=(watch.sums, watch.rows) if watch is not None else None,
        )
        drafts = [_draft_kv(engine, slots.physical), *_draft_firsts(first)]
        if sequence.logits is not None:
            drafts.append(_draft("logits", sequence.logits))
        if watch is not None:
            drafts += [_draft("received", watch.received), _draft("queries", watch.queries), _draft("recent", watch.recent)]
        return self._write_file(header, drafts, len(slots.logical), pin)

    def restore(self, engine: Engine, spilled: Spilled | str) -> CachedSequence | Miss:
        """A new sequence equal to the saved one, including its logits; in any engine of the same weights.

        Every byte is checked before a block is allocated. If blocks run out, other sequences are preempted.

        Raises:
            OutOfBlocks: nothing was restored.
        """
        found = self._read_file(engine, spilled)
        if isinstance(found, Miss):
            return found
        header, tensors = found
        if not isinstance(header, SequenceHeader):
            return Miss(Why.ABSENT, "there is a page at this address, and no sequence")
        made = CachedSequence(_adopt(engine, header, tensors, 0))
        _equip(engine, made, header, tensors)
        engine.sequences[made.number] = made
        return made

    def save_page(self, engine: Engine, sequence: CachedSequence, page: int, *, pin: bool = False) -> Spilled:
        """Write the keys and values of a page's positions to disk; they stay in the cache as they are.

        Raises:
            InvalidRange: the page has no range, or part of it was evicted. SpillFailed, KVError, FreedSequence: see `save`.
        """
        table, watch = sequence.table, sequence.watch
        start, stop = table.pages[page]
        self._check_forgotten(sequence, stop)
        first, last = table.count(0, start), table.count(0, stop)
        if last - first < stop - start:
            raise InvalidRange(f"{stop - start - last + first} positions of page {page} were evicted", advice="save it before")
        firsts = dict(sorted(each for each in sequence.first.items() if start <= each[0] < stop and each[0] in sequence.shifts))
        told = all(since >= stop for why, since in table.altered.items() if why != Alteration.EVICTED)
        header = PageHeader(
            key=engine.identity,
            tokens=table.tokens[start:stop].tolist(),
            page=page,
            start=start,
            context=context(table.tokens[:stop], table.evictions) if told else "",
            shifts={place: by for place, by in sequence.shifts.items() if start <= place < stop},
            first={place: shift for place, (shift, _) in firsts.items()},
            owners=sorted(sequence.owners),
            stood={other: place for other, place in table.stood.items() if place < stop},
        )
        drafts = [_draft_kv(engine, table.slots(first).physical[: stop - start]), *_draft_firsts(firsts)]
        if watch is not None:
            drafts.append(_draft("received", watch.received[..., first:last]))
            drafts.append(_draft("queries", watch.queries[first:last]))
        return self._write_file(header, drafts, stop - start, pin)

    def restore_page(
        self, engine: Engine, sequence: CachedSequence, spilled: Spilled | str, position: int | None = None
    ) -> RestoredPage | Miss:
        """Put a page's keys and values back, into a gap of a sequence or at its end; nothing is computed.

        At its own position they are what they were, bit for bit. At another position the keys are rotated, and the
        page is approximate, because it still depends on what it attended to at its old place. After a different past
        it is approximate too. Restore several pages of one sequence from last to first: a page is not called exact if
        something was inserted before it.

        Args:
            position: where it begins; None for where it was.

        Raises:
            InvalidRange: something is cached there, or belongs to a page, or the sequence is shorter.
            UnsupportedModel: at another position, of a model whose keys cannot be rotated.
            OutOfBlocks, FreedSequence: nothing was put back.
        """
        table = sequence.table
        found = self._read_file(engine, spilled)
        if isinstance(found, Miss):
            return found
        part, tensors = found
        if not isinstance(part, PageHeader):
            return Miss(Why.ABSENT, "there is a sequence at this address, and no page")
        start = part.start if position is None else position
        stop = start + len(part.tokens)
        if start != part.start:
            engine.weights.check_rotation()
        held = table.pages.over(max(0, start), max(0, stop))
        if part.page in table.pages or held:
            taken = held[0] if held else part.page
            raise InvalidRange(
                f"page {part.page} cannot be put at {start}: page {taken} has {table.pages[taken]}",
                advice="evict what is left of that first",
            )
        why = _difference(part, table, start)
        behind = start == table.end
        slots = engine.take_slots(sequence, lambda: table.append(part.tokens) if behind else table.insert(start, part.tokens))
        try:
            _fill_page(engine, sequence, part, tensors, slots, start)
        except BaseException:
            table.evict(start, stop)
            raise
        if why:
            table.alter(Alteration.BLENDED, start)
        elif behind and table.key is not None and not table.altered:
            table.publish()
        if behind:
            sequence.logits = None
        table.label(part.page, start, stop)
        for page in part.stood:
            table.stood[page] = min(start, table.stood.get(page, start))
        sequence.owners |= frozenset(part.owners)
        return RestoredPage(part.page, start, stop, not why, why)

    def _check_forgotten(self, sequence: CachedSequence, stop: int) -> None:
        """Raise if the sequence still contains something forgotten, which must not be written to disk."""
        for owner in sequence.owners & self._windows.keys():
            forgotten = _forgotten_pages(self._windows[owner])
            held = [page for page, start in sequence.table.stood.items() if start < stop and page in forgotten]
            if held:
                raise KVError(
                    f"sequence {sequence.number} was computed in sight of page {held[0]}, which is forgotten",
                    advice="let its residence follow the window first",
                )

    def _write_file(self, header: Header, drafts: list[Draft], tokens: int, pin: bool) -> Spilled:
        # What storage reads into may have been made by a step, and can be written only as a step does.
        with torch.inference_mode():
            address, size = self.shelf.put(header, drafts, pin=pin)
        return Spilled(address, size, tokens)

    def _read_file(self, engine: Engine, spilled: Spilled | str) -> Contents | Miss:
        address = spilled.address if isinstance(spilled, Spilled) else spilled
        found = self.shelf.get(address, engine.identity)
        if isinstance(found, Miss):
            return found
        header, tensors = found
        shape, kv = engine.weights.shape, tensors.get("kv")
        count = sum(stop - start for start, stop in header.cached) if isinstance(header, SequenceHeader) else len(header.tokens)
        if kv is None or kv.shape != (shape.layers, 2, shape.heads, count, shape.dim) or kv.dtype != engine.weights.dtype:
            return Miss(Why.CORRUPT, f"{address} does not hold the keys and values that it says")
        keys = tensors.get("first")
        if header.first and (keys is None or keys.shape != (shape.layers, shape.heads, len(header.first), shape.dim)):
            return Miss(Why.CORRUPT, f"{address} does not hold the first keys that it says")
        return found


def preempt(engine: Engine, sequence: CachedSequence, spill: Spill) -> Spilled | None:
    """Free a sequence's blocks, whatever was done to it; `resume` restores it.

    Returns the spilled file (pinned until then), or None if the sequence can be computed again instead.

    Raises:
        SpillFailed: it keeps its blocks. FreedSequence.
    """
    table = sequence.table
    if table.recomputable and sequence.watch is None:
        engine.preempt(sequence)
        return None
    spilled = spill.save(engine, sequence, pin=True)
    lineage = table.lineage()
    engine.tables.free(table)
    # The watch stays on the sequence: that it has one is why it may not be computed again.
    sequence.detach(lineage)
    return spilled


def resume(engine: Engine, sequence: CachedSequence, spill: Spill, spilled: Spilled | None) -> Miss | None:
    """Restore what `preempt` took, as the same object. The file is removed if it has no other pin.

    Returns a miss if the file is damaged or gone: the sequence then stays preempted, and can only be freed.

    Raises:
        OutOfBlocks: it stays preempted. KVError: it is not this sequence's file.
    """
    lineage = sequence.lineage
    if lineage is None or spilled is None:
        engine.resume(sequence)
        return None
    found = spill._read_file(engine, spilled)
    if isinstance(found, Miss):
        return found
    header, tensors = found
    if (
        not isinstance(header, SequenceHeader)
        or header.tokens != lineage.tokens.tolist()
        or tuple(header.evictions) != lineage.evictions
    ):
        raise KVError(f"{spilled.address} is not of sequence {sequence.number}", advice="give what preempt returned for it")
    sequence.attach(_adopt(engine, header, tensors, lineage.number))
    _equip(engine, sequence, header, tensors)
    if not spill.shelf.unpin(spilled.address):
        spill.shelf.drop(spilled.address)
    return None


def owner_of(session: Session) -> str:
    """What files say of the window that their sequence showed: tenant and session."""
    return f"{session.backend.tenant}/{session.name}"


def _forgotten_pages(session: Session) -> set[int]:
    with session.lock:
        return {page for page, state in session.window.states.items() if state.at == Place.DROPPED}


def _difference(part: PageHeader, table: Table, start: int) -> str:
    """Why a page that is put there would differ from one that had never left; empty if it would not.

    Whatever cannot be decided from tokens and evictions counts as a difference.
    """
    if start != part.start:
        return f"its keys were rotated by {start - part.start} positions, and it attended to what was before it there"
    if not part.context:
        return "something was inserted or compressed in its sequence before it was saved: what it attended to cannot be told"
    taints = sorted(why for why, since in table.altered.items() if why != Alteration.EVICTED and since < start)
    if taints:
        return f"the sequence was {' and '.join(taints)} before it: what it would attend to cannot be told"
    if context(table.tokens[:start] + array("i", part.tokens), table.evictions) != part.context:
        return "it was computed behind other tokens, or other evictions"
    return ""


def _draft_firsts(first: Mapping[int, tuple[int, Tensor]]) -> list[Draft]:
    """The keys before they were rotated, in the order of `Header.first`."""
    return [_draft("first", torch.stack([key for _, key in first.values()], dim=2))] if first else []


def _read_firsts(engine: Engine, header: Header, tensors: Mapping[str, Tensor]) -> dict[int, tuple[int, Tensor]]:
    """`CachedSequence.first` again, from a file."""
    if not header.first:
        return {}
    keys = tensors["first"].to(engine.weights.device)
    return {place: (shift, keys[:, :, row].clone()) for row, (place, shift) in enumerate(header.first.items())}


def _runs(positions: array[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open runs."""
    found: list[tuple[int, int]] = []
    start = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            found.append((positions[start], positions[place - 1] + 1))
            start = place
    return found


def _draft(name: str, tensor: Tensor) -> Draft:
    return Draft(name, tensor.dtype, tuple(tensor.shape), [tensor])


def _draft_kv(engine: Engine, physical: array[int]) -> Draft:
    """Keys and values of slots, layer by layer, so that not all of them are in memory twice."""
    shape, storage = engine.weights.shape, engine.storage
    storage.perform(engine.tables.copies)
    span = span_of(physical, engine.weights.device)

    def pieces() -> Iterator[Tensor]:
        for layer in range(shape.layers):
            yield from storage.read(layer, span)

    return Draft("kv", storage.dtype, (shape.layers, 2, shape.heads, len(physical), shape.dim), pieces())


def _write_slots(engine: Engine, span: Span, kv: Tensor, turn: Tensor | None = None) -> None:
    """Put keys and values of a file into slots, the keys rotated on where that is asked for."""
    weights, storage = engine.weights, engine.storage
    storage.perform(engine.tables.copies)
    for layer in range(weights.shape.layers):
        keys, values = kv[layer].to(weights.device)
        storage.write(layer, span, keys if turn is None else weights.rotate(keys, turn), values)


def _adopt(engine: Engine, header: SequenceHeader, tensors: Mapping[str, Tensor], number: int) -> Table:
    """A table for the content of a file, in new blocks."""
    positions = array("q")
    for start, stop in header.cached:
        positions.extend(range(start, stop))
    key = engine.key if header.shared else None
    lineage = TableLineage(
        number, key, array("i", header.tokens), tuple(header.evictions), header.pages, header.altered, header.stood
    )
    engine.reserve(-(-len(positions) // engine.pool.size), [])
    table = engine.tables.adopt(lineage, positions)
    try:
        _write_slots(engine, span_of(table.slots().physical, engine.weights.device), tensors["kv"])
    except BaseException:
        engine.tables.free(table)
        raise
    if table.key is not None and not table.altered:
        table.publish()
    return table


def _equip(engine: Engine, sequence: CachedSequence, header: SequenceHeader, tensors: Mapping[str, Tensor]) -> None:
    """Restore what a sequence has besides its table."""
    weights = engine.weights
    logits = tensors.get("logits")
    sequence.logits = logits.to(weights.device) if logits is not None else None
    sequence.shifts, sequence.first = dict(header.shifts), _read_firsts(engine, header, tensors)
    sequence.owners = frozenset(header.owners)
    sequence.packed = sequence.end if Alteration.COMPRESSED in header.altered else 0
    sequence.watch = None
    if header.watch is not None:
        sums, rows = header.watch
        watch = sequence.watch = AttentionWatch(weights.shape, weights.device, sums=sums, rows=rows)
        watch.restore(
            (tensors["received"].to(weights.device), tensors["queries"].to(weights.device), tensors["recent"].to(weights.device))
        )


def _fill_page(
    engine: Engine, sequence: CachedSequence, part: PageHeader, tensors: Mapping[str, Tensor], slots: array[int], start: int
) -> None:
    """Write a page to slots that were taken for it, and note what the sequence has beside its table."""
    device = engine.weights.device
    count = len(part.tokens)
    turn = None
    if start != part.start:
        by = start - part.start
        turn = torch.tensor([by - part.shifts.get(place, 0) for place in range(part.start, part.start + count)], device=device)
    _write_slots(engine, span_of(slots, device), tensors["kv"], turn)
    for place in range(start, start + count):
        sequence.shifts.pop(place, None)
        sequence.first.pop(place, None)
    if turn is None:
        sequence.shifts.update(part.shifts)
        sequence.first.update(_read_firsts(engine, part, tensors))
    if sequence.watch is not None:
        # With the attention that the tokens had received, or none.
        received = tensors.get("received", torch.zeros((*sequence.watch.received.shape[:2], count)))
        queries = tensors.get("queries", torch.ones(count, dtype=torch.int64))
        sequence.watch.put(sequence.table.count(0, start), received.to(device), queries.to(device))
