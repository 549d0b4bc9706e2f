"""all-MiniLM-L6-v2 on this machine: 384 numbers a text, by ONNX Runtime, without torch.

The weights come by `kilburn models pull minilm` and are turned into an ONNX file once, which is kept beside them with
its digest. Nothing is downloaded here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kilburn.errors import MissingExtra, ModelError, SpecError, Unavailable
from kilburn.file import write_file
from kilburn.models.download import digest, folder, locked, record_digest, recorded_digest
from kilburn.models.weights import catalogue, find
from kilburn.native import ending, inside, keep, load

_FILE = "all-MiniLM-L6-v2.kilburn-1.onnx"
"""Another graph gets another number, here and in the embedder's name."""
_MAX_TEXT_TOKENS = 256
_MAX_TEXT_CHARS = 16_384
"""Characters of a text that are read at most: its first 256 tokens are hardly longer."""
_TEXTS, _TOKENS = 64, 4096
"""The largest batch, padding included: what is faster than one by one, and still takes a few megabytes."""
_NEAR = 0.8
"""The share of the longest text of a batch that each of its texts has at least: padding costs what text does."""


class Minilm:
    """all-MiniLM-L6-v2, of which a text's first 256 tokens count.

    Args:
        version: of the graph; there is one so far. Vectors of different versions are never compared.
        threads: of the processor for one text or batch. Any number of threads may embed at the same time.

    Raises:
        SpecError: no such version.
        MissingExtra: the extra `embed` is not installed.
        Unavailable: the weights are not on this machine.
    """

    name = "minilm(version=1)"
    dimensions = 384

    def __init__(self, version: int = 1, *, threads: int = 1) -> None:
        if version != 1:
            raise SpecError(f"minilm has no version {version!r}", advice="use version 1")
        if threads < 1:
            raise SpecError(f"minilm with {threads} threads", advice="give 1 or more")
        # Looked for, and imported when they are needed: that takes a second.
        for module in ("numpy", "onnx", "tokenizers", "onnxruntime"):
            if find_spec(module) is None:
                raise MissingExtra(module, "embed")
        self._weights = find("minilm", "safetensors")
        self._threads = threads
        self._begin()

    def _begin(self) -> None:
        self._segment, self._lock = os.getpid(), threading.Lock()
        self._loaded: tuple[Any, Any] | None = None

    def embed(self, texts: Sequence[str]) -> Any:
        """Return a row of length 1 for each text. Any number of threads may call it.

        Raises:
            Unavailable: the weights are damaged, or cannot be read; or the program is ending.
            ModelError: ONNX Runtime failed.
        """
        np = import_module("numpy")
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        if not texts:
            return vectors
        session, tokenizer = self._load()
        runtime = import_module("onnxruntime")
        # What cannot be encoded (a lone surrogate in a query) is no reason to fail.
        readable = (text[:_MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8") for text in texts)
        with inside():
            tokens = [tokenizer.encode(text).ids for text in readable]
        for batch in _batches([len(ids) for ids in tokens]):
            ids = np.zeros((len(batch), len(tokens[batch[0]])), np.int64)
            mask = np.zeros(ids.shape, np.int32)
            for row, text in enumerate(batch):
                ids[row, : len(tokens[text])] = tokens[text]
                mask[row, : len(tokens[text])] = 1
            how = runtime.RunOptions()
            with inside(partial(setattr, how, "terminate", True)):
                try:
                    vectors[batch] = session.run(None, {"ids": ids, "mask": mask}, how)[0]
                except Exception as error:  # ONNX Runtime's errors share no class of their own
                    if ending():
                        raise Unavailable("the program is ending", advice="the next one embeds what is left") from None
                    raise ModelError(f"minilm: {error}", advice="a smaller batch may do, or less load") from error
        return vectors

    def _load(self) -> tuple[Any, Any]:
        if self._segment != os.getpid():
            # The runtime's threads stayed with the parent of a fork.
            self._begin()
        with self._lock:
            if self._loaded is None:
                self._loaded = self._open(self._graph())
            return self._loaded

    def _open(self, graph: bytes) -> tuple[Any, Any]:
        runtime, tokenizers = load("onnxruntime"), load("tokenizers")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        # A thread without work must sleep: embedding goes on in the background of an agent.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with inside():
            session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        keep(session)
        tokenizer = tokenizers.Tokenizer.from_str(session.get_modelmeta().custom_metadata_map["note"])
        tokenizer.no_padding()
        tokenizer.enable_truncation(_MAX_TEXT_TOKENS)
        return session, tokenizer

    def _graph(self) -> bytes:
        """Return the ONNX file: the stored one, or a new one if that is missing or damaged."""
        path = folder() / _FILE
        with suppress(OSError):
            stored_graph = path.read_bytes()
            if recorded_digest(path) == (hashlib.sha256(stored_graph).hexdigest(), len(stored_graph)):
                return stored_graph
        graph = self._build()
        # Without room or right to keep it, it is made again next time.
        with suppress(Unavailable), locked(path):
            with write_file(path, force=True, mode=0o644) as file:
                file.write(graph)
            record_digest(path, hashlib.sha256(graph).hexdigest(), len(graph))
        return graph

    def _build(self) -> bytes:
        listed = next(weights for weights in catalogue() if weights.name == "minilm")
        if digest(self._weights) != listed.sha256:
            problem = f"{self._weights} is damaged: its bytes are not those that were pulled"
            raise Unavailable(problem, advice="remove it, then: kilburn models pull minilm")
        # It imports NumPy, which this module must do without while its name is only looked up.
        bert = load("kilburn.search.bert")
        with inside():
            tensors, tokenizer = bert.read_tensors(self._weights)
        whole = not _sums_exactly()
        with inside():
            graph: bytes = bert.OnnxGraph(
                tensors, layers=6, heads=12, max_tokens=_MAX_TEXT_TOKENS, whole=whole, text=tokenizer
            ).bytes
        return graph


def _sums_exactly() -> bool:
    """Whether this processor adds products of int8 numbers without overflow. Some older ones, without VNNI, do not."""
    np, runtime, onnx = (load(name) for name in ("numpy", "onnxruntime", "onnx"))
    make = onnx.helper
    operand = make.make_tensor_value_info("left", onnx.TensorProto.UINT8, [8, 384])
    product = make.make_tensor_value_info("product", onnx.TensorProto.INT32, [8, 32])
    weights = onnx.numpy_helper.from_array(np.full((384, 32), 127, np.int8), "right")
    node = make.make_node("MatMulInteger", ["left", "right"], ["product"])
    graph = make.make_graph([node], "probe", [operand], [product], [weights])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    with inside():
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        sums = session.run(None, {"left": np.full((8, 384), 255, np.uint8)})[0]
    return bool((sums == 255 * 127 * 384).all())


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yield the indexes of texts to embed together, longest first, so that there is little padding."""
    order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
    while order:
        max_length = lengths[order[0]]
        max_texts = max(1, min(_TEXTS, _TOKENS // max_length))
        count = sum(lengths[text] >= _NEAR * max_length for text in order[:max_texts])
        yield order[:count]
        order = order[count:]
