"""A BERT encoder as an ONNX graph, made from its weights without torch: texts' token ids in, unit vectors out.

The graph's mean pooling and unit length are inside, so a caller handles no hidden states. Two thirds of the products
are of int8 numbers: weights have one scale a column, and activations one scale a token, so that a text's vector does not
depend on what else is in its batch (with the usual scale of a whole batch it moves by 0.05 in cosine). Queries, keys and
values stay float32, because the attention of short texts suffers from their rounding more than from all the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from kilburn.errors import MissingExtra

try:
    import numpy as np
    import onnx
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "onnx", "embed") from error


_GELU_FLOOR = 0.17
"""GELU never gives less than its negative."""


def read_tensors(path: Path) -> tuple[dict[str, Any], str]:
    """Return the float32 tensors of a safetensors file by name, and the text after them: the tokenizer, as JSON."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    head = json.loads(raw[8:begin].tobytes())
    head.pop("__metadata__", None)
    tensors = {}
    for name, entry in head.items():
        first, last = entry["data_offsets"]
        if entry["dtype"] == "F32":
            tensors[name] = raw[begin + first : begin + last].view(np.float32).reshape(entry["shape"])
    end = begin + max(entry["data_offsets"][1] for entry in head.values())
    return tensors, raw[end:].tobytes().decode("utf-8")


class OnnxGraph:
    """Builds the graph; `bytes` is the ONNX file.

    Args:
        tensors: of a BERT encoder, by their names in transformers.
        layers, heads, max_tokens: of the encoder.
        whole: whether to leave everything in float32.
        text: what to carry along, under `note` in the file's metadata.
    """

    def __init__(
        self, tensors: dict[str, Any], *, layers: int, heads: int, max_tokens: int, whole: bool = False, text: str = ""
    ) -> None:
        self._tensors, self._heads, self._whole = tensors, heads, whole
        self._nodes: list[Any] = []
        self._numbers: list[Any] = []
        numbers = {"one": 1, "half": 0.5, "least": _GELU_FLOOR, "tiny": 1e-9, "of127": 1 / 127, "of255": 1 / 255, "shift": 128.5}
        for name, value in numbers.items():
            self._put(name, np.float32(value))
        self._put("middle", np.uint8(128))
        state = self._embedding(max_tokens)
        for layer in range(layers):
            state = self._layer(f"encoder.layer.{layer}.", state)
        self._pool(state)
        self.bytes = self._model(text)

    def _embedding(self, max_tokens: int) -> str:
        """Add the normalised sum of word, position and type embeddings. Words are int8 with a scale each, because their table is
        by far the largest."""
        words = self._tensors["embeddings.word_embeddings.weight"]
        kind = self._tensors["embeddings.token_type_embeddings.weight"][0]
        if self._whole:
            word = self._op("Gather", self._put("words", words), "ids")
        else:
            scale = np.abs(words).max(1, keepdims=True) / 127
            rows = self._op("Gather", self._put("words", np.rint(words / scale).astype(np.int8)), "ids")
            scales = self._op("Gather", self._put("scales", scale), "ids")
            word = self._op("Mul", self._cast(rows, onnx.TensorProto.FLOAT), scales)
        places = self._put("places", self._tensors["embeddings.position_embeddings.weight"][:max_tokens] + kind)
        count = self._op("Shape", "ids", start=1, end=2)
        place = self._op("Slice", places, self._put("first", np.array([0])), count)
        return self._norm("embeddings.LayerNorm.", self._op("Add", word, place))

    def _layer(self, name: str, state: str) -> str:
        parts = [f"{name}attention.self.{part}." for part in ("query", "key", "value")]
        weight, bias = (np.concatenate([self._tensors[part + kind] for part in parts]) for kind in ("weight", "bias"))
        joined = self._op("MatMul", state, self._put(f"{name}qkv", weight.T))
        joined = self._op("Add", joined, self._put(f"{name}qkv.bias", bias))
        split = [f"{joined}.{part}" for part in "qkv"]
        self._nodes.append(onnx.helper.make_node("Split", [joined], split, axis=-1))
        mixed = self._op("MultiHeadAttention", *split, "", "mask", domain="com.microsoft", num_heads=self._heads)
        state = self._norm(
            f"{name}attention.output.LayerNorm.",
            self._op("Add", self._dense(f"{name}attention.output.dense.", mixed), state),
        )
        inner = self._op("Gelu", self._dense(f"{name}intermediate.dense.", state), domain="com.microsoft")
        return self._norm(
            f"{name}output.LayerNorm.", self._op("Add", self._dense(f"{name}output.dense.", inner, positive=True), state)
        )

    def _dense(self, name: str, state: str, *, positive: bool = False) -> str:
        """state x weight + bias. The bytes of a token are 0 to 255: around 128, or from `-_LEAST` on if nothing is less."""
        weight, bias = self._tensors[name + "weight"], self._tensors[name + "bias"]
        if self._whole:
            product = self._op("MatMul", state, self._put(name + "weight", weight.T))
            return self._op("Add", product, self._put(name + "bias", bias))
        scale = np.abs(weight).max(1) / 127
        rows = np.rint(weight / scale[:, None]).astype(np.int8)
        if positive:
            state = self._op("Add", state, "least")
            bias = bias - np.float32(_GELU_FLOOR) * (rows * scale[:, None]).sum(1)
            size, unit, middle = self._op("ReduceMax", state, axes=[-1], keepdims=1), "of255", "half"
        else:
            size, unit, middle = self._op("ReduceMax", self._op("Abs", state), axes=[-1], keepdims=1), "of127", "shift"
        size = self._op("Max", self._op("Mul", size, unit), "tiny")
        whole = self._cast(self._op("Add", self._op("Div", state, size), middle), onnx.TensorProto.UINT8)
        inputs = [whole, self._put(name + "weight", rows.T), "one", self._put(name + "scale", scale)]
        product = self._op("MatMulIntegerToFloat", *inputs, *([] if positive else ["middle"]), domain="com.microsoft")
        return self._op("Add", self._op("Mul", product, size), self._put(name + "bias", bias.astype(np.float32)))

    def _norm(self, name: str, state: str) -> str:
        gain, bias = (self._put(name + kind, self._tensors[name + kind]) for kind in ("weight", "bias"))
        return self._op("LayerNormalization", state, gain, bias, axis=-1, epsilon=1e-12)

    def _pool(self, state: str) -> None:
        """The sum over tokens that are no padding, at length 1: the mean has the same direction."""
        mask = self._op("Unsqueeze", self._cast("mask", onnx.TensorProto.FLOAT), self._put("last", np.array([-1])))
        total = self._op("ReduceSum", self._op("Mul", state, mask), self._put("tokens", np.array([1])), keepdims=0)
        self._nodes.append(onnx.helper.make_node("LpNormalization", [total], ["vectors"], axis=-1, p=2))

    def _model(self, text: str) -> bytes:
        make: ModuleType = onnx.helper
        inputs = [
            make.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["texts", "tokens"]),
            make.make_tensor_value_info("mask", onnx.TensorProto.INT32, ["texts", "tokens"]),
        ]
        output = make.make_tensor_value_info("vectors", onnx.TensorProto.FLOAT, ["texts", None])
        input_names = {name for node in self._nodes for name in node.input}
        numbers = [number for number in self._numbers if number.name in input_names]
        graph = make.make_graph(self._nodes, "bert", inputs, [output], numbers)
        sets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
        model = make.make_model(graph, opset_imports=sets, ir_version=8, producer_name="kilburn")
        make.set_model_props(model, {"note": text})
        data: bytes = model.SerializeToString()
        return data

    def _put(self, name: str, numbers: Any) -> str:
        self._numbers.append(onnx.numpy_helper.from_array(np.ascontiguousarray(numbers).reshape(np.shape(numbers)), name))
        return name

    def _cast(self, state: str, kind: int) -> str:
        return self._op("Cast", state, to=kind)

    def _op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"n{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name
