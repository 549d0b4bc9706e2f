"""llama.cpp as llama-cpp-python binds it: one model, its KV cells, and the calls that move them.

A wrong argument to llama.cpp ends the process, so only `kilburn_kv.llama.engine` may call this, which checks first.
Nothing is printed.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn.errors import MissingExtra, SpecError, Unavailable
from kilburn.native import inside, load

_SPINS = "2000"
"""How many turns a thread spins at a barrier before it sleeps. libgomp's default of millions brings two cores with other
work to a standstill."""

_OFF = 0
"""LLAMA_FLASH_ATTN_TYPE_DISABLED, in every version that has it."""

_complaints: deque[str] = deque(maxlen=8)
"""The last error message of llama.cpp: the only place where it says why it could not load a model."""

_keep: list[object] = []
"""The callback that llama.cpp logs to. If it were garbage-collected while it is set, the next line would end the
session."""


class Context:
    """One model and its cells, until `close`.

    Not safe for several threads: the caller holds a lock.

    Attributes:
        cells: tokens that it can hold, over all sequences.
        vocabulary: token ids lie below it.
        version: of llama-cpp-python: another version may write states in another format.
    """

    def __init__(self, path: Path, cells: int, sequences: int, batch: int, threads: int) -> None:
        api = self._api = _load_library()
        _complaints.clear()
        model, context = _open(api, path, _context_settings(api, cells, sequences, batch, threads))
        # One token of room more than is used, because an empty batch cannot be allocated.
        self._batch = api.llama_batch_init(batch, 0, 1)
        self._context = context
        self._memory = api.llama_get_memory(context)
        self._free = weakref.finalize(self, _free_all, api, self._batch, context, model)
        self._words = api.llama_model_get_vocab(model)
        self.cells: int = api.llama_n_ctx(context)
        self.vocabulary: int = api.llama_vocab_n_tokens(self._words)
        self.can_shift: bool = api.llama_memory_can_shift(self._memory)
        self.version: str = importlib.import_module("llama_cpp").__version__

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._free.alive

    def decode(self, sequence: int, tokens: Sequence[int], position: int) -> int:
        """Append tokens to a sequence; afterwards `logits` are those of the next token. Returns llama.cpp's status: 0 is
        success, 1 means no cells."""
        batch = self._batch
        count = batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index == count - 1
        with inside():
            status: int = self._api.llama_decode(self._context, batch)
        return status

    def logits(self) -> array[float]:
        """Of what follows the last token that ran."""
        found = array("f")
        found.frombytes(ctypes.string_at(self._api.llama_get_logits_ith(self._context, -1), self.vocabulary * found.itemsize))
        return found

    def remove(self, sequence: int, start: int, stop: int) -> None:
        """Remove positions from a sequence; cells without another owner become free."""
        self._api.llama_memory_seq_rm(self._memory, sequence, start, stop)

    def copy(self, sequence: int, to: int) -> None:
        """Make another sequence an owner of all cells of a sequence."""
        self._api.llama_memory_seq_cp(self._memory, sequence, to, -1, -1)

    def shift(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """Move positions, for all owners of those cells; the keys are rotated by the next `decode`, not before."""
        self._api.llama_memory_seq_add(self._memory, sequence, start, stop, delta)

    def state(self, sequence: int) -> bytearray:
        """The keys and values of a sequence as bytes; empty where llama.cpp could not write them."""
        size = self._api.llama_state_seq_get_size(self._context, sequence)
        found = bytearray(size)
        if size:
            place = (ctypes.c_uint8 * size).from_buffer(found)
            written = self._api.llama_state_seq_get_data(self._context, place, size, sequence)
            del place
            del found[written:]
        return found

    def restore(self, sequence: int, state: bytearray) -> bool:
        """Put what `state` returned into an empty sequence; False where there is no room for it."""
        place = (ctypes.c_uint8 * len(state)).from_buffer(state)
        return bool(self._api.llama_state_seq_set_data(self._context, place, len(state), sequence) == len(state))

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text; `special` reads what looks like a control token as one."""
        said = text.encode()
        room = len(said) + 8
        place = (ctypes.c_int32 * room)()
        count = self._api.llama_tokenize(self._words, said, len(said), place, room, False, special)
        return list(place[: max(count, 0)])

    def close(self) -> None:
        """Free it, once."""
        self._free()


def _load_library() -> Any:
    """llama-cpp-python's module of bound functions, quiet from now on."""
    patient = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if patient:
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        api = load("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise MissingExtra("llama_cpp", "llama") from error
    finally:
        if patient:
            del os.environ["GOMP_SPINCOUNT"]
    if not _keep:
        # Its own callback prints errors to stderr; the reasons for a failure are wanted in the error instead.
        importlib.import_module("llama_cpp._logger").logger.setLevel(logging.CRITICAL + 1)
        _keep.append(api.llama_log_callback(_note))
        api.llama_log_set(_keep[0], None)
        api.llama_backend_init()
    return api


def _note(level: int, text: bytes, _: object) -> None:
    if level in (3, 4) and text:
        _complaints.append(text.decode("utf-8", "replace").strip())


def _context_settings(api: Any, cells: int, sequences: int, batch: int, threads: int) -> Any:
    wanted = api.llama_context_default_params()
    wanted.n_ctx, wanted.n_seq_max = cells, sequences
    # One physical batch to each logical one: how a prompt is split is then decided in one place.
    wanted.n_batch = wanted.n_ubatch = batch
    wanted.n_threads = wanted.n_threads_batch = threads
    # One buffer for all sequences is what makes a copy free; flash attention would be slower without a GPU.
    wanted.kv_unified = True
    wanted.flash_attn_type = _OFF
    wanted.no_perf = True
    return wanted


def _open(api: Any, path: Path, wanted: Any) -> tuple[Any, Any]:
    """A loaded model and a context.

    The extra buffer types stay off: with those for AMX, llama.cpp built by gcc 12 dies in its first
    decode on a processor that has AMX.
    """
    if not path.is_file():
        raise Unavailable(f"no model file at {path}", advice="kilburn models pull smollm2, or give the path of a GGUF file")
    asked = api.llama_model_default_params()
    asked.use_extra_bufts = False
    model = api.llama_model_load_from_file(os.fsencode(path), asked)
    if not model:
        raise Unavailable(
            f"llama.cpp cannot load {path}: {_reason()}", advice="is it a whole GGUF file? kilburn models pull fetches it anew"
        )
    plain = api.llama_model_has_decoder(model) and not api.llama_model_has_encoder(model)
    if not plain or api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model) or api.llama_model_n_swa(model):
        api.llama_model_free(model)
        raise SpecError(f"{path.name} does not keep one cell a token", advice="use a model whose layers all attend to everything")
    head = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
    needed = 4 * wanted.n_ctx * api.llama_model_n_layer(model) * api.llama_model_n_head_kv(model) * head
    # llama.cpp writes zeros to all of its buffer, and the system may end a process that takes more than there is.
    fits = needed < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    context = api.llama_init_from_model(model, wanted) if fits else None
    if not context:
        api.llama_model_free(model)
        raise SpecError(f"llama.cpp cannot hold {wanted.n_ctx:,} tokens, {needed:,} bytes", advice="ask for fewer")
    return model, context


def _reason() -> str:
    return "; ".join(_complaints) or "it does not say why"


def _free_all(api: Any, batch: Any, context: Any, model: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
