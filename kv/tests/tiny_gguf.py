"""A GGUF file with random weights: llama.cpp runs thousands of its tokens in a second."""

from __future__ import annotations

from pathlib import Path

import numpy
from gguf import GGUFWriter

__all__ = ["VOCABULARY", "write"]

VOCABULARY = 97
_WIDTH, _HEADS, _SHARED, _HIDDEN, _LAYERS = 64, 4, 2, 96, 2


def write(path: Path, *, window: int = 0) -> Path:
    """Two layers with grouped heads; with a window, of a kind whose layers forget what lies further back."""
    kind = "gemma2" if window else "llama"
    rng = numpy.random.default_rng(7)
    writer = GGUFWriter(path, kind)
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_SHARED)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    if window:
        writer.add_sliding_window(window)
        writer.add_key_length(_WIDTH // _HEADS)
        writer.add_value_length(_WIDTH // _HEADS)

    def add(name: str, *shape: int) -> None:
        # Small where attention is decided, so that it is spread over many tokens and the order of its sums shows.
        scale = 0.05 if "attn_q" in name or "attn_k" in name else 0.3
        values = rng.normal(0, scale, shape) if len(shape) > 1 else numpy.ones(shape)
        writer.add_tensor(name, values.astype(numpy.float32))

    add("token_embd.weight", VOCABULARY, _WIDTH)
    add("output_norm.weight", _WIDTH)
    if not window:
        add("output.weight", VOCABULARY, _WIDTH)
    side = _WIDTH // _HEADS * _SHARED
    for layer in range(_LAYERS):
        names = ["attn_norm", "ffn_norm", *(["post_attention_norm", "post_ffw_norm"] if window else [])]
        for name in names:
            add(f"blk.{layer}.{name}.weight", _WIDTH)
        for name, rows, columns in (
            ("attn_q", _WIDTH, _WIDTH),
            ("attn_k", side, _WIDTH),
            ("attn_v", side, _WIDTH),
            ("attn_output", _WIDTH, _WIDTH),
            ("ffn_gate", _HIDDEN, _WIDTH),
            ("ffn_up", _HIDDEN, _WIDTH),
            ("ffn_down", _WIDTH, _HIDDEN),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
