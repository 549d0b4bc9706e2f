"""Sequences in one context of llama.cpp: the moves of `kilburn_kv.engine`, on a serving engine.

`LlamaSequence.exact` says whether a result is exact. Calls for which llama.cpp would end the process, or silently
change another sequence too, raise before llama.cpp is called. There is no sampling and no scheduling: `prefill` gives
the logits of the next token, for one sequence at a time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from kilburn.errors import FreedSequence, InvalidRange, KVError, OutOfBlocks, SpecError, SpillFailed, Unavailable
from kilburn_kv.llama.cells import Cells
from kilburn_kv.llama.context import Context
from kilburn_kv.llama.sequence import CacheChange, ChangeKind, LlamaSequence
from kilburn_kv.llama.states import SavedState, States
from kilburn_kv.prefixes import PrefixKey

__all__ = ["Llama"]

_SEQUENCES = 255
"""One fewer than llama.cpp's limit: the last sequence is kept for `_apply_shift`."""


_TOKENS = 1 << 24
"""Larger than any machine's memory; llama.cpp counts in 32 bits."""


class _About(msgspec.Struct, frozen=True):
    """How a saved sequence came to be."""

    positions: list[int]
    taken: list[int]
    moves: list[CacheChange]
    exact: bool
    logits: int


class Llama:
    """A model and its sequences, until `close`. Safe for several threads, which wait for each other.

    Args:
        path: of a GGUF file whose layers all attend to everything (`kilburn.models.weights.find` knows some).
        tokens: that all sequences may have cached together; llama.cpp rounds up. What a fork shares counts once.
        sequences: how many may live at a time, 1 to 255.
        batch: tokens that run at a time. Borders between batches lie at its multiples, counted from position 0, so that
            equal calls split a prompt alike: another split moves logits.
        threads: None takes one a core.
        folder: where `save` writes; `save` and `restore` need it.
        tenant: whose states these are; another tenant's are a miss.

    Raises:
        MissingExtra: llama-cpp-python is not installed.
        Unavailable: no such file, or llama.cpp cannot load it.
        SpecError: a model of another kind, or more than there is memory for.
    """

    def __init__(
        self,
        path: str | Path,
        tokens: int = 4096,
        *,
        sequences: int = 8,
        batch: int = 512,
        threads: int | None = None,
        folder: str | Path | None = None,
        tenant: str = "",
    ) -> None:
        threads = threads or os.cpu_count() or 1
        if not (0 < tokens < _TOKENS and 0 < sequences <= _SEQUENCES and 0 < batch < 1 << 20 and threads > 0):
            raise SpecError(
                f"no context has tokens={tokens}, sequences={sequences}, batch={batch}, threads={threads}",
                advice=f"give at least 1 of each, and at most {_SEQUENCES} sequences",
            )
        self._path = Path(path)
        # Room for the one token of `_apply_shift`, so that a full context can still shift.
        self._context = Context(self._path, tokens + 1, sequences + 1, batch, threads)
        self._cells = Cells(self._context.cells - 1)
        self._sequences: dict[int, LlamaSequence] = {}
        self._lock = threading.RLock()
        self._most, self._batch = sequences, batch
        self._folder, self._tenant = None if folder is None else Path(folder), tenant

    @property
    def capacity(self) -> int:
        """Tokens that can be cached."""
        return self._cells.capacity

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be cached."""
        return self._cells.free

    @cached_property
    def states(self) -> States:
        """Where sequences are saved, under the model's digest, the tenant and the version of llama-cpp-python.

        Raises:
            SpecError: no folder was named.
        """
        if self._folder is None:
            raise SpecError("this engine has no folder for states", advice="open it with folder=")
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return States(self._folder, PrefixKey(digest, "f16", self._tenant), f"llama-cpp-python {self._context.version}")

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The model's tokens of a text, nothing put before it; `special` reads what looks like a control token as one."""
        with self._lock:
            self._check()
            return self._context.tokenize(text, special=special)

    def open(self, prompt: Sequence[int] = ()) -> LlamaSequence:
        """A new sequence, prefilled with a prompt.

        Raises:
            OutOfBlocks: too many tokens or sequences; nothing was opened. SpecError: a token that the model has not.
        """
        with self._lock:
            self._check()
            made = LlamaSequence(self._free_number())
            self._sequences[made.number] = made
            try:
                self.prefill(made, prompt)
            except BaseException:
                self.free(made)
                raise
            return made

    def fork(self, sequence: LlamaSequence) -> LlamaSequence:
        """A new sequence with the same past, in the same cells: nothing is copied, and nothing ever has to be.

        Raises:
            FreedSequence: there is nothing to fork. OutOfBlocks: too many sequences.
        """
        with self._lock:
            self._check(sequence)
            made = sequence.copy(self._free_number())
            self._context.copy(sequence.number, made.number)
            self._cells.share(made.cells)
            self._sequences[made.number] = made
            return made

    def free(self, sequence: LlamaSequence) -> None:
        """Free the cells that no fork shares.

        Raises:
            FreedSequence: it was freed before.
        """
        with self._lock:
            self._check(sequence)
            self._context.remove(sequence.number, -1, -1)
            self._cells.drop(sequence.cells)
            sequence.is_live, sequence.logits = False, None
            del self._sequences[sequence.number]

    def prefill(self, sequence: LlamaSequence, tokens: Sequence[int]) -> None:
        """Append tokens; afterwards `sequence.logits` are those of the next token.

        Raises:
            OutOfBlocks, SpecError, FreedSequence: nothing was appended. After OutOfBlocks, evict or free something.
        """
        with self._lock:
            self._check(sequence)
            wanted = array("i", self._check_tokens(tokens))
            if not wanted:
                return
            if len(wanted) > self._cells.free:
                raise self._out_of_cells(len(wanted))
            self._run(sequence, wanted)
            sequence.take(wanted, self._cells.take(len(wanted)))
            sequence.logits = self._context.logits()

    def evict(self, sequence: LlamaSequence, start: int, stop: int) -> int:
        """Drop the keys and values of positions (half-open); all others keep theirs, and nothing is computed.

        Forks keep what they share. Returns how many were cached.

        Raises:
            InvalidRange: no such range, or the last token would leave and others stay. FreedSequence. Nothing was
                dropped.
        """
        with self._lock:
            self._check(sequence)
            part = sequence.evictable(start, stop)
            if part:
                self._remove(sequence, part, start, stop)
                sequence.drop(part, CacheChange(ChangeKind.EVICT, len(sequence.taken), start, stop))
            return len(part)

    def truncate(self, sequence: LlamaSequence, position: int) -> int:
        """Go back to a branch point: all from this position on is dropped; returns how many were cached.

        Raises:
            InvalidRange: the sequence is not that long, or the token before was evicted. FreedSequence. Nothing was dropped.
        """
        with self._lock:
            self._check(sequence)
            part = sequence.cuttable(position)
            if part:
                self._remove(sequence, part, position, -1)
            sequence.back(part, position)
            return len(part)

    def shift(self, sequence: LlamaSequence, start: int, stop: int, delta: int) -> int:
        """Move cached tokens to other positions and rotate their keys; returns how many.

        This is not exact: keys are rounded to 16 bits again, and were computed at their old positions. Moving back
        does not undo it.

        Raises:
            InvalidRange: no such range; they would meet others; or a fork has some of them, whose positions would move too.
            KVError: llama.cpp cannot shift this model. FreedSequence. Nothing was moved.
        """
        with self._lock:
            self._check(sequence)
            if not self._context.can_shift:
                raise KVError("llama.cpp cannot shift the positions of this model", advice="prefill what follows again")
            part = sequence.movable(start, stop, delta)
            if not part or not delta:
                return 0
            if self._cells.are_shared(sequence.cells[part.start : part.stop]):
                raise InvalidRange(
                    f"a fork shares cells of {start} to {stop} with sequence {sequence.number}, and would be moved too",
                    advice="free the fork, or save and restore one of the two",
                )
            self._context.shift(sequence.number, start, stop, delta)
            sequence.move(part, CacheChange(ChangeKind.SHIFT, len(sequence.taken), start, stop, delta))
            self._apply_shift()
            return len(part)

    def save(self, sequence: LlamaSequence) -> SavedState:
        """Write a sequence to the folder; `restore` takes the name. Equal histories have equal names.

        Raises:
            SpillFailed: it could not be written; the sequence is as it was. InvalidRange: nothing is cached.
                FreedSequence.
            SpecError: no folder was named.
        """
        with self._lock:
            self._check(sequence)
            if not len(sequence):
                raise InvalidRange(f"sequence {sequence.number} has nothing cached", advice="prefill it first")
            states = self.states
            name = states.name(sequence.taken, sequence.changes)
            logits = sequence.logits or array("f")
            with states.writing(name) as place:
                state = self._context.state(sequence.number)
                if not state:
                    raise SpillFailed(f"llama.cpp cannot write sequence {sequence.number}", advice="keep it, or prefill it again")
                with place.open("xb") as file:
                    file.write(logits)
                    file.write(state)
                size = len(logits) * logits.itemsize
                about = _About(list(sequence.positions), list(sequence.taken), sequence.changes, sequence.exact, size)
                return states.commit(place, name, sequence.tokens, about)

    def restore(self, name: str) -> LlamaSequence | None:
        """A new sequence from what `save` wrote under this name; None if it is missing, damaged, or of another model or
        tenant.

        The keys and values, and the next logits, are those that were saved, bit for bit. Later logits have the same
        bits only if the sequence was exact before and is exact now: see `LlamaSequence.exact`. A sequence that was
        evicted from is not, because llama.cpp closes its gaps.

        Raises:
            OutOfBlocks: no room; nothing changed. SpecError: no folder was named.
        """
        with self._lock:
            self._check()
            with self.states.reading(name) as found:
                if found is None:
                    return None
                record, file = found
                if len(record.tokens) > self._cells.free:
                    raise self._out_of_cells(len(record.tokens))
                number = self._free_number()
                state = bytearray(record.bytes)
                with open(file, "rb", closefd=False) as whole:
                    whole.readinto(state)
            about = msgspec.json.decode(record.about, type=_About)
            logits = array("f")
            logits.frombytes(state[: about.logits])
            del state[: about.logits]
            if not self._context.restore(number, state):
                self._context.remove(number, -1, -1)
                return None
            made = LlamaSequence(number)
            made.load(record.tokens, about.positions, self._cells.take(len(record.tokens)), exact=about.exact)
            made.taken, made.changes = array("i", about.taken), about.moves
            made.logits = logits or None
            self._sequences[number] = made
            return made

    def close(self) -> None:
        """Free the model and all sequences; everything raises from then on. May be called twice."""
        with self._lock:
            for sequence in self._sequences.values():
                sequence.is_live = False
            self._sequences.clear()
            self._context.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, sequence: LlamaSequence, tokens: array[int]) -> None:
        """Run tokens in llama.cpp, or leave the sequence as it was."""
        end, done = sequence.end, 0
        try:
            while done < len(tokens):
                piece = tokens[done : done + self._batch - (end + done) % self._batch]
                status = self._context.decode(sequence.number, piece, end + done)
                if status == 1:
                    raise self._out_of_cells(len(tokens))
                if status:
                    raise Unavailable(f"llama.cpp could not decode: status {status}", advice="free some memory, or open it anew")
                done += len(piece)
        except BaseException:
            # The first of several batches may be done; an interrupt comes between batches.
            self._context.remove(sequence.number, end, -1)
            raise

    def _apply_shift(self) -> None:
        """Rotate shifted keys now. llama.cpp does so only when it next decodes, and would save the old keys before that."""
        status = self._context.decode(self._most, array("i", [0]), 0)
        self._context.remove(self._most, -1, -1)
        if status:
            raise Unavailable(f"llama.cpp could not shift: status {status}", advice="free the sequence")

    def _remove(self, sequence: LlamaSequence, part: range, start: int, stop: int) -> None:
        self._context.remove(sequence.number, start, stop)
        self._cells.drop(sequence.cells[part.start : part.stop])

    def _free_number(self) -> int:
        for number in range(self._most):
            if number not in self._sequences:
                return number
        raise OutOfBlocks(f"all {self._most} sequences are in use", needed=1, advice="free one, or open the engine with more")

    def _check_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        size = self._context.vocabulary
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < size):
            raise SpecError(f"a token id outside 0 to {size - 1}", advice="use this model's own tokenizer")
        return tokens

    def _out_of_cells(self, needed: int) -> OutOfBlocks:
        return OutOfBlocks(
            f"{needed} cells are needed, {self._cells.free} of {self._cells.capacity} are free",
            needed=needed,
            advice="evict, free or save a sequence, or open the engine with more tokens",
        )

    def _check(self, sequence: LlamaSequence | None = None) -> None:
        if not self._context.is_open:
            raise Unavailable("this llama.cpp was closed", advice="open it anew")
        if sequence is not None and self._sequences.get(sequence.number) is not sequence:
            raise FreedSequence(f"sequence {sequence.number} was freed, or is not of this engine", advice="open it anew")
